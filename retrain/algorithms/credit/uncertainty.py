"""Uncertainty of every sampled token, and its statistics over execution and planning tokens.

Vectorised over the padded batch [B, T]; column t is position t of the completion, padding lies where ``mask_BT`` is
False and may hold any value, NaN included. Nothing here carries a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.algorithms.algorithm import StepContext, TokenCreditStep, pad_field, pad_if_all, token_mask, with_rows
from retrain.errors import PluginError
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import Floats_BT, Mask_BT, of_shape
from retrain.types import CreditedBatch, CreditedRollout

MAX_UNCERTAINTY = 50.0  # Nats: one token of probability 0 must not make a completion's mean infinite
Uncertainty = str | Callable[..., object]


@dataclass(frozen=True)
class TokenUncertainty(TokenCreditStep):
    """Sets the uncertainty of the tokens of every rollout with an advantage, and records its statistics.

    ``kind`` is one of ``UNCERTAINTIES`` or a user's function.
    """

    kind: Uncertainty

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        mask_BT, logprobs_BT = token_mask(rated), pad_field(rated, "logprobs_T")
        entropy_BT = pad_if_all([rollout.entropy_T for rollout in rated])
        h_BT = uncertainty(self.kind, logprobs_BT, entropy_BT, mask_BT)
        planning_BT = pad_if_all([rollout.planning_T for rollout in rated], np.bool_)
        batch = with_rows(batch, rated, uncertainty_T=h_BT)
        return batch.with_metrics(uncertainty_stats(self.kind, h_BT, logprobs_BT, planning_BT, mask_BT))


def without_padding(name: str, values_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Return detached values with 0 in the padding. Raises ValueError if a trained token has NaN."""
    values_BT = torch.where(mask_BT, values_BT.detach(), 0.0)
    # NaN propagates to the sum, so most calls need one reduction. The second check excludes a sum of ∞ and −∞.
    if bool(torch.isnan(values_BT.sum())) and bool(torch.isnan(values_BT).any()):
        row, column = torch.nonzero(torch.isnan(values_BT))[0].tolist()
        raise ValueError(f"{name} is NaN at completion {row}, token {column}")
    return values_BT


def per_token(kind: str, function: Callable[..., object], result: object, mask_BT: Mask_BT, entry: str) -> Tensor:
    """Return a plug-in's result for every token, 0 in the padding. Raises PluginError for another shape, NaN or
    infinity."""
    plugin = f"{kind} plug-in {plugin_name(function)}"
    values_BT = of_shape(plugin, result, mask_BT, "tokens", f"one {entry} per token").detach()
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    if not bool(torch.isfinite(values_BT).all()):
        raise PluginError(f"{plugin} returned NaN or infinity for a trained token")
    return values_BT


def _surprisal(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    return -without_padding("logprob", logprobs_BT, mask_BT)


def _predictive_variance(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    # Rounding can put a log-probability just above 0, hence p(1 − p) below 0.
    p_BT = without_padding("logprob", logprobs_BT, mask_BT).clamp(max=0.0).exp()
    return p_BT * (1.0 - p_BT)  # variance of the indicator of the sampled token


def _shannon_entropy(logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    if entropy_BT is None:
        raise ValueError("shannon_entropy needs the entropy of every token, which the engine did not give")
    return without_padding("entropy", entropy_BT, mask_BT)


UNCERTAINTIES: dict[str, Callable[[Floats_BT, Floats_BT | None, Mask_BT], Floats_BT]] = {
    "surprisal": _surprisal,
    "predictive_variance": _predictive_variance,
    "shannon_entropy": _shannon_entropy,
}


@torch.no_grad()
def uncertainty(kind: Uncertainty, logprobs_BT: Floats_BT, entropy_BT: Floats_BT | None, mask_BT: Mask_BT) -> Floats_BT:
    """Return the uncertainty h ≥ 0 of every trained token, [B, T], 0 in the padding, in nats (a variance has no unit).

    ``kind`` is ``surprisal`` (−log p), ``predictive_variance`` (p(1 − p)), ``shannon_entropy`` (``entropy_BT``, the
    full-vocabulary entropy of the sampled distribution) or a function(logprobs_BT, entropy_BT, mask_BT). h is clamped
    to [0, 50]. Raises ValueError for NaN, an unknown kind or a missing entropy; PluginError for a plug-in's bad result.
    """
    if callable(kind):
        result = torch.as_tensor(kind(logprobs_BT.detach(), entropy_BT, mask_BT)).to(logprobs_BT)
        h_BT = per_token("uncertainty", kind, result, mask_BT, "number")
    elif kind in UNCERTAINTIES:
        h_BT = UNCERTAINTIES[kind](logprobs_BT, entropy_BT, mask_BT)
    else:
        raise ValueError(f"unknown uncertainty kind {kind!r}: one of {', '.join(UNCERTAINTIES)}, or a function")
    return h_BT.clamp(0.0, MAX_UNCERTAINTY)


def moments(values_BT: Floats_BT, where_BT: Mask_BT) -> tuple[float | None, float | None]:
    """Return mean and population variance over the tokens of ``where_BT``; (None, None) for no token."""
    weight_BT = where_BT.to(values_BT)
    count = float(weight_BT.sum(dtype=torch.float64))
    if count == 0.0:
        return None, None
    # Two passes and float64 sums: E[x²] − E[x]² in float32 loses small variances.
    mean = float((values_BT * weight_BT).sum(dtype=torch.float64)) / count
    return mean, float(((values_BT - mean).square_().mul_(weight_BT)).sum(dtype=torch.float64)) / count


@torch.no_grad()
def uncertainty_stats(
    kind: Uncertainty, h_BT: Floats_BT, logprobs_BT: Floats_BT, planning_BT: Mask_BT | None, mask_BT: Mask_BT
) -> dict[str, float | None]:
    """Return the catalogue's metrics about planning (``plan``) and execution (``exec``) tokens, over all trained
    tokens.

    The keys ``*_surprisal_*`` are about −log p whatever ``kind`` is. The keys ``*_entropy_*`` are about the
    full-vocabulary entropy if ``kind`` is ``shannon_entropy``, else they repeat the surprisal. All are None without a
    planning mask.
    """
    sides = ("exec", "plan")
    kinds = ("surprisal", "entropy")
    keys = [f"{side}_{what}_{moment}" for side in sides for what in kinds for moment in ("mean", "var")]
    stats: dict[str, float | None] = dict.fromkeys([*keys, "planning_fraction"])
    if planning_BT is None:
        return stats
    surprisal_BT = h_BT if kind == "surprisal" else uncertainty("surprisal", logprobs_BT, None, mask_BT)
    plan_BT = planning_BT & mask_BT
    marks = {"exec": mask_BT ^ plan_BT, "plan": plan_BT}
    for side, where_BT in marks.items():
        surprisal = moments(surprisal_BT, where_BT)
        entropy = moments(h_BT, where_BT) if kind == "shannon_entropy" else surprisal
        stats[f"{side}_surprisal_mean"], stats[f"{side}_surprisal_var"] = surprisal
        stats[f"{side}_entropy_mean"], stats[f"{side}_entropy_var"] = entropy
    total = int(mask_BT.sum())
    stats["planning_fraction"] = int(plan_BT.sum()) / total if total else None
    return stats
