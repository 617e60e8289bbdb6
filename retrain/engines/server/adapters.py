"""Stores adapters where servers load them: one PEFT directory per policy version, removed when it is retired.

The server engine calls it. Ranks are padded with zeros to a rank that servers accept. B is scaled and then rounded to
the base's number format, as in training, and alpha is the rank: vLLM would round B first and scale it afterwards. A
name is never reused for other weights, so a server's cache cannot be stale.

Several processes may share the directory. Each writes to a subdirectory that names its owner; a subdirectory is removed
by another process only if its owner ran on this machine and has ended. The process that creates the shared directory
marks it, and the last process to close removes a marked one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from pathlib import Path
from uuid import uuid4

import torch

from retrain.engines.server.automatic import server_rank
from retrain.errors import UsageError
from retrain.files import aside_of, prepare_directory, read_json, write_json, writing
from retrain.ownership import has_ended, this_process
from retrain.policy.adapter_io import padded, write_peft
from retrain.policy.local import LocalSnapshot
from retrain.types import PolicyRef

HALF = (torch.bfloat16, torch.float16)
OWNED, OWNER = "retrain-", "owner.json"  # Prefix of a process's directory, and the file in it that names its owner
MADE = ".made-by-retrain"  # Marks a shared directory that retrain created


class PublishedAdapter:
    """The weights of one policy version and their name on servers. ``users``: ``sample`` calls that use it now."""

    def __init__(self, snapshot: LocalSnapshot, name: str, store: AdapterStore):
        self.snapshot, self.name, self.store = snapshot, name, store
        self.users, self.retired = 0, False
        self._lock, self._path = threading.Lock(), None

    def write(self) -> Path:
        """Return the PEFT directory, written by the first call; thread-safe. Raises StorageError if that fails."""
        with self._lock:
            if self._path is None:
                self._path = self.store.write(self.name, self.snapshot)
            return self._path


class AbandonedAdapters:
    """The directory of a process that has ended. Servers may still have the adapters ``names`` loaded."""

    def __init__(self, directory: Path):
        self.directory = directory
        session = directory.name.removeprefix(OWNED)
        paths = [path for path in directory.iterdir() if path.is_dir() and not path.is_symlink()]
        self.names = [path.name for path in paths if path.name.endswith(f".{session}") and path.name[0] != "."]
        self._incomplete = [path for path in paths if path.name[0] == "." and f".{session}." in path.name]

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            for path in (*self._incomplete, *(self.directory / name for name in self.names)):
                shutil.rmtree(path)
            if {path.name for path in self.directory.iterdir()} <= {OWNER}:
                (self.directory / OWNER).unlink(missing_ok=True)
                self.directory.rmdir()


class AdapterStore:
    """This process's subdirectory of the adapter directory. Servers must see it under the same path. Files
    have the base's ``dtype`` if it is a half precision, in which training computes with the adapter, else float32."""

    def __init__(self, directory: Path, base: str, dtype: torch.dtype):
        self.shared, self.base = directory.absolute(), base
        self.dtype = dtype if dtype in HALF else torch.float32
        self._session, self._numbers = uuid4().hex[:8], itertools.count(1)
        self.directory = self.shared / f"{OWNED}{self._session}"
        self._claimed, self._claim_lock = False, threading.Lock()
        is_new = not self.shared.is_dir()
        try:
            prepare_directory(self.shared)
            if is_new:
                (self.shared / MADE).touch()
        except UsageError as error:
            raise UsageError(f"[inference] adapter_dir: {error}") from error

    def new_adapter(self, ref: PolicyRef, snapshot: LocalSnapshot) -> PublishedAdapter:
        """Return the weights under a new, unique name. Nothing is written yet."""
        run = ref.run_id.replace("/", "_")
        return PublishedAdapter(snapshot, f"{run}@{ref.version}.{next(self._numbers)}.{self._session}", self)

    def abandoned(self) -> list[AbandonedAdapters]:
        """Return the directories that were left by processes of this machine that have ended."""
        abandoned = []
        for directory in sorted(self.shared.glob(f"{OWNED}*")):
            if directory.is_symlink():
                continue
            with contextlib.suppress(OSError, ValueError):
                owner = read_json(directory / OWNER)
                if has_ended(owner):
                    abandoned.append(AbandonedAdapters(directory))
        return abandoned

    def write(self, name: str, snapshot: LocalSnapshot) -> Path:
        """Write a PEFT directory atomically and return it. Raises StorageError."""
        with self._claim_lock:
            if not self._claimed:
                # Before any adapter: a directory without an owner is never removed by others.
                write_json(self.directory / OWNER, this_process())
                self._claimed = True
        final = self.directory / name
        # Renamed when complete: a server must not see half an adapter.
        aside = aside_of(final)
        with writing(final):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        weights, dtype = snapshot.weights, self.dtype
        tensors = {
            key: (a.to("cpu", dtype), (b * weights.scale).to("cpu", dtype)) for key, (a, b) in weights.tensors().items()
        }
        rank = server_rank(weights.live_rank)
        plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
        own = {"r": rank, "lora_alpha": rank, "target_modules": list(tensors)}
        config = {**plain, "base_model_name_or_path": self.base, **snapshot.peft_config(), **own}
        write_peft(aside, {key: padded(pair, rank) for key, pair in tensors.items()}, config)
        with writing(final):
            os.replace(aside, final)  # need not be on disk, because adapters of an ended process are never loaded
        return final

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self.directory / name)

    def close(self) -> None:
        """Remove this process's files, and the shared directory if retrain created it and it is empty."""
        with contextlib.suppress(OSError):
            if self._claimed:
                AbandonedAdapters(self.directory).remove()
            if [path.name for path in self.shared.iterdir()] == [MADE]:
                (self.shared / MADE).unlink(missing_ok=True)
                self.shared.rmdir()
