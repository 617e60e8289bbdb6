"""A toy policy with a second head, and the algorithm that reads it: a value per token id as a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.algorithms.protocol import Credit, Need
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.objective import Objective
from retrain.policy.protocol import Denominators, Scores, TrainBatch, Want
from retrain.types import Group, Sample


class TwoHeads(LocalPolicy):
    """LoRA lanes and, beside them, what reward each token promises."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.values_V = np.zeros(self.base.vocab_size)

    def score(self, samples: Sequence[Sample], want: frozenset[Want]) -> Scores:
        values = [self.values_V[sample.token_ids[sample.action_mask]] for sample in samples]
        return replace(super().score(samples, want - {Want.VALUES}), values=values if Want.VALUES in want else None)

    def update(self, batch: TrainBatch, objective: Objective, lr: float) -> dict[str, Any]:
        for sample in batch.samples:  # the gradient of ½(V − R)², where R − V is the advantage
            np.add.at(self.values_V, sample.token_ids[sample.loss_mask], 0.1 * sample.advantages[sample.loss_mask])
        return super().update(batch, objective, lr) | {"values/known": int(np.count_nonzero(self.values_V))}

    def snapshot(self, resumable: bool = False) -> TwoHeadsSnapshot:
        return TwoHeadsSnapshot(**vars(super().snapshot(resumable)), values_V=self.values_V.copy())

    def load(self, directory: Path) -> None:
        super().load(directory)
        self.values_V = np.load(directory / "values.npy")


@dataclass(frozen=True)
class TwoHeadsSnapshot(LocalSnapshot):
    values_V: np.ndarray | None = None

    def write(self, directory: Path) -> None:
        super().write(directory)
        np.save(directory / "values.npy", self.values_V)


class Baseline:
    """Advantage of a token: the reward minus what the token's value promised."""

    needs = frozenset({Need.VALUES})

    def credit(self, groups: Sequence[Group], scores: Scores | None, step: int) -> Credit:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout, values_T in zip(rollouts, scores.values, strict=True):
            rollout.token_advantages_T = rollout.reward.total_reward - values_T
            rollout.advantage = float(rollout.token_advantages_T.mean())
        return Credit(Denominators(sum(map(len, rollouts)), len(rollouts)), {"values/mean": 0.0})

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass
