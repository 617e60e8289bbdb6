"""Adapters on disk: plain PEFT directories that peft, transformers, vLLM and SGLang load.

The configuration is peft's own ``LoraConfig``, so that a file has whatever the installed peft gives one. peft is
imported when the first is made: with a model loaded that takes a moment, without one seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from retrain.errors import UsageError
from retrain.files import write_bytes, write_json
from retrain.policy.adapter_stream import PREFIX, AdapterFile, absolute_base
from retrain.policy.lora import Adapter, LayerShape
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.tensor_file import to_bytes


@dataclass
class StoredAdapter:
    """A PEFT adapter as read from disk: (A [r, in], B [out, r]) and ΔW scale by module path."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scales: dict[str, float]
    config: dict

    def require_scale(self, scale: float, named: str) -> None:
        """Raise UsageError when a module has another scale than a run's; ``named`` is what the user calls it."""
        wrong = [own for own in self.scales.values() if abs(own - scale) > 1e-9]
        if wrong:
            raise UsageError(
                f"{named} has LoRA scale {wrong[0]:g}, this run {scale:g}: "
                "set [model] lora_rank and [lora] alpha to the adapter's"
            )


def _module_names(shapes: Sequence[LayerShape]) -> list[str]:
    """Full module paths: unlike suffixes they can match nothing else."""
    return [shape.name for shape in shapes]


def peft_config(adapter: Adapter, base_name: str, revision: str | None, dropout: float) -> dict:
    """The adapter_config.json of this adapter: a ``peft.LoraConfig`` as plain JSON."""
    from peft import LoraConfig, TaskType

    names = _module_names(adapter.shapes)
    made = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_name,
        revision=revision,
        r=adapter.live_rank,
        lora_alpha=adapter.scale * adapter.live_rank,  # type: ignore[arg-type]  # peft computes with any number
        lora_dropout=dropout,
        target_modules=names,
        inference_mode=True,
    ).to_dict()
    # peft keeps the names as a set, whose order differs between processes; enums are strings.
    return {key: str(value.value) if isinstance(value, Enum) else value for key, value in made.items()} | {
        "target_modules": names
    }


def save_adapter(
    directory: Path, adapter: Adapter, base_name: str, revision: str | None = None, dropout: float = 0.0
) -> None:
    """Write the PEFT directory (weights fp32). The caller publishes the directory atomically."""
    tensors = {name: (a.cpu(), b.cpu()) for name, (a, b) in adapter.tensors().items()}
    write_peft(directory, tensors, peft_config(adapter, base_name, revision, dropout))


def write_peft(directory: Path, tensors: dict[str, tuple[torch.Tensor, torch.Tensor]], config: dict) -> None:
    """Write (A, B) by module path and the given adapter_config.json into ``directory``.

    Raises StorageError when it cannot be written.
    """
    flat = {}
    for name, (a, b) in tensors.items():
        flat[f"{PREFIX}{name}.lora_A.weight"] = a
        flat[f"{PREFIX}{name}.lora_B.weight"] = b
    write_bytes(directory / ADAPTER_WEIGHTS, to_bytes(flat, {"format": "pt"}))
    write_json(directory / ADAPTER_CONFIG, absolute_base(config))


def read_adapter(directory: Path) -> StoredAdapter:
    """Read a PEFT LoRA directory as a whole; scales respect rsLoRA, rank_pattern and alpha_pattern.

    Raises ModelError when the directory holds no LoRA adapter in safetensors.
    """
    with AdapterFile(directory) as file:
        # Copies: a mapped file would keep changing under whoever trains on.
        tensors = {name: (a.clone(), b.clone()) for name in file.modules for a, b in [file.factors(name)]}
        return StoredAdapter(tensors, file.scales, file.config)
