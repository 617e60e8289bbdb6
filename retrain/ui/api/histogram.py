"""``/api/histogram``: a number of every rollout, at one step with the rollouts of each bin, or over the steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.records.histograms import counted, edges_of
from retrain.records.kinds import is_number
from retrain.records.schema.layout import TRAIN
from retrain.ui.answers import ApiError, Query, json_route, plain
from retrain.ui.decimation import evenly_spaced
from retrain.ui.iterations import Index, Iteration
from retrain.ui.library import Library

MOST_STEPS = 60


def routes(library: Library) -> list[Route]:
    def histogram(query: Query) -> dict[str, Any]:
        run, name = library.run(query.text("at")), query.text("metric")
        over, index = query.choice("over", ("step", "steps")), library.index(run)
        steps = sorted((one for (split, _), one in index.refresh().items() if split == TRAIN), key=_number)
        if not steps:
            raise ApiError(404, "this run has no files of rollouts")
        if over == "steps":
            return {"place": run.place} | over_steps(index, name, steps)
        step = query.number("step", steps[-1].number, 0, 1 << 40)
        near = min(steps, key=lambda one: abs(one.number - step))
        return {"place": run.place} | at_step(index, name, near)

    return [json_route("/api/histogram", histogram)]


def _number(one: Iteration) -> int:
    return one.number


def at_step(index: Index, name: str, one: Iteration) -> dict[str, Any]:
    rows = list(index.summaries(one))
    values = [value_of(row, name) for row in rows]
    known = np.array([value for value in values if value is not None], np.float64)
    edges = edges_of(known)
    return {
        "metric": name, "step": one.number, "edges": plain(edges), "counts": counted(known, edges),
        "names": names_in(rows),
        "rollouts": [
            {"group": row.get("group_idx"), "sample": row.get("traj_idx"), "value": value,
             "problem_id": row.get("problem_id"), "stop_reason": row.get("stop_reason"),
             "discarded": row.get("discarded")}
            for row, value in zip(rows, values, strict=True)
        ],
    }  # fmt: skip


def over_steps(index: Index, name: str, steps: list[Iteration]) -> dict[str, Any]:
    """Return counts [steps, bins] over at most ``MOST_STEPS`` steps with the same edges for all."""
    chosen = evenly_spaced(steps, MOST_STEPS)
    found = [np.array([value for row in index.summaries(one) if (value := value_of(row, name)) is not None], np.float64)
             for one in chosen]  # fmt: skip
    edges = edges_of(np.concatenate(found))
    counts = [counted(values, edges) for values in found]
    return {"metric": name, "steps": [one.number for one in chosen], "edges": plain(edges), "counts": counts}


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """Return a rollout's reward, advantage, length, prompt_length, turns, or a component or metric by its name."""
    steps = row["steps"]
    if name == "reward":
        value = row.get("total_reward")
    elif name == "length":
        value = sum(step.get("ac_len") or 0 for step in steps) if steps else None
    elif name == "prompt_length":
        value = steps[0].get("ob_len") if steps else None
    elif name == "turns":
        value = len(steps)
    else:
        value = row.get("advantage") if name == "advantage" else (row.get("trajectory_metrics") or {}).get(name)
    return float(value) if is_number(value) else None


def names_in(rows: list[dict[str, Any]]) -> list[str]:
    """Return the numbers of which there are histograms."""
    parts = dict.fromkeys(name for row in rows[:64] for name in row.get("trajectory_metrics") or ())
    return ["reward", "advantage", "length", "prompt_length", "turns", *parts]
