"""Intervals over few seeds: hand-worked cases, limits, and coverage where resampling fails."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from retrain.maths.intervals import (
    SIMULATED_SEEDS,
    _trimmed_quantile,
    iqm_interval,
    mean_interval,
)
from retrain.maths.statistics import bootstrap_ci


def covers(interval, truth: float) -> bool:
    return interval.low - 1e-12 <= truth <= interval.high + 1e-12


def test_what_is_no_share_has_the_t_interval():
    x = np.array([1.0, 2.0, 3.0, 4.0, 7.0])
    low, high = stats.t.interval(0.95, 4, x.mean(), x.std(ddof=1) / 5**0.5)
    found = mean_interval(x)
    assert (found.estimate, found.low, found.high) == pytest.approx((3.4, low, high))


def test_the_ends_of_a_share_lie_as_many_of_their_own_standard_errors_away():
    x = np.array([0.90, 0.97, 0.98, 0.99, 0.96, 0.98])
    found, m = mean_interval(x, share=True), x.mean()
    factor = x.var(ddof=1) / (m * (1 - m)) / len(x)
    for end in (found.low, found.high):
        assert abs(m - end) / (factor * end * (1 - end)) ** 0.5 == pytest.approx(stats.t.ppf(0.975, 5))
    assert found.estimate - found.low > found.high - found.estimate  # the long tail is below
    mirrored = mean_interval(1 - x, share=True)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))
    narrow = 0.5 + 1e-4 * np.arange(5)
    t, score = mean_interval(narrow), mean_interval(narrow, share=True)
    assert (score.low, score.high) == pytest.approx((t.low, t.high), abs=1e-9)  # the middle of the scale
    with pytest.raises(ValueError, match="shares lie in"):
        mean_interval([0.5, 1.1], share=True)


def test_one_value_equal_values_and_none():
    assert mean_interval([0.5]).low is None
    assert mean_interval([0.5] * 4) == mean_interval([0.5] * 4, share=True) == iqm_interval([0.5] * 4)
    assert mean_interval([0.1] * 3).low == mean_interval([0.1] * 3).high == pytest.approx(0.1)
    assert iqm_interval([0.5, 0.6, 0.7]).low is None
    for function in (mean_interval, iqm_interval):
        with pytest.raises(ValueError, match="at least one"):
            function([])


def test_equal_shares_are_known_up_to_rounding():
    found = mean_interval([0.5] * 4, share=True, resolution=0.01)
    reach = stats.t.ppf(0.975, 3) * 0.01 / 12**0.5 / 2
    assert (found.low, found.high) == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-5)
    perfect = mean_interval([1.0] * 4, share=True, resolution=0.01)
    assert 0.98 < perfect.low < perfect.high == pytest.approx(1.0)
    spread = [0.3, 0.5, 0.6, 0.4]
    assert mean_interval(spread, share=True, resolution=0.01) == mean_interval(spread, share=True)


def test_the_trimmed_interval_by_hand():
    x = [0.0, 10.0, 11.0, 12.0, 100.0]
    winsorised = np.array([10.0, 10.0, 11.0, 12.0, 12.0])
    reach = _trimmed_quantile(5, 0.95) * (((winsorised - 11.0) ** 2).sum() / 6) ** 0.5
    found = iqm_interval(x)
    assert (found.estimate, found.low, found.high) == pytest.approx((11.0, 11.0 - reach, 11.0 + reach))


@pytest.mark.parametrize(("n", "wider"), [(5, 1.14), (8, 1.13), (16, 1.05), (50, 1.01)])
def test_the_quantile_of_the_trimmed_t_is_a_little_above_students_and_tends_to_it(n, wider):
    kept = n - 2 * (n // 4)
    assert _trimmed_quantile(n, 0.95) / stats.t.ppf(0.975, kept - 1) == pytest.approx(wider, abs=0.015)


def test_equal_accuracies_are_known_up_to_rounding():
    tied = [0.9375, 0.9375, 0.9375, 0.875, 1.0]
    assert iqm_interval(tied).low == iqm_interval(tied).high
    found = iqm_interval(tied, resolution=1 / 16)
    assert found.low < found.estimate == 0.9375 < found.high
    distinct = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert iqm_interval(distinct, resolution=0.01) == iqm_interval(distinct)


@pytest.mark.parametrize("n", [5, 8])
def test_coverage_with_few_seeds_where_the_percentile_bootstrap_is_too_narrow(n):
    random = np.random.default_rng(n)
    draws = random.normal(size=(1500, n))
    t = sum(covers(mean_interval(x), 0.0) for x in draws) / 1500
    trimmed = sum(covers(iqm_interval(x), 0.0) for x in draws) / 1500
    resampled = sum(covers(bootstrap_ci(x, random, resamples=500), 0.0) for x in draws[:400]) / 400
    assert 0.93 < t < 0.97
    assert 0.93 < trimmed < 0.97
    assert resampled < 0.91


@pytest.mark.parametrize("n", [5, 16])
def test_coverage_of_shares_crowded_against_one_where_t_is_too_narrow(n):
    draws = np.random.default_rng(n).beta(9.0, 1.0, size=(3000, n))
    t, score = (sum(covers(mean_interval(x, share=share), 0.9) for x in draws) / 3000 for share in (False, True))
    assert t < 0.925 < score < 0.965


def test_the_trimmed_error_is_never_below_that_of_a_step_of_the_scale():
    """With h values kept and a scale in steps of r: √((h − 1)·r²/12 / (h(h − 1))), a uniform error within a step."""
    distinct = np.array([0.1, 0.2, 0.3, 0.45, 0.5, 0.6, 0.75, 0.9])
    winsorised = np.clip(distinct, distinct[2], distinct[5])
    error = (((winsorised - winsorised.mean()) ** 2).sum() / (4 * 3)) ** 0.5
    known = iqm_interval(distinct)
    quantile = (known.high - known.estimate) / error  # of eight values, whatever they are
    tied = iqm_interval([0.5] * 8, resolution=1 / 16)
    assert tied.high - tied.estimate == pytest.approx(quantile * (1 / 16) / (12 * 4) ** 0.5)
    step = 2.0  # of the scale, when the values themselves differ by less
    coarse = iqm_interval(distinct, resolution=step)
    assert coarse.high - coarse.estimate == pytest.approx(quantile * step / (12 * 4) ** 0.5)


def test_the_trimmed_interval_of_many_values_is_tukey_and_mclaughlins():
    x = np.sort(np.random.default_rng(3).normal(size=4 * SIMULATED_SEEDS))
    n = len(x)
    kept, winsorised = n // 2, np.clip(x, x[n // 4], x[n - 1 - n // 4])
    error = (((winsorised - winsorised.mean()) ** 2).sum() / (kept * (kept - 1))) ** 0.5
    found = iqm_interval(x)
    assert found.high - found.estimate == pytest.approx(stats.t.ppf(0.975, kept - 1) * error)
