"""Episode advantages: one number per completion, from the rewards of its group.

All share r_i − r̄ and differ in the scale: none (Dr. GRPO), the group's standard deviation (GRPO), N/(N−1) (RLOO),
the group's mean (MaxRL), the batch's token-weighted standard deviation (REINFORCE++). The scale decides which
objective is climbed: with success probability p the expected weight on ∇p is 1 for RLOO, (N−1)/N for Dr. GRPO and
(1 − (1−p)^(N−1))/p for MaxRL, a truncated maximum likelihood.

The last axis of ``rewards_N`` is the group; leading axes are batched, so [N] and [P, N] both work. Results are
float64 and carry no gradient. Rewards that differ by less than 1e-8 (relative to the largest, absolute below 1)
count as equal: float noise must not become an advantage.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from retrain.errors import PluginError
from retrain.maths.arrays import plugin_name
from retrain.maths.shapes import Doubles_B, Doubles_PN, Floats_B, Rewards_PN, Values_B, of_shape

EQUAL_REWARDS = 1e-8
GRPO_EPSILON = 1e-6


def _checked(rewards_N: Rewards_PN) -> Doubles_PN:
    """Rewards as detached float64; ValueError unless they are finite and have a group axis."""
    if rewards_N.dim() == 0:
        raise ValueError("rewards need a group axis: got a single number")
    rewards_N = rewards_N.detach().to(torch.float64)
    finite_N = torch.isfinite(rewards_N)
    if not bool(finite_N.all()):
        where = torch.nonzero(~finite_N)[0].tolist()
        raise ValueError(f"rewards must be finite: found {rewards_N[tuple(where)].item()} at index {where}")
    return rewards_N


def _centred(rewards_N: Rewards_PN) -> Doubles_PN:
    """Centred rewards r − r̄, exactly 0 for a group of equal rewards."""
    if rewards_N.shape[-1] == 0:
        return rewards_N.clone()
    spread = rewards_N.amax(-1, keepdim=True) - rewards_N.amin(-1, keepdim=True)
    noise = EQUAL_REWARDS * rewards_N.abs().amax(-1, keepdim=True).clamp(min=1.0)
    return torch.where(spread < noise, 0.0, rewards_N - rewards_N.mean(-1, keepdim=True))


def dr_grpo(rewards_N: Rewards_PN) -> Doubles_PN:
    """r_i − r̄ (arXiv 2503.20783); pairs with the ``constant`` loss normaliser."""
    return _centred(_checked(rewards_N))


def grpo(rewards_N: Rewards_PN) -> Doubles_PN:
    """(r_i − r̄)/(std + 1e-6) with the population standard deviation (arXiv 2402.03300)."""
    centred_N = _centred(_checked(rewards_N))
    if centred_N.shape[-1] == 0:
        return centred_N
    deviation = centred_N.square().mean(-1, keepdim=True).sqrt()
    return torch.where(deviation < EQUAL_REWARDS, 0.0, centred_N / (deviation + GRPO_EPSILON))


def rloo(rewards_N: Rewards_PN) -> Doubles_PN:
    """r_i minus the mean of the other rewards, N/(N−1)·(r_i − r̄) (arXiv 2402.14740).

    Raises ValueError for a group of one, which has no others.
    """
    centred_N = _centred(_checked(rewards_N))
    size = centred_N.shape[-1]
    if size == 1:
        raise ValueError("rloo compares with the other completions of the group: it needs group_size >= 2, got 1")
    return centred_N * (size / (size - 1)) if size else centred_N


def maxrl(rewards_N: Rewards_PN) -> Doubles_PN:
    """(r_i − r̄)/r̄, all 0 when every reward is 0 (arXiv 2602.02710).

    Defined for rewards in [0, 1]; maximum likelihood only for 0/1. Raises ValueError otherwise.
    """
    rewards_N = _checked(rewards_N)
    outside_N = rewards_N[(rewards_N < 0.0) | (rewards_N > 1.0)]
    if len(outside_N):
        raise ValueError(f"maxrl is defined for rewards in [0, 1]: got {outside_N[0].item():g}")
    centred_N = _centred(rewards_N)
    if centred_N.shape[-1] == 0:
        return centred_N
    mean = rewards_N.mean(-1, keepdim=True)
    return torch.where(mean > 0.0, centred_N / torch.where(mean > 0.0, mean, 1.0), 0.0)


def whiten(advantages_B: Floats_B, token_counts_B: Values_B) -> Doubles_B:
    """(A − mean)/std over all trained tokens of the batch, float64 [B] (REINFORCE++, arXiv 2501.03262).

    ``advantages_B`` holds r_i − r̄ of every completion, which all its ``token_counts_B`` tokens share, so mean and
    population standard deviation are weighted by length. A standard deviation of 0, or no token at all, gives 0.
    """
    advantages_B = _checked(advantages_B)
    counts_B = token_counts_B.detach().to(advantages_B)
    if counts_B.shape != advantages_B.shape:
        raise ValueError(f"one token count per advantage: got {tuple(counts_B.shape)} for {tuple(advantages_B.shape)}")
    total = counts_B.sum()
    if float(total) <= 0.0:
        return torch.zeros_like(advantages_B)
    centred_B = advantages_B - (advantages_B * counts_B).sum() / total
    deviation = ((centred_B.square() * counts_B).sum() / total).sqrt()
    return torch.zeros_like(centred_B) if float(deviation) < EQUAL_REWARDS else centred_B / deviation


ADVANTAGES: dict[str, Callable[[Rewards_PN], Doubles_PN]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp": dr_grpo,
}


def plugin_advantages(function: Callable[..., Any], rewards_N: Rewards_PN, context: Any = None) -> Doubles_PN:
    """Advantages from a user's ``function(rewards_N)`` or ``function(rewards_N, context)``, checked, float64 [N].

    Raises PluginError naming the plug-in when the result has another length or is not finite.
    """
    plugin, rewards_N = f"advantage plug-in {plugin_name(function)}", _checked(rewards_N)
    positional = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    takes_context = len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in positional)
    result = function(rewards_N.clone(), context) if takes_context else function(rewards_N.clone())
    result = of_shape(plugin, result, rewards_N, "rewards", "one number per completion")
    advantages_N = result.detach().to(torch.float64)
    if not bool(torch.isfinite(advantages_N).all()):
        raise PluginError(f"{plugin} returned NaN or infinity: {advantages_N.tolist()}")
    return advantages_N


def group_advantages(mode: str | Callable[..., Any], rewards_N: Rewards_PN, context: Any = None) -> Doubles_PN:
    """Advantages of one group (or of [P, N] groups) by mode name or plug-in function, float64, no gradient.

    ``reinforce_pp`` is only half done here: pass the batch through ``whiten``. Raises ValueError for an unknown mode
    or rewards that it is not defined for, PluginError for a plug-in's bad result.
    """
    if callable(mode):
        return plugin_advantages(mode, rewards_N, context)
    if mode not in ADVANTAGES:
        raise ValueError(f"unknown advantage mode {mode!r}: one of {', '.join(ADVANTAGES)}, or a function")
    return ADVANTAGES[mode](rewards_N)
