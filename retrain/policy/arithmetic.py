"""Functions that sampler and trainer share, so that both round alike.

In bf16 every rounding (to eight bits) that only one side makes moves log-probabilities, and with them the importance
ratio, by about a hundredth. In fp32 and fp64 each side has the formula that is fastest for it.

Written in the subset of Python that TorchScript compiles (``engines.step``).
"""

import functools

import torch
from torch.nn import functional as F

from retrain.device import is_out_of_memory, lost

FULL = (torch.float32, torch.float64)  # Dtypes in which models compute at the precision of their results


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm of the last axis; half precision in fp32, rounded before and after the product with the
    weight, as in transformers."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return torch.rms_norm(x, [x.shape[-1]], weight, eps)
    return torch.rms_norm(x, [x.shape[-1]], None, eps) * weight


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., D] by ``cos`` and signed ``sin``: rotate_half(x)·sin = roll(x, D/2)·(−sin, sin). Half precision:
    both products are rounded, as in transformers."""
    turned = x.roll(x.shape[-1] // 2, -1)
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return (x * cos).addcmul_(turned, sin)
    return (x * cos).add_(turned.mul_(sin))


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, seen_R1TK: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention [R, heads, T, D], with grouped heads allowed; causal unless ``seen_R1TK`` is the mask."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and wants_every_head(q.device.type, q.dtype):
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), False
    if seen_R1TK is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_R1TK, scale=scale, enable_gqa=grouped)


def wants_every_head(device: str, dtype: torch.dtype) -> bool:
    # On a GPU in fp32, grouped heads would take the kernel that holds all scores [T, T].
    return device == "cuda" and dtype in FULL


HAS_PACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
PACKED_ROWS = 32  # Rows that oneDNN optimises the layout of a weight for; others are nearly as fast


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight [out, in] into the layout of oneDNN's kernels for ``linear``, which makes products of few rows at
    least a third faster. Requires ``packs``."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)


@functools.cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Return whether weights can be ``packed``: on CPUs for which oneDNN has kernels of this dtype."""
    if device != "cpu" or not HAS_PACKED or dtype not in (torch.float32, torch.bfloat16):
        return False
    x, weight = (torch.linspace(-1, 1, rows * 64).view(rows, 64).to(dtype) for rows in (4, 96))
    try:
        return torch.allclose(linear(x, packed(weight), None), F.linear(x, weight), rtol=0.02, atol=1e-4)
    except RuntimeError:  # this processor has no kernel for it
        return False


if HAS_PACKED:

    def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    def _packed_sum(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, other, weight, None, "add")

else:  # nothing is packed then; TorchScript wants every name that it meets to exist

    def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def _packed_sum(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + other


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, in] → [rows, out], for a weight [out, in] as it is or as ``packed`` gives it."""
    if weight.is_mkldnn:
        return _packed_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def fp32_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in], packed or not: fp32 for half-precision x, else in x's own precision."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return linear(x, weight, bias)
    if torch.jit.is_scripting():  # on CPUs alone
        out = _product_in_two(x, weight)
    else:  # which TorchScript leaves alone
        out = _product(x, weight)
    return out if bias is None else out.add_(bias)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if multiplies_into_fp32(x.device.type):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return _product_in_two(x, weight)


def _product_in_two(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Sixteen bits of each result where the device rounds to eight: the rounded product plus the remainder after
    # subtracting it before rounding. With bf16 units the two take less time than one product in fp32.
    rounded = linear(x, weight, None)
    if weight.is_mkldnn:
        rest = _packed_sum(x, weight, -rounded)
    else:
        rest = torch.addmm(rounded, x, weight.t(), beta=-1)
    return rest.float().add_(rounded)


@functools.cache
def multiplies_into_fp32(device: str) -> bool:
    """Return whether devices of this type multiply bf16 matrices into an fp32 result."""
    square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(square, square, out_dtype=torch.float32).dtype == torch.float32
    except TypeError:  # torch before 2.8
        return False
    except RuntimeError as error:
        if is_out_of_memory(error) or lost(error):  # says nothing of the device, and would be remembered
            raise
        return False
