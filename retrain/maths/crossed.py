"""A difference between two conditions over seeds *and* problems: what other seeds on new problems would show.

The paired difference of every seed on every problem varies with the seed, with the problem and with both. An interval
over seeds holds for other seeds on the same problems. As a statement about the method it is too narrow, because the
problems are a sample too. With crossed effects the variance of the mean is (MS_seed + MS_problem − MS_cell)/(S·P),
which is clustering two ways (Cameron, Gelbach and Miller 2011) with the small-sample correction of the analysis of
variance, and its degrees of freedom are Satterthwaite's (1946). Coverage: ``benchmarks/intervals.py``.
"""

import math

import numpy as np

from retrain.maths.arrays import Table
from retrain.maths.statistics import Interval, _t_quantile


def new_problems_interval(values: Table, level: float = 0.95, resolution: float = 0.0) -> Interval:
    """Return the mean of condition 0 minus condition 1, and an interval that holds for other seeds on new, similar
    problems.

    ``values`` [seeds, problems, 2] are scores of every problem, means over its samples. The variance is at least the
    one over seeds alone, the one over problems alone, and that of rounding scores to ``resolution``. Ends are None with
    fewer than two seeds or problems. Raises ValueError for another shape or values that are not finite.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 3 or x.shape[2] != 2 or not x.size or not np.isfinite(x).all():
        raise ValueError(f"scores are finite, [seeds, problems, 2]: got shape {x.shape}")
    d = x[:, :, 0] - x[:, :, 1]
    seeds, problems = d.shape
    mean = float(d.mean())
    if min(seeds, problems) < 2:
        return Interval(mean, None, None)
    of_seed, of_problem = d.mean(axis=1) - mean, d.mean(axis=0) - mean
    cell = d - mean - of_seed[:, None] - of_problem[None, :]
    freedom = np.array([seeds - 1, problems - 1, (seeds - 1) * (problems - 1)], dtype=np.float64)
    squares = np.array([problems * (of_seed**2).sum(), seeds * (of_problem**2).sum(), (cell**2).sum()])
    # Each mean square over S·P: the variance that the mean would have from this source alone.
    parts = squares / freedom / (seeds * problems)
    # Rounding to a step has the variance step²/12, the difference of two rounded scores twice that.
    parts[0] = max(parts[0], resolution**2 / 6.0 / seeds)
    variance = float(parts[0] + parts[1] - parts[2])
    # MS_cell is an estimate too: the difference of mean squares may fall below one of them, even below 0.
    larger = int(parts[1] > parts[0])
    used = parts**2 / freedom
    if variance <= parts[larger]:
        variance, used = float(parts[larger]), used[larger : larger + 1]
    if variance <= 0.0:
        return Interval(mean, mean, mean)
    reach = _t_quantile(variance**2 / float(used.sum()), level) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach)
