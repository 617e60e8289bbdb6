"""Adapters where servers find them: one PEFT directory for each version of a run's weights, gone when nobody needs it.

Ranks are padded with zeros to one that servers take; alpha grows with them, so that alpha/rank and with it ΔW stay the
same. A name is given once and never to other weights: what a server caches under it, and what is in flight, cannot
become stale.

Several processes may share the directory: each has one of its own in it, with a file that says who it is. What one left
behind is swept only where its process ran on this machine and is no more; everything else there is somebody's. Whoever
makes the directory marks it, and the last one to leave removes it then.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

from retrain.errors import RunFailed, UsageError
from retrain.files import aside_of, prepare_directory, publish_directory, read_json, write_json, writing
from retrain.ownership import has_ended, this_process
from retrain.policy.adapter_io import padded, write_peft
from retrain.policy.local import LocalSnapshot
from retrain.types import PolicyRef

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # Ranks that vLLM takes; SGLang takes any
OWNED, OWNER = "retrain-", "owner.json"  # Prefix of a process's directory, and the file in it that names its owner
MADE = ".made-by-retrain"  # Marks a shared directory that retrain created


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


class LeftOver:
    """What a process that has ended left in its directory: ``names`` of adapters that servers may still have."""

    def __init__(self, directory: Path):
        self.directory = directory
        session = directory.name.removeprefix(OWNED)
        there = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
        self.names = [path.name for path in there if path.name.endswith(f".{session}") and path.name[0] != "."]
        self._half = [path for path in there if path.name[0] == "." and f".{session}." in path.name]

    def remove(self) -> None:
        """Remove them from the disk, the owner's file last."""
        with contextlib.suppress(OSError):
            for path in (*self._half, *(self.directory / name for name in self.names)):
                shutil.rmtree(path)
            _remove_empty(self.directory)


class AdapterStore:
    """This process's part of the directory of adapters, on a file system that servers see under the same path."""

    def __init__(self, directory: Path, base: str):
        self.shared, self.base = directory.absolute(), base
        self._session, self._numbers = uuid4().hex[:8], itertools.count(1)
        self.directory = self.shared / f"{OWNED}{self._session}"
        self._claimed, self._claiming = False, threading.Lock()
        made = not self.shared.is_dir()
        try:
            prepare_directory(self.shared)
            if made:
                (self.shared / MADE).touch()
        except UsageError as error:
            raise UsageError(f"[inference] adapter_dir: {error}") from error

    def published(self, ref: PolicyRef, snapshot: LocalSnapshot) -> Published:
        """These weights under a name that nothing else has had or will have."""
        run = ref.run_id.replace("/", "_")
        return Published(ref, snapshot, f"{run}@{ref.version}.{next(self._numbers)}.{self._session}", self)

    def left_over(self) -> list[LeftOver]:
        """What processes of this machine left that have ended without taking it away."""
        found = []
        for directory in sorted(self.shared.glob(f"{OWNED}*")):
            if directory.is_symlink():
                continue
            with contextlib.suppress(OSError, ValueError):
                owner = read_json(directory / OWNER)
                if has_ended(owner):
                    found.append(LeftOver(directory))
        return found

    def write(self, name: str, snapshot: LocalSnapshot) -> Path:
        """Write a PEFT directory, whole or not at all. Raises StorageError."""
        self._claim()
        final = self.directory / name
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

    def _claim(self) -> None:
        """Say whose this is, before anything else is in it."""
        with self._claiming:
            if not self._claimed:
                write_json(self.directory / OWNER, this_process())
                self._claimed = True

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self.directory / name)

    def close(self) -> None:
        """Remove what this process made, and the shared directory, where that was made and nothing else is in it."""
        with contextlib.suppress(OSError):
            if self._claimed:
                LeftOver(self.directory).remove()
            if [path.name for path in self.shared.iterdir()] == [MADE]:
                (self.shared / MADE).unlink(missing_ok=True)
                self.shared.rmdir()

    def _config(self, snapshot: LocalSnapshot, rank: int, names: list[str]) -> dict[str, Any]:
        plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
        return plain | {
            "base_model_name_or_path": self.base,
            **snapshot.peft,
            "r": rank,
            "lora_alpha": snapshot.weights.scale * rank,
            "target_modules": names,
        }


def _remove_empty(directory: Path) -> None:
    """Remove a process's directory in which nothing but its owner's file is left."""
    if {path.name for path in directory.iterdir()} <= {OWNER}:
        (directory / OWNER).unlink(missing_ok=True)
        directory.rmdir()
