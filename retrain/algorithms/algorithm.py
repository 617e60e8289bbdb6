"""An algorithm: the list of credit steps that turn graded rollouts into what each token is trained with, and the padded
tables that the steps compute in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from retrain.maths.shapes import Floats_BT, Mask_BT
from retrain.types import MAX_STALENESS, CreditedBatch, CreditedGroup, CreditedRollout, Rollout, Scores, Want


@dataclass(frozen=True)
class StepContext:
    """What a credit step may read beside the batch: the training step, and the ``scores`` of all rollouts in order."""

    step: int
    scores: Scores


class CreditStep(Protocol):
    """One step of credit assignment."""

    @property
    def requires(self) -> frozenset[Want]:
        """Scores of the rollouts that it reads."""
        return frozenset()

    def measure(self, scores: Scores) -> Mapping[str, float]:
        """Return metrics of the scores alone, which are recorded also where all groups are too stale to train."""
        return {}

    def apply(self, batch: CreditedBatch, context: StepContext) -> CreditedBatch:
        """Return a new batch; the given one, which has at least one group, is not changed. Raises RunFailed when the
        run has to end."""
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
    """A credit step that remembers something from batch to batch, under ``name`` in every checkpoint."""

    name: str

    def state(self) -> dict[str, object]:
        """Return what it remembers, strict JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Algorithm:
    """The credit steps of one run, in order. ``retrain.algorithms.build_algorithm`` makes it from a configuration.

    ``mark_planning`` is applied to groups that are too stale to train, which get no credit.
    """

    def __init__(self, steps: Sequence[CreditStep], mark_planning: Callable[[CreditedBatch], CreditedBatch]):
        self.steps, self._mark_planning = tuple(steps), mark_planning
        self.requires: frozenset[Want] = frozenset().union(*(step.requires for step in self.steps))

    def credit(self, batch: CreditedBatch, scores: Scores, step: int) -> CreditedBatch:
        """Return the batch with advantages, masks, denominators and discarded groups."""
        for credit_step in self.steps:
            batch = batch.with_metrics(credit_step.measure(scores))
        if not batch.groups:  # all of them are too stale to train
            return batch
        context = StepContext(step, scores)
        for credit_step in self.steps:
            batch = credit_step.apply(batch, context)
        return batch

    def with_stale_groups(self, batch: CreditedBatch, groups: Sequence[CreditedGroup]) -> CreditedBatch:
        """Return the batch with all ``groups`` of the step in their order: those that are too stale to train stand
        between the credited ones."""
        stale = CreditedBatch(tuple(group for group in groups if group.discarded == MAX_STALENESS))
        if not stale.groups:
            return batch
        marked, credited = iter(self._mark_planning(stale).groups), iter(batch.groups)
        merged = (next(marked if group.discarded == MAX_STALENESS else credited) for group in groups)
        return replace(batch, groups=tuple(merged))

    def state(self) -> dict[str, object]:
        """Return what its steps remember, strict JSON; only ``credit`` changes it."""
        return {step.name: step.state() for step in self._stateful}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``, maybe of another algorithm: a step that it does not name starts anew."""
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
    """Return the padded table, or None where a row is missing."""
    rows = [array for array in arrays if array is not None]
    return pad(rows, dtype) if len(rows) == len(arrays) else None


def token_mask(rows: Sequence[Rollout | np.ndarray]) -> Mask_BT:
    """Return which entries of the padded table of these rollouts or arrays are not padding."""
    lengths = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths.max()))[None] < lengths[:, None]


def with_rows(
    batch: CreditedBatch, rollouts: Sequence[CreditedRollout], **tables_BT: Floats_BT | Mask_BT
) -> CreditedBatch:
    """Return the batch with a row of each table, without its padding, as the field of that name of each rollout."""
    arrays = {name: table_BT.numpy() for name, table_BT in tables_BT.items()}
    changes = [
        {name: rows_BT[row][: len(rollout)] for name, rows_BT in arrays.items()} for row, rollout in enumerate(rollouts)
    ]
    return batch.with_fields(rollouts, changes)


def pad_field(rollouts: Sequence[CreditedRollout], name: str, dtype: type = np.float64) -> torch.Tensor:
    """Return the field ``name``, an array [T] of every rollout, as a padded table [B, T]."""
    return pad([getattr(rollout, name) for rollout in rollouts], dtype)


def discard_by_tokens(batch: CreditedBatch) -> CreditedBatch:
    """Discard the groups in which no token has an advantage, and no others: for token credit that starts from the
    rewards, so that the episode advantage does not say which groups have signal."""
    reasons = []
    for group in batch.groups:
        rows = [rollout.token_advantages_T for rollout in group.rollouts if rollout.token_advantages_T is not None]
        has_signal = any(row_T.any() for row_T in rows)
        reasons.append(group.discarded if not rows else None if has_signal else "zero_advantage")
    return batch.with_discarded(reasons)
