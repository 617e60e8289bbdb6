"""``/api/columns``: metrics of runs as columns, for charts; only the newest rows on request."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.ui.answers import Query, Refusal, json_route, plain
from retrain.ui.decimation import joined
from retrain.ui.library import Library
from retrain.ui.measured import points_of
from retrain.ui.numbers import AXES, UNPLACED, Numbers, axis_of, xs_of
from retrain.ui.sources import Run

MOST_PLACES, MOST_KEYS, MOST_POINTS = 64, 32, 20_000
USUAL, FEWEST, TOGETHER = 1_000, 200, 16_000
"""Points of a line where the query does not say, and of all lines together: a chart has so many pixels."""


def routes(library: Library) -> list[Route]:
    """The routes of this group."""

    def columns(query: Query) -> dict[str, Any]:
        places = query.texts("at", MOST_PLACES)
        keys, x = query.texts("key", MOST_KEYS), query.choice("x", AXES)
        runs = [run for place in places for run in library.home(place).runs]
        points = query.number("points", max(FEWEST, min(USUAL, TOGETHER // max(1, len(runs)))), 2, MOST_POINTS)
        since = query.number("since", 0, 0, 1 << 40)
        return {"runs": [columns_of(library, run, keys, x, points, since) for run in runs]}

    return [json_route("/api/columns", columns)]


def columns_of(library: Library, run: Run, keys: list[str], x: str, points: int, since: int) -> dict[str, Any]:
    """One run's columns from row ``since`` on, joined into at most ``points`` stretches."""
    numbers = library.numbers(run)
    head: dict[str, Any] = {"place": run.place, "label": run.label, "index": run.index, "seed": run.seed}
    with numbers.still():
        head |= {"rows": len(numbers), "reading": numbers.reading, "note": None}
        try:
            axis = axis_of(numbers, x)[since:]
        except Refusal as error:
            return head | {"x": [], "columns": {}} | ({} if numbers.reading else {"error": error.text})
        known = np.isfinite(axis)
        dense, sparse = [], {}
        for key in keys:
            if key.startswith("eval/") and numbers.evaluations():
                sparse[key] = _evaluations(numbers, key, x, since)
            else:
                dense.append((key, numbers.column(key)[since:][known]))
    if not known.all():
        head["note"] = f"there are {np.sum(~known)} {UNPLACED}"
        axis = axis[known]
    if not len(axis):
        nothing = {"y": [], "low": None, "high": None}
        return head | {"x": [], "columns": {key: nothing for key, _ in dense} | sparse}
    if len(axis) <= points:
        found = {key: {"y": plain(column), "low": None, "high": None} for key, column in dense}
        return head | {"x": plain(axis), "columns": found | sparse}
    axis, reduced = joined(axis, [column for _, column in dense], points)
    found = {
        key: {"y": plain(mean), "low": plain(low), "high": plain(high)}
        for (key, _), (mean, low, high) in zip(dense, reduced, strict=True)
    }
    return head | {"x": plain(axis), "columns": found | sparse}


def _evaluations(numbers: Numbers, key: str, x: str, since: int) -> dict[str, Any]:
    """The values of an evaluation at the x of the updates that were done then; the last one has no row."""
    steps, values = points_of(numbers, key)
    at = xs_of(numbers, x, steps, updates=True)
    chosen = (steps >= since) & np.isfinite(at)
    return {"x": plain(at[chosen]), "y": plain(values[chosen]), "low": None, "high": None}
