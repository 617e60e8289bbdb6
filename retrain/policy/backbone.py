"""The base model as the update runs it: hidden states, then log-probabilities of the sampled tokens.

Small forward passes find out once what a model allows: whether its output layer can be split off (else all logits are
computed at once), whether tokens can be packed (else sequences are padded), and which layers can be replaced by equal
ones that keep less memory. ``notes`` names the restrictions. ``BaseModel.release`` undoes all replacements.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrain.errors import ModelError
from retrain.policy.arithmetic import (
    NARROW,
    bfloat16_copy,
    bfloat16_results,
    is_rounded,
    rms_norm,
    rounded_linear,
    swiglu,
)
from retrain.policy.base import BaseModel
from retrain.policy.head import Head, Lap, ValueHead, no_lap, split_head
from retrain.policy.lora import Lanes, LoraWeights
from retrain.policy.packing import (
    NAME,
    Budget,
    Layout,
    MicroBatch,
    PackedLayout,
    mode,
    optional_table,
    packed_layout,
    padded_layout,
    predicting,
    register_attention,
    split_microbatches,
    stacked_supports,
    update_mode,
)
from retrain.rng import generator
from retrain.threads import thread_values
from retrain.types import Sample, Want

T = TypeVar("T")
P = ParamSpec("P")
Layer = Callable[[Tensor], Tensor]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # Linear layers of a gated MLP
PLAIN_LAYERS = {"full_attention", "sliding_attention"}
PROBE_LENGTH = 36  # Tokens of the longest sequence in the trial of packing
PROBE_QUANTILE = 0.9  # Share of positions at which packed and padded hidden states have to agree: ...
PROBE_GAPS = {torch.float64: 1e-9, torch.float32: 1e-3}  # ... their difference may be this share of their norm ...
PROBE_HALF_GAP = 5e-2  # ... or, in half precision, this share: after 30 layers in bf16 they differ by 1 to 3 %

_lock = threading.Lock()


@dataclass
class Backbone:
    """A base model as the update runs it. ``decoder`` and ``head``: None if the output layer cannot be split off.
    ``window``: longest sequence that may be packed."""

    decoder: nn.Module | None
    head: Head | None
    packs: bool
    window: int
    notes: tuple[str, ...]

    def layout(self, samples: Sequence[Sample], base: BaseModel, share: bool = True) -> Layout:
        """Return the layout on the host, packed if possible. ``share``: equal prefixes are computed once."""
        host = torch.device("cpu")
        if self.packs and max(map(len, samples)) <= self.window:
            return packed_layout(samples, host, share)
        return padded_layout(samples, host, base.pad_id)

    def hidden(self, layout: Layout) -> Tensor:
        """Return the hidden states [M, H] that predict the action tokens."""
        assert self.decoder is not None, "only a model whose output layer can be split off gives hidden states"
        return predicting(_run(self.decoder, layout).last_hidden_state, layout)


def _run(module: nn.Module, layout: Layout) -> Any:
    # The model counts the positions of each row from 0, which is wrong for a packed row only.
    options = {"position_ids": layout.positions_BL} if isinstance(layout, PackedLayout) else {}
    with update_mode(layout):
        return module(input_ids=layout.ids_BL, use_cache=False, **options)


def whole_logits(base: BaseModel, layout: Layout) -> Tensor:
    """Return the logits [M, V] that predict the action tokens, for models whose output layer cannot be split off."""
    return predicting(_run(base.model, layout).logits, layout)


def backbone_of(base: BaseModel) -> Backbone:
    """Return the base as the update runs it. The first call determines this by trial passes. Thread-safe."""
    # Worker threads call this too, and the trial passes must run once.
    with _lock:
        if not isinstance(base.backbone, Backbone):
            base.backbone = _examine(base)
        return base.backbone


def _examine(base: BaseModel) -> Backbone:
    notes = []
    parts = split_head(base.model)
    if parts is None:
        notes.append(
            f"the output layer of {type(base.model).__name__} cannot be split off: the update makes the logits of all "
            "tokens at once, which takes more memory"
        )
    decoder, head = parts or (None, None)
    if head is not None:
        head = replace(head, product_VH=base.head_weight)
    config = base.model.config.get_text_config()
    packs = decoder is not None and _try_packing(base, decoder, config)
    if not packs:
        notes.append(
            f"{type(base.model).__name__} does not take packed sequences: the update pads them and computes the prompt "
            "of a group once per completion"
        )
    window = getattr(config, "sliding_window", None) or 1 << 30  # No window: any length
    if decoder is not None:
        _offer_checkpointing(base, decoder)
        _offer_rounded_products(base, decoder)
    _offer_fused_norms(base)
    _offer_fused_mlps(base)
    return Backbone(decoder, head, packs, int(window), tuple(notes))


def _try_packing(base: BaseModel, decoder: nn.Module, config: Any) -> bool:
    if getattr(base.model.config, "_attn_implementation", None) not in ("sdpa", NAME):
        return False
    if not set(getattr(config, "layer_types", None) or PLAIN_LAYERS) <= PLAIN_LAYERS:
        return False
    if not base.model._can_set_attn_implementation():
        return False
    register_attention()
    before = base.model.config._attn_implementation
    base.model.set_attn_implementation(NAME)
    # transformers only warns when a model cannot take another implementation, and keeps the old one.
    if base.model.config._attn_implementation != NAME:
        return False
    # A named stream: whether a model packs must not differ between processes.
    noise = generator("probe of packed sequences")
    most = min(PROBE_LENGTH, base.context_length, getattr(config, "sliding_window", None) or PROBE_LENGTH)
    prompts = [noise.integers(0, base.vocab_size, length).tolist() for length in (most // 2, most // 4)]
    samples = [
        Sample.single_turn(
            prompt, noise.integers(0, base.vocab_size, length).tolist(), zeros := np.zeros(length), zeros
        )
        for prompt, length in ((prompts[0], most // 3), (prompts[0], most // 2), (prompts[1], most // 2))
    ]
    backbone = Backbone(decoder, None, True, 1 << 30, ())
    with torch.no_grad():
        packed = backbone.hidden(packed_layout(samples, base.device))
        padded = backbone.hidden(padded_layout(samples, base.device, base.pad_id))
    # In half precision a deep model amplifies roundings at a few positions. Attention to the wrong tokens would change
    # the hidden states at every later position, hence the quantile.
    gap_M = ((packed - padded).float().norm(dim=1) / padded.float().norm(dim=1)).quantile(PROBE_QUANTILE)
    if float(gap_M) <= PROBE_GAPS.get(base.dtype, PROBE_HALF_GAP):
        base.on_release(partial(base.model.set_attn_implementation, before))
        return True
    base.model.set_attn_implementation(before)
    return False


OPTIONAL = ("old_logprobs", "values", "value_targets", "policy_weights")  # Arrays that only some samples have


def collate(samples: Sequence[Sample], base: BaseModel, *, share: bool = True) -> MicroBatch:
    """Return these samples as tensors on the host. ``share``: equal prefixes are computed once."""
    counts = [int(sample.action_mask.sum()) for sample in samples]
    shape = (len(samples), max(counts))
    real = np.float64 if base.dtype == torch.float64 else np.float32
    floats = np.zeros((2, *shape), dtype=real)
    masks = np.zeros((2, *shape), dtype=bool)
    for i, (sample, count) in enumerate(zip(samples, counts, strict=True)):
        mask = sample.action_mask
        floats[0, i, :count], floats[1, i, :count] = sample.advantages[mask], sample.logprobs[mask]
        masks[0, i, :count], masks[1, i, :count] = True, sample.loss_mask[mask]
    return MicroBatch(
        layout=backbone_of(base).layout(samples, base, share),
        targets_M=torch.from_numpy(np.concatenate([sample.token_ids[sample.action_mask] for sample in samples])),
        action_BT=torch.from_numpy(masks[0]),
        loss_mask_BT=torch.from_numpy(masks[1]),
        advantages_BT=torch.from_numpy(floats[0]),
        sampler_logprobs_BT=torch.from_numpy(floats[1]),
        supports=stacked_supports(samples),
        **{f"{name}_BT": optional_table(samples, name, shape, real) for name in OPTIONAL},
    )


def token_logprobs(
    base: BaseModel,
    batch: MicroBatch,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_gradient: bool = True,
    lap: Lap = no_lap,
    hidden_MH: Tensor | None = None,
    top_M: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability [B, T] of each action token, and its entropy (None without ``entropy``); 0 in the
    padding.

    The distribution is the one that the engine samples from: softmax(logits / temperature) over the vocabulary, or over
    the recorded support of each token, in fp32 (fp64 for fp64 bases). ``batch`` is on the base's device. ``lap`` is
    called with "forward" and "compute_entropy" when these sections end; ``hidden_MH``: hidden states that are already
    computed. ``top_M`` receives the highest log-probability for each action token.
    """
    backbone, layout = backbone_of(base), batch.layout
    if backbone.head is not None:
        head, hidden_MH = backbone.head, backbone.hidden(layout) if hidden_MH is None else hidden_MH
        if is_rounded(head.weight_VH):  # ``Head`` keeps sixteen bits of its logits, as for a bfloat16 base
            head, hidden_MH = (
                replace(head, weight_VH=bfloat16_copy(head.weight_VH), product_VH=None),
                hidden_MH.to(NARROW),
            )
        chosen_M, entropy_M = head.logprobs(
            hidden_MH,
            batch.targets_M,
            temperature,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
            lap=lap,
            supports=batch.supports,
            top_N=top_M,
        )
    else:
        real = torch.float64 if base.dtype == torch.float64 else torch.float32
        z_MV = whole_logits(base, layout).to(real) / temperature
        if batch.supports is not None:
            z_MV = batch.supports.only(z_MV)
        logprobs_MV = torch.log_softmax(z_MV, dim=-1)
        chosen_M = logprobs_MV.gather(-1, batch.targets_M.unsqueeze(-1)).squeeze(-1)
        if top_M is not None:
            top_M.copy_(logprobs_MV.detach().amax(-1))
        entropy_M = None
        if entropy:
            lap("forward")
            probs_MV = logprobs_MV.exp()
            if batch.supports is not None:
                logprobs_MV = logprobs_MV.masked_fill(logprobs_MV == -math.inf, 0.0)  # 0 · −inf
            entropy_M = -(probs_MV * logprobs_MV).sum(-1)
            entropy_M = entropy_M if entropy_gradient else entropy_M.detach()
            lap("compute_entropy")
    return as_table(chosen_M, batch), None if entropy_M is None else as_table(entropy_M, batch)


def hidden_states(base: BaseModel, batch: MicroBatch) -> Tensor:
    """Return the hidden states [M, H] that predict the action tokens. Raises ModelError for a model whose output layer
    cannot be split off."""
    backbone = backbone_of(base)
    if backbone.decoder is None:
        raise ModelError(
            f"{type(base.model).__name__} has no output layer apart from its other layers, which a critic needs: set "
            'advantage_mode = "grpo"'
        )
    return backbone.hidden(batch.layout)


def as_table(values_M: Tensor, batch: MicroBatch) -> Tensor:
    """Return the values [M] of the action tokens as a table [B, T], 0 in the padding."""
    # masked_scatter fills the mask row by row, which is the order of the action tokens in values_M.
    return values_M.new_zeros(batch.action_BT.shape).masked_scatter(batch.action_BT, values_M)


def per_sample(values_BT: Tensor, batch: MicroBatch) -> list[np.ndarray]:
    rows = zip(values_BT.cpu().numpy(), batch.action_BT.cpu().numpy(), strict=True)
    return [row_T[action_T] for row_T, action_T in rows]


# Per micro-batch and kind of score, each sample's array over its sampled tokens [T]
Scored = list[dict[Want, list[np.ndarray]]]


def in_microbatches(
    base: BaseModel, budget: Budget, samples: Sequence[Sample], compute: Callable[[Sequence[list[int]]], T]
) -> T:
    """Return ``compute(parts)``, where ``parts`` holds the sample indices of each micro-batch. If memory runs out,
    ``compute`` is called again with smaller micro-batches."""
    packed = backbone_of(base).packs
    return budget.fit(samples, lambda: split_microbatches(samples, budget.tokens, packed=packed), compute)


def score_microbatches(
    lanes: Lanes,
    parts: Iterable[Sequence[Sample]],
    want: frozenset[Want],
    adapter: LoraWeights,
    temperature: float,
    critic: tuple[LoraWeights, ValueHead] | None = None,
    reference: LoraWeights | None = None,
) -> Scored:
    """Score every micro-batch by forward passes without gradients. ``want`` decides which models run: the reference
    (the base, with the adapter ``reference`` after a warm-up), the policy with ``adapter``, the ``critic`` (its adapter
    and value head)."""
    scores: Scored = []
    for samples in parts:
        batch = collate(samples, lanes.base).to(lanes.base.device)
        tables: dict[Want, Tensor] = {}
        with torch.no_grad():
            if Want.REFERENCE in want:
                with lanes.single(reference):
                    tables[Want.REFERENCE], _ = token_logprobs(lanes.base, batch, temperature)
            if Want.LOGPROBS in want:
                with lanes.single(adapter):
                    tables[Want.LOGPROBS], _ = token_logprobs(lanes.base, batch, temperature)
            if Want.VALUES in want and critic is not None:
                value_adapter, head = critic
                with lanes.single(value_adapter):
                    tables[Want.VALUES] = as_table(head(hidden_states(lanes.base, batch)), batch)
        scores.append({kind: per_sample(table, batch) for kind, table in tables.items()})
    return scores


# -- the base's layers, while the update runs them -------------------------------------------------------------------


def _replace_forward(base: BaseModel, module: nn.Module, forward: Callable[..., object]) -> None:
    # An attribute of the instance shadows the class's method. There may be one already, from another replacement.
    before = module.__dict__.get("forward")

    def restore() -> None:
        module.__dict__.pop("forward", None)
        if before is not None:
            module.forward = before

    module.forward = forward
    base.on_release(restore)


def _in_update(forward: Layer, fused: Layer) -> Layer:
    return lambda x: fused(x) if mode.in_update else forward(x)


def _offer_fused_norms(base: BaseModel) -> None:
    """Let updates run ``rms_norm`` in place of modules that compute the same RMS norm. A base in fp64 is left as it is,
    because its modules normalise in fp32."""
    if base.dtype == torch.float64:
        return
    for module in base.model.modules():
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not (type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and eps):
            continue
        x = torch.linspace(-1, 3, 2 * len(weight), dtype=base.dtype, device=weight.device).view(1, 2, -1)
        with torch.no_grad():
            # The name proves nothing: Gemma's RMSNorm multiplies by 1 + weight. Compare results.
            fits = _same_norm(module(x), rms_norm(x, weight, eps))
        if fits:
            _replace_forward(base, module, _in_update(module.forward, partial(rms_norm, weight=weight, eps=eps)))


def _same_norm(first: Tensor, second: Tensor) -> bool:
    if first.dtype == torch.float32:
        return torch.allclose(first, second, rtol=1e-5, atol=1e-6)
    # Bit for bit in half precision, except where the order of a sum shows.
    return first.dtype == second.dtype and float((first != second).float().mean()) < 0.05


def _offer_fused_mlps(base: BaseModel) -> None:
    for module in base.model.modules():
        if not all(hasattr(module, name) for name in PROJECTIONS):
            continue
        width = module.gate_proj.weight.shape[-1]
        x = torch.linspace(-1, 3, 2 * width, dtype=base.dtype, device=base.device).view(1, 2, -1)
        with torch.no_grad():
            # The projections' names leave the activation open: only results show that it is SiLU.
            if torch.equal(module(x), _gated(module, x)):
                _replace_forward(base, module, _in_update(module.forward, partial(_gated, module)))


def _gated(mlp: nn.Module, x: Tensor) -> Tensor:
    gate, up, down = (mlp.get_submodule(name) for name in PROJECTIONS)  # each time, because lanes replace them
    with bfloat16_results():
        narrow = gate(x), up(x)
    return down(swiglu(*narrow))


def _offer_rounded_products(base: BaseModel, decoder: nn.Module) -> None:
    if base.dtype == torch.float32:
        for module in decoder.modules():
            if type(module) is nn.Linear:
                _replace_forward(base, module, _rounded_forward(module.forward, module))


def _rounded_forward(forward: Layer, module: nn.Linear) -> Layer:
    return lambda x: rounded_linear(module, x) if is_rounded(module.weight) else forward(x)


def checkpointed(recompute_context: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Let decoder layers keep only their input and recompute everything else in the backward pass, in this thread.

    ``recompute_context()`` returns the context manager for the second computation, which may run in another thread.
    """
    return thread_values(mode, recompute_context=recompute_context)


def _offer_checkpointing(base: BaseModel, decoder: nn.Module) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in decoder.modules():
        if isinstance(module, GradientCheckpointingLayer):
            _replace_forward(base, module, _checkpointed_forward(module.forward))


def _checkpointed_forward(forward: Callable[P, T]) -> Callable[P, T]:
    def layer(*args: P.args, **options: P.kwargs) -> T:
        context = mode.recompute_context
        if context is None or not torch.is_grad_enabled():
            return forward(*args, **options)
        # Non-reentrant, because only that takes a context_fn: active lanes and layouts are thread-local, and autograd
        # may recompute in another thread.
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), context()), **options)

    return layer
