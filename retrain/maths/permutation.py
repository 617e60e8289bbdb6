"""Closed permutation within seeds: a family of comparisons with the baseline, stepping down, free of distributions.

For every set of conditions, "these and the baseline are alike" is tested by permuting their values within each seed;
the statistic is the largest |mean difference to the baseline| among them. A condition differs when every set that it
is in is rejected (Marcus, Peritz and Gabriel 1976): its adjusted p is the largest of theirs. With one comparison the
permutations are the sign flips, and p is that of ``statistics.sign_flip_p``. What must hold for the promised error is
that conditions which are alike have values that can be exchanged within a seed: equal spreads, any distribution.

All permutations are gone through up to ``ENUMERATED``; beyond, as many random ones, always the same, with the observed
arrangement counted (Phipson and Smyth 2010).
"""

from functools import lru_cache
from itertools import combinations, permutations, product
from math import factorial

import numpy as np

from retrain.maths.arrays import Doubles_S, Table
from retrain.maths.statistics import EXACT_SIGN_FLIP_PAIRS, sampled_sign_flip_p, sign_flip_p

ENUMERATED = 8_000
SAMPLED = 4_999
MOST_COMPARISONS = 6  # Sets double with each comparison: 63 for six
TIE = 1e-9


@lru_cache(maxsize=32)
def _arrangements(seeds: int, conditions: int, sampled: int) -> np.ndarray:
    """Which condition's value goes where, [arrangements, seeds, conditions]; the first is the observed one."""
    single = np.array(list(permutations(range(conditions))), dtype=np.int8)
    if factorial(conditions) ** seeds <= ENUMERATED:
        picks = np.array(list(product(range(len(single)), repeat=seeds)))
    else:
        picks = np.random.default_rng((seeds, conditions)).integers(0, len(single), (sampled + 1, seeds))
        picks[0] = 0
    return single[picks]


def permutation_p(table: Table, sampled: int = SAMPLED) -> float:
    """p of "all conditions of this table [seeds, conditions] are alike", by the largest |mean difference| to the first.

    Only seeds with all of them count: NaN is a missing run. 1 without such a seed.
    """
    values = np.asarray(table, dtype=np.float64)
    values = values[~np.isnan(values).any(axis=1)]
    if not len(values) or values.shape[1] < 2:
        return 1.0
    if values.shape[1] == 2:
        d = values[:, 1] - values[:, 0]
        return sign_flip_p(d) if len(d) <= EXACT_SIGN_FLIP_PAIRS else sampled_sign_flip_p(d)
    values = values - values.mean(axis=1, keepdims=True)
    orders = _arrangements(*values.shape, sampled)
    sums = np.zeros((len(orders), values.shape[1]))
    for row, order in zip(values, np.moveaxis(orders, 1, 0), strict=True):
        sums += row[order]
    largest = np.abs(sums[:, 1:] - sums[:, :1]).max(axis=1)
    return float((largest >= largest[0] - TIE * np.abs(values).sum()).mean())


def closed_permutation(table: Table, sampled: int = SAMPLED) -> Doubles_S:
    """Adjusted p of each condition but the first, [m], from a table [seeds, 1 + m].

    A set of conditions is tested on the seeds that have all of them; ``sampled`` is how many arrangements are drawn
    where there are too many to go through. Raises ValueError for more than six comparisons.
    """
    values = np.asarray(table, dtype=np.float64)
    family = values.shape[1] - 1
    if not 1 <= family <= MOST_COMPARISONS:
        raise ValueError(f"closed permutation takes 1 to {MOST_COMPARISONS} comparisons: got {family}")
    tested = [i for i in range(family) if np.isfinite(values[:, [0, i + 1]]).all(axis=1).any()]
    adjusted = np.ones(family)
    adjusted[tested] = 0.0
    for size in range(1, len(tested) + 1):
        for members in combinations(tested, size):
            p = permutation_p(values[:, [0, *(i + 1 for i in members)]], sampled)
            adjusted[list(members)] = np.maximum(adjusted[list(members)], p)
    return adjusted
