"""Results of sampling and grading, never changed afterwards: Problem → Prompt → SampleRequest → Rollout (turns) →
Group.

The end of an array's name is its shape: ``advantages_BT`` is [rows of a batch, tokens], see
``retrain.maths.shapes.DIMENSIONS``. Arrays are numpy on the host; tensors live only in ``policy``, ``engines``,
``algorithms`` and ``maths``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

Message = Mapping[str, str]  # One chat turn: `{"role": "user", "content": "…"}`
StopReason = Literal["stop", "length"]

# Reason for an episode's end: the environment ended it; the limit of turns or tokens; the environment raised an error,
# timed out, ended its process, or sent too long an answer
Ended = Literal["done", "max_turns", "max_tokens", "raised", "timeout", "died", "flooded"]

# Maximum number of problems in a split of a user's function or environment, whose generator may be endless
MAX_PROBLEMS = 1_000_000


@dataclass(frozen=True)
class Problem:
    id: str
    prompt: str | tuple[Message, ...]
    answer: str
    tags: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """A problem rendered through the chat template and tokenised."""

    problem: Problem
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()  # Chat messages of ``text``, system prompt and template included


@dataclass(frozen=True)
class PolicyRef:
    """Reference to one version of a run's weights; ``version`` counts the changes of the weights."""

    run_id: str
    version: int


@dataclass(frozen=True)
class SampleRequest:
    """Request to sample ``samples`` completions of one prompt with the weights that ``policy`` names.

    ``stream`` names the random stream of the group (``retrain.rng``). Sample k uses the stream ``(*stream, k)``, so
    that its tokens do not depend on the other requests of the batch. ``top_p``, ``top_k`` and ``min_p`` truncate the
    distribution (``engines.step``).
    """

    policy: PolicyRef
    prompt_ids: tuple[int, ...]
    samples: int
    max_tokens: int
    temperature: float
    stream: tuple[int | str, ...]
    top_p: float = 1.0
    top_k: int = 0  # 0 for no limit
    min_p: float = 0.0
    # One name per sample. A later request with this name may continue the sequence, so that the engine may cache it
    # until ``forget_sequences``
    sequences: tuple[tuple[int | str, ...], ...] = ()
    streams: tuple[tuple[int | str, ...], ...] = ()  # Stream of each sample, if not ``(*stream, k)``
    # Number of completion tokens at the end of ``prompt_ids``; their random numbers are skipped in each stream
    drawn: int = 0


@dataclass(frozen=True)
class Support:
    """Tokens among which each token was sampled, under truncated sampling (top-p, top-k, min-p).

    Token t was sampled among ``ids[offsets[t] : offsets[t + 1]]`` (int32); ``offsets``: int64 [T + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True, eq=False)
class Action:
    """The tokens that the policy sampled in one turn.

    ``token_ids`` includes the end token if ``stop_reason == "stop"``. ``logprobs_T`` and ``entropy_T`` (nats) belong to
    the distribution that was sampled from: after temperature, over ``support`` or else the full vocabulary.
    ``entropy_T`` is None if the engine does not return it; ``support`` is None if sampling was not truncated.
    ``policy_version`` is the version of the weights that sampled.
    """

    token_ids: list[int]
    text: str
    logprobs_T: np.ndarray
    entropy_T: np.ndarray | None
    stop_reason: StopReason
    support: Support | None = None
    policy_version: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Turn:
    """An observation and the policy's ``action`` on it. ``observation_ids``: the observation as tokens, in the first
    turn the prompt; ``messages``: the same as chat messages. ``fresh``: the conversation was rewritten, and
    ``observation_ids`` is all of it. ``reward``: the environment's reward for this turn, None if it rewards only
    episodes. ``metrics`` and ``logs``: numbers and texts that the environment reports about the turn."""

    observation_ids: tuple[int, ...]
    action: Action
    messages: tuple[Message, ...] = ()
    fresh: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RewardResult:
    """The grade of one rollout.

    ``total_reward`` is None if grading failed, for the reason in ``error``. ``components``: parts of the reward by
    name, before weighting. ``sample_metrics``: other numbers to record, None if this completion has no value.
    ``correct`` and ``format_ok``: if None, ``with_correctness`` decides. ``audit_error``: why there is no audit score.
    ``logs``: texts to record with the rollout, such as what a program printed.
    """

    total_reward: float | None
    sample_metrics: dict[str, float | None] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    components: dict[str, float | None] = field(default_factory=dict)
    correct: bool | None = None
    format_ok: bool | None = None
    error: str | None = None
    audit_error: str | None = None
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def is_correct(self) -> bool:
        """Return ``correct``; if it is None, what ``with_correctness`` decides with the default threshold."""
        return bool(with_correctness(self).correct)


CORRECT_ABOVE = 0.5  # Default of `[reward] correct_above`


def with_correctness(
    reward: RewardResult, correct_above: float = CORRECT_ABOVE, correct_metric: str | None = None
) -> RewardResult:
    """Return the reward with ``correct`` and ``format_ok`` decided; no other function decides them.

    A field that the reward has set is kept. Otherwise ``correct`` is whether the component or metric ``correct_metric``
    (default ``correct``) is above 0.5 or, without such a value, whether the total is above ``correct_above``.
    ``format_ok`` is whether the component or metric ``format`` is above 0.5, None without such a value.
    """
    values = {**reward.sample_metrics, **reward.components}

    def flag(name: str) -> bool | None:
        value = values.get(name)
        return None if value is None or math.isnan(value) else value > 0.5

    correct = reward.correct if reward.correct is not None else flag(correct_metric or "correct")
    if correct is None:
        correct = reward.total_reward is not None and reward.total_reward > correct_above
    format_ok = reward.format_ok if reward.format_ok is not None else flag("format")
    return replace(reward, correct=correct, format_ok=format_ok)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One trajectory: its turns and its reward.

    A completion of a one-turn problem is a rollout with one turn; an episode that could not begin has no turns. Arrays
    ``_T`` have one entry per token of all actions, in order.
    """

    prompt: Prompt
    turns: tuple[Turn, ...]
    reward: RewardResult
    ended: Ended = "done"

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.action.token_ids]

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(turn.action.logprobs_T for turn in self.turns)])

    @property
    def entropy_T(self) -> np.ndarray | None:
        parts = [turn.action.entropy_T for turn in self.turns if turn.action.entropy_T is not None]
        return np.concatenate([np.zeros(0), *parts]) if len(parts) == len(self.turns) else None

    @property
    def text(self) -> str:
        return "\n".join(turn.action.text for turn in self.turns)

    @property
    def stop_reason(self) -> StopReason:
        return self.turns[-1].action.stop_reason if self.turns else "stop"

    @property
    def sequences(self) -> int:
        """Return the number of samples to train on: one, and one more per rewrite of the conversation."""
        return len(split_sequences(self.turns))

    @property
    def observation_tokens(self) -> int:
        """Return the number of tokens that the policy read without sampling them, the prompt included."""
        return sum(len(turn.observation_ids) for turn in self.turns)

    def __len__(self) -> int:
        return sum(len(turn.action) for turn in self.turns)


def split_sequences(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Split the turns before every turn in which the policy read a rewritten conversation (``fresh``)."""
    sequences: list[list[Turn]] = []
    for turn in turns:
        if turn.fresh or not sequences:
            sequences.append([])
        sequences[-1].append(turn)
    return sequences


@dataclass(frozen=True, eq=False)
class Group:
    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @property
    def rewards_N(self) -> np.ndarray:
        """Return the total rewards, float64 [N], NaN where grading failed."""
        totals = (rollout.reward.total_reward for rollout in self.rollouts)
        return np.array([math.nan if total is None else total for total in totals], dtype=np.float64)

    def without_support(self) -> Group:
        """Return the group without the ``support`` of its actions; the sampler's log-probabilities do not change."""

        def without(turn: Turn) -> Turn:
            return replace(turn, action=replace(turn.action, support=None))

        rollouts = (replace(each, turns=tuple(map(without, each.turns))) for each in self.rollouts)
        return replace(self, rollouts=tuple(rollouts))


def single_turn(prompt: Prompt, actions: Sequence[Action], rewards: Sequence[RewardResult]) -> Group:
    turns = [Turn(prompt.token_ids, action, prompt.messages) for action in actions]
    rollouts = [Rollout(prompt, (turn,), reward) for turn, reward in zip(turns, rewards, strict=True)]
    return Group(prompt, tuple(rollouts))


Completion = Action  # Alias of `Action` in the plug-in interface
