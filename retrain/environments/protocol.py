"""What the loop asks of an environment: problems, and episodes in which the policy acts on them.

``environments.single_turn`` is the one with one turn: a question, an answer, a grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrain.types import Action, Message, Problem, RewardResult

Range = Mapping[str, Any]
"""``{"min", "max", "invert"}`` where known, for charts."""


@dataclass(frozen=True)
class Observation:
    """What an episode begins with: the whole prompt as a conversation."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Step:
    """The messages that answer an action, whether the episode is over, and numbers of the turn."""

    messages: tuple[Message, ...] = ()
    done: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)


class Episode(Protocol):
    """One rollout's side of the conversation."""

    def observe(self) -> Observation:
        """The prompt. All episodes of a group begin alike: they are started with the same seed."""
        ...

    def step(self, action: Action) -> Step:
        """Take the policy's action; in order, one at a time."""
        ...

    def result(self) -> RewardResult:
        """The rollout's reward; once, after the last step."""
        ...


class Environment(Protocol):
    """What the policy acts in."""

    reward_range: tuple[float, float] | None
    metrics_ranges: Mapping[str, Range]

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of ``train``, or of a held-out set by its name."""
        ...

    def start(self, problem: Problem, seed: int) -> Episode:
        """A new episode. All its randomness comes from ``seed``."""
        ...

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """``result()`` of each, in order; an environment that grades many at once does so here."""
        ...
