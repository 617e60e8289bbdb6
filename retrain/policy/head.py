"""The output layer in chunks of rows: log-probability and entropy without logits [rows, V] for all rows at once.

The layer is frozen, so each row's gradient with respect to its hidden state is a vector that the forward pass can
work out while it still holds the row's logits: ∂ log π(target) = (onehot − π)·f′(z)·W. Backward then only scales
it, nothing is computed twice, and what is kept is [rows, H]. The same for the entropy −Σ π log π.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from retrain.policy.arithmetic import FULL, fp32_product

CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Logits of one chunk: what a CPU's caches keep; on a GPU enough for matrix products at full speed."""


Lap = Callable[[str], None]  # Called with the name of the timed section that ends here


def no_lap(part: str) -> None:
    """Nobody measures."""


@dataclass(frozen=True)
class Supports:
    """The tokens that each of M rows was sampled from (``engines.truncation``): row ``rows_K[k]`` may be ``ids_K[k]``.
    Row m has the places ``offsets[m]`` to ``offsets[m + 1]``, on the host."""

    rows_K: torch.Tensor
    ids_K: torch.Tensor
    offsets: list[int]

    def to(self, device: torch.device) -> Supports:
        return Supports(self.rows_K.to(device), self.ids_K.to(device), self.offsets)

    def only(self, z_RV: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The logits of rows ``start`` and following [R, V] with −inf for what is not in a row's support."""
        part = slice(self.offsets[start], self.offsets[start + len(z_RV)])
        places = (self.rows_K[part] - start, self.ids_K[part])
        return torch.full_like(z_RV, -math.inf).index_put(places, z_RV[places])


@dataclass(frozen=True)
class Head:
    """logits = cap(multiplier · (W h + bias)), with cap(z) = softcap · tanh(z / softcap) where a model has one.

    Logits are fp32 (fp64 for fp64 weights), not rounded to half precision on the way. ``product_VH``: the weight as
    ``fp32_product`` takes it, where that is another one (``BaseModel.head_weight``).
    """

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None
    softcap: float | None = None
    multiplier: float = 1.0
    product_VH: torch.Tensor | None = None

    def products(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """multiplier · (W h + bias) [R, V]."""
        z_RV = fp32_product(hidden_RH, self.weight_VH if self.product_VH is None else self.product_VH)
        if self.bias_V is not None:
            z_RV += self.bias_V
        if self.multiplier != 1.0:
            z_RV *= self.multiplier
        return z_RV

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of hidden states [R, H]."""
        return self.capped(self.products(hidden_RH))[0]

    def capped(self, z_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return cap(z) [R, V] and the tanh in it, None where the model has no cap."""
        if self.softcap is None:
            return z_RV, None
        tanh_RV = torch.tanh(z_RV / self.softcap)
        return tanh_RV * self.softcap, tanh_RV

    def logprobs(
        self,
        hidden_NH: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
        entropy_gradient: bool = True,
        lap: Lap = no_lap,
        supports: Supports | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probability [N] of the targets and, if asked for, the entropy [N] of softmax(logits / temperature), over
        ``supports`` where given.

        Gradients reach ``hidden_NH`` alone, from the entropy only with ``entropy_gradient``. ``lap`` hears of "forward"
        before and of "compute_entropy" after the entropy of each chunk.
        """
        entropies = (entropy, entropy_gradient)
        chosen_N, entropy_N = _Logprobs.apply(hidden_NH, targets_N, self, temperature, entropies, lap, supports)  # pyright: ignore[reportGeneralTypeIssues]
        return chosen_N, entropy_N if entropy else None

    def chunk_rows(self) -> int:
        """Rows whose logits are held at a time."""
        real = 8 if self.weight_VH.dtype == torch.float64 else 4
        most = CHUNK_BYTES.get(self.weight_VH.device.type, CHUNK_BYTES["cuda"])
        return max(16, most // (real * self.weight_VH.shape[0]))


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        targets_N: torch.Tensor,
        head: Head,
        temperature: float,
        entropies: tuple[bool, bool],
        lap: Lap,
        supports: Supports | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight_VH, (entropy, entropy_gradient) = head.weight_VH, entropies
        real = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        chosen_N = torch.empty(len(hidden_NH), dtype=real, device=hidden_NH.device)
        entropy_N = torch.empty_like(chosen_N) if entropy else chosen_N.new_empty(0)
        wanted = ctx.needs_input_grad[0]
        slopes = [torch.empty_like(hidden_NH) for _ in range(wanted * (1 + (entropy and entropy_gradient)))]
        size = head.chunk_rows()
        for start in range(0, len(hidden_NH), size):
            part = slice(start, start + size)
            target_R1 = targets_N[part].unsqueeze(1)
            z_RV, tanh_RV = head.capped(head.products(hidden_NH[part]))
            if temperature != 1.0:
                z_RV /= temperature
            if supports is not None:
                z_RV = supports.only(z_RV, start)
            logprobs_RV = torch.log_softmax(z_RV, -1)
            chosen_N[part] = logprobs_RV.gather(1, target_R1).squeeze(1)
            if not wanted and not entropy:
                continue
            probs_RV = torch.exp(logprobs_RV, out=z_RV)
            scale: Any = head.multiplier / temperature
            if tanh_RV is not None:
                scale = tanh_RV.square_().neg_().add_(1.0).mul_(scale)
            if entropy:
                lap("forward")
                logprobs_RV.clamp_min_(torch.finfo(real).min)  # 0 · −inf
                entropy_N[part] = -torch.linalg.vecdot(probs_RV, logprobs_RV)
            if len(slopes) > 1:  # ∂H = −π (log π + H), one per logit
                slope_RV = logprobs_RV.add_(entropy_N[part].unsqueeze(1)).mul_(probs_RV).mul_(scale).neg_()
                slopes[1][part] = slope_RV.to(weight_VH.dtype) @ weight_VH
            if entropy:
                lap("compute_entropy")
            if wanted:
                slope_RV = probs_RV.neg_()
                slope_RV.scatter_(1, target_R1, slope_RV.gather(1, target_R1).add_(1.0))
                slopes[0][part] = slope_RV.mul_(scale).to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(*slopes)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, chosen_grad_N: torch.Tensor, entropy_grad_N: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slopes = ctx.saved_tensors
        grad_NH = slopes[0] * chosen_grad_N.unsqueeze(1).to(slopes[0].dtype)
        if len(slopes) > 1:
            grad_NH.addcmul_(slopes[1], entropy_grad_N.unsqueeze(1).to(grad_NH.dtype))
        return grad_NH, None, None, None, None, None, None


def split_head(model: Any) -> tuple[Any, Head] | None:
    """Return the transformer without its output layer, and that layer; None when the model does not separate that way.

    The name of the architecture is not used: one small forward pass shows whether the output layer reads exactly what
    the transformer returns; a second one, with known numbers in place of the layer's output, shows what the model does
    to them afterwards.
    """
    linear, decoder = model.get_output_embeddings(), getattr(model, "get_decoder", lambda: None)()
    if type(linear) is not nn.Linear or decoder is None or decoder is model or not linear.weight.is_floating_point():
        return None
    ids_BL = torch.arange(6, device=linear.weight.device).view(2, 3) % linear.out_features
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        with _hook(linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))):
            model(input_ids=ids_BL, use_cache=False)
        hidden = decoder(input_ids=ids_BL, use_cache=False)
        hidden = getattr(hidden, "last_hidden_state", None)
        if hidden is None or len(seen) != 1 or seen[0].shape != hidden.shape or not torch.equal(seen[0], hidden):
            return None
        numbers_V = torch.linspace(-90.0, 90.0, linear.out_features, device=ids_BL.device).to(linear.weight.dtype)
        given_BLV = numbers_V.expand(2, 3, -1).contiguous()
        with _hook(linear.register_forward_hook(lambda *_: given_BLV.clone())):
            logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
    logits_V = logits_BLV[0, 0].double()
    if logits_BLV.shape != given_BLV.shape or not torch.allclose(logits_V.expand_as(logits_BLV), logits_BLV.double()):
        return None
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    tolerance = 1e-5 if linear.weight.dtype in FULL else 2e-2
    for head in (
        Head(linear.weight, linear.bias, multiplier=float(logits_V[-1] / numbers_V[-1].double())),
        Head(linear.weight, linear.bias, softcap=float(cap) if cap else None),
    ):
        expected_V, _ = head.capped(numbers_V.double() * head.multiplier)
        if torch.allclose(logits_V, expected_V, rtol=tolerance, atol=tolerance):
            return decoder, head
    return None


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
