"""The rule that decides every verdict: a sign-flip test over seeds, for all conditions together.

Null hypothesis: the differences of a condition to the baseline, less a supposed difference and clipped (``cut``), are
symmetric about 0, so that flipping a seed's signs does not change their distribution. With one condition, error rates
are exact for symmetric differences. With several, the others are centred at estimated differences, and the error rate
was found by simulation, not proved. The maximum over conditions limits the family-wise error to 5 % for all conditions
and analyses. Differences are float64 [conditions, seeds] in the declared order of seeds, NaN where a run is missing.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ints = NDArray[np.intp]

ALPHA = 0.05
INTERIM_ALPHA = ALPHA / 3
FEWEST_PAIRS = 6  # 1 of 2^5 patterns is below ALPHA
FEWEST_INTERIM_SEEDS = 7  # 1 of 2^6 patterns is below INTERIM_ALPHA

CUT = 1.5
ZERO = 1e-9  # Differences and statistics closer than this are the same
MOST_ENUMERATED_SEEDS = 16
SAMPLED_PATTERNS = 20_000
SCAN_STEPS, HALVINGS = 64, 50
OUTLIER_MEDIANS, OUTLIER_MARGINS = 5, 2

Outcome = Literal["higher", "lower", "alike", "not shown", "cannot tell"]


@dataclass(frozen=True)
class Analysis:
    """One condition against the baseline at one analysis. Without pairs the numbers are None."""

    # Number of seeds of the analysis, including seeds without a pair
    seeds: int
    pairs: int
    is_final: bool
    # Typical difference: the value about which the clipped differences sum to 0
    typical: float | None
    mean: float | None
    # p at a difference of 0, corrected for all conditions and analyses
    p: float
    # Lower end of the simultaneous 95 % interval of the typical difference; None where nothing can be excluded
    low: float | None
    high: float | None
    # Positions of the outlier seeds in the declared order
    outliers: tuple[int, ...]
    # None at an interim analysis that decides nothing
    outcome: Outcome | None

    @property
    def is_decided(self) -> bool:
        return self.outcome in ("higher", "lower")


@dataclass(frozen=True)
class Patterns:
    """Sign patterns of one analysis, and under each pattern the largest statistic of the other conditions."""

    # float64 [patterns, seeds], the observed pattern (all +) first
    signs: Floats
    # float64 [conditions, seeds]
    values: Floats
    # float64 [conditions, patterns]: for each condition the largest statistic of the others, centred at their typical
    # differences. It does not depend on the supposed difference of the condition itself
    others: Floats

    def statistics(self, conditions: Ints, supposed: Floats) -> Floats:
        """Return ``flipped(values − supposed)``, float64 [rows, patterns]; a row is (condition, supposed value)."""
        return flipped(self.values[conditions] - supposed[:, None], self.signs)

    def stopped(self, conditions: Ints, supposed: Floats) -> Flags:
        """Return the patterns that would stop at this interim analysis, bool [rows, patterns]."""
        largest = np.maximum(self.statistics(conditions, supposed), self.others[conditions])
        rank = largest.shape[1] - 1 - int(INTERIM_ALPHA * largest.shape[1])
        threshold = np.partition(largest, rank, axis=1)[:, rank, None]
        return largest > threshold + ZERO


class LocationTest(Protocol):
    """Test of supposed values of one or more estimates, whose interval ``interval_ends`` finds."""

    def reach(self, conditions: Ints) -> Floats:
        """Return how far from the estimate the search begins, float64 [rows]."""
        ...

    def excluded(self, conditions: Ints, supposed: Floats) -> Flags:
        """Return which supposed values are rejected, bool [rows]; a row is (condition, supposed value)."""
        ...


@dataclass(frozen=True)
class SignFlipTest:
    """Test of supposed differences at level ``budget``. ``earlier``: sign patterns of the interim analysis, if any."""

    patterns: Patterns
    earlier: Patterns | None
    budget: float

    def p(self, conditions: Ints, supposed: Floats) -> Floats:
        """Return p of the supposed differences, float64 [rows]; a row is (condition, supposed difference)."""
        statistics = self.patterns.statistics(conditions, supposed)
        bound = statistics[:, :1] - ZERO
        counted = (statistics >= bound) | (self.patterns.others[conditions] >= bound)
        if self.earlier is not None:
            # A pattern that would have stopped early counts as extreme, so that both analyses share one error rate.
            stopped = self.earlier.stopped(conditions, supposed)
            counted |= np.tile(stopped, (1, counted.shape[1] // stopped.shape[1]))
        return np.count_nonzero(counted, axis=1) / counted.shape[1]

    def excluded(self, conditions: Ints, supposed: Floats) -> Flags:
        return self.p(conditions, supposed) <= self.budget

    def reach(self, conditions: Ints) -> Floats:
        low, high = _range(self.patterns.values[conditions])
        return 3 * (high - low + 0.001)


def interim_seeds(planned: int) -> int | None:
    """Return the number of seeds at the interim analysis: half, and at least 7; None (no analysis) below 8 seeds."""
    seeds = max(FEWEST_INTERIM_SEEDS, -(-planned // 2))
    return seeds if seeds < planned else None


def judge(differences: Floats, interim: Floats | None = None, margin: float | None = None) -> list[Analysis]:
    """Return each condition's deciding analysis: the interim analysis if it found a difference, else the final one.

    ``differences`` has all planned seeds; ``interim`` has the first seeds as the interim analysis saw them, None
    without one. A condition that was stopped stays in the reference distribution of the others with its seeds so far.
    """
    if not differences.size:
        return [_without_pairs(differences.shape[1]) for _ in differences]
    planned = differences.shape[1]
    earlier = None if interim is None else _patterns(interim, planned)
    last = _analyses(SignFlipTest(_patterns(differences, planned), earlier, ALPHA), margin, is_final=True)
    if interim is None:
        return last
    early = interim_analysis(interim, planned, margin)
    return [first if first.is_decided else second for first, second in zip(early, last, strict=True)]


def interim_analysis(differences: Floats, planned: int, margin: float | None = None) -> list[Analysis]:
    return _analyses(SignFlipTest(_patterns(differences, planned), None, INTERIM_ALPHA), margin, is_final=False)


def typical_differences(values: Floats) -> Floats:
    """Return float64 [rows]: for each row the m for which ``cut(row - m)`` sums to 0, a mean that outliers hardly move.
    NaN for a row without values."""
    low, high = _range(values)
    for _ in range(60):  # More halvings than a float64 has bits
        middle = (low + high) / 2
        goes_up = cut(values - middle[:, None]).sum(axis=1) > 0
        low, high = np.where(goes_up, middle, low), np.where(goes_up, high, middle)
    return (low + high) / 2


def cut(values: Floats) -> Floats:
    """Clip each row to ±1.5 times the median of its nonzero absolute values; missing values become 0."""
    sizes = np.where(np.abs(values) > ZERO, np.abs(values), np.inf)
    sizes.sort(axis=1)
    count = np.isfinite(sizes).sum(axis=1, keepdims=True)
    lower, upper = (np.take_along_axis(sizes, index, axis=1) for index in (np.maximum(count - 1, 0) // 2, count // 2))
    limit = CUT * (lower + upper) / 2
    return np.nan_to_num(np.clip(values, -limit, limit)) * (count > 0)


def flipped(values: Floats, signs: Floats) -> Floats:
    """Return |Σ s c| / √Σ c² with signs s and c = cut(values), float64 [rows, patterns]; 0 for a row of zeros."""
    pulled = cut(values)
    length = np.sqrt((pulled**2).sum(axis=1, keepdims=True))
    statistics = np.abs(pulled @ signs.T)
    statistics /= np.where(length > 0, length, 1.0)
    return statistics


def outlier_places(differences: Floats, typical: float, margin: float | None) -> tuple[int, ...]:
    """Return the positions of differences whose distance from ``typical`` exceeds both 5 times the median distance and
    twice the ``margin`` (None: 0)."""
    distances = np.abs(differences - typical)
    bound = max(OUTLIER_MEDIANS * float(np.nanmedian(distances)), OUTLIER_MARGINS * (margin or 0.0)) + ZERO
    return tuple(np.flatnonzero(distances > bound).tolist())


def _range(values: Floats) -> tuple[Floats, Floats]:
    missing = np.isnan(values)
    low, high = np.where(missing, np.inf, values).min(axis=1), np.where(missing, -np.inf, values).max(axis=1)
    is_empty = missing.all(axis=1)
    return np.where(is_empty, np.nan, low), np.where(is_empty, np.nan, high)


def _patterns(values: Floats, planned: int) -> Patterns:
    seeds = values.shape[1]
    # Sampled patterns are drawn for all planned seeds, so that the interim analysis has the same, cut to its seeds.
    signs = _enumerated(seeds) if planned <= MOST_ENUMERATED_SEEDS else _sampled(planned)[:, :seeds]
    statistics = flipped(values - typical_differences(values)[:, None], signs)
    others = [np.delete(statistics, row, axis=0).max(axis=0, initial=0.0) for row in range(len(values))]
    return Patterns(signs, values, np.stack(others))


@lru_cache(maxsize=8)
def _enumerated(seeds: int) -> Floats:
    """Return all patterns with a first sign of +, float64 [2^(seeds - 1), seeds]. The first k columns are the patterns
    of k seeds, repeated."""
    bits = np.arange(2 ** (seeds - 1))[:, None] >> np.arange(seeds - 1)[None, :] & 1
    return np.concatenate([np.ones((len(bits), 1)), 1.0 - 2.0 * bits], axis=1)


@lru_cache(maxsize=1)
def _sampled(seeds: int) -> Floats:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(SAMPLED_PATTERNS, seeds))
    signs[0] = 1.0
    return signs


def _without_pairs(seeds: int, *, is_final: bool = True) -> Analysis:
    return Analysis(seeds, 0, is_final, None, None, 1.0, None, None, (), "cannot tell" if is_final else None)


def _analyses(test: SignFlipTest, margin: float | None, *, is_final: bool) -> list[Analysis]:
    values = test.patterns.values
    analyses = [_without_pairs(values.shape[1], is_final=is_final) for _ in values]
    rows = np.flatnonzero(~np.isnan(values).all(axis=1))
    typical = typical_differences(values[rows])
    p = test.p(rows, np.zeros(len(rows)))
    ends = interval_ends(test, np.concatenate([rows, rows]), np.repeat([-1.0, 1.0], len(rows)), np.tile(typical, 2))
    low, high = ends[: len(rows)], ends[len(rows) :]
    for index, row in enumerate(rows):
        has_ends = not np.isnan(low[index] + high[index])
        analysis = Analysis(
            seeds=values.shape[1],
            pairs=int((~np.isnan(values[row])).sum()),
            is_final=is_final,
            typical=float(typical[index]),
            mean=float(np.nanmean(values[row])),
            p=float(p[index]),
            low=float(low[index]) if has_ends else None,
            high=float(high[index]) if has_ends else None,
            outliers=outlier_places(values[row], float(typical[index]), margin),
            outcome=None,
        )
        analyses[row] = replace(analysis, outcome=_outcome(analysis, test.budget, margin))
    return analyses


def _outcome(analysis: Analysis, budget: float, margin: float | None) -> Outcome | None:
    typical, mean, low, high = analysis.typical, analysis.mean, analysis.low, analysis.high
    if typical is None or mean is None:
        return "cannot tell"
    if analysis.p <= budget and typical * mean > 0:
        return "higher" if typical > 0 else "lower"
    if not analysis.is_final:
        return None
    if analysis.p <= budget or analysis.pairs < FEWEST_PAIRS:
        return "cannot tell"
    if margin is None or low is None or high is None or analysis.outliers:
        return "not shown"
    return "alike" if -margin <= low and high <= margin else "not shown"


def interval_ends(test: LocationTest, rows: Ints, sides: Floats, typical: Floats) -> Floats:
    """Return the interval's end on one side (-1 or 1) of the typical difference, float64 [rows]: the outermost
    difference that the test does not exclude. It is found by a scan in steps, because p is not monotone. NaN if no
    difference is excluded."""
    reach = sides * test.reach(rows)
    start = typical + reach
    inside = ~test.excluded(rows, start)
    start[inside] += 9 * reach[inside]
    bounded = test.excluded(rows, start)
    outer, inner = start.copy(), typical.copy()
    scanned = bounded.copy()
    for step in range(1, SCAN_STEPS):
        active = np.flatnonzero(scanned)
        if not len(active):
            break
        supposed = start[active] + (typical[active] - start[active]) * step / SCAN_STEPS
        excluded = test.excluded(rows[active], supposed)
        outer[active[excluded]] = supposed[excluded]
        inner[active[~excluded]] = supposed[~excluded]
        scanned[active[~excluded]] = False
    for _ in range(HALVINGS):
        middle = (outer + inner) / 2
        excluded = test.excluded(rows, middle)
        outer, inner = np.where(excluded, middle, outer), np.where(excluded, inner, middle)
    # Differences below ZERO count as 0. Equal differences would therefore have an interval of that width.
    inner = np.where(np.abs(inner - typical) <= 2 * ZERO, typical, inner)
    return np.where(bounded, inner, np.nan)
