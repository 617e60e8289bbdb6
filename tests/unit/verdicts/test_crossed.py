"""Seeds and problems crossed: sums of squares by hand, reduction to one way, coverage for new problems."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from retrain.maths.crossed import new_problems_interval


def paired(d: np.ndarray) -> np.ndarray:
    return np.stack([d, np.zeros_like(d)], axis=2)


def test_the_variance_is_seed_plus_problem_minus_cell():
    d = np.random.default_rng(0).normal(size=(4, 6)) + 2.0 * np.arange(6) + np.arange(4)[:, None]
    of_seed = 6 * d.mean(axis=1).var(ddof=1)
    of_problem = 4 * d.mean(axis=0).var(ddof=1)
    cell = ((d - d.mean(0) - d.mean(1, keepdims=True) + d.mean()) ** 2).sum() / 15
    variance = (of_seed + of_problem - cell) / 24
    freedom = (of_seed + of_problem - cell) ** 2 / (of_seed**2 / 3 + of_problem**2 / 5 + cell**2 / 15)
    reach = stats.t.ppf(0.975, freedom) * variance**0.5
    found = new_problems_interval(paired(d))
    assert (found.estimate, found.low, found.high) == pytest.approx((d.mean(), d.mean() - reach, d.mean() + reach))


def test_problems_that_do_not_differ_leave_the_interval_over_seeds():
    by_seed = np.array([0.1, 0.3, -0.2, 0.4, 0.2])
    d = np.repeat(by_seed[:, None], 30, axis=1)
    t = stats.t.interval(0.95, 4, by_seed.mean(), stats.sem(by_seed))
    found = new_problems_interval(paired(d))
    assert (found.low, found.high) == pytest.approx(t)
    same = new_problems_interval(np.zeros((5, 30, 2)), resolution=1 / 30)
    assert same.high == pytest.approx(stats.t.ppf(0.975, 4) / 30 / 30**0.5)
    assert new_problems_interval(np.zeros((5, 30, 2))).high == 0.0
    assert new_problems_interval(np.zeros((1, 30, 2))).low is None
    for wrong in (np.zeros((5, 30)), np.full((2, 2, 2), np.nan)):
        with pytest.raises(ValueError, match="seeds, problems, 2"):
            new_problems_interval(wrong)


def test_it_holds_on_new_problems_where_the_interval_over_seeds_does_not():
    """Conditions that are equal on average and differ by problem: other seeds agree, other problems do not."""
    random = np.random.default_rng(4)
    hits = seeds_only = 0
    for _ in range(800):
        rate = random.beta(2.0, 1.5, 96)
        effect = np.stack([0.15 * random.normal(size=96), np.zeros(96)], axis=1)
        chance = np.clip(rate[:, None] + effect + 0.02 * random.normal(size=(7, 1, 2)), 0.0, 1.0)
        scores = random.binomial(4, chance) / 4
        found = new_problems_interval(scores)
        hits += found.low <= 0.0 <= found.high
        d = (scores[:, :, 0] - scores[:, :, 1]).mean(axis=1)
        seeds_only += abs(d.mean()) <= stats.t.ppf(0.975, 6) * stats.sem(d)
    assert 0.93 < hits / 800 < 0.98
    assert seeds_only / 800 < 0.90
