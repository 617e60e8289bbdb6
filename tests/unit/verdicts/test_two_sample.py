"""The permutation of whole runs against a worked example, recomputed in plain Python, and its level by simulation."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from helpers import plain

from retrain.verdicts.two_sample import PermutationTest, compare_samples, runs_needed

X, Y = [0.71, 0.74, 0.72, 0.78], [0.69, 0.66, 0.705, 0.68]


def plain_statistics(x: Sequence[float], y: Sequence[float], supposed: float = 0.0) -> list[float]:
    """Return the difference of the groups' means for every split, the observed one first."""
    pool = [value - supposed for value in x] + list(y)
    centre = plain.typical(pool)
    pool = plain.cut([value - centre for value in pool])
    statistics = []
    for members in combinations(range(len(pool)), len(x)):
        others = [i for i in range(len(pool)) if i not in members]
        statistics.append(mean([pool[i] for i in members]) - mean([pool[i] for i in others]))
    return statistics


def plain_p(x: Sequence[float], y: Sequence[float], supposed: float = 0.0) -> Fraction:
    sizes = [abs(each) for each in plain_statistics(x, y, supposed)]
    return Fraction(sum(each >= sizes[0] - 1e-9 for each in sizes), len(sizes))


def test_four_runs_on_each_side():
    (found,) = compare_samples([X], Y)
    assert Fraction(found.p).limit_denominator(100) == plain_p(X, Y) == Fraction(2, 70)
    assert found.mean == pytest.approx(0.05375)
    assert found.outcome == "higher"


@pytest.mark.parametrize(("x", "y"), [(X, Y), (Y, X), (X, [*Y, 0.70, 0.72]), ([*X, 0.1], [*Y, 0.70, 0.72])])
def test_interval_and_estimate_invert_the_test(x, y):
    (found,) = compare_samples([x], y)
    assert found.typical is not None
    assert found.low is not None
    assert found.high is not None
    assert float(plain_p(x, y)) == pytest.approx(found.p)
    assert plain_statistics(x, y, found.typical - 1e-6)[0] > 0 > plain_statistics(x, y, found.typical + 1e-6)[0]
    for end, outwards in ((found.low, -1e-6), (found.high, 1e-6)):
        assert plain_p(x, y, end - outwards) > Fraction(1, 20)
        assert plain_p(x, y, end + outwards) <= Fraction(1, 20)


def test_three_runs_on_each_side_cannot_tell():
    (found,) = compare_samples([[0.9, 0.91, 0.92]], [0.1, 0.11, 0.12])
    assert (found.outcome, found.low, runs_needed(0.05)) == ("cannot tell", None, 4)
    assert found.mean == pytest.approx(0.8)


def test_several_conditions_are_adjusted():
    near = [value - 0.04 for value in X]
    single, family = compare_samples([X], Y), compare_samples([X, near], Y)
    assert family[0].p == 2 * single[0].p
    # 1 of 35 pairs of splits is more than 5 % / 2
    assert (runs_needed(0.05 / 2), family[0].low) == (5, None)
    assert compare_samples([X, []], Y)[1].outcome == "cannot tell"


def test_three_conditions_against_plain_python():
    """Holm's p, and intervals at 1 − 0.05/3 that invert the test."""
    baseline = [*Y, 0.70, 0.67]
    samples = [[value + gain for value in (*X, 0.73, 0.75)] for gain in (0.0, -0.03, -0.05)]
    raw = [plain_p(sample, baseline) for sample in samples]
    smallest, middle, largest = sorted(range(3), key=raw.__getitem__)
    expected = {smallest: 3 * raw[smallest]}
    expected[middle] = max(expected[smallest], 2 * raw[middle])
    expected[largest] = min(Fraction(1), max(expected[middle], raw[largest]))
    for i, analysis in enumerate(compare_samples(samples, baseline)):
        assert analysis.p == pytest.approx(float(expected[i]))
        assert analysis.low is not None
        assert analysis.high is not None
        for end, outwards in ((analysis.low, -1e-6), (analysis.high, 1e-6)):
            assert plain_p(samples[i], baseline, end - outwards) > Fraction(1, 60)
            assert plain_p(samples[i], baseline, end + outwards) <= Fraction(1, 60)


def test_many_splits_are_sampled():
    random = np.random.default_rng(3)
    x, y = random.normal(0.72, 0.02, 10), random.normal(0.68, 0.02, 9)
    found = PermutationTest.of(x, y)
    assert found.splits.shape == (20_000, 19)
    assert np.allclose(found.splits.sum(axis=1), 0)
    assert found.p(np.zeros(1))[0] < 0.01


def test_equal_runs():
    (found,) = compare_samples([[0.7] * 4], [0.7] * 4)
    assert (found.typical, found.p, found.outcome) == (0.0, 1.0, "not shown")


@pytest.mark.parametrize("collapse", [0.0, 0.3])
def test_level(collapse):
    """400 draws of 4 + 4 runs without a difference: at most 5 % are rejected, less 3 standard errors of chance."""
    random = np.random.default_rng(7)
    values = random.normal(0.6, 0.03, (400, 8)) - 0.3 * (random.random((400, 8)) < collapse)
    rejected = sum(PermutationTest.of(row[:4], row[4:]).p(np.zeros(1))[0] <= 0.05 for row in values)
    assert 0 < rejected / 400 <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
