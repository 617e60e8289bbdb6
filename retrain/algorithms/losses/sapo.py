"""SAPO, Soft Adaptive Policy Optimization (arXiv 2511.20347)."""

from dataclasses import dataclass

import torch

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """−A·(4/τ)·σ(τ(ρ − 1)), τ = ``tau_positive`` where A > 0, else ``tau_negative``: a soft gate in place of clipping.
    The gradient has the weight 1 at ρ = 1 and less on both sides."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        advantages_BT = inputs.advantages_BT
        tau_BT = torch.where(advantages_BT > 0.0, self.tau_positive, self.tau_negative)
        gate_BT = torch.sigmoid(tau_BT * (inputs.log_ratio_BT.exp() - 1.0))
        # σ′(0) = ¼, so that the factor 4/τ gives the gradient weight 1 at ρ = 1.
        return TokenLoss(-advantages_BT * 4.0 / tau_BT * gate_BT)
