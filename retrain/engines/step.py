"""A decode step of a dense decoder as functions over tensors: forward pass, draw, and the record of what was sampled.

Written in the part of Python that TorchScript compiles (no ``from __future__ import annotations``, no closures): a
compiled step runs without the interpreter's lock, so that pieces of a decode batch run in parallel on the cores of a
CPU (``compiled_decode_steps``). On a GPU the same functions run as Python and are captured in a CUDA graph. They
therefore work in place, do not wait for the device, and have shapes that do not depend on values.

Truncated sampling (top-k, top-p, min-p): a truncated sampler draws from π(·|S) = π/π(S) on a kept set S. If the update
used π over the whole vocabulary, every importance ratio would be wrong by the factor π(S). The kept set is therefore
recorded for every sampled token, and the update computes its log-probabilities over the recorded set: "Keep Sampling
Mask" (DeepSeek-V3.2, arXiv 2512.02556 §3.1; as a list of token ids with offsets in vLLM's and prime-rl's sampling
replay). If the update recomputed the set from its own logits, the set would change with the policy: a token at its edge
could drop out of the set by rounding or dropout, and would have no importance ratio.

Order as in vLLM: temperature; min-p (probability relative to the largest one); top-k; then top-p of the remaining mass
(the smallest set of most probable tokens that holds this share).
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from retrain.models.layers import GPU_COLUMNS
from retrain.policy.arithmetic import fp32_product, linear, rms, rotation
from retrain.types import Support

# Activations of gated MLPs, as configurations name them, that ``activated`` knows
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
# Tokens per block sum. A token is searched for first among the block sums and then inside one block, so that a
# large vocabulary is not accumulated token by token
BLOCK = 256
CHUNK = 1 << 18  # Logits that a CPU processes at a time: they and their temporaries fit in its second-level cache


class DecodeSettings(NamedTuple):
    """Settings of decode steps. ``calls``: decode calls between synchronisations with the device. ``columns``: steps
    read a multiple of this number of cache columns, so that one CUDA graph serves many steps. ``prefill_bytes``: most
    bytes of a prefill's activations; more is not faster. ``compiled``: use TorchScript unless weights are streamed."""

    calls: int
    columns: int
    compiled: bool
    prefill_bytes: int = 1 << 29


CPU_DECODING, GPU_DECODING = DecodeSettings(1, 1, True), DecodeSettings(8, GPU_COLUMNS, False)


class FusedLinear(NamedTuple):
    """Linear layers with the same input as one matrix product: weight [Σ out, in], possibly ``packed``. The LoRA
    products of the L lanes are added by ``a`` [L, in, Σ r] and the block-diagonal ``b`` [L, Σ r, Σ out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor | None
    b: torch.Tensor | None


class Block(NamedTuple):
    """A decoder block. ``head_norms`` [heads + kv_heads, D]: RMSNorm weights of queries and keys, None if absent."""

    qkv: FusedLinear
    out: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    norm_in: torch.Tensor
    norm_mlp: torch.Tensor
    head_norms: torch.Tensor | None


class Frame(NamedTuple):
    """Embedding, final norm, output layer and sizes of a decoder. ``cos`` and ``sin`` [positions, D]: rotary angles of
    every position; the first half of ``sin`` is negated, as ``rotation`` needs."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: FusedLinear
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

    A row decodes the sequence ``sequence_R``, at most ``limit_R`` tokens. Its last token ``token_R`` is at
    ``position_R`` of the cache and has index ``sampled_R`` in the completion. Idle rows (``alive_R`` false) write to
    the last sequence, which is scratch. ``temperature_R1`` None: all 1; ``greedy_R1`` None: no row is greedy;
    ``cut_R3`` (top-k, top-p and min-p) None: no row is truncated.
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


def select_rows(rows: Rows, index: torch.Tensor) -> Rows:
    optional = (None if table is None else table[index] for table in (rows.temperature_R1, rows.greedy_R1, rows.cut_R3))
    return Rows(*(table[index] for table in rows[:6]), *optional)


class SupportRecord(NamedTuple):
    """Kept set of every token under truncated sampling: ``count_NT`` ids of ``ids_M``, from index ``first_NT`` on. The
    first ``used_1`` elements of ``ids_M`` are in use; the last element is scratch. ``rank_K``: 0 to K − 1, where K is
    the largest top-k."""

    ids_M: torch.Tensor
    used_1: torch.Tensor
    first_NT: torch.Tensor
    count_NT: torch.Tensor
    rank_K: torch.Tensor


class SampledTokens(NamedTuple):
    """Uniform numbers and sampled tokens [N, T] of every sequence. ``ends``: ids of the end tokens. ``support``: None
    if no sequence uses top-k, top-p or min-p."""

    ends: torch.Tensor
    uniforms_NT: torch.Tensor
    tokens_NT: torch.Tensor
    logprobs_NT: torch.Tensor
    entropy_NT: torch.Tensor
    support: SupportRecord | None


class StepPlan(NamedTuple):
    columns: int  # Cache columns that the first step reads
    ragged: bool  # Whether rows end at different columns
    steps: int  # Most steps to take


def product(x: torch.Tensor, linear_layers: FusedLinear) -> torch.Tensor:
    """Return the outputs [rows, Σ out] of x [rows, in]; every lane has an equal consecutive share of the rows."""
    out = linear(x, linear_layers.weight, linear_layers.bias)
    a, b = linear_layers.a, linear_layers.b
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
    if head_norms is not None:
        qk = torch.rms_norm(qk, [frame.head_dim], None, frame.eps) * head_norms
    return rotation(qk, cos, sin)


def block_end(frame: Frame, block: Block, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + product(attended, block.out)
    gate, up = product(rms(x, block.norm_mlp, frame.eps), block.gate_up).chunk(2, -1)
    return x + product(activated(gate, frame.activation) * up, block.down)


def logits(frame: Frame, x: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, V] of the last block's output [rows, H], in fp32 at least."""
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
    """Return logits [R, V] after one token per row; its keys and values go to column ``position_R`` of the row.

    ``keys`` and ``values``: per block [R, kv_heads, capacity, D], of which the first ``columns`` are read. ``ragged``:
    some rows have written fewer columns.
    """
    rows, dim = token_R.shape[0], frame.head_dim
    capacity, both = keys[0].shape[2], frame.heads + frame.kv_heads
    cos, sin = frame.cos[position_R].unsqueeze(1), frame.sin[position_R].unsqueeze(1)
    head = torch.arange(rows * frame.kv_heads, device=token_R.device).view(rows, -1)
    slot = (head * capacity + position_R[:, None]).flatten()
    x = F.embedding(token_R, frame.embedding)
    bias: torch.Tensor | None = None
    if ragged:
        unwritten_RK = torch.arange(columns, device=token_R.device) > position_R[:, None]
        zeros_RK = torch.zeros(unwritten_RK.shape, device=token_R.device, dtype=x.dtype)
        bias = zeros_RK.masked_fill_(unwritten_RK, float("-inf"))[:, None, None]
    for index, block in enumerate(blocks):
        qkv = product(rms(x, block.norm_in, frame.eps), block.qkv).view(rows, -1, dim)
        qk = rotated(frame, block.head_norms, qkv[:, :both], cos, sin)
        keys[index].view(-1, dim).index_copy_(0, slot, qk[:, frame.heads :].reshape(-1, dim))
        values[index].view(-1, dim).index_copy_(0, slot, qkv[:, both:].reshape(-1, dim))
        # Grouped queries lie along the query axis, so that each key is read once for all queries of its group.
        attended = F.scaled_dot_product_attention(
            qk[:, : frame.heads].reshape(rows, frame.kv_heads, -1, dim),
            keys[index][:, :, :columns],
            values[index][:, :, :columns],
            attn_mask=bias,
            scale=frame.scaling,
        )
        x = block_end(frame, block, x, attended.reshape(rows, -1))
    return logits(frame, x)


def draw(
    logits_RV: torch.Tensor,
    uniforms_R: torch.Tensor,
    temperature_R1: torch.Tensor | None = None,
    greedy_R1: torch.Tensor | None = None,
    exact_sums: bool = False,
    cut_R3: torch.Tensor | None = None,
    rank_K: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample one token per row from softmax(logits / temperature), truncated by ``cut_R3`` and renormalised.

    Return the tokens [R], their log-probabilities [R], the entropies [R] (nats) of the distribution that was sampled,
    and the kept ids [R, K] (see ``truncated``; None without ``cut_R3``). The token is the first whose cumulative
    probability exceeds ``uniforms_R`` (in [0, 1)), so rows are independent and nothing is sorted. ``temperature_R1``:
    None for 1. ``greedy_R1``: rows that take the largest logit. ``cut_R3``, ``rank_K``: see ``truncated``.
    ``exact_sums``: see ``cumulated``. ``chunk``: logits that a CPU processes at a time. Computes in fp32 (fp64 for fp64
    logits). NaN logits give an arbitrary token with log-probability NaN.
    """
    count = logits_RV.shape[0]
    rows = count if logits_RV.is_cuda else max(1, chunk // logits_RV.shape[1])
    if rows >= count:
        return _draw(logits_RV, uniforms_R, temperature_R1, greedy_R1, exact_sums, cut_R3, rank_K)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    kept_ids: list[torch.Tensor] = []
    for begin in range(0, count, rows):
        end = min(count, begin + rows)
        token_R, logprob_R, entropy_R, kept_RK = _draw(
            logits_RV[begin:end],
            uniforms_R[begin:end],
            None if temperature_R1 is None else temperature_R1[begin:end],
            None if greedy_R1 is None else greedy_R1[begin:end],
            exact_sums,
            None if cut_R3 is None else cut_R3[begin:end],
            rank_K,
        )
        tokens.append(token_R)
        logprobs.append(logprob_R)
        entropies.append(entropy_R)
        if kept_RK is not None:
            kept_ids.append(kept_RK)
    return (
        torch.cat(tokens),
        torch.cat(logprobs),
        torch.cat(entropies),
        torch.cat(kept_ids) if len(kept_ids) > 0 else None,
    )


def _draw(
    logits_RV: torch.Tensor,
    uniforms_R: torch.Tensor,
    temperature_R1: torch.Tensor | None,
    greedy_R1: torch.Tensor | None,
    exact_sums: bool,
    cut_R3: torch.Tensor | None,
    rank_K: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    real = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    x_RV = logits_RV.to(real)
    if temperature_R1 is not None:
        x_RV = x_RV / temperature_R1
    # −1e4 stands for −inf: its exponential is 0 and 0 · −1e4 is 0, where 0 · −inf is not a number.
    x_RV = (x_RV - x_RV.amax(-1, keepdim=True)).clamp_(min=-1e4)
    mass_RV = x_RV.exp()
    kept_RK: torch.Tensor | None = None
    if cut_R3 is not None and rank_K is not None:
        mass_RV, kept_RK = truncated(mass_RV, cut_R3, rank_K, exact_sums)
    token_R1, total_R1 = inverse(mass_RV, uniforms_R.unsqueeze(1), exact_sums)
    if greedy_R1 is not None:
        token_R1 = torch.where(greedy_R1, logits_RV.argmax(-1, keepdim=True), token_R1)
    log_total_R = total_R1.squeeze(1).log()
    logprob_R = x_RV.gather(1, token_R1).squeeze(1) - log_total_R
    entropy_R = log_total_R - torch.linalg.vecdot(mass_RV, x_RV) / total_R1.squeeze(1)
    return token_R1.squeeze(1), logprob_R, entropy_R, kept_RK


def needs_exact_sums(device: torch.device) -> bool:
    """Return whether ``cumulated`` needs sums that do not depend on their order: on a GPU in deterministic mode."""
    return device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


def inverse(
    mass_RV: torch.Tensor, uniforms_R1: torch.Tensor, exact_sums: bool, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token [R, 1] whose cumulative mass exceeds ``uniforms_R1`` (in [0, 1)) times the row's total
    mass, and that total [R, 1]. A token without mass is never returned."""
    # ``block`` is a parameter because TorchScript cannot read a constant of the module.
    size = mass_RV.shape[1]
    if size <= block:
        below_RV = cumulated(mass_RV, exact_sums)
        total_R1 = below_RV[:, -1:].contiguous()
        return torch.searchsorted(below_RV, _aim(uniforms_R1, total_R1), right=True).clamp_(max=size - 1), total_R1
    full = size // block * block
    sums_RB = mass_RV[:, :full].unflatten(1, [size // block, block]).sum(-1)
    if full < size:
        sums_RB = torch.cat([sums_RB, mass_RV[:, full:].sum(-1, keepdim=True)], 1)
    below_RB = cumulated(sums_RB, exact_sums)
    total_R1 = below_RB[:, -1:].contiguous()
    aim_R1 = _aim(uniforms_R1, total_R1)
    block_R1 = torch.searchsorted(below_RB, aim_R1, right=True).clamp_(max=below_RB.shape[1] - 1)
    before_R1 = below_RB.gather(1, (block_R1 - 1).clamp_(min=0)).masked_fill(block_R1 == 0, 0.0)
    ids_RK = block_R1 * block + torch.arange(block, device=mass_RV.device)
    inside_RK = mass_RV.gather(1, ids_RK.clamp(max=size - 1)).masked_fill(ids_RK >= size, 0.0)
    reached_RK = cumulated(inside_RK, exact_sums)
    # By rounding, the cumulative sum inside the block may stay below the block sum: then take its last token with mass.
    last_R1 = torch.searchsorted(reached_RK, reached_RK[:, -1:].contiguous())
    offset_R1 = torch.searchsorted(reached_RK, aim_R1 - before_R1, right=True)
    return (block_R1 * block + torch.minimum(offset_R1, last_R1)).clamp_(max=size - 1), total_R1


def _aim(uniforms_R1: torch.Tensor, total_R1: torch.Tensor) -> torch.Tensor:
    aim_R1 = (uniforms_R1 * total_R1).to(total_R1.dtype)
    # Below the total in spite of rounding: else the search could run past the last token with mass.
    return torch.minimum(aim_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))


def truncated(
    mass_RV: torch.Tensor, cut_R3: torch.Tensor, rank_K: torch.Tensor, exact_sums: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masses [R, V] (largest of a row: 1) with 0 outside the kept set, and the ids [R, K] of the K most
    probable tokens, in descending order, with −1 in place of ids outside the kept set.

    ``cut_R3``: top-k (0: the row is not truncated and keeps no ids), top-p and min-p of each row. ``rank_K``: 0 to
    K − 1, where K is the largest top-k; only K tokens are sorted.
    """
    most_R1, top_p_R1, min_p_R1 = cut_R3[:, 0:1], cut_R3[:, 1:2], cut_R3[:, 2:3]
    top_RK, ids_RK = mass_RV.topk(rank_K.shape[0], -1)
    kept_RK = (rank_K < most_R1) & (top_RK >= min_p_R1)
    sums_RK = cumulated(top_RK * kept_RK, exact_sums)
    before_RK = torch.cat([torch.zeros_like(top_p_R1), sums_RK[:, :-1]], 1)
    kept_RK &= (before_RK < top_p_R1 * sums_RK[:, -1:]) | (top_p_R1 >= 1)
    kept_RK |= (rank_K == 0) & (most_R1 > 0)  # also for NaN logits
    cut_RV = torch.zeros_like(mass_RV).scatter_(1, ids_RK, top_RK * kept_RK)
    return torch.where(most_R1 > 0, cut_RV, mass_RV), ids_RK.masked_fill(~kept_RK, -1)


def cumulated(mass_RV: torch.Tensor, exact_sums: bool = False) -> torch.Tensor:
    """Return the cumulative sums of the masses (each 0 to 1) along each row.

    On a GPU, the cumulative sum of floats has no fixed order, and torch raises an error for it under
    ``torch.use_deterministic_algorithms``. ``exact_sums`` adds integer multiples of 2⁻⁴⁰ instead, whose sum is exact
    and fits in int64 for the largest vocabularies.
    """
    if not exact_sums:
        return mass_RV.cumsum(-1)
    grain = 2.0**-40
    return (mass_RV.double() / grain).long().cumsum(-1).double().mul_(grain).to(mass_RV.dtype)


def record_support(record: SupportRecord, ids_RK: torch.Tensor, index_R: torch.Tensor) -> None:
    """Append the kept ids of each row (−1: not kept) to the record, as the kept set of the token with index ``index_R``
    in the flattened tables [N, T]."""
    kept_RK = ids_RK >= 0
    count_R = kept_RK.sum(1)
    end_R = count_R.cumsum(0) + record.used_1
    kept_N, scratch = kept_RK.view(-1), record.ids_M.shape[0] - 1
    # Ids that are not kept go to the scratch element: a selection would have a shape that depends on values.
    index_N = (kept_N.cumsum(0) - 1 + record.used_1).masked_fill(~kept_N, scratch)
    record.ids_M.index_copy_(0, index_N, ids_RK.view(-1).to(record.ids_M.dtype))
    record.first_NT.view(-1).index_copy_(0, index_R, end_R - count_R)
    record.count_NT.view(-1).index_copy_(0, index_R, count_R)
    record.used_1.copy_(end_R[-1:])


def empty_record(count: int, longest: int, most: int, device: torch.device) -> SupportRecord:
    """Return a record for ``count`` sequences of at most ``longest`` tokens, each drawn from at most ``most`` ids."""
    return SupportRecord(
        ids_M=torch.empty(1, dtype=torch.int32, device=device),
        used_1=torch.zeros(1, dtype=torch.long, device=device),
        first_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
        count_NT=torch.zeros(count, longest, dtype=torch.long, device=device),
        rank_K=torch.arange(most, device=device),
    )


def supports_of(record: SupportRecord, sequences: torch.Tensor, lengths_N: np.ndarray) -> list[Support | None]:
    """Return for each sequence the token ids that top-k, top-p or min-p kept at every position; None for a sequence
    that used none of them."""
    first_NT, count_NT = (table[sequences].cpu().numpy() for table in (record.first_NT, record.count_NT))
    supports: list[Support | None] = []
    for first_T, count_T, length in zip(first_NT, count_NT, lengths_N, strict=True):
        first_T, count_T = first_T[:length], count_T[:length]
        if not count_T.any():
            supports.append(None)
            continue
        offsets = np.concatenate([[0], count_T.cumsum()])
        index = np.repeat(first_T - offsets[:-1], count_T) + np.arange(offsets[-1])
        ids = record.ids_M[torch.from_numpy(index).to(record.ids_M.device)]
        supports.append(Support(ids.cpu().numpy(), offsets))
    return supports


def draw_tokens(rows: Rows, sampled: SampledTokens, logits_RV: torch.Tensor, exact_sums: bool) -> torch.Tensor:
    """Draw and record every row's next token, in place. Return a mask [R] of the rows that end with this token."""
    # Idle rows draw too, because shapes are fixed: their tokens go to the scratch sequence.
    scratch, longest = sampled.tokens_NT.shape[0] - 1, sampled.tokens_NT.shape[1]
    index = rows.sequence_R.masked_fill(~rows.alive_R, scratch) * longest + rows.sampled_R
    uniforms = sampled.uniforms_NT.view(-1)[index]
    support = sampled.support
    token, logprob, entropy, kept_RK = draw(
        logits_RV,
        uniforms,
        rows.temperature_R1,
        rows.greedy_R1,
        exact_sums,
        rows.cut_R3,
        None if support is None else support.rank_K,
    )
    if support is not None and kept_RK is not None:
        record_support(support, kept_RK.masked_fill(~rows.alive_R.unsqueeze(1), -1), index)
    sampled.tokens_NT.view(-1).index_copy_(0, index, token)
    sampled.logprobs_NT.view(-1).index_copy_(0, index, logprob)
    sampled.entropy_NT.view(-1).index_copy_(0, index, entropy)
    continues = rows.alive_R & (rows.sampled_R + 1 < rows.limit_R) & (token.unsqueeze(1) != sampled.ends).all(1)
    ended = rows.alive_R & ~continues
    rows.token_R.copy_(token)
    rows.sampled_R.add_(continues)
    rows.alive_R.copy_(continues)
    return ended


def decode_steps(
    frame: Frame,
    blocks: list[Block],
    rows: Rows,
    sampled: SampledTokens,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    plan: StepPlan,
    exact_sums: bool,
) -> int:
    """Take at most ``plan.steps`` decode steps in place; return their number.

    With more than one step, the call returns after the first step in which a row ends; this waits for the device.
    """
    for done in range(plan.steps):
        columns = plan.columns + done
        logits_RV = forward(frame, blocks, rows.token_R, rows.position_R, keys, values, columns, plan.ragged)
        # In place: a captured graph reads the same addresses at every replay.
        rows.position_R.add_(rows.alive_R)
        ended_R = draw_tokens(rows, sampled, logits_RV, exact_sums)
        if plan.steps > 1 and bool(ended_R.any()):
            return done + 1
    return plan.steps


@functools.cache
def compiled_decode_steps() -> Callable[..., int]:
    """Return ``decode_steps`` compiled by TorchScript, or uncompiled if torch or Python lack TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and has no successor that needs no C++ compiler
        try:
            script: Any = torch.jit.script
            return script(decode_steps)
        except (AttributeError, RuntimeError, OSError):
            return decode_steps
