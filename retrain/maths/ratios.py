"""Log ratios of two policies on sampled tokens, with importance ratios, their statistics, and KL estimates.

Tensors are [B, T] with a row for each sequence; padding may hold any value. Micro-batches add up their sums
(``add_sums``), so that cutting a step into micro-batches cannot change its metrics.
"""

import torch

from retrain.maths.shapes import Floats_BT, Mask_BT, Sum

# |log ρ| is clamped here before exp: e^20 is far outside every trust region and still finite in fp32
MAX_LOG_RATIO = 20.0
# Catalogue keys that compare sampler and trainer on the same tokens, trained or not
MISMATCH_METRICS = ("kl_sample_train_v1", "kl_sample_train_v2", "kl_divergence_inference")
# Catalogue keys that ``loss_metrics`` fills
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

Sums = dict[str, Sum]


def log_ratio(logprobs_BT: Floats_BT, sampler_logprobs_BT: Floats_BT, mask_BT: Mask_BT) -> Floats_BT:
    """Return log ρ = log π_train − log π_sampler within ±20; 0, and without gradient, in the padding."""
    # where() rather than a product with the mask: padding may hold NaN or infinity, and NaN · 0 is NaN.
    difference_BT = torch.where(mask_BT, logprobs_BT, 0.0) - torch.where(mask_BT, sampler_logprobs_BT, 0.0).detach()
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sampled_token_kl(
    kind: str, logprobs_BT: Floats_BT, reference_logprobs_BT: Floats_BT, mask_BT: Mask_BT
) -> Floats_BT:
    """Return an estimate of KL(π ‖ reference) per sampled token, 0 in the padding.

    With l = log π − log ref: ``k1`` = l (for the reward; detach it), ``k2`` = ½l² (for the loss: its gradient is the
    reverse KL's on policy), ``k3`` = e^−l − 1 + l (for logging only). Only ``logprobs_BT`` carries a gradient.
    """
    l_BT = torch.where(mask_BT, logprobs_BT, 0.0) - torch.where(mask_BT, reference_logprobs_BT, 0.0).detach()
    # Schulman's estimators (joschu.net/blog/kl-approx.html), with r = reference/π = e^−l.
    if kind == "k1":
        return l_BT
    if kind == "k2":
        return 0.5 * l_BT.square()
    if kind == "k3":
        # Only the exponent is clamped: l itself stays exact, so that a huge divergence is still visible.
        return torch.expm1(-l_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + l_BT
    raise ValueError(f"unknown KL estimator {kind!r}: one of k1, k2, k3")


@torch.no_grad()
def ratio_sums(
    log_ratio_BT: Floats_BT, mask_BT: Mask_BT, low_BT: Mask_BT | None = None, high_BT: Mask_BT | None = None
) -> Sums:
    """Return the sums behind the ratio and clipping metrics, 0-dim float64 tensors, without device synchronisation.

    With d = log π_sampler − log π_train = −log ρ: ``k1`` Σd, ``k2`` Σ½d², ``k3`` Σ(e^−d − 1 + d); ``moved`` equals
    ``k2``. ``low_BT`` and ``high_BT`` mark clipped tokens: ``clip_low_min`` is the smallest share of low ones in a
    sequence, ``clip_high_max`` the largest share of high ones.
    """
    mask_BT = mask_BT.to(torch.bool)
    weight_BT = mask_BT.to(torch.float64)
    # float64: micro-batches add these sums in any order, and the metric must not depend on the cut.
    d_BT = -log_ratio_BT.detach().to(torch.float64) * weight_BT
    ratio_BT = (-d_BT).exp() * weight_BT
    none_BT = torch.zeros_like(mask_BT)
    low_B = (none_BT if low_BT is None else low_BT & mask_BT).sum(1).double()
    high_B = (none_BT if high_BT is None else high_BT & mask_BT).sum(1).double()
    length_B = weight_BT.sum(1)
    # ±∞ for sequences without trained tokens: they are never the minimum or the maximum.
    share_low_B = torch.where(length_B > 0, low_B / length_B.clamp(min=1.0), torch.inf)
    share_high_B = torch.where(length_B > 0, high_B / length_B.clamp(min=1.0), -torch.inf)
    # min() and max() of a tensor without elements raise.
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
    """Return the sums that compare trainer and sampler for losses with the ratio π/π_old: ``k1`` and ``k2`` compare the
    sampler with π_old (the policy before the first of several updates), ``k3`` with π (the present policy)."""
    weight_BT = mask_BT.to(torch.float64)
    before_BT = -log_ratio(old_logprobs_BT, sampler_logprobs_BT, mask_BT).to(torch.float64) * weight_BT
    now_BT = -log_ratio(logprobs_BT, sampler_logprobs_BT, mask_BT).to(torch.float64) * weight_BT
    return {"k1": before_BT.sum(), "k2": 0.5 * before_BT.square().sum(), "k3": (torch.expm1(-now_BT) + now_BT).sum()}


def add_sums(total: Sums | None, part: Sums) -> Sums:
    """Combine the statistics of two micro-batches: sums add, ``*_min`` and ``*_max`` take the extreme."""
    if total is None:
        return dict(part)
    joined = {}
    for key, value in part.items():
        join = torch.minimum if key.endswith("_min") else torch.maximum if key.endswith("_max") else torch.add
        joined[key] = join(total[key], value)
    return joined


def loss_metrics(sums: Sums) -> dict[str, float | None]:
    """Return the values of ``RATIO_METRICS`` from a step's sums; all None without a trained token."""
    number = {key: float(value) for key, value in sums.items()}
    tokens = number["tokens"]
    if tokens == 0:
        return dict.fromkeys(RATIO_METRICS)
    ratio = number["ratio"] / tokens
    clipped = (number["clip_low"] + number["clip_high"]) / tokens
    return {
        "val/ratio": ratio,
        # Rounding can make E[ρ²] − E[ρ]² slightly negative.
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
