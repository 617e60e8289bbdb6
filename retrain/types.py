"""What flows through the house: Problem → Prompt → Completion → Group → StepRecord.

The letters in names of arrays, and in their shapes, are those of ``DIMENSIONS``: ``logprobs_T``, ``mask_B_T``. Arrays
are numpy on the host; tensors live only inside ``policy``, ``engines`` and ``maths``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

DIMENSIONS = {
    "P": "prompts",
    "N": "completions of one group; texts",
    "B": "rows of a padded batch, one completion each",
    "T": "tokens of a completion",
    "V": "vocabulary",
    "D": "width of a vector",
    "S": "replicates: seeds, problems, pairs of runs",
    "r": "rank of an adapter",
    "k": "ranks that are kept of it",
    "in": "inputs of a linear layer",
    "out": "outputs of a linear layer",
}
"""What each letter counts, everywhere. A 1 is an axis of one entry."""

Message = Mapping[str, str]
"""One chat turn: ``{"role": "user", "content": "…"}``."""

StopReason = Literal["stop", "length"]


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
    """The tokens that each token of a completion was drawn among when sampling is truncated (top-p, top-k, min-p).

    Token t was drawn among ``ids[offsets[t] : offsets[t + 1]]`` (int32), itself one of them; ``offsets`` is int64
    [T + 1].
    """

    ids: np.ndarray
    offsets: np.ndarray


@dataclass
class Completion:
    """One sampled answer.

    ``token_ids`` includes the end token when ``stop_reason == "stop"``. ``logprobs_T`` and ``entropy_T`` are nats
    of the very distribution that was sampled from (temperature applied, over ``support`` or else the full vocabulary);
    ``entropy_T`` is None for engines that cannot give it. ``support`` is None when sampling was not truncated.
    """

    token_ids: list[int]
    text: str
    logprobs_T: np.ndarray
    entropy_T: np.ndarray | None
    stop_reason: StopReason
    support: Support | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class RewardResult:
    """What a reward says of one completion.

    ``total_reward`` is None when grading failed (the reason stands in ``error``). ``components`` holds each
    weighted part by name before weighting, ``sample_metrics`` any further numbers a reward wants recorded,
    None where this completion has none.
    ``correct``: None lets the caller use ``total_reward > 0.5``. ``format_ok``: None means "no format is defined".
    """

    total_reward: float | None
    sample_metrics: dict[str, float | None] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    components: dict[str, float | None] = field(default_factory=dict)
    correct: bool | None = None
    format_ok: bool | None = None
    error: str | None = None

    @property
    def is_correct(self) -> bool:
        """``correct`` where the reward said it, else a total above one half."""
        if self.correct is not None:
            return self.correct
        return self.total_reward is not None and self.total_reward > 0.5


@dataclass
class Group:
    """The N completions of one prompt, graded; ``advantages_N`` is NaN where no reward exists.

    ``discarded`` is None for a group that trains, else the reason: ``zero_advantage`` or ``no_reward``.
    """

    prompt: Prompt
    completions: list[Completion]
    rewards: list[RewardResult]
    advantages_N: np.ndarray
    discarded: str | None = None
    planning: list[np.ndarray] | None = None
    """Per completion a bool array [T]: which tokens are planning tokens."""
    token_advantages: list[np.ndarray | None] | None = None
    """Per completion the advantage of each token [T] after credit assignment; None without a reward."""

    @property
    def rewards_N(self) -> np.ndarray:
        """Total rewards, float64 [N], NaN where grading failed."""
        return np.array([np.nan if r.total_reward is None else r.total_reward for r in self.rewards], dtype=np.float64)


@dataclass
class EvalRecord:
    """One held-out evaluation: every group with its samples (``advantages_N`` all NaN).

    ``step`` counts the updates done; ``temperature``, ``samples`` per problem, ``max_tokens``, ``top_p``, ``top_k`` and
    ``min_p`` are how it sampled.
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


@dataclass
class StepRecord:
    """Everything known about one optimizer step of one run; the recorder makes all metrics from it.

    ``groups`` are all sampled groups, before any filtering. ``update`` holds the policy's numbers of this step
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


def flatten(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Every completion of the groups in order, as (group, index within it)."""
    return [(group, i) for group in groups for i in range(len(group.completions))]
