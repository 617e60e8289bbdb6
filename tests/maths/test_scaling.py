"""ScaleRL's sigmoid: the paper's numbers, a fit that recovers them, intervals that hold and that say "cannot tell"."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from retrain.maths.scaling import Sigmoid, fit_sigmoid, sigmoid_interval

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scaling import evaluations

PAPER = Sigmoid(0.3, 0.61, 1.92, 2542.0)


def test_the_curve_by_hand():
    assert [PAPER.at(c) for c in (1500, 2542, 10_000)] == pytest.approx([0.382596, 0.455, 0.589152], abs=1e-6)
    assert PAPER.at(0.0) == 0.3


@pytest.mark.parametrize(
    "curve", [PAPER, Sigmoid(0.8, 0.3, 1.0, 900.0), Sigmoid(0.02, 1.0, 0.7, 20_000.0), Sigmoid(0.1, 0.9, 4.0, 400.0)]
)
def test_a_fit_without_noise_gives_the_curve_back(curve):
    compute = np.linspace(500, 15_000, 12)
    found = fit_sigmoid(compute, [curve.at(c) for c in compute], curve.start)
    assert (found.asymptote, found.exponent, found.midpoint) == pytest.approx(
        (curve.asymptote, curve.exponent, curve.midpoint), rel=1e-4
    )


def test_the_best_asymptote_is_within_its_limits():
    compute = np.arange(1.0, 9.0)
    rising = 0.1 + 0.1 * compute  # would go on to above 1
    assert fit_sigmoid(compute, rising, 0.1).asymptote <= 1.0
    assert fit_sigmoid(compute, 10 * rising, 1.0, limits=(0.0, 40.0)).asymptote > 9.0


def test_no_other_curve_is_nearer():
    rng = np.random.default_rng(3)
    compute = np.arange(10.0, 61.0, 10.0)
    for _ in range(10):
        scores = 0.3 + 0.4 / (1 + (15 / compute) ** 1.5) + 0.03 * rng.standard_normal(len(compute))
        best = fit_sigmoid(compute, scores, 0.3)
        least = sum((best.at(c) - y) ** 2 for c, y in zip(compute, scores, strict=True))
        for _ in range(300):
            other = Sigmoid(0.3, rng.uniform(0, 1), np.exp(rng.uniform(-1.2, 2)), np.exp(rng.uniform(0.2, 6.3)))
            assert sum((other.at(c) - y) ** 2 for c, y in zip(compute, scores, strict=True)) >= least - 1e-12


@pytest.mark.parametrize(
    ("what", "midpoint", "seeds"), [("asymptote", 12.0, 4), ("asymptote", 40.0, 8), ("midpoint", 20.0, 4)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(what, midpoint, seeds):
    """Also where the curve has hardly got beyond its midpoint. With 95 %, fewer than 20 of 25 are one in a thousand."""
    rng = np.random.default_rng(1)
    compute, curve = np.arange(10.0, 61.0, 10.0), Sigmoid(0.35, 0.8, 1.5, midpoint)
    held = 0
    for _ in range(25):
        found = sigmoid_interval(compute, evaluations(curve, seeds, 200, rng, compute), 0.35, what)
        truth = curve.asymptote if what == "asymptote" else curve.midpoint
        low, high = found.low or 0.0, found.high or np.inf
        assert low <= found.estimate <= high
        held += low <= truth <= high
    assert held >= 20


def test_a_curve_that_has_levelled_off_says_where_and_one_that_rises_does_not():
    rng = np.random.default_rng(2)
    compute = np.arange(10.0, 121.0, 10.0)
    flat = sigmoid_interval(compute, evaluations(Sigmoid(0.3, 0.7, 2.0, 15.0), 8, 200, rng, compute), 0.3, "asymptote")
    assert 0.66 < flat.low < flat.estimate < flat.high < 0.74
    rising = sigmoid_interval(
        compute, evaluations(Sigmoid(0.3, 0.9, 1.2, 200.0), 8, 200, rng, compute), 0.3, "asymptote"
    )
    assert rising.high is None
    assert rising.low is not None


def test_seeds_that_agree_leave_nothing_open():
    compute = np.arange(10.0, 61.0, 10.0)
    curve = Sigmoid(0.35, 0.8, 1.5, 12.0)
    row = [curve.at(c) for c in compute]
    found = sigmoid_interval(compute, [row, row, row], 0.35, "asymptote")
    assert (found.low, found.high) == pytest.approx((0.8, 0.8), abs=1e-3)
    alone = sigmoid_interval(compute, [row], 0.35, "asymptote")
    assert (alone.estimate, alone.low, alone.high) == (pytest.approx(0.8, abs=1e-4), None, None)


def test_a_policy_that_learned_nothing_has_no_midpoint():
    rng = np.random.default_rng(5)
    compute = np.arange(10.0, 61.0, 10.0)
    rows = rng.binomial(200, 0.5, (8, 6)) / 200
    level = sigmoid_interval(compute, rows, 0.5, "asymptote")
    assert level.low is None or level.low < 0.5
    assert level.high is None or level.high > 0.5
    assert sigmoid_interval(compute, rows, 0.5, "midpoint").high is None


@pytest.mark.parametrize(
    ("compute", "scores", "words"),
    [
        ([1, 2, 3, 4], [0.1] * 4, "needs 5 evaluations at rising compute above 0"),
        ([0, 1, 2, 3, 4], [0.1] * 5, "needs 5 evaluations at rising compute above 0"),
        ([1, 2, 2, 3, 4], [0.1] * 5, "needs 5 evaluations at rising compute above 0"),
        ([1, 2, 3, 4, 5], [0.1] * 4, "one score for each compute: got 4 for 5"),
    ],
)
def test_what_cannot_be_fitted_is_refused(compute, scores, words):
    with pytest.raises(ValueError, match=words):
        fit_sigmoid(compute, scores, 0.1)
    with pytest.raises(ValueError, match=r"needs 5|one row of 5 scores"):
        sigmoid_interval(compute, [scores, scores], 0.1, "asymptote")
