"""Teachers of on-policy distillation, and the privileged context that a teacher reads and its student does not.

A teacher over the policy's base, with an adapter or without, is scored by the policy itself, with its micro-batches and
ranks. Another model is a second base in memory and must have the same vocabulary. A teacher that reads the solution may
have the student's weights (OPSD, arXiv 2601.18734; SDPO, 2601.20802), because its context makes tokens that lead to the
solution more probable.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from retrain.algorithms.algorithm import join_by_rollout, samples_of, samples_of_rollout
from retrain.config.algorithm import Distillation
from retrain.data.prompts import Renderer
from retrain.errors import ModelError, RunFailed
from retrain.policy.backbone import backbone_of, collate, hidden_states, in_microbatches, per_sample, token_logprobs
from retrain.policy.base import BaseModel
from retrain.policy.head import Head
from retrain.policy.lora import Adapter, Lanes, LoraWeights
from retrain.policy.packing import Budget, with_prompt
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.types import Group, Rollout, Sample, Want


class TeacherContext:
    """Builds the prompts of a teacher: the rollout's prompt, with privileged context at the end of its last message.

    A prompt has at most ``longest`` tokens together with the completion that follows. The student's chat template is
    used.
    """

    def __init__(self, renderer: Renderer, section: Distillation, longest: int):
        self.renderer, self.kind, self.text, self.longest = renderer, section.context, section.context_template, longest

    def prompts(self, group: Group) -> list[tuple[int, ...] | None]:
        """Return the teacher's prompt for each rollout; None if there is no context to add or the prompt is too
        long."""
        return [self._prompt(group, rollout) for rollout in group.rollouts]

    def _prompt(self, group: Group, rollout: Rollout) -> tuple[int, ...] | None:
        answer = self._answer(group, rollout)
        # A rewritten conversation has several prompts, which one prompt of a teacher cannot replace.
        if not answer or not len(rollout) or rollout.sequences != 1:
            return None
        *before, last = group.prompt.messages
        text = self.text.replace("{context}", answer)
        message = {**last, "content": f"{last['content']}\n\n{text}"}
        ids = self.renderer.prompt(group.prompt.problem, [*before, message]).token_ids
        return ids if len(ids) + len(rollout) <= self.longest else None

    def _answer(self, group: Group, rollout: Rollout) -> str:
        if self.kind == "answer":
            return group.prompt.problem.answer
        return next((other.text for other in group.rollouts if other is not rollout and other.reward.is_correct), "")


class Teacher(Protocol):
    """Scores sampled tokens. ``identity`` names the weights, so that a resumed run notices if they have changed."""

    identity: str

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the teacher's log-probabilities (nats) of each sample's sampled tokens [T], with the temperature and
        the supports that ``policy`` trains with."""
        ...


def teacher_logprobs(
    teacher: Teacher, policy: Policy, groups: Sequence[Group], context: TeacherContext | None = None
) -> list[np.ndarray]:
    """Return the teacher's log-probabilities of every rollout's sampled tokens [T]. With a ``context``, the teacher
    reads ``context.prompts``; a rollout without such a prompt gets an empty array."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if context is None:
        return join_by_rollout(teacher.score(policy, samples_of(groups)), rollouts)
    prompts = teacher_prompts(groups, context)
    views = [
        with_prompt(samples_of_rollout(rollout)[0], prompt)
        for rollout, prompt in zip(rollouts, prompts, strict=True)
        if prompt is not None
    ]
    rows = iter(teacher.score(policy, views) if views else ())
    return [np.zeros(0) if prompt is None else next(rows) for prompt in prompts]


def teacher_prompts(groups: Sequence[Group], context: TeacherContext | None) -> list[tuple[int, ...] | None]:
    """Return the prompt that the teacher reads for each rollout: () stands for the rollout's own prompt, None for no
    teacher."""
    if context is None:
        return [()] * sum(len(group.rollouts) for group in groups)
    return [prompt for group in groups for prompt in context.prompts(group)]


def _states(base: BaseModel, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
    head = backbone_of(base).head
    if head is None:
        raise ModelError(
            f"{type(base.model).__name__} has no output layer apart from its other layers, which comparing whole "
            'distributions needs: set [distillation] estimate = "sampled"'
        )
    with torch.no_grad():
        return hidden_states(base, collate(views, base).to(base.device)), head


class PolicyTeacher:
    """The student's current weights, as a teacher that differs from the student only by its context."""

    identity = "policy"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.LOGPROBS})).logprobs or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        with lanes.single(adapter):
            return _states(lanes.base, views)


class BaseTeacher:
    def __init__(self, fingerprint: str):
        self.identity = f"base {fingerprint}"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.REFERENCE})).reference or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        return _states(lanes.base, views)


class AdapterSnapshot(PolicySnapshot, Protocol):
    @property
    def weights(self) -> LoraWeights: ...


class AdapterTeacher:
    """An adapter over the policy's base, which needs no second base in memory."""

    def __init__(self, snapshot: AdapterSnapshot, identity: str):
        self.snapshot, self.identity = snapshot, identity

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        return policy.score(samples, frozenset({Want.LOGPROBS}), self.snapshot).logprobs or []

    def states(self, lanes: Lanes, adapter: Adapter, views: Sequence[Sample]) -> tuple[torch.Tensor, Head]:
        with lanes.single(self.snapshot.weights):
            return _states(lanes.base, views)


class ModelTeacher:
    """Another model with the same vocabulary; its micro-batches have ``tokens`` tokens, fewer when memory runs out."""

    def __init__(self, base: BaseModel, tokens: int, temperature: float):
        self.base, self.budget, self.temperature = base, Budget(tokens), temperature
        self.identity = f"model {base.fingerprint}"

    def score(self, policy: Policy, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Score the samples. Raises RunFailed if one is longer than the teacher's context."""
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
