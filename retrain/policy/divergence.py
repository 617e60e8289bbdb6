"""The divergence of a student's distributions from a teacher's over the whole vocabulary, in chunks of rows.

As in ``policy.head`` the output layer is frozen, so the forward pass works out the gradient with respect to the hidden
states while it holds a chunk's logits; no logits [rows, V] of all rows are kept.
"""

from typing import Any

import torch

from retrain.maths.distillation import divergence, with_tail
from retrain.policy.head import Head


def head_divergence(
    head: Head,
    hidden_NH: torch.Tensor,
    teacher: Head,
    teacher_NH: torch.Tensor,
    *,
    alpha: float,
    top: int = 0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """D_α [N] of softmax(logits / temperature) from the teacher's (see ``maths.distillation.divergence``), with
    ``top`` over the student's likeliest tokens and all others as one. The gradient reaches ``hidden_NH`` alone."""
    return _Divergence.apply(hidden_NH, head, teacher, teacher_NH, alpha, top, temperature)  # pyright: ignore[reportReturnType]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        head: Head,
        teacher: Head,
        teacher_NH: torch.Tensor,
        alpha: float,
        top: int,
        temperature: float,
    ) -> torch.Tensor:
        weight_VH = head.weight_VH
        real = torch.float64 if weight_VH.dtype == torch.float64 else torch.float32
        found_N = torch.empty(len(hidden_NH), dtype=real, device=hidden_NH.device)
        wanted = ctx.needs_input_grad[0]
        slopes_NH = torch.empty_like(hidden_NH) if wanted else None
        size = max(1, head.chunk_rows() // 4)  # as many tables of a chunk are held at once
        shared = min(weight_VH.shape[0], teacher.weight_VH.shape[0])  # padding differs between sizes of a model
        for start in range(0, len(hidden_NH), size):
            part = slice(start, start + size)
            theirs_RV = torch.log_softmax(teacher.logits(teacher_NH[part])[:, :shared].to(real) / temperature, -1)
            made_RV = head.products(hidden_NH[part]).detach().to(real).requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                z_RV = made_RV if head.softcap is None else torch.tanh(made_RV / head.softcap) * head.softcap
                mine_RV = torch.log_softmax(z_RV[:, :shared] / temperature, -1)
                if top and top < shared:
                    ids_Rk = mine_RV.detach().topk(top, -1).indices
                    own_RV, other_RV = with_tail(mine_RV, ids_Rk), with_tail(theirs_RV, ids_Rk)
                else:
                    own_RV, other_RV = mine_RV, theirs_RV
                found_R = divergence(own_RV, other_RV, alpha)
                summed = found_R.sum()
            found_N[part] = found_R.detach()
            if slopes_NH is not None:
                (slope_RV,) = torch.autograd.grad(summed, made_RV)
                slopes_NH[part] = (slope_RV * head.multiplier).to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(*([] if slopes_NH is None else [slopes_NH]))
        return found_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes_NH,) = ctx.saved_tensors
        return slopes_NH * grad_N.unsqueeze(1).to(slopes_NH.dtype), None, None, None, None, None, None
