"""A run whose policy is a backend of the user's: the same state and records, its weights in the backend's own files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.backends import TrainBatch, train_with
from retrain.checkpoints import OWN, checkpoint_directory, newest_whole, verify_checkpoint, write_own_checkpoint
from retrain.errors import CheckpointError, UsageError
from retrain.files import aside_of, dumps, read_json
from retrain.ownership import publish
from retrain.policy.budget import Budget
from retrain.run import Run


@dataclass(frozen=True)
class OwnSnapshot:
    """A run's state as it was at ``step``: the backend's files in a directory aside, all else as JSON."""

    step: int
    files: Path
    state: str


class OwnRun(Run):
    """A run that trains ``backend``; ``plugin`` is its ``module:Class``."""

    backend: Any
    plugin: str
    starts_as_base = False

    def attach(self, backend: Any, plugin: str) -> OwnRun:
        """Give the run its policy; before anything else is asked of it."""
        self.backend, self.plugin, self.updates = backend, plugin, 0
        self.adapter: Any = backend
        return self

    def _make_policy(self) -> None:
        self.adapter, self.optimizer = None, None
        self.budget = Budget(1)  # micro-batches are the backend's business

    @property
    def capabilities(self) -> dict[str, bool]:
        """What rows say of the backend."""
        return {
            "loss_is_placeholder": not self.backend.reports_sync_loss,
            "backend_reports_sync_loss": self.backend.reports_sync_loss,
            "backend_preserves_token_advantages": self.backend.preserves_token_advantages,
        }

    @property
    def weights_version(self) -> int:
        """Counts the updates that have begun: after one that failed nobody knows what the weights are."""
        return self.updates

    def update(self, credit: Any, workers: Any) -> dict[str, Any]:
        """One optimizer step of the backend."""
        batch = TrainBatch(
            credit.sequences, credit.denominators, self.lr(), self.step, (*self.stream, "update", self.step)
        )
        self.updates += 1
        return train_with(self.backend, self.plugin, batch)

    def snapshot(self) -> Any:
        """The backend's files as it saves them now, and the run's state."""
        files = aside_of(self.directory / "checkpoints" / f"own_{self.step:06d}")
        self._save_files(files)
        return OwnSnapshot(self.step, files, dumps(self.state(), indent=2) + "\n")

    def write(self, saved: Any) -> None:
        """Publish the checkpoint, unless it is the very one that the run was restored from."""
        super().write(saved)
        shutil.rmtree(saved.files, ignore_errors=True)

    def _write_files(self, directory: Path, saved: Any) -> None:
        write_own_checkpoint(directory, saved.files, saved.state)

    def _publish_adapter(self, directory: Path, saved: Any) -> None:
        """``final/``: the backend's own files."""
        aside = aside_of(directory)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(checkpoint_directory(self.directory, saved.step) / OWN, aside)
        publish(aside, directory, self._owner("final"))

    def continue_from(self, directory: Path) -> list[str]:
        """Begin where another run of the same backend is. Raises UsageError for anything but a run or checkpoint."""
        told: list[str] = []
        if not (directory / "state.json").is_file() and newest_whole(directory, told) is None:
            raise UsageError(f"{directory} holds no checkpoint of backend {self.plugin}")
        return super().continue_from(directory)

    def _load_weights(self, checkpoint: Path) -> dict[str, Any]:
        verify_checkpoint(checkpoint)
        if not (checkpoint / OWN).is_dir():
            raise CheckpointError(f"{checkpoint} is of another backend than {self.plugin}")
        self.backend.load(checkpoint / OWN)
        return read_json(checkpoint / "state.json")

    def trained(self) -> bool:
        """Whether any update has begun."""
        return self.step > 0

    def _save_files(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.backend.save(directory)
        if not any(path.is_file() for path in directory.rglob("*")):
            raise CheckpointError(f"backend {self.plugin} saved no file: save(directory) writes what load needs")
