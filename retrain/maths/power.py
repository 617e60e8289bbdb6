"""How many pairs of seeds show a difference: power of the exact sign-flip test, and of the t test it tends to.

All differences are assumed normal with one standard deviation (``spread``). The sign-flip test of few pairs is
simulated, because its p-values are few and far between (8 pairs know 128 of them); beyond ``SIMULATED_PAIRS`` it is
the paired t test to within a percent and the noncentral t distribution tells its power. A family of comparisons is
planned with alpha/size for each: what Holm's correction asks of the first.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from retrain.maths.statistics import pairs_for_verdict

SIMULATED_PAIRS = 12
SIMULATIONS = 4000
"""Campaigns that are simulated: the standard error of a power near 0.8 is then 0.6 %."""
MOST_PAIRS = 10_000


def t_test_power(effect: float, pairs: int, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t test for ``effect`` standard deviations of the difference (noncentral t).

    Raises ValueError for fewer than two pairs or an alpha outside (0, 1).
    """
    from scipy.special import stdtrit
    from scipy.stats import nct

    if pairs < 2 or not 0.0 < alpha < 1.0:
        raise ValueError(f"power needs at least 2 pairs and alpha between 0 and 1: got {pairs} and {alpha}")
    critical, shift = float(stdtrit(pairs - 1, 1.0 - alpha / 2.0)), abs(effect) * math.sqrt(pairs)
    if shift > critical + 8.0:  # 1 to the last digit; scipy's tails give NaN far out
        return 1.0
    other_side = float(nct.cdf(-critical, pairs - 1, shift)) if shift < 5.0 else 0.0
    return float(nct.sf(critical, pairs - 1, shift)) + other_side


@lru_cache(maxsize=4)
def _signs(pairs: int) -> np.ndarray:
    """All sign patterns up to a global flip, [pairs, 2^(pairs−1)]; the first column is all plus."""
    bits = np.arange(2 ** (pairs - 1))
    rest = [1.0 - 2.0 * (bits >> i & 1) for i in range(pairs - 1)]
    return np.stack([np.ones(len(bits)), *rest])


def sign_flip_power(effect: float, pairs: int, alpha: float = 0.05) -> float:
    """Power of the exact sign-flip test, from the same 4,000 simulated campaigns at every call.

    0 when so few pairs cannot reach ``alpha`` at all. Raises ValueError for no pair or more than 12.
    """
    if not 1 <= pairs <= SIMULATED_PAIRS:
        raise ValueError(f"simulated are 1 to {SIMULATED_PAIRS} pairs: got {pairs}")
    noise = np.random.default_rng(pairs).standard_normal((SIMULATIONS, pairs))
    sums = np.abs((noise + effect) @ _signs(pairs))
    p_values = (sums >= sums[:, :1] * (1.0 - 1e-12)).mean(axis=1)
    return float((p_values <= alpha).mean())


def power(effect: float, pairs: int, family: int = 1, alpha: float = 0.05) -> float:
    """Probability of finding a difference of ``effect`` standard deviations in a family of that many comparisons."""
    if pairs < pairs_for_verdict(family, alpha):
        return 0.0
    if pairs <= SIMULATED_PAIRS:
        return sign_flip_power(effect, pairs, alpha / family)
    return t_test_power(effect, pairs, alpha / family)


def detectable(pairs: int, family: int = 1, wanted: float = 0.8, alpha: float = 0.05) -> float | None:
    """The smallest effect, in standard deviations of the difference, that is found with probability ``wanted``.

    None when so few pairs cannot reach ``alpha``.
    """
    if pairs < pairs_for_verdict(family, alpha):
        return None
    low, high = 0.0, 1.0
    while power(high, pairs, family, alpha) < wanted:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = (low + high) / 2.0
        low, high = (middle, high) if power(middle, pairs, family, alpha) < wanted else (low, middle)
    return high


def pairs_needed(effect: float, family: int = 1, wanted: float = 0.8, alpha: float = 0.05) -> int | None:
    """Fewest pairs that find a difference of ``effect`` standard deviations with probability ``wanted``.

    None when more than 10,000 would be needed. Raises ValueError for an effect of 0.
    """
    if effect == 0.0 or not math.isfinite(effect):
        raise ValueError("no number of pairs finds a difference of 0")
    least = pairs_for_verdict(family, alpha)
    for pairs in range(least, SIMULATED_PAIRS + 1):
        if power(effect, pairs, family, alpha) >= wanted:
            return pairs
    low, high = max(least, SIMULATED_PAIRS + 1) - 1, MOST_PAIRS
    if power(effect, high, family, alpha) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, family, alpha) >= wanted else (middle, high)
    return high


def spread_interval(spread: float, freedom: int, level: float = 0.9) -> tuple[float, float]:
    """Where the true standard deviation of normal data lies, given one estimated with ``freedom`` degrees of freedom.

    Raises ValueError without a degree of freedom.
    """
    from scipy.special import chdtri

    if freedom < 1:
        raise ValueError("a standard deviation needs at least two values")
    tail = (1.0 - level) / 2.0
    return (
        spread * math.sqrt(freedom / float(chdtri(freedom, tail))),
        spread * math.sqrt(freedom / float(chdtri(freedom, 1.0 - tail))),
    )
