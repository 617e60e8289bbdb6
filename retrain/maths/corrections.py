"""Corrections of the mismatch between sampler and trainer, and the rejection of whole sequences.

With w = π_trainer/π_sampler of a token and W the product of w over its sequence, a *correction* weighs the policy loss
of every token by w or W, within bounds; a *rejection* masks whole sequences. Both compare the sampler with the trainer
before the update and carry no gradient ("When Speed Kills Stability", and the papers named below). A sequence is a row:
every action token of a sample.
"""

import math
from dataclasses import dataclass

import torch

from retrain.maths.ratios import MAX_LOG_RATIO, log_ratio
from retrain.maths.shapes import Floats_BT, Mask_B1, Mask_BT

CAPPED = ("tis", "seq_tis", "decoupled")  # These truncate the weight; the others set it to 0 outside the bounds
SEQUENCE = ("seq_tis", "seq_mis")  # Corrections by W


@dataclass(frozen=True)
class Correction:
    """A weight of the policy loss: ``kind`` is one of [algorithm] correction, ``low`` and ``high`` bound it.

    With w = π_trainer/π_sampler of a token and W its product over the sequence, the weight is, by ``kind``: ``tis``
    min(w, high) (truncated importance sampling); ``mis`` w where w ≤ high, else 0 (masked); ``icepop`` w inside [low,
    high], else 0 (arXiv 2510.18855); ``decoupled`` w itself (arXiv 2110.00641); ``seq_tis`` and ``seq_mis`` like
    ``tis`` and ``mis``, with W in place of w.
    """

    kind: str
    low: float = 0.0
    high: float = math.inf

    def ratio(self, old_BT: Floats_BT, sampler_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
        """Return w, or W for every token of its sequence, [B, T]; 1 in the padding."""
        log_BT = log_ratio(old_BT.detach(), sampler_BT, mask_BT)
        if self.kind in SEQUENCE:
            # W of a long sequence overflows float32, so its logarithm is clamped like a token's.
            log_BT = torch.where(mask_BT, log_BT.sum(1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
        return log_BT.exp()

    def weights(self, ratio_BT: Floats_BT) -> Floats_BT:
        if self.kind in CAPPED:
            return ratio_BT.clamp(max=self.high)
        return torch.where((ratio_BT >= self.low) & (ratio_BT <= self.high), ratio_BT, 0.0)


def kept_sequences(
    kind: str, old_logprobs_BT: Floats_BT, sampler_logprobs_BT: Floats_BT, mask_BT: Mask_BT, low: float, high: float
) -> Mask_B1:
    """Return the mask of sequences that train, bool [B, 1].

    The condition is, by ``kind``: ``geometric``, that the geometric mean of w, exp(mean log w), lies in [low, high];
    ``k3``, that mean(w − 1 − log w) ≤ high; ``veto``, that no token has w < low. Means are over ``mask_BT``. An empty
    sequence is kept.
    """
    # float64: the sum of a long sequence is compared with a threshold, which float32 rounding could cross.
    log_BT = log_ratio(old_logprobs_BT.detach(), sampler_logprobs_BT, mask_BT).double()
    count_B_1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    if kind == "geometric":
        mean_B_1 = (log_BT.sum(1, keepdim=True) / count_B_1).exp()
        return (mean_B_1 >= low) & (mean_B_1 <= high)
    if kind == "k3":
        # w − 1 − log w is of order (log w)²: computed with w − 1 instead of expm1 it would cancel near w = 1.
        return (torch.expm1(log_BT) - log_BT).sum(1, keepdim=True) / count_B_1 <= high
    # The padding has w = 1, which no veto bound exceeds.
    return (log_BT.exp() >= low).all(1, keepdim=True)
