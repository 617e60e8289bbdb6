"""Decode steps of dense decoders (Llama, Mistral, Qwen2, Qwen3) as the plain matrix products that they are.

A decode step through transformers' modules spends more time around the products than in them: a cache object per
layer, repeated keys and values for grouped queries under a mask, one product per projection. Here the projections
that read the same input are one product (their weights become views of one matrix, so nothing is held twice), the
queries of a group share one read of their keys, and the cache is written in place at each row's own position.

Lanes: with one adapter on a CPU in full precision the adapter is merged into a copy of the weights for the length of
one ``sample`` call; otherwise its product is added for all lanes at once (see ``policy.lora``). Merging is never done
in bfloat16, where adding a small ΔW to a large weight would round most of it away.

``dense_decoder`` answers None for a model that it does not know, or whose own forward pass it does not reproduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from retrain.models.targets import DENSE_FAMILIES
from retrain.policy.base import BaseModel
from retrain.policy.lora import Adapter, LaneLinear, Lanes
from retrain.policy.memory import available_memory

MERGE_SHARE = 0.25
"""Weights are merged only where the copy takes less than this share of the memory that is available."""


@dataclass
class Addition:
    """What the adapters add to one projection: ``merged`` [out, in] replaces its weight, or ``a`` [L, in, Σr] and
    ``b`` (per part [L, r, out], None where a part is no target) are added."""

    merged: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: tuple[torch.Tensor | None, ...] = ()


class Projection:
    """Linear layers that read the same input, as one matrix product: weight [Σ out, in], cut into ``sizes``."""

    def __init__(self, layers: Sequence[nn.Module]):
        linears = [layer.base if isinstance(layer, LaneLinear) else layer for layer in layers]
        self.names = tuple(layer.name if isinstance(layer, LaneLinear) else None for layer in layers)
        self.sizes = [int(linear.weight.shape[0]) for linear in linears]  # pyright: ignore[reportArgumentType, reportIndexIssue]
        self.weight = _fused([linear.weight for linear in linears])  # pyright: ignore[reportArgumentType]
        biases = [linear.bias for linear in linears]
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat(
                [
                    self.weight.new_zeros(size) if bias is None else bias.detach()  # pyright: ignore[reportCallIssue]
                    for bias, size in zip(biases, self.sizes, strict=True)
                ]
            )

    def addition(self, adapters: Sequence[Adapter], merge: bool) -> Addition | None:
        """What these adapters add; None when no part of the projection is a target."""
        used = [name for name in self.names if name is not None]
        if not used:
            return None
        if merge:
            adapter, merged, begin = adapters[0], self.weight.clone(), 0
            for name, size in zip(self.names, self.sizes, strict=True):
                if name is not None:
                    a, b = adapter.A[name].to(merged.dtype), adapter.B[name].to(merged.dtype)
                    merged[begin : begin + size].addmm_(b, a, alpha=adapter.scale)
                begin += size
            return Addition(merged=merged)
        rank, dtype = max(adapter.rank for adapter in adapters), self.weight.dtype
        a = torch.cat([Lanes.padded([ad.A[name].t() for ad in adapters], rank, 1) for name in used], dim=2)
        b = [
            None if name is None else Lanes.padded([ad.B[name].t() * ad.scale for ad in adapters], rank, 0).to(dtype)
            for name in self.names
        ]
        return Addition(a=a.to(dtype).contiguous(), b=tuple(b))

    def __call__(self, x: torch.Tensor, added: Addition | None) -> tuple[torch.Tensor, ...]:
        """x [rows, in], lane by lane → one [rows, size] per part."""
        if added is None or added.a is None:
            out = F.linear(x, self.weight if added is None else added.merged, self.bias)  # pyright: ignore[reportArgumentType]
            return (out,) if len(self.sizes) == 1 else out.split(self.sizes, -1)
        out = F.linear(x, self.weight, self.bias)
        lanes, rows = added.a.shape[0], x.shape[0]
        low = torch.bmm(x.view(lanes, -1, x.shape[1]), added.a)
        out_LSO, parts, at, rank_at = out.view(lanes, -1, out.shape[1]), [], 0, 0
        for size, b in zip(self.sizes, added.b, strict=True):
            part = out_LSO[:, :, at : at + size]
            if b is not None:
                part = torch.baddbmm(part, low[:, :, rank_at : rank_at + b.shape[1]], b)
                rank_at += b.shape[1]
            parts.append(part.reshape(rows, size))
            at += size
        return tuple(parts)


@dataclass
class Layer:
    """One decoder block. ``head_norms`` [heads + kv_heads, D]: RMSNorm weights of queries and keys, if it has any."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor
    head_norms: torch.Tensor | None
    activation: Any
    scaling: float


Additions = list[tuple[Addition | None, Addition | None, Addition | None, Addition | None]]
"""Per layer what the adapters add to qkv, out, gate_up and down."""


class KeyValues:
    """Keys and values [rows, heads, capacity, head_dim] of every layer; each row is filled from the left."""

    def __init__(self, decoder: DenseDecoder, rows: int, capacity: int):
        shape = (rows, decoder.kv_heads, capacity, decoder.head_dim)
        options = {"dtype": decoder.dtype, "device": decoder.device}
        # Zeros, not garbage: an idle row attends to what nobody wrote, and NaN there would poison sums.
        self.keys = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.values = [torch.zeros(shape, **options) for _ in decoder.layers]
        self.capacity = capacity

    def select(self, rows: torch.Tensor) -> None:
        """Keep (or repeat) the given rows."""
        self.keys = [tensor.index_select(0, rows) for tensor in self.keys]
        self.values = [tensor.index_select(0, rows) for tensor in self.values]


class DenseDecoder:
    """The weights of one dense decoder, read off its modules, and its forward pass for sampling (no gradients)."""

    def __init__(self, base: BaseModel):
        model, config = base.model, base.model.config
        body = model.model
        attention = body.layers[0].self_attn
        self.device, self.dtype = base.device, base.dtype
        self.head_dim = int(attention.head_dim)
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        self.embedding, self.norm, self.rotary = body.embed_tokens.weight, body.norm.weight, body.rotary_emb
        self.head = Projection([model.lm_head])
        self.layers = [self._layer(block) for block in body.layers]
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def _layer(self, block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            norms = torch.stack([attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads)
        return Layer(
            qkv=Projection([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=Projection([attention.o_proj]),
            gate_up=Projection([mlp.gate_proj, mlp.up_proj]),
            down=Projection([mlp.down_proj]),
            norm_in=block.input_layernorm.weight,
            norm_mlp=block.post_attention_layernorm.weight,
            head_norms=norms,
            activation=mlp.act_fn,
            scaling=attention.scaling,
        )

    def additions(self, adapters: Sequence[Adapter]) -> Additions:
        """What these adapters add, prepared once for many decode steps."""
        merge = self._merges(len(adapters))
        with torch.no_grad():
            return [
                (
                    layer.qkv.addition(adapters, merge),
                    layer.out.addition(adapters, merge),
                    layer.gate_up.addition(adapters, merge),
                    layer.down.addition(adapters, merge),
                )
                for layer in self.layers
            ]

    def _merges(self, lanes: int) -> bool:
        if lanes != 1 or self.device.type != "cpu" or self.dtype not in (torch.float32, torch.float64):
            return False
        size = sum(
            part.weight.numel() * part.weight.element_size()
            for layer in self.layers
            for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return size <= MERGE_SHARE * available_memory()

    @staticmethod
    def of_lanes(added: Additions, places: Sequence[int], lanes: int) -> Additions:
        """The additions of some of the lanes, by their places."""
        if len(places) == lanes:
            return added
        first, last = places[0], places[-1] + 1
        whole = list(places) == list(range(first, last))

        def chosen(addition: Addition | None) -> Addition | None:
            if addition is None or addition.a is None:
                return addition
            index = slice(first, last) if whole else torch.tensor(places, device=addition.a.device)
            return Addition(a=addition.a[index], b=tuple(None if part is None else part[index] for part in addition.b))

        return [tuple(chosen(addition) for addition in layer) for layer in added]  # pyright: ignore[reportReturnType]

    def angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [≥ length, head_dim] of every position, by the model's own rotary embedding."""
        if self._angles is None or self._angles[0].shape[0] < length:
            positions = torch.arange(max(length, 256), device=self.device).unsqueeze(0)
            like = torch.empty(0, device=self.device, dtype=self.dtype)
            cos, sin = self.rotary(like, positions)
            half = self.head_dim // 2
            # rotate_half(x)·sin = roll(x, half)·(−sin, sin): the sign goes into the table.
            self._angles = (cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1))
        return self._angles

    def prefill(self, ids_RT: torch.Tensor, last_R: torch.Tensor, added: Additions) -> tuple[torch.Tensor, list[Any]]:
        """Prompts padded on the right: logits [R, V] at column ``last_R`` and per layer keys, values [R, heads, T, D].

        Causal attention alone keeps a row's real tokens from seeing its padding.
        """
        rows, width = ids_RT.shape
        cos, sin = (table[:width].unsqueeze(1) for table in self.angles(width))
        x = F.embedding(ids_RT.reshape(-1), self.embedding)
        states = []
        for layer, (qkv, out, gate_up, down) in zip(self.layers, added, strict=True):
            q, k, v = layer.qkv(self._rms(x, layer.norm_in), qkv)
            qk = torch.cat([q, k], -1).view(rows, width, -1, self.head_dim)
            q, k = self._turned(layer, qk, cos, sin).transpose(1, 2).split([self.heads, self.kv_heads], 1)
            v = v.reshape(rows, width, self.kv_heads, self.head_dim).transpose(1, 2)
            states.append((k, v))
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=self.heads != self.kv_heads
            )
            x = self._block_end(layer, x, y.transpose(1, 2).reshape(rows * width, -1), out, gate_up, down)
        last = x.view(rows, width, -1)[torch.arange(rows, device=x.device), last_R]
        return self.head(self._rms(last, self.norm), None)[0], states

    def step(
        self,
        token_R: torch.Tensor,
        position_R: torch.Tensor,
        memory: KeyValues,
        columns: int,
        bias_R11K: torch.Tensor | None,
        added: Additions,
    ) -> torch.Tensor:
        """One token per row → logits [R, V]; its keys and values go to column ``position_R`` of the row.

        ``columns`` of the cache are read; ``bias_R11K`` is −inf at columns that a row has not written (None: all rows
        have written all of them).
        """
        rows = token_R.shape[0]
        cos, sin = (table[position_R].unsqueeze(1) for table in self.angles(memory.capacity))
        heads = torch.arange(self.kv_heads, device=token_R.device)
        row = torch.arange(rows, device=token_R.device)
        place = ((row[:, None] * self.kv_heads + heads) * memory.capacity + position_R[:, None]).flatten()
        x = F.embedding(token_R, self.embedding)
        for index, (layer, (qkv, out, gate_up, down)) in enumerate(zip(self.layers, added, strict=True)):
            q, k, v = layer.qkv(self._rms(x, layer.norm_in), qkv)
            qk = torch.cat([q, k], -1).view(rows, -1, self.head_dim)
            q, k = self._turned(layer, qk, cos, sin).split([self.heads, self.kv_heads], 1)
            keys, values = memory.keys[index], memory.values[index]
            keys.view(-1, self.head_dim).index_copy_(0, place, k.reshape(-1, self.head_dim))
            values.view(-1, self.head_dim).index_copy_(0, place, v.reshape(-1, self.head_dim))
            # The queries that share a key head stand in the query axis: each key is read once for all of them.
            y = F.scaled_dot_product_attention(
                q.reshape(rows, self.kv_heads, -1, self.head_dim),
                keys[:, :, :columns],
                values[:, :, :columns],
                attn_mask=bias_R11K,
                scale=layer.scaling,
            )
            x = self._block_end(layer, x, y.reshape(rows, -1), out, gate_up, down)
        return self.head(self._rms(x, self.norm), None)[0]

    def _turned(self, layer: Layer, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries and keys [..., heads + kv_heads, D], normalised where the family does so, and rotated."""
        if layer.head_norms is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * layer.head_norms
        return (qk * cos).addcmul_(qk.roll(self.head_dim // 2, -1), sin)

    def _block_end(
        self,
        layer: Layer,
        x: torch.Tensor,
        attended: torch.Tensor,
        out: Addition | None,
        gate_up: Addition | None,
        down: Addition | None,
    ) -> torch.Tensor:
        x = x + layer.out(attended, out)[0]
        gate, up = layer.gate_up(self._rms(x, layer.norm_mlp), gate_up)
        return x + layer.down(layer.activation(gate) * up, down)[0]

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _fused(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights below each other as one matrix; the originals become views of it."""
    if len(weights) == 1:
        return weights[0].detach()
    whole = torch.cat([weight.detach() for weight in weights])
    begin = 0
    for weight in weights:
        weight.data = whole[begin : begin + weight.shape[0]]
        begin += weight.shape[0]
    return whole


def dense_decoder(base: BaseModel) -> DenseDecoder | None:
    """The fast decoder of this base, or None when the model is of another kind.

    Trusts nothing: a short probe has to give the logits of the model's own forward pass.
    """
    config = base.model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    turning = str(rope.get("rope_type", rope.get("type", "default")))
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if (
        config.model_type not in DENSE_FAMILIES
        or type(base.model).__name__.removesuffix("ForCausalLM").lower() != config.model_type
        or kinds != {"full_attention"}
        or (windowed and config.model_type == "mistral")
        or "dynamic" in turning
        or turning == "longrope"
        or getattr(config, "quantization_config", None)
    ):
        return None
    decoder = DenseDecoder(base)
    return decoder if _reproduces(decoder, base) else None


def _reproduces(decoder: DenseDecoder, base: BaseModel) -> bool:
    """Whether prefill and one step give the logits of the model's own forward pass, with no lane active."""
    count = min(7, base.vocab_size)
    ids = (torch.arange(2 * count, device=base.device).view(2, count) * 7919 + 11) % base.vocab_size
    added: Additions = [(None, None, None, None)] * len(decoder.layers)
    with torch.no_grad():
        want = base.model(input_ids=ids, use_cache=False).logits.double()
        last = torch.full((2,), count - 2, device=base.device)
        before, states = decoder.prefill(ids[:, :-1], last, added)
        memory = KeyValues(decoder, 2, count)
        for layer, (k, v) in enumerate(states):
            memory.keys[layer][:, :, : count - 1], memory.values[layer][:, :, : count - 1] = k, v
        after = decoder.step(ids[:, -1], last + 1, memory, count, None, added)
    # In float64, too, transformers computes norms and angles in float32.
    unit = {torch.float64: 1e-5, torch.float32: 1e-4}.get(base.dtype, 0.06) * max(1.0, float(want.abs().max()))
    gap = max(float((before - want[:, -2]).abs().max()), float((after - want[:, -1]).abs().max()))
    return gap <= unit
