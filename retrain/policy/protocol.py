"""The interface of a policy: scores, updates, snapshots. Implemented by LoRA adapters (``policy.local``) and by plug-in
backends (``policy.plugin``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from retrain.types import Denominators, Group, Sample, samples_of_rollout, without_advantages

if TYPE_CHECKING:
    from retrain.policy.objective import Objective


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

    ``logprobs`` and ``entropy`` (nats) are the policy's, ``reference`` the frozen base's log-probabilities, ``values``
    the critic's, ``teacher`` a teacher's log-probabilities, empty for a rollout that it does not score.
    """

    logprobs: list[np.ndarray] | None = None
    entropy: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    teacher: list[np.ndarray] | None = None

    def of_rollouts(self, groups: Sequence[Group]) -> Scores:
        """Those of ``samples_of(groups)``, rollout by rollout."""
        counts = [rollout.sequences for group in groups for rollout in group.rollouts]

        def joined(given: list[np.ndarray] | None) -> list[np.ndarray] | None:
            if given is None:
                return None
            parts = iter(given)
            return [np.concatenate([np.zeros(0), *islice(parts, count)]) for count in counts]

        return Scores(**{field.name: joined(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class TrainBatch:
    """The samples of one optimizer step.

    ``samples`` are the rollouts with signal; ``denominators`` also count groups without signal. ``step`` counts from 0,
    as does ``update`` within it; ``stream`` is the prefix of the run's random streams. Where nothing trains, sampler
    and trainer are compared on ``probe``, a few rollouts without advantages. ``keep_logprobs`` requests the trainer's
    log-probabilities of the sampled tokens.
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
    """Metrics of one optimizer step, under the catalogue's keys.

    ``trainer_logprobs`` holds, for every sample of a batch with ``keep_logprobs``, the trainer's log-probabilities of
    its sampled tokens [T] before the step, None for a sample that needed no forward pass. Empty for other batches.
    """

    metrics: dict[str, Any]
    trainer_logprobs: Sequence[np.ndarray | None] = ()


PROBE_SIZE = 4  # Rollouts on which sampler and trainer are compared in a step without signal: one small forward pass


def probe_of(groups: Sequence[Group], size: int = PROBE_SIZE) -> list[Sample]:
    """Return up to ``size`` rollouts without advantages: the first of every group, then the second, and so on.

    The choice depends on the order of the prompts alone, so a repeated or resumed step scores the same rollouts.
    """
    longest = max((len(group.rollouts) for group in groups), default=0)
    chosen = (
        group.rollouts[i]
        for i in range(longest)
        for group in groups
        if i < len(group.rollouts) and len(group.rollouts[i])
    )
    return [without_advantages(samples_of_rollout(rollout)[-1]) for rollout in islice(chosen, size)]


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    """Return the samples of all rollouts, without credit."""
    return [sample for group in groups for rollout in group.rollouts for sample in samples_of_rollout(rollout)]


class PolicySnapshot(Protocol):
    """An immutable copy of a policy's weights."""

    def write(self, directory: Path) -> None:
        """Write everything that ``Policy.load`` needs into the empty ``directory``; for resumable snapshots only."""
        ...

    def export(self, directory: Path, checkpoint: Path) -> None:
        """Write the files for other tools into the empty ``directory``; ``write`` has written ``checkpoint``."""
        ...

    def discard(self) -> None: ...


class Policy(Protocol):
    """The trainable model of one run. ``version`` counts the changes of its weights, a critic's included."""

    version: int
    starts_as_base: bool  # Whether an untrained run is the base model itself, so that one evaluation serves all

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """Return the row's loss_is_placeholder, backend_reports_sync_loss and backend_preserves_token_advantages."""
        ...

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        """Score the samples by a fresh forward pass, with the current weights or (all but values) with ``weights``."""
        ...

    def update(self, batch: TrainBatch, objective: Objective, lr: float) -> UpdateResult:
        """Take one optimizer step. Raises NonFinite, with nothing changed, when a loss or gradient is not finite."""
        ...

    def snapshot(self, resumable: bool = False) -> PolicySnapshot:
        """Copy the weights; if ``resumable``, with everything else that ``load`` needs, in host memory."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what a resumable snapshot wrote."""
        ...

    def begin_with(self, directory: Path) -> None:
        """Load only the weights that another tool or run left in ``directory``."""
        ...

    def read(self, directory: Path) -> PolicySnapshot:
        """Read exported weights for an engine to sample with."""
        ...

    def begin_step(self, step: int) -> list[str]:
        """Apply changes that are due before ``step``, such as a lower rank, and return log lines about them."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state besides the weights, as strict JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state()``."""
        ...

    def notes(self) -> list[str]:
        """Return the log lines since the last call."""
        ...
