"""Decode steps of dense decoders (Llama, Mistral, Qwen2, Qwen3) as the plain matrix products that they are.

A decode step through transformers' modules spends more time around the products than in them: a cache object per
layer, repeated keys and values for grouped queries under a mask, one product per projection. Here the projections
that read the same input are one product (their weights become views of one matrix, so nothing is held twice), the
queries of a group share one read of their keys, and the cache is written in place at each row's own position. The
arithmetic of a step is in ``engines.step``.

Lanes: with one adapter on a CPU in full precision the adapter is merged into a copy of the weights for the length of
one ``sample`` call; otherwise its product is added for all lanes at once (see ``policy.lora``). Merging is never done
in bfloat16, where adding a small ΔW to a large weight would round most of it away. On a CPU larger models are read
from a copy whose layout suits products of few rows (``policy.arithmetic.packed``), made for one call too.

``engines.local`` decides which models decode so.
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
    Frame,
    Product,
    Rows,
    SampledTokens,
    Stepping,
    adds_in_any_order,
    block_end,
    compiled_decode_steps,
    decode_steps,
    logits,
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
    """Linear layers that read the same input, as one matrix product: weight [Σ out, in], cut into ``sizes``."""

    def __init__(self, base: BaseModel, layers: Sequence[nn.Module]):
        linears = [layer.base if isinstance(layer, LaneLinear) else layer for layer in layers]
        self.names = tuple(layer.name if isinstance(layer, LaneLinear) else None for layer in layers)
        self.sizes = [int(linear.out_features) for linear in linears]  # pyright: ignore[reportArgumentType]
        self.dtype, self.device, self._linears = base.dtype, base.device, linears
        self._joined = None if base.passes else _fused(base, [linear.weight for linear in linears])  # pyright: ignore[reportArgumentType]
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
        """The weight; of weights that come and go a copy where there are several."""
        if self._joined is not None:
            return self._joined
        weights: list[Any] = [linear.weight.detach() for linear in self._linears]  # pyright: ignore[reportCallIssue]
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    def of(self, adapters: Sequence[LoraWeights], merge: bool, pack: bool) -> Product:
        """Return the product with these adapters, merged into a copy of the weight or as factors; without adapters that
        of the base. ``pack``: the copy, or one of the weight, is laid out for few rows."""
        if merge and adapters and any(name is not None for name in self.names):
            return Product(self._merged(adapters[0], pack), self.bias, None, None)
        return Product(packed(self.weight) if pack else self.weight, self.bias, *self.factors(adapters))

    def factors(self, adapters: Sequence[LoraWeights]) -> Added:
        """Return ``a`` and ``b`` of a ``Product`` with these adapters."""
        used = [name for name in self.names if name is not None]
        if not (used and adapters):
            return None, None
        rank, dtype, lanes = max(adapter.rank for adapter in adapters), self.dtype, len(adapters)
        a = torch.cat([Lanes.padded([ad.A[name].t() for ad in adapters], rank, 1) for name in used], dim=2).to(dtype)
        b = torch.zeros(lanes, a.shape[2], sum(self.sizes), dtype=dtype, device=self.device)
        begin = row = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name is not None:
                own = Lanes.padded([ad.B[name].t() * ad.scale for ad in adapters], rank, 0)
                b[:, row : row + rank, begin : begin + size] = own
                row += rank
            begin += size
        return a.contiguous(), b

    def _merged(self, adapter: LoraWeights, pack: bool) -> torch.Tensor:
        # One that is not packed lies [in, out], which multiplies few rows faster.
        merged, begin = self.weight.clone().t() if pack else self.weight.t().contiguous(), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name is not None:
                a, b = adapter.A[name].to(merged.dtype), adapter.B[name].to(merged.dtype)
                merged[:, begin : begin + size].addmm_(a.t(), b.t(), alpha=adapter.scale)
            begin += size
        return packed(merged.t()) if pack else merged.t()


class Layer:
    """One decoder block, read off its module."""

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

    def of(self, adapters: Sequence[LoraWeights], merge: bool, pack: bool) -> Block:
        """Return the block with these adapters."""
        qkv, out, gate_up, down = (projection.of(adapters, merge, pack) for projection in self.projections)
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)

    def with_factors(self, added: Sequence[Added]) -> Block:
        """Return the block with the LoRA factors of each of its projections."""
        pairs = zip(self.projections, added, strict=True)
        qkv, out, gate_up, down = (Product(projection.weight, projection.bias, a, b) for projection, (a, b) in pairs)
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)


class StreamedBlocks:
    """The blocks of layers whose weights are in memory only during their turn: merged with ``merged``, or with the LoRA
    factors ``added`` per layer and product."""

    def __init__(
        self,
        layers: Sequence[Layer],
        sharded: ShardedWeights | None,
        added: Sequence[Sequence[Added]],
        merged: Sequence[LoraWeights] = (),
    ):
        self.layers, self.sharded, self.added, self.merged = layers, sharded, added, merged

    def __iter__(self) -> Iterator[Block]:
        for place, (layer, added) in enumerate(zip(self.layers, self.added, strict=True)):
            if self.sharded is not None:
                self.sharded.layer(place)
            yield layer.of(self.merged, True, False) if self.merged else layer.with_factors(added)

    def of_lanes(self, chosen: Callable[[torch.Tensor | None], torch.Tensor | None]) -> StreamedBlocks:
        """Return the blocks with the lanes that ``chosen`` selects from a table of all."""
        added = [[(chosen(a), chosen(b)) for a, b in own] for own in self.added]
        return StreamedBlocks(self.layers, self.sharded, added, self.merged)


Blocks = list[Block] | StreamedBlocks  # The blocks of a decoder, in their order


class CachedBatch(NamedTuple):
    """Keys and values [sequences, kv_heads, columns, head_dim] of every layer, of sequences that ended together."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (*self.keys, *self.values))


class CachedSequence(NamedTuple):
    """One sequence: the keys and values of ``token_ids`` are in the first columns of row ``row``."""

    batch: CachedBatch
    row: int
    token_ids: tuple[int, ...]


class KVCache:
    """Keys and values [rows, heads, capacity, head_dim] of every layer; each row is filled from the left."""

    def __init__(self, decoder: DenseDecoder, rows: int, capacity: int):
        shape = (rows, decoder.frame.kv_heads, capacity, decoder.frame.head_dim)
        options = {"dtype": decoder.dtype, "device": decoder.device}
        # Zeros, not garbage: an idle row attends to what nobody wrote, and NaN there would poison sums.
        self.keys = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.values = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.capacity = capacity

    def select(self, rows: torch.Tensor) -> None:
        """Keep (or repeat) the given rows. At no time is more than one layer's keys or values there twice."""
        for states in (self.keys, self.values):
            for layer in range(len(states)):
                states[layer] = states[layer].index_select(0, rows)

    def clear(self, rows: torch.Tensor) -> None:
        """Zero the rows [rows] that are marked."""
        for states in (*self.keys, *self.values):
            states.masked_fill_(rows.view(-1, 1, 1, 1), 0)

    def copy(self, rows: torch.Tensor, columns: int) -> CachedBatch:
        """Return a copy of the first columns of some of the rows."""
        keys, values = ([states[rows, :, :columns] for states in own] for own in (self.keys, self.values))
        return CachedBatch(keys, values)

    def restore(self, rows: torch.Tensor, sequences: Sequence[CachedSequence]) -> None:
        """Begin each of these rows with a cached sequence; all are of one batch."""
        batch = sequences[0].batch
        sources = torch.tensor([sequence.row for sequence in sequences], device=rows.device)
        columns = min(max(len(sequence.token_ids) for sequence in sequences), self.capacity)
        for layers, cached_layers in ((self.keys, batch.keys), (self.values, batch.values)):
            for states, cached in zip(layers, cached_layers, strict=True):
                states[rows, :, :columns] = cached[sources, :, :columns]

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin the given rows of a layer with these states [rows, heads, T, head_dim]."""
        width = keys.shape[2]
        self.keys[layer][rows, :, :width] = keys
        self.values[layer][rows, :, :width] = values


class SequenceCache:
    """Keys and values of sequences that may continue in a later request, by policy and name: the next turn of an
    episode begins where the last one ended. Holds up to ``limit`` bytes and evicts the oldest; thread-safe."""

    def __init__(self, limit: int):
        self.limit = limit
        self._entries: OrderedDict[tuple[PolicyRef, SequenceName], CachedSequence] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, ref: PolicyRef, named: Sequence[tuple[SequenceName, Sequence[int]]], batch: CachedBatch) -> None:
        """Add the sequences of a batch, row by row: each has a name, and the tokens of its columns."""
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
        """Remove the sequence of this name and return it if the prompt begins with it, else None."""
        with self._lock:
            sequence = self._pop((ref, name))
        if sequence is None:
            return None
        length = len(sequence.token_ids)
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
            self._bytes -= sequence.batch.bytes // len(sequence.batch.keys[0])
        return sequence


class DenseDecoder:
    """The weights of one dense decoder, read off its modules, and its forward pass for sampling (no gradients)."""

    def __init__(self, base: BaseModel, stepping: Stepping):
        model, config, self.stepping = base.model, base.model.config, stepping
        body, heads, kv_heads = model.model, config.num_attention_heads, config.num_key_value_heads
        attention = body.layers[0].self_attn
        self.base, self.device, self.dtype, self.rotary = base, base.device, base.dtype, body.rotary_emb
        self.sharded, self.passes = base.sharded, base.passes
        self._gather_ends()
        self.layers = [Layer(base, module, heads, kv_heads) for module in body.layers]
        # Merging in half precision would lose the adapter's small numbers. Of weights that pass, one layer is copied.
        self.merges = (base.copies or base.sharded is not None) and base.device.type == "cpu" and base.dtype in FULL
        self.packs = base.packs
        none = torch.empty(0, device=self.device, dtype=self.dtype)
        self.frame = Frame(
            embedding=body.embed_tokens.weight,
            norm=body.norm.weight,
            head=Product(base.head_weight, model.lm_head.bias, None, None),
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
        """Gather the embedding and the output layer where ranks hold a part of them each."""
        if self.sharded is not None:
            self.sharded.ends()

    def blocks(self, adapters: Sequence[LoraWeights]) -> Blocks:
        """Return the blocks with these adapters, prepared once for many decode steps."""
        merge = self.merges and len(adapters) == 1
        with torch.no_grad():
            if self.passes:
                added = [[projection.factors(adapters) for projection in layer.projections] for layer in self.layers]
                return StreamedBlocks(self.layers, self.sharded, added, adapters if merge else ())
            return [layer.of(adapters, merge, self.packs) for layer in self.layers]

    @staticmethod
    def of_lanes(blocks: Blocks, places: Sequence[int], lanes: int) -> Blocks:
        if len(places) == lanes:
            return blocks
        first, last = places[0], places[-1] + 1
        whole = list(places) == list(range(first, last))

        def taken(table: torch.Tensor | None) -> torch.Tensor | None:
            if table is None:
                return None
            return table[slice(first, last) if whole else torch.tensor(places, device=table.device)]

        def chosen(given: Product) -> Product:
            return given if given.a is None else given._replace(a=taken(given.a), b=taken(given.b))

        if isinstance(blocks, StreamedBlocks):
            return blocks.of_lanes(taken)
        return [
            block._replace(
                qkv=chosen(block.qkv), out=chosen(block.out), gate_up=chosen(block.gate_up), down=chosen(block.down)
            )
            for block in blocks
        ]

    def turned(self, length: int) -> Frame:
        """Return the frame with the angles of at least ``length`` positions, by the model's own rotary embedding."""
        if len(self.frame.cos) < length:
            positions = torch.arange(max(length, 256), device=self.device).unsqueeze(0)
            cos, sin = self.rotary(torch.empty(0, device=self.device, dtype=self.dtype), positions)
            half = self.frame.head_dim // 2
            self.frame = self.frame._replace(cos=cos[0], sin=torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
        return self.frame

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are prefilled at once: their activations, beside the cache, take ``stepping.prefill_bytes``."""
        hidden, layer = self.frame.embedding.shape[1], self.layers[0]
        numbers = 4 * hidden + 3 * sum(layer.qkv.sizes) + 2 * sum(layer.gate_up.sizes)
        return self.stepping.prefill_bytes // (numbers * self.dtype.itemsize)

    def prefill(
        self,
        ids_RT: torch.Tensor,
        last_R: torch.Tensor,
        blocks: Blocks,
        kv_cache: KVCache,
        rows_S: torch.Tensor,
        source_S: torch.Tensor,
    ) -> torch.Tensor:
        """Prompts padded on the right → logits [R, V] at column ``last_R``; see ``hidden``."""
        x_RTH = self.hidden(ids_RT, blocks, kv_cache, rows_S, source_S)
        return logits(self.frame, x_RTH[torch.arange(len(ids_RT), device=self.device), last_R])

    def hidden(
        self, ids_RT: torch.Tensor, blocks: Blocks, kv_cache: KVCache, rows_S: torch.Tensor, source_S: torch.Tensor
    ) -> torch.Tensor:
        """Return the last block's output for every token [R, T, H]. Layer by layer the states of the prompts
        ``source_S`` become the beginning of the cache's rows ``rows_S``.

        Causal attention alone keeps a row's real tokens from seeing its padding.
        """
        rows, width = ids_RT.shape
        self._gather_ends()
        frame = self.turned(width)
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
        """More tokens of rows whose first ``start_R`` columns are there, padded on the right → logits [R, V] at
        ``last_R``. Only what is real is written to the cache; ``rows`` of the others is any row."""
        count, width = ids_RT.shape
        self._gather_ends()
        rows_R = torch.tensor(rows, device=self.device)
        together = list(rows) == list(range(rows[0], rows[0] + count))
        from_rows = slice(rows[0], rows[0] + count) if together else rows_R  # a slice copies nothing
        step_T = torch.arange(width, device=self.device)
        columns = int((start_R + last_R).max()) + 1
        position_RT = (start_R.unsqueeze(1) + step_T).clamp_(max=columns - 1)
        frame = self.turned(columns)
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
        """Logits [N, V] of hidden states behind the last norm."""
        return fp32_product(hidden_NH, self.frame.head.weight, self.frame.head.bias)

    def decode_steps(
        self,
        blocks: Blocks,
        rows: Rows,
        sampled: SampledTokens,
        kv_cache: KVCache,
        columns: int,
        ragged: bool,
        steps: int,
    ) -> int:
        self._gather_ends()
        compiled = self.stepping.compiled and not self.passes
        run: Callable[..., int] = compiled_decode_steps() if compiled else decode_steps
        frame = self.turned(kv_cache.capacity)
        return run(
            frame, blocks, rows, sampled, kv_cache.keys, kv_cache.values, columns, ragged, steps, self.in_any_order
        )

    @property
    def in_any_order(self) -> bool:
        return adds_in_any_order(self.device)


def _fused(base: BaseModel, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weights below each other as one matrix; until the base is released the originals are views of it."""
    if len(weights) == 1:
        return weights[0].detach()
    whole = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = whole[begin : begin + weight.shape[0]]
        begin += weight.shape[0]

    def part() -> None:
        for weight in weights:
            weight.data = weight.data.clone()

    base.on_release(part)
    return whole
