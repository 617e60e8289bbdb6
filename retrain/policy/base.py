"""Loads the frozen base, which all runs of a cohort share, and plans the memory that it leaves them.

Sizes of decode batches and micro-batches affect rounding, so they follow from the device's total memory and from
shapes, never from free memory, and checkpoints keep them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from retrain.config import Config
from retrain.device import resolve_device, resolve_dtype, set_up, total_memory
from retrain.errors import MissingExtra, ModelError
from retrain.extras import is_installed, missing
from retrain.models import layers
from retrain.models.directory import bundled_model_path, local_directory, model_fault
from retrain.policy.arithmetic import packed, packs
from retrain.policy.quantized import QuantizationEffect, quantise
from retrain.policy.sharded import ShardedWeights, load_sharded
from retrain.ranks import RankGroup
from retrain.threads import Workers
from retrain.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUANTIZED_MARK = "+"  # Separates, in a fingerprint, the hash of the unquantised weights from the quantisation
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class BaseModel:
    """A frozen causal LM. ``eos_ids`` are the end-of-sequence ids of generation config, config and tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    eos_ids: tuple[int, ...]
    pad_id: int
    fingerprint: str
    sharded: ShardedWeights | None = field(default=None, repr=False)  # None: all weights are on this device
    quantized: QuantizationEffect | None = None  # Measured effect of quantisation; None: not quantised
    backbone: object = field(default=None, repr=False)  # Set by ``policy.backbone``
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def on_release(self, undo: Callable[[], None]) -> None:
        """Register a function that undoes a modification of the model, such as LoRA lanes or fused layers."""
        self._undo.append(undo)

    def release(self) -> None:
        """Remove all modifications that sampling and training have made to the model, the last one first."""
        while self._undo:
            self._undo.pop()()
        self.backbone = None

    @cached_property
    def vocab_size(self) -> int:
        """Return the size of the output layer, which may exceed the tokenizer's vocabulary."""
        return self.model.get_output_embeddings().weight.shape[0]

    @cached_property
    def context_length(self) -> int:
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)

    @cached_property
    def is_small(self) -> bool:
        """Return whether the weights fit a CPU core's cache, so that one task per core is fastest."""
        return self.device.type == "cpu" and self.weight_bytes <= layers.SMALL_MODEL_BYTES

    @cached_property
    def fits_copy(self) -> bool:
        return not self.is_streamed and self.weight_bytes <= layers.COPY_SHARE * total_memory(self.device)

    @property
    def is_streamed(self) -> bool:
        """Return whether decoder weights exist as matrices only while they are used: gathered from several ranks, or
        dequantised."""
        return self.sharded is not None or self.quantized is not None

    @cached_property
    def packs_weights(self) -> bool:
        return packs(self.device.type, self.dtype) and not self.is_small and self.fits_copy

    @cached_property
    def head_weight(self) -> Tensor:
        """Return the output layer's weight in the layout that is fastest for ``fp32_product``."""
        weight = self.model.get_output_embeddings().weight.detach()
        return packed(weight) if self.packs_weights else weight

    @cached_property
    def weight_bytes(self) -> int:
        if self.quantized is not None:
            return self.quantized.bytes_after
        return sum(weight.nbytes for weight in self.model.parameters())

    @property
    def held_bytes(self) -> int:
        """Return the peak bytes of weights on this device."""
        return self.weight_bytes if self.sharded is None else self.sharded.held_bytes

    @property
    def gathered_bytes(self) -> int:
        """Return the most bytes of weights that are gathered from other ranks at the same time."""
        return 0 if self.sharded is None else self.sharded.gathered_bytes

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which weights may be read; with sharded weights, all ranks enter it together."""
        return nullcontext() if self.sharded is None else self.sharded.in_use()

    @cached_property
    def text(self) -> Tokenizer:
        return Tokenizer(self.tokenizer)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ends: set[int] = set()
    # Chat models often end turns with a token that only generation_config names; stop at any of them.
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            ends.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(ends))


def _part_of_fingerprint(name: str, tensor: Tensor) -> bytes:
    """Return bytes that identify a weight: its name and shape, the sum of its memory read as integers, and up to 64 of
    its numbers. Changing any one number changes the sum."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // 64)][:64].to("cpu", torch.float32)
    # The memory is read as the widest integers that it divides into, without a copy; the sum is modulo 2**64.
    start, size = flat.storage_offset() * flat.element_size(), flat.numel() * flat.element_size()
    total = int(flat.view(INTEGERS[math.gcd(start, size, 8)]).sum(dtype=torch.int64))
    return f"{name}{tuple(tensor.shape)}{total}".encode() + sample.numpy().tobytes()


class LoadOptions(TypedDict, total=False):
    revision: str | None
    local_files_only: bool
    trust_remote_code: bool


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, and the arguments of ``from_pretrained`` that load them."""

    name: str
    source: str
    options: LoadOptions
    tokenizer: Any
    context: int  # Context length in tokens; 0: unknown
    stored: str = ""  # Quantisation of the model's files, if any
    quantize: str = "none"


def load_base(
    name: str,
    *,
    local_files_only: bool = False,
    trust_remote_code: bool = False,
    devices: str = "auto",
    dtype: str = "auto",
) -> BaseModel:
    """Load a causal LM by bundled name (``tiny-reasoner``), local directory or hub name, frozen and in eval mode.

    ``dtype``: as in [inference], or "stored" for that of the model's files. Raises ModelError, chained to the cause.
    """
    return load_weights(_find_files(name, None, local_files_only, trust_remote_code), devices, dtype)


def load_weights(files: ModelFiles, devices: str, dtype: str, ranks: RankGroup | None = None) -> BaseModel:
    """Load the weights. With ``ranks``, load this rank's shard; all ranks call this together."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    # transformers and peft import bitsandbytes, which warns of missing kernels that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    name, tokenizer = files.name, files.tokenizer
    device = resolve_device(devices)
    set_up(device)
    torch_dtype = None if dtype == "stored" else resolve_dtype(dtype, device)
    if bundled_model_path(name) or not sys.stderr.isatty():
        disable_progress_bar()
    sharded: ShardedWeights | None = None
    quantized: QuantizationEffect | None = None
    try:
        if ranks is None:
            model = AutoModelForCausalLM.from_pretrained(files.source, dtype=torch_dtype or "auto", **files.options)
            model.eval().requires_grad_(False)
            # A generator, unless quantisation is about to replace the weights.
            parts: Iterable[bytes] = (_part_of_fingerprint(*named) for named in model.state_dict().items())
            if files.quantize != "none":
                parts = list(parts)
                quantized = quantise(model, files.quantize, tokenizer, _end_ids(model, tokenizer), device)
            else:
                model.to(device)  # pyright: ignore[reportArgumentType]
        else:
            assert torch_dtype is not None, "ranks resolve their number format"
            shard = load_sharded(files.source, files.options, torch_dtype, device, ranks, _part_of_fingerprint)
            model, sharded, parts = shard.model, shard.weights, shard.parts
    except MissingExtra:
        raise
    except ModelError as error:
        raise ModelError(f"cannot load model {name!r}: {error}") from error
    except Exception as error:  # as in _find_files
        raise _cannot_load(name, error) from error
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of products in fp32
    eos_ids = _end_ids(model, tokenizer)
    if not eos_ids:
        raise ModelError(f"model {name!r} names no end-of-sequence token: set eos_token_id in its generation_config")
    # Any valid id will do: no token attends to padding.
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]
    fingerprint = hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    if quantized is not None:
        fingerprint += f"{QUANTIZED_MARK}{quantized.kind}"
    return BaseModel(
        name, model, tokenizer, device, torch_dtype or model.dtype, eos_ids, pad_id, fingerprint, sharded, quantized
    )


def find_model_files(config: Config) -> ModelFiles:
    """Find the model of a configuration, without loading weights. Raises ModelError if it cannot be loaded,
    MissingExtra if the package for its quantisation is not installed."""
    model = config.model
    files = _find_files(model.model, model.revision, model.local_files_only, model.trust_remote_code)
    if files.stored and model.quantized:
        raise ModelError(
            f"cannot load model {model.model!r}: its files are quantised already ({files.stored}): give the "
            'unquantised model, or [model] quantize = "none"'
        )
    if model.quantize == "nf4" and not is_installed("bitsandbytes"):
        raise missing('[model] quantize = "nf4"', "bitsandbytes")
    return replace(files, quantize=model.quantize)


def _find_files(name: str, revision: str | None, local_files_only: bool, trust_remote_code: bool) -> ModelFiles:
    from transformers import AutoConfig, AutoTokenizer

    if fault := model_fault(name, trust_remote_code=trust_remote_code):
        raise ModelError(f"cannot load model {name!r}: {fault}")
    source, options = name, LoadOptions(revision=revision, local_files_only=local_files_only)
    if directory := local_directory(name):
        source, options = str(directory), LoadOptions(local_files_only=True)
    options["trust_remote_code"] = trust_remote_code
    try:
        config = AutoConfig.from_pretrained(source, **options)  # first: without a network it is tried once only
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # files from elsewhere can cause any kind of error
        raise _cannot_load(name, error) from error
    context = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else type(stored).__name__
    return ModelFiles(name, source, options, tokenizer, context, str(method) if stored else "")


def _cannot_load(name: str, error: Exception) -> ModelError:
    hint = "" if local_directory(name) else "; with no network, download it elsewhere and give the directory's path"
    if "trust_remote_code" in str(error):
        hint = "; read it, then set [model] trust_remote_code = true"
    reason = next(iter(str(error).splitlines()), "")
    kind = "" if isinstance(error, OSError | ValueError) and reason else f"{type(error).__name__}: "
    return ModelError(f"cannot load model {name!r}: {kind}{reason}{hint}")


def workers_for(base: BaseModel) -> Workers:
    """Return one worker per core, with torch set to one thread, for a small model on one rank; else one worker."""
    cores = torch.get_num_threads()
    if not base.is_small or cores == 1 or base.sharded is not None:
        return Workers(1)
    # One product of a small model is too short to split: threads then take whole micro-batches instead.
    torch.set_num_threads(1)
    return Workers(cores, threads_after=cores)


# -- memory ----------------------------------------------------------------------------------------------------

# Share of the memory beside base and lanes for the keys, values and logits of a decode batch. The rest is for prefill
# states, fragmentation, and on a CPU for other programs.
SAMPLING_SHARE = {"cpu": 0.25, "cuda": layers.GPU_SAMPLING_SHARE}
# Share of ``MemoryPlan.room`` up to which the sizes of a checkpoint from a larger device are kept on this one
LARGEST_SHARE = 0.95


def architecture_of(base: BaseModel) -> layers.Architecture:
    """Return the sizes of a loaded base. Raises ModelError if its configuration does not have them."""
    config = base.model.config.get_text_config()
    # Some models have names of their own, which transformers maps to the usual ones.
    usual = {name: getattr(config, name) for name in config.attribute_map}
    architecture = layers.Architecture.from_config(config.to_dict() | usual)
    if architecture is None:
        raise ModelError(f"the configuration of {base.name} does not tell its sizes")
    return replace(architecture, head_norms=any(name.endswith("q_norm") for name, _ in base.model.named_modules()))


def cache_bytes(base: BaseModel) -> int:
    """Return the bytes of one token's keys and values, over all layers."""
    return architecture_of(base).cache_bytes(base.dtype.itemsize)


def kept_bytes(base: BaseModel) -> int:
    """Return the bytes that one token's forward pass keeps for its backward pass, over all layers."""
    return architecture_of(base).kept_bytes(base.dtype.itemsize)


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes for the runs of a cohort on this device, in bytes and tokens."""

    room: int  # Memory beside base and lanes
    decode_bytes: int  # Share of the room for a decode batch
    micro_batch_tokens: int
    kept_bytes: int  # Bytes that one token's forward pass keeps for its backward pass

    @classmethod
    def of(cls, base: BaseModel, lane_bytes: int = 0) -> MemoryPlan:
        kind = base.device.type
        room, per_token = max(0, total_memory(base.device) - base.held_bytes - lane_bytes), kept_bytes(base)
        if kind == "cpu":
            tokens = layers.cpu_token_budget(base.weight_bytes)
        else:
            tokens = layers.gpu_token_budget(room, per_token)
        return cls(room, int(SAMPLING_SHARE.get(kind, SAMPLING_SHARE["cuda"]) * room), tokens, per_token)

    def kept_decode_bytes(self, before: int) -> int:
        """Return the bytes of a decode batch after resuming: the checkpoint's, ``before``, if they fit on this device,
        else the plan's."""
        return before if before <= max(self.decode_bytes, LARGEST_SHARE * self.room) else self.decode_bytes

    def kept_micro_batch_tokens(self, before: int) -> int:
        """Return the tokens of a micro-batch after resuming: the checkpoint's, ``before``, if they fit on this device,
        else the plan's."""
        fitting = max(self.micro_batch_tokens, LARGEST_SHARE * self.room / self.kept_bytes)
        return before if before <= fitting else self.micro_batch_tokens
