"""What sampler and trainer compute by the same functions, so that they round alike where rounding is felt.

In bf16 every rounding (to eight bits) that one side makes and the other does not moves log-probabilities by about a
hundredth, and the importance ratio with them. In fp32 and fp64 each side has the formula that is fastest for it.

Written in the part of Python that TorchScript compiles (see ``engines.step``).
"""

import functools

import torch
from torch.nn import functional as F

from retrain.gpus import lost

FULL = (torch.float32, torch.float64)
"""Dtypes in which models compute at the precision of their results."""


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


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention [R, heads, T, D]; several heads of queries may share one of keys and values."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and wants_every_head(q.device.type, q.dtype):
        share = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), False
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def wants_every_head(device: str, dtype: torch.dtype) -> bool:
    """Whether shared heads have to be repeated: on a GPU only the kernels of half precision take them as they are, and
    what is left for fp32 is the one that holds all scores [T, T]."""
    return device == "cuda" and dtype in FULL


def fp32_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in], in fp32 for half-precision x (``BaseModel.head_weight`` says which weight it
    wants), in x's own precision otherwise."""
    if weight.dtype != x.dtype:
        return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))
    if torch.jit.is_scripting():  # on CPUs alone
        return F.linear(x, weight, bias)
    else:  # which TorchScript leaves alone
        return _product(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype in FULL:
        return F.linear(x, weight, bias)
    into_fp32 = multiplies_into_fp32(x.device.type)
    out = torch.mm(x, weight.t(), out_dtype=torch.float32) if into_fp32 else F.linear(x, weight).float()
    return out if bias is None else out.add_(bias)


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
