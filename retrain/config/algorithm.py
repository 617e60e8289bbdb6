"""[algorithm], [gtpo], [hicra], [sepa], [planning]: from rewards to one number per token, and the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from retrain.config.base import (
    Count,
    Decay,
    Finding,
    Natural,
    NotNegative,
    Positive,
    PositiveShare,
    Section,
    Share,
    Unavailable,
    UsedWhen,
)

if TYPE_CHECKING:
    from retrain.config.root import Config

AdvantageMode = Annotated[
    Literal["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"],
    Unavailable({"gae": ("it needs a value head, which is not available", 'advantage_mode = "rloo"')}),
]
TransformMode = Annotated[
    Literal["none", "gtpo", "gtpo_hicra", "gtpo_hicra_placebo", "gtpo_sepa", "gtpo_paper", "entropy_mask"],
    Unavailable(
        {
            name: ("this variant is not available", 'transform_mode = "gtpo_sepa"')
            for name in ("gtpo_sepa_amp", "gtpo_sepa_amp_c")
        }
    ),
]
ADVANTAGE_MODES: tuple[str, ...] = get_args(get_args(AdvantageMode)[0])
TRANSFORM_MODES: tuple[str, ...] = get_args(get_args(TransformMode)[0])

_MODE = "algorithm.transform_mode"
_WEIGHTED = UsedWhen(_MODE, ("gtpo", "gtpo_hicra", "gtpo_hicra_placebo", "gtpo_sepa"))
_PAPER = UsedWhen(_MODE, ("gtpo_paper",))
_HICRA = UsedWhen(_MODE, ("gtpo_hicra", "gtpo_hicra_placebo"))
_SEPA = UsedWhen(_MODE, ("gtpo_sepa",))
_MASKED = UsedWhen(_MODE, ("entropy_mask",))
_AUTO = UsedWhen("sepa.schedule", ("auto",))


class Algorithm(Section):
    """Which advantage, which token credit, which loss. Each name means its paper."""

    advantage_mode: AdvantageMode = "grpo"
    """One number per completion from the rewards of its group."""
    transform_mode: TransformMode = "none"
    """How that number is spread over the completion's tokens; `none` gives every token the same."""
    uncertainty_kind: Annotated[
        Literal["surprisal", "predictive_variance", "shannon_entropy"],
        UsedWhen(_MODE, (*_WEIGHTED.values, "gtpo_paper"), training_only=True),
    ] = "surprisal"
    """Uncertainty of a token: −logprob of the sampled token, p(1−p), or the entropy of the whole distribution."""
    loss: Literal["ppo", "reinforce", "gspo", "cispo"] = "ppo"
    """Policy loss. On-policy with one update per batch all four have the same gradient."""
    loss_normalizer: Literal["tokens", "sequences", "constant"] = "tokens"
    """What the summed loss is divided by: trained tokens, sequences (GRPO), or a constant (Dr. GRPO)."""
    cispo_cap: Annotated[Positive, UsedWhen("algorithm.loss", ("cispo",))] = 5.0
    """Absolute cap on the importance ratio."""
    entropy_mask_rho: Annotated[PositiveShare, _MASKED] = 0.2
    """Share of tokens, those of highest entropy in the batch, that are trained."""
    entropy_mask_denominator: Annotated[Literal["kept", "all"], _MASKED] = "kept"
    """Whether the loss is divided by the kept tokens or by all of them; the two differ by 1/rho."""


class Gtpo(Section):
    """Credit in proportion to a token's uncertainty. Two papers use this acronym: `gtpo` and `gtpo_paper`."""

    beta: Annotated[NotNegative, _WEIGHTED] = 0.1
    """Strength of the weighting; 0 is exactly none, above 1 weights may be cut off at 0."""
    alpha1: Annotated[Positive, _PAPER] = 1.0
    """Weight of the reward in `gtpo_paper`."""
    alpha2: Annotated[NotNegative, _PAPER] = 0.1
    """Weight of the entropy term in `gtpo_paper`."""


class Hicra(Section):
    """More credit for planning tokens."""

    alpha: Annotated[Decay, _HICRA] = 0.2
    """A planning token's advantage grows by alpha times its absolute value."""


class Sepa(Section):
    """Selective entropy pooling with annealing: the uncertainty of execution tokens moves to its mean as λ rises."""

    steps: Annotated[Natural, _SEPA] = 100
    """Steps in which λ rises from 0 to 1."""
    schedule: Annotated[Literal["linear", "auto"], _SEPA] = "linear"
    """`linear`, or `auto`: faster than linear when the variance of execution uncertainty falls."""
    delay_steps: Annotated[Natural, _SEPA] = 0
    """Steps with λ = 0 before the rise."""
    correct_rate_gate: Annotated[Share, _SEPA] = 0.1
    """λ stays 0 until a batch reaches this share of correct completions; the rise is counted from there. 0: no gate."""
    ema_decay: Annotated[Decay, _SEPA, _AUTO] = 0.99
    """Decay per step of the running variance."""
    warmup_steps: Annotated[Count, _SEPA, _AUTO] = 50
    """Steps after which the running variance becomes the reference."""
    threshold: Annotated[Positive, _SEPA, _AUTO] = 0.2
    """Share of the reference variance at which λ is 0 by variance alone; λ rises as the variance falls below it."""


class Planning(Section):
    """How planning tokens are found: for HICRA and SEPA, and in every run for the metrics."""

    detector: Annotated[
        Literal["regex"],
        Unavailable({"semantic": ("it needs sentence embeddings, which are not available", 'detector = "regex"')}),
    ] = "regex"
    """`regex`: the phrases of `[logging] strategic_grams`, matched in the decoded text."""


def sepa_rules(config: Config) -> Iterator[Finding]:
    """SEPA with λ = 0 throughout would be plain GTPO under another name."""
    if config.algorithm.transform_mode != "gtpo_sepa":
        return
    sepa, steps = config.sepa, config.training.max_steps
    length = "training.max_steps" if config.campaign.max_steps is None else "campaign.max_steps"
    if steps <= sepa.delay_steps:
        yield Finding(
            ("sepa.delay_steps", length, _MODE),
            f"is {sepa.delay_steps} and max_steps is {steps}: λ would be 0 for the whole run, which makes gtpo_sepa "
            "plain gtpo",
            f"delay_steps = {steps // 10}, or max_steps = {sepa.delay_steps + max(sepa.steps, 1)}",
        )
    elif sepa.steps == 0 and sepa.schedule == "linear":
        yield Finding(
            ("sepa.steps", "sepa.schedule", _MODE),
            "is 0: without a ramp λ would be 0 for the whole run, which makes gtpo_sepa plain gtpo",
            f"steps = {steps - sepa.delay_steps}",
        )
    elif steps < sepa.delay_steps + sepa.steps and sepa.schedule == "linear":
        yield Finding(
            ("sepa.steps", "sepa.delay_steps", length, _MODE),
            f"is {sepa.steps}: in {steps} steps λ gets to {(steps - 1 - sepa.delay_steps) / sepa.steps:.2f} at most",
            f"steps = {steps - sepa.delay_steps}",
            warning=True,
        )


RULES = (sepa_rules,)
