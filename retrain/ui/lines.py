"""Compute lines of a metric: smooth all rows of a run, cut them to a part of the x axis, then thin them.

A group of runs has a mean with the 95 % t interval over runs at each step, as in the curves of a report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.ui.answers import ApiError, JsonObject, Query, plain
from retrain.ui.decimation import MOST_POINTS, Smoothing, extremes
from retrain.ui.library import Library
from retrain.ui.measured import points_of
from retrain.ui.metrics import name_in
from retrain.ui.numbers import xs_of
from retrain.ui.sources import RunSource
from retrain.verdicts.evidence import interval_of_means
from retrain.verdicts.results import Measure

MEAN_POINTS = 320  # Points of a mean and its band
ALL_POINTS = 16_000  # Points of the lines of all runs together
BANDS = ("interval", "range")
Window = tuple[float, float]  # Part of the x axis, both ends included


@dataclass
class Line:
    """One run's line at ``steps``: ``values`` smoothed, ``raw`` as recorded, ``xs`` positions on the x axis."""

    run: RunSource
    steps: np.ndarray
    values: np.ndarray
    raw: np.ndarray
    xs: np.ndarray
    left_out: int = 0  # Points whose position on the x axis was not recorded


def window_of_query(query: Query) -> Window | None:
    """Return the range of x from the query's parameters ``from`` and ``to``, None without them. Raises ApiError
    (400)."""
    low, high = query.real("from"), query.real("to")
    if low is None and high is None:
        return None
    window = -math.inf if low is None else low, math.inf if high is None else high
    if window[0] > window[1]:
        raise ApiError(400, "from is to be no more than to: both are places on the x axis")
    return window


def inside(xs: np.ndarray, part: Window | None) -> slice:
    """Return the slice of the points in ``part`` and one more on either side, so that lines reach its edges."""
    if part is None:
        return slice(None)
    first, over = np.searchsorted(xs, part[0], "left"), np.searchsorted(xs, part[1], "right")
    return slice(max(0, int(first) - 1), int(over) + 1)


def lines_of(
    library: Library, runs: Sequence[RunSource], key: str, x: str, smoothing: Smoothing
) -> tuple[dict[str, Line], Smoothing]:
    lines = {run.location: line for run in runs if (line := _line_of(library, run, key, x)) is not None}
    smoothing = smoothing.for_points(max((len(line.steps) for line in lines.values()), default=0))
    for line in lines.values():
        line.values = smoothing.of(line.steps, line.raw)
    return lines, smoothing


def _line_of(library: Library, run: RunSource, key: str, x: str) -> Line | None:
    numbers = library.numbers(run)
    with numbers.lock():
        key = name_in(key, numbers.keys)
        steps, values = points_of(numbers, key)
        if not len(steps):
            return None
        if (np.diff(steps) <= 0).any():  # another tool's run that was resumed: the last row of a step counts
            steps, last = np.unique(steps[::-1], return_index=True)
            values = values[::-1][last]
        xs = xs_of(numbers, x, steps, updates=Measure(key=key).is_held_out)
    finite = np.isfinite(xs)
    if not finite.any():
        return None
    return Line(run, steps[finite], values[finite], values[finite], xs[finite], int(np.sum(~finite)))


def most_points(lines: int) -> int:
    """Return the number of points of each line if ``lines`` lines are shown together."""
    return max(200, min(MOST_POINTS, ALL_POINTS // max(1, lines)))


def run_line(line: Line, most: int, part: Window | None) -> JsonObject:
    cut = inside(line.xs, part)
    xs, values, raw = line.xs[cut], line.values[cut], line.raw[cut]
    chosen = extremes(values, most)
    return {
        "place": line.run.location, "label": line.run.label, "seed": line.run.seed, "state": line.run.state,
        "points": table(xs[chosen], values[chosen]), "raw": plain(raw[chosen]),
    }  # fmt: skip


def mean_and_band(lines: Sequence[Line], share: bool, part: Window | None, band: str = "interval") -> JsonObject:
    """Return the mean over runs at the steps that all of them have, within ``part`` of the x axis.

    Keys: ``mean`` [x, y], ``raw`` (mean of unsmoothed values), ``band`` [x, low, high], ``n`` (number of runs) and
    ``of`` (which runs: "finished", or "all" if none is). The band is the 95 % interval (three runs or more; clipped to
    [0, 1] for a ``share``), or with "range" the least and the greatest value.
    """
    finished = [line for line in lines if line.run.state == "done"]
    chosen, of = (finished, "finished") if finished else (list(lines), "all")
    answer: JsonObject = {"mean": [], "raw": [], "band": [], "of": of, "n": len(chosen)}
    if not chosen:
        return answer
    _, rows = _common(chosen)
    xs, values, raw = (
        np.array([getattr(line, name)[at] for line, at in zip(chosen, rows, strict=True)])
        for name in ("xs", "values", "raw")
    )
    cut = inside(xs.mean(axis=0), part)
    xs, values, raw = xs.mean(axis=0)[cut], values[:, cut], raw[:, cut]
    if not len(xs):
        return answer
    mean = values.mean(axis=0)
    places = extremes(mean, MEAN_POINTS)
    xs, mean, values = xs[places], mean[places], values[:, places]
    answer |= {"mean": table(xs, mean), "raw": plain(raw[:, places].mean(axis=0))}
    if band == "range" and len(chosen) > 1:
        answer["band"] = table(xs, values.min(axis=0), values.max(axis=0))
    elif band == "interval" and (ends := interval_of_means(values, share)) is not None:
        answer["band"] = table(xs, *ends)
    return answer


def _common(lines: Sequence[Line]) -> tuple[np.ndarray, list[np.ndarray | slice]]:
    common = lines[0].steps
    for line in lines[1:]:
        if not np.array_equal(common, line.steps):  # usually they have the same
            common = np.intersect1d(common, line.steps)
    same = len(common)
    return common, [slice(None) if len(x.steps) == same else np.searchsorted(x.steps, common) for x in lines]


def paired(lines: Sequence[Line], baseline: Sequence[Line]) -> list[Line]:
    """Return the differences of runs to the baseline's run of the same seed, at the steps that both have. If both runs
    of any pair are finished, only finished pairs are returned."""
    base = {line.run.seed or 0: line for line in baseline}
    pairs = [(line, base[line.run.seed or 0]) for line in lines if (line.run.seed or 0) in base]
    both = [pair for pair in pairs if all(line.run.state == "done" for line in pair)]
    differences = []
    for mine, other in both or pairs:
        steps, (a, b) = _common([mine, other])
        if len(steps):
            values, raw = mine.values[a] - other.values[b], mine.raw[a] - other.raw[b]
            differences.append(Line(mine.run, steps, values, raw, mine.xs[a]))
    return differences


def counts(lines: Sequence[Line], part: Window | None) -> list[list[float | None]]:
    """Return [x, number of lines that have a value there] at every x where the number changes."""
    if not lines:
        return []
    longest = max(lines, key=lambda line: line.steps[-1])
    if all(np.array_equal(line.steps, longest.steps) for line in lines):
        xs, count = longest.xs, np.full(len(longest.xs), len(lines))
    else:
        steps, count = np.unique(np.concatenate([line.steps for line in lines]), return_counts=True)
        xs = np.interp(steps, longest.steps, longest.xs)
    cut = inside(xs, part)
    xs, count = xs[cut], count[cut]
    places = np.unique(np.append(np.flatnonzero(np.diff(count, prepend=-1)), len(xs) - 1))[-MEAN_POINTS:]
    return table(xs[places], count[places])


def table(*columns: np.ndarray) -> list[list[float | None]]:
    return [list(row) for row in zip(*map(plain, columns), strict=True)]
