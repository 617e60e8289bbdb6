"""An algorithm: the list of credit steps that turn graded rollouts into what each token is trained with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from retrain.types import MAX_STALENESS, CreditedBatch, CreditedGroup, CreditedRollout, Scores, Want


@dataclass(frozen=True)
class StepContext:
    """The training step, and the ``scores`` of all rollouts in order, which a credit step may read beside the batch."""

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

    def state(self) -> dict[str, dict[str, object]]:
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
