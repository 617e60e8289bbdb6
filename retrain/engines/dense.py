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

``dense_decoder`` answers None for a model that it does not know, or whose own forward pass it does not reproduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from retrain.engines.draw import adds_in_any_order, draw
from retrain.engines.kept import Batch, Kept
from retrain.engines.step import (
    ACTIVATIONS,
    Block,
    Frame,
    Product,
    Rows,
    Sampled,
    block_end,
    compiled_decode_steps,
    decode_steps,
    forward,
    logits,
    product,
    rotated,
)
from retrain.models.layers import DENSE_FAMILIES
from retrain.policy.arithmetic import FULL, causal_attention, fp32_product, packed, rms
from retrain.policy.base import BaseModel
from retrain.policy.lora import LaneLinear, Lanes, LoraWeights
from retrain.policy.presence import Presence
from retrain.rng import generator

PROBE_ROWS, PROBE_WIDTH, PROBE_STEPS = 4, 48, 3
"""Tokens that a decoder is compared with its model on: rows, tokens of each, and how many of these it decodes."""
PROBE_LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Root mean square of the differences of log-probabilities, by the spread of the logits, up to which a decoder is
admitted. In fp64, too, transformers computes norms and angles in fp32."""
PROBE_HALF_LIMIT = 0.006
"""The same in half precision for a model of one layer; layers round independently, so that it grows with the square
root of their number. Measured per root: 0.0001 to 0.0025 on random models, 0.0006 on the bundled one; 0.02 and more
with the scaling of attention off by a tenth."""
PROBE_HEAD_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest difference of a logit from the output layer's product, by the largest one; in half precision its rounding."""


Added = tuple[torch.Tensor | None, torch.Tensor | None]  # LoRA factors `a` and `b` of a fused product


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
        """The product with what these adapters add, merged into a copy of the weight or beside it; with none, the
        base's own. ``pack``: the copy, or one of the weight, is laid out for few rows."""
        if merge and adapters and any(name is not None for name in self.names):
            return Product(self._merged(adapters[0], pack), self.bias, None, None)
        return Product(packed(self.weight) if pack else self.weight, self.bias, *self.beside(adapters))

    def beside(self, adapters: Sequence[LoraWeights]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """``a`` and ``b`` of a ``Product`` with what these adapters add."""
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
        """The block with what these adapters add."""
        qkv, out, gate_up, down = (projection.of(adapters, merge, pack) for projection in self.projections)
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)

    def beside(self, added: Sequence[Added]) -> Block:
        """The block with what adapters add to each of its projections."""
        given = zip(self.projections, added, strict=True)
        qkv, out, gate_up, down = (Product(projection.weight, projection.bias, a, b) for projection, (a, b) in given)
        return Block(qkv, out, gate_up, down, self.norm_in, self.norm_mlp, self.head_norms)


class Passing:
    """The blocks of layers whose weights come and go, each while it is its turn: merged with ``merged``, or with what
    adapters add beside, ``added`` per layer and product."""

    def __init__(
        self,
        layers: Sequence[Layer],
        presence: Presence,
        added: Sequence[Sequence[Added]],
        merged: Sequence[LoraWeights] = (),
    ):
        self.layers, self.presence, self.added, self.merged = layers, presence, added, merged

    def __iter__(self) -> Iterator[Block]:
        for place, (layer, added) in enumerate(zip(self.layers, self.added, strict=True)):
            self.presence.layer(place)
            yield layer.of(self.merged, True, False) if self.merged else layer.beside(added)

    def of_lanes(self, chosen: Callable[[torch.Tensor | None], torch.Tensor | None]) -> Passing:
        """The blocks for the lanes that ``chosen`` takes of a table of all."""
        added = [[(chosen(a), chosen(b)) for a, b in own] for own in self.added]
        return Passing(self.layers, self.presence, added, self.merged)


Blocks = list[Block] | Passing  # The blocks of a decoder, in their order


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

    def copy(self, rows: torch.Tensor, columns: int) -> Batch:
        """The first columns of some of the rows."""
        keys, values = ([states[rows, :, :columns] for states in own] for own in (self.keys, self.values))
        return Batch(keys, values)

    def put_back(self, rows: torch.Tensor, kept: Sequence[Kept]) -> None:
        """Begin these rows with what was kept of a sequence each, all of one batch."""
        batch = kept[0].batch
        places = torch.tensor([one.place for one in kept], device=rows.device)
        columns = min(max(len(one.token_ids) for one in kept), self.capacity)
        for own, given in ((self.keys, batch.keys), (self.values, batch.values)):
            for states, layer in zip(own, given, strict=True):
                states[rows, :, :columns] = layer[places, :, :columns]

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin the given rows of a layer with these states [rows, heads, T, head_dim]."""
        width = keys.shape[2]
        self.keys[layer][rows, :, :width] = keys
        self.values[layer][rows, :, :width] = values


class DenseDecoder:
    """The weights of one dense decoder, read off its modules, and its forward pass for sampling (no gradients)."""

    def __init__(self, base: BaseModel):
        model, config = base.model, base.model.config
        body, heads, kv_heads = model.model, config.num_attention_heads, config.num_key_value_heads
        attention = body.layers[0].self_attn
        self.device, self.dtype, self.rotary = base.device, base.dtype, body.rotary_emb
        self.presence, self.passes = base.presence, base.passes
        self.presence.ends()
        self.layers = [Layer(base, module, heads, kv_heads) for module in body.layers]
        # Merging in half precision would lose the adapter's small numbers. Of weights that pass, one layer is copied.
        self.merges = (base.copies or base.presence.shared) and base.device.type == "cpu" and base.dtype in FULL
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

    def blocks(self, adapters: Sequence[LoraWeights]) -> Blocks:
        """The blocks with what these adapters add, prepared once for many decode steps."""
        merge = self.merges and len(adapters) == 1
        with torch.no_grad():
            if self.passes:
                added = [[projection.beside(adapters) for projection in layer.projections] for layer in self.layers]
                return Passing(self.layers, self.presence, added, adapters if merge else ())
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

        if isinstance(blocks, Passing):
            return blocks.of_lanes(taken)
        return [
            block._replace(
                qkv=chosen(block.qkv), out=chosen(block.out), gate_up=chosen(block.gate_up), down=chosen(block.down)
            )
            for block in blocks
        ]

    def turned(self, length: int) -> Frame:
        """The frame with the angles of at least ``length`` positions, by the model's own rotary embedding."""
        if len(self.frame.cos) < length:
            positions = torch.arange(max(length, 256), device=self.device).unsqueeze(0)
            cos, sin = self.rotary(torch.empty(0, device=self.device, dtype=self.dtype), positions)
            half = self.frame.head_dim // 2
            self.frame = self.frame._replace(cos=cos[0], sin=torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
        return self.frame

    @property
    def prefill_bytes(self) -> int:
        """Bytes of the activations that ``prefill`` holds of one token at most, beside the cache."""
        hidden, layer = self.frame.embedding.shape[1], self.layers[0]
        return (4 * hidden + 3 * sum(layer.qkv.sizes) + 2 * sum(layer.gate_up.sizes)) * self.dtype.itemsize

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
        """What the last block gives of every token [R, T, H]. Layer by layer the states of the prompts ``source_S``
        become the beginning of the cache's rows ``rows_S``.

        Causal attention alone keeps a row's real tokens from seeing its padding.
        """
        rows, width = ids_RT.shape
        self.presence.ends()
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
        self.presence.ends()
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
        self, blocks: Blocks, rows: Rows, sampled: Sampled, kv_cache: KVCache, columns: int, ragged: bool, steps: int
    ) -> int:
        """See ``engines.step.decode_steps``; on a CPU it runs compiled, unless weights come and go in between."""
        self.presence.ends()
        compiled = self.device.type == "cpu" and not self.passes
        run: Callable[..., int] = compiled_decode_steps() if compiled else decode_steps
        frame = self.turned(kv_cache.capacity)
        return run(
            frame, blocks, rows, sampled, kv_cache.keys, kv_cache.values, columns, ragged, steps, self.in_any_order
        )

    @property
    def in_any_order(self) -> bool:
        return adds_in_any_order(self.device)


def _fused(base: BaseModel, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights below each other as one matrix; until the base is released the originals are views of it."""
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


def is_supported(base: BaseModel) -> bool:
    """Return whether the model is a plain decoder: of a known family, with full attention and unquantised weights."""
    config = base.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = str(rope.get("rope_type", rope.get("type", "default")))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        config.model_type in DENSE_FAMILIES
        and type(base.model).__name__.removesuffix("ForCausalLM").lower() == config.model_type
        and kinds == {"full_attention"}
        and not (windowed and config.model_type == "mistral")
        and config.hidden_act in ACTIVATIONS
        and "dynamic" not in rope_type
        and rope_type != "longrope"
        and not getattr(config, "quantization_config", None)
    )


def dense_decoder(base: BaseModel) -> DenseDecoder | None:
    """The fast decoder of this base, or None when the model is of another kind.

    Trusts nothing: a short probe has to give what the model's own forward pass gives.
    """
    if not is_supported(base):
        return None
    decoder = DenseDecoder(base)
    return decoder if _reproduces(decoder, base) else None


def _reproduces(decoder: DenseDecoder, base: BaseModel) -> bool:
    """Whether the decoder gives the log-probabilities of the model's own forward pass, with no lane active, for tokens
    drawn from it behind random ones."""
    noise, device = generator("probe of the dense decoder"), base.device
    shape = (PROBE_ROWS, min(PROBE_WIDTH, base.context_length))
    ids_RT = torch.from_numpy(noise.integers(0, base.vocab_size, shape)).to(device)
    gaps, spreads = [], []
    with torch.no_grad():
        own_RTH, last_RV = _own_forward(base, ids_RT)
        for got_NV, place in _probe(decoder, ids_RT):
            want_NV = decoder.output(own_RTH[place])
            uniforms_N = torch.from_numpy(noise.random(len(want_NV))).to(device)
            token_N, want_N, _, _ = draw(want_NV, uniforms_N, in_any_order=decoder.in_any_order)
            gaps.append(got_NV.log_softmax(-1).gather(1, token_N.unsqueeze(1)).squeeze(1) - want_N)
            spreads.append(want_NV.var(-1))
        last_gap = (last_RV - decoder.output(own_RTH[:, -1])).abs().max() / last_RV.abs().max()
    gap, spread = torch.cat(gaps).square().mean().sqrt(), torch.cat(spreads).mean().sqrt()
    limit = PROBE_LIMITS.get(base.dtype, PROBE_HALF_LIMIT * math.sqrt(len(decoder.layers)))
    return bool(gap <= limit * spread) and bool(last_gap <= PROBE_HEAD_LIMITS.get(base.dtype, 2**-7))


def _own_forward(base: BaseModel, ids_RT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model's output layer reads [R, T, H], before it rounds its logits, and its logits of the last column."""
    seen: list[torch.Tensor] = []
    hook = base.model.model.register_forward_hook(lambda body, given, made: seen.append(made.last_hidden_state))
    try:
        logits_R1V = base.model(input_ids=ids_RT, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
    return seen[0], logits_R1V[:, -1]


def _probe(
    decoder: DenseDecoder, ids_RT: torch.Tensor
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """Logits [N, V] by prefill, a row at a time, then by ragged steps, and in which rows and columns they stand."""
    rows, width = ids_RT.shape
    read = width - PROBE_STEPS
    row_R = torch.arange(rows, device=ids_RT.device)
    blocks: Any = decoder.blocks([])  # ``forward`` goes through them once, whatever they are
    kv_cache = KVCache(decoder, rows, width)
    x_RTH = decoder.hidden(ids_RT[:, :read], blocks, kv_cache, row_R, row_R)
    for row in row_R:
        columns = torch.arange(read, device=ids_RT.device)
        yield logits(decoder.frame, x_RTH[row]), (row.expand(read), columns)
    frame, start_R = decoder.turned(width), (row_R + 1) * read // rows
    for step in range(PROBE_STEPS):
        place = (row_R, start_R + step)
        yield forward(frame, blocks, ids_RT[place], place[1], kv_cache.keys, kv_cache.values, width, True), place
