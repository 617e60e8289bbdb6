"""Token credit: spreading one advantage over the tokens of a completion.

One pipeline, ``token_advantages``: uncertainty → SEPA pooling → GTPO weight → HICRA → mask. Two papers use the name
GTPO. ``gtpo`` here is the weighting form w_t = max(0, 1 + β(h_t/h̄ − 1)) whose mean weight is 1 for β ≤ 1;
``gtpo_paper`` is Group Token Policy Optimization (arXiv 2508.04349), additive and normalised over the group.

Everything is vectorised over the padded batch [B, T]; column t is position t of the completion, padding lies where
``mask_BT`` is False and may hold any value, NaN included. Nothing here carries a gradient: inputs are detached and
weights are constants of the loss. Float dtype of the inputs is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from retrain.errors import PluginError
from retrain.maths.advantages import EQUAL_REWARDS
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import Floats_B, Floats_BT, Mask_BT, Values_B, of_shape

MAX_UNCERTAINTY = 50.0
MIN_MEAN_UNCERTAINTY = 1e-7
MIN_PAPER_UNCERTAINTY = 1e-6
Uncertainty = str | Callable[..., Any]
Transform = str | Callable[..., Any]


@dataclass(frozen=True)
class TokenCredit:
    """Token advantages and what they were made from.

    ``advantages_BT`` is 0 outside ``loss_mask_BT``, which says which tokens train (an advantage of 0 does not).
    ``denominator_mask_BT`` says which tokens the loss normaliser counts: the same, except for ``entropy_mask`` with
    denominator ``all``. ``weights_BT`` are the GTPO weights, None for modes without. ``stats`` holds the catalogue
    keys {exec,plan}_{surprisal,entropy}_{mean,var} before pooling and planning_fraction, None where undefined.
    ``exec_variance`` is the variance of the raw execution uncertainty that the SEPA ``auto`` schedule watches.
    """

    advantages_BT: Floats_BT
    loss_mask_BT: Mask_BT
    denominator_mask_BT: Mask_BT
    stats: dict[str, float | None] = field(default_factory=dict)
    weights_BT: Floats_BT | None = None
    exec_variance: float | None = None


def _require(what: str, tensor: Tensor | None, like: Tensor, needed_by: str) -> Tensor:
    """``tensor``, which must be given and of the shape of ``like``; ValueError otherwise."""
    if tensor is None:
        raise ValueError(f"{needed_by} needs {what}, which was not given")
    if tensor.shape != like.shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, expected {tuple(like.shape)}")
    return tensor


def _clean(what: str, values_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Detached values with 0 in the padding; ValueError when a trained token holds NaN."""
    values_BT = torch.where(mask_BT, values_BT.detach(), 0.0)
    if bool(torch.isnan(values_BT.sum())) and bool(torch.isnan(values_BT).any()):
        row, column = torch.nonzero(torch.isnan(values_BT))[0].tolist()
        raise ValueError(f"{what} is NaN at completion {row}, token {column}")
    return values_BT


def _per_token(kind: str, function: Callable[..., Any], result: Any, mask_BT: Mask_BT, wanted: str) -> Tensor:
    """What a plug-in returned for every token, 0 in the padding; PluginError for another shape, NaN or infinity."""
    plugin = f"{kind} plug-in {plugin_name(function)}"
    values_BT = of_shape(plugin, result, mask_BT, "tokens", f"one {wanted} per token").detach()
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if not bool(torch.isfinite(values_BT).all()):
        raise PluginError(f"{plugin} returned NaN or infinity for a trained token")
    return values_BT


def _surprisal(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    return -_clean("logprob", logprobs_BT, mask_BT)


def _predictive_variance(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    p_BT = _clean("logprob", logprobs_BT, mask_BT).clamp(max=0.0).exp()
    return p_BT * (1.0 - p_BT)


def _shannon_entropy(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    return _clean("entropy", _require("entropy_BT", entropy_BT, logprobs_BT, "shannon_entropy"), mask_BT)


UNCERTAINTIES: dict[str, Callable[[Floats_BT, Floats_BT | None, Mask_BT], Floats_BT]] = {
    "surprisal": _surprisal,
    "predictive_variance": _predictive_variance,
    "shannon_entropy": _shannon_entropy,
}


@torch.no_grad()
def uncertainty(kind: Uncertainty, logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    """Uncertainty h ≥ 0 of every trained token, [B, T] in nats (``predictive_variance``: no unit), 0 in the padding.

    ``surprisal`` −log p; ``predictive_variance`` p(1 − p); ``shannon_entropy`` the given full-vocabulary entropy of
    the sampled distribution; or a function(logprobs_BT, entropy_BT, mask_BT). Clamped to [0, 50]. Raises
    ValueError for NaN, an unknown kind or a missing entropy; PluginError for a plug-in's bad result.
    """
    if _require("mask_BT", mask_BT, logprobs_BT, "uncertainty").dtype != torch.bool:
        raise ValueError(f"mask_BT must be bool: got {mask_BT.dtype}")
    if callable(kind):
        result = torch.as_tensor(kind(logprobs_BT.detach(), entropy_BT, mask_BT)).to(logprobs_BT)
        h_BT = _per_token("uncertainty", kind, result, mask_BT, "number")
    elif kind in UNCERTAINTIES:
        h_BT = UNCERTAINTIES[kind](logprobs_BT, entropy_BT, mask_BT)
    else:
        raise ValueError(f"unknown uncertainty kind {kind!r}: one of {', '.join(UNCERTAINTIES)}, or a function")
    return h_BT.clamp(0.0, MAX_UNCERTAINTY)


@torch.no_grad()
def sepa_pool(h_BT: Floats_BT, planning_BT: Mask_BT, mask_BT: Mask_BT, lam: float) -> Floats_BT:
    """Selective entropy pooling: execution tokens move to their completion's mean, λ·mean(h_exec) + (1−λ)·h.

    Planning tokens stay. λ is clamped to [0, 1]; λ = 0 and completions without execution tokens are exact no-ops.
    Keeps Σh of every completion, hence h̄ and every planning weight. Raises ValueError for a NaN λ.
    """
    if math.isnan(lam):
        raise ValueError("SEPA λ is NaN")
    lam = min(max(lam, 0.0), 1.0)
    if lam == 0.0:
        return h_BT
    execution_BT = mask_BT & ~planning_BT
    count_B_1 = execution_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = torch.where(execution_BT, h_BT, 0.0).sum(1, keepdim=True) / count_B_1
    return torch.where(execution_BT, torch.lerp(h_BT, mean_B_1.expand_as(h_BT), lam), h_BT)


@torch.no_grad()
def gtpo_weights(h_BT: Floats_BT, mask_BT: Mask_BT, beta: float) -> Floats_BT:
    """w_t = max(0, 1 + β(h_t/h̄ − 1)), h̄ the mean over the completion's trained tokens; 0 in the padding.

    Completions with h̄ < 1e-7 get 1; β = 0 is an exact no-op; the mean weight is 1 for β ≤ 1. Raises ValueError for
    a negative or non-finite β.
    """
    if not (math.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"gtpo beta must be a finite number >= 0: got {beta}")
    count_B_1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B_1 = torch.where(mask_BT, h_BT, 0.0).sum(1, keepdim=True) / count_B_1
    flat_B_1 = mean_B_1 < MIN_MEAN_UNCERTAINTY
    scale_B_1 = torch.where(flat_B_1, 0.0, beta / torch.where(flat_B_1, 1.0, mean_B_1))
    base_B_1 = torch.where(flat_B_1, 1.0, torch.full_like(mean_B_1, 1.0 - beta))
    weights_BT = torch.addcmul(base_B_1, h_BT, scale_B_1).clamp_(min=0.0)
    return torch.where(mask_BT, weights_BT, 0.0)


@torch.no_grad()
def hicra(advantages_BT: Floats_BT, planning_BT: Mask_BT, alpha: float) -> Floats_BT:
    """A_t + α|A_t| on planning tokens (arXiv 2509.03646): raises positive advantages, dampens negative ones.

    Raises ValueError unless 0 ≤ α < 1.
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"hicra alpha must be in [0, 1): got {alpha}")
    return torch.where(planning_BT, advantages_BT + alpha * advantages_BT.abs(), advantages_BT)


@torch.no_grad()
def placebo_mask(uniforms_BT: Floats_BT, planning_BT: Mask_BT, mask_BT: Mask_BT) -> Mask_BT:
    """As many random trained tokens per completion as it has planning tokens: the control of HICRA, bool [B, T].

    ``uniforms_BT`` comes from the run's own stream; the smallest are chosen, ties by position.
    """
    counts_B_1 = (planning_BT & mask_BT).sum(1, keepdim=True)
    shuffled_BT = torch.where(mask_BT, uniforms_BT.detach().to(torch.float64), math.inf)
    order_BT = torch.argsort(shuffled_BT, dim=1, stable=True)
    columns_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device).expand_as(order_BT)
    rank_BT = torch.empty_like(order_BT).scatter_(1, order_BT, columns_BT)
    return (rank_BT < counts_B_1) & mask_BT


@torch.no_grad()
def entropy_mask(entropy_BT: Floats_BT, mask_BT: Mask_BT, rho: float) -> Mask_BT:
    """The ⌈ρn⌉ trained tokens of highest entropy in the whole batch (arXiv 2506.01939), bool [B, T].

    Ties at the threshold go to the earlier token, so exactly ⌈ρn⌉ stay; ρ = 1 is an exact no-op. ρ is read as the
    decimal it was written as (0.1 of 30 tokens is 3, not 4). Raises ValueError unless 0 < ρ ≤ 1, and for NaN.
    """
    if not 0.0 < rho <= 1.0:
        raise ValueError(f"entropy_mask rho must be in (0, 1]: got {rho}")
    total = int(mask_BT.sum())
    keep = math.ceil(Fraction(repr(float(rho))) * total)
    if keep == total:
        return mask_BT.clone()
    values = torch.where(mask_BT, _clean("entropy", entropy_BT, mask_BT), -math.inf).flatten()
    threshold = values.topk(keep, sorted=True).values[-1]
    above = values > threshold
    ties = (values == threshold) & mask_BT.flatten()
    chosen = above | (ties & (ties.cumsum(0) <= keep - above.sum()))
    return chosen.view_as(mask_BT)


@torch.no_grad()
def gtpo_paper(
    h_BT: Floats_BT,
    rewards_B: Values_B,
    correct_B: Values_B,
    group_B: Values_B,
    mask_BT: Mask_BT,
    alpha1: float = 1.0,
    alpha2: float = 0.1,
    centred: bool = True,
) -> Floats_BT:
    """Token advantages of Group Token Policy Optimization (arXiv 2508.04349), [B, T], 0 in the padding.

    Per group and position t, over the completions that still run at t: a correct one gets
    α₁r + α₂·d_t·h/Σh (d_t: how many correct ones still run), a wrong one −α₁ − α₂·c_t·(1/h)/Σ(1/h). The shaped
    rewards of all tokens of the group, correct and wrong together, are then centred and divided by their standard
    deviation. Where correct tokens are few, that mean is far below 0 and wrong tokens end above it: without ``centred``
    the shaped rewards are divided by their root mean square alone, so that each keeps its sign. Groups that are all
    correct or all wrong give 0. ``group_B`` numbers the group of each row.
    """
    rows, columns = mask_BT.shape
    for what, given in (("rewards_B", rewards_B), ("correct_B", correct_B), ("group_B", group_B)):
        if given.shape != (rows,):
            raise ValueError(f"{what} has shape {tuple(given.shape)}, expected ({rows},)")
    if not bool(torch.isfinite(rewards_B).all()):
        raise ValueError("gtpo_paper rewards must be finite")
    if mask_BT.numel() == 0:
        return torch.zeros_like(h_BT)
    _, group_B = torch.unique(group_B, return_inverse=True)
    groups = int(group_B.max()) + 1
    correct_B = correct_B.to(torch.bool)
    h_BT = _clean("uncertainty", h_BT, mask_BT).to(torch.float64).clamp(min=MIN_PAPER_UNCERTAINTY)
    share_BT = torch.where(correct_B[:, None], h_BT, 1.0 / h_BT)
    share_BT = torch.where(mask_BT, share_BT, 0.0)
    side_B = group_B * 2 + correct_B.long()  # one row of the tables below for each (group, correct or wrong)
    sums = share_BT.new_zeros(2 * groups, columns).index_add_(0, side_B, share_BT)[side_B]
    active = share_BT.new_zeros(2 * groups, columns).index_add_(0, side_B, mask_BT.to(share_BT))[side_B]
    bonus_BT = alpha2 * active * share_BT / torch.where(sums > 0.0, sums, 1.0)
    base_B = torch.where(correct_B, alpha1 * rewards_B.detach().to(torch.float64), -alpha1)[:, None]
    shaped_BT = base_B + torch.where(correct_B[:, None], bonus_BT, -bonus_BT)

    def per_group(values_B: Floats_B) -> Floats_B:
        return values_B.new_zeros(groups).index_add_(0, group_B, values_B)[group_B]

    weight_BT = mask_BT.to(torch.float64)
    tokens_B = per_group(weight_BT.sum(1)).clamp(min=1.0)
    mean_B = per_group((shaped_BT * weight_BT).sum(1)) / tokens_B * centred
    centred_BT = (shaped_BT - mean_B[:, None]) * weight_BT
    deviation_B = (per_group(centred_BT.square().sum(1)) / tokens_B).sqrt()
    right_B = per_group(correct_B.to(torch.float64))
    size_B = per_group(torch.ones_like(right_B))
    trains_B = (right_B > 0) & (right_B < size_B) & (deviation_B >= EQUAL_REWARDS)
    return torch.where(trains_B[:, None], centred_BT / deviation_B.clamp(min=EQUAL_REWARDS)[:, None], 0.0)


def _moments(values_BT: Floats_BT, where_BT: Mask_BT) -> tuple[float | None, float | None]:
    """Mean and population variance over the marked tokens; None, None when there are none."""
    weight_BT = where_BT.to(values_BT)
    count = float(weight_BT.sum(dtype=torch.float64))
    if count == 0.0:
        return None, None
    mean = float((values_BT * weight_BT).sum(dtype=torch.float64)) / count
    return mean, float(((values_BT - mean).square_().mul_(weight_BT)).sum(dtype=torch.float64)) / count


@torch.no_grad()
def uncertainty_stats(
    kind: Uncertainty, h_BT: Floats_BT, logprobs_BT: Floats_BT, planning_BT: Mask_BT | None, mask_BT: Mask_BT
) -> tuple[dict[str, float | None], float | None]:
    """The catalogue's plan/exec keys over all trained tokens, and the execution variance of ``h_BT`` itself.

    ``*_surprisal_*`` is of −log p whatever ``kind`` is; ``*_entropy_*`` is of the full-vocabulary entropy when that is
    the kind and repeats the surprisal otherwise. All None without a planning mask.
    """
    sides = ("exec", "plan")
    kinds = ("surprisal", "entropy")
    keys = [f"{side}_{what}_{moment}" for side in sides for what in kinds for moment in ("mean", "var")]
    stats: dict[str, float | None] = dict.fromkeys([*keys, "planning_fraction"])
    if planning_BT is None:
        return stats, None
    surprisal_BT = h_BT if kind == "surprisal" else uncertainty("surprisal", logprobs_BT, None, mask_BT)
    plan_BT = planning_BT & mask_BT
    marks = {"exec": mask_BT ^ plan_BT, "plan": plan_BT}
    exec_variance = None
    for side, where_BT in marks.items():
        surprisal = _moments(surprisal_BT, where_BT)
        own = surprisal if kind == "surprisal" else _moments(h_BT, where_BT)
        entropy = own if kind == "shannon_entropy" else surprisal
        stats[f"{side}_surprisal_mean"], stats[f"{side}_surprisal_var"] = surprisal
        stats[f"{side}_entropy_mean"], stats[f"{side}_entropy_var"] = entropy
        exec_variance = own[1] if side == "exec" else exec_variance
    total = int(mask_BT.sum())
    stats["planning_fraction"] = int(plan_BT.sum()) / total if total else None
    return stats, exec_variance


WEIGHT_STATS = ("exec_weight_mean", "exec_weight_var", "plan_weight_mean", "plan_weight_var")
POOLING_STATS = ("exec_weight_var_unpooled", "plan_weight_change")


@torch.no_grad()
def weight_stats(
    weights_BT: Floats_BT, unpooled_BT: Floats_BT | None, planning_BT: Mask_BT | None, mask_BT: Mask_BT
) -> dict[str, float | None]:
    """The catalogue's weight keys: mean and variance over execution and planning tokens, and what pooling did.

    ``unpooled_BT`` are the weights that the same uncertainties give without pooling: ``plan_weight_change`` is the
    largest difference on a planning token, which is rounding because pooling keeps every completion's Σh.
    """
    stats: dict[str, float | None] = dict.fromkeys([*WEIGHT_STATS, *(POOLING_STATS if unpooled_BT is not None else ())])
    if planning_BT is None:
        return stats
    plan_BT = planning_BT & mask_BT
    execution_BT = mask_BT ^ plan_BT
    stats["exec_weight_mean"], stats["exec_weight_var"] = _moments(weights_BT, execution_BT)
    stats["plan_weight_mean"], stats["plan_weight_var"] = _moments(weights_BT, plan_BT)
    if unpooled_BT is not None:
        stats["exec_weight_var_unpooled"] = _moments(unpooled_BT, execution_BT)[1]
        changes = (weights_BT[plan_BT] - unpooled_BT[plan_BT]).abs()
        stats["plan_weight_change"] = float(changes.max()) if changes.numel() else None
    return stats


def _spread(advantages: Floats_B | Floats_BT, like_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Every token gets its completion's advantage, or its own, 0 in the padding; ValueError unless finite in that
    dtype."""
    if advantages.shape not in (mask_BT.shape[:1], mask_BT.shape):
        raise ValueError(f"one advantage per row: got {tuple(advantages.shape)} for {mask_BT.shape[0]} rows")
    advantages = advantages.detach().to(like_BT)
    if not bool(torch.isfinite(advantages).all()):
        raise ValueError("episode advantages must be finite: leave out the completions without a reward")
    return torch.where(mask_BT, advantages[:, None] if advantages.dim() == 1 else advantages, 0.0)


@dataclass(frozen=True)
class ModeInputs:
    """What single transform modes need beyond the common arguments; every other mode ignores it.

    ``gtpo_hicra_placebo``: ``placebo_BT``, bool, from ``placebo_mask``. ``gtpo_paper``: per row the reward, whether it
    is correct and the number of its group, its α₁ and α₂, and whether it is centred. ``entropy_mask``: ρ and whether
    the loss normaliser counts the ``kept`` tokens or ``all``.
    """

    placebo_BT: Mask_BT | None = None
    rewards_B: Values_B | None = None
    correct_B: Values_B | None = None
    group_B: Values_B | None = None
    alpha1: float = 1.0
    alpha2: float = 0.1
    centred: bool = True
    entropy_rho: float = 0.2
    entropy_denominator: str = "kept"


@dataclass(frozen=True)
class _Tokens:
    """What a transform works on: every token with its rollout's advantage, and the settings of all modes."""

    flat_BT: Floats_BT
    h_BT: Floats_BT
    entropy_BT: Floats_BT | None
    planning_BT: Mask_BT | None
    mask_BT: Mask_BT
    mode: str
    beta: float
    alpha: float
    sepa_lambda: float
    inputs: ModeInputs

    def planning(self) -> Mask_BT:
        """The planning tokens, which must be given."""
        return _require("planning_BT", self.planning_BT, self.mask_BT, self.mode)


@dataclass(frozen=True)
class _Result:
    """What a transform makes: advantages, the GTPO weights and what they were before pooling, and, where not all
    tokens train, those that do and those that the loss normaliser counts."""

    advantages_BT: Floats_BT
    weights_BT: Floats_BT | None = None
    unpooled_BT: Floats_BT | None = None
    loss_mask_BT: Mask_BT | None = None
    denominator_mask_BT: Mask_BT | None = None


def _none(tokens: _Tokens) -> _Result:
    return _Result(tokens.flat_BT)


def _gtpo(tokens: _Tokens) -> _Result:
    weights_BT = gtpo_weights(tokens.h_BT, tokens.mask_BT, tokens.beta)
    return _Result(tokens.flat_BT * weights_BT, weights_BT)


def _gtpo_sepa(tokens: _Tokens) -> _Result:
    h_BT = sepa_pool(tokens.h_BT, tokens.planning(), tokens.mask_BT, tokens.sepa_lambda)
    unpooled_BT = gtpo_weights(tokens.h_BT, tokens.mask_BT, tokens.beta)
    return replace(_gtpo(replace(tokens, h_BT=h_BT)), unpooled_BT=unpooled_BT)


def _gtpo_hicra(tokens: _Tokens) -> _Result:
    result = _gtpo(tokens)
    return replace(result, advantages_BT=hicra(result.advantages_BT, tokens.planning(), tokens.alpha))


def _gtpo_hicra_placebo(tokens: _Tokens) -> _Result:
    tokens.planning()
    placebo_BT = _require("placebo_BT", tokens.inputs.placebo_BT, tokens.mask_BT, tokens.mode)
    return _gtpo_hicra(replace(tokens, planning_BT=placebo_BT))


def _gtpo_paper(tokens: _Tokens) -> _Result:
    inputs = tokens.inputs
    if inputs.rewards_B is None or inputs.correct_B is None or inputs.group_B is None:
        raise ValueError("gtpo_paper needs rewards_B, correct_B and group_B in its ModeInputs")
    rows = (inputs.rewards_B, inputs.correct_B, inputs.group_B)
    result_BT = gtpo_paper(tokens.h_BT, *rows, tokens.mask_BT, inputs.alpha1, inputs.alpha2, inputs.centred)
    return _Result(result_BT.to(tokens.h_BT))


def _entropy_mask(tokens: _Tokens) -> _Result:
    denominator = tokens.inputs.entropy_denominator
    if denominator not in ("kept", "all"):
        raise ValueError(f"entropy_mask_denominator must be kept or all: got {denominator!r}")
    given_BT = _require("entropy_BT", tokens.entropy_BT, tokens.mask_BT, tokens.mode)
    kept_BT = entropy_mask(given_BT, tokens.mask_BT, tokens.inputs.entropy_rho)
    counted_BT = kept_BT if denominator == "kept" else tokens.mask_BT
    result_BT = torch.where(kept_BT, tokens.flat_BT, 0.0)
    return _Result(result_BT, loss_mask_BT=kept_BT, denominator_mask_BT=counted_BT)


TRANSFORMS: dict[str, Callable[[_Tokens], _Result]] = {
    "none": _none,
    "gtpo": _gtpo,
    "gtpo_hicra": _gtpo_hicra,
    "gtpo_hicra_placebo": _gtpo_hicra_placebo,
    "gtpo_sepa": _gtpo_sepa,
    "gtpo_paper": _gtpo_paper,
    "entropy_mask": _entropy_mask,
}


@torch.no_grad()
def token_advantages(
    transform_mode: Transform,
    advantages: Floats_B | Floats_BT,
    logprobs_BT: Floats_BT,
    entropy_BT: Floats_BT | None,
    planning_BT: Mask_BT | None,
    mask_BT: Mask_BT,
    *,
    uncertainty_kind: Uncertainty = "surprisal",
    beta: float = 0.1,
    alpha: float = 0.2,
    sepa_lambda: float = 0.0,
    inputs: ModeInputs | None = None,
) -> TokenCredit:
    """Token advantages of a padded batch: the one pipeline from episode advantages to what the loss sees.

    ``advantages`` one per completion, or per token where turns are credited one by one (finite: leave out completions
    without a reward); ``logprobs_BT`` and
    ``entropy_BT`` nats of the sampled distribution; ``planning_BT`` and ``mask_BT`` bool; ``alpha`` is HICRA's.
    ``gtpo_paper`` replaces the episode advantage. A transform plug-in is called with the keywords advantages_BT,
    h_BT, planning_BT and mask_BT and returns advantages_BT. Raises ValueError for missing inputs, wrong shapes
    and NaN, PluginError for a plug-in's bad result.
    """
    inputs = inputs or ModeInputs()
    mode = transform_mode if isinstance(transform_mode, str) else "plug-in"
    if isinstance(transform_mode, str) and mode not in TRANSFORMS:
        raise ValueError(f"unknown transform mode {mode!r}: one of {', '.join(TRANSFORMS)}, or a function")
    if planning_BT is not None:
        planning_BT = _require("planning_BT", planning_BT, mask_BT, mode)
    h_BT = uncertainty(uncertainty_kind, logprobs_BT, entropy_BT, mask_BT)
    stats, exec_variance = uncertainty_stats(uncertainty_kind, h_BT, logprobs_BT, planning_BT, mask_BT)
    flat_BT = _spread(advantages, h_BT, mask_BT)
    if callable(transform_mode):
        arguments = {"advantages_BT": flat_BT, "h_BT": h_BT, "planning_BT": planning_BT, "mask_BT": mask_BT}
        given = transform_mode(**arguments)
        result = _Result(_per_token("transform", transform_mode, given, mask_BT, "advantage").to(h_BT))
    else:
        tokens = _Tokens(flat_BT, h_BT, entropy_BT, planning_BT, mask_BT, mode, beta, alpha, sepa_lambda, inputs)
        result = TRANSFORMS[mode](tokens)
    if result.weights_BT is not None:
        stats |= weight_stats(result.weights_BT, result.unpooled_BT, planning_BT, mask_BT)
    loss_mask_BT = mask_BT if result.loss_mask_BT is None else result.loss_mask_BT
    counted_BT = mask_BT if result.denominator_mask_BT is None else result.denominator_mask_BT
    return TokenCredit(result.advantages_BT, loss_mask_BT, counted_BT, stats, result.weights_BT, exec_variance)
