"""CISPO, clipped importance sampling (arXiv 2506.13585, equation 4)."""

from dataclasses import dataclass

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """−sg(min(ρ, cap))·A·log π: the weight is capped, no token loses its gradient.

    The cap is absolute, not 1 + ε as in the paper.
    """

    cap: float = 5.0

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        # Detached: the gradient is that of log π alone, so a capped token still trains.
        ratio_BT = inputs.log_ratio_BT.detach().exp()
        loss_BT = -ratio_BT.clamp(max=self.cap) * inputs.advantages_BT * inputs.logprobs_BT
        return TokenLoss(loss_BT, clipped_high_BT=ratio_BT > self.cap)
