"""Gives every token the advantage of its turn, or of its whole rollout."""

from dataclasses import dataclass, replace

import numpy as np

from retrain.algorithms.algorithm import CreditStep, StepContext
from retrain.types import CreditedBatch, CreditedRollout, Denominators


@dataclass(frozen=True)
class SpreadAdvantage(CreditStep):
    """Sets token advantages, where a critic has not set them, and the loss mask of every rollout with an advantage, and
    the denominators, which count all of them.

    With ``keeps_uniform_groups`` groups whose advantages are all 0 train too.
    """

    keeps_uniform_groups: bool

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        if self.keeps_uniform_groups:
            reasons = [group.discarded for group in batch.groups]
            batch = batch.with_discarded(None if reason == "zero_advantage" else reason for reason in reasons)
        rated = batch.rated
        if not rated:
            return batch
        tokens = sum(map(len, rated))
        sequences = sum(rollout.sequences for rollout in rated if len(rollout) > 0)
        batch = replace(batch, denominators=Denominators(tokens, sequences, action_tokens=tokens))
        return batch.with_fields(
            rated,
            ({"token_advantages_T": _token_advantages(one), "loss_mask_T": np.ones(len(one), bool)} for one in rated),
        )


def _token_advantages(rollout: CreditedRollout) -> np.ndarray:
    """Return the advantage of every token before it is weighted, float64 [T]. Raises ValueError unless finite."""
    advantages_T = np.full(len(rollout), rollout.advantage)
    if rollout.token_advantages_T is not None:
        advantages_T = rollout.token_advantages_T
    elif rollout.turn_advantages is not None:
        advantages_T = np.repeat(rollout.turn_advantages, [len(turn.action) for turn in rollout.turns])
    if not np.isfinite(advantages_T).all():
        raise ValueError("episode advantages must be finite: leave out the completions without a reward")
    return advantages_T
