"""VESPO (arXiv 2602.10693)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class VESPO(PolicyLoss):
    """−sg(φ(W))·A·log π, φ(W) = W^power·e^(decay·(1 − W)), W the product of a completion's ratios to the sampler.

    ``positive`` is [power, decay] where A ≥ 0, ``negative`` where A < 0.
    """

    positive: Sequence[float] = (2.0, 3.0)
    negative: Sequence[float] = (3.0, 2.0)
    from_sampler: ClassVar[bool] = True

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        positive_B_1 = sequence_weight(inputs.log_ratio_BT, inputs.mask_BT, *self.positive)
        negative_B_1 = sequence_weight(inputs.log_ratio_BT, inputs.mask_BT, *self.negative)
        weight_BT = torch.where(inputs.advantages_BT >= 0.0, positive_B_1, negative_B_1)
        return TokenLoss(-weight_BT * inputs.advantages_BT * inputs.logprobs_BT)


def sequence_weight(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, power: float, decay: float) -> torch.Tensor:
    """Return φ(W) of every sequence, [B, 1]; 0 where it is not finite."""
    total_B_1 = (log_ratio_BT.detach() * mask_BT).sum(1, keepdim=True).double()  # log W
    phi_B_1 = (power * total_B_1 + decay * (1.0 - total_B_1.exp())).exp()  # in logarithms: W alone may overflow
    # Where W overflows, decay = 0 gives 0·∞; without decay W^power itself may overflow.
    return torch.nan_to_num(phi_B_1, nan=0.0, posinf=0.0).to(log_ratio_BT.dtype)
