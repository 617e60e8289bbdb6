"""PEFT adapters on disk: directories that peft, transformers, vLLM and SGLang load.

Files are mapped and read one module at a time, so that an adapter may be larger than memory. The configuration is made
by peft's own ``LoraConfig``; peft is imported only then, because the import takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrain.errors import ModelError
from retrain.files import read_json, write_bytes, write_json
from retrain.models.directory import bundled_model_path, bundled_name
from retrain.policy.lora import LoraWeights
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.util.tensor_file import to_bytes

PREFIX = "base_model.model."
_HALF = re.compile(r"(?P<name>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(\.weight)?$")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

Pair = tuple[Tensor, Tensor]  # A [r, in] and B [out, r]; for an embedding, A [r, vocabulary] and B [dim, r]


@dataclass(frozen=True)
class Factors:
    a_key: str
    b_key: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.a_shape[0]

    def at(self, rank: int) -> Factors:
        return replace(self, a_shape=(rank, *self.a_shape[1:]), b_shape=(*self.b_shape[:-1], rank))


def padded(pair: Pair, rank: int) -> Pair:
    a, b = pair
    missing = rank - a.shape[0]
    pad = torch.nn.functional.pad
    return (pad(a, (0, 0, 0, missing)), pad(b, (0, missing))) if missing else (a, b)


class AdapterFile:
    """A PEFT LoRA directory that is open for reading, for use in a ``with`` statement. By module path, ``modules``
    holds keys and shapes of the factors, and ``scales`` the factor of B·A; ``factors`` reads tensors on demand.

    Scales follow rsLoRA, ``rank_pattern`` and ``alpha_pattern``. ``others``: keys of tensors that are not LoRA factors
    (DoRA, biases, full modules). Raises ModelError if there is no LoRA adapter in safetensors.
    """

    def __init__(self, directory: Path):
        from safetensors import SafetensorError, safe_open

        weights, config_path = directory / ADAPTER_WEIGHTS, directory / ADAPTER_CONFIG
        if not weights.is_file() or not config_path.is_file():
            raise ModelError(f"{directory} holds no PEFT adapter: {ADAPTER_WEIGHTS} and {ADAPTER_CONFIG} must be there")
        self.directory, self.config = directory, read_json(config_path)
        try:
            # Entered by hand: the file stays open as long as this object, whose own ``with`` closes it.
            self._file = safe_open(weights, "pt").__enter__()
        except SafetensorError as error:
            raise ModelError(f"{weights} is no safetensors file: {error}") from error
        self.modules, self.others = self._find()
        if not self.modules:
            raise ModelError(f"{weights} holds no lora_A/lora_B pairs")
        self.scales = {name: self._scale(name, where.rank) for name, where in self.modules.items()}

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def factors(self, name: str) -> Pair:
        """Return A and B of one module, views of the mapped file."""
        where = self.modules[name]
        return self._file.get_tensor(where.a_key), self._file.get_tensor(where.b_key)

    @property
    def rank(self) -> int:
        return max(where.rank for where in self.modules.values())

    def require_plain(self) -> None:
        """Raise ModelError if the adapter has more than LoRA factors."""
        if self.others or self.config.get("use_dora"):
            part = self.others[0] if self.others else "use_dora"
            raise ModelError(f"{self.directory} is more than a LoRA adapter ({part}): only plain ones are rewritten")

    def _scale(self, name: str, rank: int) -> float:
        """Return the factor of B·A: alpha/r, or alpha/√r with rsLoRA. Raises ModelError if the configured rank differs
        from ``rank``, which the tensors have, or if float32 cannot hold the factor."""
        named = _setting(self.config, "r", "rank_pattern", name)
        if named not in (None, rank):
            raise ModelError(
                f"{self.directory}: {ADAPTER_CONFIG} gives {name} the rank {named}, and its tensors have {rank}"
            )
        alpha = _setting(self.config, "lora_alpha", "alpha_pattern", name)
        try:
            scale = float(alpha) / (rank**0.5 if self.config.get("use_rslora") else rank)
        except (TypeError, ValueError, OverflowError):
            scale = float("nan")
        if not abs(scale) <= torch.finfo(torch.float32).max:
            raise ModelError(f"{self.directory}: {ADAPTER_CONFIG} has lora_alpha = {str(alpha)[:40]}: beyond float32")
        return scale

    def _find(self) -> tuple[dict[str, Factors], list[str]]:
        halves: dict[str, dict[str, str]] = {}
        others = []
        for key in self._file.keys():  # noqa: SIM118 (no mapping)
            match = _HALF.match(key.removeprefix(PREFIX))
            if match:
                halves.setdefault(match["name"], {})[match["half"]] = key
            else:
                others.append(key)
        factors = {}
        for name, keys in sorted(halves.items()):
            if len(keys) == 2:
                a, b = self._file.get_slice(keys["A"]), self._file.get_slice(keys["B"])
                dtype = _DTYPES.get(a.get_dtype(), torch.float32)
                factors[name] = Factors(keys["A"], keys["B"], tuple(a.get_shape()), tuple(b.get_shape()), dtype)
            else:
                others.extend(keys.values())
        return factors, others


def _setting(config: Mapping[str, Any], key: str, pattern: str, name: str) -> Any:
    # As in peft, the first key of ``pattern`` that matches the end of the module path as a regular expression decides.
    patterns = config.get(pattern) or {}
    match = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), None)
    return config.get(key) if match is None else patterns[match]


@dataclass
class StoredAdapter:
    """A PEFT adapter in memory. By module path, ``tensors`` holds (A [r, in], B [out, r]) and ``scales`` the factor of
    B·A."""

    tensors: dict[str, Pair]
    scales: dict[str, float]
    config: dict


def read_adapter(directory: Path) -> StoredAdapter:
    """Read a PEFT LoRA directory into memory. Raises ModelError if it has no LoRA adapter in safetensors."""
    with AdapterFile(directory) as file:
        # Copies: training would change the mapped file's pages.
        tensors = {name: (a.clone(), b.clone()) for name in file.modules for a, b in [file.factors(name)]}
        return StoredAdapter(tensors, file.scales, file.config)


def peft_config(weights: LoraWeights, base_name: str, revision: str | None, dropout: float) -> dict:
    """Return the content of the adapter_config.json of these weights: a ``peft.LoraConfig`` as plain JSON."""
    from peft import LoraConfig, TaskType

    names = [shape.name for shape in weights.shapes]  # full module paths: unlike suffixes they match nothing else
    made = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base_name,
        revision=revision,
        r=weights.live_rank,
        lora_alpha=weights.scale * weights.live_rank,  # type: ignore[arg-type]  # peft computes with any number
        lora_dropout=dropout,
        target_modules=names,
        inference_mode=True,
    ).to_dict()
    # peft keeps the names as a set, whose order differs between processes; enums are strings.
    return {key: str(value.value) if isinstance(value, Enum) else value for key, value in made.items()} | {
        "target_modules": names
    }


def write_peft(directory: Path, tensors: dict[str, Pair], config: Mapping[str, object]) -> None:
    """Write a PEFT directory: ``tensors``, which holds (A, B) by module path, and ``config`` as adapter_config.json
    with the absolute path of the base. Raises StorageError."""
    flat = {}
    for name, (a, b) in tensors.items():
        flat[f"{PREFIX}{name}.lora_A.weight"] = a
        flat[f"{PREFIX}{name}.lora_B.weight"] = b
    write_bytes(directory / ADAPTER_WEIGHTS, to_bytes(flat, {"format": "pt"}))
    write_json(directory / ADAPTER_CONFIG, absolute_base(config))


def absolute_base(config: Mapping[str, object]) -> dict[str, object]:
    """Return an adapter_config.json in which the base model has its absolute path, if it is on this machine.

    peft is usually called from another directory, and does not know the names of bundled models.
    """
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return dict(config)
    path = bundled_model_path(name) or Path(name)
    if not path.is_dir() and (bundled := bundled_name(name)):  # a path into another installation
        path = bundled_model_path(bundled) or path
    return {**config, "base_model_name_or_path": str(path.absolute())} if path.is_dir() else dict(config)
