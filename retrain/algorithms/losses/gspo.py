"""Group Sequence Policy Optimization (arXiv 2507.18071)."""

from dataclasses import dataclass

from retrain.algorithms.losses.ppo import PPO
from retrain.policy.objective import LossInputs, TokenLoss


@dataclass(frozen=True)
class GSPO(PPO):
    """PPO with the sequence ratio exp(mean_t log ρ_t), whose gradient goes through each token's own log π.

    This is the paper's token form (§4.3): it keeps token-level credit, and has the gradient of the sequence form where
    all tokens of a completion have the same advantage.
    """

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        log_ratio_BT, mask_BT = inputs.log_ratio_BT, inputs.mask_BT
        length_B_1 = mask_BT.sum(1, keepdim=True).clamp(min=1)  # an empty sequence has the ratio 1
        mean_B_1 = (log_ratio_BT.detach() * mask_BT).sum(1, keepdim=True) / length_B_1
        # log ρ − sg(log ρ) is 0 in value and has the gradient of the token's log π.
        return self.clipped((mean_B_1 + log_ratio_BT - log_ratio_BT.detach()).exp(), inputs.advantages_BT)
