import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from retrain.maths.bounded import bounded_mean_interval, smallest_room
from retrain.maths.crossed import new_problems_interval
from retrain.maths.intervals import SIMULATED_SEEDS, iqm_interval, mean_interval
from retrain.maths.statistics import accuracy_interval

Z = stats.norm.ppf(0.975)


def ends(interval):
    return (interval.low, interval.high)


def coverage(intervals, truth: float) -> float:
    return float(np.mean([found.low - 1e-12 <= truth <= found.high + 1e-12 for found in intervals]))


def test_the_ends_of_a_share_lie_as_many_of_their_own_standard_errors_away():
    """What is no share has the t-interval."""
    x = np.array([1.0, 2.0, 3.0, 4.0, 7.0])
    assert ends(mean_interval(x)) == pytest.approx(stats.t.interval(0.95, 4, x.mean(), stats.sem(x)))
    x = np.array([0.90, 0.97, 0.98, 0.99, 0.96, 0.98])
    found, m = mean_interval(x, share=True), x.mean()
    factor = x.var(ddof=1) / (m * (1 - m)) / len(x)
    for end in ends(found):
        assert abs(m - end) / (factor * end * (1 - end)) ** 0.5 == pytest.approx(stats.t.ppf(0.975, 5))
    mirrored = mean_interval(1 - x, share=True)
    assert ends(mirrored) == pytest.approx((1 - found.high, 1 - found.low))


def test_one_value_equal_values_and_none():
    assert mean_interval([0.5]).low is None
    assert mean_interval([0.5] * 4) == mean_interval([0.5] * 4, share=True) == iqm_interval([0.5] * 4)
    assert iqm_interval([0.5, 0.6, 0.7]).low is None


def test_equal_shares_are_known_up_to_rounding():
    found = mean_interval([0.5] * 4, share=True, resolution=0.01)
    reach = stats.t.ppf(0.975, 3) * 0.01 / 12**0.5 / 2
    assert ends(found) == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-5)
    perfect = mean_interval([1.0] * 4, share=True, resolution=0.01)
    assert 0.98 < perfect.low < perfect.high == pytest.approx(1.0)
    spread = [0.3, 0.5, 0.6, 0.4]
    assert mean_interval(spread, share=True, resolution=0.01) == mean_interval(spread, share=True)


def test_the_trimmed_interval_of_many_values_is_tukey_and_mclaughlins():
    x = np.sort(np.random.default_rng(3).normal(size=4 * SIMULATED_SEEDS))
    n = len(x)
    kept, winsorised = n // 2, np.clip(x, x[n // 4], x[n - 1 - n // 4])
    error = (((winsorised - winsorised.mean()) ** 2).sum() / (kept * (kept - 1))) ** 0.5
    found = iqm_interval(x)
    assert found.high - found.estimate == pytest.approx(stats.t.ppf(0.975, kept - 1) * error)


def test_coverage_with_few_seeds_where_t_is_too_narrow_for_shares():
    draws = np.random.default_rng(5).normal(size=(1200, 5))
    assert 0.93 < coverage(map(mean_interval, draws), 0.0) < 0.97
    assert 0.93 < coverage(map(iqm_interval, draws), 0.0) < 0.97
    shares = np.random.default_rng(5).beta(9.0, 1.0, size=(1500, 5))  # crowded against 1
    t, score = (coverage((mean_interval(x, share=share) for x in shares), 0.9) for share in (False, True))
    assert t < 0.925 < score < 0.97


def tango_interval(gained: int, lost: int, n: int):
    return bounded_mean_interval(np.repeat([1.0, -1.0, 0.0], [gained, lost, n - gained - lost]), -1.0, 1.0)


def tango_z(gained: int, lost: int, n: int, difference: float) -> float:
    """Tango's statistic as his paper has it, with the closed form of the constrained estimate."""
    a, b, c = 2 * n, -gained - lost + (2 * n - gained + lost) * difference, -lost * difference * (1 - difference)
    lost_share = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
    return (gained - lost - n * difference) / math.sqrt(n * (2 * lost_share + difference * (1 - difference)))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 60))
def test_the_ends_are_where_tangos_statistic_reaches_the_quantile(gained, lost, same):
    n = gained + lost + same
    found = tango_interval(gained, lost, n)
    assert tango_z(gained, lost, n, found.low) == pytest.approx(Z, abs=1e-6)
    assert tango_z(gained, lost, n, found.high) == pytest.approx(-Z, abs=1e-6)


def test_published_intervals_and_answers_that_all_agree():
    """Airway hyper-responsiveness around a transplantation, tabulated by Fagerland, Lydersen and Laake (2014)."""
    assert [round(end, 3) for end in ends(tango_interval(1, 7, 21))] == [-0.517, -0.026]
    found = tango_interval(0, 0, 128)
    assert found.high == -found.low == pytest.approx(Z**2 / (128 + Z**2))
    assert found == bounded_mean_interval([0.0] * 128, -1.0, 1.0)
    assert bounded_mean_interval([0.5], -1.0, 1.0).low is None
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        bounded_mean_interval([1.5, 0.0], -1.0, 1.0)


def test_shares_have_wilsons_interval_and_students_quantile_where_asked():
    values = [1.0] * 11 + [0.0] * 9
    wilson = stats.binomtest(11, 20).proportion_ci(0.95, method="wilson")
    assert ends(bounded_mean_interval(values, 0.0, 1.0)) == pytest.approx((wilson.low, wilson.high))
    theirs, ours = accuracy_interval(values, range(20)), bounded_mean_interval(values, 0.0, 1.0, t=True)
    assert ends(ours) == pytest.approx(ends(theirs))
    scores = np.random.default_rng(0).choice([0.25, 0.5, 0.75], size=200)  # which spread less than shares
    t = stats.t.interval(0.95, 199, scores.mean(), stats.sem(scores))
    assert ends(bounded_mean_interval(scores, 0.0, 1.0, t=True)) == pytest.approx(t, abs=2e-3)


def test_a_loss_of_two_points_is_excluded_in_at_most_one_case_of_forty():
    """Whole problems lost, gains beside losses, one of four samples lost: the mean is 2 points each time."""
    support = np.arange(-4, 5) / 4.0

    def wrongly_kept(losses: np.ndarray) -> float:
        shares = np.stack([(losses == value).mean(axis=1) for value in support], axis=1)
        low = -1.0 + smallest_room((support + 1.0)[None], shares, losses.shape[1], Z)
        return float((low >= -0.02).mean())

    u = np.random.default_rng(189).random((4000, 189))
    for losses in (
        np.where(u < 0.02, -1.0, 0.0),
        np.where(u < 0.11, -1.0, np.where(u < 0.20, 1.0, 0.0)),
        np.where(u < 0.01, -1.0, np.where(u < 0.05, -0.25, 0.0)),
    ):
        assert wrongly_kept(losses) < 0.025 + 3 * (0.025 * 0.975 / 4000) ** 0.5
    assert wrongly_kept(np.zeros((1, 189))) == 1.0  # what lost nothing is kept, given enough of it
    assert wrongly_kept(np.zeros((1, 128))) == 0.0


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
    assert ends(new_problems_interval(paired(d))) == pytest.approx(t)
    same = new_problems_interval(np.zeros((5, 30, 2)), resolution=1 / 30)
    assert same.high == pytest.approx(stats.t.ppf(0.975, 4) / 30 / 30**0.5)
    assert new_problems_interval(np.zeros((1, 30, 2))).low is None
