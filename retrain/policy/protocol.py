"""What the loop asks of a policy: scores, updates, snapshots. Built-in LoRA adapters (``policy.local``) and backends of
the user's own (``policy.plugin``) stand behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from retrain.types import Group, Sample, samples_of_rollout, without_advantages

if TYPE_CHECKING:
    from retrain.policy.objective import Objective


class Want(StrEnum):
    """What can be said of the tokens that were sampled: by a policy, and ``TEACHER`` by a teacher."""

    LOGPROBS = "logprobs"
    ENTROPY = "entropy"
    VALUES = "values"
    REFERENCE = "reference"
    TEACHER = "teacher"


@dataclass(frozen=True)
class Scores:
    """One array over the tokens of the actions [T], per sample (``Policy.score``) or per rollout (``of_rollouts``);
    None where it was not asked for.

    ``logprobs`` and ``entropy`` (nats) are the policy's own, ``reference`` the frozen base's log-probabilities,
    ``values`` what a critic expects; ``teacher`` a teacher's log-probabilities, which no policy gives by itself, empty
    where it says nothing of a rollout.
    """

    logprobs: list[np.ndarray] | None = None
    entropy: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    teacher: list[np.ndarray] | None = None

    def of_rollouts(self, groups: Sequence[Group]) -> Scores:
        """Those of ``samples_of(groups, every=True)``, rollout by rollout."""
        counts = [rollout.sequences for group in groups for rollout in group.rollouts]

        def joined(given: list[np.ndarray] | None) -> list[np.ndarray] | None:
            if given is None:
                return None
            parts = iter(given)
            return [np.concatenate([np.zeros(0), *islice(parts, count)]) for count in counts]

        return Scores(**{field.name: joined(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class Denominators:
    """Counts over *all* rollouts of the optimizer step that have a reward, trained on or not.

    ``all_tokens``: sequence lengths count every action token, not only those of the loss mask; ``kept_tokens``: only
    those of it that were not rejected. ``action_tokens``: all action tokens, which a critic's loss is divided by.
    """

    tokens: int
    sequences: int
    all_tokens: bool = False
    action_tokens: int = 0
    kept_tokens: bool = False


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step trains on.

    ``samples`` are the rollouts with signal; ``denominators`` count all of this update's, groups without signal
    included. ``step`` counts from 0, as does ``update`` within it; ``stream`` is the prefix of the run's random
    streams. Where nothing trains, ``probe`` holds a few rollouts without advantages, on which sampler and trainer are
    compared all the same. With ``keep_logprobs`` the update leaves what it finds of the sampled tokens on the samples.
    """

    samples: Sequence[Sample]
    denominators: Denominators
    step: int
    stream: tuple[int | str, ...]
    probe: Sequence[Sample] = ()
    update: int = 0
    keep_logprobs: bool = False


PROBE_SIZE = 4  # Rollouts of a step without signal on which sampler and trainer are compared: one small forward pass


def probe_of(groups: Sequence[Group], size: int = PROBE_SIZE) -> list[Sample]:
    """The first rollout of every group, then the second, and so on, up to ``size`` of them, without advantages.

    Which ones depends on the order of the prompts alone, so a repeated or resumed step scores the same.
    """
    longest = max((len(group.rollouts) for group in groups), default=0)
    chosen = (
        group.rollouts[i]
        for i in range(longest)
        for group in groups
        if i < len(group.rollouts) and len(group.rollouts[i])
    )
    return [without_advantages(samples_of_rollout(rollout)[-1]) for rollout in islice(chosen, size)]


def samples_of(groups: Sequence[Group], every: bool = False) -> list[Sample]:
    """All rollouts that train, laid flat: those with a reward, of groups that are not discarded; or ``every`` one."""
    return [
        sample
        for group in groups
        if every or group.discarded is None
        for rollout in group.rollouts
        if every or rollout.token_advantages_T is not None
        for sample in samples_of_rollout(rollout)
    ]


class PolicySnapshot(Protocol):
    """A policy's weights as they were, which nothing that goes on afterwards changes."""

    def write(self, directory: Path) -> None:
        """All that ``Policy.load`` needs to go on exactly here, into the empty ``directory``. Only for a snapshot that
        was taken as resumable."""
        ...

    def export(self, directory: Path, checkpoint: Path) -> None:
        """What other tools load, into the empty ``directory``; ``checkpoint`` is where ``write`` has written."""
        ...

    def discard(self) -> None: ...


class Policy(Protocol):
    """What is trained in one run. ``version`` counts the changes of its weights, a critic's included."""

    version: int
    starts_as_base: bool  # Whether an untrained run is the base model itself, so that one evaluation serves all

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """What rows say of it: loss_is_placeholder, backend_reports_sync_loss, backend_preserves_token_advantages."""
        ...

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        """What the policy says of these samples, by a fresh forward pass; with ``weights`` what it said when these were
        its own, values excepted."""
        ...

    def update(self, batch: TrainBatch, objective: Objective, lr: float) -> dict[str, Any]:
        """Take one optimizer step; its numbers under the catalogue's keys. Raises NonFinite, with nothing changed, when
        a loss or gradient is not finite."""
        ...

    def snapshot(self, resumable: bool = False) -> PolicySnapshot:
        """Its weights as they are now; ``resumable`` with all else that ``load`` needs, in host memory."""
        ...

    def load(self, directory: Path) -> None:
        """Go on from what a resumable snapshot wrote."""
        ...

    def begin_with(self, directory: Path) -> None:
        """Take over the weights alone that other tools or another run left in ``directory``."""
        ...

    def read(self, directory: Path) -> PolicySnapshot:
        """Weights that a snapshot has exported into ``directory``, for an engine to sample with."""
        ...

    def begin_step(self, step: int) -> list[str]:
        """What is due before ``step``, such as a lower rank; what there is to tell of it."""
        ...

    def state(self) -> dict[str, Any]:
        """What it remembers besides its weights, as strict JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state()``."""
        ...

    def notes(self) -> list[str]:
        """What there is to tell since the last call."""
        ...
