"""The objective of an update: a sum of terms (``policy.terms``) with their denominators."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from retrain.maths.ratios import Sums
from retrain.policy.head import Lap, no_lap
from retrain.policy.packing import MicroBatch
from retrain.policy.terms import EntropyTerm, KLTerm, NoLoss, PolicyTerm, Term, TokenScores, ValueTerm
from retrain.types import Denominators, Want

NORMALIZERS = ("tokens", "sequences", "constant")


@dataclass(frozen=True)
class Objective:
    """loss = Σ_tokens token_weight · Σ_terms per_token + Σ_tokens value_loss / action_tokens.

    Denominators count the whole optimizer step, so neither micro-batching nor skipping groups with advantages of 0
    changes the update. ``temperature`` is that of sampling; the ``constant`` normaliser divides by ``max_tokens``.
    """

    terms: tuple[Term, ...]
    normalizer: str = "tokens"
    temperature: float = 1.0
    max_tokens: int = 256

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def every_sequence(self) -> bool:
        return any(term.every_sequence for term in self.terms)

    @property
    def entropy_gradient(self) -> bool:
        return any(term.coef > 0 for term in self.terms if isinstance(term, EntropyTerm))

    @property
    def kl_coef(self) -> float:
        return sum(term.coef for term in self.terms if isinstance(term, KLTerm))

    def only(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if isinstance(term, kinds)))

    def without(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if not isinstance(term, kinds)))

    def without_gradient(self) -> Objective:
        """Return the objective that only compares sampler, trainer and base, by the same forward passes."""
        terms = (PolicyTerm(NoLoss()), *(KLTerm() for term in self.terms if isinstance(term, KLTerm)))
        return replace(self, terms=terms)

    def loss(
        self, batch: MicroBatch, scores: TokenScores, denominators: Denominators, lap: Lap = no_lap
    ) -> tuple[Tensor, Sums]:
        """Return the micro-batch's share of the step's loss (0-dim) and its statistics; ``lap`` times each term."""
        total_BT, value_BT, sums = None, None, {}
        for term in self.terms:
            per_token_BT, term_sums = term.per_token(batch, scores)
            sums |= term_sums
            if isinstance(term, ValueTerm):
                value_BT = per_token_BT
            elif per_token_BT is not None:
                total_BT = per_token_BT if total_BT is None else total_BT + per_token_BT
            lap(term.timed_as)
        value = None if value_BT is None else value_BT.sum() / denominators.action_tokens
        if total_BT is None:
            assert value is not None, "an objective has a term that is not only logged"
            return value, sums
        loss = (total_BT * self._token_weights(batch, denominators)).sum()
        return loss if value is None else loss + value, sums

    def _token_weights(self, batch: MicroBatch, denominators: Denominators) -> Tensor:
        counted_BT = batch.action_BT if denominators.all_tokens else None
        if denominators.kept_tokens:
            assert batch.policy_weights_BT is not None
            counted_BT = batch.loss_mask_BT & (batch.policy_weights_BT != 0.0)
        return token_weights(
            self.normalizer,
            batch.loss_mask_BT,
            total_tokens=denominators.tokens,
            total_sequences=denominators.sequences,
            max_tokens=self.max_tokens,
            denominator_mask_BT=counted_BT,
        )


@torch.no_grad()
def token_weights(
    normalizer: str,
    mask_BT: Tensor,
    *,
    total_tokens: int,
    total_sequences: int,
    max_tokens: int,
    denominator_mask_BT: Tensor | None = None,
) -> Tensor:
    """Return the weight of every token's loss, float32 [B, T], 0 outside ``mask_BT``.

    ``tokens`` 1/total_tokens; ``sequences`` 1/(total_sequences·T_i), the mean of per-sequence means (GRPO);
    ``constant`` 1/(total_sequences·max_tokens) (Dr. GRPO). T_i counts ``denominator_mask_BT``, by default ``mask_BT``.
    Totals of 0 give 0.
    """
    totals = {"total_tokens": total_tokens, "total_sequences": total_sequences, "max_tokens": max_tokens}
    if any(value < 0 for value in totals.values()):
        raise ValueError(f"loss denominators must be >= 0: got {totals}")
    if normalizer not in NORMALIZERS:
        raise ValueError(f"unknown loss normalizer {normalizer!r}: one of {', '.join(NORMALIZERS)}")
    if normalizer == "sequences":
        counted_BT = mask_BT if denominator_mask_BT is None else denominator_mask_BT
        denominator_B_1 = counted_BT.sum(1, keepdim=True) * float(total_sequences)
    else:
        total = float(total_tokens) if normalizer == "tokens" else float(total_sequences) * float(max_tokens)
        denominator_B_1 = torch.full((mask_BT.shape[0], 1), total, device=mask_BT.device)
    weight_B_1 = torch.where(denominator_B_1 > 0, 1.0 / denominator_B_1.clamp(min=1.0), 0.0)
    return torch.where(mask_BT, weight_B_1, 0.0)
