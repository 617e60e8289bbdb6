"""PPO's clipped ratio (arXiv 1707.06347, equation 7), with separate bounds and dual clipping."""

import math
from dataclasses import dataclass

import torch

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class PPO(PolicyLoss):
    """−min(ρA, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A), for A < 0 at most −dual_clip·A (arXiv 1912.09729).

    ``clip_eps`` = 0 switches clipping off; ``clip_eps_high`` = None follows ``clip_eps``.
    """

    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    dual_clip: float | None = None

    @property
    def lowest(self) -> float:
        # Without clipping the bound is 0, which no ratio is below.
        return 1.0 - (self.clip_eps or 1.0)

    @property
    def highest(self) -> float:
        if self.clip_eps == 0.0:
            return math.inf
        return 1.0 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        return self.clipped(inputs.log_ratio_BT.exp(), inputs.advantages_BT)

    def clipped(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> TokenLoss:
        clipped_BT = ratio_BT.clamp(self.lowest, self.highest)
        objective_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
        if self.dual_clip is not None:
            floor_BT = self.dual_clip * advantages_BT  # A < 0: bounds the loss where ρ grows without limit
            objective_BT = torch.where(advantages_BT < 0.0, torch.maximum(objective_BT, floor_BT), objective_BT)
        # The minimum selects the clipped branch only on these sides; elsewhere the token keeps its gradient.
        low_BT = (ratio_BT.detach() < self.lowest) & (advantages_BT < 0.0)
        high_BT = (ratio_BT.detach() > self.highest) & (advantages_BT > 0.0)
        return TokenLoss(-objective_BT, low_BT, high_BT)
