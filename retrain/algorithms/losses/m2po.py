"""M2PO, second-moment trust policy optimization (arXiv 2510.01161)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from retrain.maths.ratios import log_ratio
from retrain.policy.objective import LossInputs, PolicyLoss, TokenLoss


@dataclass(frozen=True)
class M2PO(PolicyLoss):
    """−ρA with ρ = π/π_sampler, never clipped: ``kept_tokens`` chooses beforehand which tokens of the step train.

    ``tokens``: the candidates for masking: ``all``, as in the paper's code, or ``harmful``, those whose probability has
    already moved in the direction of their advantage (as in the authors' other implementation).
    """

    threshold: float = 0.04
    tokens: str = "all"
    from_sampler: ClassVar[bool] = True

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(-inputs.log_ratio_BT.exp() * inputs.advantages_BT)

    def kept_tokens(
        self, logprobs_BT: torch.Tensor, sampler_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, adv_BT: torch.Tensor
    ) -> torch.Tensor:
        """Return the mask of tokens that train, bool [B, T], false in the padding. Tokens with the largest (log ρ)² are
        masked until the mean over the others is below ``threshold``; tokens with equal values are masked together.

        Tokens whose advantage is 0 have no policy loss: they are kept and do not count in the mean, so that groups
        without signal change nothing for the others.
        """
        log_BT = log_ratio(logprobs_BT.detach(), sampler_logprobs_BT, mask_BT).double()
        candidates_BT = mask_BT & (adv_BT != 0.0)
        if self.tokens == "harmful":
            candidates_BT = candidates_BT & (log_BT * adv_BT > 0.0)
        squares_M = log_BT[candidates_BT].square().sort().values
        if not len(squares_M):
            return mask_BT.clone()
        means_M = squares_M.cumsum(0) / torch.arange(1, len(squares_M) + 1, device=squares_M.device)
        last_M = torch.ones_like(squares_M, dtype=torch.bool)  # whether it is the last of equal squares
        last_M[:-1] = squares_M[:-1] != squares_M[1:]
        # Running means of ascending squares do not decrease, so those that fit form a prefix.
        fits_M = (means_M < self.threshold) & last_M
        # A limit of −1 masks every candidate, also those with a square of 0.
        limit = squares_M[fits_M].max() if bool(fits_M.any()) else squares_M.new_tensor(-1.0)
        return mask_BT & ~(candidates_BT & (log_BT.square() > limit))
