"""REINFORCE with an importance weight."""

from dataclasses import dataclass

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """−sg(ρ)·A·log π: importance-sampled policy gradient, never clipped."""

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(-inputs.log_ratio_BT.detach().exp() * inputs.advantages_BT * inputs.logprobs_BT)
