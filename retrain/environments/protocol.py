"""Define the protocol of environments: problems, and episodes in which the policy acts on them.

A user's environment has ``problems`` and ``start``, and its episodes also have ``result()``, which returns the reward.
``environments.hosted`` runs such an environment in worker processes. ``environments.build.SplitEnvironment`` implements
the whole protocol, for the problems of ``[data]`` as well as for a user's environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from retrain.environments.tools import ToolSchema
from retrain.types import Action, Ended, Message, Problem, RewardResult

Range = Mapping[str, float | bool]  # `{"min", "max", "invert"}` for charts; keys without a known value are missing


@dataclass(frozen=True)
class Observation:
    """Beginning of an episode: the prompt as a conversation, and the tools that the policy may call."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True)
class Step:
    """Reply to an action.

    ``messages``: the reply. ``done``: the episode has ended. ``reward``: the reward of this turn, None if the
    environment rewards whole episodes. ``metrics`` and ``logs``: numbers and texts about the turn. ``conversation``: if
    the environment rewrites earlier messages, everything that the policy reads next; ``messages`` are then ignored.
    """

    messages: Sequence[Message] = ()
    done: bool = True
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    conversation: Sequence[Message] | None = None


class EpisodeFailed(Exception):
    """An episode that cannot continue. ``ended``: the reason in one word; ``text``: the reason in a sentence."""

    def __init__(self, ended: Ended, text: str):
        super().__init__(text)
        self.ended: Ended = ended


@dataclass(frozen=True)
class EpisodeLimits:
    """Maximum number of turns of an episode, and of its tokens, read and sampled. None: no limit."""

    turns: int | None = None
    tokens: int | None = None


ONE_TURN = EpisodeLimits(1)


class Episode(Protocol):
    """The environment's side of one rollout. If it has a method ``close``, that is called at the end."""

    def observe(self) -> Observation:
        """Return the prompt. It is the same for all episodes of a group, because they start with the same seed."""
        ...

    def step(self, action: Action) -> Step: ...


class Environment(Protocol):
    ranges: Mapping[str, Range]
    """Ranges of the reward (as ``reward``) and of metrics, if declared."""
    exact: bool
    """True if all replies of an episode are a function of problem, seed and actions, so that a resumed run equals one
    that was not interrupted."""

    def problems(self, split: str) -> Sequence[Problem]:
        """Return the problems of ``train``, or of a held-out set by its name."""
        ...

    def start(self, problem: Problem, seed: int) -> Episode:
        """Begin an episode whose random numbers all come from ``seed``. This method and those of the episode raise
        EpisodeFailed."""
        ...

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return the rewards of episodes, in order. Called once per episode, after its last step."""
        ...
