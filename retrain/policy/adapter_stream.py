"""PEFT adapters read and written one module at a time, so that one larger than memory can be squeezed.

A safetensors file is a header (names, shapes, places) and the bytes of the tensors. It is mapped for reading; for
writing the header comes first, because all shapes are known, and the tensors follow in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retrain.errors import ModelError
from retrain.files import read_json, write_json
from retrain.models import bundled_model_path, bundled_name
from retrain.records.schema.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from retrain.tensor_file import data_of, dtype_name, header

PREFIX = "base_model.model."
_HALF = re.compile(r"(?P<name>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(\.weight)?$")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Pair = tuple[torch.Tensor, torch.Tensor]  # A [r, in] and B [out, r]; of an embedding A [r, vocabulary] and B [dim, r]


@dataclass(frozen=True)
class Factors:
    """Where the two factors of one module stand, and their shapes."""

    a_key: str
    b_key: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return self.a_shape[0]

    def at(self, rank: int) -> Factors:
        """The same module with factors of another rank."""
        return replace(self, a_shape=(rank, *self.a_shape[1:]), b_shape=(*self.b_shape[:-1], rank))


def padded(pair: Pair, rank: int) -> Pair:
    """A and B filled up with zeros to ``rank``."""
    a, b = pair
    missing = rank - a.shape[0]
    pad = torch.nn.functional.pad
    return (pad(a, (0, 0, 0, missing)), pad(b, (0, missing))) if missing else (a, b)


class AdapterFile:
    """A PEFT LoRA directory open for reading (``with``): ``modules`` and ``scales`` by module path, tensors on demand.

    Scales respect rsLoRA, ``rank_pattern`` and ``alpha_pattern``. Raises ModelError when the directory holds no LoRA
    adapter in safetensors, or tensors besides LoRA's factors (DoRA, biases, whole modules), which nobody may drop.
    """

    def __init__(self, directory: Path):
        from safetensors import SafetensorError, safe_open

        weights, config_path = directory / ADAPTER_WEIGHTS, directory / ADAPTER_CONFIG
        if not weights.is_file() or not config_path.is_file():
            raise ModelError(f"{directory} holds no PEFT adapter: {ADAPTER_WEIGHTS} and {ADAPTER_CONFIG} must be there")
        self.directory, self.config = directory, read_json(config_path)
        try:
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
        """A and B of one module, views of the mapped file: what is read stays in the page cache, not in a copy."""
        where = self.modules[name]
        return self._file.get_tensor(where.a_key), self._file.get_tensor(where.b_key)

    @property
    def rank(self) -> int:
        return max(where.rank for where in self.modules.values())

    def require_plain(self) -> None:
        """Raise ModelError when there are tensors besides LoRA's factors."""
        if self.others or self.config.get("use_dora"):
            part = self.others[0] if self.others else "use_dora"
            raise ModelError(f"{self.directory} is more than a LoRA adapter ({part}): only plain ones are rewritten")

    def _scale(self, name: str, rank: int) -> float:
        """Return alpha/r, or alpha/√r with rsLoRA. Raises ModelError for another rank than that of the tensors, and for
        a scale that float32 cannot hold."""
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
                dtype = next((own for own, code in _DTYPES.items() if code == a.get_dtype()), torch.float32)
                factors[name] = Factors(keys["A"], keys["B"], tuple(a.get_shape()), tuple(b.get_shape()), dtype)
            else:
                others.extend(keys.values())
        return factors, others


def _setting(config: Mapping[str, Any], key: str, pattern: str, name: str) -> Any:
    """Return the rank or alpha of one module: as in peft, the first key of ``pattern`` that matches the end of the
    module path as a regular expression decides."""
    patterns = config.get(pattern) or {}
    match = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", name)), None)
    return config.get(key) if match is None else patterns[match]


def write_streamed(
    directory: Path, layout: Mapping[str, Factors], pairs: Iterable[tuple[str, Pair]], config: Mapping[str, Any]
) -> None:
    """Write a PEFT directory whose modules come one after the other; ``layout`` says what will come.

    Raises ModelError when a module is missing or of another shape than announced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries = {
        key: (dtype_name(where.dtype), shape)
        for where in layout.values()
        for key, shape in ((where.a_key, where.a_shape), (where.b_key, where.b_shape))
    }
    head, begins = header(entries, {"format": "pt"})
    missing = dict(layout)
    with open(directory / ADAPTER_WEIGHTS, "wb") as file:
        file.write(head)
        start = file.tell()
        for name, pair in pairs:
            where = missing.pop(name)
            for key, shape, tensor in zip(
                (where.a_key, where.b_key), (where.a_shape, where.b_shape), pair, strict=True
            ):
                if tuple(tensor.shape) != tuple(shape) or tensor.dtype != where.dtype:
                    raise ModelError(f"{key} is {tuple(tensor.shape)} {tensor.dtype}, announced as {shape}")
                file.seek(start + begins[key])
                file.write(data_of(tensor))
        if missing:
            raise ModelError(f"{next(iter(missing))} was announced and never came")
    write_json(directory / ADAPTER_CONFIG, absolute_base(config))


def absolute_base(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter_config.json with the absolute path of a base model that is on this machine.

    peft is usually called from another directory, and does not know the names of bundled models.
    """
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return dict(config)
    path = bundled_model_path(name) or Path(name)
    if not path.is_dir() and (bundled := bundled_name(name)):  # of another installation
        path = bundled_model_path(bundled) or path
    return {**config, "base_model_name_or_path": str(path.absolute())} if path.is_dir() else dict(config)
