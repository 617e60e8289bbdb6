"""``/api/curves``: a metric by condition, its mean with the interval over seeds, and its differences to the baseline.

Means and bands are made by the report's own function (``judging.evidence.curve``), at so many steps as a chart shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.config.evaluation import PART
from retrain.ui.answers import Query, Refusal, json_route, plain
from retrain.ui.decimation import MOST_POINTS, extremes, moving_average
from retrain.ui.library import Library
from retrain.ui.measured import ColumnRun, points_of
from retrain.ui.metrics import about
from retrain.ui.numbers import AXES, UNPLACED, xs_of
from retrain.ui.sources import Home, Run
from retrain.verdicts.evidence import curve, window_of
from retrain.verdicts.results import Measure

GRID = 160  # Steps at which a long mean and its band are made
Window = tuple[float, float]  # The part of the x axis that is asked for, both ends included
THIN_POINTS = 16_000  # Points of the lines of all runs together


@dataclass
class Line:
    """One run's line: ``xs`` is where the chart has it, ``steps`` is what runs share."""

    run: Run
    steps: np.ndarray
    values: np.ndarray
    xs: np.ndarray
    left_out: int = 0  # Points whose place on the chosen axis was not recorded


def routes(library: Library) -> list[Route]:
    def curves(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        key, x = query.text("key"), query.choice("x", AXES)
        smooth = query.number("smooth", -1, -1, 100_000)
        return curves_of(library, home, key, x, smooth, window_in(query))

    return [json_route("/api/curves", curves)]


def window_in(query: Query) -> Window | None:
    """The part of the x axis from ``from`` to ``to``; None for all of it. Raises Refusal for ends that are none."""
    low, high = query.real("from"), query.real("to")
    if low is None and high is None:
        return None
    window = -math.inf if low is None else low, math.inf if high is None else high
    if window[0] > window[1]:
        raise Refusal(400, "from is to be no more than to: both are places on the x axis")
    return window


def curves_of(
    library: Library, home: Home, key: str, x: str, smooth: int, part: Window | None = None
) -> dict[str, Any]:
    """The answer; ``smooth``: steps that a point is the mean of, -1 for what a report takes (points, not steps);
    evaluations are never smoothed. ``part``: only points in this part of the x axis, and one on either side of it."""
    lines = [line for run in home.runs if (line := line_of(library, run, key, x)) is not None]
    reading = sum(library.numbers(run, refresh=False).reading for run in home.runs)
    held_out = Measure(key=key).is_held_out
    longest = max((len(line.steps) for line in lines), default=0)
    window = 1 if held_out else window_of(longest) if smooth < 0 else max(1, smooth)
    for line in lines:
        order = np.arange(len(line.steps)) if smooth < 0 else line.steps
        line.values = moving_average(order, line.values, window)
    shown = max(200, min(MOST_POINTS, THIN_POINTS // max(1, len(lines))))
    share = Measure(key=key).is_share
    conditions, differences = [], []
    baseline = [line for line in lines if line.run.index == 0]
    labels = {run.index: run.label for run in home.runs}
    for index, label in sorted(labels.items()):
        own = [line for line in lines if line.run.index == index]
        mean, band, of = mean_and_band(label, index, own, key, share, part)
        conditions.append({
            "label": label, "index": index, "mean": mean, "band": band, "of": of, "count": counts(own, part),
            "runs": [{"place": line.run.place, "seed": line.run.seed, "points": thin(line, shown, part)}
                     for line in own],
        })  # fmt: skip
        if index and 0 in labels:
            pairs = paired(own, baseline)
            mean, band, of = mean_and_band(label, index, pairs, key, False, part)
            differences.append({"label": label, "index": index, "pairs": len(pairs), "mean": mean, "band": band,
                                "of": of})  # fmt: skip
    short = sum(line.left_out > 0 for line in lines)
    note = f"{short} of {len(lines)} runs have {UNPLACED}" if short else None
    return {"key": key, "x": x, "smooth": window, "about": about(key), "share": share, "reading": reading,
            "note": note, "conditions": conditions,
            "differences": differences}  # fmt: skip


def line_of(library: Library, run: Run, key: str, x: str) -> Line | None:
    """The points of a run; None where it has none."""
    numbers = library.numbers(run)
    with numbers.still():
        steps, values = points_of(numbers, key)
        if not len(steps):
            return None
        xs = xs_of(numbers, x, steps, updates=Measure(key=key).is_held_out)
    known = np.isfinite(xs)
    return Line(run, steps[known], values[known], xs[known], int(np.sum(~known))) if known.any() else None


def mean_and_band(
    label: str, index: int, lines: Sequence[Line], key: str, share: bool, part: Window | None
) -> tuple[list[Any], list[Any], str]:
    """Mean and band over the finished runs, or over all as far as all have come while none is finished; of which."""
    finished = [line for line in lines if line.run.state == "done"]
    taken, of = (finished, "finished") if finished else (list(lines), "all")
    grid, xs = grid_of(taken, part) if taken else (np.empty(0), np.empty(0))
    if not len(grid):
        return [], [], of
    found = curve(label, index, [shown_at(line, grid) for line in taken], key, share=share, smooth=False)
    at = dict(zip(grid.astype(int).tolist(), xs.tolist(), strict=True))
    mean = np.array([(at[int(step)], value) for step, value in found.points]).reshape(-1, 2)
    band = np.array([(at[int(step)], low, high) for step, low, high in found.band]).reshape(-1, 3)
    return _table(mean), _table(band), of


def grid_of(lines: Sequence[Line], part: Window | None) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all of these lines have in this part, at most ``GRID`` of them, the first and the last included;
    and where the chart has them."""
    common = lines[0].steps
    for line in lines[1:]:
        if not np.array_equal(common, line.steps):  # most runs have the same
            common = np.intersect1d(common, line.steps)
    if not len(common):
        return common, common
    of = [slice(None) if len(line.steps) == len(common) else np.searchsorted(line.steps, common) for line in lines]
    xs = np.mean([line.xs[at] for line, at in zip(lines, of, strict=True)], axis=0)
    shown = inside(xs, part)
    common, xs = common[shown], xs[shown]
    if len(common) > GRID:
        places = np.unique(np.linspace(0, len(common) - 1, GRID).astype(int))
        common, xs = common[places], xs[places]
    return common, xs


def inside(xs: np.ndarray, part: Window | None) -> slice:
    """The points in a part of the x axis, and one on either side of it, so that lines reach its edges."""
    if part is None:
        return slice(None)
    first, over = np.searchsorted(xs, part[0], "left"), np.searchsorted(xs, part[1], "right")
    return slice(max(0, int(first) - 1), int(over) + 1)


@dataclass
class Shown(ColumnRun):
    """A run whose curve are these points, of whatever metric; it has no evaluations of a part of the problems."""

    points: Sequence[tuple[int, float]] = ()

    def curve(self, key: str) -> list[tuple[int, float]]:
        return [] if PART in key else list(self.points)


def shown_at(line: Line, grid: np.ndarray) -> Shown:
    """A line at these steps, for the report's function; that function is to take it in, finished or not."""
    values = line.values[np.searchsorted(line.steps, grid)]
    points = list(zip(grid.astype(int).tolist(), values.tolist(), strict=True))
    run = line.run
    return Shown(run.run_id, run.label, run.seed or 0, "done", None, run.path, run.pair, points=points)


def paired(lines: Sequence[Line], baseline: Sequence[Line]) -> list[Line]:
    """The difference of every pair of runs with the same seed, at the steps that both have; of finished pairs alone
    once there is one."""
    base = {line.run.pair: line for line in baseline}
    pairs = [(line, base[line.run.pair]) for line in lines if line.run.pair in base]
    both = [pair for pair in pairs if all(line.run.state == "done" for line in pair)]
    out = []
    for mine, other in both or pairs:
        if np.array_equal(mine.steps, other.steps):
            out.append(Line(mine.run, mine.steps, mine.values - other.values, mine.xs))
            continue
        steps, own, its = np.intersect1d(mine.steps, other.steps, return_indices=True)
        if len(steps):
            out.append(Line(mine.run, steps, mine.values[own] - other.values[its], mine.xs[own]))
    return out


def counts(lines: Sequence[Line], part: Window | None) -> list[Any]:
    """How many runs have a value, wherever that changes."""
    if not lines:
        return []
    if all(np.array_equal(line.steps, lines[0].steps) for line in lines):
        xs = lines[0].xs[inside(lines[0].xs, part)]
        ends = xs[[0, -1]] if len(xs) > 1 else xs
        return _table(np.column_stack([ends, np.full(len(ends), len(lines))]))
    steps, count = np.unique(np.concatenate([line.steps for line in lines]), return_counts=True)
    longest = max(lines, key=lambda line: line.steps[-1])
    places = np.unique(np.append(np.flatnonzero(np.diff(count, prepend=-1)), len(steps) - 1))
    xs = np.interp(steps[places], longest.steps, longest.xs)
    shown = inside(xs, part)
    return _table(np.column_stack([xs[shown], count[places][shown]])[-GRID - 1 :])


def thin(line: Line, most: int, part: Window | None) -> list[Any]:
    """One run's line, its extremes kept."""
    shown = inside(line.xs, part)
    xs, values = line.xs[shown], line.values[shown]
    places = extremes(values, most)
    return _table(np.column_stack([xs[places], values[places]]))


def _table(rows: np.ndarray) -> list[Any]:
    """Rows of numbers for JSON."""
    if not rows.size:
        return []
    return [list(row) for row in zip(*(plain(rows[:, place]) for place in range(rows.shape[1])), strict=True)]
