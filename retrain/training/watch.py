"""Watches during training whether a server's log-probabilities agree with the trainer's.

Some rollouts of every step are scored before the update under the weights that should have sampled them, so that stale
rollouts are compared fairly. Above the limit, the likely cause is computed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.engines.server.hypotheses import Hypothesis, ServedTokens, rms, trainer_logprobs
from retrain.policy.base import BaseModel
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.protocol import Policy, PolicySnapshot
from retrain.types import Sample, Want

# Log-likelihood ratio (nats; 148 to 1) from which on earlier weights count as the better explanation
CLEAR = 5.0
LEAST = 1e-9  # Smallest distance (nats) that counts as different from 0


@dataclass(frozen=True)
class Watch:
    """Compares server and trainer. ``limit``: largest half mean squared difference of log-probabilities (nats²)."""

    base: BaseModel
    lanes: Lanes
    temperature: float
    limit: float

    def mismatch(self, policy: Policy, samples: Sequence[Sample], weights: PolicySnapshot) -> float:
        """Return half the mean squared difference (nats²) between the log-probabilities of server and trainer, over
        the action tokens. ``weights``: the weights that sampled them."""
        scores = policy.score(samples, frozenset({Want.LOGPROBS}), weights).logprobs
        assert scores is not None, "a policy gives what it is asked for"
        served = [sample.logprobs[sample.action_mask] for sample in samples]
        return float(0.5 * np.mean(np.square(np.concatenate(served) - np.concatenate(scores))))

    def cause(
        self, samples: Sequence[Sample], weights: PolicySnapshot, others: Sequence[tuple[int, PolicySnapshot]]
    ) -> str:
        """Return a message on why the log-probabilities differ: a stale or missing adapter if other weights explain
        them better than ``weights``, which should have sampled, else precision.

        ``others``: weights of other versions. A stale adapter is recognised even if its own version is not among them:
        its log-probabilities are nearer to every earlier version than to the current one. Only single-turn samples are
        used.
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

        def residuals(weights: PolicySnapshot | None) -> list[np.ndarray]:
            assert isinstance(weights, LocalSnapshot | None), "servers are given LoRA adapters"
            hypothesis = Hypothesis("", weights and weights.weights, self.temperature)
            return np.split(served_T - trainer_logprobs(self.base, self.lanes, served, hypothesis), ends)

        with self.base.in_use():
            distances = {f"version {version}": residuals(snapshot) for version, snapshot in others}
            return _explanation(residuals(weights), {**distances, "the base": residuals(None)})


def by_version(samples: Sequence[Sample]) -> Iterator[tuple[int, list[Sample]]]:
    """Yield policy versions with their samples; samples of several versions are skipped."""
    samples_of: dict[int, list[Sample]] = {}
    for sample in samples:
        versions = set(sample.versions[sample.action_mask].tolist())
        if len(versions) == 1:
            samples_of.setdefault(versions.pop(), []).append(sample)
    yield from samples_of.items()


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
