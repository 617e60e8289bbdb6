"""Statistics for evaluations and for comparisons over seeds: numpy in, plain numbers out.

Two units of replication, never mixed: the *problem* within one evaluation (samples of a problem are not independent,
so intervals cluster by problem) and the *seed* between conditions (pairs share adapter, prompt order and random
numbers, so conditions are compared by paired differences). Completions are never pooled over seeds.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from retrain.maths.arrays import Doubles_S, Table, Values

MOST_FLIPPED, SAMPLED_FLIPS = 14, 20_000
# Values whose range is no more than this share of the largest are equal: their difference is rounding
EQUAL_SHARE = 1e-8


def _vector(values: Values, name: str) -> Doubles_S:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of numbers: got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite: got {array[~np.isfinite(array)][0]}")
    return array


def _t_quantile(freedom: float, level: float = 0.95) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + level / 2.0))


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float | None  # None where no interval exists
    high: float | None

    @property
    def ends(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


# Evaluations: the problem is the unit


def accuracy_interval(correct: Values, clusters: Sequence[Hashable]) -> Interval:
    """Return the share of correct samples with a Wilson interval at the clustered effective sample size, within [0, 1].

    The effective size is p(1−p)/SE² with the clustered SE (Korn and Graubard's adjustment), at most the number of
    samples; with SE = 0 (as when all answers are correct) it is the number of problems, so that there is an interval.
    Ends are None with one problem.
    """
    values = _vector(np.asarray(correct, dtype=np.float64), "correctness")
    if ((values < 0.0) | (values > 1.0)).any():
        raise ValueError("correctness must lie in [0, 1]")
    index = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    p, count = float(values.mean()), len(index)
    if count < 2:
        return Interval(p, None, None)
    of_cluster = np.array([index[name] for name in clusters])
    # Samples of one problem are correlated: residuals are added within a cluster before they are squared (Liang and
    # Zeger 1986, with the correction G/(G−1) for G clusters).
    residual_sums = np.bincount(of_cluster, weights=values - p, minlength=count)
    error = math.sqrt(count / (count - 1) * float((residual_sums**2).sum())) / len(values)
    size = min(p * (1.0 - p) / error**2, len(values)) if error > 0.0 and 0.0 < p < 1.0 else float(count)
    return score_interval(p, size, _t_quantile(count - 1))


def score_interval(p: float, size: float, quantile: float) -> Interval:
    """Return Wilson's (1927) interval of a share p of ``size`` trials, within [0, 1]: the θ from which p is at most
    ``quantile`` standard errors √(θ(1−θ)/size) away."""
    q2 = quantile**2
    centre = (p + q2 / (2.0 * size)) / (1.0 + q2 / size)
    reach = math.sqrt(q2 * (p * (1.0 - p) / size + q2 / (4.0 * size**2))) / (1.0 + q2 / size)
    return Interval(p, max(centre - reach, 0.0), min(centre + reach, 1.0))


def gini(values: Values, lowest: float | None = None) -> float | None:
    """Return the Gini coefficient Σ|x_i − x_j|/(2n²x̄)·n/(n−1) in [0, 1]: 0 for values that are equal up to rounding
    (also all 0); 1, owing to the factor n/(n−1), when all values but one are 0.

    The coefficient is defined for amounts from 0 upwards. Values that can be negative are counted from ``lowest``, the
    smallest possible value, or from the smallest value if that is lower. None for fewer than two values. Raises
    ValueError for NaN.
    """
    x = np.sort(_vector(values, "values"))
    n = len(x)
    if n < 2:
        return None
    origin = min(0.0, float(x[0]), 0.0 if lowest is None else lowest)
    largest = max(abs(float(x[0])), abs(float(x[-1])), -origin)
    x = 0.5 * x - 0.5 * origin  # halves: a difference of huge values stays finite
    if x[-1] - x[0] <= 0.5 * EQUAL_SHARE * largest:
        return 0.0
    x = x / x[-1]  # keeps the sum finite
    # Σ_ij |x_i − x_j| = 2·Σ_i (2i − n − 1)·x_(i) over ascending values: no table of n² differences.
    pair_sum = 2.0 * float(((2.0 * np.arange(1, n + 1) - n - 1.0) * x).sum())
    return min(max(pair_sum / (2.0 * n * float(x.sum())) * n / (n - 1), 0.0), 1.0)


# Scores of one problem with n samples, c of them correct. Taking the first k samples would waste the others, and all
# subsets are too many: pass@k has a closed form, and majorities are averaged over disjoint blocks of k samples.


def sensible_ks(samples: int) -> list[int]:
    """Return the k of pass@k that n samples determine: 1, 2, 4, 8, … and n itself."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def majority_ks(samples: int) -> list[int]:
    """Return the k of maj@k: those of ``sensible_ks`` from 3 on, because one or two samples have no majority."""
    return [k for k in sensible_ks(samples) if k >= 3]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return 1 − C(n−c, k)/C(n, k): the probability that k samples, drawn from n of which c are correct, have a correct
    one (Chen 2021)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n: got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    # Chen et al.'s product: the binomial coefficients of many samples overflow.
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers_N: Sequence[Hashable | None], correct_N: Sequence[bool], k: int) -> float:
    """Return maj@k of one problem: the mean vote of the ⌊n/k⌋ disjoint blocks of k samples.

    A vote is 1 if the block's most frequent answer is correct, else 0; tied answers are averaged. None means "no
    answer" and is not counted; a block without answers has a vote of 0. An answer whose samples were graded differently
    counts with their share of correct grades.
    """
    blocks = [slice(start, start + k) for start in range(0, len(answers_N) - k + 1, k)]
    if not blocks:
        raise ValueError(f"maj@k needs 1 <= k <= {len(answers_N)}: got k={k}")
    return sum(_vote(answers_N[block], correct_N[block]) for block in blocks) / len(blocks)


def _vote(answers_K: Sequence[Hashable | None], correct_K: Sequence[bool]) -> float:
    marks: dict[Hashable, list[bool]] = {}
    for answer, correct in zip(answers_K, correct_K, strict=True):
        if answer is not None:
            marks.setdefault(answer, []).append(bool(correct))
    most = max(map(len, marks.values()), default=0)
    leaders = [sum(given) / most for given in marks.values() if len(given) == most]
    return sum(leaders) / len(leaders) if leaders else 0.0


# Comparisons: the seed is the unit


def iqm(values: Table) -> Table | float:
    """Return the interquartile mean over the last axis: the mean without the lowest and highest ⌊n/4⌋ values (25 %
    trimmed mean)."""
    array = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    n = array.shape[-1]
    if n == 0:
        raise ValueError("an interquartile mean needs at least one value")
    kept = array[..., n // 4 : n - n // 4].mean(axis=-1)
    return float(kept) if kept.ndim == 0 else kept


def bootstrap_interval(
    columns: Sequence[Values],
    generator: np.random.Generator,
    statistic: Callable[..., Table | float],
    resamples: int = 10_000,
) -> Interval:
    """Return ``statistic`` of the columns with its percentile bootstrap interval; rows are resampled together.

    ``statistic`` takes the columns [..., rows] and returns one number for each leading index. A bootstrap from few
    values is too narrow, so the percentiles are Φ(∓√(n/(n−1))·t), which cover 95 % for normal data (Hesterberg 2015,
    section 3.1). The estimate is ``statistic`` of the original rows; ends are None with one row. Raises ValueError for
    no value, non-finite ones and columns of different lengths.
    """
    from scipy.special import ndtr

    arrays = _paired(*columns)
    estimate, n = float(statistic(*arrays)), len(arrays[0])
    if n < 2:
        return Interval(estimate, None, None)
    rows = generator.integers(0, n, (resamples, n))
    tail = float(ndtr(-math.sqrt(n / (n - 1)) * _t_quantile(n - 1)))
    low, high = np.quantile(np.asarray(statistic(*(column[rows] for column in arrays))), (tail, 1.0 - tail))
    return Interval(estimate, float(low), float(high))


def _paired(*columns: Values) -> list[np.ndarray]:
    arrays = [_vector(column, "results") for column in columns]
    lengths = [len(array) for array in arrays]
    if not lengths[0] or len(set(lengths)) > 1:
        raise ValueError(f"paired results need the same seeds on both sides: got {' and '.join(map(str, lengths))}")
    return arrays


def paired_interval(a: Values, b: Values, level: float = 0.95) -> Interval:
    """Return the mean of the differences a − b of paired results with Student's t interval; ends are None with one
    pair. Raises ValueError for lists that do not pair."""
    x, y = _paired(a, b)
    d = x - y
    n, mean = len(d), float(d.mean())
    if n < 2:
        return Interval(mean, None, None)
    reach = _t_quantile(n - 1, level) * float(d.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach)


def sign_flip_p(differences: Values) -> float:
    """Return the one-sided p-value for differences below 0: the share of sign patterns whose sum is at most the
    observed sum. Exact for up to ``MOST_FLIPPED`` nonzero differences, else from sampled patterns; 1 without nonzero
    differences."""
    x = _vector(differences, "differences")
    return _flip_p(tuple(sorted(float(value) for value in x if value)))


@lru_cache(maxsize=4096)
def _flip_p(differences: tuple[float, ...]) -> float:
    count = len(differences)
    if not count:
        return 1.0
    if count <= MOST_FLIPPED:
        # Row i holds the bits of i as signs: row 0, all +1, is the observed pattern.
        signs = 1.0 - 2.0 * (np.arange(2**count)[:, None] >> np.arange(count)[None, :] & 1)
    else:
        # A fixed seed: the same differences always have the same p.
        signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(SAMPLED_FLIPS, count))
        # The observed pattern is among the sampled ones, so that p is never 0.
        signs[0] = 1.0
    sums = signs @ np.array(differences)
    # Patterns with equal sums differ by rounding: each sum adds in another order.
    return float(np.mean(sums <= sums[0] + EQUAL_SHARE))


def holm(p: Values) -> list[float]:
    """Return p-values adjusted for multiple tests (Holm 1979), in the same order."""
    x = _vector(p, "p")
    order = np.argsort(x, kind="stable")
    adjusted = np.empty(len(x))
    # Step-down: the i-th smallest of n p-values is multiplied by n − i + 1, and adjusted values never decrease.
    adjusted[order] = np.minimum(np.maximum.accumulate(x[order] * np.arange(len(x), 0, -1)), 1.0)
    return adjusted.tolist()


def probability_of_improvement(a: Table | Sequence[float], b: Table | Sequence[float]) -> Table | float:
    """Return P(A > B) + ½P(A = B) over all pairs of runs, for every leading index of results [..., runs] (Agarwal
    2021): Mann and Whitney's U, from mid-ranks, over mn. Raises ValueError for no runs on a side."""
    from scipy.stats import rankdata

    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    m, n = a.shape[-1], b.shape[-1]
    if not m or not n:
        raise ValueError("the probability of improvement needs at least one run on each side")
    ranks = rankdata(np.concatenate([a, b], axis=-1), axis=-1)[..., :m]
    share = (ranks.sum(axis=-1) - m * (m + 1) / 2) / (m * n)
    return float(share) if share.ndim == 0 else share
