"""What a teacher's opinion of sampled tokens is worth: advantages per token, and divergences of whole distributions.

On-policy distillation minimises the reverse KL divergence Σ_t KL(π ‖ π_teacher) on the student's own samples. Its
policy gradient has the advantage −(ln π − ln π_teacher) of the token itself, with nothing of later tokens (discount 0;
Thinking Machines, "On-Policy Distillation"; verl pull request 4897). The advantage is a constant: differentiated, the
estimate k1 has no gradient in expectation, and k3 has that of the forward divergence.
"""

from __future__ import annotations

import torch

from retrain.maths.shapes import Floats_BT, Mask_BT


def distillation_advantages(
    student_BT: Floats_BT, teacher_BT: Floats_BT, mask_BT: Mask_BT, weight: float, clamp: float | None = None
) -> Floats_BT:
    """weight · (ln π_teacher − ln π) of every token of the mask, 0 elsewhere; ``clamp`` bounds the difference.

    No gradient. Raises ValueError for a negative weight or a clamp that is not above 0.
    """
    if weight < 0.0 or (clamp is not None and not clamp > 0.0):
        raise ValueError(f"weight must not be negative and clamp be above 0: got {weight} and {clamp}")
    gap_BT = (teacher_BT - student_BT).detach()
    if clamp is not None:
        gap_BT = gap_BT.clamp(-clamp, clamp)
    return torch.where(mask_BT, weight * gap_BT, 0.0)
