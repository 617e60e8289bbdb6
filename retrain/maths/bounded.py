"""Score intervals for means of bounded values: differences of two models on the same problems, or scores in [0, 1].

Wilson's interval (1927) contains the shares θ that a test does not reject, where the test takes the variance under θ
instead of the variance of the data. Tango's (1998) does the same for the difference of two paired shares, with the most
likely probabilities of gained and lost answers that have this difference. Here the unit is the problem, and a problem's
value may be any number between the bounds: the mean of several samples, a pass@k. The most likely distribution with the
mean θ then reweights the observed values and may put weight on a bound, observed or not (Owen's 1988 empirical
likelihood with two more possible values). With values 0 and 1 this is Wilson's interval, with −1, 0 and 1 Tango's.

Unobserved values therefore count: n equal values leave q²/(n + q²) of the way to each bound open (q: the quantile).
Coverage: ``benchmarks/intervals.py``.
"""

import math

import numpy as np

from retrain.maths.arrays import Table, Values
from retrain.maths.statistics import Interval, _t_quantile, _vector

ROUNDING = 1e-12  # Rounding tolerance at the bounds
HALVINGS = 45  # They cut a path of length 2 to 6e-14, below what any printed interval shows


def bounded_mean_interval(values: Values, low: float, high: float, *, t: bool = False, level: float = 0.95) -> Interval:
    """Return the mean of independent values in [low, high] with its score interval, within the bounds.

    The quantile is the normal one, as in Tango's interval. With ``t`` it is Student's, and the variance has n − 1 in
    place of n, as in ``statistics.accuracy_interval``. Ends are None with one value. Raises ValueError for no value, or
    a value outside the bounds.
    """
    x = _vector(values, "values")
    if not len(x) or x.min() < low - ROUNDING or x.max() > high + ROUNDING:
        raise ValueError(f"an interval needs at least one value, all within [{low:g}, {high:g}]")
    n, estimate = len(x), float(x.mean())
    if n < 2:
        return Interval(estimate, None, None)
    support, counts = np.unique(np.clip(x, low, high), return_counts=True)
    rooms = np.stack([high - support, support - low])
    size, freedom = (n - 1, n - 1) if t else (n, math.inf)
    quantile = _t_quantile(freedom, level)
    left = smallest_room(rooms, np.stack([counts, counts]) / n, size, quantile)
    return Interval(estimate, low + float(left[1]), high - float(left[0]))


def smallest_room(rooms: Table, shares: Table, size: float, quantile: float) -> Table:
    """Return, for each row of ``shares`` [N, values], the smallest mean distance to a bound that the score test does
    not reject: the observed mean distance is at most ``quantile`` standard errors away. ``rooms`` [N or 1, values]:
    distances of the values to the bound; ``size``: number of observations. The upper end of a score interval is the
    upper bound minus the result.

    The most likely distributions of all means form one path. Its weights are share/(room + e), with e from ∞ (the data)
    to 0; after that, the bound itself gets a share from 0 to 1. Bisection finds the last accepted point of the path.
    """
    # Every room is 0 when all values lie on the bound; 1e-300 keeps the divisions below finite.
    scale = np.maximum(rooms.max(axis=1, keepdims=True), 1e-300)
    within, beyond = np.zeros(len(shares)), np.full(len(shares), 2.0)
    observed = (shares * rooms).sum(axis=1)
    for _ in range(HALVINGS):
        middle = 0.5 * (within + beyond)
        mean, variance = _on_path(rooms, shares, middle, scale)
        # Wilson's test: the variance is that of the tested mean, not that of the data.
        outside = size * (observed - mean) ** 2 > quantile**2 * variance
        within, beyond = np.where(outside, within, middle), np.where(outside, middle, beyond)
    return _on_path(rooms, shares, within, scale)[0]


def _on_path(rooms: np.ndarray, shares: np.ndarray, at: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance at points ``at`` [N] of the path. From 0 to 1, e falls from ∞ to 0; from 1 to 2, the
    share of the bound grows from 0 to 1."""
    # at = 0 stands for e = ∞; a tiny tilt in its place keeps the quotient finite.
    tilt = np.clip(at, 1e-15, 1.0)[:, None]
    offset = scale * (1.0 - tilt) / tilt
    weights = np.where(shares > 0.0, shares / np.maximum(rooms + offset, 1e-300), 0.0)
    weights *= (1.0 - np.clip(at - 1.0, 0.0, 1.0)[:, None]) / weights.sum(axis=1, keepdims=True)
    mean = (weights * rooms).sum(axis=1)
    # Rounding can make E[x²] − E[x]² slightly negative.
    return mean, np.maximum((weights * rooms**2).sum(axis=1) - mean**2, 0.0)
