"""The decision whether a model decodes through ``engines.dense``: by its configuration, and by a probe."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from retrain.engines.dense import DenseDecoder, KVCache
from retrain.engines.step import ACTIVATIONS, draw, forward, logits
from retrain.models.layers import DENSE_FAMILIES
from retrain.policy.base import BaseModel
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
    """Return the fast decoder of this base, or None when the model is of another kind.

    A short probe has to give what the model's own forward pass gives.
    """
    if not is_supported(base):
        return None
    decoder = DenseDecoder(base)
    return decoder if reproduces(decoder, base) else None


def reproduces(decoder: DenseDecoder, base: BaseModel) -> bool:
    """Return whether the decoder gives the log-probabilities of the model's own forward pass, with no lane active, for
    tokens drawn from it behind random ones."""
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
    """Return the inputs of the model's output layer [R, T, H], before it rounds its logits, and the last column's
    logits."""
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
    """Yield logits [N, V] by prefill, a row at a time, then by ragged steps, with their rows and columns."""
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
