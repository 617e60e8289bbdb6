"""GTPO weights: uncertain tokens of a completion get more of its advantage.

Two papers use the name GTPO. This is the weighting form w_t = max(0, 1 + β(h_t/h̄ − 1)), whose mean weight is 1 for
β ≤ 1; ``gtpo_paper`` is Group Token Policy Optimization.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.algorithms.algorithm import StepContext, TokenCreditStep, pad_field, pad_if_all, token_mask, with_rows
from retrain.algorithms.credit.uncertainty import moments
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout

MIN_MEAN_UNCERTAINTY = 1e-7  # Below it h/h̄ is a quotient of rounding errors


@dataclass(frozen=True)
class GtpoWeights(TokenCreditStep):
    """Multiplies token advantages by ``gtpo_weights`` of the uncertainties, which SEPA may have pooled before."""

    beta: float

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        mask_BT = token_mask(rated)
        raw_BT = pad_field(rated, "uncertainty_T")
        pooled_BT = pad_if_all([rollout.pooled_uncertainty_T for rollout in rated])
        weights_BT = gtpo_weights(raw_BT if pooled_BT is None else pooled_BT, mask_BT, self.beta)
        unpooled_BT = None if pooled_BT is None else gtpo_weights(raw_BT, mask_BT, self.beta)
        planning_BT = pad_if_all([rollout.planning_T for rollout in rated], np.bool_)
        advantages_BT = pad_field(rated, "token_advantages_T") * weights_BT
        batch = with_rows(batch, rated, token_advantages_T=advantages_BT)
        return batch.with_metrics(weight_stats(weights_BT, unpooled_BT, planning_BT, mask_BT))


@torch.no_grad()
def gtpo_weights(h_BT: Floats_BT, mask_BT: Mask_BT, beta: float) -> Floats_BT:
    """Return w_t = max(0, 1 + β(h_t/h̄ − 1)), h̄ the mean over the completion's trained tokens; 0 in the padding.

    Completions with h̄ < 1e-7 get 1; β = 0 is an exact no-op; the mean weight is 1 for β ≤ 1. Raises ValueError for a
    negative or non-finite β.
    """
    if not (math.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"gtpo beta must be a finite number >= 0: got {beta}")
    count_B_1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = torch.where(mask_BT, h_BT, 0.0).sum(1, keepdim=True) / count_B_1
    flat_B_1 = mean_B_1 < MIN_MEAN_UNCERTAINTY
    scale_B_1 = torch.where(flat_B_1, 0.0, beta / torch.where(flat_B_1, 1.0, mean_B_1))
    base_B_1 = torch.where(flat_B_1, 1.0, torch.full_like(mean_B_1, 1.0 - beta))
    # (1 − β) + h·β/h̄ rather than 1 + β(h/h̄ − 1): one pass over [B, T], and β = 0 gives exactly 1.
    weights_BT = torch.addcmul(base_B_1, h_BT, scale_B_1).clamp_(min=0.0)
    return torch.where(mask_BT, weights_BT, 0.0)


WEIGHT_STATS = ("exec_weight_mean", "exec_weight_var", "plan_weight_mean", "plan_weight_var")
POOLING_STATS = ("exec_weight_var_unpooled", "plan_weight_change")


@torch.no_grad()
def weight_stats(
    weights_BT: Floats_BT, unpooled_BT: Floats_BT | None, planning_BT: Mask_BT | None, mask_BT: Mask_BT
) -> dict[str, float | None]:
    """Return weight metrics: mean and variance over execution and planning tokens, and the effect of pooling.

    ``unpooled_BT``: the weights without pooling. ``plan_weight_change`` is the largest change of a planning token's
    weight by pooling; it is only rounding, because pooling keeps every completion's Σh.
    """
    stats: dict[str, float | None] = dict.fromkeys([*WEIGHT_STATS, *(POOLING_STATS if unpooled_BT is not None else ())])
    if planning_BT is None:
        return stats
    plan_BT = planning_BT & mask_BT
    execution_BT = mask_BT ^ plan_BT
    stats["exec_weight_mean"], stats["exec_weight_var"] = moments(weights_BT, execution_BT)
    stats["plan_weight_mean"], stats["plan_weight_var"] = moments(weights_BT, plan_BT)
    if unpooled_BT is not None:
        stats["exec_weight_var_unpooled"] = moments(unpooled_BT, execution_BT)[1]
        changes = (weights_BT[plan_BT] - unpooled_BT[plan_BT]).abs()
        stats["plan_weight_change"] = float(changes.max()) if changes.numel() else None
    return stats
