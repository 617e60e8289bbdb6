"""Define the jobs that a campaign's controller sends to workers, and the events that they return.

Both have a JSON form, because a worker may be a process on another machine that sees the same directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

from retrain.config.runs import RunSpec
from retrain.device import MEMORY_SHARE, OWN_GPU
from retrain.environments.build import CompletionLengths
from retrain.records.observer import Observer
from retrain.records.schema.base import Row, Values
from retrain.training.inputs import CohortJob

PROGRAM = ("-m", "retrain.campaign.worker")


@dataclass(frozen=True)
class SqueezeJob:
    """Job that analyses and compresses the adapter of one finished run, in ``subfolder`` of the campaign's directory.
    Its result is sent as Facts: under ``squeeze`` if ``subfolder`` has that name, else under ``squeezes`` by label."""

    directory: Path
    folder: Path
    runs: Sequence[RunSpec]
    longest: CompletionLengths
    subfolder: str = "squeeze"


Job = CohortJob | SqueezeJob


@dataclass(frozen=True)
class JobStarted:
    """A worker has claimed the job. ``worker``: the worker's name in messages; ``runs``: the runs that it trains."""

    job: str
    worker: str
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tick:
    """Event that is sent while there is no other, so that the receiver can check a clock, a lease or a stop request."""


@dataclass(frozen=True)
class RunStarted:
    run_id: str
    step: int  # Above 0 when resumed
    max_steps: int


@dataclass(frozen=True)
class StepDone:
    run_id: str
    row: Row


@dataclass(frozen=True)
class EvaluationDone:
    run_id: str
    name: str
    row: Row


@dataclass(frozen=True)
class SealChanged:
    run_id: str
    seal: Row


@dataclass(frozen=True)
class RunEnded:
    """A run ended: ``status`` is "done", with everything saved, or "failed" for ``reason``."""

    run_id: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Facts:
    facts: Row


@dataclass(frozen=True)
class Message:
    text: str
    level: str = "info"  # info, warning or error


@dataclass(frozen=True)
class JobEnded:
    """Last event of a job. ``status``: "done" (each run has ended), "stopped" (as requested, all saved), "too_large"
    (only ``lanes`` of the runs fit into memory together), "changed" (``changes`` from the runs' records were not
    accepted) or "died" (the process is gone; its runs are at their last checkpoints). With "too_large" and "changed"
    nothing was trained. ``reason``: text for messages."""

    job: str = ""
    status: Literal["done", "stopped", "too_large", "changed", "died"] = "done"
    reason: str = ""
    lanes: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerFault:
    """Error that ended a worker during a job. ``error``: class name of the RetrainError; ``text``: its message."""

    error: str
    text: str


Event = (
    JobStarted | Tick | RunStarted | StepDone | SealChanged | EvaluationDone | RunEnded | Facts | Message | JobEnded
    | WorkerFault
)  # fmt: skip


def report(event: Event, observer: Observer, specs: Mapping[str, RunSpec]) -> None:
    match event:
        case RunStarted(run_id, step, max_steps):
            observer.run_started(specs[run_id], step, max_steps)
        case StepDone(run_id, row):
            observer.step(specs[run_id], row)
        case SealChanged(run_id, seal):
            observer.sealed(specs[run_id], seal)
        case EvaluationDone(run_id, name, row):
            observer.evaluated(specs[run_id], name, row)
        case RunEnded(run_id, status, reason):
            observer.run_finished(specs[run_id], status, reason)
        case JobStarted(_, worker, runs):
            for run_id in runs:
                observer.placed(specs[run_id], worker)
        case Facts(facts):
            observer.note(facts)
        case Message(text, level):
            observer.message(text, level)
        case JobEnded() | Tick() | WorkerFault():
            pass


class Handle(Protocol):
    id: str  # Value of ``JobEnded.job``

    def stop(self) -> None:
        """Request an end after the current step, with everything saved; does not wait."""


class JobRunner(Protocol):
    slots: int  # Number of jobs that run side by side; further ones wait

    def submit(self, job: Job) -> Handle: ...

    def events(self) -> Generator[Event, None, None]:
        """Yield events of the submitted jobs until all have ended, in order for each job. Jobs may be submitted
        meanwhile.

        Raises StorageError when no run can be written any more, another RetrainError for an unusable model, data source
        or plug-in. Closing the generator early cancels the jobs without saving.
        """
        ...


@dataclass(frozen=True)
class WorkerDevice:
    """Device of a worker. ``device`` is "cpu" or GPUs such as "gpu:1" and "gpu:2,3"; ``visible``: the value of
    ``CUDA_VISIBLE_DEVICES``; ``threads``: the worker's CPU cores; ``memory``: its share of the device's memory."""

    device: str
    threads: int
    visible: str = ""
    memory: float = 1.0

    @classmethod
    def of(cls, gpus: Sequence[tuple[str, str]], threads: int, memory: float) -> WorkerDevice:
        names = ",".join(name.removeprefix("gpu:") for name, _ in gpus)
        return cls(f"gpu:{names}", threads, ",".join(visible for _, visible in gpus), memory)

    @property
    def environment(self) -> dict[str, str]:
        # A number of threads that the user has set takes precedence
        own = {"OMP_NUM_THREADS": str(self.threads)} | dict(os.environ) | {MEMORY_SHARE: f"{self.memory:g}"}
        return own | {"CUDA_VISIBLE_DEVICES": self.visible, OWN_GPU: "1"} if self.visible else own


def command_of(program: Sequence[str], directory: Path, slot: int | str, device: str, *more: str) -> list[str]:
    # -P: modules of the working directory do not shadow installed ones, and child processes do not inherit the option.
    return [sys.executable, "-P", *program, str(directory), "--slot", str(slot), "--device", device, *more]


@dataclass(frozen=True)
class WorkerEnd:
    """End of a worker's process. ``reason`` completes "worker 1 …". ``excused``: the worker was preempted, lost its
    machine or ended in order, so that its task does not count as failed. ``final``: the slot gets no other worker."""

    reason: str
    excused: bool = False
    final: bool = False


class Executor(Protocol):
    """Starts ``python -m retrain.campaign.worker`` processes and monitors whether they live; the workers themselves
    claim tasks in the campaign's directory. Slots count from 1."""

    slots: int  # Largest number of workers

    def has_gpu(self) -> bool:
        """Return whether workers have GPUs; the configuration may still select the CPU."""
        ...

    def start(self, slots: Sequence[int]) -> None:
        """Start workers in these slots, which have no living worker. Raises StorageError, UsageError."""

    def look(self, slot: int) -> WorkerEnd | None:
        """Return how the worker of a slot ended; None while it may live. Called several times per second."""
        ...

    def notes(self) -> Iterable[Message]:
        """Return messages for the user that earlier calls did not return."""
        ...

    def kill(self, slot: int) -> None:
        """Kill a worker; wait for its end if that can be observed."""

    def close(self) -> None:
        """Kill running workers and release all resources."""


def job_to_json(job: Job) -> Row:
    places = {"directory": str(job.directory), "folder": str(job.folder)}
    runs = [spec.to_json() for spec in job.runs]
    return {"kind": type(job).__name__, **vars(job), **places, "runs": runs, "longest": asdict(job.longest)}


def job_from_json(content: Values) -> Job:
    fields = {key: value for key, value in content.items() if key != "kind"} | {
        "directory": Path(content["directory"]),
        "folder": Path(content["folder"]),
        "runs": [RunSpec.from_json(run) for run in content["runs"]],
        "longest": CompletionLengths(**content["longest"]),
    }
    return CohortJob(**fields) if content["kind"] == "CohortJob" else SqueezeJob(**fields)


_EVENTS = {event.__name__: event for event in get_args(Event)}


def event_to_json(event: Event) -> Row:
    return {"kind": type(event).__name__, **asdict(event)}


def event_from_json(content: Values) -> Event:
    return _EVENTS[content["kind"]](**{key: value for key, value in content.items() if key != "kind"})
