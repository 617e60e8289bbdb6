"""The decode batch for any decoder that transformers loads, through the model's own forward pass.

``engines.local`` uses it for models that ``engines.dense`` does not support: mixtures of experts, sliding windows,
other norms. Each lane owns an equal consecutive share of the rows, so that the LoRA product of all lanes is one batched
matrix product. A prompt is prefilled once and its cache is copied to its samples. Finished rows are removed once a
quarter of the grid is idle.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from retrain.engines.protocol import Finished
from retrain.engines.slots import IDLE_SHARE, BatchSequences, LaneRequest, SampleIndex
from retrain.engines.step import draw_tokens, needs_exact_sums, select_rows
from retrain.policy.arithmetic import FULL
from retrain.policy.backbone import backbone_of
from retrain.policy.base import BaseModel


class ReservedLayer(DynamicLayer):
    """Keys and values [rows, heads, capacity, head_dim] of one attention layer, filled from the left."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0
        self.key_buffer: torch.Tensor
        self.value_buffer: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        rows, heads, _, size = key_states.shape
        self.key_buffer = key_states.new_empty(rows, heads, self.capacity, size)
        self.value_buffer = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
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

    Full-attention layers get reserved buffers; other layers (sliding windows, linear attention) keep transformers'
    growing ones. ``plain``: all layers have full attention.
    """

    def __init__(self, config: Any, capacity: int):
        self.cache = DynamicCache(config=config)
        layers: list[Any] = list(self.cache.layers)
        if not layers:  # the config names no layer types, so transformers would add layers lazily
            layers = [ReservedLayer(capacity) for _ in range(config.num_hidden_layers)]
        # Subclasses, such as those of sliding windows, manage their length themselves.
        layers = [ReservedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in layers]
        self.cache.layers = layers
        self.plain = all(isinstance(layer, ReservedLayer) for layer in layers)

    def select_rows(self, indices: torch.Tensor) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)  # pyright: ignore[reportAttributeAccessIssue]
            else:
                layer.reorder_cache(indices)  # pyright: ignore[reportArgumentType]


class Grid:
    """A decode batch whose rows are ordered by lane, ``slots`` rows for each. It waits for the device every ``calls``
    tokens."""

    def __init__(self, base: BaseModel, requests: Sequence[LaneRequest], indices: Sequence[SampleIndex], calls: int):
        self.base, self.requests, self.sequences = base, requests, BatchSequences(base, requests, indices)
        self.calls = calls
        by_lane: dict[int, list[int]] = {lane: [] for lane in sorted({r.lane for r in self.sequences.requests})}
        for sequence, request in enumerate(self.sequences.requests):
            by_lane[request.lane].append(sequence)
        self.lanes, self.slots = list(by_lane.values()), max(map(len, by_lane.values()))
        self.max_tokens = max(request.max_tokens for request in self.sequences.requests)
        self.width = max(len(request.prompt_ids) for request in self.sequences.requests)
        self.backbone = None if base.dtype in FULL else backbone_of(base)
        self.cache = DecodeCache(base.model.config.get_text_config(), self.width + self.max_tokens)
        scratch = self.sequences.scratch
        self.sequence = np.array([i for lane in self.lanes for i in [*lane, *[scratch] * (self.slots - len(lane))]])
        self.rows = self.sequences.new_rows(self.sequence)
        self.rows.alive_R.copy_(torch.from_numpy(self.sequence != scratch))
        self.mask_RK: torch.Tensor

    def run(self, finished: Finished) -> None:
        logits_RV = self._prefill()
        for step in range(self.max_tokens):
            self._draw(logits_RV)
            if self._compact_or_finished(step):
                break
            logits_RV = self._forward(step)
        self._note_lengths()
        for request in dict.fromkeys(index.request for index in self.sequences.indices):
            finished(request, self.sequences.actions(request))

    def _prefill(self) -> torch.Tensor:
        # A lane with fewer sequences is padded with idle rows, which read the prompt of its first sequence.
        request_of = [
            [self.sequences.indices[i].request for i in [*lane, *[lane[0]] * (self.slots - len(lane))]]
            for lane in self.lanes
        ]
        distinct = [list(dict.fromkeys(lane)) for lane in request_of]
        share = max(map(len, distinct))
        order = [lane[min(i, len(lane) - 1)] for lane in distinct for i in range(share)]
        index_of = {request: k * share + i for k, lane in enumerate(distinct) for i, request in enumerate(lane)}
        device, prompts = self.base.device, [self.requests[request].prompt_ids for request in order]
        ids_PT = torch.tensor([[self.base.pad_id] * (self.width - len(p)) + list(p) for p in prompts], device=device)
        mask_PT = torch.tensor([[0] * (self.width - len(p)) + [1] * len(p) for p in prompts], device=device)
        # Positions count real tokens only: padding on the left does not shift them.
        logits_PV = self._logits(ids_PT, mask_PT, (mask_PT.long().cumsum(-1) - 1).clamp_min(0))
        source_R = torch.tensor([index_of[request] for lane in request_of for request in lane], device=device)
        self.cache.select_rows(source_R)
        columns = self.width + self.max_tokens
        self.mask_RK = torch.ones(len(self.sequence), columns, dtype=torch.bool, device=device)
        self.mask_RK[:, : self.width] = mask_PT.bool()[source_R]
        self.rows.position_R.copy_(self.mask_RK[:, : self.width].sum(1))  # where the completion begins
        return logits_PV[source_R]

    def _draw(self, logits_RV: torch.Tensor) -> None:
        idle_R = ~self.rows.alive_R
        self.sequences.reserve_draws(len(idle_R))
        draw_tokens(self.rows, self.sequences.sampled, logits_RV, needs_exact_sums(self.base.device))
        # Idle rows stay in the forward pass: any valid token will do.
        self.rows.token_R.masked_fill_(idle_R, self.base.pad_id)

    def _compact_or_finished(self, step: int) -> bool:
        """Return whether all sequences have ended, checked every ``calls`` steps. Remove idle rows once they are the
        share ``IDLE_SHARE`` of all rows."""
        if step % self.calls and step + 1 < self.max_tokens:
            return False
        alive = self.rows.alive_R.view(len(self.lanes), self.slots).cpu()
        busiest = int(alive.sum(1).max())
        if busiest == 0:
            return True
        if busiest > (1 - IDLE_SHARE) * self.slots:
            return False
        self._note_lengths()
        # Live rows of each lane first, in order; idle rows pad its share.
        order = torch.argsort((~alive).to(torch.int8), dim=1, stable=True)[:, :busiest]
        selected = (order + torch.arange(len(self.lanes)).unsqueeze(1) * self.slots).flatten()
        index = selected.to(self.base.device)
        self.cache.select_rows(index)
        self.rows, self.mask_RK = select_rows(self.rows, index), self.mask_RK[index]
        self.sequence, self.slots = self.sequence[selected.numpy()], busiest
        return False

    def _note_lengths(self) -> None:
        self.sequences.lengths[self.sequence] = self.rows.sampled_R.cpu().numpy() + 1

    def _forward(self, step: int) -> torch.Tensor:
        mask_RK = self.mask_RK[:, : self.width + step + 1]
        return self._logits(
            self.rows.token_R.unsqueeze(1),
            # transformers takes a mask of four dimensions as it is, and otherwise builds one for each kind of layer.
            mask_RK[:, None, None, :] if self.cache.plain else mask_RK,
            (self.rows.position_R + step).unsqueeze(1),
        )

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs |= {"past_key_values": self.cache.cache, "use_cache": True}
        # In half precision, use the update's output layer, whose logits are fp32: sampling and update round alike.
        if self.backbone is None or self.backbone.head is None or self.backbone.decoder is None:
            return self.base.model(**inputs, logits_to_keep=1).logits[:, -1]
        return self.backbone.head.logits(self.backbone.decoder(**inputs).last_hidden_state[:, -1])
