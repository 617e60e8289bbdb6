"""While it trains: whether a server says of its tokens what the trainer says of them, for the weights that drew them.

A few rollouts of every step are scored before the update, with the very weights that the server should have used, so
that rollouts which are meant to be behind the policy are judged as well. Above the limit the likely cause is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.engines.server.hypotheses import likely_cause
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.types import Sample, Want


@dataclass(frozen=True)
class Watch:
    """``limit``: half the mean squared difference of log-probabilities (nats²) above which something is wrong."""

    base: BaseModel
    lanes: Lanes
    temperature: float
    limit: float

    def mismatch(self, policy: Policy, samples: Sequence[Sample], weights: PolicySnapshot) -> float:
        """Half the mean squared difference, over all tokens of these samples that ``weights`` drew."""
        scores = policy.score(samples, frozenset({Want.LOGPROBS}), weights).logprobs
        assert scores is not None, "a policy gives what it is asked for"
        said = [sample.logprobs[sample.action_mask] for sample in samples]
        return float(0.5 * np.mean(np.square(np.concatenate(said) - np.concatenate(scores))))

    def cause(
        self, samples: Sequence[Sample], weights: PolicySnapshot, others: Sequence[tuple[int, PolicySnapshot]]
    ) -> str:
        """Why they differ, in words: the weights of another version, none at all, or precision."""
        assert isinstance(weights, LocalSnapshot), "servers are given LoRA adapters"
        named = {f"version {v}": s.weights for v, s in others if isinstance(s, LocalSnapshot)}
        with self.base.in_use():
            return likely_cause(self.base, self.lanes, samples, weights.weights, named, self.temperature)


def by_version(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """The samples by the version that drew all of their tokens; those of several versions are left out."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        versions = set(sample.versions[sample.action_mask].tolist())
        if len(versions) == 1:
            found.setdefault(versions.pop(), []).append(sample)
    yield from found.items()
