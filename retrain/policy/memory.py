"""How much memory there is to use, and what a token takes of it."""

from __future__ import annotations

from typing import Any

import torch

from retrain.models.sizes import kept_numbers
from retrain.policy.base import BaseModel


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that can still be allocated: on a GPU what is free or cached by torch, else the machine's own memory."""
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.virtual_memory().available)


def head_size(config: Any) -> int:
    """Numbers in one key or value of one head, from a text model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def cache_bytes(base: BaseModel) -> int:
    """Bytes of keys and values that one token occupies while decoding, over all layers."""
    config = base.model.config.get_text_config()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return 2 * config.num_hidden_layers * heads * head_size(config) * base.dtype.itemsize


def kept_bytes(base: BaseModel) -> int:
    """Bytes that one token's forward pass keeps for its backward pass, over all layers."""
    config = base.model.config.get_text_config()
    width = base.dtype.itemsize
    return kept_numbers(width) * width * config.hidden_size * config.num_hidden_layers


def peak_memory_gib() -> float:
    """Highest memory use so far: of the GPU's allocator where one is in use, else of the process."""
    if torch.cuda.is_initialized():
        return max(torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
