"""What ``retrain status DIR --watch --json`` prints: one object in a line for each thing that has happened."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True, kw_only=True)
class PlanEvent(Record):
    """Runs that have been seen for the first time."""

    event: str = "plan"
    """`plan`."""
    runs: list[str]
    """Their run ids."""


@dataclass(frozen=True, kw_only=True)
class WorkerEvent(Record):
    """A worker has taken a run, where there are several workers."""

    event: str = "worker"
    """`worker`."""
    run: str
    """The run."""
    worker: str
    """What a person calls the worker, as in `1 gpu:0`."""


@dataclass(frozen=True, kw_only=True)
class StartEvent(Record):
    """A run trains."""

    event: str = "start"
    """`start`."""
    run: str
    """The run."""
    label: str
    """Label of its condition."""
    seed: int
    """Its seed."""
    step: int
    """The step at which it begins; above 0 when it was resumed."""
    max_steps: int
    """Steps planned."""


@dataclass(frozen=True, kw_only=True)
class StepEvent(Record):
    """A step was recorded."""

    event: str = "step"
    """`step`."""
    run: str
    """The run."""
    step: int
    """The step, from 0."""
    row: Row
    """Its row of `metrics.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Record):
    """A held-out evaluation was recorded."""

    event: str = "eval"
    """`eval`."""
    run: str
    """The run."""
    name: str
    """The held-out set."""
    row: Row
    """Its row of `evals.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class EndEvent(Record):
    """A run has ended."""

    event: str = "end"
    """`end`."""
    run: str
    """The run."""
    status: str
    """`done`, `failed`, `interrupted` or `stopped`."""
    reason: str | None
    """Why."""


@dataclass(frozen=True, kw_only=True)
class MessageEvent(Record):
    """A line for the reader."""

    event: str = "message"
    """`message`."""
    level: str
    """`info`, `warning` or `error`."""
    text: str
    """The line."""


EVENTS = (PlanEvent, WorkerEvent, StartEvent, StepEvent, EvaluationEvent, EndEvent, MessageEvent)
