"""What is compared with what: whole episodes of a group, their turns of the same number, or turns in the same state.

Turn by turn (``turn_credit = "turn"``) a rollout's turn t has the rewards that were still to come, discounted:
G_t = Σ_k γ^(k−t) r_k. It is compared with G_t of the group's other rollouts that reached turn t; a turn that no other
reached has the advantage 0 (turn-level group-relative advantages; arXiv 2505.11821 is a relative).

By states (``turn_credit = "state"``, GiGPO, arXiv 2505.10978) whole episodes are compared, and G_t besides with that of
every turn of the group, also of the same rollout, that began with the same words of the environment. Published code
counts such a turn once for a rollout, or every time; here every time. A state that nobody else came to adds nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.types import Action, Group, Rollout


@dataclass(frozen=True)
class Compared:
    """What is compared with each other, by these returns: rollouts as a whole, or (``turns``) one turn of each; a
    rollout may be there with several turns. ``weight`` is what the advantage counts."""

    group: Group
    rollouts: list[Rollout]
    returns: list[float]
    turns: list[int] | None = None
    weight: float = 1.0

    @property
    def places(self) -> list[int | None]:
        return [None] * len(self.rollouts) if self.turns is None else [*self.turns]

    @property
    def actions(self) -> list[Action]:
        """What each did: in that turn, or last."""
        return [rollout.turns[-1 if turn is None else turn].action for rollout, turn in self._pairs()]

    @property
    def tokens(self) -> list[int]:
        """How many tokens the advantage of each is for."""
        return [len(rollout if turn is None else rollout.turns[turn].action) for rollout, turn in self._pairs()]

    def _pairs(self) -> Iterator[tuple[Rollout, int | None]]:
        return zip(self.rollouts, self.places, strict=True)


@dataclass(frozen=True)
class TurnCredit:
    """How turns are credited: with a ``discount`` for rewards one turn later, by turns of the same number, or with
    ``state_weight`` by turns in the same state and whole episodes."""

    discount: float
    state_weight: float | None = None


def compared(group: Group, by: TurnCredit | None = None) -> Iterator[Compared]:
    """The comparisons of a group's rollouts that have a reward; those of whole episodes first."""
    known = [one for one in group.rollouts if one.reward.total_reward is not None and one.turns]
    if by is None or by.state_weight is not None:
        yield Compared(group, known, [one.reward.total_reward or 0.0 for one in known])
    if by is None:
        return
    alike: dict[object, list[tuple[Rollout, int, float]]] = {}
    for rollout in known:
        for turn, value in enumerate(returns_to_go(rollout, by.discount)):
            place = turn if by.state_weight is None else tuple(rollout.turns[turn].observation_ids)
            alike.setdefault(place, []).append((rollout, turn, value))
    for here in alike.values():
        rollouts, turns, values = (list(part) for part in zip(*here, strict=True))
        yield Compared(group, rollouts, values, turns, by.state_weight or 1.0)


def returns_to_go(rollout: Rollout, discount: float) -> list[float]:
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


def add_advantage(rollout: Rollout, turn: int | None, value: float) -> None:
    """Note an advantage: of the rollout, or of one of its turns, beside the rollout's own where it has one; then the
    rollout's is the mean over its tokens."""
    if turn is None:
        rollout.advantage = value
        return
    if rollout.turn_advantages is None:
        own = rollout.advantage if math.isfinite(rollout.advantage) else 0.0
        rollout.turn_advantages = [own] * len(rollout.turns)
    rollout.turn_advantages[turn] += value
    pairs = zip(rollout.turn_advantages, rollout.turns, strict=True)
    rollout.advantage = sum(own * len(each.action) for own, each in pairs) / max(1, len(rollout))


def has_signal(group: Group) -> bool:
    """Whether any of its rollouts or turns has an advantage other than 0."""
    parts = (one.turn_advantages or [one.advantage] for one in group.rollouts if math.isfinite(one.advantage))
    return any(value != 0 for part in parts for value in part)
