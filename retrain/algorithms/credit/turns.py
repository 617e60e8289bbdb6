"""Comparisons within a group: of whole episodes of a group, their turns of the same number, or turns in the same state.

Turn by turn (``turn_credit = "turn"``) a rollout's turn t has the rewards that were still to come, discounted:
G_t = Σ_k γ^(k−t) r_k. It is compared with G_t of the group's other rollouts that reached turn t; a turn that no other
reached has the advantage 0 (turn-level group-relative advantages; arXiv 2505.11821 is a relative).

By states (``turn_credit = "state"``, GiGPO, arXiv 2505.10978) whole episodes are compared, and G_t besides with that of
every turn of the group, also of the same rollout, that began with the same words of the environment. Published code
counts such a turn once for a rollout, or every time; here every time. A state that nobody else came to adds nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrain.config.algorithm import Algorithm as AlgorithmSection
from retrain.types import Action, CreditedGroup, CreditedRollout, Rollout


@dataclass(frozen=True)
class Comparison:
    """Rollouts that are compared by their ``returns``, as a whole or (``turns``) one turn of each; a rollout may be
    there with several turns. ``weight`` is the factor of the advantage."""

    group: CreditedGroup
    rollouts: list[CreditedRollout]
    returns: list[float]
    turns: list[int] | None = None
    weight: float = 1.0

    @property
    def places(self) -> list[int | None]:
        return [None] * len(self.rollouts) if self.turns is None else [*self.turns]

    @property
    def actions(self) -> list[Action]:
        """The action of each in that turn, or its last."""
        return [rollout.turns[-1 if turn is None else turn].action for rollout, turn in self._pairs()]

    @property
    def tokens(self) -> list[int]:
        """Number of tokens that the advantage of each is for."""
        return [len(rollout if turn is None else rollout.turns[turn].action) for rollout, turn in self._pairs()]

    def _pairs(self) -> Iterator[tuple[CreditedRollout, int | None]]:
        return zip(self.rollouts, self.places, strict=True)


@dataclass(frozen=True)
class TurnCredit:
    """Credit of turns, with a ``discount`` for rewards one turn later: compared by turns of the same number or, with a
    ``state_weight``, by turns in the same state and whole episodes."""

    discount: float
    state_weight: float | None = None

    @classmethod
    def of(cls, algorithm: AlgorithmSection) -> "TurnCredit | None":
        """Return the turn credit of a configuration; None for whole episodes alone."""
        if algorithm.turn_credit == "episode":
            return None
        return cls(algorithm.turn_discount, algorithm.state_weight if algorithm.turn_credit == "state" else None)


def comparisons(group: CreditedGroup, by: TurnCredit | None = None) -> Iterator[Comparison]:
    """Yield the comparisons of a group's rollouts that have a reward; those of whole episodes first."""
    rewarded = [rollout for rollout in group.rollouts if rollout.has_reward and rollout.turns]
    if by is None or by.state_weight is not None:
        yield Comparison(group, rewarded, [rollout.reward.total_reward or 0.0 for rollout in rewarded])
    if by is None:
        return
    alike: dict[object, list[tuple[CreditedRollout, int, float]]] = {}
    for rollout in rewarded:
        for turn, value in enumerate(returns_to_go(rollout, by.discount)):
            place = turn if by.state_weight is None else tuple(rollout.turns[turn].observation_ids)
            alike.setdefault(place, []).append((rollout, turn, value))
    for here in alike.values():
        rollouts, turns, values = (list(part) for part in zip(*here, strict=True))
        yield Comparison(group, rollouts, values, turns, by.state_weight or 1.0)


def returns_to_go(rollout: Rollout, discount: float) -> list[float]:
    returns, later = [], 0.0
    for reward in reversed(own_rewards(rollout)):
        later = reward + discount * later
        returns.append(later)
    return returns[::-1]


def own_rewards(rollout: Rollout) -> list[float]:
    """Return the reward of each turn. The part of the total reward that no turn was given comes with the last."""
    rewards = [turn.reward or 0.0 for turn in rollout.turns]
    rewards[-1] += (rollout.reward.total_reward or 0.0) - math.fsum(rewards)
    return rewards


def add_advantage(rollout: CreditedRollout, turn: int | None, value: float) -> CreditedRollout:
    """Return the rollout with an advantage: its own, or that of one of its turns, added to the rollout's where it has
    one; the rollout's is then the mean over its tokens."""
    if turn is None:
        return replace(rollout, advantage=value)
    before = rollout.turn_advantages
    if before is None:
        start = rollout.advantage if math.isfinite(rollout.advantage) else 0.0
        before = (start,) * len(rollout.turns)
    advantages = tuple(part + value if index == turn else part for index, part in enumerate(before))
    pairs = zip(advantages, rollout.turns, strict=True)
    mean = sum(part * len(exchange.action) for part, exchange in pairs) / max(1, len(rollout))
    return replace(rollout, turn_advantages=advantages, advantage=mean)


def has_signal(group: CreditedGroup) -> bool:
    """Return whether any of its rollouts or turns has an advantage other than 0."""
    parts = (one.turn_advantages or (one.advantage,) for one in group.rollouts if math.isfinite(one.advantage))
    return any(value != 0 for part in parts for value in part)
