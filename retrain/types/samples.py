"""Results of scoring, credit assignment and masking, the token sequences to train on, and the records of steps and
evaluations from which metrics are computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np

from retrain.types.rollouts import Group, Rollout, Support

MAX_STALENESS = "max_async"  # Reason for discarding a group that exceeds the allowed staleness


@dataclass(frozen=True)
class Denominators:
    """Divisors of the loss of an optimizer step, which count *all* rollouts with a reward, trained or not.

    The counted tokens of a sequence are those of its loss mask; with ``all_tokens``, all action tokens; with
    ``kept_tokens``, those of the loss mask that were not rejected. ``action_tokens``: number of action tokens, by which
    a critic's loss is divided.
    """

    tokens: int
    sequences: int
    all_tokens: bool = False
    action_tokens: int = 0
    kept_tokens: bool = False


@dataclass(frozen=True, eq=False)
class CreditedRollout(Rollout):
    """A rollout with its credit.

    Arrays [T] have one entry for each sampled token of all turns. A rollout of two turns with 3 and 2 sampled tokens
    and an advantage of 0.5 has ``token_advantages_T`` [0.5, 0.5, 0.5, 0.5, 0.5] and ``loss_mask_T`` all true; with turn
    credit, ``turn_advantages`` (1.0, -0.25) and ``token_advantages_T`` [1.0, 1.0, 1.0, -0.25, -0.25].
    """

    staleness: int = 0  # Staleness of its oldest token, in policy versions
    # Token ids of the teacher's prompt; () for the rollout's own prompt, None without teacher
    teacher_prompt: tuple[int, ...] | None = None
    advantage: float = math.nan  # NaN without a reward, and before credit assignment
    turn_advantages: tuple[float, ...] | None = None  # One per turn, with turn credit
    planning_T: np.ndarray | None = None  # bool [T]: planning tokens
    uncertainty_T: np.ndarray | None = None  # float64 [T], nats (predictive variance: no unit)
    pooled_uncertainty_T: np.ndarray | None = None  # float64 [T]: after SEPA pooling
    token_advantages_T: np.ndarray | None = None  # float64 [T]; None without a reward
    loss_mask_T: np.ndarray | None = None  # bool [T]: tokens that train; None for all of them
    policy_weights_T: np.ndarray | None = None  # float64 [T]: factors of policy loss (0: rejected); None: all 1
    values_T: np.ndarray | None = None  # float64 [T]: the critic's value before each token
    value_targets_T: np.ndarray | None = None  # float64 [T]
    # Trainer's log-probabilities [T]: before the first of several updates (float64), or, after a single update, those
    # of its forward pass (float32)
    old_logprobs_T: np.ndarray | None = None
    counted_tokens: int | None = None  # Its tokens in the loss's denominator; None: all
    counted_sequences: int | None = None  # Its sequences in the loss's denominator; None: all

    @property
    def has_reward(self) -> bool:
        return self.reward.total_reward is not None

    @property
    def is_credited(self) -> bool:
        return self.token_advantages_T is not None


@dataclass(frozen=True, eq=False)
class CreditedGroup(Group):
    """A group whose rollouts have credit.

    ``discarded`` is None for a group that trains, else the reason: ``zero_advantage``, ``no_reward`` or
    ``MAX_STALENESS``.
    """

    rollouts: tuple[CreditedRollout, ...]
    discarded: str | None = None

    @classmethod
    def of(cls, group: Group, staleness: Sequence[int] | None = None, discarded: str | None = None) -> CreditedGroup:
        """Return ``group`` as a group that has no credit yet. ``staleness``: of each rollout; None: all 0."""
        behind = staleness or [0] * len(group.rollouts)
        rollouts = [
            CreditedRollout(one.prompt, one.turns, one.reward, one.ended, staleness=versions)
            for one, versions in zip(group.rollouts, behind, strict=True)
        ]
        return cls(group.prompt, tuple(rollouts), discarded)


@dataclass(frozen=True, eq=False)
class CreditedBatch:
    """The groups of one step with their credit, the denominators of its loss, and numbers for its metrics row.

    Every credit step returns a new batch; the order of groups and rollouts never changes.
    """

    groups: tuple[CreditedGroup, ...]
    denominators: Denominators = Denominators(0, 0)
    metrics: Mapping[str, object] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[CreditedRollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def rated(self) -> list[CreditedRollout]:
        """Return the rollouts that have an advantage."""
        return [rollout for rollout in self.rollouts if math.isfinite(rollout.advantage)]

    @property
    def trained(self) -> list[CreditedRollout]:
        kept = [group for group in self.groups if group.discarded is None]
        return [rollout for group in kept for rollout in group.rollouts if rollout.is_credited]

    def with_rollouts(self, rollouts: Iterable[CreditedRollout]) -> CreditedBatch:
        """Return the batch with all its rollouts replaced by as many others, in order."""
        parts = iter(rollouts)
        groups = [replace(group, rollouts=tuple(islice(parts, len(group.rollouts)))) for group in self.groups]
        return replace(self, groups=tuple(groups))

    def with_fields(
        self, rollouts: Sequence[CreditedRollout], changes: Iterable[Mapping[str, object]]
    ) -> CreditedBatch:
        """Return the batch with changed ``rollouts``. ``changes``: new values by field name, for each of them."""
        # Rollouts hash by identity (eq=False): two with equal tokens are different keys.
        changed = {rollout: replace(rollout, **change) for rollout, change in zip(rollouts, changes, strict=True)}
        return self.with_rollouts(changed.get(rollout, rollout) for rollout in self.rollouts)

    def with_discarded(self, reasons: Iterable[str | None]) -> CreditedBatch:
        groups = [replace(group, discarded=reason) for group, reason in zip(self.groups, reasons, strict=True)]
        return replace(self, groups=tuple(groups))

    def with_metrics(self, metrics: Mapping[str, object]) -> CreditedBatch:
        return replace(self, metrics={**self.metrics, **metrics})


@dataclass
class EvalRecord:
    """One evaluation on the held-out set ``name``, with one group per problem.

    ``step``: number of updates done. ``samples``: completions per problem. ``temperature``, ``max_tokens``, ``top_p``,
    ``top_k`` and ``min_p``: sampling settings. ``error``: exception of the environment or grader, because of which
    groups are missing.
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
    """One optimizer step of one run, from which the recorder computes all metrics.

    ``groups``: all groups of the batch before filtering. ``dropped``: groups that dynamic sampling replaced; they count
    only in metrics of all sampled completions. ``update``: metrics of the update by catalogue key (loss, val/ratio, …).
    ``state``: metrics of controllers (sepa_lambda, …). ``spans``: (name, start, end) of the step's parts, in seconds
    since the epoch; names as in ``time/<name>``.
    """

    step: int
    groups: Sequence[CreditedGroup]
    update: Mapping[str, Any]
    state: Mapping[str, object]
    spans: list[tuple[str, float, float]]
    step_start: float
    step_end: float
    dropped: Sequence[Group] = ()


@dataclass(frozen=True, eq=False)
class Sample:
    """A sequence of tokens to train on, with one entry [L] per token read or sampled.

    A rollout of two turns that read (1, 2), sampled (10, 11), read (5) and sampled (12), with an advantage of 0.5:

    - ``token_ids`` 1 2 10 11 5 12 (int64)
    - ``action_mask`` 0 0 1 1 0 1 (bool): the sampled tokens; all float arrays are 0 elsewhere
    - ``loss_mask`` 0 0 1 1 0 1 (bool): the sampled tokens that train
    - ``logprobs`` 0 0 −1.2 −0.3 0 −2.0 (float64, nats): in the distribution that the token was sampled from
    - ``versions`` −1 −1 3 3 −1 3 (int64): of the weights that sampled the token; −1 if it was read
    - ``advantages`` 0 0 0.5 0.5 0 0.5 (float64)

    ``support``: candidates of the sampled tokens, in order; None if sampling was not truncated. ``old_logprobs``: the
    trainer's, before the first of several updates. ``values`` and ``value_targets``: the critic's. ``policy_weights``:
    factors of the policy loss (0: rejected). ``teacher_prompt``: as in ``CreditedRollout``. Each is None if unused.
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
    teacher_prompt: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def prefix(self) -> int:
        """Return the number of tokens before the first action: the prompt, which samples of a group share."""
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


class Want(StrEnum):
    """Scores of sampled tokens. ``Policy.score`` computes all but ``ENTROPY``, which only terms of the loss need, and
    ``TEACHER``."""

    LOGPROBS = "logprobs"
    ENTROPY = "entropy"
    VALUES = "values"
    REFERENCE = "reference"
    TEACHER = "teacher"


@dataclass(frozen=True)
class Scores:
    """Arrays over the action tokens [T], one per sample or per rollout; None for scores that were not requested.

    ``logprobs`` (nats) are the policy's, ``values`` the critic's. ``reference`` and ``teacher`` are
    log-probabilities by the frozen base and by the teacher, whose array is empty for a rollout that it does not score.
    """

    logprobs: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    reference: list[np.ndarray] | None = None
    teacher: list[np.ndarray] | None = None


@dataclass(frozen=True)
class StepBatch:
    """The samples of one optimizer step that train; ``denominators`` also count rollouts that do not train.

    ``step`` and ``update`` (within the step) count from 0. ``stream``: prefix of the run's random streams. ``probe``:
    if no sample trains, a few rollouts without advantages, on which sampler and trainer are compared.
    ``keep_logprobs``: return the trainer's log-probabilities of the sampled tokens.
    """

    samples: Sequence[Sample]
    denominators: Denominators
    step: int
    stream: tuple[int | str, ...]
    probe: Sequence[Sample] = ()
    update: int = 0
    keep_logprobs: bool = False


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of one optimizer step. ``trainer_logprobs``: for a batch with ``keep_logprobs``, the trainer's
    log-probabilities [T] before the step, one array per sample; None for a sample that needed no forward pass."""

    metrics: Mapping[str, Any]
    trainer_logprobs: Sequence[np.ndarray | None] = ()
