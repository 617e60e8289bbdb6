"""The loss of a critic (PPO, arXiv 1707.06347)."""

import torch

from retrain.maths.shapes import Floats_BT, Mask_BT


def value_loss(
    values_BT: Floats_BT, old_values_BT: Floats_BT, targets_BT: Floats_BT, mask_BT: Mask_BT, clip: float
) -> tuple[Floats_BT, Mask_BT]:
    """½·max((V − R)², (clip(V, V_old ± ``clip``) − R)²) of every token, 0 outside the mask, and where the clipped one
    is the larger. A ``clip`` of 0 clips nothing. Gradient flows through ``values_BT`` alone."""
    error_BT = torch.where(mask_BT, values_BT - targets_BT.detach(), 0.0).square()
    if clip == 0.0:
        return 0.5 * error_BT, torch.zeros_like(mask_BT)
    old_BT = old_values_BT.detach()
    clipped_BT = torch.clamp(values_BT, old_BT - clip, old_BT + clip)
    clipped_error_BT = torch.where(mask_BT, clipped_BT - targets_BT.detach(), 0.0).square()
    return 0.5 * torch.maximum(error_BT, clipped_error_BT), (clipped_error_BT > error_BT).detach()
