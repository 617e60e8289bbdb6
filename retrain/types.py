"""What flows through a run: Problem → Rollout (Turn, Turn, …) → Group → Sample → StepRecord.

The letters in names of arrays, and in their shapes, are those of ``DIMENSIONS``: ``advantages_BT`` is [rows of a batch,
tokens]. Arrays are numpy on the host; tensors live only inside ``policy``, ``engines``, ``algorithms`` and
``maths``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Message = Mapping[str, str]  # One chat turn: `{"role": "user", "content": "…"}`

StopReason = Literal["stop", "length"]

Ended = Literal["done", "max_turns", "max_tokens", "raised", "timeout", "died", "flooded"]
"""Why an episode is over: its environment says so; it has had its turns, or its tokens; or its environment raised an
error, took too long, ended its process, or answered without end."""

MAX_PROBLEMS = 1_000_000
"""Problems of one split that a function or environment of the user's may make; a generator may have no end."""

DIMENSIONS = {
    "P": "prompts; parts of a held-out set",
    "N": "rollouts of one group, or of a step; texts",
    "G": "groups of a step",
    "B": "rows of a padded batch, one rollout each; batches that are compared",
    "C": "conditions",
    "T": "sampled tokens, of one action or of a rollout's actions one after the other",
    "L": "all tokens of a sequence, what was read and what was sampled",
    "M": "sampled tokens of a micro-batch, one after the other",
    "R": "rows of a decode batch",
    "K": "columns of its cache; tokens kept by truncated sampling",
    "V": "vocabulary",
    "H": "hidden size",
    "D": "width of a vector",
    "S": "replicates: seeds, problems, pairs of runs; sequences of a packed row",
    "r": "rank of an adapter",
    "k": "ranks that are kept of it",
    "in": "inputs of a linear layer",
    "out": "outputs of a linear layer",
}
"""What each letter counts, everywhere. A 1 is an axis of one entry."""


@dataclass(frozen=True)
class Problem:
    """One task with its verifiable answer, as a data source yields it."""

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
    messages: tuple[Message, ...] = ()
    """The conversation that ``text`` was rendered from, system prompt and template included."""


@dataclass(frozen=True)
class Support:
    """The tokens that each token was sampled from when sampling is truncated (top-p, top-k, min-p).

    Token t was sampled from ``ids[offsets[t] : offsets[t + 1]]`` (int32), itself one of them; ``offsets`` is int64
    [T + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclass
class Action:
    """What the policy sampled in one turn.

    ``token_ids`` includes the end token when ``stop_reason == "stop"``. ``logprobs_T`` and ``entropy_T`` are nats
    of the very distribution that was sampled from (temperature applied, over ``support`` or else the full vocabulary);
    ``entropy_T`` is None for engines that cannot give it. ``support`` is None when sampling was not truncated.
    ``policy_version`` names the weights that sampled it.
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


@dataclass
class Turn:
    """One exchange: ``observation_ids`` are the tokens that the policy read since its last action (in the first turn
    the whole prompt), ``action`` what it sampled then. ``messages`` are the observation as chat messages.

    ``fresh``: the conversation was rewritten, so ``observation_ids`` are the whole of it as the policy read it anew.
    ``reward`` is what the environment gave this turn alone, None where it rewards whole episodes; ``metrics`` and
    ``logs`` are what it said of the turn.
    """

    observation_ids: tuple[int, ...]
    action: Action
    messages: tuple[Message, ...] = ()
    fresh: bool = False
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    logs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class RewardResult:
    """What a reward says of one rollout.

    ``total_reward`` is None when grading failed (``error`` holds the reason). ``components`` holds each weighted part
    by name before weighting, ``sample_metrics`` any further numbers that a reward wants recorded, None where this
    completion has none. ``correct`` and ``format_ok``: None leaves them to ``with_correctness``. ``audit_error`` is why
    an audit beside it has no score.
    """

    total_reward: float | None
    sample_metrics: dict[str, float | None] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    components: dict[str, float | None] = field(default_factory=dict)
    correct: bool | None = None
    format_ok: bool | None = None
    error: str | None = None
    audit_error: str | None = None

    @property
    def is_correct(self) -> bool:
        """Whether it counts as correct, by the default threshold where nothing has decided yet."""
        return bool(with_correctness(self).correct)


CORRECT_ABOVE = 0.5  # Default of `[reward] correct_above`


def with_correctness(
    reward: RewardResult, correct_above: float = CORRECT_ABOVE, correct_metric: str | None = None
) -> RewardResult:
    """Return the reward with ``correct`` and ``format_ok`` decided; nothing else decides them.

    ``correct`` is what the reward has set, else whether its component or metric ``correct_metric`` (default
    ``correct``) is above 0.5, else whether its total is above ``correct_above``. ``format_ok`` is what the reward has
    set, else whether its component or metric ``format`` is above 0.5, else None.
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


@dataclass(eq=False)
class Rollout:
    """One trajectory: its turns, what they were worth and, once credited, what each of its tokens trains with.

    A completion of a one-turn problem is a rollout with one turn; an episode that could not begin has none. Arrays over
    ``_T`` run over the tokens of all actions, one after the other.
    """

    prompt: Prompt
    turns: list[Turn]
    reward: RewardResult
    ended: Ended = "done"
    advantage: float = math.nan  # NaN where there is no reward, and before credit assignment
    turn_advantages: list[float] | None = None  # One per turn, where turns are credited one by one
    planning_T: np.ndarray | None = None  # Which tokens are planning tokens
    token_advantages_T: np.ndarray | None = None  # None without a reward
    loss_mask_T: np.ndarray | None = None  # Which tokens train; None is all of them
    old_logprobs_T: np.ndarray | None = None
    """The trainer's own log-probability of each, before the first of several updates."""
    policy_weights_T: np.ndarray | None = None
    """What the policy loss of each counts, 0 where it was rejected; None is 1 for all."""
    trainer_logprobs_T: np.ndarray | None = None
    """The trainer's own of a single update, as its own pass found it; None where the rollout had none."""
    values_T: np.ndarray | None = None  # Critic's value before each token, if there is a critic
    value_targets_T: np.ndarray | None = None  # Targets of the critic's values
    teacher_prompt: tuple[int, ...] | None = None
    """The prompt that its teacher reads in place of its own; () for the same one, None where nobody teaches it."""
    age: int = 0  # Staleness of the oldest token, in policy versions

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.action.token_ids]

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(turn.action.logprobs_T for turn in self.turns)])

    @property
    def entropy_T(self) -> np.ndarray | None:
        """The entropy of the distribution that each was sampled from; None where the engine gives none."""
        parts = [turn.action.entropy_T for turn in self.turns]
        known = [part for part in parts if part is not None]
        return np.concatenate([np.zeros(0), *known]) if len(known) == len(parts) else None

    @property
    def text(self) -> str:
        """The text of its actions, one after the other."""
        return "\n".join(turn.action.text for turn in self.turns)

    @property
    def stop_reason(self) -> StopReason:
        """How the last action ended; ``stop`` where there is none."""
        return self.turns[-1].action.stop_reason if self.turns else "stop"

    @property
    def sequences(self) -> int:
        """How many samples it trains as: one, and one more for every time that the conversation was rewritten."""
        return len(_sequences(self.turns))

    @property
    def observation_tokens(self) -> int:
        """Tokens that the policy read, the prompt included."""
        return sum(len(turn.observation_ids) for turn in self.turns)

    def __len__(self) -> int:
        return sum(len(turn.action) for turn in self.turns)


TOO_OLD = "max_async"  # Reason for discarding a group that exceeds the allowed staleness


@dataclass(eq=False)
class Group:
    """The rollouts of one prompt, which are compared with each other.

    ``discarded`` is None for a group that trains, else the reason: ``zero_advantage``, ``no_reward`` or ``TOO_OLD``.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    discarded: str | None = None

    @property
    def rewards_N(self) -> np.ndarray:
        """Total rewards, float64 [N], NaN where grading failed."""
        totals = (rollout.reward.total_reward for rollout in self.rollouts)
        return np.array([math.nan if total is None else total for total in totals], dtype=np.float64)

    @property
    def advantages_N(self) -> np.ndarray:
        """Advantages, float64 [N], NaN where there is none."""
        return np.array([rollout.advantage for rollout in self.rollouts], dtype=np.float64)


@dataclass
class Sample:
    """A rollout laid flat for training, one entry per token of the sequence [L].

    ``action_mask`` marks the sampled tokens; what the policy read has mask 0 and, in the float arrays, 0.
    ``loss_mask`` marks those of them that train. ``versions`` name the weights that sampled a token (−1: none did).
    ``support`` is that of the action tokens, one after the other; None when sampling was not truncated.
    ``old_logprobs`` are the trainer's own before the first of several updates, ``values`` and ``value_targets`` those
    of a critic, ``policy_weights`` what a token's policy loss counts; None where there is no such thing.
    ``teacher_prompt`` is as in ``Rollout``. ``trainer_logprobs`` [T], of the sampled tokens, are left here by
    the update that trains on it.
    """

    token_ids: np.ndarray
    action_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    loss_mask: np.ndarray
    support: Support | None = None
    old_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    value_targets: np.ndarray | None = None
    policy_weights: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    teacher_prompt: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prefix(self) -> int:
        """Tokens before the first action: what a group's samples have in common."""
        return int(self.action_mask.argmax())

    @classmethod
    def single_turn(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs_T: np.ndarray,
        advantages_T: np.ndarray,
        loss_mask_T: np.ndarray | None = None,
        support: Support | None = None,
    ) -> Sample:
        """One action after one prompt, with its log-probabilities and advantages token by token."""
        read, sampled = len(prompt_ids), len(token_ids)
        mask = np.ones(sampled, dtype=bool) if loss_mask_T is None else loss_mask_T
        return cls(
            token_ids=np.array([*prompt_ids, *token_ids], dtype=np.int64),
            action_mask=np.repeat([False, True], [read, sampled]),
            logprobs=np.concatenate([np.zeros(read), logprobs_T]),
            versions=np.repeat([-1, 0], [read, sampled]),
            advantages=np.concatenate([np.zeros(read), advantages_T]),
            loss_mask=np.concatenate([np.zeros(read, dtype=bool), mask]),
            support=support,
        )


def samples_of_rollout(rollout: Rollout) -> list[Sample]:
    """The rollout as the policy saw it, token for token; nothing is tokenised again.

    One sample, and one more for every time that the conversation was rewritten; none where the policy never acted.
    Tokens without an advantage (no reward, or before credit assignment) have 0 and do not train.
    """
    own = zip(_sequences(rollout.turns), sequence_slices(rollout), strict=True)
    return [_laid_flat(rollout, turns, own_T) for turns, own_T in own]


def sequence_slices(rollout: Rollout) -> list[slice]:
    """Which of the rollout's sampled tokens [T] each of its samples holds."""
    ends = np.cumsum([0, *(sum(len(turn.action) for turn in turns) for turns in _sequences(rollout.turns))]).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _sequences(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns cut where the policy read the whole conversation anew."""
    sequences: list[list[Turn]] = []
    for turn in turns:
        if turn.fresh or not sequences:
            sequences.append([])
        sequences[-1].append(turn)
    return sequences


def _laid_flat(rollout: Rollout, turns: Sequence[Turn], own_T: slice) -> Sample:
    """Turns of the rollout that follow each other; ``own_T`` are their tokens among all that were sampled in it."""
    length = sum(len(turn.observation_ids) + len(turn.action) for turn in turns)
    sample = Sample(
        token_ids=np.zeros(length, dtype=np.int64),
        action_mask=np.zeros(length, dtype=bool),
        logprobs=np.zeros(length),
        versions=np.full(length, -1, dtype=np.int64),
        advantages=np.zeros(length),
        loss_mask=np.zeros(length, dtype=bool),
        support=_joined_support([turn.action.support for turn in turns]),
    )
    at = 0
    for turn in turns:
        begin, count = at + len(turn.observation_ids), len(turn.action)
        sample.token_ids[at:begin] = turn.observation_ids
        at = begin + count
        sample.token_ids[begin:at] = turn.action.token_ids
        sample.action_mask[begin:at] = True
        sample.logprobs[begin:at] = turn.action.logprobs_T
        sample.versions[begin:at] = turn.action.policy_version
    if rollout.token_advantages_T is not None:
        sample.advantages[sample.action_mask] = rollout.token_advantages_T[own_T]
        sample.loss_mask[sample.action_mask] = True if rollout.loss_mask_T is None else rollout.loss_mask_T[own_T]
    sample.teacher_prompt = rollout.teacher_prompt
    if rollout.old_logprobs_T is not None:
        sample.old_logprobs = np.zeros(length)
        sample.old_logprobs[sample.action_mask] = rollout.old_logprobs_T[own_T]
    if rollout.policy_weights_T is not None:
        sample.policy_weights = np.zeros(length)
        sample.policy_weights[sample.action_mask] = rollout.policy_weights_T[own_T]
    if rollout.values_T is not None and rollout.value_targets_T is not None:
        sample.values, sample.value_targets = np.zeros(length), np.zeros(length)
        sample.values[sample.action_mask] = rollout.values_T[own_T]
        sample.value_targets[sample.action_mask] = rollout.value_targets_T[own_T]
    return sample


def _joined_support(parts: Sequence[Support | None]) -> Support | None:
    """The support of several actions as that of one; all of them have one, or none has."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len(known) < 2:
        return known[0] if len(known) == len(parts) else None
    starts = np.cumsum([0, *(len(part.ids) for part in known)])
    offsets = [part.offsets[bool(i) :] + start for i, (part, start) in enumerate(zip(known, starts, strict=False))]
    return Support(np.concatenate([part.ids for part in known]), np.concatenate(offsets))


def without_advantages(sample: Sample) -> Sample:
    """The sample with an advantage of 0 for every sampled token; all of them train."""
    return replace(sample, advantages=np.zeros(len(sample)), loss_mask=sample.action_mask)


def single_turn(prompt: Prompt, actions: Sequence[Action], rewards: Sequence[RewardResult]) -> Group:
    turns = [Turn(prompt.token_ids, action, prompt.messages) for action in actions]
    return Group(prompt, [Rollout(prompt, [turn], reward) for turn, reward in zip(turns, rewards, strict=True)])


Completion = Action  # Alias of `Action` in the plug-in interface


@dataclass
class EvalRecord:
    """One held-out evaluation: every group with its rollouts, none of which has an advantage.

    ``step`` counts the updates done; ``temperature``, ``samples`` per problem, ``max_tokens``, ``top_p``, ``top_k`` and
    ``min_p`` are how it sampled. With ``error``, what environment or grader raised, groups are missing.
    """

    name: str
    step: int
    groups: list[Group]
    temperature: float
    samples: int
    seconds: float
    max_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    error: Exception | None = None


@dataclass
class StepRecord:
    """One optimizer step of one run; the recorder makes all metrics from it.

    ``groups`` are all groups of the batch, before any filtering, ``dropped`` those that others were sampled in place
    of: they count in what the run has sampled, and nowhere else. ``update`` holds the policy's numbers of this step
    under their catalogue keys (loss, optim/grad_norm, val/ratio, …), ``state`` the controllers' (sepa_lambda, …),
    ``spans`` the wall-clock parts: (name, start, end) in seconds since the epoch, names as in ``time/<name>``.
    """

    step: int
    groups: list[Group]
    update: dict[str, Any]
    state: dict[str, Any]
    spans: list[tuple[str, float, float]]
    step_start: float
    step_end: float
    dropped: Sequence[Group] = ()
