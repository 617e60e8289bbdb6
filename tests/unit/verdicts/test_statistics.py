import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from retrain.maths import statistics

mean = partial(np.mean, axis=-1)
NUMBERS = st.lists(st.floats(-100, 100), min_size=1, max_size=10)


def test_copies_of_a_sample_add_no_certainty():
    x = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    once = statistics.accuracy_interval(x, range(8))
    expected = statistics.score_interval(x.mean(), x.mean() * (1 - x.mean()) / stats.sem(x) ** 2, stats.t.ppf(0.975, 7))
    assert (once.estimate, once.low, once.high) == pytest.approx((x.mean(), expected.low, expected.high))
    copied = statistics.accuracy_interval(np.repeat(x, 16), np.repeat(np.arange(8), 16).tolist())
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high))


def test_perfect_and_tiny_evaluations():
    perfect = statistics.accuracy_interval([True] * 128, range(128))
    assert (perfect.estimate, perfect.high) == (1.0, 1.0)
    assert 0.95 < perfect.low < 0.98
    assert statistics.accuracy_interval([True, False], ["p", "p"]).low is None
    half = statistics.accuracy_interval([True, False] * 50, np.repeat(np.arange(50), 2).tolist())
    assert half.low < 0.45  # identical problems do not make it narrower than 100 free samples


@given(st.lists(st.floats(0, 1e6), max_size=8))
def test_gini_is_the_pairwise_definition(values):
    got = statistics.gini(values)
    n, total = len(values), sum(values)
    if n < 2 or total == 0:
        assert got == (None if n < 2 else 0.0)
        return
    pairs = sum(abs(a - b) for a, b in itertools.product(values, repeat=2))
    assert got == pytest.approx(pairs / (2 * n * n * (total / n)) * n / (n - 1), abs=1e-9)


def test_gini_counts_negative_values_from_the_smallest_there_can_be():
    """Declared or found, the origin is the same for all."""
    assert statistics.gini([-1, 3], -3) == statistics.gini([2, 6]) == pytest.approx(0.5)
    assert statistics.gini([-1e308, 1e308, 1e308]) == statistics.gini([1e308, 1e308, 0.0]) == pytest.approx(0.5)
    assert statistics.gini([-1, 3], -0.5) == statistics.gini([-1, 3]) == 1.0  # a declaration that a value disproves
    assert statistics.gini([-0.3, -(0.1 + 0.2)]) == 0.0


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20))
def test_iqm_is_the_trimmed_mean(values):
    assert statistics.iqm(np.array(values)) == pytest.approx(float(stats.trim_mean(values, 0.25)), abs=1e-9)


def test_bootstrap_is_seeded_and_close_to_scipy():
    x = np.random.default_rng(1).normal(size=40)
    got, again = (statistics.bootstrap_interval([x], np.random.default_rng(2), mean) for _ in range(2))
    assert got == again
    assert got.estimate == pytest.approx(x.mean())
    level = 2 * stats.norm.cdf((40 / 39) ** 0.5 * stats.t.ppf(0.975, 39)) - 1  # wider, as Hesterberg advises
    theirs = stats.bootstrap(
        (x,), np.mean, method="percentile", confidence_level=level, rng=np.random.default_rng(3)
    ).confidence_interval
    assert (got.low, got.high) == (pytest.approx(theirs.low, abs=0.02), pytest.approx(theirs.high, abs=0.02))
    assert statistics.bootstrap_interval([[2.0]], np.random.default_rng(0), mean).low is None
    with pytest.raises(ValueError, match="same seeds"):
        statistics.bootstrap_interval([[2.0], [1.0, 3.0]], np.random.default_rng(0), mean)


def test_paired_interval():
    a, b = [0.6, 0.7, 0.5, 0.9, 0.8, 0.7], [0.5, 0.6, 0.5, 0.6, 0.6, 0.5]
    got = statistics.paired_interval(a, b)
    theirs = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (got.low, got.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert got.estimate == pytest.approx(0.15)
    assert statistics.paired_interval([1.0], [0.0]).low is None


@given(NUMBERS, NUMBERS)
def test_probability_of_improvement_is_mann_whitney(a, b):
    u = stats.mannwhitneyu(a, b, method="asymptotic").statistic if len(set(a + b)) > 1 else len(a) * len(b) / 2
    assert statistics.probability_of_improvement(a, b) == pytest.approx(u / (len(a) * len(b)))


def test_an_accuracy_is_never_known_better_than_from_independent_samples():
    """Samples of one problem that differ more than chance would have a clustered error below the binomial one."""
    correct = [1, 0] * 9 + [1, 1]
    clusters = [problem for problem in range(10) for _ in range(2)]
    found, p = statistics.accuracy_interval(correct, clusters), 11 / 20
    expected = statistics.score_interval(p, 20, stats.t.ppf(0.975, 9))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    for share in (0, 1):  # without an error the problems count, not the samples
        found = statistics.accuracy_interval([share] * 40, [i // 4 for i in range(40)])
        expected = statistics.score_interval(share, 10, stats.t.ppf(0.975, 9))
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    found = statistics.accuracy_interval([1] * 4 + [0] * 4 + [1] * 4, [i // 4 for i in range(12)])
    assert found.high - found.low > 0.9  # three problems all or nothing: as few trials as problems


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=8))
def test_sign_flips_are_counted_over_all_patterns(differences):
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [sum(sign * value for sign, value in zip(signs, differences, strict=True)) for signs in patterns]
    assert statistics.sign_flip_p(differences) == sum(each <= sum(differences) + 1e-9 for each in sums) / len(sums)


def test_many_sign_flips_are_sampled():
    exact = stats.binom.cdf(6, 20, 0.5)  # 14 of 20 equal differences are negative
    assert statistics.sign_flip_p([-1.0] * 14 + [1.0] * 6) == pytest.approx(exact, abs=0.005)


def test_holm_s_correction():
    """Worked by hand: the smallest p times 4, the next times 3, and never below one before it."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_maj():
    answers, correct = ["4", "5", "5", None, "4", "4"], [True, False, False, False, True, True]
    found = [statistics.majority(answers[:k], correct[:k], k) for k in (6, 3, 2)]
    assert found == [1.0, 0.0, 0.5]  # a tie is shared
    assert statistics.majority([None, None], [False, False], 2) == 0.0
