"""Where a learning curve leads: ScaleRL's sigmoid of performance over compute, with intervals from seeds.

    R(C) = R₀ + (A − R₀) / (1 + (C_mid/C)^B)

(arXiv 2510.13786, equation 1.) R₀ is where the untrained policy stands, A the ceiling that the curve approaches, C_mid
the compute at which half of the gain is made, B how steeply. The paper scans a grid of A × C_mid and fits B. Given
C_mid and B, the best A is known in closed form, so the grid here is one of C_mid × B, and its best point is refined.

The paper names no interval. Here one inverts a test: A is not rejected while, with A held fixed and the other two
fitted, the derivatives of the mean curve by A have no slope in the seeds' residuals (Neyman's C(α) with the seed as the
unit: a t of n − 1 degrees of freedom). So it holds for seeds whose evaluations hang together, and where a curve has not
been seen to level off it reaches to the limit instead of promising a ceiling (``benchmarks/scaling.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retrain.maths.arrays import Evaluations, Seeds_SE
from retrain.maths.statistics import Interval, _t_quantile

MIN_EVALUATIONS = 5
"""Three numbers are fitted; so many points leave something to see whether they fit."""
MIDPOINTS = (0.02, 10.0)
"""Where the midpoint is looked for, in shares of the last compute."""
EXPONENTS = (0.3, 8.0)
GRID = (70, 40)
SCANNED = 8
"""Values at which an interval's end is looked for on each side, before it is halved."""
HALVINGS = 8

Parameter = Literal["asymptote", "midpoint"]
_PLACES: dict[Parameter, int] = {"asymptote": 0, "midpoint": 1}


@dataclass(frozen=True)
class Sigmoid:
    """The curve: ``start`` R₀, ``asymptote`` A, ``exponent`` B, ``midpoint`` C_mid in the unit of the compute."""

    start: float
    asymptote: float
    exponent: float
    midpoint: float

    def at(self, compute: float) -> float:
        """R(C); R₀ at 0."""
        if compute <= 0.0:
            return self.start
        return self.start + (self.asymptote - self.start) / (1.0 + (self.midpoint / compute) ** self.exponent)


def fit_sigmoid(
    compute: Evaluations, scores: Evaluations, start: float, limits: tuple[float, float] = (0.0, 1.0)
) -> Sigmoid:
    """The curve with the least squares through ``scores`` at rising ``compute`` above 0, from ``start``, whose
    asymptote lies within ``limits``. Raises ValueError for fewer than ``MIN_EVALUATIONS`` points, or compute that does
    not rise."""
    x, y = _points(compute), np.asarray(scores, dtype=float)
    if y.shape != x.shape:
        raise ValueError(f"one score for each compute: got {len(y)} for {len(x)}")
    return _sigmoid(_fitted(x, y, start, limits), start)


def sigmoid_interval(
    compute: Evaluations,
    scores: Seeds_SE,
    start: float,
    what: Parameter,
    limits: tuple[float, float] = (0.0, 1.0),
    level: float = 0.95,
) -> Interval:
    """A number of the curve through the mean of several seeds, with its interval over seeds.

    ``scores`` has one row for each seed. An end is None where the curve does not say: where no value up to the limit
    (for the midpoint: ``MIDPOINTS``) is rejected, or with fewer than two seeds. Raises as ``fit_sigmoid``.
    """
    x, rows = _points(compute), np.asarray(scores, dtype=float)
    if rows.ndim != 2 or rows.shape[1] != len(x):
        raise ValueError(f"one row of {len(x)} scores for each seed: got the shape {rows.shape}")
    place, best = _PLACES[what], _fitted(x, rows.mean(0), start, limits)
    found = float(best[place]) if what == "asymptote" else math.exp(best[place])
    if len(rows) < 2:
        return Interval(found, None, None)
    threshold, box = _t_quantile(level, len(rows) - 1), _box(x, limits)

    def kept(value: float) -> bool:
        return abs(_score(x, rows, start, place, value, best, box)) <= threshold

    ends = [_end(float(best[place]), float(limit), kept) for limit in box[:, place]]
    low, high = ((None if end is None else end if place == 0 else math.exp(end)) for end in ends)
    return Interval(found, low, high)


def _points(compute: Evaluations) -> np.ndarray:
    x = np.asarray(compute, dtype=float)
    if len(x) < MIN_EVALUATIONS or not (x[0] > 0.0 and (np.diff(x) > 0.0).all()):
        raise ValueError(f"a curve needs {MIN_EVALUATIONS} evaluations at rising compute above 0: got {list(compute)}")
    return x


def _box(x: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Lowest and highest (A, ln C_mid, ln B)."""
    return np.array(
        [[limits[i], math.log(MIDPOINTS[i] * x[-1]), math.log(EXPONENTS[i])] for i in range(2)], dtype=float
    )


def _rise(x: np.ndarray, ln_midpoint: float, exponent: float) -> np.ndarray:
    """The share of the gain that is made at each compute."""
    return 1.0 / (1.0 + (math.exp(ln_midpoint) / x) ** exponent)


def _curve(p: np.ndarray, x: np.ndarray, start: float) -> np.ndarray:
    return start + (p[0] - start) * _rise(x, p[1], math.exp(p[2]))


def _slopes(p: np.ndarray, x: np.ndarray, start: float) -> np.ndarray:
    """Derivatives of the curve by (A, ln C_mid, ln B), [points, 3]."""
    exponent = math.exp(p[2])
    rise = _rise(x, p[1], exponent)
    steep = -(p[0] - start) * rise * (1.0 - rise) * exponent
    return np.stack([rise, steep, steep * (p[1] - np.log(x))], axis=1)


def _fitted(x: np.ndarray, y: np.ndarray, start: float, limits: tuple[float, float]) -> np.ndarray:
    """(A, ln C_mid, ln B) of the least squares: the best of a grid, refined."""
    box = _box(x, limits)
    midpoints, exponents = (np.linspace(box[0, i], box[1, i], GRID[i - 1]) for i in (1, 2))
    ratio = midpoints[:, None, None] - np.log(x)
    rise = 1.0 / (1.0 + np.exp(ratio * np.exp(exponents)[:, None]))  # [midpoints, exponents, points]
    gain = (rise * (y - start)).sum(-1) / (rise * rise).sum(-1)
    asymptote = np.clip(start + gain, *limits)
    errors = ((y - start - (asymptote - start)[..., None] * rise) ** 2).sum(-1)
    i, j = np.unravel_index(errors.argmin(), errors.shape)
    return _refined(x, y, start, np.array([asymptote[i, j], midpoints[i], exponents[j]]), [0, 1, 2], box)


def _refined(x: np.ndarray, y: np.ndarray, start: float, p: np.ndarray, free: list[int], box: np.ndarray) -> np.ndarray:
    """The least squares from ``p`` on, over the numbers in ``free`` alone."""
    from scipy.optimize import least_squares

    def whole(some: np.ndarray) -> np.ndarray:
        full = p.copy()
        full[free] = some
        return full

    inside = np.clip(p[free], box[0, free] + 1e-9, box[1, free] - 1e-9)
    result = least_squares(
        lambda some: _curve(whole(some), x, start) - y,
        inside,
        jac=lambda some: _slopes(whole(some), x, start)[:, free],  # pyright: ignore[reportArgumentType]
        bounds=(box[0, free], box[1, free]),
        xtol=1e-12, ftol=1e-14, gtol=1e-14,
    )  # fmt: skip
    return whole(result.x)


def _score(
    x: np.ndarray, rows: np.ndarray, start: float, place: int, value: float, best: np.ndarray, box: np.ndarray
) -> float:
    """Student's t of the seeds' scores where the number at ``place`` is ``value`` and the others are fitted."""
    others = [i for i in range(3) if i != place]
    fixed = best.copy()
    fixed[place] = value
    p = _refined(x, rows.mean(0), start, fixed, others, box)
    slopes = _slopes(p, x, start)
    loose = [i for i in others if box[0, i] + 1e-6 < p[i] < box[1, i] - 1e-6]
    direction = slopes[:, place]
    if loose:
        direction = direction - slopes[:, loose] @ np.linalg.lstsq(slopes[:, loose], direction, rcond=None)[0]
    scores = (rows - _curve(p, x, start)) @ direction
    mean, error = float(scores.mean()), float(scores.std(ddof=1)) / math.sqrt(len(scores))
    if error <= 1e-12 * max(1e-12, float(np.abs(direction).max())):
        return 0.0 if abs(mean) <= 1e-9 else math.copysign(math.inf, mean)
    return mean / error


def _end(best: float, limit: float, kept: Callable[[float], bool]) -> float | None:
    """Up to where values from ``best`` towards ``limit`` are kept; None where all of them are."""
    inside = best
    for outside in map(float, np.linspace(best, limit, SCANNED + 1)[1:]):
        if not kept(outside):
            break
        inside = outside
    else:
        return None
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2.0
        inside, outside = (middle, outside) if kept(middle) else (inside, middle)
    return inside


def _sigmoid(p: np.ndarray, start: float) -> Sigmoid:
    return Sigmoid(start, float(p[0]), math.exp(p[2]), math.exp(p[1]))
