"""``/api/histogram``: a number of every rollout, at one step with the rollouts of each bin, or over the steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.record.rollout_files import SUMMARIES
from retrain.record.rollouts import TRAIN, batch_name
from retrain.ui.answers import Query, Refusal, json_route, plain
from retrain.ui.library import Library
from retrain.ui.sources import Run

BINS, MOST_STEPS, MOST_FILE = 24, 60, 64 << 20


def routes(library: Library) -> list[Route]:
    """The routes of this group."""

    def histogram(query: Query) -> dict[str, Any]:
        run, name = library.run(query.text("at")), query.text("metric")
        over = query.choice("over", ("step", "steps"))
        steps = sorted(step for split, step in library.index(run).refresh() if split == TRAIN)
        if not steps:
            raise Refusal(404, "this run has no files of rollouts")
        if over == "steps":
            return over_steps(library, run, name, steps)
        step = query.number("step", steps[-1], 0, 1 << 40)
        near = min(steps, key=lambda each: abs(each - step))
        return at_step(library, run, name, near)

    return [json_route("/api/histogram", histogram)]


def at_step(library: Library, run: Run, name: str, step: int) -> dict[str, Any]:
    """Bins of one step, and every rollout with its value."""
    rows = rollouts_of(library, run, step)
    values = [value_of(row, name) for row in rows]
    known = np.array([value for value in values if value is not None], np.float64)
    edges = edges_of(known)
    counts = np.histogram(known, edges)[0].tolist() if len(known) else [0] * (len(edges) - 1)
    return {
        "place": run.place, "metric": name, "step": step, "edges": plain(edges), "counts": counts,
        "names": names_in(rows),
        "rollouts": [
            {"group": row.get("group_idx"), "sample": row.get("traj_idx"), "value": value,
             "problem_id": row.get("problem_id"), "stop_reason": row.get("stop_reason"),
             "discarded": row.get("discarded")}
            for row, value in zip(rows, values, strict=True)
        ],
    }  # fmt: skip


def over_steps(library: Library, run: Run, name: str, steps: list[int]) -> dict[str, Any]:
    """Counts [steps, bins] over at most ``MOST_STEPS`` steps with the same edges for all."""
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(MOST_STEPS, len(steps))).astype(int))]
    found = [[value for row in rollouts_of(library, run, step) if (value := value_of(row, name)) is not None]
             for step in chosen]  # fmt: skip
    edges = edges_of(np.array([value for values in found for value in values], np.float64))
    counts = [np.histogram(values, edges)[0].tolist() for values in found]
    return {"place": run.place, "metric": name, "steps": chosen, "edges": plain(edges), "counts": counts}


def edges_of(values: np.ndarray) -> np.ndarray:
    """The ends of equal bins; one for each value where there are few, whole ones in the middle of theirs."""
    if not len(values):
        return np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, high + 0.5])
    whole = bool(np.all(values == np.rint(values))) and high - low < BINS
    return np.arange(low - 0.5, high + 1.0) if whole else np.linspace(low, high, BINS + 1)


def value_of(row: Mapping[str, Any], name: str) -> float | None:
    """One number of a rollout: reward, advantage, length, prompt_length, turns, or a component or metric by name."""
    steps = [step for step in row.get("steps") or () if isinstance(step, dict)]
    if name == "reward":
        value = row.get("total_reward")
    elif name == "length":
        value = sum(step.get("ac_len") or 0 for step in steps) if steps else None
    elif name == "prompt_length":
        value = steps[0].get("ob_len") if steps else None
    elif name == "turns":
        value = len(steps)
    else:
        metrics = row.get("trajectory_metrics")
        value = (
            row.get("advantage") if name == "advantage" else (metrics if isinstance(metrics, dict) else {}).get(name)
        )
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def names_in(rows: list[dict[str, Any]]) -> list[str]:
    """What there is a histogram of."""
    parts = dict.fromkeys(name for row in rows[:64] for name in row.get("trajectory_metrics") or ())
    return ["reward", "advantage", "length", "prompt_length", "turns", *parts]


def rollouts_of(library: Library, run: Run, step: int) -> list[dict[str, Any]]:
    """The summary lines of one step's rollouts, damaged ones left out."""
    path = library.file(run, f"{batch_name(TRAIN, step)}{SUMMARIES}")
    if path is None or path.stat().st_size > MOST_FILE:
        return []
    rows = []
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                if isinstance(row := json.loads(line), dict):
                    rows.append(row)
    return rows
