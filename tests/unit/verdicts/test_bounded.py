"""Score intervals between bounds: Tango's formula, published values, likelihoods maximised by brute force, coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from retrain.maths.bounded import bounded_mean_interval, same_problems_interval, smallest_room, tango_interval
from retrain.maths.statistics import accuracy_interval

Z = stats.norm.ppf(0.975)


def tango_z(gained: int, lost: int, n: int, difference: float) -> float:
    """Tango's statistic as his paper has it, with the closed form of the constrained estimate."""
    a, b, c = 2 * n, -gained - lost + (2 * n - gained + lost) * difference, -lost * difference * (1 - difference)
    lost_share = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    return (gained - lost - n * difference) / math.sqrt(n * (2 * lost_share + difference * (1 - difference)))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 60))
def test_the_ends_are_where_tangos_statistic_reaches_the_quantile(gained, lost, same):
    n = gained + lost + same
    if n < 2:
        return
    found = tango_interval(gained, lost, n)
    assert tango_z(gained, lost, n, found.low) == pytest.approx(Z, abs=1e-6)
    assert tango_z(gained, lost, n, found.high) == pytest.approx(-Z, abs=1e-6)
    mirrored = tango_interval(lost, gained, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_published_intervals():
    """Airway hyper-responsiveness before and after a transplantation, 21 children, as Fagerland, Lydersen and Laake
    (2014) tabulate it."""
    found = tango_interval(1, 7, 21)
    assert (round(found.low, 3), round(found.high, 3)) == (-0.517, -0.026)


def test_answers_that_all_agree_leave_something_open():
    found = tango_interval(0, 0, 128)
    assert found.high == -found.low == pytest.approx(Z**2 / (128 + Z**2))
    assert found == same_problems_interval([0.0] * 128)
    assert found.high == pytest.approx(0.0291, abs=5e-5)
    for wrong in ((-1, 0, 5), (3, 3, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match="parts of n"):
            tango_interval(*wrong)
    assert same_problems_interval([0.5]).low is None
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        same_problems_interval([1.5, 0.0])


def most_likely(support: np.ndarray, counts: np.ndarray, mean: float) -> np.ndarray:
    """Probabilities [values] of largest multinomial likelihood among those with this mean, by a general optimiser."""
    rules = [
        {"type": "eq", "fun": lambda p: p.sum() - 1.0},
        {"type": "eq", "fun": lambda p: p @ support - mean},
    ]
    start = np.full(len(support), 1.0 / len(support))
    found = optimize.minimize(
        lambda p: -(counts * np.log(np.maximum(p, 1e-12))).sum(), start, bounds=[(0, 1)] * len(support),
        constraints=rules, options={"maxiter": 500, "ftol": 1e-10},
    )  # fmt: skip
    assert found.x @ support == pytest.approx(mean, abs=1e-8)
    return found.x


@pytest.mark.parametrize("counts", [(0, 2, 30, 6, 0), (0, 0, 25, 5, 0), (3, 1, 20, 0, 4), (0, 0, 20, 0, 0)])
def test_with_several_samples_the_ends_are_score_ends_of_the_most_likely_distribution(counts):
    support, counts = np.array([-1.0, -0.5, 0.0, 0.5, 1.0]), np.array(counts)
    n, values = counts.sum(), np.repeat(support, counts)
    found = same_problems_interval(values)
    for end, sign in ((found.low, 1.0), (found.high, -1.0)):
        p = most_likely(support, counts, end)
        error = math.sqrt((p @ support**2 - end**2) / n)
        assert (values.mean() - end) / error == pytest.approx(sign * Z, rel=2e-3)


def test_shares_have_wilsons_interval_and_students_quantile_where_asked():
    values = [1.0] * 11 + [0.0] * 9
    wilson = stats.binomtest(11, 20).proportion_ci(0.95, method="wilson")
    found = bounded_mean_interval(values, 0.0, 1.0)
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high))
    theirs, ours = accuracy_interval(values, range(20)), bounded_mean_interval(values, 0.0, 1.0, t=True)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_scores_that_spread_less_than_shares_have_a_narrower_interval():
    random = np.random.default_rng(0)
    scores = random.choice([0.25, 0.5, 0.75], size=200)
    found, as_shares = bounded_mean_interval(scores, 0.0, 1.0, t=True), accuracy_interval(scores, range(200))
    t = stats.t.interval(0.95, 199, scores.mean(), stats.sem(scores))
    assert (found.low, found.high) == pytest.approx(t, abs=2e-3)
    assert as_shares.high - as_shares.low > 2.0 * (found.high - found.low)


def wrongly_kept(losses: np.ndarray) -> float:
    """How often [simulations, problems] of losses, in quarters, exclude a mean loss of 2 points."""
    support = np.arange(-4, 5) / 4.0
    shares = np.stack([(losses == value).mean(axis=1) for value in support], axis=1)
    low = -1.0 + smallest_room((support + 1.0)[None], shares, losses.shape[1], Z)
    return float((low >= -0.02).mean())


@pytest.mark.parametrize("problems", [128, 189, 256])
def test_a_loss_of_two_points_is_excluded_in_at_most_one_case_of_forty(problems):
    """Whole problems lost, gains beside losses, one of four samples lost: the mean is 2 points each time."""
    random = np.random.default_rng(problems)
    u = random.random((4000, problems))
    for losses in (
        np.where(u < 0.02, -1.0, 0.0),
        np.where(u < 0.11, -1.0, np.where(u < 0.20, 1.0, 0.0)),
        np.where(u < 0.01, -1.0, np.where(u < 0.05, -0.25, 0.0)),
    ):
        assert losses.mean() == pytest.approx(-0.02, abs=2e-3)
        assert wrongly_kept(losses) < 0.025 + 3 * (0.025 * 0.975 / 4000) ** 0.5
    assert wrongly_kept(np.zeros((1, problems))) == (problems >= 189)  # what lost nothing is kept, given enough of it
