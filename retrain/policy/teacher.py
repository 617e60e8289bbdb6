"""Who says how probable it finds the tokens that a policy has sampled: weights in this process, or a server.

Weights of the policy's own base (an adapter, or none) are scored by the policy itself, with its micro-batches and its
ranks; another model is a second base in memory, which has the same tokens.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from retrain.errors import ModelError, RunFailed
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel
from retrain.policy.budget import Budget
from retrain.policy.context import Context, read_after
from retrain.policy.head import Head
from retrain.policy.logprobs import collate, hidden_states, per_sample, token_logprobs
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.protocol import Policy, PolicySnapshot, Scores, Want, samples_of
from retrain.policy.scoring import in_microbatches
from retrain.types import Group, Sample, samples_of_rollout


class Teacher(Protocol):
    """``identity`` tells its weights from others, as far as they are known."""

    identity: str

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Its log-probabilities (nats) of the sampled tokens of each sample [T], of the distribution that ``policy``
        trains on: at the same temperature, over the same support."""
        ...


@runtime_checkable
class WholeTeacher(Protocol):
    """A teacher in this process, whose whole distributions can be had."""

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        """Hidden states [M, H] of the places that predict a sampled token, sequence after sequence, without gradients,
        and the output layer that makes logits of them. ``lanes`` are those of the student, ``adapter`` its own."""
        ...


def _states(base: BaseModel, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
    """Those of a model as its lanes are. Raises ModelError where it does not come apart."""
    head = backbone_of(base).head
    if head is None:
        raise ModelError(
            f"{type(base.model).__name__} does not come apart into layers and an output layer, so whole distributions "
            'cannot be compared: [distillation] estimate = "sampled"'
        )
    with torch.no_grad():
        return hidden_states(base, collate(views, base).to(base.device)), head


def taught(
    teacher: Teacher, policy: Policy, groups: Sequence[Group], context: Context | None = None
) -> list[np.ndarray]:
    """What the teacher says of every rollout's sampled tokens [T], in order; with a ``context`` after prompts of its
    own, and nothing ([0]) of a rollout for which there is nothing to show."""
    if context is None:
        found = Scores(teacher=teacher.score(policy, samples_of(groups))).of_rollouts(groups).teacher
        assert found is not None
        return found
    prompts = [prompt for group in groups for prompt in context.prompts(group)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    views = [
        read_after(samples_of_rollout(rollout)[0], prompt)
        for rollout, prompt in zip(rollouts, prompts, strict=True)
        if prompt is not None
    ]
    said = iter(teacher.score(policy, views) if views else ())
    return [np.zeros(0) if prompt is None else next(said) for prompt in prompts]


def teacher_prompts(groups: Sequence[Group], context: Context | None) -> list[tuple[int, ...] | None]:
    """Return for each rollout the prompt that its teacher reads: () for its own, None where it has no teacher."""
    if context is None:
        return [()] * sum(len(group.rollouts) for group in groups)
    return [prompt for group in groups for prompt in context.prompts(group)]


class LocalWeights(PolicySnapshot, Protocol):
    """The snapshot of an adapter."""

    @property
    def weights(self) -> LoraWeights: ...


class PolicyTeacher:
    """The student's own weights as they are, which only a context makes a teacher."""

    identity = "policy"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.LOGPROBS})).logprobs or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        with lanes.single(adapter):
            return _states(lanes.base, views)


class BaseTeacher:
    """The frozen base without any adapter."""

    def __init__(self, fingerprint: str):
        self.identity = f"base {fingerprint}"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.REFERENCE})).reference or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        return _states(lanes.base, views)


class AdapterTeacher:
    """An adapter of the policy's base, which costs no second copy of it."""

    def __init__(self, weights: LocalWeights, identity: str):
        self.weights, self.identity = weights, identity

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.LOGPROBS}), self.weights).logprobs or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        with lanes.single(self.weights.weights):
            return _states(lanes.base, views)


class ModelTeacher:
    """Another model with the same tokens, in micro-batches of ``tokens`` that get smaller when memory runs out."""

    def __init__(self, base: BaseModel, tokens: int, temperature: float):
        self.base, self.budget, self.temperature = base, Budget(tokens), temperature
        self.identity = f"model {base.fingerprint}"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """See ``Teacher.score``. Raises RunFailed for a sample that is longer than its context."""
        longest = max(map(len, samples), default=0)
        if longest > self.base.context_length:
            raise RunFailed(
                f"the teacher {self.base.name} reads {self.base.context_length} tokens at most, and a sample has "
                f"{longest}: lower [training] max_tokens"
            )
        if not samples:
            return []
        return in_microbatches(self.base, self.budget, samples, lambda parts: self._score(samples, parts))

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        return _states(self.base, views)

    def _score(self, samples: Sequence[Sample], parts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        scores = [np.zeros(0)] * len(samples)
        for part in parts:
            batch = collate([samples[i] for i in part], self.base).to(self.base.device)
            with torch.no_grad():
                logprobs_BT, _ = token_logprobs(self.base, batch, self.temperature)
            for i, logprobs_T in zip(part, per_sample(logprobs_BT, batch), strict=True):
                scores[i] = logprobs_T
        return scores
