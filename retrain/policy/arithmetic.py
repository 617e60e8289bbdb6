"""Products, norms and attention, as sampler and trainer compute them, and layers with hand-written gradients.

Functions that both sides share round alike: in bf16 every rounding (to eight bits) that only one side makes moves
log-probabilities, and with them the importance ratio, by about a hundredth. In fp32 and fp64 each side has the formula
that is fastest for it. These functions are in the subset of Python that TorchScript compiles (``engines.step``).

The update's layers have gradients written by hand, which keep and read less memory than autograd's. With
``[training] update_dtype = "bfloat16"`` the update multiplies in bfloat16 over an fp32 base, for processors with matrix
units (AMX): the inputs of the products of frozen linear layers and their adapters are rounded. Each product is summed
in fp32 within those units, and its result is rounded once: x·Wᵀ, x·Aᵀ, and the sum x·Wᵀ + (x·Aᵀ)·Bᵀ of these rounded
results. Everything else stays fp32: residual stream, norms, rotations, attention, softmax, loss, gradient accumulation,
adapter and optimizer. Only between the products of a gated MLP are values left in bfloat16, since the next product
rounds them anyway.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from retrain.device import is_out_of_memory, lost
from retrain.threads import thread_values

FULL = (torch.float32, torch.float64)  # Dtypes in which models compute at the precision of their results


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the RMS norm over the last axis. Half precision is normalised in fp32, and rounded before and after the
    product with the weight, as in transformers."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return torch.rms_norm(x, [x.shape[-1]], weight, eps)
    # Without a weight: transformers rounds the normalised values before it multiplies, and one kernel would not.
    return torch.rms_norm(x, [x.shape[-1]], None, eps) * weight


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to x [..., D]: x·cos + rotate_half(x)·sin. The first half of the argument
    ``sin`` is already negated, because rotate_half(x)·sin = roll(x, D/2)·(−sin, sin). In half precision both products
    are rounded, as in transformers."""
    turned = x.roll(x.shape[-1] // 2, -1)
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return (x * cos).addcmul_(turned, sin)
    return (x * cos).add_(turned.mul_(sin))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen_R1TK: Tensor | None = None) -> Tensor:
    """Compute attention [R, heads, T, D], causal unless ``seen_R1TK`` (True: the query sees the key) is given. k and v
    may have fewer heads than q (grouped-query attention)."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and expands_grouped_heads(q.device.type, q.dtype):
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), False
    if seen_R1TK is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_R1TK, scale=scale, enable_gqa=grouped)


def expands_grouped_heads(device: str, dtype: torch.dtype) -> bool:
    # On a GPU in fp32, grouped heads would take the kernel that holds all scores [T, T].
    return device == "cuda" and dtype in FULL


HAS_PACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
PACKED_ROWS = 32  # Rows of x for which oneDNN optimises a weight's layout; other numbers of rows are nearly as fast


def packed(weight: Tensor) -> Tensor:
    """Copy a weight [out, in] into the layout of oneDNN's kernels, with which ``linear`` is at least a third faster for
    few rows. Works only where ``packs`` returns True."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)


@functools.cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Return whether weights can be ``packed``: on CPUs for which oneDNN has kernels of this dtype."""
    if device != "cpu" or not HAS_PACKED or dtype not in (torch.float32, torch.bfloat16):
        return False
    # A trial product, because an op that exists may lack a kernel for this processor. Tolerance of bfloat16: sums in
    # another order differ by rounding to eight bits.
    x, weight = (torch.linspace(-1, 1, rows * 64).view(rows, 64).to(dtype) for rows in (4, 96))
    try:
        return torch.allclose(linear(x, packed(weight), None), F.linear(x, weight), rtol=0.02, atol=1e-4)
    except RuntimeError:  # this processor has no kernel for it
        return False


if HAS_PACKED:

    def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    def _packed_sum(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, other, weight, None, "add")

else:  # no weight is packed, but TorchScript needs every name that it compiles to exist

    def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def _packed_sum(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, weight) + other


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [rows, in] times the weight [out, in], plain or ``packed``, plus bias: [rows, out]."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fp32_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [rows, in] times weight [out, in] (plain or ``packed``) plus bias: [rows, out], in fp32 if x has half
    precision, else in x's dtype."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return linear(x, weight, bias)
    if torch.jit.is_scripting():  # only on CPUs
        out = _product_in_two(x, weight)
    else:  # TorchScript does not compile this branch
        out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    if multiplies_into_fp32(x.device.type):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return _product_in_two(x, weight)


def _product_in_two(x: Tensor, weight: Tensor) -> Tensor:
    # The device rounds a product to eight bits. A second product, from which the first is subtracted before rounding,
    # gives the remainder; their sum has sixteen bits. With bf16 units the two take less time than one in fp32.
    rounded = linear(x, weight, None)
    if weight.is_mkldnn:
        rest = _packed_sum(x, weight, -rounded)
    else:
        rest = torch.addmm(rounded, x, weight.t(), beta=-1)
    return rest.float().add_(rounded)


@functools.cache
def multiplies_into_fp32(device: str) -> bool:
    square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(square, square, out_dtype=torch.float32).dtype == torch.float32
    except RuntimeError as error:
        if is_out_of_memory(error) or lost(error):  # no property of the device, and the cache would keep False
            raise
        return False


# -- layers of the update ----------------------------------------------------------------------------------------------


class Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    scale: float
    scaling: float | None
    shape: torch.Size
    dtype: torch.dtype


Gradients = tuple[Tensor | None, ...]  # Gradients by argument of ``forward``; None for one without gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``weight · x / sqrt(mean(x²) + eps)`` over the last axis, with a gradient for x only. In half precision
    the result is that of the sampler's ``rms``, and the gradient is computed in fp32."""
    return _RmsNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        half = x.dtype not in FULL
        wide = x.float() if half else x
        inverse = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, inverse)
        return rms(x, weight, eps) if half else torch.mul(x, inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        # With r = 1/√(mean(x²) + eps) and g the gradient times the weight: ∂x = r·g − x·r³·⟨g, x⟩/D.
        wide, scaled = x.to(inverse.dtype), grad.to(inverse.dtype) * weight
        share = torch.linalg.vecdot(scaled, wide).unsqueeze(-1).mul_(inverse * inverse).div_(-x.shape[-1])
        return scaled.addcmul_(wide, share).mul_(inverse).to(x.dtype), None, None


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Compute ``causal_attention``. On a CPU in half precision, its gradient is computed in fp32, which takes half the
    time."""
    if q.device.type != "cpu" or q.dtype in FULL:
        return causal_attention(q, k, v, scale)
    return _HalfAttention.apply(q, k, v, scale)  # pyright: ignore[reportReturnType]


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        ctx.scaling = scale
        ctx.save_for_backward(q, k, v)
        return causal_attention(q, k, v, scale)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = [x.float().requires_grad_() for x in ctx.saved_tensors]
        # This inner graph ends here, so saved-tensor hooks of the outer backward pass must not act on it.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            out = causal_attention(wide[0], wide[1], wide[2], ctx.scaling)
        return *(part.to(grad.dtype) for part in torch.autograd.grad(out, wide, grad.float())), None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGlu.apply(gate, up)  # pyright: ignore[reportReturnType]


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        # silu(gate) is computed a second time: keeping it would cost one more activation per layer.
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


# -- linear layers of the update ---------------------------------------------------------------------------------------


NARROW = torch.bfloat16


class _Mode(threading.local):
    enabled: bool = False
    narrow: bool = False
    last: tuple[Tensor, int, Tensor] | None = None


_mode = _Mode()
_copies = WeakTensorKeyDictionary()  # Rounded weights, which live as long as the weights themselves
_lock = threading.Lock()


@contextmanager
def products_in_bfloat16(enabled: bool = True) -> Iterator[None]:
    """Let the linear layers of an fp32 base multiply in bfloat16, in this thread (``[training] update_dtype``)."""
    before, _mode.enabled = _mode.enabled, enabled
    try:
        yield
    finally:
        # ``last`` would keep the last layer's input in memory.
        _mode.enabled, _mode.last = before, None


def bfloat16_results() -> AbstractContextManager[None]:
    """Leave the results of bfloat16 products in bfloat16, in this thread: for results that only another such product
    reads."""
    return thread_values(_mode, narrow=True)


def is_rounded(weight: Tensor) -> bool:
    """Return whether this thread multiplies this weight in bfloat16."""
    return _mode.enabled and weight.dtype == torch.float32


def bfloat16_copy(weight: Tensor) -> Tensor:
    """Return a frozen weight in bfloat16. The copy is made at the first call and kept."""
    # Threads that update several runs of a cohort share one copy.
    with _lock:
        if weight not in _copies:
            _copies[weight] = weight.detach().to(NARROW)
        return _copies[weight]


def copied_bytes(model: nn.Module) -> int:
    with _lock:
        return sum(_copies[weight].nbytes for weight in model.parameters() if weight in _copies)


def rounded_linear(
    base: nn.Linear,
    x: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
) -> Tensor:
    """Compute ``base(x) + scale · dropout(x) Aᵀ Bᵀ`` with products in bfloat16. With dropout, the adapter's products
    are computed in fp32."""
    if a is not None and b is not None and dropout > 0:
        delta = F.linear(F.linear(F.dropout(x.float(), dropout), a), b)
        return _RoundedProduct.apply(x, base.weight, base.bias, None, None, 1.0, False) + delta * scale  # pyright: ignore[reportReturnType, reportOperatorIssue]
    return _RoundedProduct.apply(x, base.weight, base.bias, a, b, scale, _mode.narrow)  # pyright: ignore[reportReturnType]


def _input(x: Tensor) -> Tensor:
    # Layers with the same input (queries, keys, values) share one bfloat16 copy.
    if x.dtype == NARROW:
        return x.reshape(-1, x.shape[-1])
    last = _mode.last
    # _version counts in-place changes, after which the same tensor has other values.
    if last is None or last[0] is not x or last[1] != x._version:
        last = _mode.last = x, x._version, x.reshape(-1, x.shape[-1]).to(NARROW)
    return last[2]


class _RoundedProduct(torch.autograd.Function):
    # Base and adapter stay apart: their sum, rounded, would lose the adapter's small numbers.

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scale: float,
        narrow: bool,
    ) -> Tensor:
        ctx.scale, ctx.shape, ctx.dtype = scale, x.shape, x.dtype
        x_ND, weight_OD = _input(x), bfloat16_copy(weight)
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
    def backward(ctx: Context, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_OD, *adapter = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1]).to(NARROW)
        grad_x = grad_NO @ weight_OD if ctx.needs_input_grad[0] else None
        grad_a = grad_b = None
        if adapter:
            x_ND, a_RD, b_OR, low_NR = adapter
            # b_OR contains the scale, so that only ∂B is multiplied by it again.
            low_grad_NR = grad_NO @ b_OR
            if grad_x is not None:
                grad_x.addmm_(low_grad_NR, a_RD)
            grad_a = (low_grad_NR.t() @ x_ND).float()
            grad_b = (grad_NO.t() @ low_NR).float().mul_(ctx.scale)
        if grad_x is not None:
            grad_x = grad_x.to(ctx.dtype).view(ctx.shape)
        return grad_x, None, None, grad_a, grad_b, None, None


def adapted_linear(base: nn.Module, x: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute ``base(x) + scale · dropout(x) Aᵀ Bᵀ`` for a frozen base, x [..., in], A [r, in] and B [out, r].

    A and B may have another dtype than x. With dropout, or layers other than ``nn.Linear`` (quantised ones), the
    formula is computed by autograd, else with hand-written gradients.
    """
    if type(base) is nn.Linear and is_rounded(base.weight):
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
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.scale = scale
        # The sum W + ΔW is made again in the backward pass: kept, it would be a second copy of the base's weights.
        ctx.save_for_backward(x, weight, a, b)
        if weight.dtype in FULL:
            return F.linear(x, _merged(weight, a, b, scale), bias)
        out = F.linear(x, weight, bias)
        low = F.linear(_rows(x), a.to(x.dtype))
        return _rows(out).addmm_(low, _scaled(b, scale, x.dtype).t()).view(out.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, master_a, master_b = ctx.saved_tensors
        a, b = master_a.to(x.dtype), master_b.to(x.dtype)
        x_ND, grad_NO = _rows(x), _rows(grad)
        low_NR = grad_NO @ b
        low_NR *= ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            if weight.dtype in FULL:
                grad_x = grad_NO @ _merged(weight, a, b, ctx.scale)
            else:
                grad_x = torch.addmm(grad_NO @ weight, low_NR, a)
            grad_x = grad_x.view(x.shape)
        grad_a = low_NR.t() @ x_ND
        grad_b = grad_NO.t() @ (x_ND @ a.t()).mul_(ctx.scale)
        return grad_x, None, None, grad_a.to(master_a.dtype), grad_b.to(master_b.dtype), None


def _merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.addmm(weight, b.to(weight.dtype), a.to(weight.dtype), alpha=scale)


def _scaled(b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    # Scaled first, then rounded, as in the sampler (``Lanes.stack``).
    return (b * scale).to(dtype)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
