"""How much memory there is, what a token takes of it, and how much a cohort therefore does at a time.

Which sequences decode together and which tokens make a micro-batch shows in the last bits of what is computed. So both
follow from the device's whole memory and from shapes, never from what happens to be free, and a checkpoint keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from retrain.gpus import memory_share
from retrain.models import sizes
from retrain.policy.base import BaseModel
from retrain.policy.device import total_memory

SAMPLING_SHARE = {"cpu": 0.25, "cuda": sizes.GPU_SAMPLING_SHARE}
"""Of the memory beside base and lanes, for the keys, values and logits of a decode batch. The rest is for the states of
a prefill, for what allocators lose between blocks, and on a CPU for other programs."""
LARGEST_SHARE = 0.95
"""Sizes that were planned on a larger device are kept on a smaller one up to this share of its memory beside base and
lanes."""


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that can still be allocated: on a GPU what is free or cached by torch, else the machine's own memory; no
    more than what is left of this process's share where it has but one."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        return min(free + torch.cuda.memory_reserved(device) - allocated, total_memory(device) - allocated)
    import psutil

    available = int(psutil.virtual_memory().available)
    if memory_share() == 1:
        return available
    return min(available, max(0, total_memory(torch.device("cpu")) - int(psutil.Process().memory_info().rss)))


def head_size(config: Any) -> int:
    """Numbers in one key or value of one head, from a text model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _keys(config: Any) -> int:
    """Numbers in the keys of one token in one layer."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size(config)


def cache_bytes(base: BaseModel) -> int:
    """Bytes of keys and values that one token occupies while decoding, over all layers."""
    config = base.model.config.get_text_config()
    return 2 * config.num_hidden_layers * _keys(config) * base.dtype.itemsize


def kept_bytes(base: BaseModel) -> int:
    """Bytes that one token's forward pass keeps for its backward pass, over all layers."""
    config = base.model.config.get_text_config()
    wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return config.num_hidden_layers * sizes.kept_bytes(
        config.hidden_size,
        config.num_attention_heads * head_size(config),
        _keys(config),
        experts * int(wide or 4 * config.hidden_size),
        any(name.endswith("q_norm") for name, _ in base.model.named_modules()),
        base.dtype.itemsize,
    )


@dataclass(frozen=True)
class MemoryPlan:
    """How much the runs of a cohort do at a time on this device. In bytes: ``room`` is what there is beside base and
    lanes, ``decode_bytes`` what a decode batch takes of it, ``kept_bytes`` what a token in training takes."""

    room: int
    decode_bytes: int
    micro_batch_tokens: int
    kept_bytes: int

    @classmethod
    def of(cls, base: BaseModel, lane_bytes: int = 0) -> MemoryPlan:
        """For lanes that take ``lane_bytes`` together; a function of these, of the base's shapes and of the size of its
        device."""
        kind = base.device.type
        room, kept = max(0, total_memory(base.device) - base.held_bytes - lane_bytes), kept_bytes(base)
        if kind == "cpu":
            tokens = sizes.cpu_token_budget(base.weight_bytes)
        else:
            tokens = sizes.gpu_token_budget(room, kept)
        return cls(room, int(SAMPLING_SHARE.get(kind, SAMPLING_SHARE["cuda"]) * room), tokens, kept)

    def kept_decode_bytes(self, before: int) -> int:
        """What a decode batch takes where it took ``before`` so far: the same, unless that does not fit."""
        return before if before <= max(self.decode_bytes, LARGEST_SHARE * self.room) else self.decode_bytes

    def kept_micro_batch_tokens(self, before: int) -> int:
        """Tokens of a micro-batch that had ``before`` so far: as many, unless they do not fit."""
        fitting = max(self.micro_batch_tokens, LARGEST_SHARE * self.room / self.kept_bytes)
        return before if before <= fitting else self.micro_batch_tokens


def peak_memory_gib() -> float:
    """Highest memory use so far: of the GPU's allocator where one is in use, else of the process."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
