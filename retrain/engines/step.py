"""A decode step of a dense decoder as one function over tensors: forward pass, draw, and the note of what was sampled.

Written in the part of Python that TorchScript compiles (no ``from __future__ import annotations``, no closures): a
compiled step runs without the interpreter's lock, so that pieces of a decode batch really decode side by side on the
cores of a CPU (``compiled_decode_steps``). On a GPU the same functions run as Python and are captured in a CUDA graph.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from retrain.engines.draw import draw
from retrain.engines.truncation import Kept, remember
from retrain.policy.arithmetic import fp32_product, linear, rms, rotation

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
"""Activations of gated MLPs, as configurations name them, that ``activated`` knows."""


class Product(NamedTuple):
    """Linear layers that read the same input as one product: weight [Σ out, in], maybe ``packed``. Lanes add the
    product of ``a`` [L, in, Σ r] and ``b`` [L, Σ r, Σ out], a block per layer on its diagonal."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None


class Block(NamedTuple):
    """One decoder block. ``head_norms`` [heads + kv_heads, D]: RMSNorm weights of queries and keys, if it has any."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor
    head_norms: torch.Tensor | None


class Frame(NamedTuple):
    """What surrounds the blocks, and their numbers. ``cos`` and ``sin`` [positions, D]: the rotation of every position,
    the sign of its second half in ``sin``."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: Product
    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    activation: str


class Rows(NamedTuple):
    """The rows of a decode batch on the device.

    A row holds the sequence ``sequence_R``; its last token is ``token_R``, which stands at ``position_R`` of the cache
    and is number ``sampled_R`` of the completion. Idle rows (``alive_R`` false) hold the last sequence, to which
    everything is written that nobody wants. ``temperature_R1`` None: all 1; ``greedy_R1`` None: none is greedy;
    ``cut_R3`` None: none is truncated.
    """

    token_R: torch.Tensor
    position_R: torch.Tensor
    sampled_R: torch.Tensor
    alive_R: torch.Tensor
    sequence_R: torch.Tensor
    limit_R: torch.Tensor
    temperature_R1: torch.Tensor | None
    greedy_R1: torch.Tensor | None
    cut_R3: torch.Tensor | None


class Sampled(NamedTuple):
    """Uniforms and results by sequence; ``ends`` are the tokens that end one. ``kept`` None: no
    sequence is truncated."""

    ends: torch.Tensor
    uniforms_NT: torch.Tensor
    tokens_NT: torch.Tensor
    logprobs_NT: torch.Tensor
    entropy_NT: torch.Tensor
    kept: Kept | None


def product(x: torch.Tensor, given: Product) -> torch.Tensor:
    """x [rows, in], lane by lane → [rows, Σ out]."""
    out = linear(x, given.weight, given.bias)
    a, b = given.a, given.b
    if a is None or b is None:
        return out
    if a.shape[0] == 1:
        return out.addmm_(torch.mm(x, a[0]), b[0])
    low = torch.bmm(x.view(a.shape[0], -1, x.shape[1]), a)
    out.view(a.shape[0], -1, out.shape[1]).baddbmm_(low, b)
    return out


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_pytorch_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "relu":
        return F.relu(x)
    return F.silu(x)


def rotated(
    frame: Frame, head_norms: torch.Tensor | None, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Queries and keys [..., heads + kv_heads, D], normalised where the family does so, and rotated."""
    if head_norms is not None:
        qk = torch.rms_norm(qk, [frame.head_dim], None, frame.eps) * head_norms
    return rotation(qk, cos, sin)


def block_end(frame: Frame, block: Block, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """What follows attention: output projection and MLP, each added to its input."""
    x = x + product(attended, block.out)
    gate, up = product(rms(x, block.norm_mlp, frame.eps), block.gate_up).chunk(2, -1)
    return x + product(activated(gate, frame.activation) * up, block.down)


def logits(frame: Frame, x: torch.Tensor) -> torch.Tensor:
    """Logits [rows, V] of what the last block gives [rows, H], in fp32 at least."""
    return fp32_product(rms(x, frame.norm, frame.eps), frame.head.weight, frame.head.bias)


def forward(
    frame: Frame,
    blocks: list[Block],
    token_R: torch.Tensor,
    position_R: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    columns: int,
    ragged: bool,
) -> torch.Tensor:
    """One token per row → logits [R, V]; its keys and values go to column ``position_R`` of the row.

    ``keys`` and ``values`` per block [R, kv_heads, capacity, D], of which ``columns`` are read; ``ragged``: some rows
    have not written all of these.
    """
    rows, dim = token_R.shape[0], frame.head_dim
    capacity, both = keys[0].shape[2], frame.heads + frame.kv_heads
    cos, sin = frame.cos[position_R].unsqueeze(1), frame.sin[position_R].unsqueeze(1)
    head = torch.arange(rows * frame.kv_heads, device=token_R.device).view(rows, -1)
    place = (head * capacity + position_R[:, None]).flatten()
    x = F.embedding(token_R, frame.embedding)
    bias: torch.Tensor | None = None
    if ragged:
        unwritten_RK = torch.arange(columns, device=token_R.device) > position_R[:, None]
        zeros_RK = torch.zeros(unwritten_RK.shape, device=token_R.device, dtype=x.dtype)
        bias = zeros_RK.masked_fill_(unwritten_RK, float("-inf"))[:, None, None]
    for index, block in enumerate(blocks):
        qkv = product(rms(x, block.norm_in, frame.eps), block.qkv).view(rows, -1, dim)
        qk = rotated(frame, block.head_norms, qkv[:, :both], cos, sin)
        keys[index].view(-1, dim).index_copy_(0, place, qk[:, frame.heads :].reshape(-1, dim))
        values[index].view(-1, dim).index_copy_(0, place, qkv[:, both:].reshape(-1, dim))
        # The queries that share a key head stand in the query axis: each key is read once for all of them.
        attended = F.scaled_dot_product_attention(
            qk[:, : frame.heads].reshape(rows, frame.kv_heads, -1, dim),
            keys[index][:, :, :columns],
            values[index][:, :, :columns],
            attn_mask=bias,
            scale=frame.scaling,
        )
        x = block_end(frame, block, x, attended.reshape(rows, -1))
    return logits(frame, x)


def note(rows: Rows, sampled: Sampled, logits_RV: torch.Tensor, in_any_order: bool) -> torch.Tensor:
    """Draw every row's next token and note it, in place; which rows [R] end with it and fall idle."""
    # What an idle row draws goes to the last sequence; its count stands still.
    scratch, longest = sampled.tokens_NT.shape[0] - 1, sampled.tokens_NT.shape[1]
    place = rows.sequence_R.masked_fill(~rows.alive_R, scratch) * longest + rows.sampled_R
    uniforms = sampled.uniforms_NT.view(-1)[place]
    kept = sampled.kept
    token, logprob, entropy, kept_RK = draw(
        logits_RV,
        uniforms,
        rows.temperature_R1,
        rows.greedy_R1,
        in_any_order,
        rows.cut_R3,
        None if kept is None else kept.rank_K,
    )
    if kept is not None and kept_RK is not None:
        remember(kept, kept_RK.masked_fill(~rows.alive_R.unsqueeze(1), -1), place)
    sampled.tokens_NT.view(-1).index_copy_(0, place, token)
    sampled.logprobs_NT.view(-1).index_copy_(0, place, logprob)
    sampled.entropy_NT.view(-1).index_copy_(0, place, entropy)
    going_on = rows.alive_R & (rows.sampled_R + 1 < rows.limit_R) & (token.unsqueeze(1) != sampled.ends).all(1)
    ended = rows.alive_R & ~going_on
    rows.token_R.copy_(token)
    rows.sampled_R.add_(going_on)
    rows.alive_R.copy_(going_on)
    return ended


def decode_steps(
    frame: Frame,
    blocks: list[Block],
    rows: Rows,
    sampled: Sampled,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    columns: int,
    ragged: bool,
    steps: int,
    in_any_order: bool,
) -> int:
    """At most ``steps`` steps, all in place, the first of which reads ``columns`` of the cache; how many were made.

    With more than one step the device's answer is looked at after each: the first row that ends ends the call.
    """
    for done in range(steps):
        logits_RV = forward(frame, blocks, rows.token_R, rows.position_R, keys, values, columns + done, ragged)
        rows.position_R.add_(rows.alive_R)
        ended_R = note(rows, sampled, logits_RV, in_any_order)
        if steps > 1 and bool(ended_R.any()):
            return done + 1
    return steps


@functools.cache
def compiled_decode_steps() -> Callable[..., int]:
    """``decode_steps`` compiled by TorchScript, or as it is where this torch or Python has no TorchScript any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and has no successor that needs no C++ compiler
        try:
            script: Any = torch.jit.script
            return script(decode_steps)
        except (AttributeError, RuntimeError, OSError):
            return decode_steps
