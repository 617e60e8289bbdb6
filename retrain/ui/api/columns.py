"""``/api/columns``: metrics of runs as columns, for charts; only the newest rows on request."""

from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.ui.answers import Query, Refusal, json_route, plain
from retrain.ui.decimation import last_of_stretches, moving_average
from retrain.ui.library import Library
from retrain.ui.measured import points_of
from retrain.ui.numbers import AXES, UNPLACED, Numbers, axis_of, steps_of, xs_of
from retrain.ui.sources import Run

MOST_PLACES, MOST_KEYS, MOST_POINTS, MOST_SMOOTH = 64, 32, 20_000, 100_000
USUAL, FEWEST, TOGETHER = 1_000, 200, 16_000
"""Points of a line where the query does not say, and of all lines together: a chart has so many pixels."""


def routes(library: Library) -> list[Route]:
    def columns(query: Query) -> dict[str, Any]:
        places = query.texts("at", MOST_PLACES)
        keys, x = query.texts("key", MOST_KEYS), query.choice("x", AXES)
        runs = [run for place in places for run in library.home(place).runs]
        points = query.number("points", max(FEWEST, min(USUAL, TOGETHER // max(1, len(runs)))), 2, MOST_POINTS)
        since, smooth = query.number("since", 0, 0, 1 << 40), query.number("smooth", 1, 1, MOST_SMOOTH)
        return {"runs": [columns_of(library, run, keys, x, points, since, smooth) for run in runs]}

    return [json_route("/api/columns", columns)]


def columns_of(
    library: Library, run: Run, keys: list[str], x: str, points: int, since: int, smooth: int = 1
) -> dict[str, Any]:
    """Return one run's columns from row ``since`` on. Every row is smoothed over ``smooth`` steps; then at most
    ``points`` rows are kept, each with the least and greatest value since the one before it."""
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
                column = numbers.column(key)
                if not key.startswith("eval/"):
                    column = moving_average(steps_of(numbers), column, smooth)
                dense.append((key, column[since:][known]))
    if not known.all():
        head["note"] = f"there are {np.sum(~known)} {UNPLACED}"
        axis = axis[known]
    if not len(axis):
        nothing = {"y": [], "low": None, "high": None}
        return head | {"x": [], "columns": {key: nothing for key, _ in dense} | sparse}
    if len(axis) <= points:
        found = {key: {"y": plain(column), "low": None, "high": None} for key, column in dense}
        return head | {"x": plain(axis), "columns": found | sparse}
    shown = last_of_stretches(axis, points)[0]
    found = {key: _thinned(column, axis, points) for key, column in dense}
    return head | {"x": plain(axis[shown]), "columns": found | sparse}


def _thinned(column: np.ndarray, axis: np.ndarray, points: int) -> dict[str, Any]:
    """Return a column at the last row of each stretch of rows; with an ``x`` of its own where a stretch has values but
    none in its last row."""
    ends, places, low, high = last_of_stretches(column, points)
    extent = {"y": plain(column[places]), "low": plain(low), "high": plain(high)}
    return extent if np.array_equal(ends, places) else extent | {"x": plain(axis[places])}


def _evaluations(numbers: Numbers, key: str, x: str, since: int) -> dict[str, Any]:
    """The values of an evaluation at the x of the updates that were done then; the last one has no row."""
    steps, values = points_of(numbers, key)
    at = xs_of(numbers, x, steps, updates=True)
    chosen = (steps >= since) & np.isfinite(at)
    return {"x": plain(at[chosen]), "y": plain(values[chosen]), "low": None, "high": None}
