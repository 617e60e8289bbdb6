"""Adapters on disk: plain PEFT directories that peft, transformers, vLLM and SGLang load.

Written without importing peft (its import costs seconds); the tests load every such directory through peft.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from retrain.errors import ModelError
from retrain.files import read_json, write_json
from retrain.policy.lora import Adapter, LayerShape

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."


@dataclass
class StoredAdapter:
    """A PEFT adapter as read from disk: (A [r, in], B [out, r]) and ΔW scale by module path."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scales: dict[str, float]
    config: dict


def _module_names(shapes: Sequence[LayerShape]) -> list[str]:
    """Full module paths: unlike suffixes they can match nothing else."""
    return [shape.name for shape in shapes]


def peft_config(adapter: Adapter, base_name: str, revision: str | None, dropout: float) -> dict:
    """The adapter_config.json of this adapter (fields of peft's LoraConfig)."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": dropout,
        "target_modules": _module_names(adapter.shapes),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def save_adapter(
    directory: Path, adapter: Adapter, base_name: str, revision: str | None = None, dropout: float = 0.0
) -> None:
    """Write the PEFT directory (weights fp32). The caller publishes the directory atomically."""
    tensors = {name: (a.cpu(), b.cpu()) for name, (a, b) in adapter.tensors().items()}
    write_peft(directory, tensors, peft_config(adapter, base_name, revision, dropout))


def write_peft(directory: Path, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]], config: dict) -> None:
    """Write (A, B) by module path and the given adapter_config.json into ``directory``."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    flat = {}
    for name, (a, b) in tensors.items():
        flat[f"{_PREFIX}{name}.lora_A.weight"] = a.contiguous().clone()
        flat[f"{_PREFIX}{name}.lora_B.weight"] = b.contiguous().clone()
    save_file(flat, directory / WEIGHTS, metadata={"format": "pt"})
    write_json(directory / CONFIG, config)
    shutil.copymode(directory / CONFIG, directory / WEIGHTS)  # safetensors leaves it to its owner alone


def read_adapter(directory: Path) -> StoredAdapter:
    """Read a PEFT LoRA directory; scales respect rsLoRA, rank_pattern and alpha_pattern.

    Raises ModelError when the directory holds no LoRA adapter in safetensors.
    """
    from safetensors.torch import load_file

    weights, config_path = directory / WEIGHTS, directory / CONFIG
    if not weights.is_file() or not config_path.is_file():
        raise ModelError(f"{directory} holds no PEFT adapter: {WEIGHTS} and {CONFIG} must be there")
    config = read_json(config_path)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(weights).items():
        name, _, half = key.removeprefix(_PREFIX).rpartition(".lora_")
        if name and half[:1] in "AB":
            halves.setdefault(name, {})[half[0]] = tensor
    tensors = {name: (parts["A"], parts["B"]) for name, parts in halves.items() if len(parts) == 2}
    if not tensors:
        raise ModelError(f"{weights} holds no lora_A/lora_B pairs")
    scales = {name: _scale(name, a.shape[0], config) for name, (a, _) in tensors.items()}
    return StoredAdapter(tensors, scales, config)


def _scale(name: str, rank: int, config: dict) -> float:
    """alpha/r, or alpha/√r with rsLoRA; ``alpha_pattern`` keys match the end of a module path, as in peft."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if name == pattern or name.endswith("." + pattern):
            alpha = value
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
