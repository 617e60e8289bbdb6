"""Layers with hand-written gradients, which keep and read less memory than autograd's: linear with LoRA, norm,
attention, SwiGLU."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from retrain.policy.arithmetic import FULL, causal_attention, rms
from retrain.policy.rounded import rounded_linear, rounds


def adapted_linear(
    base: nn.Module, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dropout: float = 0.0
) -> torch.Tensor:
    """Compute ``base(x) + scale · dropout(x) Aᵀ Bᵀ`` for a frozen base, x [..., in], A [r, in] and B [out, r].

    A and B may be of another precision than x. Dropout and layers other than ``nn.Linear`` (a quantised one) take the
    plain formula.
    """
    if type(base) is nn.Linear and rounds(base.weight):
        return rounded_linear(base, x, a, b, scale, dropout)
    if dropout == 0 and type(base) is nn.Linear and base.weight.dtype == x.dtype:
        return _LoraLinear.apply(x, base.weight, base.bias, a, b, scale)  # pyright: ignore[reportReturnType]
    low = F.linear(F.dropout(x, dropout) if dropout > 0 else x, a.to(x.dtype))
    if x.dtype in FULL:
        return base(x) + F.linear(low, b.to(x.dtype)) * scale
    out = base(x)
    return torch.addmm(_rows(out), _rows(low), _scaled(b, scale, x.dtype).t()).view(out.shape)


class _LoraLinear(torch.autograd.Function):
    # In fp32 and fp64 ΔW is added to the weight: one matrix product instead of three, each way. In half precision that
    # sum would lose the adapter's small numbers.

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.scale, ctx.merged = scale, weight.dtype in FULL
        ctx.save_for_backward(x, weight, a, b)
        if ctx.merged:
            return F.linear(x, _merged(weight, a, b, scale), bias)
        out = F.linear(x, weight, bias)
        low = F.linear(_rows(x), a.to(x.dtype))
        return _rows(out).addmm_(low, _scaled(b, scale, x.dtype).t()).view(out.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, master_a, master_b = ctx.saved_tensors
        a, b = master_a.to(x.dtype), master_b.to(x.dtype)
        x_ND, grad_NO = _rows(x), _rows(grad)
        low_NR = grad_NO @ b
        low_NR *= ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            if ctx.merged:
                grad_x = grad_NO @ _merged(weight, a, b, ctx.scale)
            else:
                grad_x = torch.addmm(grad_NO @ weight, low_NR, a)
            grad_x = grad_x.view(x.shape)
        grad_a = low_NR.t() @ x_ND
        grad_b = grad_NO.t() @ (x_ND @ a.t()).mul_(ctx.scale)
        return grad_x, None, None, grad_a.to(master_a.dtype), grad_b.to(master_b.dtype), None


def _merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def _scaled(b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    # As the sampler has it (``Lanes.stack``): scaled first, then rounded.
    return (b * scale).to(dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``weight · x / sqrt(mean(x²) + eps)`` over the last axis, with a gradient for x only. In half precision
    this is the sampler's ``rms``, with its gradient computed in fp32."""
    return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        half = x.dtype not in FULL
        wide = x.float() if half else x
        inverse = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return rms(x, weight, eps) if half else torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        wide, scaled = x.to(inverse.dtype), grad.to(inverse.dtype) * weight
        share = torch.linalg.vecdot(scaled, wide).unsqueeze(-1).mul_(inverse * inverse).div_(-x.shape[-1])
        return scaled.addcmul_(wide, share).mul_(inverse).to(x.dtype), None, None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Compute ``causal_attention``; on a CPU in half precision its gradient is fp32, in half the time."""
    if q.device.type != "cpu" or q.dtype in FULL:
        return causal_attention(q, k, v, scale)
    return _HalfAttention.apply(q, k, v, scale)  # pyright: ignore[reportReturnType]


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        ctx.scale = scale
        ctx.save_for_backward(q, k, v)
        return causal_attention(q, k, v, scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = [x.float().requires_grad_() for x in ctx.saved_tensors]
        # Hooks around the outer backward pass are not for this graph, which ends here.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            out = causal_attention(wide[0], wide[1], wide[2], ctx.scale)
        return *(part.to(grad.dtype) for part in torch.autograd.grad(out, wide, grad.float())), None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) · up``, keeping the two inputs only."""
    return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
