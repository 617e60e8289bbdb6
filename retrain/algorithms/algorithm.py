"""Algorithms: lists of credit steps that assign advantages, masks and denominators to graded rollouts.

Credit steps compute in padded tables of rollouts. A policy trains on samples, which are flat token sequences.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice, pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import (
    MAX_STALENESS,
    CreditedBatch,
    CreditedGroup,
    CreditedRollout,
    Group,
    Rollout,
    Sample,
    Scores,
    Support,
    Turn,
    Want,
)
from retrain.types.rollouts import split_sequences


@dataclass(frozen=True)
class StepContext:
    """Inputs of a credit step besides the batch: the training step, and the ``scores`` of all rollouts in order."""

    step: int
    scores: Scores


class CreditStep(Protocol):
    @property
    def requires(self) -> frozenset[Want]:
        return frozenset()

    def measure(self, scores: Scores) -> Mapping[str, float]:
        """Return metrics of the scores, recorded even if all groups are too stale to train."""
        return {}

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        """Return a new batch; the input, which has at least one group, is not modified. Raises RunFailed to end the
        run."""
        ...


class TokenCreditStep(CreditStep, Protocol):
    """A credit step over the rollouts that have an advantage; a batch without any is returned unchanged."""

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        rated = batch.rated
        return self.apply_to(batch, rated, context) if rated else batch

    def apply_to(self, batch: CreditedBatch, rated: Sequence[CreditedRollout], context: StepContext) -> CreditedBatch:
        """Return a new batch; ``rated`` are its rollouts with an advantage, at least one."""
        ...


@runtime_checkable
class StatefulStep(Protocol):
    """A credit step with state between batches, which checkpoints store under ``name`` as strict JSON."""

    name: str

    def state(self) -> dict[str, object]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Algorithm:
    """The credit steps of one run, in order. ``retrain.algorithms.build_algorithm`` makes it from a configuration.

    ``mark_planning`` marks planning tokens of groups that are too stale to train; these groups get no credit.
    """

    def __init__(self, steps: Sequence[CreditStep], mark_planning: Callable[[CreditedBatch], CreditedBatch]):
        self.steps, self._mark_planning = tuple(steps), mark_planning
        self.requires: frozenset[Want] = frozenset().union(*(step.requires for step in self.steps))

    def credit(self, batch: CreditedBatch, scores: Scores, step: int) -> CreditedBatch:
        # Before any step can discard a group: these metrics describe all rollouts that were sampled.
        for credit_step in self.steps:
            batch = batch.with_metrics(credit_step.measure(scores))
        if not batch.groups:  # all of them are too stale to train
            return batch
        context = StepContext(step, scores)
        for credit_step in self.steps:
            batch = credit_step.apply(batch, context)
        return batch

    def with_stale_groups(self, batch: CreditedBatch, groups: Sequence[CreditedGroup]) -> CreditedBatch:
        """Return the batch with all ``groups`` of the step in order, including those that are too stale to train."""
        stale = CreditedBatch(tuple(group for group in groups if group.discarded == MAX_STALENESS))
        if not stale.groups:
            return batch
        marked, credited = iter(self._mark_planning(stale).groups), iter(batch.groups)
        merged = (next(marked if group.discarded == MAX_STALENESS else credited) for group in groups)
        return replace(batch, groups=tuple(merged))

    def state(self) -> dict[str, dict[str, object]]:
        """Return the state of all steps as strict JSON; only ``credit`` changes it."""
        return {step.name: step.state() for step in self._stateful}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state()``, possibly of another algorithm; steps that it does not name keep their state."""
        for step in self._stateful:
            if step.name in state:
                step.restore(state[step.name])

    @property
    def _stateful(self) -> list[StatefulStep]:
        return [step for step in self.steps if isinstance(step, StatefulStep)]


def pad(arrays: Sequence[np.ndarray], dtype: type = np.float64) -> torch.Tensor:
    """Return rows of different lengths as one table [B, T], 0 beyond each row's end."""
    table_BT = np.zeros((len(arrays), max(map(len, arrays))), dtype=dtype)
    for row_T, array in zip(table_BT, arrays, strict=True):
        row_T[: len(array)] = array
    return torch.from_numpy(table_BT)


def pad_if_all(arrays: Sequence[np.ndarray | None], dtype: type = np.float64) -> torch.Tensor | None:
    rows = [array for array in arrays if array is not None]
    return pad(rows, dtype) if len(rows) == len(arrays) else None


def token_mask(rows: Sequence[Rollout | np.ndarray]) -> Mask_BT:
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def with_rows(
    batch: CreditedBatch, rollouts: Sequence[CreditedRollout], **tables_BT: Floats_BT | Mask_BT
) -> CreditedBatch:
    """Return the batch with new fields of ``rollouts``: the argument ``name=table_BT`` sets the field ``name`` of
    rollout b to row b of the table, without padding."""
    arrays = {name: table_BT.numpy() for name, table_BT in tables_BT.items()}
    changes = [
        {name: rows_BT[row][: len(rollout)] for name, rows_BT in arrays.items()} for row, rollout in enumerate(rollouts)
    ]
    return batch.with_fields(rollouts, changes)


def pad_field(rollouts: Sequence[CreditedRollout], name: str, dtype: type = np.float64) -> torch.Tensor:
    return pad([getattr(rollout, name) for rollout in rollouts], dtype)


def discard_by_tokens(batch: CreditedBatch) -> CreditedBatch:
    """Return the batch in which exactly the groups whose token advantages are all 0 are discarded; a group without
    token advantages keeps its ``discarded``. For steps that replace the advantages of all tokens."""
    reasons = []
    for group in batch.groups:
        rows = [rollout.token_advantages_T for rollout in group.rollouts if rollout.token_advantages_T is not None]
        has_signal = any(row_T.any() for row_T in rows)  # without credited rollouts the reason stays
        reasons.append(group.discarded if not rows else None if has_signal else "zero_advantage")
    return batch.with_discarded(reasons)


def samples_of_rollout(rollout: Rollout) -> list[Sample]:
    """Return the rollout's token sequences as the policy saw them, without tokenising again.

    There is one sample, and one more for each time that the conversation was rewritten. There is none if the policy
    never acted. Advantages and loss masks are 0.
    """
    return [_flatten(turns) for turns in split_sequences(rollout.turns)]


def training_samples(rollout: CreditedRollout) -> list[Sample]:
    """Return the samples of a rollout with its credit; without a reward no token trains."""
    sequences = zip(split_sequences(rollout.turns), sequence_slices(rollout), strict=True)
    return [_with_credit(_flatten(turns), rollout, tokens) for turns, tokens in sequences]


def scores_by_rollout(scores: Scores, groups: Sequence[Group]) -> Scores:
    """Return the scores of ``samples_of(groups)`` with one array for each rollout instead of each sample."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_sample = {kind.name: getattr(scores, kind.name) for kind in fields(scores)}
    requested = {kind: rows for kind, rows in by_sample.items() if rows is not None}
    return Scores(**{kind: join_by_rollout(rows, rollouts) for kind, rows in requested.items()})


def join_by_rollout(rows_by_sample: Iterable[np.ndarray], rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Join the arrays [T] of all samples, in order, to one array for each rollout."""
    rows = iter(rows_by_sample)
    # The empty array stands in for a rollout in which the policy never acted; concatenate() of nothing raises.
    return [np.concatenate([np.zeros(0), *islice(rows, rollout.sequences)]) for rollout in rollouts]


def sequence_slices(rollout: Rollout) -> list[slice]:
    """Return, for each sample of the rollout, the slice of its tokens among the rollout's sampled tokens [T]."""
    lengths = [sum(len(turn.action) for turn in turns) for turns in split_sequences(rollout.turns)]
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _flatten(turns: Sequence[Turn]) -> Sample:
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
        # Observation tokens keep version −1: no policy sampled them.
        sample.versions[begin:at] = turn.action.policy_version
    return sample


def _with_credit(sample: Sample, rollout: CreditedRollout, tokens: slice) -> Sample:
    def placed(values_T: np.ndarray | None) -> np.ndarray | None:
        if values_T is None:
            return None
        values = np.zeros(len(sample))
        values[sample.action_mask] = values_T[tokens]
        return values

    loss_mask = sample.loss_mask
    if rollout.is_credited:
        loss_mask = sample.action_mask.copy()
        if rollout.loss_mask_T is not None:
            loss_mask[sample.action_mask] = rollout.loss_mask_T[tokens]
    advantages = placed(rollout.token_advantages_T)
    return replace(
        sample,
        advantages=sample.advantages if advantages is None else advantages,
        loss_mask=loss_mask,
        old_logprobs=placed(rollout.old_logprobs_T),
        policy_weights=placed(rollout.policy_weights_T),
        values=placed(rollout.values_T),
        value_targets=placed(rollout.value_targets_T),
        teacher_prompt=rollout.teacher_prompt,
    )


def _joined_support(parts: Sequence[Support | None]) -> Support | None:
    supports = [part for part in parts if part is not None]
    if len(supports) < len(parts) or len(supports) < 2:
        return supports[0] if len(supports) == len(parts) else None
    # Every part's offsets begin with 0, which only the first one keeps.
    starts = np.cumsum([0, *(len(part.ids) for part in supports)])
    offsets = [part.offsets[bool(i) :] + start for i, (part, start) in enumerate(zip(supports, starts, strict=False))]
    return Support(np.concatenate([part.ids for part in supports]), np.concatenate(offsets))


def samples_of(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for rollout in group.rollouts for sample in samples_of_rollout(rollout)]
