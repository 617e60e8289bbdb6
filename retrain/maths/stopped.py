"""What a difference is when a sequential rule chose the moment to look: a median-unbiased estimate, with its interval.

The estimate is the true difference under which a result as large as this one (stopped above earlier, or here with so
large a mean) has probability ½, the ends of the interval those under which it has 2.5 and 97.5 % (stage-wise ordering;
Siegmund 1978, Emerson and Fleming 1990).

What the rule does under another true difference is simulated with normal differences. Sign flips stop where the mean is
large *for the spread of these very pairs*, so that the stand-in for the rule is Student's statistic with the bounds
that spend at each look what the rule has spent there. The stand-in stops somewhat more readily than sign flips do, and
the estimate leans towards 0, by less than 0.1 spreads; so little depends on size there that the plain mean leans less
(``benchmarks/intervals.py``). It is a cautious reading beside the mean, no replacement of it.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from retrain.maths.statistics import Interval, _t_quantile

PATHS = 10_000  # Simulated campaigns, always the same ones: probabilities of ½ to 0.5 %
HALVINGS = 16


def stopped_interval(
    mean: float, spread: float, spent: Sequence[float], freedom: float, level: float = 0.95
) -> Interval:
    """Median-unbiased estimate of the mean difference, with its interval, after ``len(spent)`` pairs.

    ``spent`` is how much of α all looks up to each pair had spent (``Look.spent``), ``spread`` the standard deviation
    of one pair's difference, known with so many degrees of ``freedom``: the ends are those of a known spread, wider by
    the ratio of Student's quantile to the normal one. It does not matter whether the last look stopped. Raises
    ValueError for no look or a spread that is not positive.
    """
    if not spent or not spread > 0.0:
        raise ValueError(f"an estimate needs a look and a positive spread: got {len(spent)} looks, {spread}")
    if mean < 0.0:
        mirrored = stopped_interval(-mean, spread, spent, freedom, level)
        return Interval(-mirrored.estimate, -(mirrored.high or 0.0), -(mirrored.low or 0.0))
    last, means, errors, bounds = _campaigns(tuple(spent))
    seen, wide = mean / spread, _t_quantile(level, freedom) / _t_quantile(level, math.inf)

    def at_least(theta: float) -> float:
        """Probability under the mean θ of stopping above before the last look, or of so large a mean there."""
        going, above = np.ones(len(last), dtype=bool), 0
        for look, bound in enumerate(bounds):
            statistic = (theta + means[look]) / errors[look]
            above += int(np.count_nonzero(going & (statistic > bound)))
            going &= np.abs(statistic) <= bound
        return (above + int(np.count_nonzero(going & (theta + last >= seen)))) / len(last)

    def solve(probability: float) -> float:
        low, high = seen - 10.0 / math.sqrt(len(spent)), seen + 10.0 / math.sqrt(len(spent))
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if at_least(middle) >= probability else (middle, high)
        return 0.5 * (low + high)

    estimate = solve(0.5)
    low, high = (estimate + wide * (solve(0.5 - sign * level / 2.0) - estimate) for sign in (1.0, -1.0))
    return Interval(spread * estimate, spread * low, spread * high)


@lru_cache(maxsize=8)
def _campaigns(spent: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of campaigns of standard normal differences, in pairs of opposite sign: their means after the last look
    [campaigns], and of every earlier look that could stop their running means and standard errors [looks, campaigns],
    with the bounds [looks] of Student's statistic that spend so much when nothing differs."""
    looks = len(spent)
    half = np.random.default_rng(looks).standard_normal((looks, PATHS // 2))
    z = np.concatenate([half, -half], axis=1)
    counts = np.arange(1, looks + 1)[:, None]
    means = z.cumsum(axis=0) / counts
    squares = (z**2).cumsum(axis=0) - counts * means**2
    errors = np.sqrt(np.maximum(squares, 1e-12) / np.maximum(counts - 1, 1) / counts)
    errors[0] = 1.0  # of one pair no spread is known
    bounds: dict[int, float] = {}
    going, before = np.ones(PATHS, dtype=bool), 0.0
    for look, now in enumerate(spent[:-1]):
        stopping = round((now - before) * PATHS)
        if stopping > 0:
            sizes = np.abs(means[look] / errors[look])
            left = np.sort(sizes[going])
            bounds[look] = float(left[-stopping - 1]) if stopping < len(left) else 0.0
            going &= sizes <= bounds[look]
        before = max(before, now)
    chosen = list(bounds)
    return means[-1], means[chosen], errors[chosen], np.array([bounds[look] for look in chosen])
