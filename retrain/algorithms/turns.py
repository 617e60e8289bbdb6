"""What is compared with what: whole episodes of a group, or their turns of the same number.

Turn by turn (``turn_credit = "turn"``) a rollout's turn t has the rewards that were still to come, discounted:
G_t = Σ_k γ^(k−t) r_k. It is compared with G_t of the group's other rollouts that reached turn t; a turn that no other
reached has the advantage 0 (turn-level group-relative advantages; arXiv 2505.11821 and 2505.10978 are relatives).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.types import Action, Group, Rollout


@dataclass(frozen=True)
class Compared:
    """Rollouts that are compared with each other, by these returns; in one of their turns, or (None) as a whole."""

    group: Group
    rollouts: list[Rollout]
    returns: list[float]
    turn: int | None = None

    @property
    def actions(self) -> list[Action]:
        """What each did: in that turn, or last."""
        return [rollout.turns[-1 if self.turn is None else self.turn].action for rollout in self.rollouts]

    @property
    def tokens(self) -> list[int]:
        """How many tokens the advantage of each is for."""
        return [len(one) for one in (self.rollouts if self.turn is None else self.actions)]


def compared(group: Group, turn_discount: float | None = None) -> Iterator[Compared]:
    """The comparisons of a group's rollouts that have a reward; with ``turn_discount`` one for every turn."""
    known = [one for one in group.rollouts if one.reward.total_reward is not None and one.turns]
    if turn_discount is None:
        yield Compared(group, known, [one.reward.total_reward or 0.0 for one in known])
        return
    returns = [returns_to_go(rollout, turn_discount) for rollout in known]
    for turn in range(max(map(len, returns), default=0)):
        here = [(rollout, own[turn]) for rollout, own in zip(known, returns, strict=True) if turn < len(own)]
        yield Compared(group, [rollout for rollout, _ in here], [value for _, value in here], turn)


def returns_to_go(rollout: Rollout, discount: float) -> list[float]:
    """G_t of every turn."""
    returns, later = [], 0.0
    for reward in reversed(own_rewards(rollout)):
        later = reward + discount * later
        returns.append(later)
    return returns[::-1]


def own_rewards(rollout: Rollout) -> list[float]:
    """What each turn was given. What the total reward is beyond the rewards of single turns comes with the last."""
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    rewards[-1] += (rollout.reward.total_reward or 0.0) - math.fsum(rewards)
    return rewards


def set_advantage(rollout: Rollout, turn: int | None, value: float) -> None:
    """Note an advantage: of the rollout, or of one of its turns; then the rollout's is the mean over its tokens."""
    if turn is None:
        rollout.advantage = value
        return
    if rollout.turn_advantages is None:
        rollout.turn_advantages = [0.0] * len(rollout.turns)
    rollout.turn_advantages[turn] = value
    pairs = zip(rollout.turn_advantages, rollout.turns, strict=True)
    rollout.advantage = sum(own * len(each.action) for own, each in pairs) / max(1, len(rollout))


def has_signal(group: Group) -> bool:
    """Whether any of its rollouts or turns has an advantage other than 0."""
    parts = (one.turn_advantages or [one.advantage] for one in group.rollouts if math.isfinite(one.advantage))
    return any(value != 0 for part in parts for value in part)
