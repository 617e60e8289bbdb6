"""What the loop asks of an environment: problems, and episodes in which the policy acts on them.

An environment of the user's own has ``problems`` and ``start``, and its episodes ``result()``, the reward, instead of
``results`` here; ``environments.hosted`` adds the rest. ``environments.build.SplitEnvironment`` has the problems of
[data].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from retrain.types import Action, Ended, Message, Problem, RewardResult

Range = Mapping[str, Any]  # `{"min", "max", "invert"}` where known, for charts


@dataclass(frozen=True)
class Observation:
    """The beginning of an episode: the whole prompt as a conversation, and the tools that the policy may call, as JSON
    schemas of functions (``{"type": "function", "function": {"name", "description", "parameters"}}``)."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Step:
    """The answer to an action.

    ``messages`` answer it; ``done``: the episode is over. ``reward`` is what this turn alone was worth, None where the
    environment rewards whole episodes. ``metrics`` are numbers of the turn, ``logs`` texts about it. Where the
    environment has rewritten what was said before, ``conversation`` is all of it as the policy shall read it next;
    ``messages`` are not used then.
    """

    messages: Sequence[Message] = ()
    done: bool = True
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)
    conversation: Sequence[Message] | None = None


class EpisodeFailed(Exception):
    """An episode cannot go on. ``ended`` says why in one word, the text in a sentence."""

    def __init__(self, ended: Ended, text: str):
        super().__init__(text)
        self.ended: Ended = ended


@dataclass(frozen=True)
class Limits:
    """Most turns of an episode, and most tokens, read and sampled together. None: no limit."""

    turns: int | None = None
    tokens: int | None = None


ONE_TURN = Limits(1)


class Episode(Protocol):
    """One rollout's side of the conversation. One that has a method ``close`` is closed when it has ended."""

    def observe(self) -> Observation:
        """Return the prompt. All episodes of a group begin alike: they are started with the same seed."""
        ...

    def step(self, action: Action) -> Step:
        """Take the policy's action; in order, one at a time."""
        ...


class Environment(Protocol):
    """What the policy acts in."""

    ranges: Mapping[str, Range]
    """Ranges of the reward (as ``reward``) and of metrics, where they are known."""
    exact: bool
    """Whether all that an episode answers is a function of problem, seed and actions, so that a run which is resumed
    equals one that was not interrupted."""

    def problems(self, split: str) -> Sequence[Problem]:
        """Return the problems of ``train``, or of a held-out set by its name."""
        ...

    def start(self, problem: Problem, seed: int) -> Episode:
        """Begin an episode. All its randomness comes from ``seed``."""
        ...

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """Return the rewards of episodes, in order; called once, after the last step of each."""
        ...
