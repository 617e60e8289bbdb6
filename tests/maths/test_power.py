"""Power against published values, scipy's tests on simulated data, and itself turned round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.maths.power import detectable, pairs_needed, power, sign_flip_power, spread_interval, t_test_power
from retrain.maths.statistics import pairs_for_verdict, sign_flip_p


@pytest.mark.parametrize(("effect", "pairs", "expected"), [(0.5, 34, 0.8078), (0.8, 15, 0.8213), (0.2, 199, 0.8017)])
def test_published_powers_of_the_t_test(effect, pairs, expected):
    """G*Power 3.1, difference of two dependent means, two tails, alpha 0.05."""
    assert t_test_power(effect, pairs) == pytest.approx(expected, abs=5e-4)


def test_the_t_test_in_simulation():
    draws = np.random.default_rng(0).normal(0.7, 1.0, (4000, 16))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * 4.0
    found = (np.abs(t) >= stats.t.ppf(1.0 - 0.05 / 8, 15)).mean()
    assert t_test_power(0.7, 16, 0.05 / 4) == pytest.approx(found, abs=0.025)
    assert t_test_power(0.0, 16, 0.05) == pytest.approx(0.05)


@pytest.mark.parametrize(("pairs", "effect", "alpha"), [(6, 1.5, 0.05), (8, 1.0, 0.05), (8, 1.0, 0.05 / 4)])
def test_the_sign_flip_test_in_simulation(pairs, effect, alpha):
    """Other random numbers, and the test that verdicts use."""
    draws = np.random.default_rng(99).normal(effect, 1.0, (1500, pairs))
    found = np.mean([sign_flip_p(row) <= alpha for row in draws])
    assert sign_flip_power(effect, pairs, alpha) == pytest.approx(found, abs=0.04)


def test_where_the_simulation_ends_the_t_test_goes_on():
    for effect in (0.6, 0.9):
        assert sign_flip_power(effect, 12) == pytest.approx(t_test_power(effect, 12), abs=0.03)
    assert sign_flip_power(0.0, 8) <= 0.05 + 0.012


def test_every_number_of_pairs_and_every_effect_has_a_power():
    for effect in (0.01, 0.5, 3.0, 40.0):
        powers = [power(effect, pairs, 4) for pairs in (13, 50, 400, 1700, 2000, 10_000)]
        assert np.isfinite(powers).all()
        assert (np.diff(powers) >= -1e-9).all()
    assert pairs_needed(0.5, 4) == 48  # the smallest n with t_test_power(0.5, n, 0.0125) >= 0.8
    assert t_test_power(0.5, 47, 0.0125) < 0.8 <= t_test_power(0.5, 48, 0.0125)


def test_too_few_pairs_find_nothing():
    assert pairs_for_verdict(1) == 6
    assert (pairs_for_verdict(4), pairs_for_verdict(5)) == (8, 8)
    assert power(50.0, 5) == 0.0
    assert power(50.0, 7, family=4) == 0.0
    assert detectable(5) is None
    assert pairs_needed(50.0) == 6
    assert pairs_needed(50.0, family=4) == 8
    assert pairs_needed(1e-6) is None
    for wrong in (lambda: pairs_needed(0.0), lambda: t_test_power(1.0, 1), lambda: sign_flip_power(1.0, 13)):
        with pytest.raises(ValueError, match=r"pairs|difference of 0"):
            wrong()


@given(st.integers(6, 40), st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_what_is_detectable_needs_those_pairs(pairs, family):
    effect = detectable(pairs, family)
    if effect is None:
        assert pairs < pairs_for_verdict(family)
        return
    assert power(effect, pairs, family) >= 0.8
    assert power(0.95 * effect, pairs, family) < 0.8
    needed = pairs_needed(effect * 1.0001, family)
    assert needed is not None
    assert needed <= pairs


def test_the_interval_of_a_spread_covers():
    draws = np.random.default_rng(1).normal(0.0, 2.0, (2000, 4)).std(axis=1, ddof=1)
    inside = [low <= 2.0 <= high for low, high in (spread_interval(spread, 3) for spread in draws)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)
    with pytest.raises(ValueError, match="two values"):
        spread_interval(1.0, 0)
