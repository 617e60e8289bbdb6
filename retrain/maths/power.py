"""How many seeds show a difference, and what they cost: power and expected runs of the very rule that will decide.

Campaigns are simulated and judged by ``following.follow``: the test, its correction for the family, the looks, futility
and racing, all as declared. Differences are normal with one standard deviation, which is the unit of ``effect``; one
condition differs from the baseline, the others do not. Rules without looks over more than ``SIMULATED_SEEDS`` seeds
need no simulation: sign flips of many pairs are the paired t test to within a percent, and the noncentral t
distribution tells the power of both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from retrain.maths.arrays import Table
from retrain.maths.boundaries import final_levels
from retrain.maths.following import Followed, follow
from retrain.maths.normal import MOST_PRIOR_FREEDOM
from retrain.maths.rules import Rule
from retrain.maths.sequential import MOST_PAIRS

SIMULATED_SEEDS = 12
SIMULATIONS = 2000  # Campaigns that are simulated: the standard error of a power near 0.8 is then 0.9 %
PERMUTED = 200  # Simulated campaigns for closed permutation, each a hundred times slower
MOST_SEEDS = 10_000


def t_test_power(effect: float, pairs: int, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t test for ``effect`` standard deviations of the difference (noncentral t).

    Raises ValueError for fewer than two pairs or an alpha outside (0, 1).
    """
    if pairs < 2 or not 0.0 < alpha < 1.0:
        raise ValueError(f"power needs at least 2 pairs and alpha between 0 and 1: got {pairs} and {alpha}")
    return _t_power(abs(effect) * math.sqrt(pairs), pairs - 1, alpha)


def _t_power(shift: float, freedom: float, alpha: float) -> float:
    from scipy.special import stdtrit
    from scipy.stats import nct

    critical = float(stdtrit(freedom, 1.0 - alpha / 2.0))
    if shift > critical + 8.0:  # 1 to the last digit; scipy's tails give NaN far out
        return 1.0
    other_side = float(nct.cdf(-critical, freedom, shift)) if shift < 5.0 else 0.0
    return float(nct.sf(critical, freedom, shift)) + other_side


@dataclass(frozen=True)
class Outlook:
    """What a rule promises: ``power`` to find the condition that differs, and the mean number of runs, those of the
    baseline included, when it does differ and when all conditions are alike."""

    power: float
    runs_different: float
    runs_alike: float


@lru_cache(maxsize=256)
def _followed(rule: Rule, effect: float) -> Followed:
    return follow(_simulated(rule, effect), rule)


def _simulated(rule: Rule, effect: float) -> Table:
    """Campaigns [campaigns, seeds, 1 + family] of which the first comparison has this effect."""
    count = PERMUTED if rule.test == "permutation" else SIMULATIONS
    noise = np.random.default_rng(rule.planned).standard_normal((count, rule.planned, rule.family + 1))
    tables = noise / math.sqrt(2.0)
    tables[..., 1] += effect
    return tables


@lru_cache(maxsize=256)
def _found(rule: Rule, effect: float) -> float:
    if rule.test != "exact" or rule.looks == "off":
        return float(_followed(rule, effect).different[:, 0].mean())
    # At looks of the exact test each comparison has its own share of α and nothing to do with the others.
    alone = replace(rule, family=1, alpha=rule.alpha / rule.family)
    return float(follow(_simulated(rule, effect)[..., :2], alone).different[:, 0].mean())


def power(rule: Rule, effect: float) -> float:
    """Probability that the rule finds a condition that differs by ``effect`` standard deviations of a difference.

    0 when so few seeds cannot reach its level at all. What a race is for are differences upwards. Raises ValueError for
    a rule with looks over more than 20 seeds.
    """
    if rule.planned < rule.fewest:
        return 0.0
    if rule.looks == "off" and rule.planned > SIMULATED_SEEDS:
        return _power_of_many(rule, effect)
    if rule.planned > MOST_PAIRS and rule.looks != "always_valid":
        raise ValueError(f"a rule with looks takes at most {MOST_PAIRS} seeds: got {rule.planned}")
    return _found(rule, abs(effect))


def _power_of_many(rule: Rule, effect: float) -> float:
    """By the noncentral t distribution."""
    freedom = (rule.planned - 1) * (rule.family if rule.test == "normal" else 1)
    if rule.test == "normal":
        level = float(final_levels(rule.family, float(freedom), alpha=rule.alpha)[-1])
        freedom += min(rule.prior_freedom, MOST_PRIOR_FREEDOM)
    else:
        level = rule.alpha / rule.family
    return _t_power(abs(effect) * math.sqrt(rule.planned), freedom, level)


def outlook(rule: Rule, effect: float, seeds_together: int = 1) -> Outlook:
    """Power and expected runs; ``seeds_together`` train in one cohort, which ends before anything in it is stopped."""
    if rule.looks == "off":
        runs = float(rule.planned * (rule.family + 1))
        return Outlook(power(rule, effect), runs, runs)
    different, alike = _followed(rule, abs(effect)), _followed(rule, 0.0)
    return Outlook(power(rule, effect), *(_runs(each, rule, seeds_together) for each in (different, alike)))


def _runs(followed: Followed, rule: Rule, seeds_together: int) -> float:
    pairs = np.minimum(-(-followed.pairs // seeds_together) * seeds_together, rule.planned)
    return float((pairs.sum(axis=1) + pairs.max(axis=1)).mean())


def detectable(rule: Rule, wanted: float = 0.8) -> float | None:
    """The smallest effect, in standard deviations of the difference, that the rule finds with probability ``wanted``.

    None when so few seeds cannot reach its level, or no difference is found as often (a collapse flag may hand
    campaigns to a test that needs more seeds).
    """
    if rule.planned < rule.fewest:
        return None
    low, high = 0.0, 1.0
    while power(rule, high) < wanted:
        low, high = high, 1.5 * high
        if high > 200.0:
            return None
    while high - low > 0.02 * high:
        middle = min(max(_between(rule, low, high, wanted), 0.95 * low + 0.05 * high), 0.05 * low + 0.95 * high)
        low, high = (middle, high) if power(rule, middle) < wanted else (low, middle)
    return high


def _between(rule: Rule, low: float, high: float, wanted: float) -> float:
    """Where power crosses ``wanted`` if its normal quantile is linear in the effect."""
    from scipy.special import ndtri

    below, above = (ndtri(min(max(power(rule, effect), 1e-3), 1.0 - 1e-3)) for effect in (low, high))
    step = 0.012 * high  # past the crossing, so that both ends close in
    guess = low + (high - low) * float((ndtri(wanted) - below) / max(above - below, 1e-6))
    return guess + (step if high - guess > guess - low else -step)


def seeds_needed(rule: Rule, effect: float, wanted: float = 0.8) -> int | None:
    """Fewest planned seeds with which the rule finds a difference of ``effect`` with probability ``wanted``.

    ``rule.planned`` does not count. None when more than 10,000 would be needed, or more than 20 with looks. Raises
    ValueError for an effect of 0.
    """
    if effect == 0.0 or not math.isfinite(effect):
        raise ValueError("no number of seeds finds a difference of 0")

    def found(seeds: int) -> bool:
        return power(replace(rule, planned=seeds), effect) >= wanted

    if rule.looks != "off":
        without = seeds_needed(replace(rule, looks="off", futility=None, race=False), effect, wanted)
        if without is None or without > MOST_PAIRS:
            return None
        low, high = max(without, rule.fewest) - 1, MOST_PAIRS
        return _first(found, low, high) if found(high) else None
    for seeds in range(rule.fewest, SIMULATED_SEEDS + 1):
        if found(seeds):
            return seeds
    low, high = max(rule.fewest - 1, SIMULATED_SEEDS), MOST_SEEDS
    return _first(found, low, high) if found(high) else None


def _first(found: Callable[[int], bool], low: int, high: int) -> int:
    """The first number at which it is found, above ``low`` where it is not, up to ``high`` where it is; near ``low``
    first, which is likely."""
    step = 1
    while high - low > 1:
        middle = min(low + step, (low + high) // 2)
        low, high = (low, middle) if found(middle) else (middle, high)
        step *= 2
    return high


def spread_limit(spread: float, freedom: int, level: float = 0.8) -> float:
    """The standard deviation that the true one exceeds with probability 1 − ``level``: what pilots are planned with.

    Raises ValueError without a degree of freedom.
    """
    from scipy.special import chdtri

    if freedom < 1:
        raise ValueError("a standard deviation needs at least two values")
    return spread * math.sqrt(freedom / float(chdtri(freedom, level)))


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
