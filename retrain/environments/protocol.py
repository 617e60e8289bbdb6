"""Define the protocol of environments: problems, and episodes in which the policy acts on them.

A user's environment has ``problems`` and ``start``, and its episodes ``result()``, which returns the reward, instead of
``results``; ``environments.hosted`` adds the rest. ``environments.build.SplitEnvironment`` serves [data].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from retrain.environments.tools import ToolSchema
from retrain.types import Action, Ended, Message, Problem, RewardResult

Range = Mapping[str, float | bool]  # `{"min", "max", "invert"}` where known, for charts


@dataclass(frozen=True)
class Observation:
    """Beginning of an episode: the whole prompt as a conversation, and the tools that the policy may call."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()


@dataclass(frozen=True)
class Step:
    """Reply to an action.

    ``messages`` are the reply; ``done`` ends the episode. ``reward`` is the reward of this turn, None if the
    environment rewards whole episodes. ``metrics`` are numbers of the turn, ``logs`` texts about it. If the environment
    rewrites earlier messages, ``conversation`` is everything that the policy reads next, and ``messages`` are ignored.
    """

    messages: Sequence[Message] = ()
    done: bool = True
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    conversation: Sequence[Message] | None = None


class EpisodeFailed(Exception):
    """An episode that cannot continue. ``ended`` gives the reason in one word, the text in a sentence."""

    def __init__(self, ended: Ended, text: str):
        super().__init__(text)
        self.ended: Ended = ended


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode on turns and on tokens, read and sampled. None: no limit."""

    turns: int | None = None
    tokens: int | None = None


ONE_TURN = EpisodeLimits(1)


class Episode(Protocol):
    """One rollout's side of the conversation. If it has a method ``close``, that is called at the end."""

    def observe(self) -> Observation:
        """Return the prompt. All episodes of a group begin alike, because they start with the same seed."""
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
        """Begin an episode. All its randomness comes from ``seed``."""
        ...

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return the rewards of episodes, in order; called once, after the last step of each."""
        ...
