"""Packed micro-batches: prompts once per group, no padding, and attention over the sequences.

Only attention mixes tokens, so a micro-batch can be one row: each group's prompt, then the rest of each of its samples.
Queries, keys and values are spread to [sequences, longest] for causal attention, and its outputs are gathered again.
A prompt's hidden states do not depend on what follows, so this equals separate sequences, gradients included.

A model that does more with neighbouring tokens (a recurrent state, a short window) takes the padded layout: one row per
sequence, padding on the right, which causality makes harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch

from retrain.device import thread_values
from retrain.policy.fused import attention
from retrain.types import Sample


@dataclass(frozen=True)
class SharedPrefix:
    """Consecutive sequences [first, last) with one prefix, whose tokens stand at [start, start + width)."""

    first: int
    last: int
    start: int
    width: int


@dataclass
class Layout:
    """Token ids [rows, columns], their positions, and flat indices into them.

    ``rows_M``: index of the hidden state that predicts each action token, sequence after sequence. Packed layouts (one
    row) also have ``spread_SL``, the index of every token of every sequence (padding: any), ``home_N``, for every index
    one slot of ``spread_SL`` that reads it, and ``first_S``, where in ``rows_M`` each sequence begins.
    """

    ids_BL: torch.Tensor
    positions_BL: torch.Tensor
    rows_M: torch.Tensor
    spread_SL: torch.Tensor | None = None
    home_N: torch.Tensor | None = None
    first_S: torch.Tensor | None = None
    groups: tuple[SharedPrefix, ...] = ()

    def to(self, device: torch.device) -> Layout:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


def prefix_key(sample: Sample) -> bytes:
    return sample.token_ids[: sample.prefix].tobytes()


def predicting(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the states [M, H], of [rows, columns, H], that predict an action token."""
    return _RowSelection.apply(states.flatten(0, 1), layout)  # pyright: ignore[reportReturnType]


def packed_layout(samples: Sequence[Sample], device: torch.device, share: bool = True) -> Layout:
    """Return one row without each sample's last token, which predicts nothing; neighbours share an equal prefix."""
    longest = max(map(len, samples)) - 1
    spread = np.zeros((len(samples), longest), dtype=np.int64)
    ids, positions, rows, home = [], [], [], []
    groups: list[SharedPrefix] = []
    before, placed = None, 0
    for i, sample in enumerate(samples):
        width, end, key = sample.prefix, len(sample) - 1, prefix_key(sample)
        if not (share and key == before):
            groups.append(SharedPrefix(i, i + 1, placed, width))
            ids.append(sample.token_ids[:width])
            positions.append(np.arange(width))
            home.append(i * longest + np.arange(width))
            placed += width
        else:
            groups[-1] = replace(groups[-1], last=i + 1)
        before = key
        ids.append(sample.token_ids[width:end])
        positions.append(np.arange(width, end))
        home.append(i * longest + positions[-1])
        spread[i, :width] = groups[-1].start + np.arange(width)
        spread[i, width:end] = placed + np.arange(end - width)
        placed += end - width
        rows.append(spread[i, np.flatnonzero(sample.action_mask) - 1])
    return Layout(
        ids_BL=torch.from_numpy(np.concatenate(ids)).to(device)[None],
        positions_BL=torch.from_numpy(np.concatenate(positions)).to(device)[None],
        rows_M=torch.from_numpy(np.concatenate(rows)).to(device),
        spread_SL=torch.from_numpy(spread).to(device),
        home_N=torch.from_numpy(np.concatenate(home)).to(device),
        first_S=torch.tensor([0, *np.cumsum([len(row) for row in rows])[:-1]], device=device),
        groups=tuple(groups),
    )


def padded_layout(samples: Sequence[Sample], device: torch.device, pad_id: int) -> Layout:
    """Return one row per sample, without its last token, padded on the right."""
    longest = max(map(len, samples)) - 1
    ids = np.full((len(samples), longest), pad_id, dtype=np.int64)
    rows = []
    for i, sample in enumerate(samples):
        ids[i, : len(sample) - 1] = sample.token_ids[:-1]
        rows.append(i * longest + np.flatnonzero(sample.action_mask) - 1)
    return Layout(
        ids_BL=torch.from_numpy(ids).to(device),
        positions_BL=torch.arange(longest, device=device).expand(len(samples), -1),
        rows_M=torch.from_numpy(np.concatenate(rows)).to(device),
    )


# -- attention --------------------------------------------------------------------------------------------------


class ForwardMode(threading.local):
    """State of a thread's forward pass: in an update, its packed layout, the context in which layers run again."""

    in_update: bool = False
    layout: Layout | None = None
    recompute_context: Callable[[], AbstractContextManager[None]] | None = None


mode = ForwardMode()
NAME = "retrain_sdpa"


def update_mode(layout: Layout) -> AbstractContextManager[None]:
    """In this thread, the base's layers run as in an update, and attention reads its input by this layout."""
    return thread_values(mode, in_update=True, layout=None if layout.spread_SL is None else layout)


def register_attention() -> None:
    """Make ``NAME`` known to transformers: its own SDPA attention and masks, unless a layout is active."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if mode.layout is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        return _packed_attention(mode.layout, query, key, value, options.get("scaling")), None

    def masks(*args: Any, **options: Any) -> torch.Tensor | None:
        return sdpa_mask(*args, **options) if mode.layout is None else None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, masks)


def _packed_attention(
    layout: Layout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Apply causal attention to each sequence: query, key, value [1, heads, N, d] → [1, N, heads, d]."""
    q, k, v = (_Spread.apply(x[0].transpose(0, 1), layout).transpose(1, 2) for x in (query, key, value))  # pyright: ignore[reportOptionalMemberAccess]
    out = attention(q, k, v, scaling)
    return _Gather.apply(out.transpose(1, 2), layout)[None]  # pyright: ignore[reportOptionalSubscript]


class _Spread(torch.autograd.Function):
    """[N, heads, d] → [S, L, heads, d]. Copies of a prompt are summed in a fixed order: repeatable on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_NHD: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        assert layout.spread_SL is not None
        spread = x_NHD.index_select(0, layout.spread_SL.view(-1))
        return spread.view(*layout.spread_SL.shape, *x_NHD.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad_SLHD: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout = ctx.layout
        grad_NHD = grad_SLHD.flatten(0, 1).index_select(0, layout.home_N)
        for group in layout.groups:
            if group.last - group.first > 1:
                copies = grad_SLHD[group.first : group.last, : group.width]
                torch.sum(copies, 0, out=grad_NHD[group.start : group.start + group.width])
        return grad_NHD, None


class _RowSelection(torch.autograd.Function):
    """[N, H] → [M, H] at ``rows_M``. A group's samples all read the end of their prompt, summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, states_NH: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout, ctx.places = layout, len(states_NH)
        return states_NH.index_select(0, layout.rows_M)

    @staticmethod
    def backward(ctx: Any, grad_MH: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout = ctx.layout
        grad_NH = grad_MH.new_zeros(ctx.places, grad_MH.shape[1])
        grad_NH.index_copy_(0, layout.rows_M, grad_MH)
        for group in layout.groups:
            if group.last - group.first > 1:
                copies = grad_MH.index_select(0, layout.first_S[group.first : group.last])
                wide = copies.to(torch.promote_types(copies.dtype, torch.float32))
                grad_NH[group.start + group.width - 1] = reduce(torch.add, wide.unbind(0))
        return grad_NH, None


class _Gather(torch.autograd.Function):
    """[S, L, heads, d] → [N, heads, d], from one copy of every token."""

    @staticmethod
    def forward(ctx: Any, x_SLHD: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout, ctx.shape = layout, x_SLHD.shape
        assert layout.home_N is not None
        return x_SLHD.flatten(0, 1).index_select(0, layout.home_N)

    @staticmethod
    def backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_NHD.new_zeros(ctx.shape)
        grad.flatten(0, 1).index_copy_(0, ctx.layout.home_N, grad_NHD)
        return grad, None
