"""``/api/histogram``: histogram of a number of each rollout, at one step (with the rollouts) or over the steps."""

from collections.abc import Sequence

import numpy as np

from retrain.records.histograms import counted, edges_of
from retrain.records.kinds import is_number
from retrain.records.schema.base import Row
from retrain.records.schema.layout import TRAIN
from retrain.ui.answers import ApiError, JsonObject, Query, plain
from retrain.ui.context import ApiContext
from retrain.ui.decimation import evenly_spaced
from retrain.ui.iterations import Index, IterationEntry

MOST_STEPS = 60
NAMES = ("reward", "advantage", "length", "prompt_length", "turns")


def histogram(context: ApiContext, query: Query) -> JsonObject:
    run, name = context.library.run(query.text("at")), query.text("metric")
    over, index = query.choice("over", ("step", "steps")), context.library.index(run)
    steps = sorted(index.of_split(TRAIN), key=lambda iteration: iteration.number)
    if not steps:
        raise ApiError(404, "this run has no files of rollouts")
    if over == "steps":
        return {"place": run.location} | over_steps(index, name, steps)
    step = query.number("step", steps[-1].number, 0, 1 << 40)
    nearest = min(steps, key=lambda iteration: abs(iteration.number - step))
    return {"place": run.location} | at_step(index, name, nearest)


def at_step(index: Index, name: str, iteration: IterationEntry) -> JsonObject:
    rows = list(index.summaries(iteration))
    values = [value_of(row, name) for row in rows]
    finite = np.array([value for value in values if value is not None], np.float64)
    edges = edges_of(finite)
    metrics = dict.fromkeys(name for row in rows[:64] for name in row.get("trajectory_metrics") or ())
    return {
        "metric": name, "step": iteration.number, "edges": plain(edges), "counts": counted(finite, edges),
        "names": [*NAMES, *metrics],
        "rollouts": [
            {"group": row.get("group_idx"), "sample": row.get("traj_idx"), "value": value,
             "problem_id": row.get("problem_id"), "stop_reason": row.get("stop_reason"),
             "discarded": row.get("discarded")}
            for row, value in zip(rows, values, strict=True)
        ],
    }  # fmt: skip


def over_steps(index: Index, name: str, steps: Sequence[IterationEntry]) -> JsonObject:
    """Return counts [steps, bins] over at most ``MOST_STEPS`` steps with the same edges for all."""
    chosen = evenly_spaced(steps, MOST_STEPS)
    by_step = [np.array([value for row in index.summaries(iteration) if (value := value_of(row, name)) is not None],
                        np.float64) for iteration in chosen]  # fmt: skip
    edges = edges_of(np.concatenate(by_step))
    counts = [counted(values, edges) for values in by_step]
    return {"metric": name, "steps": [one.number for one in chosen], "edges": plain(edges), "counts": counts}


def value_of(row: Row, name: str) -> float | None:
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
