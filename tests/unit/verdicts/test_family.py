import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from retrain.maths.boundaries import boundaries, final_levels
from retrain.maths.collapse import collapses, flagged, gaps, threshold
from retrain.maths.family import sign_flip_interval, simultaneous_intervals, t_interval
from retrain.maths.normal import additive_fit, dunnett_p, dunnett_quantile, moderated, step_down, t_p
from retrain.maths.permutation import closed_permutation, permutation_p
from retrain.maths.statistics import sign_flip_p

# The inverted sign-flip test


@given(st.lists(st.integers(-60, 60), min_size=6, max_size=9), st.sampled_from([0.95, 0.9, 0.9875]))
def test_the_interval_holds_0_exactly_where_the_test_does_not_reject(steps, level):
    d = np.array(steps) / 64.0
    found = sign_flip_interval(d, level)
    if found.low is None:
        assert 2.0 ** -(len(d) - 1) > 1 - level
        return
    assert (found.low <= 0.0 <= found.high) == (sign_flip_p(d) > 1 - level + 1e-12)
    for end, outward in ((found.low, -1.0), (found.high, 1.0)):
        assert sign_flip_p(d - end) > 1 - level + 1e-12
        assert sign_flip_p(d - end - outward * 1e-6) <= 1 - level + 1e-12


def test_its_ends_are_means_of_subsets_and_as_wide_as_a_step_of_the_scale():
    d = np.array([0.3, -0.1, 0.8, 0.2, 0.5, 0.9, 0.4])
    means = sorted(np.mean(s) for r in range(1, 8) for s in itertools.combinations(d, r))
    found = sign_flip_interval(d)
    assert (found.low, found.high) == pytest.approx((means[2], means[-3]))  # ⌊2^7·0.025⌋ = 3
    assert sign_flip_interval(d[:5]).low is None
    found = sign_flip_interval([0.0] * 6, resolution=1 / 64)
    reach = stats.t.ppf(0.975, 5) / 64 / 36**0.5
    assert (found.low, found.high) == pytest.approx((-reach, reach))
    many = np.random.default_rng(1).normal(0.2, 1.0, 22)  # beyond enumeration, by bisection
    found = sign_flip_interval(many)
    for end, outward in ((found.low, -1e-3), (found.high, 1e-3)):
        assert sign_flip_p(many - end) > 0.0499
        assert sign_flip_p(many - end - outward) < 0.0501


# The normal test: least squares over seed + condition, and Dunnett


def least_squares(table: np.ndarray) -> tuple[np.ndarray, float, int, np.ndarray]:
    """Leads over the first column, residual squares, freedom and the leads' covariance in units of the variance."""
    seeds, conditions = table.shape
    cells = np.argwhere(~np.isnan(table))
    design = np.zeros((len(cells), seeds + conditions - 1))
    for row, (seed, condition) in enumerate(cells):
        design[row, seed] = 1.0
        if condition:
            design[row, seeds + condition - 1] = 1.0
    values = table[~np.isnan(table)]
    solved, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    residual = values - design @ solved
    inverse = np.linalg.pinv(design.T @ design)[seeds:, seeds:]
    return solved[seeds:], float(residual @ residual), len(values) - int(rank), inverse


@pytest.mark.parametrize("missing", [[], [(2, 3)], [(0, 0), (5, 1), (5, 2)]], ids=["whole", "one", "several"])
def test_the_fit_is_least_squares_with_runs_missing(missing):
    table = np.random.default_rng(4).normal(size=(7, 4)) + np.arange(7)[:, None]
    for cell in missing:
        table[cell] = np.nan
    fit = additive_fit(table[None])
    lead, squares, freedom, covariance = least_squares(table)
    assert fit.difference[0] == pytest.approx(lead)
    assert fit.freedom[0] == freedom
    assert fit.spread[0] ** 2 * freedom == pytest.approx(squares)
    assert fit.factor[0] == pytest.approx(np.diag(covariance))
    scale = np.sqrt(np.diag(covariance))
    between = (covariance / np.outer(scale, scale))[~np.eye(3, dtype=bool)]
    assert fit.correlation[0] == pytest.approx(between.min())
    if not missing:
        d = table[:, 1] - table[:, 0]
        alone = additive_fit(table[None, :, :2])
        assert t_p(alone.t(), alone.freedom[:, None])[0, 0] == pytest.approx(stats.ttest_1samp(d, 0.0).pvalue)


def test_conditions_without_a_pair_and_tables_without_freedom():
    table = np.array([[0.1, 0.3, np.nan], [0.2, 0.1, np.nan], [np.nan, 0.5, 0.4]])
    fit = additive_fit(table[None])
    assert np.isnan(fit.difference[0, 1])
    assert fit.difference[0, 0] == pytest.approx(0.05)
    assert t_p(additive_fit(table[None, :1]).t(), 0.0)[0, 0] == 1.0
    equal = additive_fit(np.array([[[0.5, 0.6], [0.5, 0.6], [0.5, 0.6]]]), resolution=0.12)
    assert equal.spread[0] == pytest.approx(0.12 / 12**0.5)


@pytest.mark.parametrize(("family", "freedom", "correlation"), [(2, 3, 0.5), (4, 20, 0.2), (3, 1, 0.5), (4, 28, 0.5)])
def test_dunnett_is_the_multivariate_t(family, freedom, correlation):
    shape = np.full((family, family), correlation) + (1.0 - correlation) * np.eye(family)
    reference = stats.multivariate_t(shape=shape, df=freedom, seed=1)
    for t in (1.2, 2.5, 4.0):
        reach = np.full(family, t)
        outside = 1.0 - reference.cdf(reach, lower_limit=-reach, maxpts=100_000)
        assert dunnett_p(-t, family, freedom, correlation) == pytest.approx(outside, abs=1e-4)
    assert dunnett_p(2.5, 1, freedom) == pytest.approx(2.0 * stats.t.sf(2.5, freedom))
    assert dunnett_p(dunnett_quantile(family, freedom), family, freedom) == pytest.approx(0.05, abs=5e-4)


def test_stepping_down():
    t = np.array([1.0, -4.0, np.nan, 2.6])
    expected = [dunnett_p(1.0, 2, 24), dunnett_p(4.0, 4, 24), 1.0, dunnett_p(2.6, 3, 24)]
    assert step_down(t, 24) == pytest.approx(expected)
    assert step_down(np.array([2.5, 2.49]), 10)[1] >= step_down(np.array([2.5, 2.49]), 10)[0]
    levels = final_levels(3, 20.0)
    assert (np.diff(levels) < 0.0).all()
    for j, level in enumerate(levels, start=1):
        assert dunnett_p(float(stats.t.isf(level / 2, 20.0)), j, 20.0) == pytest.approx(0.05, abs=1e-5)


def test_an_earlier_spread_never_lowers_the_observed_one():
    assert moderated(1.0, 4, 2.0, 4) == (pytest.approx(2.5**0.5), 8)
    assert moderated(2.0, 4, 0.1, 4) == (2.0, 8)
    assert moderated(1.0, 4, 3.0, 100)[1] == 12
    assert moderated(1.0, 4, 3.0, 0) == (1.0, 4)


@pytest.mark.parametrize("spending", ["linear", "square"])
def test_levels_of_looks_spend_what_they_may_on_other_random_numbers(spending):
    planned, family = 6, 3
    marks = boundaries(planned, family, spending)
    share = (np.arange(1, planned + 1) / planned) ** (1 if spending == "linear" else 2)
    assert (marks.level[:2] == 0.0).all()
    assert marks.spent[2:, 0] == pytest.approx(0.05 * share[2:], abs=2e-5)
    assert (np.diff(marks.level[2:], axis=1) <= 0.0).all()
    tables = np.random.default_rng(123).standard_normal((10_000, planned, family + 1))
    for open_ in (1, family):
        stopped = np.zeros(len(tables), dtype=bool)
        for look in range(3, planned + 1):
            fit = additive_fit(tables[:, :look])
            own = t_p(fit.t(), fit.freedom[:, None])[:, :open_]
            stopped |= (own <= marks.level[look - 1, open_ - 1]).any(axis=1)
            assert stopped.mean() == pytest.approx(marks.spent[look - 1, open_ - 1], abs=0.008)
    at_level = marks.p(float(marks.level[3, 1]), 4, 2)
    assert at_level == pytest.approx(marks.spent[3, 1], abs=1e-3)
    assert marks.p(1e-9, 4, 2) == pytest.approx(marks.spent[2, 1], abs=1e-4)
    assert marks.p(0.9, 1, 2) == 1.0


# Intervals of a family


def test_pooled_intervals_are_those_of_the_analysis_of_variance():
    x = np.random.default_rng(2).normal(size=(7, 4)) + np.arange(7)[:, None]
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()
    error = ((residual**2).sum() / 18 * 2 / 7) ** 0.5
    for column, found in enumerate(simultaneous_intervals(x, "normal"), start=1):
        mean = x[:, column].mean() - x[:, 0].mean()
        reach = dunnett_quantile(3, 18) * error
        assert (found.estimate, found.low, found.high) == pytest.approx((mean, mean - reach, mean + reach))


def test_missing_runs_and_conditions_without_a_pair():
    """All comparisons count, also what could not be tested; with missing runs the fit of the test is the estimate."""
    x = np.random.default_rng(3).normal(size=(9, 4))
    x[2, 1], x[:, 3], x[5, 0] = np.nan, np.nan, np.nan
    first, second, none = simultaneous_intervals(x, "normal")
    assert none is None
    fit = additive_fit(x[None])
    assert [first.estimate, second.estimate] == pytest.approx(fit.difference[0, :2])
    reach = (first.high - first.estimate) / (np.sqrt(fit.factor[0, 0]) * fit.spread[0])
    assert dunnett_p(float(reach), 3, float(fit.freedom[0]), float(fit.correlation[0])) == pytest.approx(0.05, abs=1e-6)
    d = (x[:, 2] - x[:, 0])[~np.isnan(x[:, 0])]
    assert simultaneous_intervals(x, "exact")[1:] == [sign_flip_interval(d, 1 - 0.05 / 3), None]
    few = simultaneous_intervals(x[:4], "exact")[1]
    assert few == t_interval(x[:4, 2] - x[:4, 0], 1 - 0.05 / 3)


# Permutation within seeds


def enumerated(table: np.ndarray) -> float:
    """p of "all alike" by going through every arrangement one by one."""

    def statistic(rows: list[tuple[float, ...]]) -> float:
        sums = np.sum(rows, axis=0)
        return float(np.abs(sums[1:] - sums[0]).max())

    every = [
        statistic(list(rows)) for rows in itertools.product(*(itertools.permutations(row) for row in table.tolist()))
    ]
    return float(np.mean(np.array(every) >= statistic([tuple(row) for row in table.tolist()]) - 1e-9))


def test_every_arrangement_is_counted_and_a_condition_differs_when_every_set_with_it_is_rejected():
    random = np.random.default_rng(0)
    ties = np.array([[1.0, 2.0, 2.0], [1.0, 1.0, 2.0], [0.0, 2.0, 1.0]])
    for table in (random.normal(size=(4, 3)) + np.arange(3), random.normal(size=(2, 4)), ties):
        assert permutation_p(table) == pytest.approx(enumerated(table))
    table = random.normal([0.0, 2.0, 0.5], 1.0, (4, 3))
    single, both = [enumerated(table[:, [0, i]]) for i in (1, 2)], enumerated(table)
    assert closed_permutation(table) == pytest.approx([max(single[0], both), max(single[1], both)])
    pair = random.normal([0.0, 0.8], 1.0, (9, 2))
    assert closed_permutation(pair)[0] == sign_flip_p(pair[:, 1] - pair[:, 0])


def test_permutation_with_missing_runs_and_sampled_arrangements():
    table = np.random.default_rng(3).normal([0.0, 3.0, 0.0, 0.0], 1.0, (8, 4))
    table[1, 2] = np.nan
    table[:, 3] = np.nan
    found = closed_permutation(table)
    alone, both = sign_flip_p(table[:, 1] - table[:, 0]), permutation_p(np.delete(table, 1, axis=0)[:, :3])
    assert (found[0], found[2]) == (max(alone, both), 1.0)
    whole = np.random.default_rng(4).normal([0.0, 1.5, 0.0], 1.0, (5, 3))
    bigger = permutation_p(np.vstack([whole, np.zeros(3)]), sampled=20_000)  # a seed without differences: same p
    assert bigger == pytest.approx(permutation_p(whole), abs=0.01)


# Collapsed runs


def test_a_collapse_is_a_fall_against_the_other_conditions():
    table = np.linspace(0.0, 3.0, 7)[:, None] + np.array([0.0, 1.0, -2.0])
    table[4, 1] -= 5.0
    assert gaps(table)[4] == pytest.approx([-2.5, 5.0, -2.5])  # medians of (0, −5) and (5, 5)
    assert gaps(table)[np.arange(7) != 4] == pytest.approx(np.zeros((6, 3)))
    table = 0.02 * np.random.default_rng(0).standard_normal((8, 5)) + 0.7
    table[3, 0] -= 0.4
    table[6, 2] -= 0.2
    first, second = collapses(table)
    assert [(each.seed, each.condition) for each in (first, second)] == [(3, 0), (6, 2)]
    assert first.gap == pytest.approx(0.4, abs=0.06)
    table[3, 0] += 0.8
    assert [each.seed for each in collapses(table)] == [6]  # a rise is no collapse


def test_collapses_among_missing_and_equal_runs_and_in_normal_tables():
    table = np.random.default_rng(3).standard_normal((7, 4))
    table[2, 1] = table[0, 0] = table[:, 3] = np.nan
    table[5, 2] -= 30.0
    (found,) = collapses(table)
    assert (found.seed, found.condition) == (5, 2)
    assert collapses(table[:3]) == []  # too few seeds to know what is usual
    pair = np.column_stack([np.zeros(8), 0.1 * np.array([1.0, -1.0, 0.5, -0.5, 0.8, -0.7, 0.2, 0.0])])
    for column, change in ((1, -3.0), (0, 3.0)):  # of a pair the lower one fell
        moved = pair.copy()
        moved[5, 1] += change
        assert [(each.seed, each.condition) for each in collapses(moved)] == [(5, column)]
    steps = np.full((6, 2), 0.5)
    steps[0, 1] -= 1 / 128
    assert collapses(steps, resolution=1 / 128) == []  # one answer of 128
    tables = np.random.default_rng(77).standard_normal((3000, 8, 5))
    assert flagged(tables).any(axis=(1, 2)).mean() == pytest.approx(0.05, abs=0.015)
    assert threshold(8, 5) > 4.0
