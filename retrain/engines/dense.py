"""Decodes dense models (Llama, Mistral, Qwen2, Qwen3) by plain matrix products; ``engines.local`` calls it.

A decode step through transformers' modules spends more time on overhead than on matrix products: it makes a cache
object per layer, repeats keys and values for grouped queries, and computes one product per projection. Here projections
with the same input are fused into one product (their weights become views of one matrix), grouped queries share one
read of their keys, and the cache is written in place at each row's position. ``engines.step`` has the arithmetic.

A single adapter on a CPU in full precision is merged into a copy of the weights for one ``sample`` call. Otherwise the
LoRA products of all lanes are computed as one batched product (see ``policy.lora``). Weights are never merged in
bfloat16, which would round most of a small ΔW away. On a CPU, larger models are read from a copy whose layout suits
products of few rows (``policy.arithmetic.packed``); this copy is also made for one call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from retrain.engines.step import (
    Block,
    DecodeSettings,
    Frame,
    FusedLinear,
    Rows,
    SampledTokens,
    StepPlan,
    block_end,
    compiled_decode_steps,
    decode_steps,
    logits,
    needs_exact_sums,
    product,
    rotated,
)
from retrain.policy.arithmetic import FULL, causal_attention, fp32_product, packed, rms
from retrain.policy.base import BaseModel
from retrain.policy.lora import LaneLinear, Lanes, LoraWeights
from retrain.policy.sharded import ShardedWeights
from retrain.types import PolicyRef

Added = tuple[torch.Tensor | None, torch.Tensor | None]  # LoRA factors `a` and `b` of a fused product
SequenceName = tuple[int | str, ...]


class Projection:
    """Linear layers with the same input as one matrix product. ``weight`` [Σ out, in]: their concatenated weights;
    ``sizes``: number of outputs of each layer."""

    def __init__(self, base: BaseModel, layers: Sequence[nn.Module]):
        linears = [layer.base if isinstance(layer, LaneLinear) else layer for layer in layers]
        self.names = tuple(layer.name if isinstance(layer, LaneLinear) else None for layer in layers)
        self.sizes = [int(linear.out_features) for linear in linears]  # pyright: ignore[reportArgumentType]
        self.dtype, self.device, self._linears = base.dtype, base.device, linears
        self._joined = None if base.is_streamed else _fused(base, [linear.weight for linear in linears])  # pyright: ignore[reportArgumentType]
        biases = [linear.bias for linear in linears]
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [
                    torch.zeros(size, dtype=self.dtype, device=self.device) if bias is None else bias.detach()  # pyright: ignore[reportCallIssue]
                    for bias, size in zip(biases, self.sizes, strict=True)
                ]
            )

    @property
    def weight(self) -> torch.Tensor:
        if self._joined is not None:
            return self._joined
        # Streamed weights exist only while they are read, so they are concatenated again at every call.
        weights: list[Any] = [linear.weight.detach() for linear in self._linears]  # pyright: ignore[reportCallIssue]
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    def with_adapters(self, adapters: Sequence[LoraWeights], merge: bool, pack: bool) -> FusedLinear:
        """Return the fused layer with these adapters. With ``merge``, which needs a single adapter, the adapter is
        added to a copy of the weight; without, all adapters stay LoRA factors. ``pack``: copy the weight into a layout
        that is fast for few rows."""
        if merge and adapters and any(name is not None for name in self.names):
            return FusedLinear(self._merged(adapters[0], pack), self.bias, None, None)
        return FusedLinear(packed(self.weight) if pack else self.weight, self.bias, *self.factors(adapters))

    def factors(self, adapters: Sequence[LoraWeights]) -> Added:
        used = [name for name in self.names if name is not None]
        if not (used and adapters):
            return None, None
        rank, dtype, lanes = max(adapter.rank for adapter in adapters), self.dtype, len(adapters)
        a = torch.cat([Lanes.padded([ad.A[name].t() for ad in adapters], rank, 1) for name in used], dim=2).to(dtype)
        b = torch.zeros(lanes, a.shape[2], sum(self.sizes), dtype=dtype, device=self.device)
        begin = row = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name is not None:
                # Block-diagonal: each layer reads its own r columns of x·A, so that one product serves all. Scaled in
                # fp32; the assignment rounds once.
                factor = Lanes.padded([ad.B[name].t() * ad.scale for ad in adapters], rank, 0)
                b[:, row : row + rank, begin : begin + size] = factor
                row += rank
            begin += size
        return a.contiguous(), b

    def _merged(self, adapter: LoraWeights, pack: bool) -> torch.Tensor:
        # An unpacked weight is stored as [in, out], which multiplies few rows faster.
        merged, begin = self.weight.clone().t() if pack else self.weight.t().contiguous(), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name is not None:
                a, b = adapter.A[name].to(merged.dtype), adapter.B[name].to(merged.dtype)
                merged[:, begin : begin + size].addmm_(a.t(), b.t(), alpha=adapter.scale)
            begin += size
        return packed(merged.t()) if pack else merged.t()


class Layer:
    def __init__(self, base: BaseModel, module: Any, heads: int, kv_heads: int):
        attention, mlp = module.self_attn, module.mlp
        self.qkv = Projection(base, [attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Projection(base, [attention.o_proj])
        self.gate_up = Projection(base, [mlp.gate_proj, mlp.up_proj])
        self.down = Projection(base, [mlp.down_proj])
        self.norm_in, self.norm_mlp = module.input_layernorm.weight, module.post_attention_layernorm.weight
        self.head_norms: torch.Tensor | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = torch.stack([attention.q_norm.weight] * heads + [attention.k_norm.weight] * kv_heads)

    @property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        return self.qkv, self.out, self.gate_up, self.down

    def with_adapters(self, adapters: Sequence[LoraWeights], merge: bool, pack: bool) -> Block:
        qkv, out, gate_up, down = (projection.with_adapters(adapters, merge, pack) for projection in self.projections)
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)

    def with_factors(self, added: Sequence[Added]) -> Block:
        pairs = zip(self.projections, added, strict=True)
        qkv, out, gate_up, down = (
            FusedLinear(projection.weight, projection.bias, a, b) for projection, (a, b) in pairs
        )
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)


class StreamedBlocks:
    """Decoder blocks whose weights are dequantised or gathered one layer at a time. If ``merged`` has an adapter, it is
    added to the weights; otherwise projection j of layer i gets the LoRA factors ``added[i][j]``."""

    def __init__(
        self,
        layers: Sequence[Layer],
        sharded: ShardedWeights | None,
        added: Sequence[Sequence[Added]],
        merged: Sequence[LoraWeights] = (),
    ):
        self.layers, self.sharded, self.added, self.merged = layers, sharded, added, merged

    def __iter__(self) -> Iterator[Block]:
        for index, (layer, added) in enumerate(zip(self.layers, self.added, strict=True)):
            if self.sharded is not None:
                self.sharded.layer(index)
            yield layer.with_adapters(self.merged, True, False) if self.merged else layer.with_factors(added)

    def of_lanes(self, select: Callable[[torch.Tensor | None], torch.Tensor | None]) -> StreamedBlocks:
        added = [[(select(a), select(b)) for a, b in factors] for factors in self.added]
        return StreamedBlocks(self.layers, self.sharded, added, self.merged)


Blocks = list[Block] | StreamedBlocks  # The blocks of a decoder, in their order


class CachedBatch(NamedTuple):
    """Keys and values [sequences, kv_heads, columns, head_dim] per layer, of sequences that ended in the same step."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (*self.keys, *self.values))


class CachedSequence(NamedTuple):
    batch: CachedBatch
    row: int
    token_ids: tuple[int, ...]  # Tokens whose keys and values are in the row's first columns


class KVCache:
    """Keys and values [rows, heads, capacity, head_dim] of every layer; each row is filled from the left."""

    def __init__(self, decoder: DenseDecoder, rows: int, capacity: int):
        shape = (rows, decoder.frame.kv_heads, capacity, decoder.frame.head_dim)
        options = {"dtype": decoder.dtype, "device": decoder.device}
        # Zeros: idle rows attend to columns that were never written, and NaN in them would spread through sums.
        self.keys = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.values = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.capacity = capacity

    def select(self, rows: torch.Tensor) -> None:
        """Replace row i by row ``rows[i]``; indices may repeat. Copies one layer at a time to save memory."""
        for states in (self.keys, self.values):
            for layer in range(len(states)):
                states[layer] = states[layer].index_select(0, rows)

    def clear(self, rows: torch.Tensor) -> None:
        for states in (*self.keys, *self.values):
            states.masked_fill_(rows.view(-1, 1, 1, 1), 0)

    def copy(self, rows: torch.Tensor, columns: int) -> CachedBatch:
        keys, values = ([states[rows, :, :columns] for states in layers] for layers in (self.keys, self.values))
        return CachedBatch(keys, values)

    def restore(self, rows: torch.Tensor, sequences: Sequence[CachedSequence]) -> None:
        """Fill the first columns of row ``rows[i]`` with ``sequences[i]``. All sequences are from the same
        ``CachedBatch``."""
        batch = sequences[0].batch
        sources = torch.tensor([sequence.row for sequence in sequences], device=rows.device)
        columns = min(max(len(sequence.token_ids) for sequence in sequences), self.capacity)
        for layers, cached_layers in ((self.keys, batch.keys), (self.values, batch.values)):
            for states, cached in zip(layers, cached_layers, strict=True):
                states[rows, :, :columns] = cached[sources, :, :columns]

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the first T columns of these rows of a layer with states [rows, heads, T, head_dim]."""
        width = keys.shape[2]
        self.keys[layer][rows, :, :width] = keys
        self.values[layer][rows, :, :width] = values


class SequenceCache:
    """Keys and values of sequences that may continue in a later request (the next turn of an episode), by policy and
    name. Holds up to ``limit`` bytes and evicts the oldest sequence first; thread-safe."""

    def __init__(self, limit: int):
        self.limit = limit
        self._entries: OrderedDict[tuple[PolicyRef, SequenceName], CachedSequence] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, ref: PolicyRef, named: Sequence[tuple[SequenceName, Sequence[int]]], batch: CachedBatch) -> None:
        """Add the rows of a batch; ``named``: name and tokens of each row. Does nothing if a row exceeds ``limit``."""
        share = batch.bytes // max(1, len(named))
        if share > self.limit:
            return
        with self._lock:
            for row, (name, token_ids) in enumerate(named):
                self._pop((ref, name))
                while self._entries and self._bytes + share > self.limit:
                    self._pop(next(iter(self._entries)))
                self._entries[ref, name] = CachedSequence(batch, row, tuple(token_ids))
                self._bytes += share

    def take(self, ref: PolicyRef, name: SequenceName, prompt_ids: Sequence[int]) -> CachedSequence | None:
        """Remove the sequence of this name. Return it if the prompt begins with its tokens and is longer, else None."""
        with self._lock:
            sequence = self._pop((ref, name))
        if sequence is None:
            return None
        length = len(sequence.token_ids)
        # At least one token must be new: its logits are what the first draw needs.
        return sequence if length < len(prompt_ids) and tuple(prompt_ids[:length]) == sequence.token_ids else None

    def drop(self, ref: PolicyRef, name: SequenceName) -> None:
        with self._lock:
            self._pop((ref, name))

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _pop(self, key: tuple[PolicyRef, SequenceName]) -> CachedSequence | None:
        sequence = self._entries.pop(key, None)
        if sequence is not None:
            # A batch's tensors are freed with its last sequence; each sequence accounts for an equal share.
            self._bytes -= sequence.batch.bytes // len(sequence.batch.keys[0])
        return sequence


class DenseDecoder:
    """A dense decoder: the weights of a base's modules, and the forward pass for sampling (no gradients)."""

    def __init__(self, base: BaseModel, settings: DecodeSettings):
        model, config, self.settings = base.model, base.model.config, settings
        body, heads, kv_heads = model.model, config.num_attention_heads, config.num_key_value_heads
        attention = body.layers[0].self_attn
        self.base, self.device, self.dtype, self.rotary = base, base.device, base.dtype, body.rotary_emb
        self.sharded, self.is_streamed = base.sharded, base.is_streamed
        self._gather_ends()
        self.layers = [Layer(base, module, heads, kv_heads) for module in body.layers]
        # Merging in half precision would round a small ΔW away. Of sharded weights, only one layer is copied at a time.
        self.merges = (base.fits_copy or base.sharded is not None) and base.device.type == "cpu" and base.dtype in FULL
        self.packs_weights = base.packs_weights
        none = torch.empty(0, device=self.device, dtype=self.dtype)
        self.frame = Frame(
            embedding=body.embed_tokens.weight,
            norm=body.norm.weight,
            head=FusedLinear(base.head_weight, model.lm_head.bias, None, None),
            cos=none,
            sin=none,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=int(attention.head_dim),
            eps=float(body.norm.variance_epsilon),
            scaling=float(attention.scaling),
            activation=config.hidden_act,
        )

    def _gather_ends(self) -> None:
        if self.sharded is not None:
            self.sharded.ends()

    def blocks(self, adapters: Sequence[LoraWeights]) -> Blocks:
        merge = self.merges and len(adapters) == 1
        with torch.no_grad():
            if self.is_streamed:
                added = [[projection.factors(adapters) for projection in layer.projections] for layer in self.layers]
                return StreamedBlocks(self.layers, self.sharded, added, adapters if merge else ())
            return [layer.with_adapters(adapters, merge, self.packs_weights) for layer in self.layers]

    @staticmethod
    def of_lanes(blocks: Blocks, places: Sequence[int], lanes: int) -> Blocks:
        """Return the blocks with the LoRA factors of some lanes only. ``places``: ascending indices of these lanes
        among the ``lanes`` lanes of ``blocks``."""
        if len(places) == lanes:
            return blocks
        first, last = places[0], places[-1] + 1
        is_contiguous = list(places) == list(range(first, last))

        def select(table: torch.Tensor | None) -> torch.Tensor | None:
            if table is None:
                return None
            return table[slice(first, last) if is_contiguous else torch.tensor(places, device=table.device)]

        def in_lanes(layer: FusedLinear) -> FusedLinear:
            return layer if layer.a is None else layer._replace(a=select(layer.a), b=select(layer.b))

        if isinstance(blocks, StreamedBlocks):
            return blocks.of_lanes(select)
        return [
            block._replace(
                qkv=in_lanes(block.qkv),
                out=in_lanes(block.out),
                gate_up=in_lanes(block.gate_up),
                down=in_lanes(block.down),
            )
            for block in blocks
        ]

    def frame_of(self, length: int) -> Frame:
        """Return the frame with the rotary angles of at least ``length`` positions."""
        if len(self.frame.cos) < length:
            positions = torch.arange(max(length, 256), device=self.device).unsqueeze(0)
            # transformers' rotary embedding reads only the device and dtype of its first argument.
            cos, sin = self.rotary(torch.empty(0, device=self.device, dtype=self.dtype), positions)
            half = self.frame.head_dim // 2
            self.frame = self.frame._replace(cos=cos[0], sin=torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
        return self.frame

    @property
    def prefill_tokens(self) -> int:
        """Return the number of tokens whose activations in a prefill fill ``settings.prefill_bytes``."""
        hidden, layer = self.frame.embedding.shape[1], self.layers[0]
        numbers = 4 * hidden + 3 * sum(layer.qkv.sizes) + 2 * sum(layer.gate_up.sizes)
        return self.settings.prefill_bytes // (numbers * self.dtype.itemsize)

    def prefill(
        self,
        ids_RT: torch.Tensor,
        last_R: torch.Tensor,
        blocks: Blocks,
        kv_cache: KVCache,
        rows_S: torch.Tensor,
        source_S: torch.Tensor,
    ) -> torch.Tensor:
        """Prefill right-padded prompts (see ``hidden``); return the logits [R, V] at column ``last_R`` of each
        prompt."""
        x_RTH = self.hidden(ids_RT, blocks, kv_cache, rows_S, source_S)
        return logits(self.frame, x_RTH[torch.arange(len(ids_RT), device=self.device), last_R])

    def hidden(
        self, ids_RT: torch.Tensor, blocks: Blocks, kv_cache: KVCache, rows_S: torch.Tensor, source_S: torch.Tensor
    ) -> torch.Tensor:
        """Run the right-padded prompts ``ids_RT`` through all blocks; return the last block's output [R, T, H].

        The keys and values of prompt ``source_S[i]`` are written to row ``rows_S[i]`` of the cache. No padding mask is
        needed, because causal attention ignores everything to the right of a token.
        """
        rows, width = ids_RT.shape
        self._gather_ends()
        frame = self.frame_of(width)
        cos, sin = frame.cos[:width].unsqueeze(1), frame.sin[:width].unsqueeze(1)
        x = F.embedding(ids_RT.reshape(-1), frame.embedding)
        for layer, block in enumerate(blocks):
            qkv = product(rms(x, block.norm_in, frame.eps), block.qkv).view(rows, width, -1, frame.head_dim)
            qk, v = qkv.split([frame.heads + frame.kv_heads, frame.kv_heads], 2)
            q, k = (
                rotated(frame, block.head_norms, qk, cos, sin).transpose(1, 2).split([frame.heads, frame.kv_heads], 1)
            )
            v = v.transpose(1, 2)
            kv_cache.write(layer, rows_S, k[source_S], v[source_S])
            attended = causal_attention(q, k, v, frame.scaling)
            x = block_end(frame, block, x, attended.transpose(1, 2).reshape(rows * width, -1))
        return x.view(rows, width, -1)

    def extend(
        self,
        ids_RT: torch.Tensor,
        start_R: torch.Tensor,
        last_R: torch.Tensor,
        blocks: Blocks,
        kv_cache: KVCache,
        rows: Sequence[int],
        real_R: torch.Tensor,
    ) -> torch.Tensor:
        """Append tokens, padded on the right, to rows whose first ``start_R`` columns are cached; return the logits
        [R, V] at each row's token ``last_R``. Rows whose ``real_R`` is false are filler and are not written to the
        cache."""
        count, width = ids_RT.shape
        self._gather_ends()
        rows_R = torch.tensor(rows, device=self.device)
        is_contiguous = list(rows) == list(range(rows[0], rows[0] + count))
        from_rows = slice(rows[0], rows[0] + count) if is_contiguous else rows_R  # a slice copies nothing
        step_T = torch.arange(width, device=self.device)
        columns = int((start_R + last_R).max()) + 1
        # Padding would index beyond the table of angles.
        position_RT = (start_R.unsqueeze(1) + step_T).clamp_(max=columns - 1)
        frame = self.frame_of(columns)
        cos, sin = frame.cos[position_RT].unsqueeze(2), frame.sin[position_RT].unsqueeze(2)
        seen_R1TK = (torch.arange(columns, device=self.device) <= position_RT.unsqueeze(-1)).unsqueeze(1)
        written_RT = (step_T <= last_R.unsqueeze(1)) & real_R.unsqueeze(1)
        into_N, at_N = rows_R.unsqueeze(1).expand(count, width)[written_RT], position_RT[written_RT]
        x = F.embedding(ids_RT.reshape(-1), frame.embedding)
        for layer, block in enumerate(blocks):
            keys, values = kv_cache.keys[layer], kv_cache.values[layer]
            qkv = product(rms(x, block.norm_in, frame.eps), block.qkv).view(count, width, -1, frame.head_dim)
            qk, v = qkv.split([frame.heads + frame.kv_heads, frame.kv_heads], 2)
            q, k = rotated(frame, block.head_norms, qk, cos, sin).split([frame.heads, frame.kv_heads], 2)
            keys[into_N, :, at_N], values[into_N, :, at_N] = k[written_RT], v[written_RT]
            before = (keys[from_rows, :, :columns], values[from_rows, :, :columns])
            attended = causal_attention(q.transpose(1, 2), *before, frame.scaling, seen_R1TK)
            x = block_end(frame, block, x, attended.transpose(1, 2).reshape(count * width, -1))
        x_RTH = x.view(count, width, -1)
        return logits(frame, x_RTH[torch.arange(count, device=self.device), last_R])

    def output(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states that the final norm has normalised."""
        return fp32_product(hidden_NH, self.frame.head.weight, self.frame.head.bias)

    def decode_steps(
        self, blocks: Blocks, rows: Rows, sampled: SampledTokens, kv_cache: KVCache, plan: StepPlan
    ) -> int:
        self._gather_ends()
        compiled = self.settings.compiled and not self.is_streamed
        run: Callable[..., int] = compiled_decode_steps() if compiled else decode_steps
        frame = self.frame_of(kv_cache.capacity)
        return run(frame, blocks, rows, sampled, kv_cache.keys, kv_cache.values, plan, self.exact_sums)

    @property
    def exact_sums(self) -> bool:
        return needs_exact_sums(self.device)


def _fused(base: BaseModel, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weights concatenated by rows. The originals become views of the result, until the base is released."""
    if len(weights) == 1:
        return weights[0].detach()
    joined = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = joined[begin : begin + weight.shape[0]]
        begin += weight.shape[0]

    def separate() -> None:
        for weight in weights:
            weight.data = weight.data.clone()

    base.on_release(separate)
    return joined
