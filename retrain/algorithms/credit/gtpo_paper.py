"""Group Token Policy Optimization (arXiv 2508.04349): the reward of every token is shaped by its uncertainty, then
normalised over the group. It starts from the rewards, so the episode advantage is not used."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from retrain.algorithms.algorithm import (
    StepContext,
    TokenCreditStep,
    discard_by_tokens,
    pad_field,
    token_mask,
    with_rows,
)
from retrain.algorithms.credit.group_advantage import EQUAL_REWARDS
from retrain.algorithms.credit.uncertainty import without_padding
from retrain.maths.shapes import Floats_B, Floats_BT, Mask_BT, Values_B
from retrain.types import CreditedBatch, CreditedRollout

MIN_PAPER_UNCERTAINTY = 1e-6  # Bounds 1/h, the weight of tokens in wrong completions


@dataclass(frozen=True)
class GtpoPaper(TokenCreditStep):
    """Replaces the advantages of all tokens. ``alpha1`` weighs the reward, ``alpha2`` the uncertainty; see
    ``gtpo_paper``. Groups whose tokens all get 0 are discarded, unless ``keeps_uniform_groups``."""

    alpha1: float
    alpha2: float
    centred: bool
    keeps_uniform_groups: bool = False

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        number = {rollout: index for index, group in enumerate(batch.groups) for rollout in group.rollouts}
        advantages_BT = gtpo_paper(
            pad_field(rated, "uncertainty_T"),
            torch.tensor([rollout.reward.total_reward for rollout in rated], dtype=torch.float64),
            torch.tensor([rollout.reward.is_correct for rollout in rated]),
            torch.tensor([number[rollout] for rollout in rated]),
            token_mask(rated),
            self.alpha1,
            self.alpha2,
            self.centred,
        )
        batch = with_rows(batch, rated, token_advantages_T=advantages_BT)
        return batch if self.keeps_uniform_groups else discard_by_tokens(batch)


@torch.no_grad()
def gtpo_paper(
    h_BT: Floats_BT,
    rewards_B: Values_B,
    correct_B: Values_B,
    group_B: Values_B,
    mask_BT: Mask_BT,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    centred: bool = True,
) -> Floats_BT:
    """Return the token advantages [B, T] of Group Token Policy Optimization (arXiv 2508.04349), 0 in the padding.

    A token at position t with uncertainty h gets α₁·r + α₂·d_t·h/Σh in a correct completion with reward r, and −α₁ −
    α₂·c_t·(1/h)/Σ(1/h) in a wrong one. d_t and c_t are the numbers of correct and wrong completions of the group that
    reach t; each sum is over these. The results are centred over all tokens of the group and divided by their standard
    deviation. Centring makes the advantages of wrong tokens positive where correct tokens are few; ``centred=False``
    divides by the root mean square instead, which keeps every sign. Groups that are all correct or all wrong get 0.
    ``group_B``: group number of each row. Raises ValueError for other shapes and rewards that are not finite.
    """
    rows, columns = mask_BT.shape
    for what, given in (("rewards_B", rewards_B), ("correct_B", correct_B), ("group_B", group_B)):
        if given.shape != (rows,):
            raise ValueError(f"{what} has shape {tuple(given.shape)}, expected ({rows},)")
    if not bool(torch.isfinite(rewards_B).all()):
        raise ValueError("gtpo_paper rewards must be finite")
    if mask_BT.numel() == 0:
        return torch.zeros_like(h_BT)
    # Groups are numbered without gaps: the numbers index the tables below.
    _, group_B = torch.unique(group_B, return_inverse=True)
    groups = int(group_B.max()) + 1
    correct_B = correct_B.to(torch.bool)
    h_BT = without_padding("uncertainty", h_BT, mask_BT).to(torch.float64).clamp(min=MIN_PAPER_UNCERTAINTY)
    share_BT = torch.where(correct_B[:, None], h_BT, 1.0 / h_BT)
    share_BT = torch.where(mask_BT, share_BT, 0.0)  # h of correct tokens, 1/h of wrong ones
    side_B = group_B * 2 + correct_B.long()  # one row of the tables below for each (group, correct or wrong)
    sums = share_BT.new_zeros(2 * groups, columns).index_add_(0, side_B, share_BT)[side_B]
    active = share_BT.new_zeros(2 * groups, columns).index_add_(0, side_B, mask_BT.to(share_BT))[side_B]
    bonus_BT = alpha2 * active * share_BT / torch.where(sums > 0.0, sums, 1.0)  # α₂·d_t·h/Σh
    base_B = torch.where(correct_B, alpha1 * rewards_B.detach().to(torch.float64), -alpha1)[:, None]
    shaped_BT = base_B + torch.where(correct_B[:, None], bonus_BT, -bonus_BT)

    def per_group(values_B: Floats_B) -> Floats_B:
        return values_B.new_zeros(groups).index_add_(0, group_B, values_B)[group_B]

    weight_BT = mask_BT.to(torch.float64)
    tokens_B = per_group(weight_BT.sum(1)).clamp(min=1.0)
    mean_B = per_group((shaped_BT * weight_BT).sum(1)) / tokens_B * centred
    centred_BT = (shaped_BT - mean_B[:, None]) * weight_BT
    deviation_B = (per_group(centred_BT.square().sum(1)) / tokens_B).sqrt()
    right_B = per_group(correct_B.to(torch.float64))
    size_B = per_group(torch.ones_like(right_B))
    trains_B = (right_B > 0) & (right_B < size_B) & (deviation_B >= EQUAL_REWARDS)  # both kinds, and a spread
    return torch.where(trains_B[:, None], centred_BT / deviation_B.clamp(min=EQUAL_REWARDS)[:, None], 0.0)
