"""Adapters where servers find them: one PEFT directory for each version of a run's weights, gone when nobody needs it.

Ranks are padded with zeros to one that servers take; alpha grows with them, so that alpha/rank and with it ΔW stay the
same. A name belongs to one version of one process's runs and never to other weights: what a server caches under it, and
what is in flight, cannot become stale.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from retrain.engines.protocol import PolicyRef
from retrain.errors import RunFailed, UsageError
from retrain.files import aside_of, prepare_directory, publish_directory, writing
from retrain.policy.adapter_io import write_peft
from retrain.policy.adapter_stream import padded
from retrain.policy.local import LocalSnapshot

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM takes; SGLang takes any."""
MARK = "@"


def server_rank(rank: int) -> int:
    """The smallest rank that servers take and that holds ``rank``. Raises RunFailed above the largest."""
    for each in RANKS:
        if each >= rank:
            return each
    raise RunFailed(f"servers take adapters of rank {RANKS[-1]} at most, and this one has rank {rank}")


class Published:
    """The weights of one version and the name that servers know them by. They are written when ``written`` is first
    called, by whichever thread does."""

    def __init__(self, ref: PolicyRef, snapshot: LocalSnapshot, name: str, store: AdapterStore):
        self.ref, self.snapshot, self.name, self.store = ref, snapshot, name, store
        self.users, self.retired = 0, False
        self._lock, self._path = threading.Lock(), None

    def written(self) -> Path:
        """Where they lie, as a PEFT directory. Raises StorageError when they cannot be written."""
        with self._lock:
            if self._path is None:
                self._path = self.store.write(self.name, self.snapshot)
            return self._path


class AdapterStore:
    """The directory of adapters, on a file system that servers see under the same path."""

    def __init__(self, directory: Path, base: str):
        self.directory, self.base = directory.absolute(), base
        self._session = uuid4().hex[:6]
        try:
            prepare_directory(self.directory)
        except UsageError as error:
            raise UsageError(f"[inference] adapter_dir: {error}") from error

    def published(self, ref: PolicyRef, snapshot: LocalSnapshot) -> Published:
        """These weights under a name of their own."""
        return Published(ref, snapshot, f"{ref.run_id}{MARK}{ref.version}.{self._session}", self)

    def left_over(self) -> Iterator[str]:
        """Names of adapters that a process wrote which has ended without taking them away."""
        for path in self.directory.iterdir():
            if MARK in path.name and not path.name.startswith(".") and not path.name.endswith(self._session):
                yield path.name

    def write(self, name: str, snapshot: LocalSnapshot) -> Path:
        """Write a PEFT directory, whole or not at all. Raises StorageError."""
        final = self.directory / _file_name(name)
        aside = aside_of(final)
        with writing(final):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        tensors = {key: (a.cpu(), b.cpu()) for key, (a, b) in snapshot.weights.tensors().items()}
        rank = server_rank(snapshot.weights.live_rank)
        config = self._config(snapshot, rank, list(tensors))
        write_peft(aside, {key: padded(pair, rank) for key, pair in tensors.items()}, config)
        publish_directory(aside, final)
        return final

    def remove(self, name: str) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.directory / _file_name(name))

    def close(self) -> None:
        """Remove the directory where nothing else is in it."""
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _config(self, snapshot: LocalSnapshot, rank: int, names: list[str]) -> dict[str, Any]:
        plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
        return plain | {
            "base_model_name_or_path": self.base,
            **snapshot.peft,
            "r": rank,
            "lora_alpha": snapshot.weights.scale * rank,
            "target_modules": names,
        }


def _file_name(name: str) -> str:
    return name.replace("/", "_")
