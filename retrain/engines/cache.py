"""A key/value cache with room reserved ahead, so that a decode step writes one column and copies nothing."""

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer


class ReservedLayer(DynamicLayer):
    """Keys and values [rows, heads, capacity, head_dim] of one attention layer, filled from the left."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.key_buffer: torch.Tensor
        self.value_buffer: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve the buffers on first use, like the states in dtype, device and all sizes but the length."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, _, size = key_states.shape
        self.key_buffer = key_states.new_empty(rows, heads, self.capacity, size)
        self.value_buffer = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.keys, self.values = self.key_buffer[:, :, :end], self.value_buffer[:, :, :end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.key_buffer = self.key_buffer.index_select(0, indices)
        self.value_buffer = self.value_buffer.index_select(0, indices)
        self.keys, self.values = self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]


class DecodeCache:
    """The cache of one decode batch for any decoder that transformers loads.

    Full-attention layers get reserved buffers; layers of another kind (sliding windows, linear attention) keep
    transformers' own growing ones. ``plain`` tells whether all are of the first kind.
    """

    def __init__(self, config: Any, capacity: int):
        self.cache = DynamicCache(config=config)
        layers: list[Any] = list(self.cache.layers)
        if not layers:  # a config that names no layer types: grown lazily by transformers
            layers = [ReservedLayer(capacity) for _ in range(config.num_hidden_layers)]
        layers = [ReservedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in layers]
        self.cache.layers = layers
        self.plain = all(isinstance(layer, ReservedLayer) for layer in layers)

    def select_rows(self, indices: torch.Tensor) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                layer.reorder_cache(indices)  # pyright: ignore[reportArgumentType]
