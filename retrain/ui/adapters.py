"""Compute the spectra of trained LoRA adapters, and how far the updates of two adapters span the same space.

The mathematics is that of ``maths.squeeze``, here in numpy and with one module in memory at a time, because torch alone
would take more memory than the page's server.
"""

import json
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np

from retrain.files import Stamp, read_json, stamp_of
from retrain.records.schema.base import Row

DIRECTIONS = 4  # Leading singular directions in which a module of two adapters is compared
MOST_DIRECTIONS = 32  # Most modules of an adapter whose directions are cached; all would take too much memory
MOST_HEADER, MOST_FACTOR = 8 << 20, 1 << 28
TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True)
class Spectrum:
    """Spectrum of a module's ΔW: singular ``values``, descending; left singular vectors ``directions`` [out, k]."""

    values: np.ndarray
    directions: np.ndarray

    @property
    def energy(self) -> np.ndarray:
        """Share of Σs² in the first k values, for k = 1 … rank; all 0 for an untrained module."""
        squares = np.cumsum(self.values.astype(np.float64) ** 2)
        return squares / squares[-1] if len(squares) and squares[-1] > 0 else np.zeros(len(squares))


def spectra(weights: Path, settings: Path) -> dict[str, Spectrum]:
    """Return the spectrum of every module, from ``adapter_model.safetensors`` and ``adapter_config.json``. Raises
    ValueError if these are not the files of a LoRA adapter."""
    return _spectra(weights, settings, (stamp_of(weights), stamp_of(settings)))


@lru_cache(32)
def _spectra(weights: Path, settings: Path, stamps: tuple[Stamp | None, ...]) -> dict[str, Spectrum]:
    config = read_json(settings)
    if not isinstance(config, dict):
        raise ValueError("adapter_config.json is no object")
    out: dict[str, Spectrum] = {}
    with open(weights, "rb") as file:
        factors = _factors(file)
        begin = file.tell()
        directed = set(sorted(factors)[:: max(1, -(-len(factors) // MOST_DIRECTIONS))])
        for name, pair in factors.items():
            a, b = (_tensor(file, begin, facts) for facts in pair)
            fits = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1]
            if fits and np.isfinite(a.sum()) and np.isfinite(b.sum()):
                out[name] = _spectrum(a, b, _scale(config, name, a.shape[0]), DIRECTIONS if name in directed else 0)
    return out


def overlap(a: Spectrum, b: Spectrum) -> float | None:
    """Return ‖U₁ᵀU₂‖²/k of the leading k directions: 1 for the same space, k/out by chance. None without directions or
    for modules of different size."""
    k = min(a.directions.shape[1], b.directions.shape[1])
    if not k or a.directions.shape[0] != b.directions.shape[0]:
        return None
    return float(np.sum((a.directions[:, :k].T @ b.directions[:, :k]) ** 2) / k)


def norm(spectrum: Spectrum) -> float:
    return math.sqrt(float(np.sum(spectrum.values.astype(np.float64) ** 2)))


def _spectrum(a: np.ndarray, b: np.ndarray, scale: float, directions: int) -> Spectrum:
    q, r = np.linalg.qr(b)
    _, other = np.linalg.qr(a.T)
    u, values, _ = np.linalg.svd(r @ other.T)
    trained = int(np.sum(values > 1e-12 * values[0])) if len(values) and values[0] > 0 else 0
    return Spectrum(values * abs(scale), (q @ u[:, : min(directions, trained)]).astype(np.float32))


def _scale(config: Row, name: str, rank: int) -> float:
    alphas = config.get("alpha_pattern") if isinstance(config.get("alpha_pattern"), dict) else {}
    matching = (alpha for pattern, alpha in (alphas or {}).items() if name.endswith(pattern))
    alpha = next(matching, config.get("lora_alpha", rank))
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _factors(file: IO[bytes]) -> dict[str, tuple[Row, Row]]:
    """Return the header's entries (dtype, shape, offsets) for A [r, in] and B [out, r] of each module. Leaves ``file``
    at the end of the header."""
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 0 < length <= MOST_HEADER:
        raise ValueError("no safetensors file")
    tensors = json.loads(file.read(length))
    if not isinstance(tensors, dict):
        raise ValueError("no safetensors file")
    pairs = [(key, key.replace(".lora_A", ".lora_B")) for key in sorted(tensors)]
    return {
        a.partition(".lora_A")[0].removeprefix("base_model.model."): (tensors[a], tensors[b])
        for a, b in pairs
        if a != b and b in tensors
    }


def _tensor(file: IO[bytes], begin: int, facts: Row) -> np.ndarray:
    kind, shape, (start, end) = TYPES[facts["dtype"]], facts["shape"], facts["data_offsets"]
    if not 0 <= end - start <= MOST_FACTOR:
        raise ValueError("a factor is too large")
    file.seek(begin + start)
    data = np.frombuffer(file.read(end - start), kind)
    if facts["dtype"] == "BF16":
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.reshape(shape).astype(np.float32)
