"""Comparison of conditions whose runs are not paired: a permutation test of whole runs, and its interval.

Null hypothesis: the runs of a condition, less a supposed difference, and those of the baseline have the same
distribution, so that every split of the pooled runs into groups of these sizes is equally likely. The test is exact,
also with clipped values (``rule.cut``), because pool, centre and clipping are the same for all splits. With several
conditions, p is adjusted (Holm), and each interval has the level 1 − 0.05/k for k conditions (Bonferroni).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, count
from math import comb

import numpy as np

from retrain.maths.statistics import holm
from retrain.verdicts.rule import (
    ALPHA,
    ZERO,
    Analysis,
    Flags,
    Floats,
    Ints,
    Outcome,
    cut,
    interval_ends,
    typical_differences,
)

MOST_SPLITS = 20_000  # More are sampled


@dataclass(frozen=True)
class PermutationTest:
    """Test of supposed differences between two samples at ``level``."""

    # float64 [runs of the condition] and [runs of the baseline]
    values: Floats
    baseline: Floats
    # float64 [splits, runs], the observed split first: 1/m for the m runs of the one group, −1/n for the others
    splits: Floats
    level: float

    @classmethod
    def of(cls, values: Floats, baseline: Floats, level: float = ALPHA) -> "PermutationTest":
        return cls(values, baseline, _splits(len(values), len(baseline)), level)

    def statistics(self, supposed: Floats, splits: Floats) -> Floats:
        """Return the difference of the groups' means in the clipped pool, float64 [rows, splits]."""
        rest = np.broadcast_to(self.baseline, (len(supposed), len(self.baseline)))
        pool = np.concatenate([self.values - supposed[:, None], rest], axis=1)
        return cut(pool - typical_differences(pool)[:, None]) @ splits.T

    def p(self, supposed: Floats) -> Floats:
        statistics = np.abs(self.statistics(supposed, self.splits))
        return (statistics >= statistics[:, :1] - ZERO).mean(axis=1)

    def excluded(self, conditions: Ints, supposed: Floats) -> Flags:
        return self.p(supposed) <= self.level

    def reach(self, conditions: Ints) -> Floats:
        return np.full(len(conditions), 3 * (np.ptp(self.values) + np.ptp(self.baseline) + 0.001))

    def estimate(self) -> float:
        """Return the supposed difference at which the observed statistic is 0."""
        low, high = self.values.min() - self.baseline.max(), self.values.max() - self.baseline.min()
        for _ in range(60):  # More halvings than a float64 has bits
            middle = (low + high) / 2
            goes_up = self.statistics(np.array([middle]), self.splits[:1])[0, 0] > 0
            low, high = (middle, high) if goes_up else (low, middle)
        return float(low + high) / 2


def compare_samples(samples: Sequence[Sequence[float]], baseline: Sequence[float]) -> list[Analysis]:
    """Compare the values of each condition's runs with those of the baseline's. ``pairs`` is the smaller number of
    runs, and ``typical`` the difference at which the test's statistic is 0."""
    base = np.asarray(baseline, dtype=np.float64)
    tests = [
        PermutationTest.of(np.asarray(sample, dtype=np.float64), base, ALPHA / len(samples))
        if len(sample) and len(base)
        else None
        for sample in samples
    ]
    p = holm([1.0 if test is None else float(test.p(np.zeros(1))[0]) for test in tests])
    return [_analysis(test, adjusted) for test, adjusted in zip(tests, p, strict=True)]


def _analysis(test: PermutationTest | None, p: float) -> Analysis:
    if test is None:
        return Analysis(0, 0, True, None, None, 1.0, None, None, (), "cannot tell")
    runs = min(len(test.values), len(test.baseline))
    typical, mean = test.estimate(), float(test.values.mean() - test.baseline.mean())
    low = high = None
    outcome: Outcome = "cannot tell"
    if can_reject(len(test.values), len(test.baseline), test.level):
        ends = interval_ends(test, np.zeros(2, dtype=np.intp), np.array([-1.0, 1.0]), np.full(2, typical))
        low, high = (None, None) if np.isnan(ends).any() else (float(ends[0]), float(ends[1]))
        outcome = "not shown"
    if p <= ALPHA:
        agree = typical * mean > 0
        outcome = "cannot tell" if not agree else "higher" if typical > 0 else "lower"
    return Analysis(runs, runs, True, typical, mean, p, low, high, (), outcome)


def can_reject(m: int, n: int, level: float) -> bool:
    """Return whether p can be at most ``level`` with m and n runs."""
    # The statistic has no sign: with groups of equal size, exchanging them is another split with the same value.
    return (2 if m == n else 1) / comb(m + n, m) <= level


def runs_needed(level: float) -> int:
    """Return the smallest number of runs of each condition with which p can be at most ``level``."""
    return next(runs for runs in count(2) if can_reject(runs, runs, level))


def _splits(m: int, n: int) -> Floats:
    observed = np.concatenate([np.full(m, 1 / m), np.full(n, -1 / n)])
    if comb(m + n, m) > MOST_SPLITS:
        splits = np.random.default_rng(0).permuted(np.tile(observed, (MOST_SPLITS, 1)), axis=1)
        splits[0] = observed
        return splits
    members = np.array(list(combinations(range(m + n), m)))
    splits = np.full((len(members), m + n), -1 / n)
    np.put_along_axis(splits, members, 1 / m, axis=1)
    return splits
