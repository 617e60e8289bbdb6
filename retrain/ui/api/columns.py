"""``/api/columns``: metrics of runs as columns, for charts; only a part of the axis, or only new rows, on request."""

import numpy as np

from retrain.ui.answers import ApiError, JsonObject, Query, plain
from retrain.ui.context import ApiContext
from retrain.ui.decimation import Smoothing, extremes
from retrain.ui.library import Library
from retrain.ui.lines import Window, inside, window_of_query
from retrain.ui.measured import points_of
from retrain.ui.numbers import AXES, UNPLACED, Numbers, axis_of, steps_of, xs_of
from retrain.ui.sources import RunSource

MOST_PLACES, MOST_KEYS, MOST_POINTS = 64, 32, 20_000
USUAL, FEWEST, TOGETHER = 1_000, 200, 16_000
"""Default number of points: of a line at most and at least, and of all lines together. A chart has about as many
pixels."""


def columns(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    places = query.texts("at", MOST_PLACES)
    keys, x = query.texts("key", MOST_KEYS), query.choice("x", AXES)
    runs = [run for location in places for run in library.home(location).runs]
    points = query.number("points", max(FEWEST, min(USUAL, TOGETHER // max(1, len(runs)))), 2, MOST_POINTS)
    since, smoothing = query.number("since", 0, 0, 1 << 40), Smoothing.parse(query.text("smooth", "none"))
    part = window_of_query(query)
    return {"runs": [columns_of(library, run, keys, x, points, since, smoothing, part) for run in runs]}


def columns_of(
    library: Library, run: RunSource, keys: list[str], x: str, points: int, since: int, smoothing: Smoothing,
    part: Window | None = None,
) -> JsonObject:  # fmt: skip
    """Return one run's columns from row ``since`` on, within ``part`` of the axis. All rows are smoothed, then thinned
    to about ``points``: each of equal stretches keeps the rows where the first column is least and greatest."""
    numbers = library.numbers(run)
    head = run.head
    with numbers.lock():
        head |= {"rows": len(numbers), "reading": numbers.reading, "note": None}
        try:
            steps = steps_of(numbers)
            axis = (steps if x == "step" else axis_of(numbers, x))[since:]
        except ApiError as error:
            return head | {"x": [], "columns": {}} | ({} if numbers.reading else {"error": error.text})
        finite = np.isfinite(axis)
        rows = np.flatnonzero(finite)[inside(axis[finite], part)]
        dense, sparse = {}, {}
        for key in keys:
            if key.startswith("eval/") and numbers.evaluations():
                sparse[key] = _evaluations(numbers, key, x, since, part)
                continue
            raw = numbers.column(key)
            is_raw = smoothing.is_none or key.startswith("eval/")
            values = raw if is_raw else smoothing.for_points(len(raw)).of(steps, raw)
            dense[key] = values[since:][rows], None if is_raw else raw[since:][rows]
    if not finite.all():
        head["note"] = f"there are {np.sum(~finite)} {UNPLACED}"
    axis = axis[rows]
    places = _places(next((values for values, _ in dense.values()), axis), points)
    columns = {key: _column(values, raw, axis, places, points) for key, (values, raw) in dense.items()}
    return head | {"x": plain(axis[places]), "columns": columns | sparse}


def _places(values: np.ndarray, most: int) -> np.ndarray:
    return extremes(values, most) if len(values) > most else np.arange(len(values))


def _column(values: np.ndarray, raw: np.ndarray | None, axis: np.ndarray, places: np.ndarray, most: int) -> JsonObject:
    """Return a column at the rows ``places``. A sparse column, which has few values at these rows, gets other rows and
    their ``x``."""
    known = np.isfinite(values)
    is_sparse = len(axis) > most and 2 * known[places].sum() < min(len(places), known.sum())
    own = _places(values, most) if is_sparse else places
    column: JsonObject = {"y": plain(values[own]), "raw": None if raw is None else plain(raw[own])}
    return column | {"x": plain(axis[own])} if is_sparse else column


def _evaluations(numbers: Numbers, key: str, x: str, since: int, part: Window | None) -> JsonObject:
    """Return the points of a held-out metric; the x of an evaluation is the end of the last update before it."""
    steps, values = points_of(numbers, key)
    at = xs_of(numbers, x, steps, updates=True)
    chosen = (steps >= since) & np.isfinite(at)
    at, values = at[chosen], values[chosen]
    cut = inside(at, part)
    return {"x": plain(at[cut]), "y": plain(values[cut]), "raw": None}
