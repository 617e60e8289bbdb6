"""DPPO, Divergence PPO (arXiv 2602.04879)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss

THRESHOLDS = {"tv": 0.15, "kl": 0.05}  # The paper's thresholds by divergence
LEAST_PROBABILITY = 1e-8  # Added inside the logarithm of the probabilities of all other tokens


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """−sg(keep·min(ρ, cap))·A·log π with ρ = π/π_sampler. keep is 0 for a token whose divergence from the sampler
    exceeds ``threshold`` and which A would move further away, else 1.

    ``threshold`` = None takes the value of ``THRESHOLDS``. The divergence of π from the sampler μ is over two events,
    this token and any other: ``tv`` |π − μ|, ``kl`` KL(μ ‖ π).
    """

    divergence: str = "tv"
    threshold: float | None = None
    cap: float = 20.0
    from_sampler: ClassVar[bool] = True

    @property
    def limit(self) -> float:
        return THRESHOLDS[self.divergence] if self.threshold is None else self.threshold

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        log_ratio_BT, advantages_BT = inputs.log_ratio_BT.detach(), inputs.advantages_BT
        now_BT = inputs.logprobs_BT.detach().exp()
        sampler_BT = (inputs.logprobs_BT.detach() - log_ratio_BT).exp()
        if self.divergence == "tv":
            divergence_BT = (now_BT - sampler_BT).abs()  # total variation of the two events
        else:
            # KL(μ ‖ π) of two events, the token and any other: μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π)).
            other_BT = ((1.0 - sampler_BT + LEAST_PROBABILITY) / (1.0 - now_BT + LEAST_PROBABILITY)).log()
            divergence_BT = -sampler_BT * log_ratio_BT + (1.0 - sampler_BT) * other_BT
        far_BT = divergence_BT > self.limit
        # Only tokens that have moved in the direction of their advantage: a step back towards the sampler is allowed.
        low_BT = far_BT & (advantages_BT < 0.0) & (now_BT < sampler_BT)
        high_BT = far_BT & (advantages_BT > 0.0) & (now_BT > sampler_BT)
        weight_BT = torch.where(low_BT | high_BT, 0.0, log_ratio_BT.exp().clamp(max=self.cap))  # constant: detached
        return TokenLoss(-weight_BT * advantages_BT * inputs.logprobs_BT, low_BT, high_BT)
