"""Intervals over seeds that hold what they promise with five to sixteen of them: numpy in, plain numbers out.

Resampling does not work here: the percentile bootstrap of a mean covers 84 % instead of 95 % with five seeds, because
resamples of five values are too narrow by √(4/5) and know nothing of the t distribution's tails. What is used instead,
and how often each contains the truth, is measured by ``benchmarks/calibration.py``:

- differences between conditions (symmetric when the conditions are alike): the t interval of ``paired_comparison``;
- levels of a condition (an accuracy near 1 is skewed): Hall's transformed t statistic, ``mean_interval``;
- the interquartile mean: Tukey and McLaughlin's trimmed t, ``iqm_interval``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from retrain.maths.statistics import Interval, _t_quantile, _vector, iqm

SMALLEST_SKEWNESS = 1e-6
"""Below it the transformation is the identity to the last digit of a double."""


def mean_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """Mean with Hall's (1992) interval: the t statistic, its skewness taken out by his monotone cubic.

    With g the sample skewness and q the t quantile over √n, the ends are mean − s·h⁻¹(±q) with
    h⁻¹(y) = 3/g·((1 + g·(y − g/(6n)))^⅓ − 1); for g = 0 that is the t interval. Ends are None with one value.
    Raises ValueError for no value or non-finite ones.
    """
    x = _vector(values, "values")
    n = len(x)
    if not n:
        raise ValueError("an interval needs at least one value")
    mean = float(x.mean())
    if n < 2:
        return Interval(mean, None, None)
    spread = float(x.std(ddof=1))
    if spread <= 1e-12 * max(1.0, abs(mean)):  # equal values, up to rounding
        return Interval(mean, mean, mean)
    reach = _t_quantile(level, n - 1) / math.sqrt(n)
    g = float((((x - mean) / spread) ** 3).mean())
    if abs(g) < SMALLEST_SKEWNESS:
        return Interval(mean, mean - spread * reach, mean + spread * reach)
    ends = [mean - spread * _unskewed(y, g, n) for y in (reach, -reach)]
    return Interval(mean, min(ends), max(ends))


def _unskewed(y: float, skewness: float, n: int) -> float:
    """Hall's h⁻¹; the cube root is the real one, so that the function is monotone everywhere."""
    return 3.0 / skewness * (float(np.cbrt(1.0 + skewness * (y - skewness / (6.0 * n)))) - 1.0)


def iqm_interval(values: Sequence[float] | np.ndarray, *, resolution: float = 0.0, level: float = 0.95) -> Interval:
    """Interquartile mean (``statistics.iqm``) with Tukey and McLaughlin's (1963) interval: the middle h of n values,
    Winsorised squares, h − 1 degrees of freedom.

    ``resolution`` is the step of the scale that the values lie on, 1/(problems × samples) for an accuracy: values that
    are equal then stand for values spread evenly over one step, without which three equal ones in the middle of
    five would have an interval of no width. Ends are None with fewer than four values (nothing can be trimmed).
    """
    x = np.sort(_vector(values, "values"))
    n, cut = len(x), len(x) // 4
    if not n:
        raise ValueError("an interval needs at least one value")
    estimate = float(iqm(x))
    if not cut:
        return Interval(estimate, None, None)
    spread = _ties_spread(x, resolution) if resolution > 0.0 else x
    winsorised = np.clip(spread, spread[cut], spread[n - 1 - cut])
    kept = n - 2 * cut
    squares = float(((winsorised - winsorised.mean()) ** 2).sum())
    reach = _t_quantile(level, kept - 1) * math.sqrt(squares / (kept * (kept - 1)))
    return Interval(estimate, estimate - reach, estimate + reach)


def _ties_spread(ordered: np.ndarray, resolution: float) -> np.ndarray:
    """k equal values become k values that are resolution/k apart, around the same centre."""
    out = ordered.copy()
    for start in np.flatnonzero(np.diff(ordered, prepend=-np.inf) > 1e-6 * resolution):
        tied = np.abs(ordered - ordered[start]) <= 1e-6 * resolution
        k = int(tied.sum())
        out[tied] += resolution * ((np.arange(k) + 0.5) / k - 0.5)
    return out
