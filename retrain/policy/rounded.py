"""Matrix products of the update in bfloat16 over an fp32 base, for processors with matrix units (AMX).

``[training] update_dtype = "bfloat16"`` rounds the inputs of the products of frozen linear layers and their adapters.
Each product is summed in fp32 within those units and rounded once: the base's, the adapter's inner one, and the sum of
the base's (rounded) and the adapter's outer one. Everything else stays fp32: residual stream, norms, rotations,
attention, softmax, loss, gradient accumulation, adapter and optimizer. Only between the products of a gated MLP are
values left in bfloat16, since the next product rounds them anyway.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from retrain.device import thread_values

NARROW = torch.bfloat16


class _Mode(threading.local):
    enabled: bool = False
    narrow: bool = False
    last: tuple[torch.Tensor, int, torch.Tensor] | None = None


_mode = _Mode()
_copies = WeakTensorKeyDictionary()  # Rounded weights, which live as long as the weights themselves
_lock = threading.Lock()


@contextmanager
def products_in_bfloat16(enabled: bool = True) -> Iterator[None]:
    """In this thread, linear layers of an fp32 base multiply in bfloat16 while the update runs them."""
    before, _mode.enabled = _mode.enabled, enabled
    try:
        yield
    finally:
        _mode.enabled, _mode.last = before, None


def left_narrow() -> AbstractContextManager[None]:
    """Leave the results of products in bfloat16, for products that read nothing else."""
    return thread_values(_mode, narrow=True)


def rounds(weight: torch.Tensor) -> bool:
    """Return whether this thread multiplies this weight in bfloat16."""
    return _mode.enabled and weight.dtype == torch.float32


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a frozen weight in bfloat16, rounded at the first call."""
    with _lock:
        if weight not in _copies:
            _copies[weight] = weight.detach().to(NARROW)
        return _copies[weight]


def copied_bytes(model: nn.Module) -> int:
    """Return the bytes of rounded copies of this model's weights."""
    with _lock:
        return sum(_copies[weight].nbytes for weight in model.parameters() if weight in _copies)


def rounded_linear(
    base: nn.Linear,
    x: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Compute ``base(x) + scale · dropout(x) Aᵀ Bᵀ`` with products in bfloat16; with dropout the adapter's, which are
    thin, in fp32."""
    if a is not None and b is not None and dropout > 0:
        delta = F.linear(F.linear(F.dropout(x.float(), dropout), a), b)
        return _RoundedProduct.apply(x, base.weight, base.bias, None, None, 1.0, False) + delta * scale  # pyright: ignore[reportReturnType, reportOperatorIssue]
    return _RoundedProduct.apply(x, base.weight, base.bias, a, b, scale, _mode.narrow)  # pyright: ignore[reportReturnType]


def _input(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, in] in bfloat16; layers with the same input (queries, keys, values) share one copy."""
    if x.dtype == NARROW:
        return x.reshape(-1, x.shape[-1])
    last = _mode.last
    if last is None or last[0] is not x or last[1] != x._version:
        last = _mode.last = x, x._version, x.reshape(-1, x.shape[-1]).to(NARROW)
    return last[2]


class _RoundedProduct(torch.autograd.Function):
    # Base and adapter stay apart: their sum, rounded, would lose the adapter's small numbers.

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor | None,
        b: torch.Tensor | None, scale: float, narrow: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.scale, ctx.shape, ctx.adapted, ctx.kind = scale, x.shape, a is not None, x.dtype
        x_ND, weight_OD = _input(x), rounded(weight)
        out_NO = x_ND @ weight_OD.t()
        if a is not None and b is not None:
            a_RD, b_OR = a.to(NARROW), (b * scale).to(NARROW)
            low_NR = x_ND @ a_RD.t()
            out_NO.addmm_(low_NR, b_OR.t())
            ctx.save_for_backward(weight_OD, x_ND, a_RD, b_OR, low_NR)
        else:
            ctx.save_for_backward(weight_OD)
        out_NO = out_NO if narrow else out_NO.float()
        if bias is not None:
            out_NO += bias
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_OD, *adapter = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1]).to(NARROW)
        grad_x = grad_NO @ weight_OD if ctx.needs_input_grad[0] else None
        grad_a = grad_b = None
        if ctx.adapted:
            x_ND, a_RD, b_OR, low_NR = adapter
            low_grad_NR = grad_NO @ b_OR
            if grad_x is not None:
                grad_x.addmm_(low_grad_NR, a_RD)
            grad_a = (low_grad_NR.t() @ x_ND).float()
            grad_b = (grad_NO.t() @ low_NR).float().mul_(ctx.scale)
        if grad_x is not None:
            grad_x = grad_x.to(ctx.kind).view(ctx.shape)
        return grad_x, None, None, grad_a, grad_b, None, None
