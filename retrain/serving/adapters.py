"""Load weights of adapters for serving."""

import base64
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from retrain.adapters.export import uniform
from retrain.errors import ModelError
from retrain.policy.adapter_io import AdapterFile
from retrain.policy.base import BaseModel
from retrain.policy.lora import LayerShape, LoraWeights
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.types import PolicyRef


@dataclass(frozen=True, eq=False)
class ServedWeights:
    """Weights served under a name. ``ref`` is new for every load, even under the same name. ``parent`` is the base's
    name, None for the base itself. ``root`` is the adapter's directory, "upload", or the base's name."""

    name: str
    ref: PolicyRef
    weights: LoraWeights
    root: str
    parent: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


def zero_weights(shapes: Sequence[LayerShape], rank: int, scale: float, device: torch.device) -> LoraWeights:
    size = sum(rank * (shape.in_features + shape.out_features) for shape in shapes)
    return LoraWeights(shapes, rank, scale, rank, torch.zeros(size, device=device))


def read_weights(directory: Path, base: BaseModel, shapes: Sequence[LayerShape]) -> LoraWeights:
    """Read the LoRA adapter in a PEFT directory; layers without an adapter get zeros. Raises ModelError if the files
    are not a LoRA adapter, a layer does not exist in the base or has another size, or a number is not finite."""
    try:
        with AdapterFile(directory) as file:
            file.require_plain()
            scale, pairs = uniform(file, file.rank)
            weights = zero_weights(shapes, file.rank, float(scale), base.device)
            for name, (a, b) in pairs:
                if name not in weights.A or (a.shape, b.shape) != (weights.A[name].shape, weights.B[name].shape):
                    raise ModelError(f"it adapts {name}, which is no linear layer of that size in {base.name}")
                weights.A[name].copy_(a)
                weights.B[name].copy_(b)
    except ModelError:
        raise
    except Exception as error:  # any error: the files are somebody else's
        raise ModelError(f"{directory} is no LoRA adapter: {type(error).__name__}: {error}") from error
    if not torch.isfinite(weights.flat).all():
        raise ModelError(f"{directory} holds numbers that are not finite")
    return weights


def uploaded_weights(files: Mapping[str, str], base: BaseModel, shapes: Sequence[LayerShape]) -> LoraWeights:
    """Read an adapter from its files' contents in base64, by file name. Raises ModelError as ``read_weights`` does."""
    if set(files) != {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        raise ModelError(
            f"files must be {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, not {', '.join(sorted(files))[:200] or 'nothing'}"
        )
    with tempfile.TemporaryDirectory(prefix="retrain-serve-") as folder:
        for name, content in files.items():
            try:
                (Path(folder) / name).write_bytes(base64.b64decode(content, validate=True))
            except ValueError as error:
                raise ModelError(f"{name} is not base64: {error}") from error
        return read_weights(Path(folder), base, shapes)
