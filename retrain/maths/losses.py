"""Policy losses per token, and the denominators that turn them into one number.

Differences from the textbook: the ratio ρ is taken between trainer and sampler logprobs of the same
(temperature-applied) distribution; GSPO is its token form (arXiv 2507.18071 §4.3), which keeps token-level credit and
has the sequence form's gradient when a completion has one advantage; CISPO's cap is absolute (arXiv 2506.13585); DPPO's
divergence and ratio are from the sampler, also in several updates of a batch, as are VESPO's and M2PO's. On policy all
have the same gradient.

A step is loss = Σ token_weights · per-token loss over every micro-batch. The denominators are counted over the whole
optimizer step beforehand, so cutting it into micro-batches, or skipping a group whose advantages are 0, cannot change
the update. Only ``logprobs_BT`` (and the entropy of the bonus) carry a gradient. Padding may hold any value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrain.errors import PluginError
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import Floats_B1, Floats_BT, Mask_BT, Sum, of_shape

MAX_LOG_RATIO = 20.0
"""|log ρ| is clamped here before exp: e^20 is far outside every trust region and still finite in fp32."""

NORMALIZERS = ("tokens", "sequences", "constant")
MISMATCH_METRICS = ("kl_sample_train_v1", "kl_sample_train_v2", "kl_divergence_inference")
"""The catalogue keys that compare sampler and trainer on the same tokens, trained or not."""
RATIO_METRICS = (
    "val/ratio",
    "val/ratio_var",
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    *MISMATCH_METRICS,
)
"""The catalogue keys that ``loss_metrics`` fills."""

Sums = dict[str, Sum]
Loss = str | Callable[..., Any]  # A name among `POLICY_LOSSES`, or a function of the user's (see `plugin_loss`)


class NotFiniteError(ValueError):
    """A NaN or an infinity where the loss needs a number."""


def _require_finite(what: str, values_BT: Floats_BT, mask_BT: Mask_BT) -> None:
    bad_BT = ~torch.isfinite(values_BT.detach()) & mask_BT
    if bool(bad_BT.any()):
        row, column = torch.nonzero(bad_BT)[0].tolist()
        raise NotFiniteError(f"{what} is {values_BT[row, column].item()} at completion {row}, token {column}")


def log_ratio(logprobs_BT: Floats_BT, sampler_logprobs_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Clamped log ρ = log π_train − log π_sampler, 0 (and without gradient) in the padding, within ±20."""
    difference_BT = torch.where(mask_BT, logprobs_BT, 0.0) - torch.where(mask_BT, sampler_logprobs_BT, 0.0).detach()
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(log_ratio_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_B1:
    """Mean of log ρ over each completion's trained tokens, [B, 1]; 0 for an empty one."""
    return (log_ratio_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)


def sequence_weight(log_ratio_BT: Floats_BT, mask_BT: Mask_BT, power: float, decay: float) -> Floats_B1:
    """VESPO's φ = W^power·e^(decay·(1 − W)) of every sequence, [B, 1] (arXiv 2602.10693), W the product of the ratios
    over ``mask_BT``; computed in logarithms. What is not finite is 0."""
    total_B_1 = (log_ratio_BT.detach() * mask_BT).sum(1, keepdim=True).double()
    phi_B_1 = (power * total_B_1 + decay * (1.0 - total_B_1.exp())).exp()
    return torch.nan_to_num(phi_B_1, nan=0.0, posinf=0.0).to(log_ratio_BT.dtype)


DIVERGENCES = ("tv", "kl")


@dataclass(frozen=True)
class LossBounds:
    """How far a policy loss lets a token move; each loss reads its own.

    ``clip_low`` and ``clip_high`` (None: as low) are ε of ``ppo`` and ``gspo``, ``dual_clip`` their c for A < 0;
    ``ratio_cap`` is the cap of ``cispo``; ``divergence``, its limit and its cap are those of ``dppo``. ``gate`` are
    the temperatures of ``sapo`` for A > 0 and else; ``positive`` and ``negative`` power and decay of ``vespo`` for
    A ≥ 0 and A < 0. Raises ValueError for bounds that cannot be.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_cap: float = 5.0
    divergence: str = "tv"
    divergence_limit: float = 0.15
    divergence_cap: float = 20.0
    gate: tuple[float, float] = (1.0, 1.05)
    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __post_init__(self) -> None:
        dual = self.dual_clip
        clips = 0.0 <= self.clip_low <= 1.0 and self.high >= 0.0 and (dual is None or dual > 1.0)
        if not (clips and self.ratio_cap > 0.0):
            raise ValueError(
                "loss bounds must be 0 <= clip_low <= 1, clip_high >= 0, ratio_cap > 0 and dual_clip > 1: got "
                f"{self.clip_low}, {self.high}, {self.ratio_cap}, {dual}"
            )
        if self.divergence not in DIVERGENCES or self.divergence_limit <= 0.0 or self.divergence_cap <= 0.0:
            raise ValueError(
                f"divergence must be one of {', '.join(DIVERGENCES)}, its limit and cap > 0: got {self.divergence}, "
                f"{self.divergence_limit}, {self.divergence_cap}"
            )
        if not (min(self.gate) > 0.0 and min(*self.positive, *self.negative) >= 0.0):
            raise ValueError(
                f"the gate's temperatures must be above 0, power and decay 0 or more: got {self.gate}, "
                f"{self.positive}, {self.negative}"
            )

    @property
    def high(self) -> float:
        return self.clip_low if self.clip_high is None else self.clip_high


def _clipped_objective(ratio_BT: Floats_BT, advantages_BT: Floats_BT, bounds: LossBounds) -> Floats_BT:
    clipped_BT = ratio_BT.clamp(1.0 - bounds.clip_low, 1.0 + bounds.high)
    objective_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    if bounds.dual_clip is not None:
        floor_BT = bounds.dual_clip * advantages_BT
        objective_BT = torch.where(advantages_BT < 0.0, torch.maximum(objective_BT, floor_BT), objective_BT)
    return objective_BT


def _clip_marks(ratio_BT: Floats_BT, advantages_BT: Floats_BT, bounds: LossBounds) -> tuple[Mask_BT, Mask_BT]:
    """Where clipping bites: below 1 − ε_low with A < 0, above 1 + ε_high with A > 0."""
    low_BT = (ratio_BT < 1.0 - bounds.clip_low) & (advantages_BT < 0.0)
    high_BT = (ratio_BT > 1.0 + bounds.high) & (advantages_BT > 0.0)
    return low_BT, high_BT


LossParts = tuple[Floats_BT, Mask_BT, Mask_BT]
"""Per-token loss [B, T] before masking, and bool marks [B, T]: clipped low, clipped high."""


def reinforce(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−sg(ρ)·A·log π: importance-sampled policy gradient, never clipped."""
    nowhere_BT = torch.zeros_like(mask_BT)
    return -log_ratio_BT.detach().exp() * adv_BT * logp_BT, nowhere_BT, nowhere_BT


def ppo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A), for A < 0 at most −c·A with ``dual_clip`` = c."""
    ratio_BT = log_ratio_BT.exp()
    marks = _clip_marks(ratio_BT.detach(), adv_BT, bounds)
    return -_clipped_objective(ratio_BT, adv_BT, bounds), *marks


def gspo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """The PPO form with the sequence ratio exp(mean_t log ρ_t), its gradient taken through each token's own log π."""
    sequence_B_1 = sequence_log_ratio(log_ratio_BT.detach(), mask_BT)
    ratio_BT = (sequence_B_1 + log_ratio_BT - log_ratio_BT.detach()).exp()
    marks = _clip_marks(ratio_BT.detach(), adv_BT, bounds)
    return -_clipped_objective(ratio_BT, adv_BT, bounds), *marks


def cispo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−sg(min(ρ, cap))·A·log π: the weight is capped, no token loses its gradient."""
    ratio_BT = log_ratio_BT.detach().exp()
    capped_BT = ratio_BT > bounds.ratio_cap
    return -ratio_BT.clamp(max=bounds.ratio_cap) * adv_BT * logp_BT, torch.zeros_like(mask_BT), capped_BT


LEAST_PROBABILITY = 1e-8  # Added inside the logarithm of the probabilities of all other tokens together


def dppo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−sg(keep·min(ρ, cap))·A·log π (arXiv 2602.04879): a token whose probability has gone further from the sampler's
    than ``divergence_limit`` no longer trains in that direction.

    Divergence of π from μ, the sampler, over "this token or another": ``tv`` |π − μ|, ``kl`` KL(μ ‖ π).
    """
    now_BT, sampler_BT = logp_BT.detach().exp(), (logp_BT - log_ratio_BT).detach().exp()
    if bounds.divergence == "tv":
        divergence_BT = (now_BT - sampler_BT).abs()
    else:
        other_BT = ((1.0 - sampler_BT + LEAST_PROBABILITY) / (1.0 - now_BT + LEAST_PROBABILITY)).log()
        divergence_BT = -sampler_BT * log_ratio_BT.detach() + (1.0 - sampler_BT) * other_BT
    far_BT = divergence_BT > bounds.divergence_limit
    low_BT = far_BT & (adv_BT < 0.0) & (now_BT < sampler_BT)
    high_BT = far_BT & (adv_BT > 0.0) & (now_BT > sampler_BT)
    weight_BT = torch.where(low_BT | high_BT, 0.0, log_ratio_BT.detach().exp().clamp(max=bounds.divergence_cap))
    return -weight_BT * adv_BT * logp_BT, low_BT, high_BT


def sapo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−A·(4/τ)·σ(τ(ρ − 1)) (arXiv 2511.20347), τ by the sign of A: a soft gate in place of a clipped ratio, with the
    policy gradient where ρ = 1 and less on both sides of it."""
    nowhere_BT = torch.zeros_like(mask_BT)
    above, below = bounds.gate
    gate_BT = torch.where(adv_BT > 0.0, above, below)
    return -adv_BT * 4.0 / gate_BT * torch.sigmoid(gate_BT * (log_ratio_BT.exp() - 1.0)), nowhere_BT, nowhere_BT


def vespo(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−sg(φ(W))·A·log π (arXiv 2602.10693): W the product of the completion's ratios to the sampler, φ a soft bound by
    the sign of A (see ``sequence_weight``)."""
    nowhere_BT = torch.zeros_like(mask_BT)
    better_B_1 = sequence_weight(log_ratio_BT, mask_BT, *bounds.positive)
    worse_B_1 = sequence_weight(log_ratio_BT, mask_BT, *bounds.negative)
    return -torch.where(adv_BT >= 0.0, better_B_1, worse_B_1) * adv_BT * logp_BT, nowhere_BT, nowhere_BT


def m2po(
    logp_BT: Floats_BT, log_ratio_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT, bounds: LossBounds
) -> LossParts:
    """−ρA, never clipped (arXiv 2510.01161): which tokens are left out is decided for the whole step beforehand
    (``maths.corrections.kept_by_second_moment``)."""
    nowhere_BT = torch.zeros_like(mask_BT)
    return -log_ratio_BT.exp() * adv_BT, nowhere_BT, nowhere_BT


POLICY_LOSSES: dict[str, Callable[[Floats_BT, Floats_BT, Floats_BT, Mask_BT, LossBounds], LossParts]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "dppo": dppo,
    "sapo": sapo,
    "vespo": vespo,
    "m2po": m2po,
}


def plugin_loss(
    function: Callable[..., Any], logp_BT: Floats_BT, sampler_BT: Floats_BT, adv_BT: Floats_BT, mask_BT: Mask_BT
) -> LossParts:
    """A user's ``function(logprobs_BT, sampler_logprobs_BT, advantages_BT, mask_BT)``: the loss of every token.

    It gets 0 in the padding, and only the first argument carries a gradient. Raises PluginError naming the plug-in
    when the result has another shape, is not finite for a trained token, or does not depend on the policy.
    """
    plugin, result = f"loss plug-in {plugin_name(function)}", function(logp_BT, sampler_BT, adv_BT, mask_BT)
    loss_BT = of_shape(plugin, result, mask_BT, "tokens", "the loss of every token, not their sum")
    if not bool((torch.isfinite(loss_BT.detach()) | ~mask_BT).all()):
        raise PluginError(f"{plugin} returned NaN or infinity for a trained token")
    if logp_BT.requires_grad and not loss_BT.requires_grad:
        raise PluginError(f"{plugin} has no gradient: compute it from logprobs_BT without detaching it")
    nowhere_BT = torch.zeros_like(mask_BT)
    return loss_BT.to(logp_BT), nowhere_BT, nowhere_BT


def policy_loss(
    name: Loss,
    logprobs_BT: Floats_BT,
    sampler_logprobs_BT: Floats_BT,
    advantages_BT: Floats_BT,
    mask_BT: Mask_BT,
    bounds: LossBounds = LossBounds(),
    *,
    weights_BT: Floats_BT | None = None,
) -> tuple[Floats_BT, Sums]:
    """Per-token loss [B, T], 0 in the padding, and the step's statistics as sums (see ``ratio_sums``).

    ``name`` is one of ``POLICY_LOSSES`` or a plug-in (``plugin_loss``), to which no bounds apply. ``weights_BT`` are
    constants of the gradient (``maths.corrections``). Gradient flows through ``logprobs_BT`` alone. Raises ValueError
    for an unknown name, wrong shapes and non-finite values of trained tokens (one device synchronisation), PluginError
    for a plug-in's bad result.
    """
    if not callable(name) and name not in POLICY_LOSSES:
        raise ValueError(f"unknown loss {name!r}: one of {', '.join(POLICY_LOSSES)}")
    given = {"sampler logprob": sampler_logprobs_BT, "advantage": advantages_BT, "trainer logprob": logprobs_BT}
    for what, values_BT in given.items():
        if values_BT.shape != mask_BT.shape:
            raise ValueError(f"{what}s have shape {tuple(values_BT.shape)}, the mask {tuple(mask_BT.shape)}")
        _require_finite(what, values_BT, mask_BT)
    adv_BT = torch.where(mask_BT, advantages_BT.detach(), 0.0).to(logprobs_BT.dtype)
    ratio_BT = log_ratio(logprobs_BT, sampler_logprobs_BT, mask_BT)
    logp_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    if callable(name):
        sampler_BT = torch.where(mask_BT, sampler_logprobs_BT.detach(), 0.0).to(logp_BT.dtype)
        loss_BT, low_BT, high_BT = plugin_loss(name, logp_BT, sampler_BT, adv_BT, mask_BT)
    else:
        loss_BT, low_BT, high_BT = POLICY_LOSSES[name](logp_BT, ratio_BT, adv_BT, mask_BT, bounds)
    if weights_BT is not None:
        loss_BT = loss_BT * weights_BT.detach()
    loss_BT = torch.where(mask_BT, loss_BT, 0.0)
    return loss_BT, ratio_sums(ratio_BT, mask_BT, low_BT, high_BT)


@torch.no_grad()
def ratio_sums(log_ratio_BT: Floats_BT, mask_BT: Mask_BT, low_BT: Mask_BT, high_BT: Mask_BT) -> Sums:
    """What micro-batches must add up for the ratio and clipping metrics: 0-dim float64 tensors, no synchronisation.

    With d = log π_sampler − log π_train = −log ρ: ``k1`` Σd, ``k2`` Σ½d², ``k3`` Σ(e^−d − 1 + d); ``moved`` is again
    Σ½d². ``clip_low_min`` and ``clip_high_max`` are extremes over completions (combined by min and max, see
    ``add_sums``).
    """
    mask_BT = mask_BT.to(torch.bool)
    weight_BT = mask_BT.to(torch.float64)
    d_BT = -log_ratio_BT.detach().to(torch.float64) * weight_BT
    ratio_BT = (-d_BT).exp() * weight_BT
    low_B, high_B = (low_BT & mask_BT).sum(1).double(), (high_BT & mask_BT).sum(1).double()
    length_B = weight_BT.sum(1)
    share_low_B = torch.where(length_B > 0, low_B / length_B.clamp(min=1.0), torch.inf)
    share_high_B = torch.where(length_B > 0, high_B / length_B.clamp(min=1.0), -torch.inf)
    empty = mask_BT.shape[0] == 0
    return {
        "tokens": length_B.sum(),
        "ratio": ratio_BT.sum(),
        "ratio_sq": ratio_BT.square().sum(),
        "k1": d_BT.sum(),
        "k2": 0.5 * d_BT.square().sum(),
        "k3": (torch.expm1(-d_BT) + d_BT).sum(),
        "moved": 0.5 * d_BT.square().sum(),
        "clip_low": low_B.sum(),
        "clip_high": high_B.sum(),
        "clip_low_min": d_BT.new_tensor(torch.inf) if empty else share_low_B.min(),
        "clip_high_max": d_BT.new_tensor(-torch.inf) if empty else share_high_B.max(),
    }


@torch.no_grad()
def mismatch_sums(
    logprobs_BT: Floats_BT, old_logprobs_BT: Floats_BT, sampler_logprobs_BT: Floats_BT, mask_BT: Mask_BT
) -> Sums:
    """Those of ``ratio_sums`` that compare with the sampler, where the ratio is another one: ``k1`` and ``k2`` of the
    trainer before the first of several updates, ``k3`` of the policy now."""
    weight_BT = mask_BT.to(torch.float64)
    before_BT = -log_ratio(old_logprobs_BT, sampler_logprobs_BT, mask_BT).to(torch.float64) * weight_BT
    now_BT = -log_ratio(logprobs_BT, sampler_logprobs_BT, mask_BT).to(torch.float64) * weight_BT
    return {"k1": before_BT.sum(), "k2": 0.5 * before_BT.square().sum(), "k3": (torch.expm1(-now_BT) + now_BT).sum()}


def add_sums(total: Sums | None, part: Sums) -> Sums:
    """Statistics of two micro-batches together: sums add, ``*_min`` and ``*_max`` take the extreme."""
    if total is None:
        return dict(part)
    joined = {}
    for key, value in part.items():
        join = torch.minimum if key.endswith("_min") else torch.maximum if key.endswith("_max") else torch.add
        joined[key] = join(total[key], value)
    return joined


def loss_metrics(sums: Sums) -> dict[str, float | None]:
    """The catalogue's ratio, clipping and KL keys from the added-up sums; all None without a trained token."""
    number = {key: float(value) for key, value in sums.items()}
    tokens = number["tokens"]
    if tokens == 0:
        return dict.fromkeys(RATIO_METRICS)
    ratio = number["ratio"] / tokens
    clipped = (number["clip_low"] + number["clip_high"]) / tokens
    return {
        "val/ratio": ratio,
        "val/ratio_var": max(number["ratio_sq"] / tokens - ratio * ratio, 0.0),
        "policy/approxkl_avg": number["moved"] / tokens,
        "policy/clipfrac_avg": clipped,
        "clip_ratio/low_mean": number["clip_low"] / tokens,
        "clip_ratio/low_min": number["clip_low_min"],
        "clip_ratio/high_mean": number["clip_high"] / tokens,
        "clip_ratio/high_max": number["clip_high_max"],
        "clip_ratio/region_mean": clipped,
        "kl_sample_train_v1": number["k1"] / tokens,
        "kl_sample_train_v2": number["k2"] / tokens,
        "kl_divergence_inference": number["k3"] / tokens,
    }


def kl_terms(kind: str, logprobs_BT: Floats_BT, reference_logprobs_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Per-token estimate of KL(π ‖ reference) on sampled tokens, [B, T], 0 in the padding.

    With l = log π − log ref: ``k1`` = l (for the reward; detach it), ``k2`` = ½l² (for the loss: its gradient is the
    reverse KL's on policy), ``k3`` = e^−l − 1 + l (for logging only). Only ``logprobs_BT`` carries a gradient.
    """
    l_BT = torch.where(mask_BT, logprobs_BT, 0.0) - torch.where(mask_BT, reference_logprobs_BT, 0.0).detach()
    if kind == "k1":
        return l_BT
    if kind == "k2":
        return 0.5 * l_BT.square()
    if kind == "k3":
        return torch.expm1(-l_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + l_BT
    raise ValueError(f"unknown KL estimator {kind!r}: one of k1, k2, k3")


def entropy_loss(entropy_BT: Floats_BT, mask_BT: Mask_BT, entropy_coef: float) -> Floats_BT:
    """−entropy_coef·H per token, [B, T]: a bonus on full-vocabulary entropy, which carries the gradient."""
    return torch.where(mask_BT, -entropy_coef * entropy_BT, 0.0)


@torch.no_grad()
def token_weights(
    normalizer: str,
    mask_BT: Mask_BT,
    *,
    total_tokens: int,
    total_sequences: int,
    max_tokens: int,
    denominator_mask_BT: Mask_BT | None = None,
) -> Floats_BT:
    """Weights with loss = Σ weights·per-token loss, float32 [B, T], 0 outside ``mask_BT``.

    ``tokens`` 1/total_tokens; ``sequences`` 1/(total_sequences·T_i), the mean of per-sequence means (GRPO);
    ``constant`` 1/(total_sequences·max_tokens) (Dr. GRPO). The totals count the whole optimizer step, skipped groups
    included; tokens are counted (also T_i) by ``denominator_mask_BT``, by default ``mask_BT``. Totals of 0 give 0.
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
