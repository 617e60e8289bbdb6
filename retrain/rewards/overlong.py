"""DAPO's soft penalty for answers near the length limit (arXiv 2503.14476).

Differences from published code: the penalty is at most 1, and correctness is decided on the reward without it.
"""

from collections.abc import Sequence
from dataclasses import replace

from retrain.types import Group, Rollout

METRIC = "overlong_penalty"


def overlong_penalty(tokens: int, longest: int, soft: int) -> float:
    """Return the penalty of an answer: 0 up to ``longest`` − ``soft`` tokens, then −1 / ``soft`` per further token,
    down to −1."""
    return max(-1.0, min(0.0, (longest - soft - tokens) / soft))


def punish_overlong(groups: Sequence[Group], longest: int, soft: int) -> list[Group]:
    """Return the groups with the penalty added to every reward and recorded as a sample metric. Missing rewards stay
    missing."""

    def punished(rollout: Rollout) -> Rollout:
        reward = rollout.reward
        if reward.total_reward is None:
            return rollout
        penalty = overlong_penalty(len(rollout), longest, soft)
        total, metrics = reward.total_reward + penalty, {**reward.sample_metrics, METRIC: penalty}
        reward = replace(reward, total_reward=total, correct=reward.is_correct, sample_metrics=metrics)
        return replace(rollout, reward=reward)

    return [replace(group, rollouts=tuple(map(punished, group.rollouts))) for group in groups]
