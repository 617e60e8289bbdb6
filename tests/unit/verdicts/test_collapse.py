"""Collapsed runs: found, not blamed on neighbours, rarely seen where there are none."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.maths.collapse import collapses, flagged, gaps, threshold


def test_the_gap_is_the_fall_against_the_median_of_the_other_conditions():
    usual = np.array([0.0, 1.0, -2.0])
    table = np.linspace(0.0, 3.0, 7)[:, None] + usual
    assert gaps(table) == pytest.approx(np.zeros((7, 3)))
    table[4, 1] -= 5.0
    assert gaps(table)[4] == pytest.approx([-2.5, 5.0, -2.5])  # medians of (0, −5) and (5, 5)
    assert gaps(table)[np.arange(7) != 4] == pytest.approx(np.zeros((6, 3)))


def test_a_fall_is_found_in_its_place_and_told_in_the_unit_of_the_table():
    table = 0.02 * np.random.default_rng(0).standard_normal((8, 5)) + 0.7
    table[3, 0] -= 0.4
    table[6, 2] -= 0.2
    first, second = collapses(table)
    assert (first.seed, first.condition) == (3, 0)
    assert (second.seed, second.condition) == (6, 2)
    assert first.gap == pytest.approx(0.4, abs=0.06)
    again = collapses(table + 100.0)
    assert [each.gap for each in again] == pytest.approx([first.gap, second.gap])
    rise = 0.02 * np.random.default_rng(1).standard_normal((8, 5))
    rise[3, 0] += 0.4
    assert collapses(rise) == []  # nobody else fell


@pytest.mark.parametrize(("column", "sign"), [(1, -1.0), (0, 1.0)])
def test_of_a_pair_the_lower_one_fell(column, sign):
    table = np.column_stack([np.zeros(8), 0.1 * np.array([1.0, -1.0, 0.5, -0.5, 0.8, -0.7, 0.2, 0.0])])
    table[5, 1] += 3.0 * sign
    (found,) = collapses(table)
    assert (found.seed, found.condition) == (5, column)


def test_missing_runs_and_equal_ones():
    table = np.random.default_rng(3).standard_normal((7, 4))
    table[2, 1] = table[0, 0] = np.nan
    table[:, 3] = np.nan
    table[5, 2] -= 30.0
    (found,) = collapses(table)
    assert (found.seed, found.condition) == (5, 2)
    steps = np.full((6, 2), 0.5)
    steps[0, 1] -= 1 / 128
    assert collapses(steps, resolution=1 / 128) == []  # one answer of 128
    assert collapses(np.full((6, 3), 0.1)) == []
    assert collapses(table[:3]) == []  # too few seeds to know what is usual
    with pytest.raises(ValueError, match="shape"):
        collapses(np.zeros(4))


@pytest.mark.parametrize(("seeds", "conditions"), [(6, 2), (8, 5)])
def test_one_normal_table_in_twenty_has_a_flag(seeds, conditions):
    tables = np.random.default_rng(77).standard_normal((4000, seeds, conditions))
    assert flagged(tables).any(axis=(1, 2)).mean() == pytest.approx(0.05, abs=0.015)
    assert threshold(seeds, conditions) > 4.0
    tables[:, 2, 1] -= 20.0 / 4.0 * 2**0.5  # 20 points where a difference has a standard deviation of 4
    assert flagged(tables)[:, 2, 1].mean() > (0.45 if conditions == 2 else 0.94)
