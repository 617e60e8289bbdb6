"""Finds the likely cause when a server's log-probabilities differ from the trainer's; called by ``Watch``."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from retrain.engines.server.hypotheses import Hypothesis, ServedTokens, rms, trainer_logprobs
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes, LoraWeights
from retrain.types import Sample

# Log-likelihood ratio (nats; 148 to 1) from which on earlier weights count as the better explanation
CLEAR = 5.0
LEAST = 1e-9  # Smallest distance (nats) that counts as different from 0


def likely_cause(
    base: BaseModel,
    lanes: Lanes,
    samples: Sequence[Sample],
    current: LoraWeights,
    earlier: Mapping[str, LoraWeights],
    temperature: float,
) -> str:
    """Return a message on why a server's log-probabilities differ from the trainer's during training: a stale or
    missing adapter if earlier weights explain them better than the current ones, else precision.

    ``earlier`` maps names to weights. A stale adapter is recognised even if its own version is not in ``earlier``: its
    log-probabilities are nearer to every earlier version than to the current one. Only single-turn samples are used.
    """
    served = [
        ServedTokens(sample.token_ids[: sample.prefix].tolist(), sample.token_ids[actions].tolist(), logprobs_T)
        for sample in samples
        for actions, logprobs_T in [(sample.action_mask, sample.logprobs[sample.action_mask])]
        if actions[sample.prefix :].all()  # single-turn
    ]
    if not served:
        return "the cause cannot be determined from these rollouts, which have several turns"
    served_T = np.concatenate([completion.logprobs_T for completion in served])
    ends = np.cumsum([len(completion.logprobs_T) for completion in served])[:-1]

    def residuals(weights: LoraWeights | None) -> list[np.ndarray]:
        return np.split(served_T - trainer_logprobs(base, lanes, served, Hypothesis("", weights, temperature)), ends)

    others = {name: residuals(weights) for name, weights in {**earlier, "the base": None}.items()}
    return _explanation(residuals(current), others)


def _explanation(now: Sequence[np.ndarray], others: Mapping[str, Sequence[np.ndarray]]) -> str:
    likeliest = max(others, key=lambda name: _evidence(now, others[name]))
    if _evidence(now, others[likeliest]) < CLEAR:
        apart, other_apart = rms(np.concatenate(now)), rms(np.concatenate(others[likeliest]))
        fit = "is nearest" if apart <= other_apart else f"fits no worse than {likeliest}"
        numbers = f"({apart:.2g} nats away, {likeliest} {other_apart:.2g})"
        return f"it looks like precision: the current version {fit} {numbers}"
    nearer = [i for i, other_T in enumerate(others[likeliest]) if rms(other_T) < rms(now[i])]
    apart, other_apart = (rms(np.concatenate([residual[i] for i in nearer])) for residual in (now, others[likeliest]))
    exact = other_apart < 0.5 * apart
    if likeliest != "the base":
        cause = f"a stale adapter: {likeliest}{'' if exact else ' or an earlier one'}"
    elif exact:
        cause = "no adapter at all: it answers as the base"
    else:
        cause = "a stale adapter, of an early version: it answers more like the base"
    where = "" if len(nearer) == len(now) else f" in {len(nearer)} of {len(now)} rollouts"
    return f"it looks like {cause} ({other_apart:.2g} nats away{where}, the current version {apart:.2g})"


def _evidence(current: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return the larger of two log-likelihood ratios (nats) of ``other`` to ``current``: over all rollouts, and summed
    over the rollouts that ``other`` fits better, because only one of several servers may be at fault. Residuals are
    given per rollout; their noise is normal with unknown variance."""

    def ratio(current_T: np.ndarray, other_T: np.ndarray) -> float:
        return (len(current_T) - 1) * math.log(max(rms(current_T), LEAST) / max(rms(other_T), LEAST))

    by_rollout = sum(max(0.0, ratio(*pair)) for pair in zip(current, other, strict=True))
    return max(by_rollout, ratio(np.concatenate(current), np.concatenate(other)))
