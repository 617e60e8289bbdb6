"""Data between credit and the policy: scores of tokens, the batch of an optimizer step, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np

from retrain.types.credit import Denominators
from retrain.types.rollouts import Group
from retrain.types.samples import Sample


class Want(StrEnum):
    """Kinds of scores of sampled tokens; a policy gives all but ``TEACHER``."""

    LOGPROBS = "logprobs"
    ENTROPY = "entropy"
    VALUES = "values"
    REFERENCE = "reference"
    TEACHER = "teacher"


@dataclass(frozen=True)
class Scores:
    """Arrays over the action tokens [T], one per sample (``Policy.score``) or per rollout (``of_rollouts``); None for
    kinds that were not requested.

    ``logprobs`` and ``entropy`` (nats) are the policy's, ``reference`` the frozen base's log-probabilities, ``teacher``
    a teacher's, empty for a rollout that it does not score.
    """

    logprobs: list[np.ndarray] | None = None
    entropy: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    teacher: list[np.ndarray] | None = None

    def of_rollouts(self, groups: Sequence[Group]) -> Scores:
        """Return the scores of ``samples_of(groups)`` by rollout."""
        counts = [rollout.sequences for group in groups for rollout in group.rollouts]

        def joined(given: list[np.ndarray] | None) -> list[np.ndarray] | None:
            if given is None:
                return None
            parts = iter(given)
            return [np.concatenate([np.zeros(0), *islice(parts, count)]) for count in counts]

        return Scores(**{field.name: joined(getattr(self, field.name)) for field in fields(self)})


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

    metrics: dict[str, Any]
    trainer_logprobs: Sequence[np.ndarray | None] = ()
