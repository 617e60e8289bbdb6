"""The lines of ``retrain status DIR --watch --json``: one JSON object for each event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from retrain.records.schema.base import Record, Row


@dataclass(frozen=True)
class Event(Record):
    """One line, with the kind of event first."""

    event: ClassVar[str]

    def to_row(self) -> Row:
        return {"event": self.event, **super().to_row()}


@dataclass(frozen=True)
class RunEvent(Event):
    """An event of one run."""

    run: Annotated[str, "The run."]


@dataclass(frozen=True)
class PlanEvent(Event):
    """Runs that have been seen for the first time."""

    event = "plan"
    runs: Annotated[list[str], "Their run ids."]


@dataclass(frozen=True)
class WorkerEvent(RunEvent):
    """A worker has taken a run, where there are several workers."""

    event = "worker"
    worker: Annotated[str, "Name of the worker, such as `1 gpu:0`."]


@dataclass(frozen=True)
class StartEvent(RunEvent):
    """A run trains."""

    event = "start"
    label: Annotated[str, "Label of its condition."]
    seed: Annotated[int, "Its seed."]
    step: Annotated[int, "The step at which it begins; above 0 when it was resumed."]
    max_steps: Annotated[int, "Steps planned."]


@dataclass(frozen=True)
class StepEvent(RunEvent):
    """A step was recorded."""

    event = "step"
    step: Annotated[int, "The step, from 0."]
    row: Annotated[Row, "Its row of `metrics.jsonl`."]


@dataclass(frozen=True)
class EvaluationEvent(RunEvent):
    """A held-out evaluation was recorded."""

    event = "eval"
    name: Annotated[str, "The held-out set."]
    row: Annotated[Row, "Its row of `evals.jsonl`."]


@dataclass(frozen=True)
class EndEvent(RunEvent):
    """A run has ended."""

    event = "end"
    status: Annotated[str, "`done`, `failed`, `interrupted` or `stopped`."]
    reason: Annotated[str | None, "Why."]


@dataclass(frozen=True)
class MessageEvent(Event):
    """A line for the reader."""

    event = "message"
    level: Annotated[str, "`info`, `warning` or `error`."]
    text: Annotated[str, "The line."]


EVENTS = (PlanEvent, WorkerEvent, StartEvent, StepEvent, EvaluationEvent, EndEvent, MessageEvent)
