"""Watches during training whether a server's log-probabilities agree with the trainer's.

Some rollouts of every step are scored before the update under the weights that should have sampled them, so that stale
rollouts are compared fairly. Above the limit, the likely cause is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.training.mismatch import likely_cause
from retrain.types import Sample, Want


@dataclass(frozen=True)
class Watch:
    """Compares server and trainer. ``limit``: largest half mean squared difference of log-probabilities (nats²)."""

    base: BaseModel
    lanes: Lanes
    temperature: float
    limit: float

    def mismatch(self, policy: Policy, samples: Sequence[Sample], weights: PolicySnapshot) -> float:
        """Return half the mean squared difference (nats²) between the log-probabilities of server and trainer, over
        the action tokens. ``weights``: the weights that sampled them."""
        scores = policy.score(samples, frozenset({Want.LOGPROBS}), weights).logprobs
        assert scores is not None, "a policy gives what it is asked for"
        served = [sample.logprobs[sample.action_mask] for sample in samples]
        return float(0.5 * np.mean(np.square(np.concatenate(served) - np.concatenate(scores))))

    def cause(
        self, samples: Sequence[Sample], weights: PolicySnapshot, others: Sequence[tuple[int, PolicySnapshot]]
    ) -> str:
        assert isinstance(weights, LocalSnapshot), "servers are given LoRA adapters"
        named = {f"version {v}": s.weights for v, s in others if isinstance(s, LocalSnapshot)}
        with self.base.in_use():
            return likely_cause(self.base, self.lanes, samples, weights.weights, named, self.temperature)


def by_version(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """Yield policy versions with their samples; samples of several versions are skipped."""
    samples_of: dict[int, list[Sample]] = {}
    for sample in samples:
        versions = set(sample.versions[sample.action_mask].tolist())
        if len(versions) == 1:
            samples_of.setdefault(versions.pop(), []).append(sample)
    yield from samples_of.items()
