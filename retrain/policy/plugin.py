"""Policies of backend plug-ins: a class named ``module:Class`` in ``[backend] backend``, one object per run.

The backend holds the weights: it samples, takes optimizer steps, saves and loads. Retrain does the rest (problems,
rewards, advantages, token credit, records, checkpoints, comparison). See ``docs/extending.md``.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from retrain.config import Config
from retrain.errors import CheckpointError, PluginError, RunFailed, UsageError
from retrain.files import aside_of
from retrain.maths.ratios import RATIO_METRICS
from retrain.plugins import check_backend_class, load_function
from retrain.policy.objective import Objective
from retrain.policy.protocol import Policy, PolicySnapshot, PolicyState
from retrain.records.catalogue import BY_KEY, SECTIONS
from retrain.types import Action, Denominators, Sample, SampleRequest, Scores, StepBatch, Support, UpdateResult, Want

_OWN = {metric.key for section in ("Loss and optimizer", "Policy") for metric in SECTIONS[section]}
# Metric keys of the catalogue that a backend may report; retrain measures the others
OWN_KEYS = frozenset(_OWN | {key for key in BY_KEY if key.startswith("timing_")})
FILES = "backend"  # Directory inside a checkpoint with the files of a backend


@dataclass(frozen=True)
class TrainSequence:
    """One completion to train on: token ids, and arrays [T] over the completion's tokens.

    ``support``: the tokens from which each token was sampled; None if the backend did not report them.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    sampler_logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray
    support: Support | None = None

    @classmethod
    def of(cls, sample: Sample) -> TrainSequence:
        """Split a sample into prompt and completion. Observations between actions belong to the completion; they have
        an empty support and do not train."""
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
    """The completions of one optimizer step, from groups with signal.

    ``denominators`` count the whole step, groups without signal included. ``lr`` is the scheduled rate, ``step`` counts
    from 0, ``stream`` names the run's random stream.
    """

    sequences: Sequence[TrainSequence]
    denominators: Denominators
    lr: float
    step: int
    stream: tuple[int | str, ...]


class Backend(Protocol):
    """One run's policy, made by ``Class(config)`` with the run's resolved configuration.

    ``reports_sync_loss``: ``train_step`` returns the loss of the step that it took; else metrics mark it as a
    placeholder. ``preserves_token_advantages``: every token trains with its own advantage; else token credit other than
    ``none`` is refused. Both are read from the class, before anything is loaded.

    Optional: ``tokenizer`` (as in transformers: callable, ``decode``, perhaps a chat template; by default prompts are
    their UTF-8 bytes) and ``gives_entropy`` (completions carry full-vocabulary entropies).
    """

    reports_sync_loss: bool
    preserves_token_advantages: bool

    def sample(self, requests: Sequence[SampleRequest]) -> Sequence[Sequence[Action]]:
        """Return ``request.samples`` completions of every request, with the log-probabilities of their tokens."""
        ...

    def train_step(self, batch: TrainBatch) -> Mapping[str, object]:
        """Take one optimizer step and return metrics to log, with the loss as ``loss``."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything that ``load`` needs to resume exactly into the empty ``directory``."""
        ...

    def load(self, directory: Path) -> None: ...


def load_backend(config: Config, base_dir: Path | None) -> Backend:
    """Return a new backend. Raises PluginError if the class cannot be loaded or is no backend."""
    plugin = config.backend.backend
    backend = load_function(plugin, base_dir, "[backend] backend =")
    check_backend_class(backend, plugin)
    return backend(config)


@dataclass(frozen=True)
class PluginSnapshot(PolicySnapshot):
    """A reference to a backend, whose weights are not copied. A resumable snapshot also has ``files``, the directory
    that the backend saved."""

    backend: Backend
    files: Path | None = None

    def write(self, directory: Path) -> None:
        assert self.files is not None, "only a resumable snapshot is a checkpoint"
        self.files.rename(directory / FILES)

    def export(self, directory: Path, checkpoint: Path) -> None:
        shutil.copytree(checkpoint / FILES, directory, dirs_exist_ok=True)

    def discard(self) -> None:
        if self.files is not None:
            shutil.rmtree(self.files, ignore_errors=True)


class PluginPolicy(Policy):
    """The policy of ``backend``, an object of the class ``plugin``. Snapshots are saved under ``aside``."""

    starts_as_base = False

    def __init__(self, backend: Backend, plugin: str, aside: Path):
        self.backend, self.plugin, self.aside, self.version = backend, plugin, aside, 0

    @property
    def capabilities(self) -> Mapping[str, bool]:
        return {
            "loss_is_placeholder": not self.backend.reports_sync_loss,
            "backend_reports_sync_loss": self.backend.reports_sync_loss,
            "backend_preserves_token_advantages": self.backend.preserves_token_advantages,
        }

    def score(self, samples: Sequence[Sample], want: frozenset[Want], weights: PolicySnapshot | None = None) -> Scores:
        if want:
            raise PluginError(f"backend {self.plugin} does not score samples: {', '.join(sorted(want))} cannot be had")
        return Scores()

    def read(self, directory: Path) -> PolicySnapshot:
        raise PluginError(f"backend {self.plugin} holds one version of its weights at a time")

    def update(self, batch: StepBatch, objective: Objective, lr: float) -> UpdateResult:
        sequences = [TrainSequence.of(sample) for sample in batch.samples]
        self.version += bool(sequences)  # before the step, because the weights are unknown if it fails
        stream = (*batch.stream, "update", batch.step)
        plugin_batch = TrainBatch(sequences, batch.denominators, lr, batch.step, stream)
        return UpdateResult(train_with(self.backend, self.plugin, plugin_batch))

    def snapshot(self, resumable: bool = False) -> PluginSnapshot:
        """Return a snapshot, with saved files if ``resumable``. Raises CheckpointError if none were saved."""
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
        """Load a checkpoint. Raises CheckpointError if it has no files of a backend."""
        if not (directory / FILES).is_dir():
            raise CheckpointError(f"{directory} is of another backend than {self.plugin}")
        self.backend.load(directory / FILES)

    def begin_with(self, directory: Path) -> None:
        raise UsageError(f"{directory} holds no checkpoint of backend {self.plugin}")

    def state(self) -> PolicyState:
        return {"version": self.version}

    def restore(self, state: PolicyState) -> None:
        self.version = state["version"]


def train_with(backend: Backend, plugin: str, batch: TrainBatch) -> dict[str, object]:
    """Take one step of a plug-in backend. Return its checked metrics, with its loss as ``loss`` and ``reported_loss``.

    Raises PluginError if it returns no dictionary of numbers or a key that retrain measures itself, RunFailed if its
    loss is not finite.
    """
    metrics_here: dict[str, object] = {"optim/lr": batch.lr, "num_datums": len(batch.sequences)}
    metrics_here |= dict.fromkeys(RATIO_METRICS)
    if not batch.sequences:  # no group had signal: nothing to train on
        return metrics_here | {"loss": None, "reported_loss": None}
    returned = backend.train_step(batch)
    if not isinstance(returned, Mapping):
        kind = type(returned).__name__
        raise PluginError(f"backend {plugin}: train_step returned {kind}, not a dictionary of metrics")
    metrics: dict[str, object] = {}
    for key, value in returned.items():
        item = getattr(value, "item", None)
        plain = item() if item is not None and getattr(value, "ndim", 0) == 0 else value
        if not isinstance(key, str) or not (plain is None or isinstance(plain, bool | int | float | str)):
            raise PluginError(f"backend {plugin}: train_step returned {key!r}: {type(value).__name__}, not a number")
        if key in BY_KEY and key not in OWN_KEYS:
            raise PluginError(f"backend {plugin}: train_step returned {key!r}, which is measured here: rename it")
        metrics[key] = plain
    loss = metrics.pop("loss", None)
    if isinstance(loss, float) and not math.isfinite(loss):
        raise RunFailed(f"backend {plugin}: the loss of step {batch.step} is {loss}")
    return metrics_here | {"reported_loss": loss} | metrics | {"loss": loss}
