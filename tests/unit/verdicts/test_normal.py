"""The normal tests against least squares, scipy's Dunnett and multivariate t, and their error by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from retrain.maths.boundaries import boundaries, final_levels
from retrain.maths.normal import additive_fit, dunnett_p, moderated, step_down, t_p


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
        assert fit.factor[0] == pytest.approx(2.0 / 7)
        assert fit.correlation[0] == pytest.approx(0.5)
        d = table[:, 1] - table[:, 0]
        alone = additive_fit(table[None, :, :2])
        assert t_p(alone.t(), alone.freedom[:, None])[0, 0] == pytest.approx(stats.ttest_1samp(d, 0.0).pvalue)


def test_conditions_without_a_pair_and_tables_without_freedom():
    table = np.array([[0.1, 0.3, np.nan], [0.2, 0.1, np.nan], [np.nan, 0.5, 0.4]])
    fit = additive_fit(table[None])
    assert np.isnan(fit.difference[0, 1])
    assert fit.difference[0, 0] == pytest.approx(0.05)
    assert fit.freedom[0] == 1
    assert additive_fit(table[None, :, :1]).freedom[0] == 0
    assert t_p(additive_fit(table[None, :1]).t(), 0.0)[0, 0] == 1.0
    equal = additive_fit(np.array([[[0.5, 0.6], [0.5, 0.6], [0.5, 0.6]]]), resolution=0.12)
    assert equal.spread[0] == pytest.approx(0.12 / 12**0.5)


@pytest.mark.parametrize(("family", "freedom"), [(2, 3), (4, 20), (3, 1), (4, 28)])
@pytest.mark.parametrize("correlation", [0.5, 0.2])
def test_dunnett_is_the_multivariate_t(family, freedom, correlation):
    shape = np.full((family, family), correlation) + (1.0 - correlation) * np.eye(family)
    reference = stats.multivariate_t(shape=shape, df=freedom, seed=1)
    for t in (1.2, 2.5, 4.0):
        reach = np.full(family, t)
        assert dunnett_p(-t, family, freedom, correlation) == pytest.approx(
            1.0 - reference.cdf(reach, lower_limit=-reach, maxpts=100_000), abs=1e-4
        )
    assert dunnett_p(2.5, 1, freedom) == pytest.approx(2.0 * stats.t.sf(2.5, freedom))


def test_dunnett_by_scipys_test_with_as_many_degrees_of_freedom():
    random = np.random.default_rng(8)
    groups = [random.normal(0.4 * i, 1.0, 9) for i in range(4)]
    found = stats.dunnett(*groups[1:], control=groups[0], rng=np.random.default_rng(0))
    spread = np.sqrt(np.mean([group.var(ddof=1) for group in groups]))
    own = [(group.mean() - groups[0].mean()) / (spread * np.sqrt(2 / 9)) for group in groups[1:]]
    assert found.statistic == pytest.approx(own)
    assert [dunnett_p(t, 3, 32) for t in own] == pytest.approx(found.pvalue, abs=2e-3)


def test_stepping_down():
    t = np.array([1.0, -4.0, np.nan, 2.6])
    adjusted = step_down(t, 24)
    assert adjusted[1] == pytest.approx(dunnett_p(4.0, 4, 24))
    assert adjusted[3] == pytest.approx(dunnett_p(2.6, 3, 24))
    assert adjusted[0] == pytest.approx(dunnett_p(1.0, 2, 24))
    assert adjusted[2] == 1.0
    assert step_down(np.array([2.5, 2.49]), 10)[1] >= step_down(np.array([2.5, 2.49]), 10)[0]
    for freedom in (4.0, 20.0):
        levels = final_levels(3, freedom)
        assert (np.diff(levels) < 0.0).all()
        for j, level in enumerate(levels, start=1):
            assert dunnett_p(float(stats.t.isf(level / 2, freedom)), j, freedom) == pytest.approx(0.05, abs=1e-5)


def test_an_earlier_spread_never_lowers_the_observed_one():
    assert moderated(1.0, 4, 2.0, 4) == (pytest.approx(2.5**0.5), 8)
    assert moderated(2.0, 4, 0.1, 4) == (2.0, 8)
    assert moderated(1.0, 4, 3.0, 100)[1] == 12
    assert moderated(1.0, 4, 3.0, 0) == (1.0, 4)
    with pytest.raises(ValueError, match="negative"):
        moderated(1.0, 4, -1.0, 4)


@pytest.mark.parametrize("spending", ["linear", "square"])
def test_levels_of_looks_spend_what_they_may_on_other_random_numbers(spending):
    planned, family = 6, 3
    marks = boundaries(planned, family, spending)
    share = (np.arange(1, planned + 1) / planned) ** (1 if spending == "linear" else 2)
    assert (marks.level[:2] == 0.0).all()
    assert marks.spent[2:, 0] == pytest.approx(0.05 * share[2:], abs=2e-5)
    assert (np.diff(marks.level[2:], axis=1) <= 0.0).all()
    tables = np.random.default_rng(123).standard_normal((20_000, planned, family + 1))
    for open_ in (1, family):
        stopped = np.zeros(len(tables), dtype=bool)
        for look in range(3, planned + 1):
            fit = additive_fit(tables[:, :look])
            own = t_p(fit.t(), fit.freedom[:, None])[:, :open_]
            stopped |= (own <= marks.level[look - 1, open_ - 1]).any(axis=1)
            assert stopped.mean() == pytest.approx(marks.spent[look - 1, open_ - 1], abs=0.006)


def test_stage_wise_p_values_of_looks():
    marks = boundaries(6, 2, "linear")
    at_level = marks.p(float(marks.level[3, 1]), 4, 2)
    assert at_level == pytest.approx(marks.spent[3, 1], abs=1e-3)
    assert marks.p(1e-9, 4, 2) == pytest.approx(marks.spent[2, 1], abs=1e-4)
    assert marks.p(1.0, 6, 2) == pytest.approx(1.0, abs=0.06)
    assert marks.p(0.9, 1, 2) == 1.0
