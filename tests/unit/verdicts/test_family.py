"""Intervals that hold together: enumeration of sign patterns, scipy's distributions, and joint coverage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from retrain.maths.family import sign_flip_interval, simultaneous_intervals, t_interval
from retrain.maths.normal import additive_fit, dunnett_p, dunnett_quantile, step_down
from retrain.maths.statistics import holm, sign_flip_p

STEPS = st.lists(st.integers(-60, 60), min_size=6, max_size=9)


@given(STEPS, st.sampled_from([0.95, 0.9, 0.9875]))
def test_the_interval_holds_0_exactly_where_the_test_does_not_reject(steps, level):
    """No p-value contradicts the interval beside it, whatever the differences."""
    d = np.array(steps) / 64.0
    found = sign_flip_interval(d, level)
    if found.low is None:
        assert 2.0 ** -(len(d) - 1) > 1 - level
        return
    assert (found.low <= 0.0 <= found.high) == (sign_flip_p(d) > 1 - level + 1e-12)
    for end, outward in ((found.low, -1.0), (found.high, 1.0)):
        assert sign_flip_p(d - end) > 1 - level + 1e-12
        assert sign_flip_p(d - end - outward * 1e-6) <= 1 - level + 1e-12


def test_its_ends_are_means_of_subsets():
    d = np.array([0.3, -0.1, 0.8, 0.2, 0.5, 0.9, 0.4])
    means = sorted(np.mean(s) for r in range(1, 8) for s in itertools.combinations(d, r))
    found = sign_flip_interval(d)
    assert (found.low, found.high) == pytest.approx((means[2], means[-3]))  # ⌊2^7·0.025⌋ = 3
    assert sign_flip_interval(d[:6]).low == pytest.approx(d[:6].min())
    assert sign_flip_interval(d[:5]).low is None


def test_beyond_enumeration_the_ends_are_found_by_bisection(monkeypatch):
    d = np.random.default_rng(1).normal(0.2, 1.0, 16)
    exact = sign_flip_interval(d)
    monkeypatch.setattr("retrain.maths.family.ENUMERATED_PAIRS", 4)
    found = sign_flip_interval(d)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-3)
    assert found.low <= exact.low + 1e-12 < exact.high - 1e-12 <= found.high


def test_equal_differences_are_known_up_to_rounding():
    found = sign_flip_interval([0.0] * 6, resolution=1 / 64)
    reach = stats.t.ppf(0.975, 5) / 64 / 36**0.5
    assert (found.low, found.high) == pytest.approx((-reach, reach))
    assert sign_flip_interval([1 / 64] * 6, resolution=1 / 64).low > 0.0  # p = 0.03: a difference of one answer each


@pytest.mark.parametrize(("family", "freedom"), [(1, 7), (2, 10), (4, 5), (4, 28)])
def test_dunnetts_quantile_is_that_of_the_multivariate_t(family, freedom):
    quantile = dunnett_quantile(family, freedom)
    if family == 1:
        assert quantile == pytest.approx(stats.t.ppf(0.975, freedom))
    joint = stats.multivariate_t(shape=0.5 * np.eye(family) + 0.5, df=freedom)
    inside = joint.cdf(np.full(family, quantile), lower_limit=np.full(family, -quantile), random_state=1)
    assert inside == pytest.approx(0.95, abs=5e-4)


def test_pooled_intervals_are_those_of_the_analysis_of_variance():
    x = np.random.default_rng(2).normal(size=(7, 4)) + np.arange(7)[:, None]
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()
    error = ((residual**2).sum() / 18 * 2 / 7) ** 0.5
    for column, found in enumerate(simultaneous_intervals(x, "normal"), start=1):
        mean = x[:, column].mean() - x[:, 0].mean()
        reach = dunnett_quantile(3, 18) * error
        assert (found.estimate, found.low, found.high) == pytest.approx((mean, mean - reach, mean + reach))
    alone = simultaneous_intervals(x[:, :2], "normal")[0]
    t = stats.ttest_rel(x[:, 1], x[:, 0]).confidence_interval(0.95)
    assert (alone.low, alone.high) == pytest.approx((t.low, t.high))


def test_missing_runs_and_conditions_without_a_pair():
    x = np.random.default_rng(3).normal(size=(9, 4))
    x[2, 1], x[:, 3], x[5, 0] = np.nan, np.nan, np.nan
    for kind in ("exact", "normal"):
        first, second, none = simultaneous_intervals(x, kind)
        assert none is None
        assert first.low < first.estimate < first.high
        assert second.low < second.estimate < second.high
    d = (x[:, 2] - x[:, 0])[~np.isnan(x[:, 0])]
    own = simultaneous_intervals(x, "exact")[1]
    assert own == sign_flip_interval(d, 1 - 0.05 / 3)  # all three count, also what could not be tested
    few = simultaneous_intervals(x[:4], "exact")[1]
    assert few == t_interval(x[:4, 2] - x[:4, 0], 1 - 0.05 / 3)
    with pytest.raises(ValueError, match="exact or normal"):
        simultaneous_intervals(x, "both")


def test_with_missing_runs_an_interval_is_of_the_fit_that_is_tested():
    """An end passes 0 where the first step of the test passes its level, whatever is missing."""
    x = np.random.default_rng(5).normal(size=(7, 4))
    x[1, 0], x[3, 2], x[4, 3] = np.nan, np.nan, np.nan
    fit = additive_fit(x[None])
    freedom, correlation = float(fit.freedom[0]), float(fit.correlation[0])
    assert correlation != 0.5
    found = simultaneous_intervals(x, "normal")
    assert [each.estimate for each in found] == pytest.approx(fit.difference[0])
    reach = np.array([each.high - each.estimate for each in found]) / (np.sqrt(fit.factor[0]) * fit.spread[0])
    assert dunnett_p(float(reach[0]), 3, freedom, correlation) == pytest.approx(0.05, abs=1e-6)
    assert reach == pytest.approx(reach[0])
    for shift in np.linspace(0.5, 3.0, 26):
        y = x + np.array([0.0, shift, 0.0, 0.0])
        t = additive_fit(y[None]).t()[0]
        if np.nanargmax(np.abs(t)) == 0:
            different = step_down(t, freedom, correlation)[0] <= 0.05
            assert different == (simultaneous_intervals(y, "normal")[0].low > 0.0)


@pytest.mark.parametrize(("kind", "seeds"), [("exact", 8), ("exact", 5), ("normal", 5)])
def test_the_intervals_of_four_differences_hold_at_once_where_t_alone_does_not(kind, seeds):
    random = np.random.default_rng(seeds)
    x = random.normal(size=(800, seeds, 5))
    hits = alone = 0
    for table in x:
        hits += all(each.low <= 0.0 <= each.high for each in simultaneous_intervals(table, kind))
        plain = [t_interval(table[:, j] - table[:, 0]) for j in range(1, 5)]
        alone += all(each.low <= 0.0 <= each.high for each in plain)
    assert alone / 800 < 0.88
    assert hits / 800 > 0.93


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=8, max_size=9))
def test_what_bonferronis_interval_shows_holms_test_shows_too(rows):
    """So the only disagreement there can be is a difference that Holm shows and the interval does not."""
    table = np.column_stack([np.zeros(len(rows)), np.array(rows) / 8.0])
    adjusted = holm([sign_flip_p(table[:, j]) for j in range(1, 4)])
    for p, found in zip(adjusted, simultaneous_intervals(table, "exact"), strict=True):
        if not found.low <= 0.0 <= found.high:
            assert p <= 0.05 + 1e-12
