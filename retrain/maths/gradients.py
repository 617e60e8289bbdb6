"""What gradients of the same rollouts say of each other, from their inner products alone: numpy in, plain numbers out.

A gradient has as many entries as the adapter, but all that is asked here is a function of inner products: g_ai is the
gradient of condition a on batch i, ``gram_CBCB[a, i, b, j]`` = ⟨g_ai, g_bj⟩. Two kinds of averages are kept apart:

- over *the same batch* (i = j): what two conditions make of the same rollouts, one value per batch;
- over *two different batches* (i ≠ j): the noise of one batch is independent of that of the other, so that the mean of
  ⟨g_ai, g_bj⟩ is an unbiased estimate of ⟨E g_a, E g_b⟩. The mean of |g_ai|² is |E g_a|² plus the whole variance of a
  batch, and what is left is the variance: the gradient noise scale (McCandlish and others 2018, arXiv 1812.06162).

Batches are the replicates: intervals are bootstrap intervals over them (percentiles expanded for few batches, as in
``statistics.bootstrap_ci``), a drawn batch is never paired with itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from retrain.maths.arrays import (
    Doubles_B,
    Doubles_S,
    Gram_BB,
    Gram_CBCB,
    Gram_PP,
    Products_BP,
    Table,
    Weights_SB,
)
from retrain.maths.statistics import Interval, bootstrap_ci, expanded_ends

RESAMPLES = 2000
HALVES = 200
"""Random splits of the batches into two halves."""


def same_batch_cosines(gram_CBCB: Gram_CBCB, first: int, second: int) -> Table:
    """cos(g_ai, g_bi) of every batch i, float64 [B]; NaN where one of them is 0."""
    products_B = np.einsum("ii->i", gram_CBCB[first, :, second])
    lengths_B = lengths(gram_CBCB, first) * lengths(gram_CBCB, second)
    return _share(products_B, lengths_B)


def lengths(gram_CBCB: Gram_CBCB, condition: int) -> Table:
    """|g_ai| of every batch, float64 [B]."""
    return np.sqrt(np.maximum(np.einsum("ii->i", gram_CBCB[condition, :, condition]), 0.0))


def _share(part: Table, whole: Table) -> Table:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)


def cosine_interval(gram_CBCB: Gram_CBCB, first: int, second: int, generator: np.random.Generator) -> Interval | None:
    """Mean cosine of two conditions' gradients on the same batch; None where no batch has both."""
    cosines_B = same_batch_cosines(gram_CBCB, first, second)
    return _mean_interval(cosines_B, generator)


def _mean_interval(values_B: Doubles_B, generator: np.random.Generator) -> Interval | None:
    known = values_B[np.isfinite(values_B)]
    return bootstrap_ci(known, generator, resamples=RESAMPLES, expanded=True) if len(known) else None


def ratio_interval(lengths_B: Doubles_B, baseline_B: Doubles_B, generator: np.random.Generator) -> Interval | None:
    """Geometric mean of |g_ai|/|g_bi| over the batches that have both; None where none has."""
    both = (lengths_B > 0) & (baseline_B > 0)
    inner = _mean_interval(np.log(lengths_B[both] / baseline_B[both]), generator)
    if inner is None:
        return None
    low, high = (None if end is None else math.exp(end) for end in (inner.low, inner.high))
    return Interval(math.exp(inner.estimate), low, high)


def clipped_lengths(lengths_B: Doubles_B, clip_norm: float) -> Table:
    """What is left of gradients of these lengths when they are scaled to ``clip_norm`` if longer (0: never)."""
    return np.minimum(lengths_B, clip_norm) if clip_norm > 0 else lengths_B


# -- two different batches ----------------------------------------------------------------------------------------


def between_batches(gram_BB: Gram_BB, weights_SB: Weights_SB | None = None) -> Table:
    """Mean of ⟨g_i, g_j⟩ over i ≠ j, for every row of weights [S] (one row of ones by default): unbiased for the inner
    product of the expectations. NaN where fewer than two different batches have weight."""
    weights_SB = np.ones((1, len(gram_BB))) if weights_SB is None else weights_SB
    off_BB = gram_BB - np.diag(np.diag(gram_BB))
    pairs_S = weights_SB.sum(1) ** 2 - (weights_SB**2).sum(1)
    return _share(((weights_SB @ off_BB) * weights_SB).sum(1), pairs_S)


def _within_batch(gram_BB: Gram_BB, weights_SB: Weights_SB) -> Table:
    return weights_SB @ np.diag(gram_BB) / weights_SB.sum(1)


def resampled(batches: int, generator: np.random.Generator, resamples: int = RESAMPLES) -> Table:
    """How often each batch is drawn in every resample, float64 [S, B]."""
    return generator.multinomial(batches, np.full(batches, 1.0 / batches), size=resamples).astype(np.float64)


def _bootstrapped(batches: int, statistic: Callable[[Table], Table], generator: np.random.Generator):
    """``statistic`` takes weights [S, B] and gives [S]; its value with all batches once, and its interval. None where
    it is not finite."""
    estimate = float(statistic(np.ones((1, batches)))[0])
    if not math.isfinite(estimate):
        return None
    return _with_ends(estimate, statistic(resampled(batches, generator)), batches)


def _with_ends(estimate: float, values_S: Doubles_S, replicates: int) -> Interval:
    known = values_S[np.isfinite(values_S)]
    if replicates < 3 or len(known) < len(values_S) / 2:
        return Interval(estimate, None, None)
    low, high = np.quantile(known, expanded_ends(replicates))
    return Interval(estimate, float(low), float(high))


def noise_floor(gram_BB: Gram_BB, generator: np.random.Generator) -> Interval | None:
    """Mean cosine of one condition's gradients on two *different* batches: how alike two steps are whose rollouts alone
    differ. None with fewer than two batches that have a gradient."""
    lengths_B = np.sqrt(np.maximum(np.diag(gram_BB), 0.0))
    has = lengths_B > 0
    if has.sum() < 2:
        return None
    cosines_BB = gram_BB[np.ix_(has, has)] / np.outer(lengths_B[has], lengths_B[has])
    return _bootstrapped(int(has.sum()), lambda weights_SB: between_batches(cosines_BB, weights_SB), generator)


def halves_cosine(gram_BB: Gram_BB, generator: np.random.Generator) -> float | None:
    """Mean cosine between the gradients of two random halves of the batches; None with fewer than two batches."""
    count = len(gram_BB)
    if count < 2:
        return None
    found = []
    for _ in range(HALVES):
        order = generator.permutation(count)
        first, second = order[: count // 2], order[count // 2 : 2 * (count // 2)]
        product = gram_BB[np.ix_(first, second)].sum()
        length = math.sqrt(gram_BB[np.ix_(first, first)].sum() * gram_BB[np.ix_(second, second)].sum())
        if length > 0:
            found.append(product / length)
    return float(np.mean(found)) if found else None


def expected_cosine(gram_CBCB: Gram_CBCB, first: int, second: int, generator: np.random.Generator) -> Interval | None:
    """Cosine of the two conditions' *expected* gradients, free of the noise that batches have: what is left of a
    difference in the long run. What noise takes beyond ±1 is cut; None where an estimate of |E g|² is not above 0."""

    def statistic(weights_SB: Weights_SB) -> Table:
        product_S = between_batches(gram_CBCB[first, :, second], weights_SB)
        squares = [between_batches(gram_CBCB[each, :, each], weights_SB) for each in (first, second)]
        both_S = np.where((squares[0] > 0) & (squares[1] > 0), squares[0] * squares[1], 0.0)
        return np.clip(_share(product_S, np.sqrt(both_S)), -1.0, 1.0)

    return _bootstrapped(gram_CBCB.shape[1], statistic, generator)


def signal_to_noise(gram_BB: Gram_BB, generator: np.random.Generator) -> Interval | None:
    """|E g|² over the total variance of the gradient of one batch, that is of the mean over its prompts; at least 0
    where the estimate is below. So many batches of prompts in one step as 1 over it have a ratio of 1. None with fewer
    than two batches, or without any gradient."""

    def statistic(weights_SB: Weights_SB) -> Table:
        signal_S, square_S = between_batches(gram_BB, weights_SB), _within_batch(gram_BB, weights_SB)
        return np.where(signal_S > 0, _share(signal_S, np.maximum(square_S - signal_S, 0.0)), 0.0)

    if len(gram_BB) < 2 or not np.diag(gram_BB).any():
        return None
    return _bootstrapped(len(gram_BB), statistic, generator)


def steady_length(gram_BB: Gram_BB, beta1: float, weights_SB: Weights_SB | None = None) -> Table:
    """Root mean square length [S] of an exponential average of independent gradients: its signal is whole, and of the
    variance of one gradient (1 − β₁)/(1 + β₁) is left. With gradients that are scaled as AdamW does, the length of its
    steps."""
    weights_SB = np.ones((1, len(gram_BB))) if weights_SB is None else weights_SB
    square_S = _within_batch(gram_BB, weights_SB)
    signal_S = np.clip(np.nan_to_num(between_batches(gram_BB, weights_SB)), 0.0, square_S)
    return np.sqrt(signal_S + (square_S - signal_S) * (1.0 - beta1) / (1.0 + beta1))


def steady_ratio(
    gram_BB: Gram_BB, baseline_BB: Gram_BB, beta1: float, generator: np.random.Generator
) -> Interval | None:
    """Ratio of two conditions' ``steady_length`` on the same batches; None where the baseline has none."""

    def statistic(weights_SB: Weights_SB) -> Table:
        own_S, other_S = (steady_length(each, beta1, weights_SB) for each in (gram_BB, baseline_BB))
        return _share(own_S, other_S)

    return _bootstrapped(len(gram_BB), statistic, generator)


# -- what is wanted -----------------------------------------------------------------------------------------------


def mean_product(
    products_BP: Products_BP, generator: np.random.Generator, scale: Callable[[Table], Table] | None = None
) -> Interval:
    """Mean over batches and over the independent parts of what is wanted, float64 [B, P], with both resampled;
    ``scale`` gives a factor [S] for weights [S, B] of the batches. Unbiased without ``scale``."""
    batches, parts = products_BP.shape

    def statistic(weights_SB: Weights_SB, weights_SP: Table) -> Table:
        sums_S = ((weights_SB @ products_BP) * weights_SP).sum(1)
        factor_S = 1.0 if scale is None else scale(weights_SB)
        return factor_S * sums_S / (weights_SB.sum(1) * weights_SP.sum(1))

    estimate = float(statistic(np.ones((1, batches)), np.ones((1, parts)))[0])
    weights_SB, weights_SP = resampled(batches, generator), resampled(parts, generator)
    return _with_ends(estimate, statistic(weights_SB, weights_SP), min(batches, parts))


def aligned_cosine(
    products_BP: Products_BP, gram_BB: Gram_BB, wanted_PP: Gram_PP, generator: np.random.Generator
) -> Interval | None:
    """Cosine of a condition's expected update and the expected gradient of what is wanted, free of the noise of both,
    cut to ±1; None where an estimate of either squared length is not above 0."""
    batches, parts = products_BP.shape
    if batches < 2 or parts < 2:
        return None

    def statistic(weights_SB: Weights_SB, weights_SP: Table) -> Table:
        sums_S = ((weights_SB @ products_BP) * weights_SP).sum(1)
        squares = between_batches(gram_BB, weights_SB), between_batches(wanted_PP, weights_SP)
        both_S = np.where((squares[0] > 0) & (squares[1] > 0), squares[0] * squares[1], 0.0)
        return np.clip(_share(sums_S / (weights_SB.sum(1) * weights_SP.sum(1)), np.sqrt(both_S)), -1.0, 1.0)

    estimate = float(statistic(np.ones((1, batches)), np.ones((1, parts)))[0])
    if not math.isfinite(estimate):
        return None
    weights_SB, weights_SP = resampled(batches, generator), resampled(parts, generator)
    return _with_ends(estimate, statistic(weights_SB, weights_SP), min(batches, parts))


def mean_difference(
    own_BP: Products_BP,
    baseline_BP: Products_BP,
    generator: np.random.Generator,
    scale: Callable[[Table], Table] | None = None,
) -> Interval:
    """Mean of ``own_BP`` times its ``scale`` (1 without it) minus the mean of ``baseline_BP``, the same batches and
    parts drawn for both."""
    batches, parts = own_BP.shape

    def statistic(weights_SB: Weights_SB, weights_SP: Table) -> Table:
        own_S, base_S = (((weights_SB @ each) * weights_SP).sum(1) for each in (own_BP, baseline_BP))
        factor_S = 1.0 if scale is None else scale(weights_SB)
        return (factor_S * own_S - base_S) / (weights_SB.sum(1) * weights_SP.sum(1))

    estimate = float(statistic(np.ones((1, batches)), np.ones((1, parts)))[0])
    weights_SB, weights_SP = resampled(batches, generator), resampled(parts, generator)
    return _with_ends(estimate, statistic(weights_SB, weights_SP), min(batches, parts))
