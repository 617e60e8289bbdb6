"""Quantised bases (``[model] quantize``): linear layers of decoder blocks in 8 or 4 bits, and the measured effect.

int8: one scale per output feature, the largest magnitude of its row divided by 127. nf4: the 16 levels of NormalFloat
and one scale per 64 numbers (QLoRA, arXiv 2305.14314), by bitsandbytes. Only weights are quantised: each product, also
in the backward pass, dequantises its weight to the base's dtype and does not keep it. Update and sampler read the same
numbers from ``QuantizedLinear.weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrain.errors import ModelError
from retrain.extras import is_installed, missing
from retrain.models.layers import NF4_BLOCK
from retrain.policy.arithmetic import Context, Gradients
from retrain.rng import torch_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INT8_LEVELS = 127
# Prompts for measuring the effect of quantisation
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Add 17 and 25, then say whether the result is even.",
    "Write a short function that reverses a list.",
    "Explain in two sentences why the sky is blue.",
    "A train goes 60 miles in 45 minutes. How fast is that in miles per hour?",
    "Name three differences between a cat and a dog.",
    "Translate to French: the weather is nice today.",
    "Which is larger, 3/4 or 5/7? Show why.",
)
ANSWER_TOKENS = 32  # Maximum tokens of an answer


class QuantizedLinear(nn.Module):
    packed: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, kind: str, device: torch.device):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.dtype = kind, linear.weight.dtype
        packed, scale = _PACK[kind](linear.weight.detach().to(device))
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.original: Tensor | None = None  # The unquantised weight while the model is to compute with it

    @property
    def weight(self) -> Tensor:
        """Dequantise the weight [out, in] to the base's dtype."""
        if self.original is not None:
            return self.original.to(self.packed.device)
        return _UNPACK[self.kind](self.packed, self.scale, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return _QuantizedProduct.apply(x, self)  # pyright: ignore[reportReturnType]


class QuantizedContext(Context):
    layer: QuantizedLinear


class _QuantizedProduct(torch.autograd.Function):
    # Keeps neither input nor weight for the backward pass, as ``F.linear`` would.
    @staticmethod
    def forward(ctx: QuantizedContext, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: QuantizedContext, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.layer.weight, None


def _pack_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    # The scale [out, 1] is rounded to the weight's format before it divides, so it adds no error.
    scale = (weight.abs().amax(1, keepdim=True).double() / INT8_LEVELS).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (weight.float() / scale.float()).round().clamp(-INT8_LEVELS, INT8_LEVELS).to(torch.int8), scale


def _unpack_int8(packed: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return packed.to(dtype).mul_(scale)


def _pack_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, state = _bitsandbytes().quantize_4bit(weight.float(), blocksize=NF4_BLOCK, quant_type="nf4")
    return packed, state.absmax


def _unpack_nf4(packed: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    real = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    library, size = _bitsandbytes(), shape[0] * shape[1]
    # One row per block, because the library's AVX-512 kernel reads scales by row, wrongly where a block crosses a row's
    # end.
    rows = (size // NF4_BLOCK, NF4_BLOCK) if size % NF4_BLOCK == 0 else (1, size)
    state = library.QuantState(
        absmax=scale,
        shape=torch.Size(rows),
        code=library.get_4bit_type("nf4", device=packed.device),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
        dtype=real,
    )
    return library.dequantize_4bit(packed, state).to(dtype).view(shape)


_PACK = {"int8": _pack_int8, "nf4": _pack_nf4}
_UNPACK = {"int8": _unpack_int8, "nf4": _unpack_nf4}


def _bitsandbytes() -> ModuleType:
    if not is_installed("bitsandbytes"):
        raise missing('[model] quantize = "nf4"', "bitsandbytes")
    import bitsandbytes.functional as library

    return library


@dataclass(frozen=True)
class QuantizationEffect:
    """Measured effect of quantisation.

    ``k3``: mean of w − 1 − ln w (nats) over ``tokens`` tokens that the quantised base drew, where w is a token's
    unquantised probability divided by its quantised one. It is an unbiased estimate of KL(quantised ‖ unquantised) per
    token (Schulman, "Approximating KL divergence"). ``kl``: that divergence over the vocabulary at the same positions.
    """

    kind: str
    k3: float
    kl: float
    tokens: int
    bytes_before: int
    bytes_after: int

    @property
    def summary(self) -> str:
        mib = 2**20
        return (
            f"base in {self.kind}: {self.bytes_after / mib:.1f} MiB in place of {self.bytes_before / mib:.1f}; "
            f"k3 to the unquantised base {self.k3:.2g} nats per token (KL {self.kl:.2g}), over {self.tokens} tokens of "
            "its own"
        )


def weight_bytes(model: nn.Module) -> int:
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return sum(w.nbytes for w in model.parameters()) + sum(m.packed.nbytes + m.scale.nbytes for m in layers)


def quantise(
    model: PreTrainedModel, kind: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], device: torch.device
) -> QuantizationEffect:
    """Quantise the linear layers of a model on the host, move it to ``device``, and measure the effect.

    During this the host holds both versions, and the device at most one unquantised layer. Raises ModelError for a
    model without linear layers besides its output layer, MissingExtra for nf4 without bitsandbytes.
    """
    before = weight_bytes(model)
    head = model.get_output_embeddings()
    # type() is exact: a subclass may multiply in its own way.
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not linears:
        raise ModelError(
            f'it has no linear layers besides its output layer: [model] quantize = "{kind}" changes nothing'
        )
    originals: list[tuple[QuantizedLinear, Tensor]] = []
    for name, linear in linears:
        parent, _, leaf = name.rpartition(".")
        layer = QuantizedLinear(linear, kind, device).eval()
        setattr(model.get_submodule(parent), leaf, layer)
        originals.append((layer, linear.weight.detach()))
    model.to(device)  # pyright: ignore[reportArgumentType]
    for parameter in model.parameters():  # a parameter in a mapped file keeps all of that file in memory
        parameter.data = parameter.data.clone()
    k3, kl, tokens = _measured(model, originals, tokenizer, ends, device)
    return QuantizationEffect(kind, k3, kl, tokens, before, weight_bytes(model))


def _measured(
    model: PreTrainedModel,
    originals: Sequence[tuple[QuantizedLinear, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    device: torch.device,
) -> tuple[float, float, int]:
    prompts = [_encoded(tokenizer, question) for question in QUESTIONS]
    width = max(map(len, prompts))
    # Padded on the left: the last column is every row's newest token.
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    with torch.no_grad():
        ids, real = _answered(model, ids, real, ends)
        rows = [(row[seen.bool()], len(prompt)) for row, seen, prompt in zip(ids, real, prompts, strict=True)]
        before = [_logprobs(model, *row).cpu() for row in rows]
        for layer, weight in originals:
            layer.original = weight
        after = [_logprobs(model, *row).cpu() for row in rows]
        for layer, _ in originals:
            layer.original = None
    k3s, kls = [], []
    for (row, begin), quantised_TV, unquantised_TV in zip(rows, before, after, strict=True):
        drawn_T1 = row[begin:, None].cpu()
        log_ratio_T = (unquantised_TV - quantised_TV).gather(1, drawn_T1).double()
        k3s.append(log_ratio_T.exp() - 1 - log_ratio_T)
        kls.append((quantised_TV.exp() * (quantised_TV - unquantised_TV)).double().sum(1))
    k3, kl = torch.cat(k3s), torch.cat(kls)
    return float(k3.mean()), float(kl.mean()), len(kl)


def _encoded(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": question}]
        text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(question)["input_ids"])


def _answered(model: PreTrainedModel, ids: Tensor, real: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the prompts, each followed by an answer sampled from the model with a fixed seed, and the mask of tokens
    that are not padding."""
    noise = torch.Generator().manual_seed(torch_seed("answers that measure a quantised base"))
    stops = torch.tensor(list(ends), device=ids.device)
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    cache = None
    fresh = ids
    for _ in range(ANSWER_TOKENS):
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        made = model(
            input_ids=fresh, attention_mask=real, position_ids=positions, use_cache=True, past_key_values=cache
        )
        cache = made.past_key_values
        # Drawn on the host, whose generator gives the same numbers whatever the device.
        mass = made.logits[:, -1].float().softmax(-1).cpu()
        fresh = torch.multinomial(mass, 1, generator=noise).to(ids.device)
        ids, real = torch.cat([ids, fresh], 1), torch.cat([real, alive.unsqueeze(1).to(real.dtype)], 1)
        alive = alive & ~torch.isin(fresh.squeeze(1), stops)
        if not alive.any():
            break
    return ids, real


def _logprobs(model: PreTrainedModel, ids: Tensor, begin: int) -> Tensor:
    logits = model(input_ids=ids[None], use_cache=False).logits[0, begin - 1 : -1]
    return logits.float().log_softmax(-1)
