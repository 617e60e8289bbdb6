"""Power against published values, scipy's tests on simulated data, and itself turned round."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.maths.following import follow
from retrain.maths.power import (
    detectable,
    outlook,
    power,
    seeds_needed,
    spread_interval,
    spread_limit,
    t_test_power,
)
from retrain.maths.rules import Rule
from retrain.maths.statistics import sign_flip_p


@pytest.mark.parametrize(("effect", "pairs", "expected"), [(0.5, 34, 0.8078), (0.8, 15, 0.8213), (0.2, 199, 0.8017)])
def test_published_powers_of_the_t_test(effect, pairs, expected):
    """G*Power 3.1, difference of two dependent means, two tails, alpha 0.05."""
    assert t_test_power(effect, pairs) == pytest.approx(expected, abs=5e-4)


def test_the_sign_flip_test_in_simulation():
    """Other random numbers, and the test that verdicts use; beyond the simulation the t-test goes on."""
    draws = np.random.default_rng(99).normal(1.0, 1.0, (1000, 8))
    found = np.mean([sign_flip_p(row) <= 0.05 for row in draws])
    assert power(Rule(planned=8), 1.0) == pytest.approx(found, abs=0.045)
    powers = [power(Rule("exact", 3, seeds), 0.4) for seeds in (12, 13, 50, 400, 10_000)]
    assert np.isfinite(powers).all()
    assert (np.diff(powers) >= -0.02).all()


def test_seeds_that_are_needed():
    assert seeds_needed(Rule(family=4), 0.5) == 48  # the smallest n with t_test_power(0.5, n, 0.0125) >= 0.8
    assert t_test_power(0.5, 47, 0.0125) < 0.8 <= t_test_power(0.5, 48, 0.0125)
    assert t_test_power(0.0, 16, 0.05) == pytest.approx(0.05)
    assert power(Rule(planned=5), 50.0) == power(Rule(family=4, planned=7), 50.0) == 0.0
    assert detectable(Rule(planned=5)) is None
    assert [seeds_needed(rule, 50.0) for rule in (Rule(), Rule(family=4), Rule("normal", 4))] == [6, 8, 3]
    assert seeds_needed(Rule(), 1e-6) is None
    assert seeds_needed(Rule(looks="linear"), 0.4) is None  # more than 20
    for wrong in (
        lambda: seeds_needed(Rule(), 0.0),
        lambda: t_test_power(1.0, 1),
        lambda: power(Rule(planned=30, looks="linear"), 1.0),
    ):
        with pytest.raises(ValueError, match=r"pairs|difference of 0|20 seeds"):
            wrong()


@pytest.mark.parametrize("rule", [Rule(planned=7), Rule("normal", 2, 5)])
def test_what_is_detectable_needs_those_seeds(rule):
    effect = detectable(rule)
    assert effect is not None
    assert power(rule, 0.96 * effect) < 0.8 <= power(rule, effect)
    needed = seeds_needed(rule, effect)
    assert needed is not None
    assert needed <= rule.planned


def test_power_is_that_of_the_rule_with_its_looks_and_what_it_costs():
    whole = Rule(planned=8)
    looked = Rule(planned=8, looks="linear")
    assert power(looked, 1.2) < power(whole, 1.2) - 0.03  # what a plan without the looks would not know
    fixed, found = outlook(whole, 1.2), outlook(looked, 1.2)
    assert fixed.runs_alike == fixed.runs_different == 16.0
    assert found.runs_different < found.runs_alike <= 16.0
    pairs = outlook(looked, 1.2, seeds_together=4)
    assert found.runs_different < pairs.runs_different <= 16.0
    assert pairs.power == found.power


def test_a_race_of_five_conditions_costs_less_than_half_of_nine_exact_seeds_at_the_same_power():
    exact, race = Rule(family=4, planned=9), Rule("normal", 4, 9, "obrien_fleming", race=True)
    found = outlook(race, 1.5)
    assert found.power >= power(exact, 1.5) - 0.01
    assert max(found.runs_different, found.runs_alike) <= 22.0


def test_the_interval_and_the_limit_of_a_spread_cover():
    draws = np.random.default_rng(1).normal(0.0, 2.0, (2000, 4)).std(axis=1, ddof=1)
    inside = [low <= 2.0 <= high for low, high in (spread_interval(spread, 3) for spread in draws)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)
    assert np.mean([spread_limit(spread, 3) >= 2.0 for spread in draws]) == pytest.approx(0.8, abs=0.03)
    for of in (spread_interval, spread_limit):
        with pytest.raises(ValueError, match="two values"):
            of(1.0, 0)


def test_one_comparison_at_exact_looks_is_found_as_often_as_among_all():
    """Power simulates it alone, at its share of α; the whole family must say the same, campaign by campaign."""
    rule = Rule("exact", 3, 9, "square")
    noise = np.random.default_rng(rule.planned).standard_normal((2000, rule.planned, rule.family + 1)) / 2**0.5
    noise[..., 1] += 1.3
    assert power(rule, 1.3) == follow(noise, rule).different[:, 0].mean()
