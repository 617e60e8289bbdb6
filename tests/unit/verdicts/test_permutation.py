"""Closed permutation within seeds against enumeration by other means, the sign-flip test, and its error."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from retrain.maths.permutation import closed_permutation, permutation_p
from retrain.maths.statistics import sign_flip_p


def enumerated(table: np.ndarray) -> float:
    """p of "all alike" by going through every arrangement one by one."""

    def statistic(rows: list[tuple[float, ...]]) -> float:
        sums = np.sum(rows, axis=0)
        return float(np.abs(sums[1:] - sums[0]).max())

    every = [statistic(list(rows)) for rows in product(*(permutations(row) for row in table.tolist()))]
    return float(np.mean(np.array(every) >= statistic([tuple(row) for row in table.tolist()]) - 1e-9))


def test_every_arrangement_is_counted():
    random = np.random.default_rng(0)
    for seeds, conditions in ((4, 3), (2, 4), (3, 3)):
        table = random.normal(size=(seeds, conditions)) + np.arange(conditions)
        assert permutation_p(table) == pytest.approx(enumerated(table))
    ties = np.array([[1.0, 2.0, 2.0], [1.0, 1.0, 2.0], [0.0, 2.0, 1.0]])
    assert permutation_p(ties) == pytest.approx(enumerated(ties))


def test_one_comparison_is_the_sign_flip_test():
    table = np.random.default_rng(1).normal([0.0, 0.8], 1.0, (9, 2))
    assert closed_permutation(table)[0] == sign_flip_p(table[:, 1] - table[:, 0])


def test_a_condition_differs_when_every_set_with_it_is_rejected():
    table = np.random.default_rng(2).normal([0.0, 2.0, 0.5], 1.0, (4, 3))
    single = [enumerated(table[:, [0, i]]) for i in (1, 2)]
    both = enumerated(table)
    assert closed_permutation(table) == pytest.approx([max(single[0], both), max(single[1], both)])


def test_missing_runs_and_sampled_arrangements():
    table = np.random.default_rng(3).normal([0.0, 3.0, 0.0, 0.0], 1.0, (8, 4))
    table[1, 2] = np.nan
    table[:, 3] = np.nan
    found = closed_permutation(table)
    alone, both = sign_flip_p(table[:, 1] - table[:, 0]), permutation_p(np.delete(table, 1, axis=0)[:, :3])
    assert found[0] == max(alone, both)
    assert found[2] == 1.0
    assert (closed_permutation(table) == found).all()
    whole = np.random.default_rng(4).normal([0.0, 1.5, 0.0], 1.0, (5, 3))
    exact = permutation_p(whole)
    bigger = permutation_p(np.vstack([whole, np.zeros(3)]), sampled=20_000)  # a seed without differences: same p
    assert bigger == pytest.approx(exact, abs=0.01)
    with pytest.raises(ValueError, match="1 to 6"):
        closed_permutation(np.zeros((3, 9)))


def test_six_seeds_can_decide_four_comparisons_and_error_is_kept():
    clear = np.random.default_rng(5).normal([0.0, 30.0, 0.0, 0.0, 0.0], 1.0, (6, 5))
    assert closed_permutation(clear)[0] <= 0.05
    tables = np.random.default_rng(6).standard_t(3, size=(400, 6, 3))
    found = [(closed_permutation(table, 499) <= 0.05).any() for table in tables]
    assert np.mean(found) <= 0.05 + 3.0 * (0.05 * 0.95 / 400) ** 0.5
