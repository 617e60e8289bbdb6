"""Intervals over few seeds: hand-worked cases, limits, and coverage where resampling fails."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from retrain.maths.intervals import iqm_interval, mean_interval
from retrain.maths.statistics import bootstrap_ci


def covers(interval, truth: float) -> bool:
    return interval.low - 1e-12 <= truth <= interval.high + 1e-12


def test_without_skewness_it_is_the_t_interval():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    low, high = stats.t.interval(0.95, 4, x.mean(), x.std(ddof=1) / 5**0.5)
    found = mean_interval(x)
    assert (found.estimate, found.low, found.high) == pytest.approx((3.0, low, high))


def test_the_cubic_undoes_halls_transformation():
    x = np.array([0.90, 0.97, 0.98, 0.99, 0.96, 0.98])
    found, n, s = mean_interval(x), len(x), x.std(ddof=1)
    g = (((x - x.mean()) / s) ** 3).mean()
    reach = stats.t.ppf(0.975, n - 1) / n**0.5
    for end, y in ((found.low, reach), (found.high, -reach)):
        w = (x.mean() - end) / s
        assert w + g * w**2 / 3 + g**2 * w**3 / 27 + g / (6 * n) == pytest.approx(y)
    assert found.estimate - found.low > found.high - found.estimate  # the long tail is below


def test_one_value_equal_values_and_none():
    assert mean_interval([0.5]).low is None
    assert mean_interval([0.5] * 4) == iqm_interval([0.5] * 4)
    assert mean_interval([0.1] * 3).low == mean_interval([0.1] * 3).high == pytest.approx(0.1)
    assert iqm_interval([0.5, 0.6, 0.7]).low is None
    for function in (mean_interval, iqm_interval):
        with pytest.raises(ValueError, match="at least one"):
            function([])


def test_the_trimmed_interval_by_hand():
    x = [0.0, 10.0, 11.0, 12.0, 100.0]
    winsorised = np.array([10.0, 10.0, 11.0, 12.0, 12.0])
    reach = stats.t.ppf(0.975, 2) * (((winsorised - 11.0) ** 2).sum() / 6) ** 0.5
    found = iqm_interval(x)
    assert (found.estimate, found.low, found.high) == pytest.approx((11.0, 11.0 - reach, 11.0 + reach))


def test_equal_accuracies_stand_for_a_step_of_their_scale():
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
    assert 0.92 < trimmed < 0.97
    assert resampled < 0.91
