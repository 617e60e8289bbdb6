"""A policy of the user's own: a class named ``module:Class`` in ``[backend] backend``, one object per run.

The built-in policy trains LoRA adapters of a model in this process, and all its runs share one decode batch. One of
the user's brings the weights itself: it samples, takes optimizer steps, saves and loads; retrain does the rest
(problems, rewards, advantages, token credit, records, checkpoints, comparison). See ``docs/backends.md``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from retrain.config import Config
from retrain.engines.protocol import SampleRequest
from retrain.errors import CheckpointError, PluginError, RunFailed, UsageError
from retrain.files import aside_of
from retrain.maths.ratios import RATIO_METRICS
from retrain.plugins import check_backend_class, load_function
from retrain.policy import protocol
from retrain.policy.objective import Objective
from retrain.policy.protocol import Scores, Want
from retrain.records.catalogue import BY_KEY, SECTIONS
from retrain.types import Action, Denominators, Sample, Support

_OWN = {metric.key for section in ("Loss and optimizer", "Policy") for metric in SECTIONS[section]}
OWN_KEYS = frozenset(_OWN | {key for key in BY_KEY if key.startswith("timing_")})
"""Keys of the catalogue that a backend may report; the others are measured here."""
FILES = "backend"  # Directory inside a checkpoint with the files of a backend


@dataclass(frozen=True)
class TrainSequence:
    """One completion to train on: token ids, and per completion token (arrays [T]) what the sampler and credit say.

    ``support``: the tokens that each was sampled from, where the backend said so when it sampled.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampler_logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray
    support: Support | None = None

    @classmethod
    def of(cls, sample: Sample) -> TrainSequence:
        """Prompt and completion of a sample; what was read between several actions counts as completion, was sampled
        among nothing and does not train."""
        width, support = sample.prefix, sample.support
        if support is not None:
            counts_T = np.zeros(len(sample) - width, dtype=np.int64)
            counts_T[sample.action_mask[width:]] = np.diff(support.offsets)
            support = Support(support.ids, np.concatenate([[0], np.cumsum(counts_T)]))
        tail = slice(width, None)
        return cls(
            tuple(sample.token_ids[:width].tolist()),
            sample.token_ids[tail].tolist(),
            sample.logprobs[tail],
            sample.advantages[tail],
            sample.loss_mask[tail],
            support,
        )


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step trains on.

    ``sequences`` are the completions with signal: prompt and completion ids, the sampler's log-probabilities, and an
    advantage and a mask for every completion token. ``denominators`` count the whole step, groups without signal
    included. ``lr`` is the scheduled rate, ``step`` counts from 0, ``stream`` names the run's random stream.
    """

    sequences: Sequence[TrainSequence]
    denominators: Denominators
    lr: float
    step: int
    stream: tuple[int | str, ...]


class Backend(Protocol):
    """One run's policy. It is made with the run's resolved configuration: ``Class(config)``.

    ``reports_sync_loss``: the loss that ``train_step`` returns belongs to that very step; where it is false, rows mark
    theirs as a placeholder. ``preserves_token_advantages``: every token trains with its own advantage; where it is
    false, token credit other than ``none`` is refused. Both are looked up on the class, before anything is loaded.

    May also have ``tokenizer`` (as in transformers: callable, ``decode``, perhaps a chat template; by default prompts
    become their UTF-8 bytes) and ``gives_entropy`` (completions carry full-vocabulary entropies; by default not).
    """

    reports_sync_loss: bool
    preserves_token_advantages: bool

    def sample(self, requests: Sequence[SampleRequest]) -> Sequence[Sequence[Action]]:
        """``request.samples`` completions of every request, in order, with the log-probabilities of their tokens."""
        ...

    def train_step(self, batch: TrainBatch) -> Mapping[str, Any]:
        """Take one optimizer step. Returns numbers to log: ``loss``, and whatever else there is to tell."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs to go on exactly here into the empty ``directory``."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote."""
        ...


def load_backend(config: Config, base_dir: Path | None) -> Any:
    """A new backend for one run's configuration. Raises PluginError when it cannot be loaded or made."""
    plugin = config.backend.backend
    backend = load_function(plugin, base_dir, "[backend] backend =")
    check_backend_class(backend, plugin)
    return backend(config)


@dataclass(frozen=True)
class PluginSnapshot:
    """A backend; for a resumable snapshot also the directory of the files that it has saved."""

    backend: Any
    files: Path | None = None

    def write(self, directory: Path) -> None:
        assert self.files is not None, "only a resumable snapshot is a checkpoint"
        self.files.rename(directory / FILES)

    def export(self, directory: Path, checkpoint: Path) -> None:
        shutil.copytree(checkpoint / FILES, directory, dirs_exist_ok=True)

    def discard(self) -> None:
        if self.files is not None:
            shutil.rmtree(self.files, ignore_errors=True)


class PluginPolicy:
    """The policy of ``backend``, an object of the class that ``plugin`` names; it saves snapshots under ``aside``."""

    starts_as_base = False

    def __init__(self, backend: Any, plugin: str, aside: Path):
        self.backend, self.plugin, self.aside, self.version = backend, plugin, aside, 0

    @property
    def capabilities(self) -> Mapping[str, bool]:
        return {
            "loss_is_placeholder": not self.backend.reports_sync_loss,
            "backend_reports_sync_loss": self.backend.reports_sync_loss,
            "backend_preserves_token_advantages": self.backend.preserves_token_advantages,
        }

    def score(
        self, samples: Sequence[Sample], want: frozenset[Want], weights: protocol.PolicySnapshot | None = None
    ) -> Scores:
        """Return no scores. Raises PluginError when some are requested."""
        if want:
            raise PluginError(f"backend {self.plugin} does not score samples: {', '.join(sorted(want))} cannot be had")
        return Scores()

    def read(self, directory: Path) -> protocol.PolicySnapshot:
        """Raises PluginError: a backend samples with the weights that it holds."""
        raise PluginError(f"backend {self.plugin} holds one version of its weights at a time")

    def update(self, batch: protocol.TrainBatch, objective: Objective, lr: float) -> protocol.UpdateResult:
        """Take one optimizer step of the backend. The version counts steps that have begun, because the weights are
        unknown after a step that failed."""
        sequences = [TrainSequence.of(sample) for sample in batch.samples]
        self.version += bool(sequences)
        stream = (*batch.stream, "update", batch.step)
        plugin_batch = TrainBatch(sequences, batch.denominators, lr, batch.step, stream)
        return protocol.UpdateResult(train_with(self.backend, self.plugin, plugin_batch))

    def snapshot(self, resumable: bool = False) -> PluginSnapshot:
        """Raises CheckpointError when the backend saves nothing."""
        if not resumable:
            return PluginSnapshot(self.backend)
        files = aside_of(self.aside / f"{FILES}_{self.version:06d}")
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        self.backend.save(files)
        if not any(path.is_file() for path in files.rglob("*")):
            raise CheckpointError(f"backend {self.plugin} saved no file: save(directory) writes what load needs")
        return PluginSnapshot(self.backend, files)

    def load(self, directory: Path) -> None:
        """Raises CheckpointError when the checkpoint is another policy's."""
        if not (directory / FILES).is_dir():
            raise CheckpointError(f"{directory} is of another backend than {self.plugin}")
        self.backend.load(directory / FILES)

    def begin_with(self, directory: Path) -> None:
        """Raises UsageError: a backend loads checkpoints only."""
        raise UsageError(f"{directory} holds no checkpoint of backend {self.plugin}")

    def begin_step(self, step: int) -> list[str]:
        return []

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]

    def notes(self) -> list[str]:
        return []


def train_with(backend: Any, plugin: str, batch: TrainBatch) -> dict[str, Any]:
    """Take one step of a plug-in backend and return its checked metrics under the catalogue's keys.

    Its loss becomes ``loss`` and ``reported_loss``, also where it is not the step's own (rows then mark it as a
    placeholder). Raises PluginError for anything but numbers by name and for keys that are measured here, RunFailed for
    a loss that is not finite.
    """
    known = {"optim/lr": batch.lr, "num_datums": len(batch.sequences), **dict.fromkeys(RATIO_METRICS)}
    if not batch.sequences:  # no group had signal: nothing to train on
        return known | {"loss": None, "reported_loss": None}
    returned = backend.train_step(batch)
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise PluginError(f"backend {plugin}: train_step returned {kind}, not a dictionary of metrics")
    metrics = {}
    for key, value in returned.items():
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        if not isinstance(key, str) or not (plain is None or isinstance(plain, bool | int | float | str)):
            raise PluginError(f"backend {plugin}: train_step returned {key!r}: {type(value).__name__}, not a number")
        if key in BY_KEY and key not in OWN_KEYS:
            raise PluginError(f"backend {plugin}: train_step returned {key!r}, which is measured here: rename it")
        metrics[key] = plain
    loss = metrics.pop("loss", None)
    if isinstance(loss, float) and not math.isfinite(loss):
        raise RunFailed(f"backend {plugin}: the loss of step {batch.step} is {loss}")
    return known | {"reported_loss": loss} | metrics | {"loss": loss}
