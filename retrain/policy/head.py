"""The output layer in chunks of rows: log-probability, entropy and divergence without logits [rows, V] for all rows.

The layer is frozen, so the forward pass computes each row's gradient with respect to its hidden state while it holds
the row's logits: ∂ log π(target) = (onehot − π)·f′(z)·W, where f caps and scales the products z = W·h, and likewise for
the entropy −Σ π log π. Only these gradients [rows, H] are kept, and the backward pass scales them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from retrain.maths.distillation import divergence, with_tail
from retrain.policy.arithmetic import FULL, Context, Gradients, fp32_product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Logits of one chunk: what a CPU's caches keep; on a GPU enough for matrix products at full speed
CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
Lap = Callable[[str], None]  # Called with the name of the timed section that ends here


def no_lap(part: str) -> None: ...


@dataclass(frozen=True)
class Supports:
    """The supports of M sampled tokens: the token ids that truncated sampling (top-k, top-p, min-p) left to choose
    from, one row's ids after another's."""

    rows_K: Tensor  # Row of each entry, ascending
    ids_K: Tensor  # Token id of each entry
    offsets: list[int]  # [M + 1]: entries offsets[m] to offsets[m + 1] are of row m

    def to(self, device: torch.device) -> Supports:
        return Supports(self.rows_K.to(device), self.ids_K.to(device), self.offsets)

    def only(self, z_RV: Tensor, start: int = 0) -> Tensor:
        """Return the logits ``z_RV`` of the rows from ``start`` on, with −inf outside each row's support."""
        part = slice(self.offsets[start], self.offsets[start + len(z_RV)])
        index = (self.rows_K[part] - start, self.ids_K[part])
        # Renormalises over the support: softmax gives −inf a probability of 0.
        return torch.full_like(z_RV, -math.inf).index_put(index, z_RV[index])


@dataclass(frozen=True)
class Head:
    """Output layer: logits = cap(multiplier · (W h + bias)), where cap(z) = softcap · tanh(z / softcap), or z without
    ``softcap``.

    Logits are fp32 (fp64 for fp64 weights), without rounding to half precision. ``product_VH``: the weight in another
    layout for ``fp32_product`` (``BaseModel.head_weight``).
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    multiplier: float = 1.0
    product_VH: Tensor | None = None

    @property
    def logit_dtype(self) -> torch.dtype:
        return torch.float64 if self.weight_VH.dtype == torch.float64 else torch.float32

    def products(self, hidden_RH: Tensor) -> Tensor:
        z_RV = fp32_product(hidden_RH, self.weight_VH if self.product_VH is None else self.product_VH)
        if self.bias_V is not None:
            z_RV += self.bias_V
        if self.multiplier != 1.0:
            z_RV *= self.multiplier
        return z_RV

    def logits(self, hidden_RH: Tensor) -> Tensor:
        return self.capped(self.products(hidden_RH))[0]

    def capped(self, z_RV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return cap(z) [R, V] and its factor tanh(z / softcap), which is None if the model has no cap."""
        if self.softcap is None:
            return z_RV, None
        tanh_RV = torch.tanh(z_RV / self.softcap)
        return tanh_RV * self.softcap, tanh_RV

    def logprobs(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature: float = 1.0,
        *,
        entropy: bool = False,
        entropy_gradient: bool = True,
        lap: Lap = no_lap,
        supports: Supports | None = None,
        top_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability [N] of the targets under softmax(logits / temperature) over ``supports``, and with
        ``entropy`` the entropy [N] of that distribution, else None.

        Gradients reach ``hidden_NH`` only; those of the entropy need ``entropy_gradient``. ``lap`` is called with
        "forward" before and "compute_entropy" after the entropy of each chunk. ``top_N`` receives each row's highest
        log-probability.
        """
        entropies = (entropy, entropy_gradient)
        chosen_N, entropy_N = _Logprobs.apply(  # pyright: ignore[reportGeneralTypeIssues]
            hidden_NH, (targets_N, top_N), self, temperature, entropies, lap, supports
        )
        return chosen_N, entropy_N if entropy else None

    def chunk_rows(self) -> int:
        most = CHUNK_BYTES.get(self.weight_VH.device.type, CHUNK_BYTES["cuda"])
        return max(16, most // (self.logit_dtype.itemsize * self.weight_VH.shape[0]))


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden_NH: Tensor,
        targets: tuple[Tensor, Tensor | None],
        head: Head,
        temperature: float,
        entropies: tuple[bool, bool],
        lap: Lap,
        supports: Supports | None,
    ) -> tuple[Tensor, Tensor]:
        targets_N, top_N = targets
        weight_VH, (entropy, entropy_gradient) = head.weight_VH, entropies
        real = head.logit_dtype
        chosen_N = torch.empty(len(hidden_NH), dtype=real, device=hidden_NH.device)
        entropy_N = torch.empty_like(chosen_N) if entropy else chosen_N.new_empty(0)
        needs_gradient = ctx.needs_input_grad[0]
        slopes = [torch.empty_like(hidden_NH) for _ in range(needs_gradient * (1 + (entropy and entropy_gradient)))]
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
            if top_N is not None:
                top_N[part] = logprobs_RV.amax(1)
            if not needs_gradient and not entropy:
                continue
            # In the logits' memory, which nothing reads any more: one table [R, V] less.
            probs_RV = torch.exp(logprobs_RV, out=z_RV)
            scale: float | Tensor = head.multiplier / temperature
            if tanh_RV is not None:
                # The derivative of the cap, 1 − tanh².
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
            if needs_gradient:
                # ∂ log π(target)/∂z = onehot − π.
                slope_RV = probs_RV.neg_()
                slope_RV.scatter_(1, target_R1, slope_RV.gather(1, target_R1).add_(1.0))
                slopes[0][part] = slope_RV.mul_(scale).to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(*slopes)
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Context, chosen_grad_N: Tensor, entropy_grad_N: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        slopes = ctx.saved_tensors
        grad_NH = slopes[0] * chosen_grad_N.unsqueeze(1).to(slopes[0].dtype)
        if len(slopes) > 1:
            grad_NH.addcmul_(slopes[1], entropy_grad_N.unsqueeze(1).to(grad_NH.dtype))
        return grad_NH, None, None, None, None, None, None


def head_divergence(
    head: Head,
    hidden_NH: Tensor,
    teacher: Head,
    teacher_NH: Tensor,
    *,
    alpha: float,
    top: int = 0,
    temperature: float = 1.0,
) -> Tensor:
    """Return the divergence D_α [N] (``maths.distillation``) of the student's softmax(logits / temperature) from the
    teacher's. With ``top`` > 0 the student's ``top`` likeliest tokens are compared, and all other tokens count as one.
    Gradients reach ``hidden_NH`` only."""
    return _Divergence.apply(hidden_NH, head, teacher, teacher_NH, alpha, top, temperature)  # pyright: ignore[reportReturnType]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden_NH: Tensor,
        head: Head,
        teacher: Head,
        teacher_NH: Tensor,
        alpha: float,
        top: int,
        temperature: float,
    ) -> Tensor:
        weight_VH, real = head.weight_VH, head.logit_dtype
        values_N = torch.empty(len(hidden_NH), dtype=real, device=hidden_NH.device)
        needs_gradient = ctx.needs_input_grad[0]
        slopes_NH = torch.empty_like(hidden_NH) if needs_gradient else None
        size = max(1, head.chunk_rows() // 4)  # about four tables [R, V] are in memory at once
        shared = min(weight_VH.shape[0], teacher.weight_VH.shape[0])  # padding differs between sizes of a model
        for start in range(0, len(hidden_NH), size):
            part = slice(start, start + size)
            theirs_RV = torch.log_softmax(teacher.logits(teacher_NH[part])[:, :shared].to(real) / temperature, -1)
            made_RV = head.products(hidden_NH[part]).detach().to(real).requires_grad_(needs_gradient)
            with torch.set_grad_enabled(needs_gradient):
                z_RV = made_RV if head.softcap is None else torch.tanh(made_RV / head.softcap) * head.softcap
                mine_RV = torch.log_softmax(z_RV[:, :shared] / temperature, -1)
                if top and top < shared:
                    ids_Rk = mine_RV.detach().topk(top, -1).indices
                    own_RV, other_RV = with_tail(mine_RV, ids_Rk), with_tail(theirs_RV, ids_Rk)
                else:
                    own_RV, other_RV = mine_RV, theirs_RV
                values_R = divergence(own_RV, other_RV, alpha)
                summed = values_R.sum()
            values_N[part] = values_R.detach()
            if slopes_NH is not None:
                (slope_RV,) = torch.autograd.grad(summed, made_RV)
                slopes_NH[part] = (slope_RV * head.multiplier).to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(*([] if slopes_NH is None else [slopes_NH]))
        return values_N

    @staticmethod
    def backward(ctx: Context, grad_N: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes_NH,) = ctx.saved_tensors
        return slopes_NH * grad_N.unsqueeze(1).to(slopes_NH.dtype), None, None, None, None, None, None


class ValueHead:
    """Value head V = w·h + b. ``flat`` [H + 1] holds w and, last, b."""

    def __init__(self, width: int, device: torch.device):
        self.flat = nn.Parameter(torch.zeros(width + 1, device=device))
        self.flat.grad = torch.zeros_like(self.flat)

    def __call__(self, hidden_MH: Tensor) -> Tensor:
        real = torch.float64 if hidden_MH.dtype == torch.float64 else torch.float32
        weights = self.flat.to(real)
        return hidden_MH.to(real) @ weights[:-1] + weights[-1]


def split_head(model: PreTrainedModel) -> tuple[nn.Module, Head] | None:
    """Return the transformer without its output layer, and the output layer. None if the model cannot be split there.

    One small forward pass shows whether the output layer reads exactly what the transformer returns. A second pass,
    with known numbers in place of the layer's output, shows how the model scales or caps these numbers.
    """
    linear, decoder = model.get_output_embeddings(), getattr(model, "get_decoder", lambda: None)()
    if type(linear) is not nn.Linear or decoder is None or decoder is model or not linear.weight.is_floating_point():
        return None
    ids_BL = torch.arange(6, device=linear.weight.device).view(2, 3) % linear.out_features
    seen: list[Tensor] = []
    with torch.no_grad():
        with linear.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
            model(input_ids=ids_BL, use_cache=False)
        hidden = decoder(input_ids=ids_BL, use_cache=False)
        hidden = getattr(hidden, "last_hidden_state", None)
        if hidden is None or len(seen) != 1 or seen[0].shape != hidden.shape or not torch.equal(seen[0], hidden):
            return None
        # Far beyond usual caps (Gemma 2: 30), so that a cap shows; the range of numbers tells a cap from a factor.
        numbers_V = torch.linspace(-90.0, 90.0, linear.out_features, device=ids_BL.device).to(linear.weight.dtype)
        given_BLV = numbers_V.expand(2, 3, -1).contiguous()
        with linear.register_forward_hook(lambda *_: given_BLV.clone()):
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
