"""HICRA: planning tokens get more credit (arXiv 2509.03646)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from retrain.algorithms.algorithm import StepContext, TokenCreditStep, pad_field, token_mask, with_rows
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.rng import uniforms
from retrain.types import CreditedBatch, CreditedRollout


@dataclass(frozen=True)
class Hicra(TokenCreditStep):
    """Adds ``alpha``·|A_t| to the advantage of planning tokens.

    As a control experiment, ``placebo_stream`` (a random stream) amplifies random tokens instead: in each completion as
    many as it has planning tokens.
    """

    alpha: float
    placebo_stream: tuple[int | str, ...] | None = None

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        amplified_BT = pad_field(rated, "planning_T", np.bool_)
        if self.placebo_stream is not None:
            mask_BT, stream = token_mask(rated), (*self.placebo_stream, context.step)
            rows = [uniforms(mask_BT.shape[1], *stream, row) for row in range(len(rated))]
            amplified_BT = placebo_mask(torch.from_numpy(np.stack(rows)), amplified_BT, mask_BT)
        advantages_BT = hicra(pad_field(rated, "token_advantages_T"), amplified_BT, self.alpha)
        return with_rows(batch, rated, token_advantages_T=advantages_BT)


@torch.no_grad()
def hicra(advantages_BT: Floats_BT, planning_BT: Mask_BT, alpha: float) -> Floats_BT:
    """Return A_t + α|A_t| on planning tokens, else A_t (arXiv 2509.03646): negative advantages shrink, others grow.

    Raises ValueError unless 0 ≤ α < 1.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"hicra alpha must be in [0, 1): got {alpha}")
    return torch.where(planning_BT, advantages_BT + alpha * advantages_BT.abs(), advantages_BT)


@torch.no_grad()
def placebo_mask(uniforms_BT: Floats_BT, planning_BT: Mask_BT, mask_BT: Mask_BT) -> Mask_BT:
    """Return a mask, bool [B, T], of random tokens: in each completion as many as it has planning tokens.

    ``uniforms_BT`` holds a random number for each token. The tokens with the smallest numbers are chosen, the earlier
    one of equal numbers first.
    """
    counts_B_1 = (planning_BT & mask_BT).sum(1, keepdim=True)
    shuffled_BT = torch.where(mask_BT, uniforms_BT.detach().to(torch.float64), math.inf)  # padding sorts last
    order_BT = torch.argsort(shuffled_BT, dim=1, stable=True)
    columns_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(order_BT)
    # The inverse of the sorting permutation is each token's rank in its row; padding (∞) ranks last.
    rank_BT = torch.empty_like(order_BT).scatter_(1, order_BT, columns_BT)
    return (rank_BT < counts_B_1) & mask_BT
