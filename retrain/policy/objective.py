"""What an update minimises: a sum of terms, each with its settings, what it needs, and whether it wants every sequence.

Beside the policy loss, with the same weights per token: the KL divergence to the base (k2, whose gradient is the
reverse KL's; the base is the model with no adapter active) and a bonus on the entropy of the whole distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch

from retrain.config import Config
from retrain.maths.losses import (
    Loss,
    Sums,
    entropy_loss,
    importance_ratio,
    kl_terms,
    log_ratio,
    mismatch_weights,
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

    ``logprobs_BT`` and ``entropy_BT`` carry gradients, ``reference_BT`` (of the frozen base) does not.
    """

    logprobs_BT: torch.Tensor
    entropy_BT: torch.Tensor | None = None
    reference_BT: torch.Tensor | None = None


class Term(Protocol):
    """One term of the loss. ``every_sequence``: it has a gradient also where all advantages are 0."""

    @property
    def needs(self) -> frozenset[Want]:
        """What it reads besides log-probabilities."""
        ...

    @property
    def every_sequence(self) -> bool:
        """Whether it has a gradient also where all advantages are 0."""
        ...

    timed_as: ClassVar[str]
    """The part of the update that its time counts for."""

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """Loss of every token [B, T] before normalisation, None where there is only something to log; and sums for the
        record."""
        ...


@dataclass(frozen=True)
class PolicyTerm:
    """The policy loss, with the mismatch of sampler and trainer corrected if asked.

    A correction splits π/π_sampler into the policy's own ratio π/π_old, which the loss clips, and the weight
    π_old/π_sampler. A batch has one update, so π_old is π itself and the own ratio is 1; the statistics stay those
    against the sampler, and what they count as clipped is what the cap or the band cuts.
    """

    loss: Loss = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float = 5.0
    dual_clip: float | None = None
    tis_cap: float | None = None
    icepop_band: tuple[float, float] | None = None
    timed_as: ClassVar[str] = "loss_computation"

    @property
    def needs(self) -> frozenset[Want]:
        """Nothing more."""
        return frozenset()

    @property
    def every_sequence(self) -> bool:
        """One of the user's own may do anything where the advantage is 0."""
        return not isinstance(self.loss, str)

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """See ``maths.losses.policy_loss``."""
        logprobs_BT, mask_BT, sampler_BT = scores.logprobs_BT, batch.loss_mask_BT, batch.sampler_logprobs_BT
        cap, band = self.tis_cap, self.icepop_band
        corrected = cap is not None or band is not None
        old_BT = logprobs_BT.detach() if corrected else sampler_BT
        weights_BT = mismatch_weights(old_BT, sampler_BT, mask_BT, cap=cap, band=band) if corrected else None
        per_token_BT, sums = policy_loss(
            self.loss,
            logprobs_BT,
            old_BT,
            batch.advantages_BT,
            mask_BT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ratio_cap=self.ratio_cap,
            weights_BT=weights_BT,
        )
        if corrected:
            low, high = band or (0.0, cap or math.inf)
            ratio_BT = importance_ratio(old_BT, sampler_BT, mask_BT)
            sums = ratio_sums(log_ratio(old_BT, sampler_BT, mask_BT), mask_BT, ratio_BT < low, ratio_BT > high)
        return per_token_BT, sums


@dataclass(frozen=True)
class KLTerm:
    """``coef`` times the KL divergence to the frozen base; with 0 it is only logged (k3)."""

    coef: float = 0.0
    timed_as: ClassVar[str] = "compute_kl"

    @property
    def needs(self) -> frozenset[Want]:
        """The base's log-probabilities."""
        return frozenset({Want.REFERENCE})

    @property
    def every_sequence(self) -> bool:
        """Every token has a divergence."""
        return self.coef > 0

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """k2 for the gradient, the sum of k3 for the record."""
        assert scores.reference_BT is not None
        mask_BT = batch.loss_mask_BT
        sums = {"kl": kl_terms("k3", scores.logprobs_BT.detach(), scores.reference_BT, mask_BT).double().sum()}
        if self.coef == 0:
            return None, sums
        return self.coef * kl_terms("k2", scores.logprobs_BT, scores.reference_BT, mask_BT), sums


@dataclass(frozen=True)
class EntropyTerm:
    """A bonus of ``coef`` times the entropy of the whole distribution."""

    coef: float
    timed_as: ClassVar[str] = "loss_computation"

    @property
    def needs(self) -> frozenset[Want]:
        """Entropies with their gradient."""
        return frozenset({Want.ENTROPY})

    @property
    def every_sequence(self) -> bool:
        """Every token has an entropy."""
        return True

    def per_token(self, batch: MicroBatch, scores: TokenScores) -> tuple[torch.Tensor | None, Sums]:
        """See ``maths.losses.entropy_loss``."""
        assert scores.entropy_BT is not None
        return entropy_loss(scores.entropy_BT, batch.loss_mask_BT, self.coef), {}


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
        """What all terms together read besides log-probabilities."""
        return frozenset().union(*(term.needs for term in self.terms))

    @property
    def every_sequence(self) -> bool:
        """Whether some term has a gradient also where all advantages are 0."""
        return any(term.every_sequence for term in self.terms)

    @property
    def kl_coef(self) -> float:
        """Weight of the KL divergence; 0 without."""
        return sum(term.coef for term in self.terms if isinstance(term, KLTerm))

    def without_gradient(self) -> Objective:
        """The same forward passes, that to the base included, with a loss that has no gradient without advantages."""
        terms = (PolicyTerm(loss="reinforce"), *(KLTerm() for term in self.terms if isinstance(term, KLTerm)))
        return replace(self, terms=terms)

    def loss(
        self, batch: MicroBatch, scores: TokenScores, denominators: Denominators, lap: Lap = no_lap
    ) -> tuple[torch.Tensor, Sums]:
        """This micro-batch's share of the step's loss (0-dim), and its statistics; ``lap`` hears of each term."""
        total_BT, sums = None, {}
        for term in self.terms:
            per_token_BT, own = term.per_token(batch, scores)
            sums |= own
            if per_token_BT is not None:
                total_BT = per_token_BT if total_BT is None else total_BT + per_token_BT
            lap(term.timed_as)
        assert total_BT is not None, "an objective has a term that is not only logged"
        weights_BT = token_weights(
            self.normalizer,
            batch.loss_mask_BT,
            total_tokens=denominators.tokens,
            total_sequences=denominators.sequences,
            max_tokens=self.max_tokens,
            denominator_mask_BT=batch.action_BT if denominators.all_tokens else None,
        )
        return (total_BT * weights_BT).sum(), sums


def objective_of(config: Config, loss: Loss) -> Objective:
    """The objective that a run's configuration asks for; ``loss`` is its policy loss, loaded."""
    algorithm, training = config.algorithm, config.training
    clip_low, clip_high = training.clip_range
    band = algorithm.icepop_band
    terms: list[Term] = [
        PolicyTerm(
            loss=loss,
            clip_low=clip_low,
            clip_high=clip_high,
            ratio_cap=algorithm.cispo_cap,
            dual_clip=algorithm.dual_clip,
            tis_cap=algorithm.tis_cap,
            icepop_band=(band[0], band[1]) if band else None,
        )
    ]
    if algorithm.kl_coef > 0 or config.logging.log_kl:
        terms.append(KLTerm(algorithm.kl_coef))
    if algorithm.entropy_coef > 0:
        terms.append(EntropyTerm(algorithm.entropy_coef))
    return Objective(tuple(terms), algorithm.loss_normalizer, training.temperature, training.max_tokens)
