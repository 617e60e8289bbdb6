"""What an update minimises: a sum of terms, each with its settings, what it needs, and whether it wants every sequence.

Beside the policy loss, with the same weights per token: the KL divergence to the base (k2, whose gradient is the
reverse KL's; the base is the model with no adapter active) and a bonus on the entropy of the whole distribution. A
critic's loss is a term too, over all action tokens and divided by their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch

from retrain.config import Config
from retrain.config.modes import loss_of
from retrain.maths.corrections import Correction
from retrain.maths.critic import value_loss
from retrain.maths.losses import (
    Loss,
    LossBounds,
    Sums,
    entropy_loss,
    kl_terms,
    log_ratio,
    mismatch_sums,
    policy_loss,
    ratio_sums,
    token_weights,
)
from retrain.policy.head import Lap, no_lap
from retrain.policy.logprobs import MicroBatch
from retrain.policy.protocol import Denominators, Want


@dataclass(frozen=True)
class TokenScores:
    """What the forward passes say of a micro-batch's action tokens, [B, T]; only what some term needs is there.

    ``logprobs_BT``, ``entropy_BT``, ``values_BT`` and ``divergence_BT`` (from a teacher, where ``taught_BT``) carry
    gradients, ``reference_BT`` (of the frozen base) does not.
    """

    logprobs_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    reference_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None
    divergence_BT: torch.Tensor | None = None
    taught_BT: torch.Tensor | None = None


class Term(Protocol):
    """One term of the loss. ``every_sequence``: it has a gradient also where all advantages are 0."""

    @property
    def needs(self) -> frozenset[Want]: ...

    @property
    def every_sequence(self) -> bool:
        """Whether it has a gradient also where all advantages are 0."""
        ...

    timed_as: ClassVar[str]  # Timed section that its seconds are added to

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """Loss of every token [B, T] before normalisation, None where there is only something to log; and sums for the
        record."""
        ...


@dataclass(frozen=True)
class PolicyTerm:
    """The policy loss, with the mismatch of sampler and trainer corrected if asked.

    A correction splits π/π_sampler into the policy's own ratio π/π_old, which the loss clips, and the weight
    π_old/π_sampler. Where a batch has one update, π_old is π itself and the own ratio is 1; the statistics stay those
    against the sampler, and what they count as clipped is what the cap or the band cuts. In several updates π_old are
    the log-probabilities that the samples bring, and ratio and clipping are those of the loss; those that
    are ``from_sampler`` compare with the sampler in any case. Weights that the samples bring, 0 for what was rejected,
    are one more factor.

    ``logged``: the mean loss of a token is a number of the record too.
    """

    loss: Loss = "ppo"
    bounds: LossBounds = field(default_factory=LossBounds)
    correction: Correction | None = None
    logged: bool = False
    timed_as: ClassVar[str] = "loss_computation"

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset({Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        """One of the user's own may do anything where the advantage is 0."""
        return not isinstance(self.loss, str)

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        assert scores.logprobs_BT is not None
        logprobs_BT, mask_BT, sampler_BT = scores.logprobs_BT, batch.loss_mask_BT, batch.sampler_logprobs_BT
        correction, given_BT, weights_BT = self.correction, batch.old_logprobs_BT, batch.policy_weights_BT
        old_BT = given_BT if given_BT is not None else logprobs_BT.detach() if correction else sampler_BT
        if loss_of(self.loss).from_sampler:
            old_BT = sampler_BT
        ratio_BT = None
        if correction is not None:
            ratio_BT = correction.ratio(old_BT, sampler_BT, batch.action_BT)
            own_BT = correction.weights(ratio_BT)
            weights_BT = own_BT if weights_BT is None else weights_BT * own_BT
        per_token_BT, sums = policy_loss(
            self.loss, logprobs_BT, old_BT, batch.advantages_BT, mask_BT, self.bounds, weights_BT=weights_BT
        )
        if given_BT is not None:
            if loss_of(self.loss).from_sampler:  # how far it has moved is told from where it was, as with other losses
                sums["moved"] = ratio_sums(log_ratio(logprobs_BT, given_BT, mask_BT), mask_BT, ~mask_BT, ~mask_BT)[
                    "moved"
                ]
            sums |= mismatch_sums(logprobs_BT.detach(), given_BT, sampler_BT, mask_BT)
        elif correction is not None and ratio_BT is not None:
            below_BT, above_BT = ratio_BT < correction.low, ratio_BT > correction.high
            sums = ratio_sums(log_ratio(old_BT, sampler_BT, mask_BT), mask_BT, below_BT, above_BT)
        if self.logged:
            sums["policy_loss"] = per_token_BT.detach().double().sum()
        return per_token_BT, sums


@dataclass(frozen=True)
class KLTerm:
    """``coef`` times the KL divergence to the frozen base; with 0 it is only logged (k3)."""

    coef: float = 0.0
    timed_as: ClassVar[str] = "compute_kl"

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset({Want.REFERENCE, Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return self.coef > 0

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """Return k2 for the gradient; for the record the sum of k3 over trained tokens, and the sum of k1 over all
        action tokens with the number of sequences."""
        assert scores.reference_BT is not None
        assert scores.logprobs_BT is not None
        mask_BT, logprobs_BT = batch.loss_mask_BT, scores.logprobs_BT.detach()
        sums = {
            "kl": kl_terms("k3", logprobs_BT, scores.reference_BT, mask_BT).double().sum(),
            "sequence_kl": kl_terms("k1", logprobs_BT, scores.reference_BT, batch.action_BT).double().sum(),
            "sequences": batch.action_BT.any(1).double().sum(),
        }
        if self.coef == 0:
            return None, sums
        return self.coef * kl_terms("k2", scores.logprobs_BT, scores.reference_BT, mask_BT), sums


@dataclass(frozen=True)
class EntropyTerm:
    """A bonus of ``coef`` times the entropy of the whole distribution; with 0 it is only logged."""

    coef: float = 0.0
    logged: bool = False
    timed_as: ClassVar[str] = "loss_computation"

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset({Want.ENTROPY, Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return self.coef > 0

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        assert scores.entropy_BT is not None
        entropy_BT, mask_BT = scores.entropy_BT, batch.loss_mask_BT
        sums = {"entropy": torch.where(mask_BT, entropy_BT.detach(), 0.0).double().sum()} if self.logged else {}
        return (entropy_loss(entropy_BT, mask_BT, self.coef) if self.coef > 0 else None), sums


@dataclass(frozen=True)
class ValueTerm:
    """``coef`` times a critic's squared error, of values that move by ``clip`` at most (see ``maths.critic``)."""

    coef: float
    clip: float
    timed_as: ClassVar[str] = "loss_computation"

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset({Want.VALUES})

    @property
    def every_sequence(self) -> bool:
        return True

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
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


@dataclass(frozen=True)
class TeacherTerm:
    """``weight`` times D_α of the whole distribution from a teacher's, ``top`` as in ``policy.divergence``; tokens of
    completions that nobody teaches have none."""

    weight: float
    alpha: float
    top: int = 0
    timed_as: ClassVar[str] = "compute_kl"

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset({Want.TEACHER, Want.LOGPROBS})

    @property
    def every_sequence(self) -> bool:
        return True

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        assert scores.divergence_BT is not None
        assert scores.taught_BT is not None
        mask_BT = batch.loss_mask_BT & scores.taught_BT
        loss_BT = torch.where(mask_BT, scores.divergence_BT, 0.0)
        return self.weight * loss_BT, {
            "divergence": loss_BT.detach().double().sum(),
            "taught_tokens": mask_BT.double().sum(),
        }


@dataclass(frozen=True)
class Objective:
    """The terms of a loss and what their sum is divided by.

    ``temperature``: log-probabilities are those of the distribution that was sampled from. ``max_tokens`` is what the
    ``constant`` normaliser divides by.
    """

    terms: tuple[Term, ...] = field(default_factory=lambda: (PolicyTerm(),))
    normalizer: str = "tokens"
    temperature: float = 1.0
    max_tokens: int = 256

    @property
    def needs(self) -> frozenset[Want]:
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def every_sequence(self) -> bool:
        """Whether some term has a gradient also where all advantages are 0."""
        return any(term.every_sequence for term in self.terms)

    @property
    def entropy_gradient(self) -> bool:
        """Whether entropies are needed with their gradient."""
        return any(term.coef > 0 for term in self.terms if isinstance(term, EntropyTerm))

    @property
    def kl_coef(self) -> float:
        return sum(term.coef for term in self.terms if isinstance(term, KLTerm))

    def alone(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if isinstance(term, kinds)))

    def without(self, *kinds: type) -> Objective:
        return replace(self, terms=tuple(term for term in self.terms if not isinstance(term, kinds)))

    def without_gradient(self) -> Objective:
        """The same forward passes, that to the base included, with a loss that has no gradient without advantages."""
        terms = (PolicyTerm(loss="reinforce"), *(KLTerm() for term in self.terms if isinstance(term, KLTerm)))
        return replace(self, terms=terms)

    def loss(
        self, batch: MicroBatch, scores: TokenScores, denominators: Denominators, lap: Lap = no_lap
    ) -> tuple[torch.Tensor, Sums]:
        """This micro-batch's share of the step's loss (0-dim), and its statistics; ``lap`` hears of each term."""
        total_BT, value_BT, sums = None, None, {}
        for term in self.terms:
            per_token_BT, own = term.per_token(batch, scores)
            sums |= own
            if isinstance(term, ValueTerm):
                value_BT = per_token_BT
            elif per_token_BT is not None:
                total_BT = per_token_BT if total_BT is None else total_BT + per_token_BT
            lap(term.timed_as)
        value = None if value_BT is None else value_BT.sum() / denominators.action_tokens
        if total_BT is None:
            assert value is not None, "an objective has a term that is not only logged"
            return value, sums
        counted_BT = batch.action_BT if denominators.all_tokens else None
        if denominators.kept_tokens:
            assert batch.policy_weights_BT is not None
            counted_BT = batch.loss_mask_BT & (batch.policy_weights_BT != 0.0)
        weights_BT = token_weights(
            self.normalizer,
            batch.loss_mask_BT,
            total_tokens=denominators.tokens,
            total_sequences=denominators.sequences,
            max_tokens=self.max_tokens,
            denominator_mask_BT=counted_BT,
        )
        loss = (total_BT * weights_BT).sum()
        return loss if value is None else loss + value, sums


def objective_of(config: Config, loss: Loss) -> Objective:
    """The objective that a run's configuration asks for; ``loss`` is its policy loss, loaded."""
    algorithm, training = config.algorithm, config.training
    clip_low, clip_high = training.clip_range
    bounds = LossBounds(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=algorithm.dual_clip,
        ratio_cap=algorithm.cispo_cap,
        divergence=algorithm.dppo_divergence,
        divergence_limit=algorithm.dppo_limit,
        divergence_cap=algorithm.dppo_cap,
        gate=(algorithm.sapo_tau_positive, algorithm.sapo_tau_negative),
        positive=(algorithm.vespo_positive[0], algorithm.vespo_positive[1]),
        negative=(algorithm.vespo_negative[0], algorithm.vespo_negative[1]),
    )
    terms: list[Term] = [
        PolicyTerm(
            loss=loss,
            bounds=bounds,
            correction=Correction(*algorithm.weight) if algorithm.weight else None,
            logged=algorithm.critic,
        )
    ]
    if algorithm.loss_kl_coef > 0 or config.logging.log_kl:
        terms.append(KLTerm(algorithm.loss_kl_coef))
    if algorithm.entropy_coef > 0 or algorithm.critic:
        terms.append(EntropyTerm(algorithm.entropy_coef, logged=algorithm.critic))
    if (own := config.distillation).whole:
        terms.append(TeacherTerm(own.weight, own.alpha, own.top_tokens))
    if algorithm.critic:
        terms.append(ValueTerm(config.critic.vf_coef, config.critic.cliprange_value))
    return Objective(tuple(terms), algorithm.loss_normalizer, training.temperature, training.max_tokens)
