"""The rule against worked examples, and against a version that goes through all patterns in plain Python."""

import math
from fractions import Fraction
from itertools import product
from operator import mul

import numpy as np
import pytest
from helpers import plain

from retrain.verdicts.rule import Analysis, interim_analysis, interim_seeds, judge, outlier_places

MISSING = math.nan
B = np.array([[0.050, 0.042, 0.061, 0.038, 0.055, 0.047, 0.052, MISSING],
              [0.021, -0.008, 0.015, 0.030, -0.004, 0.012, 0.019, 0.026],
              [0.010, -0.012, 0.004, -0.190, 0.008, -0.006, 0.002, -0.011]])  # fmt: skip
C = np.array([[0.005, -0.010, 0, 0.010, -0.005, 0.005, 0, -0.005, 0.010, -0.010],
              [-0.020, -0.015, MISSING, -0.025, -0.010, -0.030, -0.015, -0.020, 0.005, -0.025]])  # fmt: skip
D = np.array([[0.020, 0.030, 0.025, 0.015, 0.035, 0.022, 0.028, 0.019, -0.200, 0.031]])


def says(analysis: Analysis, p: str, ends: tuple[float, float] | None, outcome: str | None) -> None:
    assert Fraction(analysis.p) == Fraction(p)
    assert analysis.outcome == outcome
    if ends is None:
        assert analysis.low is analysis.high is None
    else:
        assert (analysis.low, analysis.high) == pytest.approx(ends, abs=1e-6)


def test_six_pairs_on_one_side_are_better() -> None:
    (found,) = judge(np.array([[0.031, 0.012, 0.024, 0.040, 0.018, 0.027]]))
    says(found, "1/32", (0.012, 0.040), "higher")
    assert found.typical == pytest.approx(0.025, abs=1e-6)
    assert found.mean == pytest.approx(0.025333, abs=1e-6)


def test_three_conditions_one_of_them_stopped() -> None:
    first, second, third = interim_analysis(B[:, :7], 8, 0.03)
    says(first, "1/64", (0.033930, 0.063901), "higher")
    says(second, "11/64", (-0.016622, 0.033968), None)
    says(third, "63/64", (-0.190000, 0.010805), None)
    first, second, third = judge(B, B[:, :7], 0.03)
    assert not first.is_final
    assert (first.seeds, first.pairs, second.seeds) == (7, 7, 8)
    says(second, "3/32", (-0.004000, 0.027211), "alike")
    assert second.typical == pytest.approx(0.0165, abs=1e-6)
    says(third, "115/128", (-0.111242, 0.009006), "not shown")
    assert (third.typical, third.mean) == pytest.approx((-0.002618, -0.024375), abs=1e-6)
    assert third.outliers == (3,)


def test_a_family_of_one_has_smaller_p() -> None:
    assert Fraction(interim_analysis(B[1:2, :7], 8)[0].p) == Fraction(5, 64)
    assert Fraction(judge(B[1:2], B[1:2, :7])[0].p) == Fraction(6, 128)
    assert Fraction(judge(C[1:], C[1:, :7])[0].p) == Fraction(4, 512)


def test_missing_pair() -> None:
    first, second = interim_analysis(C[:, :7], 10, 0.02)
    says(first, "31/32", (-0.010000, 0.010000), None)
    says(second, "3/64", None, None)
    assert second.pairs == 6
    first, second = judge(C, C[:, :7], 0.02)
    says(first, "1", (-0.006943, 0.006943), "alike")
    says(second, "15/512", (-0.025874, -0.006440), "lower")
    assert (second.typical, second.mean) == pytest.approx((-0.018571, -0.017222), abs=1e-6)
    assert second.pairs == 9


def test_a_stopped_condition_does_not_see_later_seeds() -> None:
    (found,) = judge(D, D[:, :7])
    says(found, "1/64", (0.015, 0.035), "higher")
    assert found.outliers == ()
    for margin, outliers in ((None, (8,)), (0.2, ())):
        (at_the_end,) = judge(D, None, margin)
        assert at_the_end.outliers == outliers


def test_the_interim_analysis_lies_at_half_of_the_seeds() -> None:
    assert [interim_seeds(n) for n in (2, 7, 8, 10, 14, 15, 16, 20)] == [None, None, 7, 7, 7, 8, 8, 10]


def test_sampled_patterns_agree_with_enumerated_ones() -> None:
    row = np.random.default_rng(3).normal(0.5, 1.0, (1, 16))
    (enumerated,) = judge(row)
    wide = np.concatenate([row, np.full((1, 4), MISSING)], axis=1)
    (sampled,) = judge(wide)
    assert sampled.p == pytest.approx(enumerated.p, abs=0.005)
    assert (enumerated.p * 2**15).is_integer()
    assert Fraction(sampled.p).limit_denominator(20_000) == pytest.approx(sampled.p, abs=1e-12)


def test_a_mean_of_zero_gives_no_verdict() -> None:
    row = np.array([2.0] * 9 + [-18.0]) / 64
    (found,) = judge(row[None])
    assert found.p <= 0.05
    assert found.mean == 0.0
    assert found.outcome == "cannot tell"


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_alike_needs_both_ends_within_the_margin(sign: float) -> None:
    row = sign * np.array([0.021, -0.008, 0.015, -0.03, -0.004, 0.012, 0.019, -0.006])
    (found,) = judge(row[None])
    assert found.low is not None
    assert found.high is not None
    margin = max(-found.low, found.high)
    outcomes = [judge(row[None], None, each)[0].outcome for each in (margin, margin - 1e-6)]
    assert [found.outcome, *outcomes] == ["not shown", "alike", "not shown"]
    six = judge(np.array([[0.01, -0.02, 0.015, -0.01, 0.02, -0.015]]), None, 0.1)[0]
    assert six.outcome == "alike"


def test_an_outlier_is_further_than_five_medians_and_two_margins() -> None:
    near = np.array([0.0, 1.0, -1.0, 1.0, -1.0, 5.0])
    far = np.array([0.0, 1.0, -1.0, 1.0, -1.0, 5.1])
    assert [outlier_places(row, 0.0, None) for row in (near, far)] == [(), (5,)]
    assert [outlier_places(far, 0.0, margin) for margin in (2.5, 2.6)] == [(5,), ()]


def test_the_margin_names_outliers_at_the_interim_analysis_too() -> None:
    row = np.array([[0.02, 0.021, 0.022, 0.023, 0.019, 0.018, 0.5, MISSING]])
    for margin, outliers in ((None, (6,)), (0.2, (6,)), (0.3, ())):
        (found,) = judge(row, row[:, :7], margin)
        assert (found.is_final, found.outcome, found.outliers) == (False, "higher", outliers)


def test_conditions_without_pairs() -> None:
    for none in judge(np.zeros((2, 0))), judge(np.full((2, 8), MISSING)):
        seeds = none[0].seeds
        assert none == [Analysis(seeds, 0, True, None, None, 1.0, None, None, (), "cannot tell")] * 2
    assert seeds == 8
    some = np.array([B[1, :7], [MISSING] * 7])
    alone, (beside, nothing) = interim_analysis(B[1:2, :7], 8), interim_analysis(some, 8)
    assert alone == [beside]
    assert alone[0].is_final is False
    assert nothing == Analysis(7, 0, False, None, None, 1.0, None, None, (), None)


def cut_row(row: list[float], supposed: float) -> list[float]:
    """Cut differences in units of their length, 0 for what is missing."""
    values = iter(plain.cut([v - supposed for v in row if not math.isnan(v)]))
    whole = [0.0 if math.isnan(v) else next(values) for v in row]
    length = math.sqrt(sum(v * v for v in whole))
    return [v / length for v in whole] if length else whole


def statistic(cut: list[float], signs: tuple[int, ...]) -> float:
    return abs(sum(map(mul, cut, signs)))


class BruteForce:
    """p over all 2^n patterns, with both signs of the first seed."""

    def __init__(self, rows: list[list[float]], j: int, interim: int | None):
        self.row, self.interim = rows[j], interim
        others = [row for place, row in enumerate(rows) if place != j]
        self.at_the_end = self._reference(others, len(self.row))
        self.at_first = self._reference(others, interim) if interim else {}

    def _reference(self, others: list[list[float]], seeds: int) -> dict[tuple[int, ...], float]:
        seen = [row[:seeds] for row in others]
        cuts = [cut_row(row, plain.typical(row)) for row in seen if not all(map(math.isnan, row))]
        patterns = product((1, -1), repeat=seeds)
        return {signs: max([0.0, *(statistic(cut, signs) for cut in cuts)]) for signs in patterns}

    def p(self, supposed: float) -> float:
        stopped = set()
        if self.interim:
            own = cut_row(self.row[: self.interim], supposed)
            values = {signs: max(statistic(own, signs), other) for signs, other in self.at_first.items()}
            pairs = len(values) // 2
            threshold = sorted(values.values(), reverse=True)[2 * math.floor(0.05 / 3 * pairs)]
            stopped = {signs for signs in values if values[signs] > threshold + 1e-9}
        own = cut_row(self.row, supposed)
        bound = abs(sum(own)) - 1e-9
        counted = sum(
            signs[: self.interim] in stopped or other >= bound or statistic(own, signs) >= bound
            for signs, other in self.at_the_end.items()
        )
        return counted / len(self.at_the_end)

    def end(self, side: int) -> float:
        """The outermost difference on one side of the typical one with p > 0.05, by the steps that define it."""
        values = [v for v in self.row if not math.isnan(v)]
        middle, reach = plain.typical(self.row), 3 * side * (max(values) - min(values) + 0.001)
        start = middle + reach
        if self.p(start) > 0.05:
            start += 9 * reach
        if self.p(start) > 0.05:
            return math.nan
        scanned = [start + (middle - start) * step / 64 for step in range(65)]
        inside = next(step for step in range(1, 65) if step == 64 or self.p(scanned[step]) > 0.05)
        outer, inner = scanned[inside - 1], scanned[inside]
        for _ in range(50):
            at = (outer + inner) / 2
            outer, inner = (at, inner) if self.p(at) <= 0.05 else (outer, at)
        return inner


def skewed(seed: int, n: int) -> np.ndarray:
    """Differences of a few sizes, some far out, so that p is not monotone in the supposed difference."""
    rng = np.random.default_rng(seed)
    return np.round(rng.standard_t(1, (int(rng.integers(1, 3)), n)), 2)


UNEVEN = np.array([[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.02, -1.0, 0.98, -0.99, 1.01, -1.0]])
"""At three ranges from the typical difference the second row is the more extreme one, at thirty the first."""


@pytest.mark.parametrize(
    "values", [*(skewed(seed, 6) for seed in range(12)), *(skewed(seed, 7) for seed in range(12)), UNEVEN]
)
def test_ends_are_those_of_the_steps_that_define_them(values: np.ndarray) -> None:
    for j, found in enumerate(judge(values)):
        reference = BruteForce(values.tolist(), j, None)
        ends = reference.end(-1), reference.end(1)
        if math.isnan(sum(ends)):
            assert found.low is found.high is None
        else:
            assert (found.low, found.high) == pytest.approx(ends, abs=1e-7)


@pytest.mark.parametrize("n", [5, 6, 7, 8, 9])
def test_agrees_with_all_patterns_in_plain_python(n: int) -> None:
    """500 data sets, k = 1 to 3, with ties and missing runs, with and without the interim analysis."""
    rng = np.random.default_rng(n)
    ends = 0
    for case in range({9: 40, 8: 90, 7: 120}.get(n, 125)):
        values = rng.normal(rng.choice([0.0, 1.0, 2.0]), 1.0, (int(rng.integers(1, 4)), n))
        values = np.round(values * 2) / 2 if case % 3 == 0 else values
        values[rng.random(values.shape) < 0.1] = MISSING
        interim = interim_seeds(n) if case % 2 else None
        for j, found in enumerate(judge(values, None if interim is None else values[:, :interim])):
            if found.typical is None or not found.is_final:
                continue
            assert found.typical == pytest.approx(plain.typical(values[j].tolist()), abs=1e-12)
            reference = BruteForce(values.tolist(), j, interim)
            assert found.p == reference.p(0.0)
            if case % 5 == 0 and found.low is not None and found.high is not None:
                ends += 1
                for end, outside in ((found.low, -1e-6), (found.high, 1e-6)):
                    assert reference.p(end - outside) > 0.05 >= reference.p(end + outside)
    assert ends or n == 5
