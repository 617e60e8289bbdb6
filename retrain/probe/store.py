"""Gradients as rows of one table, in memory or, where they would not fit, in a file; and their inner products.

All that is asked of gradients is made of inner products, layer by layer in float64: what is held of the table at a time
is one layer, or a part of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch

from retrain.errors import StorageError
from retrain.policy.lora import Adapter
from retrain.policy.memory import available_memory

SHARE = 0.25
"""Of the free memory, for rows in memory."""
COLUMNS = 1 << 17
"""Entries of a row that are looked at at once."""
CHUNK = 1 << 20
"""Bytes of a file that are written at once."""


class Rows:
    """``count`` gradients of ``width`` entries, float32; in a file that is gone at the end if they are too large.
    Raises StorageError when there is no room for that file."""

    def __init__(self, count: int, width: int, memory: int | None = None):
        memory = int(SHARE * available_memory()) if memory is None else memory
        self._file = _reserved(4 * count * width) if 4 * count * width > memory else None
        self.table: np.ndarray
        if self._file is None:
            self.table = np.zeros((count, width), dtype=np.float32)
        else:
            self.table = np.memmap(self._file, dtype=np.float32, mode="r+", shape=(count, width))

    @property
    def on_disk(self) -> bool:
        """Whether the rows are in a file."""
        return self._file is not None

    def put(self, row: int, gradient: torch.Tensor) -> None:
        """Write one of them."""
        self.table[row] = gradient.detach().float().cpu().numpy()

    def close(self) -> None:
        """Let go of them."""
        self.table = np.zeros((0, 0), dtype=np.float32)
        if self._file is not None:
            self._file.close()


def _reserved(size: int) -> IO[bytes]:
    """A file without a name whose ``size`` bytes are on the disk already: one that is mapped and finds the disk full
    later would end the process. Raises StorageError."""
    folder = tempfile.gettempdir()
    try:
        file = tempfile.TemporaryFile(prefix="retrain-probe-")  # noqa: SIM115
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                for start in range(0, size, CHUNK):
                    file.write(bytes(min(CHUNK, size - start)))
                file.flush()
        except OSError:
            file.close()
            raise
    except OSError as error:
        wanted = f"{folder} ({size / 2**30:.1f} GiB of gradients; TMPDIR names another directory)"
        raise StorageError(wanted, error) from error
    return file


def layers_of(adapter: Adapter) -> list[tuple[str, slice]]:
    """Where A and B of every layer lie in a row."""
    places, start = [], 0
    for shape in adapter.shapes:
        width = adapter.rank * (shape.in_features + shape.out_features)
        places.append((shape.name, slice(start, start + width)))
        start += width
    return places


@dataclass(frozen=True)
class Scaling:
    """What turns a condition's gradients into AdamW's steps: rate, clipping, and its ε."""

    lr: float
    clip_norm: float
    eps: float


@dataclass(frozen=True)
class Products:
    """Inner products of C conditions' gradients on B batches, and of P independent gradients of what is wanted.

    ``gram`` [C, B, C, B]; ``wanted`` [P, P]; ``aligned`` [C, B, P]. ``steps`` and ``steps_at`` are those of AdamW's
    steps: [C, B, B] with each other and [C, B, P] with what is wanted; scaled by each condition's own second moments,
    or by those of the checkpoint (None where there is none). ``layers``: of each layer [C, 2], Σ_i⟨g_ci, g_0i⟩ with the
    baseline's gradients and Σ_i|g_ci|².
    """

    gram: np.ndarray
    wanted: np.ndarray
    aligned: np.ndarray
    steps: tuple[np.ndarray, np.ndarray]
    steps_at: tuple[np.ndarray, np.ndarray] | None
    layers: dict[str, np.ndarray]


def products(
    rows: Rows,
    layers: Sequence[tuple[str, slice]],
    batches: int,
    scalings: Sequence[Scaling],
    moments: torch.Tensor | None = None,
) -> Products:
    """``rows`` are the C·B gradients, all batches of a condition one after the other, then the P of what is wanted;
    ``moments`` [D] are AdamW's second moments at a checkpoint."""
    conditions = len(scalings)
    own = conditions * batches
    parts = len(rows.table) - own
    total = np.zeros((own + parts, own + parts))
    by_layer: dict[str, np.ndarray] = {}
    for name, block in _blocks(rows, layers):
        gram = block @ block.T
        total += gram
        mine = gram[:own, :own].reshape(conditions, batches, conditions, batches)
        found = np.stack([np.einsum("cibi->cb", mine)[:, 0], np.einsum("cici->c", mine)], axis=1)
        by_layer[name] = by_layer.get(name, 0.0) + found
    gram = total[:own, :own].reshape(conditions, batches, conditions, batches)
    norms = np.sqrt(np.einsum("cici->ci", gram))
    clips = np.stack(
        [
            np.where(norm > each.clip_norm, each.clip_norm / np.maximum(norm, 1e-30), 1.0)
            if each.clip_norm > 0
            else np.ones(batches)
            for each, norm in zip(scalings, norms, strict=True)
        ]
    )
    second = None if moments is None else moments.double().numpy()
    steps = _steps(rows, layers, scalings, clips, None)
    steps_at = None if second is None else _steps(rows, layers, scalings, clips, second)
    aligned = total[:own, own:].reshape(conditions, batches, parts)
    return Products(gram, total[own:, own:], aligned, steps, steps_at, by_layer)


def _blocks(rows: Rows, layers: Sequence[tuple[str, slice]]) -> Iterator[tuple[str, np.ndarray]]:
    for name, place in layers:
        for start in range(place.start, place.stop, COLUMNS):
            yield name, rows.table[:, start : min(start + COLUMNS, place.stop)].astype(np.float64)


def _steps(
    rows: Rows,
    layers: Sequence[tuple[str, slice]],
    scalings: Sequence[Scaling],
    clips_CB: np.ndarray,
    moments_D: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """AdamW's steps lr·g/(√v + ε) of every condition and batch: with each other, and with what is wanted."""
    conditions, batches = clips_CB.shape
    own = conditions * batches
    grams = np.zeros((conditions, batches, batches))
    aligned = np.zeros((conditions, batches, len(rows.table) - own))
    at = {name: place.start for name, place in layers}
    for name, block in _blocks(rows, layers):
        start, width = at[name], block.shape[1]
        at[name] += width
        for condition, scaling in enumerate(scalings):
            mine = block[condition * batches : (condition + 1) * batches] * clips_CB[condition, :, None]
            second = (mine**2).mean(0) if moments_D is None else moments_D[start : start + width]
            step = scaling.lr * mine / (np.sqrt(second) + scaling.eps)
            grams[condition] += step @ step.T
            aligned[condition] += step @ block[own:].T
    return grams, aligned
