"""Entropy mask: only the most uncertain tokens of the batch train (arXiv 2506.01939)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch

from retrain.algorithms.algorithm import StepContext, TokenCreditStep, pad_field, token_mask
from retrain.algorithms.credit.uncertainty import without_padding
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import CreditedBatch, CreditedRollout


@dataclass(frozen=True)
class EntropyMask(TokenCreditStep):
    """Trains the share ``rho`` of the batch's tokens, those of highest entropy.

    ``denominator``: the loss is divided by the number of ``kept`` tokens, or of ``all``; the losses differ by 1/rho.
    """

    rho: float
    denominator: str = "kept"

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        if any(rollout.entropy_T is None for rollout in rated):
            raise ValueError("entropy_mask needs the entropy of every token, which the engine did not give")
        kept_BT = entropy_mask(pad_field(rated, "entropy_T"), token_mask(rated), self.rho)
        counts_all = self.denominator == "all"
        changes = []
        for rollout, kept_row_T in zip(rated, kept_BT.numpy(), strict=True):
            kept_T, advantages_T = kept_row_T[: len(rollout)], rollout.token_advantages_T
            assert advantages_T is not None, "advantages are spread over tokens before they are masked"
            counted = None if counts_all else int(kept_T.sum())  # None: every token counts
            changes.append(
                {
                    "token_advantages_T": np.where(kept_T, advantages_T, 0.0),
                    "loss_mask_T": kept_T,
                    "counted_tokens": counted,
                }
            )
        tokens = batch.denominators.tokens if counts_all else int(kept_BT.sum())
        batch = replace(batch, denominators=replace(batch.denominators, tokens=tokens, all_tokens=counts_all))
        return batch.with_fields(rated, changes)


@torch.no_grad()
def entropy_mask(entropy_BT: Floats_BT, mask_BT: Mask_BT, rho: float) -> Mask_BT:
    """Return a mask, bool [B, T], of the ⌈ρn⌉ tokens of highest entropy among the batch's n (arXiv 2506.01939).

    Ties at the threshold go to the earlier token, so exactly ⌈ρn⌉ stay; ρ = 1 is an exact no-op. ρ is read as the
    decimal it was written as (0.1 of 30 tokens is 3, not 4). Raises ValueError unless 0 < ρ ≤ 1, and for NaN.
    """
    if not 0.0 < rho <= 1.0:
        raise ValueError(f"entropy_mask rho must be in (0, 1]: got {rho}")
    total = int(mask_BT.sum())
    # Exact: ⌈0.07 · 100⌉ is 8 in floating point.
    keep = math.ceil(Fraction(repr(float(rho))) * total)
    if keep == total:
        return mask_BT.clone()
    values = torch.where(mask_BT, without_padding("entropy", entropy_BT, mask_BT), -math.inf).flatten()
    # A threshold and a tie rule instead of topk's indices, whose order among equal values is undefined.
    threshold = values.topk(keep, sorted=True).values[-1]
    above = values > threshold
    ties = (values == threshold) & mask_BT.flatten()
    chosen = above | (ties & (ties.cumsum(0) <= keep - above.sum()))
    return chosen.view_as(mask_BT)
