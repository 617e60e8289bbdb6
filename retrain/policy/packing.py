"""Packed micro-batches: each group's prompt is computed once, without padding, and attention sees whole sequences.

Only attention mixes tokens, so a micro-batch can be one row: each group's prompt, then the rest of each of its samples.
Queries, keys and values are spread to [sequences, longest] for causal attention, and its outputs are gathered again. A
prompt's hidden states do not depend on what follows, so this equals separate sequences, gradients included.

A model in which other layers mix tokens too (a recurrent state, a short window) takes the padded layout: one row per
sequence, padding on the right, which causality makes harmless.

A step that does not fit in memory is repeated with half the tokens in a micro-batch, down to one sequence at a time;
then decoder layers are recomputed in the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from retrain.device import free_cached_memory, is_out_of_memory
from retrain.errors import RunFailed
from retrain.policy.arithmetic import Context, Gradients, attention
from retrain.policy.base import MemoryPlan
from retrain.policy.head import Supports
from retrain.threads import thread_values
from retrain.types import Sample

S = TypeVar("S", bound=Sized)
T = TypeVar("T")


@dataclass(frozen=True)
class SharedPrefix:
    """Consecutive sequences with the same prefix: numbers ``first`` to ``last`` − 1."""

    first: int
    last: int
    start: int  # Index of the prefix in the packed row
    width: int  # Tokens of the prefix


@dataclass
class Layout:
    """Token ids [rows, columns], their positions, and indices into the flattened table of hidden states."""

    ids_BL: Tensor
    positions_BL: Tensor
    rows_M: Tensor  # Index of the hidden state that predicts each action token, sequence after sequence

    def to(self, device: torch.device) -> Layout:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass
class PackedLayout(Layout):
    """A layout with one row of N tokens for S sequences."""

    spread_SL: Tensor  # Index in the row of every token of every sequence (padding: any)
    home_N: Tensor  # Index in the flattened ``spread_SL`` of one copy of every token of the row
    first_S: Tensor  # Index in ``rows_M`` at which each sequence begins
    shared: list[SharedPrefix]


def prefix_key(sample: Sample) -> bytes:
    return sample.token_ids[: sample.prefix].tobytes()


def with_prompt(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """Return the sample with ``prompt_ids`` in place of its prompt; of its optional arrays only ``support`` is kept."""
    prefix, length = sample.prefix, len(prompt_ids)

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(length, fill, values.dtype), values[prefix:]])

    return Sample(
        token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int64), sample.token_ids[prefix:]]),
        action_mask=moved(sample.action_mask, False),
        logprobs=moved(sample.logprobs, 0.0),
        versions=moved(sample.versions, -1),
        advantages=moved(sample.advantages, 0.0),
        loss_mask=moved(sample.loss_mask, False),
        support=sample.support,
    )


def predicting(states: Tensor, layout: Layout) -> Tensor:
    """Select from ``states`` [rows, columns, H] those [M, H] that predict the action tokens."""
    return _RowSelection.apply(states.flatten(0, 1), layout)  # pyright: ignore[reportReturnType]


def packed_layout(samples: Sequence[Sample], device: torch.device, share: bool = True) -> PackedLayout:
    """Return all samples in one row, each without its last token, which predicts nothing. ``share``: neighbours with an
    equal prefix share one copy of it."""
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
        # The hidden state of the token before predicts an action token.
        rows.append(spread[i, np.flatnonzero(sample.action_mask) - 1])
    return PackedLayout(
        ids_BL=torch.from_numpy(np.concatenate(ids)).to(device)[None],
        positions_BL=torch.from_numpy(np.concatenate(positions)).to(device)[None],
        rows_M=torch.from_numpy(np.concatenate(rows)).to(device),
        spread_SL=torch.from_numpy(spread).to(device),
        home_N=torch.from_numpy(np.concatenate(home)).to(device),
        first_S=torch.tensor([0, *np.cumsum([len(row) for row in rows])[:-1]], device=device),
        shared=[group for group in groups if group.last - group.first > 1],
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


# -- micro-batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of some samples: inputs of the model, and tables over their action tokens for the loss.

    Tables [B, T] have a row for each sample, with its action tokens from the left; the padding after them is 0 or
    False. For example, where the longest sample has four action tokens, a sample with three, of which the last does not
    train, has the row 1 1 1 0 in ``action_BT`` and 1 1 0 0 in ``loss_mask_BT``. Floats have the base's dtype, float32
    at least.
    """

    layout: Layout
    targets_M: Tensor  # int64 [M]: the action tokens, sample after sample
    action_BT: Tensor  # bool
    loss_mask_BT: Tensor  # bool: action tokens that train
    advantages_BT: Tensor
    sampler_logprobs_BT: Tensor  # nats
    supports: Supports | None = None  # None where sampling was not truncated
    old_logprobs_BT: Tensor | None = None  # nats, before the first of several updates of a batch
    values_BT: Tensor | None = None  # The critic's values before the update
    value_targets_BT: Tensor | None = None  # Targets of the critic's values
    policy_weights_BT: Tensor | None = None  # Factors of the policy loss, 0 for rejected tokens

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: part.to(device) for name, part in vars(self).items() if part is not None}
        return MicroBatch(**moved)


def split_microbatches(samples: Sequence[Sample], token_budget: int, *, packed: bool = False) -> list[list[int]]:
    """Return the samples' indices in micro-batches of at most ``token_budget`` tokens, or of one longer sample.

    Without ``packed``, padding counts and samples are sorted by length. With it, a prefix counts once for neighbours
    that share it, and groups stay together as far as they fit. The order depends on prefixes and lengths only.
    """
    keys = [prefix_key(sample) for sample in samples]
    batches: list[list[int]] = []
    prefix = rest = used = 0
    for i in _packed_order(samples, keys) if packed else sorted(range(len(samples)), key=lambda i: len(samples[i])):
        width = samples[i].prefix
        length = len(samples[i]) - width
        shared = packed and batches and keys[i] == keys[batches[-1][-1]]
        grown = used + length + (0 if shared else width)
        if not packed and batches:
            # Padding makes every row as long as the longest prefix plus the longest rest.
            grown = (len(batches[-1]) + 1) * (max(prefix, width) + max(rest, length))
        if batches and grown <= token_budget:
            batches[-1].append(i)
            prefix, rest, used = max(prefix, width), max(rest, length), grown
        else:
            batches.append([i])
            prefix, rest, used = width, length, width + length
    return batches


def _packed_order(samples: Sequence[Sample], keys: Sequence[bytes]) -> list[int]:
    groups: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    sorted_groups = (sorted(group, key=lambda i: len(samples[i])) for group in groups.values())
    return [i for group in sorted(sorted_groups, key=lambda group: len(samples[group[-1]])) for i in group]


def optional_table(samples: Sequence[Sample], name: str, shape: tuple[int, int], real: type) -> Tensor | None:
    """Return the array ``name`` of all samples over their action tokens [B, T]; None if a sample does not have it."""
    arrays = [getattr(sample, name) for sample in samples]
    if any(array is None for array in arrays):
        return None
    table = np.zeros(shape, dtype=real)
    for row, sample, array in zip(table, samples, arrays, strict=True):
        row[: int(sample.action_mask.sum())] = array[sample.action_mask]
    return torch.from_numpy(table)


def stacked_supports(samples: Sequence[Sample]) -> Supports | None:
    """Return the supports of all action tokens, None if no sample has supports. Raises ValueError if only some samples
    have them."""
    supports = [sample.support for sample in samples if sample.support is not None]
    if not supports:
        return None
    if len(supports) < len(samples):
        raise ValueError("some samples were sampled from truncated distributions and some were not")
    counts_M = np.concatenate([np.diff(support.offsets) for support in supports])
    rows_K = np.repeat(np.arange(len(counts_M)), counts_M)
    ids_K = np.concatenate([support.ids for support in supports]).astype(np.int64)
    offsets = np.concatenate([[0], counts_M.cumsum()])
    return Supports(torch.from_numpy(rows_K), torch.from_numpy(ids_K), offsets.tolist())


class BudgetState(TypedDict):
    tokens: int
    planned: bool
    learnt: bool
    checkpointing: bool


@dataclass
class Budget:
    """The size of micro-batches. It shrinks when memory runs out."""

    tokens: int  # Most tokens of a micro-batch
    checkpointing: bool = False  # Whether layers are computed again in the backward pass
    learnt: bool = False  # Whether memory has run out
    plan: MemoryPlan | None = None  # None where the user has set the tokens
    notes: list[str] = field(default_factory=list)  # New lines for the run's log
    noted: set[str] = field(default_factory=set)

    def note(self, *lines: str) -> None:
        self.notes += [line for line in lines if line not in self.noted]
        self.noted.update(lines)

    def take_notes(self) -> list[str]:
        taken, self.notes = self.notes, []
        return taken

    def fit(
        self,
        samples: Sequence[Sample],
        split: Callable[[], Sequence[S]],
        compute: Callable[[Sequence[S]], T],
        recomputes: bool = False,
    ) -> T:
        """Return ``compute(split())``. When memory runs out, call ``shrink`` and try again.

        If a single sample does not fit, the error is raised. With ``recomputes``, a single sample is tried once more
        with layers recomputed in the backward pass; if that fails too, RunFailed is raised.
        """
        while True:
            parts = split()
            sizes = [len(part) for part in parts]
            try:
                return compute(parts)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or (max(sizes) == 1 and not recomputes):
                    raise
                reason = str(error)  # the error itself would keep every tensor of the failed pass in memory
            free_cached_memory()
            self.shrink(sizes, [len(sample) for sample in samples], reason)

    def shrink(self, sizes: Sequence[int], lengths: Sequence[int], reason: str) -> None:
        """Halve the tokens of micro-batches after micro-batches of ``sizes`` sequences did not fit. If each had a
        single sequence, recompute layers in the backward pass from now on. ``lengths``: tokens of each sequence. Raises
        RunFailed if layers are recomputed already."""
        # CUDA's messages have paragraphs of advice.
        summary = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
        if max(sizes) > 1:
            self.tokens = max(1, min(self.tokens, sum(lengths)) // 2)
            self.note(f"out of memory: the step is made again with {self.tokens} tokens in a micro-batch ({summary})")
        elif not self.checkpointing:
            self.checkpointing = True
            self.note(
                f"out of memory with one sequence at a time: layers are now computed twice instead of kept ({summary})"
            )
        else:
            raise RunFailed(
                f"one sequence of {max(lengths)} tokens does not fit in memory, even with layers computed twice: lower "
                f"[training] max_tokens or [model] lora_rank, or take a smaller model ({summary})"
            )
        self.learnt = True

    def state(self) -> BudgetState:
        return {
            "tokens": self.tokens,
            "planned": self.plan is not None,
            "learnt": self.learnt,
            "checkpointing": self.checkpointing,
        }

    def restore(self, state: BudgetState) -> None:
        """Restore the state from a checkpoint. A planned number of tokens is kept if it fits on this device. If memory
        had run out, recomputation is restored too, and a number that the user has set is at most the checkpoint's."""
        before = state["tokens"]
        # Another budget cuts micro-batches elsewhere, which rounds differently: a resumed run keeps the old one if it
        # fits.
        if self.plan is not None and state["planned"]:
            self.tokens = self.plan.kept_micro_batch_tokens(before)
            if self.tokens != before:
                self.note(
                    f"micro-batches of {before} tokens do not fit in this device's memory: they have {self.tokens} "
                    "from now on, so what follows is rounded differently"
                )
        elif state["learnt"]:
            self.tokens = min(self.tokens, before)
        if state["learnt"]:
            self.checkpointing, self.learnt = state["checkpointing"], True


# -- attention --------------------------------------------------------------------------------------------------


class ForwardMode(threading.local):
    """State of a thread's forward pass: whether it is part of an update, the layout of its packed row, and the context
    in which layers are recomputed."""

    in_update: bool = False
    layout: PackedLayout | None = None
    recompute_context: Callable[[], AbstractContextManager[None]] | None = None


mode = ForwardMode()
NAME = "retrain_sdpa"


def update_mode(layout: Layout) -> AbstractContextManager[None]:
    """Run the base's layers as in an update, in this thread, with attention over the sequences of ``layout``."""
    return thread_values(mode, in_update=True, layout=layout if isinstance(layout, PackedLayout) else None)


def register_attention() -> None:
    """Register the attention function ``NAME`` in transformers. It attends within the sequences of the thread's packed
    layout; without a layout it is transformers' SDPA with its masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if mode.layout is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        return _packed_attention(mode.layout, query, key, value, options.get("scaling")), None

    def masks(*args: Any, **options: Any) -> Tensor | None:
        return sdpa_mask(*args, **options) if mode.layout is None else None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, masks)


def _packed_attention(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Apply causal attention to each sequence: query, key, value [1, heads, N, d] → [1, N, heads, d]."""
    q, k, v = (_Spread.apply(x[0].transpose(0, 1), layout).transpose(1, 2) for x in (query, key, value))  # pyright: ignore[reportOptionalMemberAccess]
    out = attention(q, k, v, scaling)
    return _Gather.apply(out.transpose(1, 2), layout)[None]  # pyright: ignore[reportOptionalSubscript]


class LayoutContext(Context):
    layout: PackedLayout


class _Spread(torch.autograd.Function):
    """Copies the tokens of a packed row [N, heads, d] to their sequences [S, L, heads, d]. The gradients of a prompt's
    copies are summed in a fixed order."""

    @staticmethod
    def forward(ctx: LayoutContext, x_NHD: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout = layout
        spread = x_NHD.index_select(0, layout.spread_SL.view(-1))
        return spread.view(*layout.spread_SL.shape, *x_NHD.shape[1:])

    @staticmethod
    def backward(ctx: LayoutContext, grad_SLHD: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout = ctx.layout
        grad_NHD = grad_SLHD.flatten(0, 1).index_select(0, layout.home_N)
        for group in layout.shared:
            copies = grad_SLHD[group.first : group.last, : group.width]
            # Not index_add_, whose atomic additions on a GPU come in any order and round differently every time.
            torch.sum(copies, 0, out=grad_NHD[group.start : group.start + group.width])
        return grad_NHD, None


class SelectionContext(Context):
    layout: Layout


class _RowSelection(torch.autograd.Function):
    """Selects the rows ``rows_M`` of [N, H]. A group's samples share the last row of their prompt, whose gradients are
    summed in a fixed order."""

    @staticmethod
    def forward(ctx: SelectionContext, states_NH: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.shape = layout, states_NH.shape
        return states_NH.index_select(0, layout.rows_M)

    @staticmethod
    def backward(ctx: SelectionContext, grad_MH: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        layout = ctx.layout
        grad_NH = grad_MH.new_zeros(ctx.shape)
        grad_NH.index_copy_(0, layout.rows_M, grad_MH)
        if isinstance(layout, PackedLayout):
            # Samples of a group share the row that predicts their first token, and index_copy_ has kept the gradient of
            # only one of them.
            for group in layout.shared:
                copies = grad_MH.index_select(0, layout.first_S[group.first : group.last])
                wide = copies.to(torch.promote_types(copies.dtype, torch.float32))
                grad_NH[group.start + group.width - 1] = reduce(torch.add, wide.unbind(0))
        return grad_NH, None


class _Gather(torch.autograd.Function):
    """Selects one copy of every token: [S, L, heads, d] to [N, heads, d]."""

    @staticmethod
    def forward(ctx: LayoutContext, x_SLHD: Tensor, layout: PackedLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, x_SLHD.shape
        return x_SLHD.flatten(0, 1).index_select(0, layout.home_N)

    @staticmethod
    def backward(ctx: LayoutContext, grad_NHD: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_NHD.new_zeros(ctx.shape)
        grad.flatten(0, 1).index_copy_(0, ctx.layout.home_N, grad_NHD)
        return grad, None
