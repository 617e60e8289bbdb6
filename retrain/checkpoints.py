"""Checkpoints of one run: a directory written aside, hashed, fsynced and renamed; the newest whole one is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from retrain.errors import CheckpointError, ModelError
from retrain.files import publish_directory, read_json, sha256, write_json
from retrain.policy.adapter_io import read_adapter, save_adapter
from retrain.policy.lora import Adapter

MANIFEST, STATE, OPTIMIZER = "manifest.json", "state.json", "optimizer.safetensors"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments and step count; empty before the first update."""
    state = optimizer.state_dict()["state"].get(0, {})
    return {key: torch.as_tensor(value).detach().cpu().clone() for key, value in state.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put the moments back (nothing to do for a checkpoint from before the first update)."""
    state = optimizer.state_dict()
    state["state"] = {0: dict(tensors)} if tensors else {}
    optimizer.load_state_dict(state)


def save_checkpoint(
    directory: Path, adapter: Adapter, base_name: str, revision: str | None, optimizer: torch.optim.Optimizer,
    state: dict[str, Any], dropout: float = 0.0,
) -> None:  # fmt: skip
    """Write adapter, optimizer and ``state`` (JSON) as one directory that is there whole or not at all."""
    from safetensors.torch import save_file

    aside = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    save_adapter(aside, adapter, base_name, revision, dropout)
    save_file(optimizer_tensors(optimizer), aside / OPTIMIZER)
    write_json(aside / STATE, state)
    hashes = {path.name: sha256(path) for path in sorted(aside.iterdir())}
    write_json(aside / MANIFEST, {"format": 1, "sha256": hashes})
    publish_directory(aside, directory)


def verify_checkpoint(directory: Path) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its hash."""
    try:
        hashes = read_json(directory / MANIFEST)["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory} has no readable {MANIFEST}") from error
    for name, digest in hashes.items():
        if not (directory / name).is_file() or sha256(directory / name) != digest:
            raise CheckpointError(f"{directory / name} is damaged: its SHA-256 is not the one in {MANIFEST}")


def load_checkpoint(directory: Path, adapter: Adapter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Verify, then restore adapter and optimizer in place; returns the JSON state."""
    from safetensors.torch import load_file

    verify_checkpoint(directory)
    try:
        adapter.load(read_adapter(directory).tensors)
    except ModelError as error:
        raise CheckpointError(f"{directory} does not fit this run: {error}") from error
    load_optimizer(optimizer, load_file(directory / OPTIMIZER))
    return read_json(directory / STATE)


def checkpoint_directories(run_directory: Path) -> list[Path]:
    """Checkpoints of a run by step, oldest first (whole or not)."""
    return sorted((run_directory / "checkpoints").glob("step_*"))


def newest_whole(run_directory: Path, report: list[str]) -> Path | None:
    """The newest checkpoint that verifies; what is wrong with newer ones is appended to ``report``."""
    for directory in reversed(checkpoint_directories(run_directory)):
        try:
            verify_checkpoint(directory)
        except CheckpointError as error:
            report.append(f"skipped a damaged checkpoint: {error}")
            continue
        return directory
    return None


def prune(run_directory: Path, keep_last: int) -> None:
    """Delete all but the last ``keep_last`` checkpoints; 0 keeps all."""
    for directory in checkpoint_directories(run_directory)[:-keep_last] if keep_last else []:
        shutil.rmtree(directory)
