"""What sampler and trainer compute by the same functions, so that they round alike where rounding is felt.

In bf16 every rounding (to eight bits) that one side makes and the other does not moves log-probabilities by about a
hundredth, and the importance ratio with them. In fp32 and fp64 each side has the formula that is fastest for it.

Written in the part of Python that TorchScript compiles (see ``engines.step``).
"""

import functools

import torch
from torch.nn import functional as F

from retrain.gpus import lost

FULL = (torch.float32, torch.float64)  # Dtypes in which models compute at the precision of their results


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of the last axis. Half precision: computed in fp32, rounded before and after the product
    with the weight, as transformers rounds it."""
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return torch.rms_norm(x, [x.shape[-1]], weight, eps)
    return torch.rms_norm(x, [x.shape[-1]], None, eps) * weight


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., D] rotated by the angles of ``cos`` and ``sin``, the sign of whose second half is in ``sin``:
    rotate_half(x)·sin = roll(x, D/2)·(−sin, sin). Half precision: both products rounded, as in transformers."""
    turned = x.roll(x.shape[-1] // 2, -1)
    if x.dtype == torch.float32 or x.dtype == torch.float64:
        return (x * cos).addcmul_(turned, sin)
    return (x * cos).add_(turned.mul_(sin))


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, seen_R1TK: torch.Tensor | None = None
) -> torch.Tensor:
    """Causal attention [R, heads, T, D]; several heads of queries may share one of keys and values. ``seen_R1TK`` says
    which columns a query sees where these are not its own and those before."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and wants_every_head(q.device.type, q.dtype):
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), False
    if seen_R1TK is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_R1TK, scale=scale, enable_gqa=grouped)


def wants_every_head(device: str, dtype: torch.dtype) -> bool:
    """Whether shared heads have to be repeated: on a GPU only the kernels of half precision take them as they are, and
    what is left for fp32 is the one that holds all scores [T, T]."""
    return device == "cuda" and dtype in FULL


HAS_PACKED = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
"""Whether this torch has oneDNN's linear layers, which ``torch.compile`` uses too."""
PACKED_ROWS = 32
"""The rows for which oneDNN chooses the layout of a weight; others are multiplied correctly too, and nearly as fast."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [out, in], laid out as oneDNN's kernels read it, for ``linear``; of few rows the product then
    takes two thirds of the time and less. Only where ``packs`` says so."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)


@functools.cache
def packs(device: str, dtype: torch.dtype) -> bool:
    """Whether weights can be ``packed``: on CPUs, where torch has oneDNN and that has kernels for this dtype."""
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
    """Sixteen bits of each result where the device rounds its sums to eight: the rounded product, and what is left of
    the product when that is taken off before rounding. With bf16 units the two take less time than
    one in fp32."""
    rounded = linear(x, weight, None)
    if weight.is_mkldnn:
        rest = _packed_sum(x, weight, -rounded)
    else:
        rest = torch.addmm(rounded, x, weight.t(), beta=-1)
    return rest.float().add_(rounded)


@functools.cache
def multiplies_into_fp32(device: str) -> bool:
    """Whether devices of this type multiply bf16 matrices into an fp32 result, which has all the digits of the sums."""
    square = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(square, square, out_dtype=torch.float32).dtype == torch.float32
    except TypeError:  # torch before 2.8
        return False
    except RuntimeError as error:
        from retrain.policy.budget import is_out_of_memory  # which imports the base, and that this module

        if is_out_of_memory(error) or lost(error):  # says nothing of the device, and would be remembered
            raise
        return False
