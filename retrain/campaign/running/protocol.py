"""Jobs that a campaign's controller gives to its workers, and the events that they send back.

Both can be written as JSON for a worker, which is another process, perhaps on another machine that sees the same
directory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from retrain.campaign.planning.plan import Plan
from retrain.config.runs import RunSpec
from retrain.environments.build import Longest
from retrain.records.observer import Observer

Guard = Callable[[Path], Callable[[], None]]
"""Returns what is called before each write into a run's directory; that raises LeaseLost once another process may write
there."""


def allow_all(directory: Path) -> Callable[[], None]:
    """Return the check of a directory that nobody else writes."""
    return lambda: None


@dataclass(frozen=True)
class CohortJob:
    """Train these runs together, from where their checkpoints are.

    ``directory`` is the campaign's, ``folder`` that of its TOML file; ``longest`` are the longest completions of all
    runs of the plan.
    ``failed_at``: those that had failed before, with the steps they had done. ``together``: all go on from the newest
    step that they have in common, else each from its own newest. ``accepted``: differences from the runs' records
    with which they may go on.
    """

    directory: Path
    folder: Path
    runs: Sequence[RunSpec]
    longest: Longest
    failed_at: dict[str, int] = field(default_factory=dict)
    together: bool = True
    accepted: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, specs: Sequence[RunSpec], **how: Any) -> CohortJob:
        """The job of these runs of a plan; ``how`` are the fields that have defaults."""
        return cls(plan.directory, plan.folder, specs, plan.longest, **how)


@dataclass(frozen=True)
class SqueezeJob:
    """Analyse and compress the adapter of ``run``, which has finished; the other fields are those of ``CohortJob``.

    ``place`` is where below the directory. The event is Facts: for the place ``squeeze`` with that key, for another one
    with the key ``squeezes``, whose value has the run's label as its key.
    """

    directory: Path
    folder: Path
    run: RunSpec
    longest: Longest
    place: str = "squeeze"


Job = CohortJob | SqueezeJob


def specs_of(job: Job) -> list[RunSpec]:
    """Return the runs whose directories a job writes."""
    return [*job.runs] if isinstance(job, CohortJob) else [job.run]


@dataclass(frozen=True)
class JobStarted:
    """A worker has taken the job; ``worker`` is what a person calls it, and ``runs`` are what it trains there. Only of
    executors that have several workers."""

    job: str
    worker: str
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tick:
    """Nothing has come for a moment: whoever listens can look at a clock, a lease, or whether to stop."""


@dataclass(frozen=True)
class RunStarted:
    """The run trains, from ``step`` (above 0 when resumed)."""

    run_id: str
    step: int
    max_steps: int


@dataclass(frozen=True)
class StepDone:
    """A step was recorded; ``row`` is its metrics row."""

    run_id: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """The held-out set ``name`` was evaluated; ``row`` has the ``eval/<name>/…`` keys."""

    run_id: str
    name: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Sealed:
    """``seal`` covers all evaluations that the run has recorded."""

    run_id: str
    seal: dict[str, Any]


@dataclass(frozen=True)
class RunEnded:
    """``status`` is done, with everything saved, or failed, for ``reason``."""

    run_id: str
    status: str
    reason: str = ""


@dataclass(frozen=True)
class Facts:
    """Keys of the campaign's manifest, with what they are now."""

    facts: dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One line for the reader; ``level`` is info, warning or error."""

    text: str
    level: str = "info"


@dataclass(frozen=True)
class JobEnded:
    """The last event of a job.

    ``status``: "done" (each run has ended), "stopped" (as asked, with all saved), "too_large" (only ``lanes`` of the
    runs fit into memory together), "changed" (``changes`` from the runs' records are not accepted) or "died" (whoever
    did it is gone; its runs are as their last checkpoints say); after "too_large" and "changed" nothing was trained
    further, and ``reason`` is for a person.
    """

    job: str = ""
    status: Literal["done", "stopped", "too_large", "changed", "died"] = "done"
    reason: str = ""
    lanes: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerFault:
    """Error for which a worker cannot do a job. ``error``: name of the RetrainError; ``text``: its message."""

    error: str
    text: str


Event = (
    JobStarted | Tick | RunStarted | StepDone | Sealed | Evaluated | RunEnded | Facts | Message | JobEnded | WorkerFault
)


class JobObserver(Observer, Protocol):
    """Follows jobs."""

    def note(self, facts: Mapping[str, Any]) -> None:
        """Keys of the campaign's manifest, with what they are now."""


def report(event: Event, observer: JobObserver, specs: Mapping[str, RunSpec]) -> None:
    """Call the observer with an event of a worker; ``specs`` are the plan's runs by id."""
    match event:
        case RunStarted(run_id, step, max_steps):
            observer.run_started(specs[run_id], step, max_steps)
        case StepDone(run_id, row):
            observer.step(specs[run_id], row)
        case Sealed(run_id, seal):
            observer.sealed(specs[run_id], seal)
        case Evaluated(run_id, name, row):
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
    """A job on its way. ``id`` is what ``JobEnded.job`` says."""

    @property
    def id(self) -> str: ...

    def stop(self) -> None:
        """Ask for an end after the step that is under way, with everything saved; does not wait."""


class JobRunner(Protocol):
    """Runs jobs side by side in other processes."""

    @property
    def slots(self) -> int:
        """Number of jobs that run side by side; further ones wait."""
        ...

    def has_gpu(self) -> bool:
        """Return whether it trains on a GPU, if the configuration allows it."""
        ...

    def submit(self, job: Job) -> Handle: ...

    def events(self) -> Generator[Event, None, None]:
        """Events of the submitted jobs as they come, until all have ended; those of one job in their order. What is
        submitted while somebody listens counts too.

        Raises StorageError when no run can be written any more, another RetrainError when the model, the data or a
        plug-in cannot be used. Closed before its end, it gives the jobs up, without saving.
        """
        ...

    def close(self) -> None:
        """Let go of everything; nothing more is submitted."""


@dataclass(frozen=True)
class WorkerEnd:
    """End of a worker's process. ``reason`` completes "worker 1 …". ``excused``: it was preempted or lost its machine,
    so that its task does not count as a failure. ``final``: no other worker is started in its slot."""

    reason: str
    excused: bool = False
    final: bool = False


class Executor(Protocol):
    """Starts ``python -m retrain.campaign.worker`` somewhere and watches whether it lives; the workers themselves find
    their tasks in the campaign's directory. Slots count from 1."""

    @property
    def slots(self) -> int:
        """Largest number of workers."""
        ...

    def has_gpu(self) -> bool:
        """Return whether workers train on GPUs, if the configuration allows it."""
        ...

    def start(self, slots: Sequence[int]) -> None:
        """Start workers in these slots, none of which has a living one. Raises StorageError, UsageError."""

    def look(self, slot: int) -> WorkerEnd | None:
        """Return how the worker of a slot ended, None while it may live. Called several times per second."""
        ...

    def notes(self) -> Iterable[Message]:
        """Return messages for the user, each once."""
        ...

    def kill(self, slot: int) -> None:
        """Kill a worker; wait until it has ended if that can be known."""

    def close(self) -> None:
        """Kill workers that still run and release all resources."""


def job_to_json(job: Job) -> dict[str, Any]:
    content = vars(job) | {"directory": str(job.directory), "folder": str(job.folder), "longest": asdict(job.longest)}
    if isinstance(job, CohortJob):
        return {"kind": "CohortJob", **content, "runs": [spec.to_json() for spec in job.runs]}
    return {"kind": "SqueezeJob", **content, "run": job.run.to_json()}


def job_from_json(content: Mapping[str, Any]) -> Job:
    fields = dict[str, Any](content)
    kind = fields.pop("kind")
    fields["directory"], fields["folder"] = Path(fields["directory"]), Path(fields["folder"])
    fields["longest"] = Longest(**fields["longest"])
    if kind == "CohortJob":
        fields["runs"] = [RunSpec.from_json(run) for run in fields["runs"]]
        return CohortJob(**fields)
    fields["run"] = RunSpec.from_json(fields["run"])
    return SqueezeJob(**fields)


_EVENTS = {
    kind.__name__: kind
    for kind in (JobStarted, RunStarted, StepDone, Sealed, Evaluated, RunEnded, Facts, Message, JobEnded, WorkerFault)
}


def event_to_json(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def event_from_json(content: Mapping[str, Any]) -> Event:
    return _EVENTS[content["kind"]](**{key: value for key, value in content.items() if key != "kind"})
