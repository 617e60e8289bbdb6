"""DAPO's soft punishment of answers that come near the limit of their length (arXiv 2503.14476).

Differences from published code: the punishment ends at −1, and whether an answer is correct is decided before it.
"""

from collections.abc import Sequence
from dataclasses import replace

from retrain.types import Group, Rollout

METRIC = "overlong_penalty"


def overlong_penalty(tokens: int, longest: int, soft: int) -> float:
    """Return what an answer of so many tokens loses: 0 up to ``longest`` − ``soft``, then one more part in ``soft``
    with every token, down to −1. Raises ValueError unless 0 < soft ≤ longest."""
    if not 0 < soft <= longest:
        raise ValueError(f"the soft part must lie between 1 and the longest answer, {longest} tokens: got {soft}")
    return max(-1.0, min(0.0, (longest - soft - tokens) / soft))


def punish_overlong(groups: Sequence[Group], longest: int, soft: int) -> list[Group]:
    """Return the groups with the penalty taken from every reward and noted beside it; no reward stays no reward."""
    return [
        replace(group, rollouts=tuple(_punished(rollout, longest, soft) for rollout in group.rollouts))
        for group in groups
    ]


def _punished(rollout: Rollout, longest: int, soft: int) -> Rollout:
    reward = rollout.reward
    if reward.total_reward is None:
        return rollout
    penalty = overlong_penalty(len(rollout), longest, soft)
    punished = replace(
        reward,
        total_reward=reward.total_reward + penalty,
        correct=reward.is_correct,
        sample_metrics={**reward.sample_metrics, METRIC: penalty},
    )
    return replace(rollout, reward=punished)
