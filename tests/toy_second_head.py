"""A toy policy with a second head, and the algorithm that reads it: a value per token id as a baseline."""

from dataclasses import dataclass, replace

import numpy as np

from retrain.algorithms.protocol import Credit
from retrain.config.modes import Need
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.protocol import Denominators, Want


class TwoHeads(LocalPolicy):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.values_V = np.zeros(self.base.vocab_size)

    def score(self, samples, want):
        values = [self.values_V[sample.token_ids[sample.action_mask]] for sample in samples]
        return replace(super().score(samples, want - {Want.VALUES}), values=values if Want.VALUES in want else None)

    def update(self, batch, objective, lr):
        for sample in batch.samples:  # the gradient of ½(V − R)², where R − V is the advantage
            np.add.at(self.values_V, sample.token_ids[sample.loss_mask], 0.1 * sample.advantages[sample.loss_mask])
        return super().update(batch, objective, lr) | {"values/known": int(np.count_nonzero(self.values_V))}

    def snapshot(self, resumable=False):
        return TwoHeadsSnapshot(**vars(super().snapshot(resumable)), values_V=self.values_V.copy())

    def load(self, directory):
        super().load(directory)
        self.values_V = np.load(directory / "values.npy")


@dataclass(frozen=True)
class TwoHeadsSnapshot(LocalSnapshot):
    values_V: np.ndarray | None = None

    def write(self, directory):
        super().write(directory)
        np.save(directory / "values.npy", self.values_V)


class Baseline:
    """Advantage of a token: the reward minus what the token's value promised."""

    needs = frozenset({Need.VALUES})

    def credit(self, groups, scores, step):
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        for rollout, values_T in zip(rollouts, scores.values, strict=True):
            rollout.token_advantages_T = rollout.reward.total_reward - values_T
            rollout.advantage = float(rollout.token_advantages_T.mean())
        return Credit(Denominators(sum(map(len, rollouts)), len(rollouts)), {"values/mean": 0.0})

    def state(self):
        return {}

    def restore(self, state): ...
