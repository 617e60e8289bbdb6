"""Intervals of differences to a baseline that hold together, and agree with the test that decides.

Five conditions with an interval of 95 % each cover all four differences at once only 82 to 90 times in 100. What is
used instead follows the declared test (benchmarks/intervals.py has the joint coverage of each):

- ``exact``: the sign-flip test inverted at level α/m (``sign_flip_interval``). An end passes 0 exactly where the test's
  p passes α/m, so that the interval and the p-value cannot contradict each other, and the promise holds for every
  symmetric distribution of differences, each of a spread of its own. With too few pairs for the test, or more
  than 30, Student's t at level α/m.
- ``normal``: the additive fit of ``maths.normal`` with Dunnett's (1955) quantile, as the test has them. Narrower, and
  only as good as equal spreads are true.
"""

import math

import numpy as np

from retrain.maths.arrays import Doubles_S, Table, Values
from retrain.maths.normal import additive_fit, dunnett_quantile
from retrain.maths.statistics import Interval, _t_quantile, _vector, difference_error, pairs_for_verdict, sign_flip_p

ENUMERATED_PAIRS = 20
"""Up to so many pairs all 2^n − 1 means of subsets are formed; beyond, the ends are found by bisection."""
MOST_PAIRS = 30  # Above this, Student's interval, which agrees to 1 %, replaces the inverted test
HALVINGS = 14  # Bisection steps: an end is known to 1/16,000 of the interval


def sign_flip_interval(differences: Values, level: float = 0.95, resolution: float = 0.0) -> Interval:
    """Mean of paired differences with all θ that the exact sign-flip test of d − θ does not reject.

    With n pairs each of the 2^n intervals between the means of subsets holds the centre of symmetry with equal
    probability (Hartigan's 1969 typical values): the ends are the k-th smallest and the k-th largest of those means,
    k = ⌊2^n (1 − level)/2⌋. Values that lie on a scale with steps of ``resolution`` are known up to rounding, as in
    ``statistics.difference_error``. Ends are None with too few pairs for any to be rejected. Raises ValueError for no
    pair, more than 40 (seconds), or NaN.
    """
    d = _vector(differences, "differences")
    n, alpha = len(d), 1.0 - level
    if not n or not 0.0 < level < 1.0:
        raise ValueError(f"an interval needs at least one difference and a level in (0, 1): got {n} and {level}")
    mean, rank = float(d.mean()), math.floor(2.0 ** min(n, 60) * alpha / 2.0 + 1e-9)
    if rank < 1:
        return Interval(mean, None, None)
    low, high = _typical_values(d, rank) if n <= ENUMERATED_PAIRS else (-_last(-d, alpha), _last(d, alpha))
    rounding = _t_quantile(level, n - 1) * resolution / math.sqrt(6.0 * n)
    return Interval(mean, min(low, mean - rounding), max(high, mean + rounding))


def _typical_values(d: Doubles_S, rank: int) -> tuple[float, float]:
    """The ``rank``-th smallest and largest of the means of all subsets."""
    sums, sizes = np.zeros(1), np.zeros(1)
    for value in d:
        sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + 1.0])
    means = sums[1:] / sizes[1:]
    places = (rank - 1, len(means) - rank)
    ordered = np.partition(means, places)
    return float(ordered[places[0]]), float(ordered[places[1]])


def _last(d: Doubles_S, alpha: float) -> float:
    """The largest centre that the test does not reject, from outside: a little above it."""
    inside, outside = float(d.mean()), float(d.max())
    reach = min(outside - inside, 3.0 * _t_quantile(1.0 - alpha, len(d) - 1) * difference_error(d))
    if sign_flip_p(d - inside - reach) <= alpha:
        outside = inside + reach
    for _ in range(HALVINGS):
        middle = 0.5 * (inside + outside)
        inside, outside = (inside, middle) if sign_flip_p(d - middle) <= alpha else (middle, outside)
    return outside


def t_interval(differences: Values, level: float = 0.95, resolution: float = 0.0) -> Interval:
    """Mean of paired differences with Student's interval; ``resolution`` as in ``statistics.difference_error``. Ends
    are None with one pair."""
    d = _vector(differences, "differences")
    mean = float(d.mean())
    if len(d) < 2:
        return Interval(mean, None, None)
    reach = _t_quantile(level, len(d) - 1) * difference_error(d, resolution)
    return Interval(mean, mean - reach, mean + reach)


def simultaneous_intervals(
    table: Table, kind: str = "exact", *, level: float = 0.95, resolution: float = 0.0
) -> list[Interval | None]:
    """Every condition's mean difference to the first one, with intervals that hold all at once with ``level``.

    ``table`` [seeds, 1 + conditions] has NaN where a run is missing; all conditions count as the family, also one
    without a pair, whose entry is None. ``kind`` is "exact" or "normal", see the head of this file; with one condition
    these are the plain intervals of one comparison. Raises ValueError for another kind or a table of one column.
    """
    x = np.asarray(table, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] < 2 or kind not in ("exact", "normal"):
        raise ValueError(f"a family has a baseline and a condition, and kind is exact or normal: {x.shape}, {kind!r}")
    family = x.shape[1] - 1
    own = 1.0 - (1.0 - level) / family
    found: list[Interval | None] = []
    fit = additive_fit(x[None], resolution) if kind == "normal" else None
    for column in range(1, family + 1):
        both = ~np.isnan(x[:, [0, column]]).any(axis=1)
        d = x[both, column] - x[both, 0]
        if not len(d):
            found.append(None)
        elif fit is not None and fit.freedom[0] > 0:
            estimate = float(fit.difference[0, column - 1])
            error = float(fit.spread[0]) * math.sqrt(float(fit.factor[0, column - 1]))
            reach = dunnett_quantile(family, float(fit.freedom[0]), level, round(float(fit.correlation[0]), 6)) * error
            found.append(Interval(estimate, estimate - reach, estimate + reach))
        elif kind == "exact" and pairs_for_verdict(family, 1.0 - level) <= len(d) <= MOST_PAIRS:
            found.append(sign_flip_interval(d, own, resolution))
        else:
            found.append(t_interval(d, own, resolution))
    return found
