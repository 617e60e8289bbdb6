"""Generalised advantage estimation and what a critic trains towards (arXiv 1506.02438, 1707.06347).

Differences from the textbook: a sequence is the action tokens of a rollout, one after the other; what was read in
between has no value and no reward, and the value after the last action is 0, also where it was cut off. The policy and
the critic may have different λ. Advantages are whitened with the unbiased variance, as TRL does.
"""

import torch

from retrain.maths.shapes import Floats_B, Floats_BT, Mask_BT

WHITENING_EPSILON = 1e-8


def token_rewards(scores_B: Floats_B, kl_BT: Floats_BT, mask_BT: Mask_BT, kl_coef: float) -> Floats_BT:
    """−kl_coef·KL_t for every token, and the score with the last of them; 0 outside the mask."""
    rewards_BT = torch.where(mask_BT, -kl_coef * kl_BT, 0.0)
    is_last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last_BT, rewards_BT + scores_B.to(rewards_BT).unsqueeze(1), rewards_BT)


def gae(
    rewards_BT: Floats_BT, values_BT: Floats_BT, mask_BT: Mask_BT, gamma: float, lam: float | Floats_B
) -> Floats_BT:
    """A_t = Σ_k (γλ)^k δ_{t+k} with δ_t = r_t + γV_{t+1} − V_t over the tokens of the mask, 0 elsewhere.

    ``lam`` is one number or one for each row. Tokens outside the mask do not count as time. Same dtype as
    ``values_BT``, no gradient. Raises ValueError for shapes that differ, or γ or λ outside [0, 1].
    """
    if not (rewards_BT.shape == values_BT.shape == mask_BT.shape):
        shapes = ", ".join(str(tuple(each.shape)) for each in (rewards_BT, values_BT, mask_BT))
        raise ValueError(f"rewards, values and mask have different shapes: {shapes}")
    lam_B = torch.as_tensor(lam, dtype=torch.float64).expand(mask_BT.shape[0])
    if not (0.0 <= gamma <= 1.0 and bool(((lam_B >= 0.0) & (lam_B <= 1.0)).all())):
        raise ValueError(f"gamma and lam must be in [0, 1]: got {gamma} and {lam}")
    from scipy.signal import lfilter

    order_BT = torch.argsort(~mask_BT, dim=1, stable=True)  # the tokens of the mask first
    inside_BT = mask_BT.gather(1, order_BT)
    packed_BT = torch.where(inside_BT, values_BT.detach().gather(1, order_BT), 0.0)
    next_BT = torch.nn.functional.pad(packed_BT, (0, 1))[:, 1:]
    delta_BT = torch.where(inside_BT, rewards_BT.detach().gather(1, order_BT) + gamma * next_BT - packed_BT, 0.0)
    backwards_BT = delta_BT.flip(1).cpu().double().numpy()
    for own in lam_B.unique().tolist():
        rows = (lam_B == own).numpy()
        backwards_BT[rows] = lfilter([1.0], [1.0, -gamma * own], backwards_BT[rows], axis=1)
    advantages_BT = torch.as_tensor(backwards_BT).flip(1).to(values_BT)
    return torch.zeros_like(advantages_BT).scatter_(1, order_BT, advantages_BT)


def length_lambda(lengths_B: Floats_B, scale: float) -> Floats_B:
    """λ = 1 − 1/(scale·length) of every rollout, at least 0 (VAPO, arXiv 2504.05118): of long ones more of what was
    returned reaches the first tokens. Raises ValueError unless scale > 0."""
    if not scale > 0.0:
        raise ValueError(f"the scale of lengths must be above 0: got {scale}")
    return (1.0 - 1.0 / (scale * lengths_B)).clamp(min=0.0)


def whiten_tokens(values_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """(x − mean)/√(variance + 1e-8) over the tokens of the mask, with the unbiased variance; 0 elsewhere, and for fewer
    than two tokens."""
    count = int(mask_BT.sum())
    if count < 2:
        return torch.zeros_like(values_BT)
    mean = torch.where(mask_BT, values_BT, 0.0).sum() / count
    centred_BT = torch.where(mask_BT, values_BT - mean, 0.0)
    variance = centred_BT.square().sum() / (count - 1)
    return centred_BT * torch.rsqrt(variance + WHITENING_EPSILON)


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


def explained_variance(values_BT: Floats_BT, targets_BT: Floats_BT, mask_BT: Mask_BT) -> float | None:
    """1 − Var(R − V)/Var(R) over the tokens of the mask: 1 for a critic that knows, 0 for one that says the mean; None
    where the targets vary by no more than the rounding of A + V."""
    targets_M, values_M = targets_BT[mask_BT].double(), values_BT[mask_BT].double()
    if len(targets_M) == 0:
        return None
    rounding = torch.finfo(targets_BT.dtype).eps * float(torch.maximum(targets_M.abs(), values_M.abs()).max())
    variance = float(targets_M.var(correction=0))
    if variance <= (2.0 * rounding) ** 2:
        return None
    return 1.0 - float((targets_M - values_M).var(correction=0)) / variance
