"""Masks completions (``[algorithm] rejection``) and tokens (M2PO) on which trainer and sampler disagree, in the policy
loss. The divisor of the loss is counted afterwards.

Completions are rejected once per step. M2PO bounds how far the policy moves from the sampler, so with several updates
it chooses again before each update (``mask_minibatch``), among the tokens of that update.

Rejection only sets weights in the policy loss to 0. Rejected tokens still count in the other terms of the loss and in
all statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from retrain.algorithms.algorithm import CreditStep, StepContext, pad, sequence_slices, token_mask
from retrain.algorithms.losses import M2PO
from retrain.config.algorithm import AlgorithmSection
from retrain.maths.corrections import Correction, kept_sequences
from retrain.maths.shapes import Mask_BT
from retrain.policy.protocol import Policy
from retrain.types import CreditedBatch, CreditedRollout, StepBatch, Want


@dataclass(frozen=True)
class _Sequence:
    rollout: CreditedRollout
    tokens: slice  # Of one sample of the rollout
    old_logprobs_T: np.ndarray  # The trainer's, before the update


@dataclass(frozen=True)
class RejectionMask(CreditStep):
    """Sets ``policy_weights_T`` of every rollout that has a reward, and the divisors if only kept tokens count.

    Reads the trainer's log-probabilities before the update. A sequence is what one sample trains on: a whole rollout,
    unless the conversation was rewritten. With ``several_updates``, M2PO is applied by ``mask_minibatch`` instead.
    """

    algorithm: AlgorithmSection
    several_updates: bool = False

    @property
    def requires(self) -> frozenset[Want]:
        return frozenset({Want.LOGPROBS})

    @property
    def _uses_m2po(self) -> bool:
        return self.algorithm.loss == "m2po" and not self.several_updates

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        counts_kept = self.algorithm.rejection_denominator == "kept"
        if not (counts_kept or self.algorithm.rejection != "none" or self._uses_m2po):
            return batch
        assert context.scores.logprobs is not None, "the algorithm asked for log-probabilities"
        sequences = [
            _Sequence(rollout, tokens, logprobs_T[tokens])
            for rollout, logprobs_T in zip(batch.rollouts, context.scores.logprobs, strict=True)
            if rollout.is_credited
            for tokens in sequence_slices(rollout)
        ]
        if not sequences:
            return batch
        kept_BT, mask_BT = self._kept_tokens(sequences)
        weights = {sequence.rollout: np.ones(len(sequence.rollout)) for sequence in sequences}
        for sequence, kept_T in zip(sequences, kept_BT.numpy(), strict=True):
            weights[sequence.rollout][sequence.tokens] = kept_T[: len(sequence.old_logprobs_T)]
        batch = batch.with_fields(list(weights), ({"policy_weights_T": weights_T} for weights_T in weights.values()))
        if counts_kept:
            batch = _with_kept_counts(batch)
        leaves_m2po_open = self.several_updates and self.algorithm.loss == "m2po"
        return batch if leaves_m2po_open else batch.with_metrics(_shares(kept_BT, mask_BT))

    def _kept_tokens(self, sequences: Sequence[_Sequence]) -> tuple[Mask_BT, Mask_BT]:
        algorithm, mask_BT = self.algorithm, token_mask([sequence.old_logprobs_T for sequence in sequences])
        old_BT = pad([sequence.old_logprobs_T for sequence in sequences])
        sampler_BT = pad([sequence.rollout.logprobs_T[sequence.tokens] for sequence in sequences])
        kept_BT = mask_BT.clone()
        if algorithm.rejection != "none":
            low, high = algorithm.rejection_bounds
            kept_BT &= kept_sequences(algorithm.rejection, old_BT, sampler_BT, mask_BT, low, high)
        if self._uses_m2po:
            advantages = [sequence.rollout.token_advantages_T for sequence in sequences]
            advantages_BT = pad([
                values_T[sequence.tokens] for values_T, sequence in zip(advantages, sequences, strict=True)
                if values_T is not None
            ])  # fmt: skip
            kept_BT &= _m2po(algorithm).kept_tokens(old_BT, sampler_BT, mask_BT, advantages_BT)
        if algorithm.rejection_denominator == "kept" and algorithm.weight is not None:
            correction = Correction(*algorithm.weight)
            # A token of weight 0 adds nothing to the loss, so it does not count in the divisor either.
            kept_BT &= correction.weights(correction.ratio(old_BT, sampler_BT, mask_BT)) != 0.0
        return kept_BT, mask_BT


def _m2po(algorithm: AlgorithmSection) -> M2PO:
    return M2PO(**algorithm.parameters_of("loss"))


def _with_kept_counts(batch: CreditedBatch) -> CreditedBatch:
    rollouts = [rollout for rollout in batch.rollouts if rollout.policy_weights_T is not None]
    counts = [_kept_counts(rollout) for rollout in rollouts]
    batch = batch.with_fields(rollouts, counts)
    tokens = sum(count["counted_tokens"] for count in counts)
    sequences = sum(count["counted_sequences"] for count in counts)
    kept = replace(batch.denominators, tokens=tokens, sequences=sequences, kept_tokens=True)
    return replace(batch, denominators=kept)


def _kept_counts(rollout: CreditedRollout) -> dict[str, int]:
    assert rollout.policy_weights_T is not None
    kept_T = rollout.policy_weights_T != 0.0
    if rollout.loss_mask_T is not None:
        kept_T &= rollout.loss_mask_T
    counts = [int(kept_T[tokens].sum()) for tokens in sequence_slices(rollout)]
    return {"counted_tokens": sum(counts), "counted_sequences": sum(count > 0 for count in counts)}


def _shares(kept_BT: Mask_BT, mask_BT: Mask_BT) -> dict[str, float]:
    rejected_BT = mask_BT & ~kept_BT
    return {
        "rejected_tokens_frac": float(rejected_BT.sum() / mask_BT.sum().clamp(min=1)),
        "rejected_sequences_frac": float((mask_BT.any(1) & ~kept_BT.any(1)).double().mean()),
    }


def mask_minibatch(batch: StepBatch, policy: Policy, algorithm: AlgorithmSection) -> tuple[StepBatch, dict[str, float]]:
    """Mask tokens of one update's batch by M2PO under the current policy. Return the batch, and the masked shares as
    metrics.

    M2PO chooses among all sampled tokens of the update with a nonzero advantage, so micro-batches do not change it.
    Rejected completions stay masked. This takes one forward pass, except before the first update, for which
    log-probabilities are known.
    """
    samples = batch.samples
    logprobs = [sample.old_logprobs[sample.action_mask] for sample in samples if sample.old_logprobs is not None]
    # Before the first update π_old is the policy itself: no forward pass is needed.
    if batch.update or len(logprobs) < len(samples):
        scored = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
        assert scored is not None, "a policy gives what it is asked for"
        logprobs = [logprobs_T for _, logprobs_T in zip(samples, scored, strict=True)]
    mask_BT, now_BT = token_mask(logprobs), pad(logprobs)
    sampler_BT = pad([sample.logprobs[sample.action_mask] for sample in samples])
    advantages_BT = pad([sample.advantages[sample.action_mask] for sample in samples])
    kept_BT = _m2po(algorithm).kept_tokens(now_BT, sampler_BT, mask_BT, advantages_BT)
    masked = []
    for row, sample in enumerate(samples):
        length = len(logprobs[row])
        weights = np.ones(len(sample)) if sample.policy_weights is None else sample.policy_weights.copy()
        weights[sample.action_mask] *= kept_BT[row, :length].numpy()
        # The reported shares count what was rejected earlier in the step as well.
        kept_BT[row, :length] &= torch.from_numpy(weights[sample.action_mask] != 0.0)
        masked.append(replace(sample, policy_weights=weights * sample.action_mask))
    return replace(batch, samples=masked), _shares(kept_BT, mask_BT)
