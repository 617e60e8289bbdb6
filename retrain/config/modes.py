"""Describe every mode of [algorithm] in one row: name, formula, paper, requirements.

The choices of TOML keys, active keys, labels of conditions, ``explain``, plans, records and documentation derive from
these rows. A new mode is a row here, and an entry under the same name in a table of ``retrain.algorithms`` or
``retrain.algorithms.losses``. The ``parameters`` of a row are keys of [algorithm].
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator

from retrain.config.base import OptionalPositive, Positive, fault


class Need(StrEnum):
    """Input that an algorithm requires."""

    ENTROPY = "entropy"
    """Full-vocabulary entropies of the distributions sampled from, computed by the engine."""
    PLANNING = "planning"
    """Mask of planning tokens."""
    LOGPROBS = "logprobs"
    """Log-probabilities of the rollouts by the trainer, before the update."""
    VALUES = "values"
    """Values of a critic at each token."""
    REFERENCE = "reference"
    """Log-probabilities of the frozen base."""
    TEACHER = "teacher"
    """Log-probabilities of the sampled tokens by a teacher."""
    GROUP = "group"
    """Several rollouts of a prompt that are compared with each other."""


@dataclass(frozen=True)
class Parameter:
    """A key of [algorithm] that one mode declares: type with bounds, default and documentation."""

    annotation: object
    default: object
    description: str


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode. ``formula`` may contain configuration values in braces, as in ``{gtpo.beta:g}``. ``parameters`` are the
    keys of [algorithm] that only this mode uses, ``keys`` the other keys or sections that it uses."""

    formula: str
    paper: str = ""
    description: str = ""
    needs: frozenset[Need] = frozenset()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def uses(self, dotted: str) -> bool:
        section, _, name = dotted.partition(".")
        return dotted in self.keys or section in self.keys or (section == "algorithm" and name in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Advantage(Mode):
    """Computes one number per rollout from the rewards of its group.

    ``scale`` is the root mean square advantage of 0/1 rewards at success rate p in large groups, None if unknown.
    ``unit_rewards``: defined for rewards in [0, 1] only. Groups with fewer than ``smallest_group`` rewards are skipped.
    ``whitened`` advantages are normalised over the batch afterwards. ``by_token``: one number per token, from the
    rollout's own rewards and a critic; no group is compared.
    """

    needs: frozenset[Need] = frozenset({Need.GROUP})
    scale: Callable[[float], float] | None = None
    unit_rewards: bool = False
    smallest_group: int = 1
    whitened: bool = False
    by_token: bool = False


@dataclass(frozen=True, kw_only=True)
class Credit(Mode):
    """Distributes a rollout's advantage over its tokens. ``own_advantage``: computes its own advantage from the
    rewards, so that only the result shows whether a group has signal. ``features`` are the groups of metrics that it
    fills (``Metric.requires``)."""

    own_advantage: bool = False
    features: frozenset[str] = frozenset()

    @property
    def pooled(self) -> bool:
        """True if SEPA's schedule controls the pooling of uncertainties."""
        return "pooling" in self.features


@dataclass(frozen=True, kw_only=True)
class Loss(Mode):
    """Loss of a token. ``from_sampler``: its ratio is π/π_sampler in every update of a batch, and the loss itself
    bounds it. With other losses, a correction keeps the ratio at 1 in the first update of a batch, so that their
    parameters have no effect there."""

    from_sampler: bool = False


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(formula="(r − mean) / std of its group", paper="2402.03300", scale=lambda p: 1.0),
    "dr_grpo": Advantage(formula="r − mean of its group", paper="2503.20783", scale=lambda p: math.sqrt(p * (1.0 - p))),
    "rloo": Advantage(
        formula="r − mean of the others in its group",
        paper="2402.14740",
        scale=lambda p: math.sqrt(p * (1.0 - p)),
        smallest_group=2,
    ),
    "maxrl": Advantage(
        formula="(r − mean) / mean of its group",
        paper="2602.02710",
        scale=lambda p: math.sqrt((1.0 - p) / p),
        unit_rewards=True,
    ),
    "reinforce_pp": Advantage(
        formula="r − mean of its group, whitened over the batch", paper="2501.03262", scale=lambda p: 1.0, whitened=True
    ),
    "gae": Advantage(
        formula="Σ_k (γλ)^k·δ_(t+k) with δ_t = r_t + γV_(t+1) − V_t of a critic, then whitened over the batch",
        paper="1506.02438",
        description="one number per token (PPO)",
        needs=frozenset({Need.VALUES}),
        keys=("critic", "algorithm.kl_in_reward"),
        by_token=True,
    ),
}

_WEIGHTED = "A·max(0, 1 + {gtpo.beta:g}·(h/mean h − 1))"
_UNCERTAINTY = "algorithm.uncertainty_kind"
_WEIGHTS = (_UNCERTAINTY, "gtpo.beta")
TOKEN_CREDIT: dict[str, Credit] = {
    "none": Credit(formula="A", description="every token alike"),
    "gtpo": Credit(
        formula=_WEIGHTED, description="uncertain tokens more", keys=_WEIGHTS, features=frozenset({"weights"})
    ),
    "gtpo_hicra": Credit(
        formula="x + {hicra.alpha:g}·|x| on planning tokens ({detector}), x elsewhere; x = " + _WEIGHTED,
        paper="2509.03646",
        description="uncertain tokens more, planning tokens amplified",
        needs=frozenset({Need.PLANNING}),
        keys=(*_WEIGHTS, "hicra"),
        features=frozenset({"weights"}),
    ),
    "gtpo_hicra_placebo": Credit(
        formula="x + {hicra.alpha:g}·|x| on as many random tokens, x elsewhere; x = " + _WEIGHTED,
        description="uncertain tokens more, random tokens amplified at the rate of planning tokens",
        needs=frozenset({Need.PLANNING}),
        keys=(*_WEIGHTS, "hicra"),
        features=frozenset({"weights"}),
    ),
    "gtpo_sepa": Credit(
        formula=_WEIGHTED
        + " with execution pooled: h → λ·mean + (1 − λ)·h but on planning tokens ({detector}); {ramp}",
        description="uncertain tokens more, execution tokens pooled step by step",
        needs=frozenset({Need.PLANNING}),
        keys=(*_WEIGHTS, "sepa"),
        features=frozenset({"weights", "pooling"}),
    ),
    "gtpo_paper": Credit(
        formula="{gtpo.alpha1:g}·r + {gtpo.alpha2:g}·d·h/Σh where correct, "
        "−{gtpo.alpha1:g} − {gtpo.alpha2:g}·d·(1/h)/Σ(1/h) where wrong, then {normalised} over the group's tokens",
        paper="2508.04349",
        description="uncertain tokens more, added to the reward (Group Token Policy Optimization)",
        keys=(_UNCERTAINTY, "gtpo.alpha1", "gtpo.alpha2", "gtpo.centred"),
        own_advantage=True,
    ),
    "entropy_mask": Credit(
        formula="A on {algorithm.entropy_mask_rho:.3g} of the batch's tokens, those of highest entropy, 0 elsewhere; "
        "{counted} count in the divisor",
        paper="2506.01939",
        description="only the most uncertain tokens",
        needs=frozenset({Need.ENTROPY}),
        keys=("algorithm.entropy_mask_rho", "algorithm.entropy_mask_denominator"),
    ),
}

UNCERTAINTIES: dict[str, Mode] = {
    "surprisal": Mode(formula="h = −log p of the sampled token"),
    "predictive_variance": Mode(formula="h = p(1 − p) of the sampled token"),
    "shannon_entropy": Mode(formula="h = entropy of the whole distribution", needs=frozenset({Need.ENTROPY})),
}


def _curve(value: list[float]) -> list[float]:
    if len(value) != 2 or min(value) < 0.0:
        raise fault(f"is {value}, but must be [power, decay], both 0 or more", "[2.0, 3.0]")
    return value


_Curve = Annotated[list[float], AfterValidator(_curve)]
_CLIPPING = ("training.clip_eps", "training.clip_eps_high", "algorithm.dual_clip")
LOSSES: dict[str, Loss] = {
    "ppo": Loss(
        formula="−min(ρA, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A)",
        paper="1707.06347",
        description="ratio clipped",
        keys=_CLIPPING,
    ),
    "reinforce": Loss(formula="−sg(ρ)·A·log π", description="ratio as a constant weight"),
    "gspo": Loss(
        formula="as ppo, with exp(mean log ρ) of the completion",
        paper="2507.18071",
        description="ratio of the whole completion clipped",
        keys=_CLIPPING,
    ),
    "cispo": Loss(
        formula="−sg(min(ρ, cispo_cap))·A·log π",
        paper="2506.13585",
        description="ratio as a constant weight, capped",
        parameters={"cispo_cap": Parameter(Positive, 5.0, "Absolute cap on the importance ratio.")},
    ),
    "dppo": Loss(
        formula="−sg(keep·min(ρ, dppo_cap))·A·log π with ρ = π/π_sampler; keep = 0 where A leads further than "
        "dppo_threshold away from π_sampler",
        paper="2602.04879",
        description="masked by divergence from the sampler",
        parameters={
            "dppo_divergence": Parameter(
                Literal["tv", "kl"],
                "tv",
                "How far a token's probability is from the sampler's: `tv` is |π − π_sampler|, `kl` the divergence of "
                '"this token\nor another".',
            ),
            "dppo_threshold": Parameter(
                OptionalPositive,
                None,
                "Beyond this divergence a token no longer trains in the direction that leads further away; unset or 0 "
                "is 0.15 for\n`tv` and 0.05 for `kl`.",
            ),
            "dppo_cap": Parameter(Positive, 20.0, "Absolute cap on the importance ratio."),
        },
        from_sampler=True,
    ),
    "sapo": Loss(
        formula="−A·(4/τ)·σ(τ(ρ − 1)) with τ = {algorithm.sapo_tau_positive:g} where A > 0, else "
        "{algorithm.sapo_tau_negative:g}",
        paper="2511.20347",
        description="ratio bounded by a soft gate",
        parameters={
            "sapo_tau_positive": Parameter(
                Positive, 1.0, "How narrow the soft gate of `sapo` is for tokens of positive advantage."
            ),
            "sapo_tau_negative": Parameter(Positive, 1.05, "The same for the others."),
        },
    ),
    "vespo": Loss(
        formula="−sg(W^k·e^(λ(1 − W)))·A·log π with W = Π ρ of the completion, ρ = π/π_sampler, and [k, λ] = "
        "vespo_positive where A ≥ 0, else vespo_negative",
        paper="2602.10693",
        description="softly bounded by the ratio of the whole completion to the sampler's",
        parameters={
            "vespo_positive": Parameter(
                _Curve,
                [2.0, 3.0],
                "`[power, decay]` of the weight W^power·e^(decay·(1 − W)) for tokens of positive advantage.",
            ),
            "vespo_negative": Parameter(_Curve, [3.0, 2.0], "The same for tokens of negative advantage."),
        },
        from_sampler=True,
    ),
    "m2po": Loss(
        formula="−ρA with ρ = π/π_sampler; of {algorithm.m2po_tokens} tokens of the step those with the largest "
        "(log ρ)² are left out until its mean is below {algorithm.m2po_threshold:g}",
        paper="2510.01161",
        description="the tokens furthest from the sampler left out",
        needs=frozenset({Need.LOGPROBS}),
        parameters={
            "m2po_threshold": Parameter(
                Positive,
                0.04,
                "The mean of (log π/π_sampler)² that `m2po` allows over an update's tokens with an advantage; the "
                "largest are left\nout.",
            ),
            "m2po_tokens": Parameter(
                Literal["all", "harmful"],
                "all",
                "Over which tokens `m2po` takes the mean, and of which it leaves some out: all, or those whose "
                "probability has\nalready gone where their advantage leads.",
            ),
        },
        from_sampler=True,
    ),
}

MODES: dict[str, Mapping[str, Mode]] = {
    "advantage_mode": ADVANTAGES,
    "transform_mode": TOKEN_CREDIT,
    "uncertainty_kind": UNCERTAINTIES,
    "loss": LOSSES,
}

Named = str | Callable[..., object]
"""A mode as a configuration names it, or the user's own code, loaded."""


def mode_of(key: str, mode: Named) -> Mode:
    """Return the row of a mode of ``[algorithm] key``; a plug-in has a row without requirements."""
    return MODES[key].get(mode if isinstance(mode, str) else "", Mode(formula="your own"))


def advantage_of(mode: Named) -> Advantage:
    return ADVANTAGES.get(mode if isinstance(mode, str) else "", Advantage(formula="your own", needs=frozenset()))


def credit_of(mode: Named) -> Credit:
    """Return the row of a token credit. A plug-in counts as one that computes its own advantage."""
    return TOKEN_CREDIT.get(mode if isinstance(mode, str) else "", Credit(formula="your own", own_advantage=True))


def loss_of(mode: Named) -> Loss:
    return LOSSES.get(mode if isinstance(mode, str) else "", Loss(formula="your own"))


def used_by(key: str, dotted: str) -> tuple[str, ...]:
    """Return the modes of ``[algorithm] key`` with which the key ``dotted`` has an effect."""
    return tuple(name for name, mode in MODES[key].items() if mode.uses(dotted))


LABEL_MAX = 120
"""Longest label in bytes: run directories are named label_s<seed>, and file systems allow 255 bytes."""
SHORT = ("training", "algorithm", "model")
"""Sections whose keys appear in a label without their section."""


def _safe(value: object) -> str:
    """Return the value in a form that may be part of a file name."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list | tuple):
        text = "-".join(_safe(item) for item in value)
    else:
        text = str(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text) or "-"


def condition_label(advantage_mode: str, transform_mode: str, overrides: Mapping[str, object]) -> str:
    """Return the condition's name in files, tables and trackers; cut to ``LABEL_MAX`` with a hash at the end."""
    parts = []
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        parts.append(f"{key if section in SHORT else dotted}={_safe(value)}")
    text = "~".join([f"{_safe(advantage_mode)}+{_safe(transform_mode)}", *sorted(parts)])
    if len(text) > LABEL_MAX:
        digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[: LABEL_MAX - len(digest) - 1]}-{digest}"
    return text
