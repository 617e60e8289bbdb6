"""Leave out of the policy loss what trainer and sampler disagree about, as far as that is decided for a whole step:
completions by ``[algorithm] rejection``, tokens by M2PO, and what then counts in the loss's divisor.

What is rejected keeps its place in the other terms of the loss and in all statistics: its weight in the policy loss is
0, nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from retrain.algorithms.protocol import Credit
from retrain.config.algorithm import Algorithm
from retrain.maths.corrections import Correction, kept_by_second_moment, kept_sequences
from retrain.policy.protocol import Scores
from retrain.types import Group, Rollout, sequence_slices

C = TypeVar("C", bound=Credit)


def reject(groups: Sequence[Group], credit: C, algorithm: Algorithm, scores: Scores | None) -> C:
    """Set ``policy_weights_T`` of every rollout that has a reward; the credit with its new divisors and numbers.

    ``scores.logprobs`` are the trainer's before the update, of all rollouts in order [T]. Nothing changes where the
    configuration rejects nothing that is decided beforehand. A sequence is what one sample trains on: a whole rollout,
    unless the conversation was rewritten.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        rollout.policy_weights_T = None
    counted = algorithm.rejection_denominator == "kept"
    if not (algorithm.chooses_before or counted) or not rollouts:
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
    kept_BT, mask_BT = _kept(known, algorithm, counted)
    for rollout, _, _ in known:
        rollout.policy_weights_T = np.ones(len(rollout))
    for (rollout, _, own), kept_T in zip(known, kept_BT.numpy(), strict=True):
        assert rollout.policy_weights_T is not None
        rollout.policy_weights_T[own] = kept_T[: own.stop - own.start]
    metrics = {**credit.metrics, **_shares(kept_BT, mask_BT)}
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
    known: Sequence[tuple[Rollout, np.ndarray, slice]], algorithm: Algorithm, counted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens train, and which there are, bool [B, T], a row for each sequence."""
    lengths = [own.stop - own.start for _, _, own in known]
    shape = (len(known), max(lengths))
    mask_BT = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    old_BT, sampler_BT, advantages_BT = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for row, ((rollout, logprobs_T, own), length) in enumerate(zip(known, lengths, strict=True)):
        assert rollout.token_advantages_T is not None
        old_BT[row, :length] = torch.from_numpy(logprobs_T[own])
        sampler_BT[row, :length] = torch.from_numpy(rollout.logprobs_T[own])
        advantages_BT[row, :length] = torch.from_numpy(rollout.token_advantages_T[own])
    kept_BT = mask_BT.clone()
    if algorithm.rejection != "none":
        low, high = algorithm.rejection_bounds
        kept_BT &= kept_sequences(algorithm.rejection, old_BT, sampler_BT, mask_BT, low, high)
    if algorithm.loss == "m2po":
        harmful_BT = advantages_BT if algorithm.m2po_tokens == "harmful" else None
        kept_BT &= kept_by_second_moment(old_BT, sampler_BT, mask_BT, algorithm.m2po_threshold, harmful_BT)
    if counted and algorithm.weight is not None:
        correction = Correction(*algorithm.weight)
        kept_BT &= correction.weights(correction.ratio(old_BT, sampler_BT, mask_BT)) != 0.0
    return kept_BT, mask_BT


def _shares(kept_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Any]:
    """How much was rejected."""
    rejected_BT = mask_BT & ~kept_BT
    return {
        "rejected_tokens_frac": float(rejected_BT.sum() / mask_BT.sum().clamp(min=1)),
        "rejected_sequences_frac": float((mask_BT.any(1) & ~kept_BT.any(1)).double().mean()),
    }
