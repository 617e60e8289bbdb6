"""The frozen base: one model, its tokenizer, and what sampling and training need to know about them."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from retrain.config import Config
from retrain.errors import ModelError, UsageError
from retrain.models import bundled_model_path
from retrain.models.directory import local_directory, model_fault
from retrain.policy.arithmetic import FULL
from retrain.tokenizer import Tokenizer

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class BaseModel:
    """A frozen causal LM, shared by all runs of a cohort.

    ``eos_ids`` are all end-of-sequence ids that the model's generation config, config and tokenizer name: a
    completion that ends with any of them has stopped by itself.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    eos_ids: tuple[int, ...]
    pad_id: int
    fingerprint: str
    backbone: Any = field(default=None, repr=False)
    """How the update runs the model, once that is known (``policy.backbone``)."""
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def on_release(self, undo: Callable[[], None]) -> None:
        """Remember how to take off something that was put on the model: lanes, attention, fused layers."""
        self._undo.append(undo)

    def release(self) -> None:
        """Take everything off the model that sampling and training have put on it, the last first."""
        while self._undo:
            self._undo.pop()()
        self.backbone = None

    @property
    def vocab_size(self) -> int:
        """Columns of the output layer (may exceed the tokenizer's vocabulary)."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def context_length(self) -> int:
        """Longest prompt + completion that the model's positions allow."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)

    @cached_property
    def head_weight(self) -> torch.Tensor:
        """The output layer's weight as ``fp32_product`` takes it: on a CPU, which multiplies half precision into half
        precision alone, a copy in fp32."""
        weight = self.model.get_output_embeddings().weight.detach()
        return weight.float() if self.device.type == "cpu" and weight.dtype not in FULL else weight

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    @cached_property
    def text(self) -> Tokenizer:
        """The tokenizer as everything but the model sees it."""
        return Tokenizer(self.tokenizer)


def resolve_device(devices: str) -> torch.device:
    """``auto`` | ``cpu`` | ``gpu:N`` → torch device. Raises UsageError when that GPU is not there."""
    if devices == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if devices == "cpu":
        return torch.device("cpu")
    index = int(devices.partition(":")[2] or 0)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= found:
        raise UsageError(f'devices = "{devices}": this machine shows {found} GPU(s); type devices = "auto" or "cpu"')
    return torch.device(f"cuda:{index}")


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU, where fp32 is exact and as fast."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[dtype]


def _end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def _fingerprint(model: Any) -> str:
    """Hash of names, shapes, a strided sample and the sum of all bits of every weight.

    A single number that is another one changes the sum; 16 GB are read where they lie, without a copy.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(tensor.shape)}{_sum_of_bits(flat)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _sum_of_bits(flat: torch.Tensor) -> int:
    """The sum, modulo 2**64, of the tensor's memory read as the widest integers that it divides into."""
    start, size = flat.storage_offset() * flat.element_size(), flat.numel() * flat.element_size()
    return int(flat.view(INTEGERS[math.gcd(start, size, 8)]).sum(dtype=torch.int64))


def load_base(
    name: str,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    devices: str = "auto",
    dtype: str = "auto",
) -> BaseModel:
    """Load a causal LM by bundled name (``tiny-reasoner``), local directory or hub name, frozen and in eval mode.

    ``dtype`` as in [inference], or "stored": that of the model's own files.

    Raises ModelError when it cannot be had, with what to do; the underlying error stays chained.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    device = resolve_device(devices)
    source, options = _whence(name, revision, local_files_only, trust_remote_code)
    torch_dtype: Any = "auto" if dtype == "stored" else resolve_dtype(dtype, device)
    if bundled_model_path(name) or not sys.stderr.isatty():
        disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype, **options)
    except Exception as error:  # of whatever kind, from files that somebody else has written
        raise _cannot_load(name, error) from error
    model.to(device).eval().requires_grad_(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of products in fp32
    eos_ids = _end_ids(model, tokenizer)
    if not eos_ids:
        raise ModelError(f"model {name!r} names no end-of-sequence token: set eos_token_id in its generation_config")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    kept = model.dtype if dtype == "stored" else torch_dtype
    return BaseModel(name, model, tokenizer, device, kept, eos_ids, pad_id, _fingerprint(model))


def tokenizer_of(config: Config) -> tuple[Any, int]:
    """Tokenizer and context length (tokens; 0 where it is not told) of the model that a run's configuration names,
    without its weights. Raises ModelError as ``load_base``."""
    from transformers import AutoConfig, AutoTokenizer

    model = config.model
    source, options = _whence(model.model, model.revision, model.local_files_only, model.trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        text = AutoConfig.from_pretrained(source, **options).get_text_config()
    except Exception as error:  # as in load_base
        raise _cannot_load(model.model, error) from error
    return tokenizer, int(getattr(text, "max_position_embeddings", 0) or 0)


def _whence(
    name: str, revision: str | None, local_files_only: bool, trust_remote_code: bool
) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` is to be given: directory or hub name, and options. Raises ModelError for what cannot be
    loaded, as far as ``model_fault`` tells."""
    if fault := model_fault(name, trust_remote_code=trust_remote_code):
        raise ModelError(f"cannot load model {name!r}: {fault}")
    directory = local_directory(name)
    if directory is not None:
        return str(directory), {"trust_remote_code": trust_remote_code, "local_files_only": True}
    asked = {"revision": revision, "local_files_only": local_files_only}
    return name, {"trust_remote_code": trust_remote_code, **asked}


def _cannot_load(name: str, error: Exception) -> ModelError:
    """The reason in one line, and the way around it."""
    hint = "" if local_directory(name) else "; with no network, download it elsewhere and give the directory's path"
    if "trust_remote_code" in str(error):
        hint = "; read it, then set [model] trust_remote_code = true"
    reason = next(iter(str(error).splitlines()), "")
    kind = "" if isinstance(error, OSError | ValueError) and reason else f"{type(error).__name__}: "
    return ModelError(f"cannot load model {name!r}: {kind}{reason}{hint}")


def base_of(config: Config) -> BaseModel:
    """``load_base`` of what a run's configuration names."""
    return load_base(
        config.model.model,
        revision=config.model.revision,
        local_files_only=config.model.local_files_only,
        trust_remote_code=config.model.trust_remote_code,
        devices=config.backend.devices,
        dtype=config.inference.dtype,
    )
