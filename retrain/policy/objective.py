"""The objective of an update: a sum of terms (policy, KL, entropy, distillation, value) with their denominators."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from retrain.maths.corrections import Correction
from retrain.maths.ratios import Sums, log_ratio, mismatch_sums, ratio_sums, sampled_token_kl
from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.policy.head import Lap, no_lap
from retrain.policy.packing import MicroBatch
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
    def is_supervised(self) -> bool:
        return any(isinstance(term, SupervisedTerm) for term in self.terms)

    @property
    def kl_coef(self) -> float:
        return sum(term.coef for term in self.terms if isinstance(term, KLTerm))

    def only(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if isinstance(term, kinds)))

    def without(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if not isinstance(term, kinds)))

    def without_gradient(self) -> Objective:
        """Return an objective with loss 0, whose forward passes only compare sampler, trainer and base."""
        terms = (PolicyTerm(NoLoss()), *(KLTerm() for term in self.terms if isinstance(term, KLTerm)))
        return replace(self, terms=terms)

    def loss(
        self, batch: MicroBatch, scores: TokenScores, denominators: Denominators, lap: Lap = no_lap
    ) -> tuple[Tensor, Sums]:
        """Return the micro-batch's share of the step's loss (0-dim), and sums for metrics. ``lap`` times each term."""
        total_BT, value_BT, sums = None, None, {}
        for term in self.terms:
            per_token_BT, term_sums = term.per_token(batch, scores)
            sums |= term_sums
            if isinstance(term, ValueTerm):
                value_BT = per_token_BT
            elif per_token_BT is not None:
                total_BT = per_token_BT if total_BT is None else total_BT + per_token_BT
            lap(term.timed_as)
        # The loss mask selects what the policy trains on; the critic trains on all action tokens.
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
    """Return the factor of every token's loss, float32 [B, T], 0 outside ``mask_BT``.

    The factor by ``normalizer``: ``tokens`` 1/total_tokens; ``sequences`` 1/(total_sequences·T_i), which gives the mean
    of per-sequence means (GRPO); ``constant`` 1/(total_sequences·max_tokens) (Dr. GRPO). T_i is the number of tokens of
    sequence i in ``denominator_mask_BT``, by default ``mask_BT``. Totals of 0 give 0.
    """
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


# -- terms, before normalisation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScores:
    """Results of a micro-batch's forward passes on its action tokens, [B, T]; None if no term needs them."""

    logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    reference_BT: Tensor | None = None  # Of the reference policy: the only one without a gradient
    values_BT: Tensor | None = None
    divergence_BT: Tensor | None = None  # D_α from a teacher
    taught_BT: Tensor | None = None  # bool: action tokens of samples with a teacher
    top_BT: Tensor | None = None  # Log-probability of the likeliest token


class Term(Protocol):
    needs: ClassVar[frozenset[Want]]
    timed_as: ClassVar[str] = "loss_computation"  # Timed section that its seconds are added to

    @property
    def every_sequence(self) -> bool:
        """Return whether the term has a gradient even where all advantages are 0."""
        return True

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor | None, Sums]:
        """Return the loss of every token (None if the term is only logged), and sums for the metrics."""
        ...


class NotFiniteError(ValueError):
    """A NaN or an infinity where the loss needs a number."""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss, [B, T] with one row per sequence. All but ``old_logprobs_BT`` are 0 outside the mask."""

    logprobs_BT: Tensor  # log π, with gradient
    old_logprobs_BT: Tensor  # log π_old: of the sampler, or of the trainer before the first of several updates
    log_ratio_BT: Tensor  # log ρ = log π − log π_old within ±20, with gradient
    advantages_BT: Tensor
    mask_BT: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """Loss of every token [B, T], and masks of the tokens whose ratio was clipped (None: the loss clips none)."""

    loss_BT: Tensor  # Any value in the padding
    clipped_low_BT: Tensor | None = None
    clipped_high_BT: Tensor | None = None


class PolicyLoss(Protocol):
    """A policy loss, whose parameters are dataclass fields. The built-in ones are in ``retrain.algorithms.losses``."""

    from_sampler: ClassVar[bool] = False  # Use the sampler as π_old even with several updates per batch
    # True for user code, which may have a gradient at advantage 0, and which every rank loads itself
    is_plugin: ClassVar[bool] = False

    def per_token(self, inputs: LossInputs) -> TokenLoss: ...


@dataclass(frozen=True)
class NoLoss(PolicyLoss):
    """A loss of 0, for forward passes that only compare sampler and trainer."""

    def per_token(self, inputs: LossInputs) -> TokenLoss:
        return TokenLoss(torch.zeros_like(inputs.logprobs_BT))


def policy_loss(
    loss: PolicyLoss,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """Return the loss of every token [B, T], 0 in the padding, and the sums of ``ratio_sums``.

    ``weights_BT`` are constant factors. Only ``logprobs_BT`` carries a gradient. Raises ValueError for wrong shapes,
    and for values of trained tokens that are not finite (this check synchronises with the device); PluginError for a
    plug-in's bad result.
    """
    inputs = {"sampler logprob": old_logprobs_BT, "advantage": advantages_BT, "trainer logprob": logprobs_BT}
    for name, values_BT in inputs.items():
        if values_BT.shape != mask_BT.shape:
            raise ValueError(f"{name}s have shape {tuple(values_BT.shape)}, the mask {tuple(mask_BT.shape)}")
        _require_finite(name, values_BT, mask_BT)
    log_ratio_BT = log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    token_loss = loss.per_token(
        LossInputs(
            logprobs_BT=torch.where(mask_BT, logprobs_BT, 0.0),
            old_logprobs_BT=old_logprobs_BT.detach(),
            log_ratio_BT=log_ratio_BT,
            advantages_BT=torch.where(mask_BT, advantages_BT.detach(), 0.0).to(logprobs_BT.dtype),
            mask_BT=mask_BT,
        )
    )
    loss_BT = token_loss.loss_BT
    if weights_BT is not None:
        loss_BT = loss_BT * weights_BT.detach()
    sums = ratio_sums(log_ratio_BT, mask_BT, token_loss.clipped_low_BT, token_loss.clipped_high_BT)
    return torch.where(mask_BT, loss_BT, 0.0), sums


def _require_finite(name: str, values_BT: Tensor, mask_BT: Tensor) -> None:
    bad_BT = ~torch.isfinite(values_BT.detach()) & mask_BT
    if bool(bad_BT.any()):
        row, column = torch.nonzero(bad_BT)[0].tolist()
        raise NotFiniteError(f"{name} is {values_BT[row, column].item()} at completion {row}, token {column}")


@dataclass(frozen=True)
class PolicyTerm(Term):
    """The policy loss, with an optional ``correction`` of the mismatch between sampler and trainer.

    A correction splits π/π_sampler into the ratio π/π_old, which the loss clips, and the weight π_old/π_sampler. If a
    batch has one update, π_old is π. The ratio is then 1, the statistics compare π with the sampler, and tokens whose
    weight is bounded count as clipped. If a batch has several updates, π_old is the policy before the first of them
    (``old_logprobs_BT``), and the statistics are those of the loss. ``policy_weights_BT``, 0 for rejected tokens, is
    one more factor of the loss.
    """

    loss: PolicyLoss
    correction: Correction | None = None
    logged: bool = False
    needs: ClassVar[frozenset[Want]] = frozenset({Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return self.loss.is_plugin

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor | None, Sums]:
        assert scores.logprobs_BT is not None
        logprobs_BT, mask_BT, sampler_BT = scores.logprobs_BT, batch.loss_mask_BT, batch.sampler_logprobs_BT
        correction, before_BT, weights_BT = self.correction, batch.old_logprobs_BT, batch.policy_weights_BT
        if self.loss.from_sampler:
            old_BT = sampler_BT
        elif before_BT is not None:
            old_BT = before_BT
        else:
            old_BT = sampler_BT if correction is None else logprobs_BT.detach()
        correction_ratio_BT = None
        if correction is not None:
            correction_ratio_BT = correction.ratio(old_BT, sampler_BT, batch.action_BT)
            correction_BT = correction.weights(correction_ratio_BT)
            weights_BT = correction_BT if weights_BT is None else weights_BT * correction_BT
        per_token_BT, sums = policy_loss(
            self.loss, logprobs_BT, old_BT, batch.advantages_BT, mask_BT, weights_BT=weights_BT
        )
        if before_BT is not None:
            if self.loss.from_sampler:  # target_kl bounds how far the updates of this batch have moved the policy
                sums["moved"] = ratio_sums(log_ratio(logprobs_BT, before_BT, mask_BT), mask_BT)["moved"]
            sums |= mismatch_sums(logprobs_BT.detach(), before_BT, sampler_BT, mask_BT)
        elif correction is not None and correction_ratio_BT is not None:
            below_BT, above_BT = correction_ratio_BT < correction.low, correction_ratio_BT > correction.high
            sums = ratio_sums(log_ratio(old_BT, sampler_BT, mask_BT), mask_BT, below_BT, above_BT)
        if self.logged:
            sums["policy_loss"] = per_token_BT.detach().double().sum()
        return per_token_BT, sums


@dataclass(frozen=True)
class KLTerm(Term):
    """``coef`` times k2, an estimate of the KL to the frozen base whose gradient is that of the reverse KL. With a
    ``coef`` of 0 the KL is only logged."""

    coef: float = 0.0
    needs: ClassVar[frozenset[Want]] = frozenset({Want.REFERENCE, Want.LOGPROBS})
    timed_as: ClassVar[str] = "compute_kl"

    @property
    def every_sequence(self) -> bool:
        return self.coef > 0

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor | None, Sums]:
        """Return ``coef`` · k2 (None for 0), and the sums of k3 over trained tokens and k1 over all action tokens."""
        assert scores.reference_BT is not None
        assert scores.logprobs_BT is not None
        mask_BT, reference_BT, logprobs_BT = batch.loss_mask_BT, scores.reference_BT, scores.logprobs_BT.detach()
        sums = {
            "kl": sampled_token_kl("k3", logprobs_BT, reference_BT, mask_BT).double().sum(),
            "sequence_kl": sampled_token_kl("k1", logprobs_BT, reference_BT, batch.action_BT).double().sum(),
            "sequences": batch.action_BT.any(1).double().sum(),
        }
        if self.coef == 0:
            return None, sums
        return self.coef * sampled_token_kl("k2", scores.logprobs_BT, reference_BT, mask_BT), sums


@dataclass(frozen=True)
class EntropyTerm(Term):
    """A bonus of ``coef`` times the full-vocabulary entropy. A ``coef`` of 0 only logs it."""

    coef: float = 0.0
    logged: bool = False
    needs: ClassVar[frozenset[Want]] = frozenset({Want.ENTROPY, Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return self.coef > 0

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor | None, Sums]:
        assert scores.entropy_BT is not None
        entropy_BT, mask_BT = scores.entropy_BT, batch.loss_mask_BT
        sums = {"entropy": torch.where(mask_BT, entropy_BT.detach(), 0.0).double().sum()} if self.logged else {}
        return (torch.where(mask_BT, -self.coef * entropy_BT, 0.0) if self.coef > 0 else None), sums


@dataclass(frozen=True)
class ValueTerm(Term):
    """``coef`` times a critic's squared error, with values clipped to ±``clip`` of the old ones (PPO,
    arXiv 1707.06347)."""

    coef: float
    clip: float
    needs: ClassVar[frozenset[Want]] = frozenset({Want.VALUES})

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Sums]:
        assert scores.values_BT is not None
        assert batch.values_BT is not None
        assert batch.value_targets_BT is not None
        mask_BT = batch.action_BT
        loss_BT, clipped_BT = value_loss(scores.values_BT, batch.values_BT, batch.value_targets_BT, mask_BT, self.clip)
        return self.coef * loss_BT, {
            "value_tokens": mask_BT.double().sum(),
            "value_loss": loss_BT.detach().double().sum(),
            "value_clipped": (clipped_BT & mask_BT).double().sum(),
        }


def value_loss(
    values_BT: Floats_BT, old_values_BT: Floats_BT, targets_BT: Floats_BT, mask_BT: Mask_BT, clip: float
) -> tuple[Floats_BT, Mask_BT]:
    """Return the loss ½·max((V − R)², (clip(V, V_old ± ``clip``) − R)²) of every token with value V and target R, 0
    outside the mask, and a mask of the tokens whose clipped error is the larger one. A ``clip`` of 0 clips nothing.
    Only ``values_BT`` gets a gradient."""
    error_BT = torch.where(mask_BT, values_BT - targets_BT.detach(), 0.0).square()
    if clip == 0.0:
        return 0.5 * error_BT, torch.zeros_like(mask_BT)
    old_BT = old_values_BT.detach()
    clipped_BT = torch.clamp(values_BT, old_BT - clip, old_BT + clip)
    clipped_error_BT = torch.where(mask_BT, clipped_BT - targets_BT.detach(), 0.0).square()
    # The larger error, as in OpenAI Baselines' ppo2: clipping never makes the loss smaller.
    return 0.5 * torch.maximum(error_BT, clipped_error_BT), (clipped_error_BT > error_BT).detach()


@dataclass(frozen=True)
class TeacherTerm(Term):
    """``weight`` times the divergence D_α from a teacher's distribution (``head_divergence``). It is 0 for samples
    without a teacher."""

    weight: float
    alpha: float
    top: int = 0
    needs: ClassVar[frozenset[Want]] = frozenset({Want.TEACHER, Want.LOGPROBS})
    timed_as: ClassVar[str] = "compute_kl"

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Sums]:
        assert scores.divergence_BT is not None
        assert scores.taught_BT is not None
        mask_BT = batch.loss_mask_BT & scores.taught_BT
        loss_BT = torch.where(mask_BT, scores.divergence_BT, 0.0)
        return self.weight * loss_BT, {
            "divergence": loss_BT.detach().double().sum(),
            "taught_tokens": mask_BT.double().sum(),
        }


@dataclass(frozen=True)
class SupervisedTerm(Term):
    """The negative log-likelihood of the tokens in the loss mask. Without ``trains`` it is only measured: samples with
    advantages of 0 then need no backward pass."""

    trains: bool = True
    needs: ClassVar[frozenset[Want]] = frozenset({Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return self.trains

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Sums]:
        assert scores.logprobs_BT is not None
        assert scores.top_BT is not None
        mask_BT = batch.loss_mask_BT
        _require_finite("log-probability", scores.logprobs_BT, mask_BT)
        loss_BT = torch.where(mask_BT, -scores.logprobs_BT, 0.0)
        likeliest_BT = mask_BT & (scores.logprobs_BT.detach() >= scores.top_BT)
        return loss_BT, {
            "loss": loss_BT.detach().double().sum(),
            "likeliest": likeliest_BT.double().sum(),
            "tokens": mask_BT.double().sum(),
        }
