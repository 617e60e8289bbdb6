"""Samples: flat sequences of tokens to score and to train on, their scores, and the batch of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from retrain.types.credit import Denominators
from retrain.types.rollouts import Support


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of tokens to train on, one entry per token of what was read and what was sampled [L].

    A rollout of two turns that read (1, 2), sampled (10, 11), read (5) and sampled (12), with an advantage of 0.5:

    - ``token_ids`` 1 2 10 11 5 12 (int64)
    - ``action_mask`` 0 0 1 1 0 1 (bool): the sampled tokens; in all float arrays the others are 0
    - ``loss_mask`` 0 0 1 1 0 1 (bool): those of them that train
    - ``logprobs`` 0 0 −1.2 −0.3 0 −2.0 (float64, nats): of the distribution that each was sampled from
    - ``versions`` −1 −1 3 3 −1 3 (int64): of the weights that sampled it; −1 where none did
    - ``advantages`` 0 0 0.5 0.5 0 0.5 (float64)

    ``support`` is that of the sampled tokens, one after the other; None when sampling was not truncated.
    ``old_logprobs`` are the trainer's own before the first of several updates, ``values`` and ``value_targets`` those
    of a critic, ``policy_weights`` factors of the policy loss (0: rejected); None where there is no such thing.
    ``teacher_prompt`` is as in ``CreditedRollout``.
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    support: Support | None = None
    old_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    value_targets: np.ndarray | None = None
    policy_weights: np.ndarray | None = None
    teacher_prompt: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prefix(self) -> int:
        """Tokens before the first action: what a group's samples have in common."""
        return int(self.action_mask.argmax())

    @classmethod
    def single_turn(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs_T: np.ndarray,
        advantages_T: np.ndarray,
        loss_mask_T: np.ndarray | None = None,
        support: Support | None = None,
    ) -> Sample:
        """Return one action after one prompt, with its log-probabilities and advantages token by token."""
        read, sampled = len(prompt_ids), len(token_ids)
        mask = np.ones(sampled, dtype=bool) if loss_mask_T is None else loss_mask_T
        return cls(
            token_ids=np.array([*prompt_ids, *token_ids], dtype=np.int64),
            action_mask=np.repeat([False, True], [read, sampled]),
            logprobs=np.concatenate([np.zeros(read), logprobs_T]),
            versions=np.repeat([-1, 0], [read, sampled]),
            advantages=np.concatenate([np.zeros(read), advantages_T]),
            loss_mask=np.concatenate([np.zeros(read, dtype=bool), mask]),
            support=support,
        )


def without_advantages(sample: Sample) -> Sample:
    """Return the sample with an advantage of 0 for every sampled token; all of them train."""
    return replace(sample, advantages=np.zeros(len(sample)), loss_mask=sample.action_mask)


def with_prompt(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """Return the sample with ``prompt_ids`` in place of its prompt, and without credit."""
    prefix, length = sample.prefix, len(prompt_ids)

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(length, fill, values.dtype), values[prefix:]])

    return Sample(
        token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int64), sample.token_ids[prefix:]]),
        action_mask=moved(sample.action_mask, False),
        logprobs=moved(sample.logprobs, 0.0),
        versions=moved(sample.versions, -1),
        advantages=moved(sample.advantages, 0.0),
        loss_mask=moved(sample.loss_mask, False),
        support=sample.support,
    )


class Want(StrEnum):
    """Kinds of scores of sampled tokens; a policy gives all but ``TEACHER``."""

    LOGPROBS = "logprobs"
    ENTROPY = "entropy"
    VALUES = "values"
    REFERENCE = "reference"
    TEACHER = "teacher"


@dataclass(frozen=True)
class Scores:
    """Arrays over the action tokens [T], one per sample or per rollout; None for kinds that were not requested.

    ``logprobs`` and ``entropy`` (nats) are the policy's, ``reference`` the frozen base's log-probabilities, ``teacher``
    a teacher's, empty for a rollout that it does not score.
    """

    logprobs: list[np.ndarray] | None = None
    entropy: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    teacher: list[np.ndarray] | None = None


@dataclass(frozen=True)
class TrainBatch:
    """The samples with signal of one optimizer step; ``denominators`` also count groups without signal.

    ``step`` counts from 0, as does ``update`` within it; ``stream`` is the prefix of the run's random streams. Where
    nothing trains, sampler and trainer are compared on ``probe``, a few rollouts without advantages. ``keep_logprobs``
    requests the trainer's log-probabilities of the sampled tokens.
    """

    samples: Sequence[Sample]
    denominators: Denominators
    step: int
    stream: tuple[int | str, ...]
    probe: Sequence[Sample] = ()
    update: int = 0
    keep_logprobs: bool = False


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of one optimizer step, and for a batch with ``keep_logprobs`` the trainer's log-probabilities [T] of each
    sample's sampled tokens before the step, None for a sample that needed no forward pass."""

    metrics: Mapping[str, Any]
    trainer_logprobs: Sequence[np.ndarray | None] = ()
