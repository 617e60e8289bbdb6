"""Leave out of the policy loss what trainer and sampler disagree about, as far as that is decided for a whole update:
completions by ``[algorithm] rejection``, tokens by M2PO, and what then counts in the loss's divisor.

Completions are rejected once in a step. M2PO bounds how far the policy goes from the sampler, so it chooses anew before
each of several updates, over that update's tokens.

What is rejected keeps its place in the other terms of the loss and in all statistics: its weight in the policy loss is
0, nothing else changes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from retrain.algorithms.protocol import Credit
from retrain.config.algorithm import Algorithm
from retrain.maths.corrections import Correction, kept_by_second_moment, kept_sequences
from retrain.policy.protocol import Policy, Scores, TrainBatch, Want
from retrain.types import Group, Rollout, sequence_slices

C = TypeVar("C", bound=Credit)


def reject(groups: Sequence[Group], credit: C, algorithm: Algorithm, scores: Scores | None, several: bool = False) -> C:
    """Set ``policy_weights_T`` of every rollout that has a reward; the credit with its new divisors and numbers.

    ``scores.logprobs`` are the trainer's before the update, of all rollouts in order [T]. Nothing changes where the
    configuration rejects nothing that is decided beforehand. A sequence is what one sample trains on: a whole rollout,
    unless the conversation was rewritten. With ``several`` updates M2PO is left to ``leave_out_anew``.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        rollout.policy_weights_T = None
    counted, anew = algorithm.rejection_denominator == "kept", several and algorithm.loss == "m2po"
    if not (counted or algorithm.rejection != "none" or (algorithm.loss == "m2po" and not anew)) or not rollouts:
        return credit
    assert scores is not None, "the algorithm asked for log-probabilities"
    assert scores.logprobs is not None
    known = [
        (rollout, logprobs_T, own)
        for rollout, logprobs_T in zip(rollouts, scores.logprobs, strict=True)
        if rollout.token_advantages_T is not None
        for own in sequence_slices(rollout)
    ]
    if not known:
        return credit
    kept_BT, mask_BT = _kept(known, algorithm, counted, anew)
    for rollout, _, _ in known:
        rollout.policy_weights_T = np.ones(len(rollout))
    for (rollout, _, own), kept_T in zip(known, kept_BT.numpy(), strict=True):
        assert rollout.policy_weights_T is not None
        rollout.policy_weights_T[own] = kept_T[: own.stop - own.start]
    metrics = credit.metrics if anew else {**credit.metrics, **_shares(kept_BT, mask_BT)}
    if not counted:
        return replace(credit, metrics=metrics)
    tokens, sequences = dict[Rollout, int](), dict[Rollout, int]()
    for rollout, _, own in known:
        assert rollout.policy_weights_T is not None
        mask_T = np.ones(len(rollout), dtype=bool) if rollout.loss_mask_T is None else rollout.loss_mask_T
        count = int((mask_T[own] & (rollout.policy_weights_T[own] != 0.0)).sum())
        tokens[rollout] = tokens.get(rollout, 0) + count
        sequences[rollout] = sequences.get(rollout, 0) + (count > 0)
    denominators = replace(
        credit.denominators, tokens=sum(tokens.values()), sequences=sum(sequences.values()), kept_tokens=True
    )
    return replace(credit, denominators=denominators, metrics=metrics, tokens=tokens, sequences=sequences)


def _kept(
    known: Sequence[tuple[Rollout, np.ndarray, slice]], algorithm: Algorithm, counted: bool, anew: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens train, and which there are, bool [B, T], a row for each sequence."""
    rows = [
        (logprobs_T[own], rollout.logprobs_T[own], rollout.token_advantages_T[own])
        for rollout, logprobs_T, own in known
        if rollout.token_advantages_T is not None
    ]
    (old_BT, sampler_BT, advantages_BT), mask_BT = _padded(rows)
    kept_BT = mask_BT.clone()
    if algorithm.rejection != "none":
        low, high = algorithm.rejection_bounds
        kept_BT &= kept_sequences(algorithm.rejection, old_BT, sampler_BT, mask_BT, low, high)
    if algorithm.loss == "m2po" and not anew:
        kept_BT &= _near_the_sampler(old_BT, sampler_BT, mask_BT, advantages_BT, algorithm)
    if counted and algorithm.weight is not None:
        correction = Correction(*algorithm.weight)
        kept_BT &= correction.weights(correction.ratio(old_BT, sampler_BT, mask_BT)) != 0.0
    return kept_BT, mask_BT


def _shares(kept_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Any]:
    rejected_BT = mask_BT & ~kept_BT
    return {
        "rejected_tokens_frac": float(rejected_BT.sum() / mask_BT.sum().clamp(min=1)),
        "rejected_sequences_frac": float((mask_BT.any(1) & ~kept_BT.any(1)).double().mean()),
    }


def leave_out_anew(batch: TrainBatch, policy: Policy, algorithm: Algorithm) -> tuple[TrainBatch, dict[str, Any]]:
    """The batch of one of several updates with what M2PO leaves out of it by the policy as it is now, and how much.

    The choice is over all sampled tokens of the update that have an advantage, so that micro-batches do not change it;
    what a completion was rejected for stays left out. One forward pass, but none before the first update, whose
    log-probabilities are known.
    """
    samples = batch.samples
    given = [sample.old_logprobs[sample.action_mask] for sample in samples if sample.old_logprobs is not None]
    if batch.update or len(given) < len(samples):
        scored = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
        assert scored is not None, "a policy gives what it is asked for"
        given = scored
    rows = [
        (now_T, sample.logprobs[sample.action_mask], sample.advantages[sample.action_mask])
        for sample, now_T in zip(samples, given, strict=True)
    ]
    (now_BT, sampler_BT, advantages_BT), mask_BT = _padded(rows)
    kept_BT = _near_the_sampler(now_BT, sampler_BT, mask_BT, advantages_BT, algorithm)
    chosen = []
    for row, sample in enumerate(samples):
        length = len(rows[row][0])
        before = np.ones(len(sample)) if sample.policy_weights is None else sample.policy_weights.copy()
        before[sample.action_mask] *= kept_BT[row, :length].numpy()
        kept_BT[row, :length] &= torch.from_numpy(before[sample.action_mask] != 0.0)
        chosen.append(replace(sample, policy_weights=before * sample.action_mask))
    return replace(batch, samples=chosen), _shares(kept_BT, mask_BT)


def _near_the_sampler(
    now_BT: torch.Tensor,
    sampler_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    algorithm: Algorithm,
) -> torch.Tensor:
    """Return which tokens M2PO keeps. Tokens whose advantage is 0 have no policy loss: they are kept and do not count,
    so that groups without signal change nothing for the others."""
    harmful_BT = advantages_BT if algorithm.m2po_tokens == "harmful" else None
    with_signal_BT = mask_BT & (advantages_BT != 0.0)
    kept_BT = kept_by_second_moment(now_BT, sampler_BT, with_signal_BT, algorithm.m2po_threshold, harmful_BT)
    return kept_BT | (mask_BT & ~with_signal_BT)


def _padded(rows: Sequence[tuple[np.ndarray, ...]]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The arrays [T] of each row as tables [B, T] in fp64, one for each place in a row, and which entries there are."""
    lengths = [len(row[0]) for row in rows]
    mask_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    tables = tuple(torch.zeros(mask_BT.shape, dtype=torch.float64) for _ in rows[0])
    for row, (own, length) in enumerate(zip(rows, lengths, strict=True)):
        for table_BT, array_T in zip(tables, own, strict=True):
            table_BT[row, :length] = torch.from_numpy(array_T)
    return tables, mask_BT
