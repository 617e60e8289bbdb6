"""Run a campaign's jobs on workers: publish tasks, read events, and replace dead workers.

Workers communicate through the campaign's directory (``tasks``) only. A restarted controller finds living workers by
their leases, and the tasks that they have claimed continue.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import retrain.errors
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.protocol import (
    Event,
    Executor,
    Job,
    JobEnded,
    Message,
    SqueezeJob,
    Tick,
    WorkerEnd,
    WorkerFault,
    event_from_json,
    job_to_json,
)
from retrain.campaign.running.tasks import WORKERS, Tasks, append, events_of, home_of, newest
from retrain.engines.server.fleet import Fleet, Notify
from retrain.errors import DeviceLost, NotReadable, RetrainError, WorkersLost
from retrain.files import writing
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import SERVER_NEWS
from retrain.util.jsonl import NewLines, parse_row
from retrain.util.session import LeaseWatch, is_here, lease_of

TICK_SECONDS = 0.25  # Seconds between polls of the workers
PATIENCE_SECONDS = 10.0  # Seconds that workers without a task may take to end before they are killed
REPORT_SECONDS = 3.0  # Seconds after a worker's death in which its executor or its host may report how it died
SILENCE_SECONDS = 120.0  # Seconds for which the lease of a worker on another machine may stay unchanged


@dataclass(eq=False)
class JobHandle:
    id: str
    tasks: Tasks
    stopping: bool = False

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.tasks.stop(self.id)


@dataclass(eq=False)
class WorkerSlot:
    """A slot, which runs one worker at a time. ``is_occupied``: a worker was started and has not ended. ``process``:
    number of the slot's newest known process. ``reported_end``: how the worker ended, by its events. ``fault``: text of
    the error that ends the worker."""

    number: int
    home: Path
    is_occupied: bool = False
    process: int = 0
    events: NewLines | None = None
    name: str = ""
    pid: int = 0
    reported_end: WorkerEnd | None = None
    fault: str = ""
    dead_since: float = 0.0  # Time at which the lease was first seen expired; 0 while the worker lives
    lease: LeaseWatch = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.number)
        self.lease = LeaseWatch(self.home, SILENCE_SECONDS)

    @property
    def label(self) -> str:
        return f"worker_{self.number}-{self.process}"

    @property
    def title(self) -> str:
        return f"worker {self.name} (process {self.pid})" if self.pid else f"worker {self.name}"

    def follow(self, process: int) -> None:
        self.process, self.is_occupied, self.dead_since = process, True, 0.0
        self.events = NewLines(events_of(self.home, process), awaits_bytes=True)
        self.reported_end, self.fault = None, ""
        self.lease = LeaseWatch(self.home, SILENCE_SECONDS)

    def vacate(self) -> None:
        self.is_occupied, self.events, self.reported_end, self.fault, self.pid = False, None, None, "", 0
        self.name = str(self.number)

    def is_silent(self) -> bool:
        if self.lease.is_alive():
            self.dead_since = 0.0
            return False
        self.dead_since = self.dead_since or time.monotonic()
        return time.monotonic() - self.dead_since > REPORT_SECONDS


class ServerNews:
    """Calls ``launch`` to start a campaign's servers, and sends their addresses to the workers by a file in
    ``directory``. ``launch`` is None if the campaign launches no servers."""

    def __init__(self, directory: Path, launch: Callable[[Notify], Fleet] | None):
        self.path, self.launch = directory / WORKERS / SERVER_NEWS, launch
        self._fleet: Fleet | None = None
        self._written: Row = {}
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def update(self) -> None:
        """Start the servers on the first call; write their addresses whenever they change."""
        if self.launch is None:
            return
        if self._fleet is None:
            self.path.unlink(missing_ok=True)  # addresses of an earlier controller's servers
            self._fleet = self.launch(lambda text, level: self._messages.put(Message(text, level)))
        state = {"urls": self._fleet.urls, "gave_up": self._fleet.gave_up}
        if state != self._written:
            self._written = state
            self._append(state)

    def messages(self) -> Iterator[Message]:
        # Workers also record these messages with their runs
        while not self._messages.empty():
            message = self._messages.get()
            self._append({"message": message.text, "level": message.level})
            yield message

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()

    def _append(self, facts: Values) -> None:
        with writing(self.path):
            append(self.path, facts)


class CampaignWorkers:
    """``JobRunner`` over the workers that ``executor`` starts for a campaign's ``directory``. ``launch`` starts the
    servers that all workers sample from; None if the campaign launches none."""

    def __init__(self, executor: Executor, directory: Path, launch: Callable[[Notify], Fleet] | None = None):
        self.executor, self.directory, self.slots = executor, directory, executor.slots
        self.tasks, self.servers = Tasks.of(directory), ServerNews(directory, launch)
        self._slots: dict[int, WorkerSlot] = {}
        self._jobs: dict[str, JobHandle] = {}  # Jobs that have not ended
        self._adoptable: dict[str, Row] = {}  # Tasks that workers of an earlier controller are doing
        self._count = -1  # Highest task number used; -1 before the first job
        self._abandoned: dict[int, str] = {}  # Reason for each slot in which no worker is started any more
        self._error: RetrainError | None = None  # Error that ends the campaign once the other workers have stopped

    def has_gpu(self) -> bool:
        return self.executor.has_gpu()

    def submit(self, job: Job) -> JobHandle:
        if self._count < 0:
            self._begin()
        content = json.loads(json.dumps(job_to_json(job)))
        name = next((name for name, claimed in self._adoptable.items() if _covers(claimed, content)), None)
        if name is None:
            self._count += 1
            name = f"{0 if isinstance(job, SqueezeJob) else 1}{self._count:06d}"  # an analysis goes first
            self.tasks.publish(name, content)
        else:
            del self._adoptable[name]
        handle = self._jobs[name] = JobHandle(name, self.tasks)
        return handle

    def events(self) -> Generator[Event, None, None]:
        """Yield events as ``JobRunner`` requires. An error that would end every worker is raised only after the other
        workers have finished their step and saved."""
        try:
            for name in self._adoptable:  # this controller has no job for them
                self.tasks.stop(name)
            while True:
                yield from self._withdraw_stopped()
                yield from self.executor.notes()
                yield from self.servers.messages()
                if self._error is not None and not self._jobs:
                    error, self._error = self._error, None
                    raise error
                if not self._jobs:
                    return
                self.servers.update()
                self._start_workers()
                is_quiet = True
                for slot in [*self._slots.values()]:
                    for event in self._poll(slot):
                        is_quiet = False
                        yield event
                if is_quiet:
                    time.sleep(TICK_SECONDS)
                    yield Tick()
        finally:
            self._kill_training()

    def close(self) -> None:
        if self._count >= 0:
            self._kill_training()
            with suppress(RetrainError):
                self.tasks.close()
            end = time.monotonic() + PATIENCE_SECONDS
            running = [slot for slot in self._slots.values() if slot.is_occupied]
            while (running := [slot for slot in running if self._is_running(slot)]) and time.monotonic() < end:
                time.sleep(TICK_SECONDS / 5)
            for slot in running:
                self._kill(slot)
        with closing(self.executor):
            self.servers.close()  # first, because servers in a cluster are closed through the executor's connection
        for slot in self._slots.values():
            for path in slot.home.glob("events_*.jsonl"):
                path.unlink(missing_ok=True)
        self._slots.clear()
        self._count = -1

    # -- start ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._count = self.tasks.open()
        for number in range(1, self.slots + 1):
            self._slots[number] = WorkerSlot(number, home_of(self.directory, number))
        for home in (self.directory / WORKERS).glob("worker_*/"):
            if has_living_worker(home) and (process := newest(home)):
                number = int(home.name.partition("_")[2])
                self._slots.setdefault(number, WorkerSlot(number, home)).follow(process)
        living = {slot.label for slot in self._slots.values() if slot.is_occupied}
        for name, worker in self.tasks.claims().items():
            if worker in living:
                self._adoptable[name] = self.tasks.content(name, worker)
            else:
                self.tasks.forget(name, worker)
        for slot in self._slots.values():
            if not slot.is_occupied:
                slot.process = newest(slot.home)

    def _start_workers(self) -> None:
        if self._error is not None:
            return
        missing = len(self._jobs) - sum(slot.is_occupied for slot in self._slots.values())
        numbers = range(1, self.slots + 1)
        free = [n for n in numbers if n not in self._abandoned and not self._slots[n].is_occupied]
        if missing > 0 and free:
            self.executor.start(free[:missing])
            for number in free[:missing]:
                self._slots[number].is_occupied = True

    # -- events -----------------------------------------------------------------------------------------------------

    def _withdraw_stopped(self) -> Iterator[Event]:
        for name, handle in [*self._jobs.items()]:
            if (handle.stopping or self._error is not None) and self.tasks.withdraw(name):
                self._forget(name, "")
                yield JobEnded(name, "stopped")

    def _poll(self, slot: WorkerSlot) -> Iterator[Event]:
        # Both are read before the events: if they show that the worker has ended, the events are complete.
        exit_report = self.executor.look(slot.number) if slot.is_occupied else None
        process = newest(slot.home)
        if slot.events is None and process > slot.process:
            slot.follow(process)
        if slot.events is not None:
            for line in map(parse_row, slot.events):
                yield from self._handle_line(slot, line)
        end = slot.reported_end
        if end is None and slot.events is not None and process > slot.process:
            end = WorkerEnd("was lost with its machine", excused=True)
        end = end or exit_report
        if end is None and slot.events is not None and slot.is_silent():
            end = WorkerEnd("is gone")
            self._kill(slot)
        if end is not None:
            yield from self._end_worker(slot, end)

    def _handle_line(self, slot: WorkerSlot, line: Row) -> Iterator[Event]:
        if "up" in line:
            slot.name, slot.pid = line["up"], line["process"]
        elif "ended" in line:
            slot.reported_end = WorkerEnd(line["ended"], excused=line["in_order"])
        elif "requeued" in line:
            slot.reported_end = WorkerEnd("was preempted", excused=True)
            if line["requeued"]:
                yield Message(f"{slot.title} was preempted: it has saved, and Slurm has put it back into the queue")
        elif line["task"] in self._jobs:
            event = event_from_json(line["event"])
            if isinstance(event, WorkerFault):
                self._handle_fault(slot, line["task"], event)
                return
            if isinstance(event, JobEnded):
                self._forget(event.job, slot.label)
            yield event

    def _end_worker(self, slot: WorkerSlot, end: WorkerEnd) -> Iterator[Event]:
        reason = f"{slot.title} ended: {slot.fault}" if slot.fault else f"{slot.title} {end.reason}"
        if end.final:
            self._abandoned[slot.number] = reason
        claims, label, is_excused = self.tasks.claims(), slot.label, end.excused and not slot.fault
        slot.vacate()
        for name, handle in [*self._jobs.items()]:
            if claims.get(name) == label:
                self._forget(name, label)
                yield JobEnded(name, "stopped" if is_excused and not handle.stopping else "died", reason)
        if len(self._abandoned) == self.slots and self._jobs:
            raise WorkersLost(f"no worker is left: {reason}")

    def _handle_fault(self, slot: WorkerSlot, name: str, fault: WorkerFault) -> None:
        """Stop all jobs after a fault that every worker would have; after a lost device, a new worker continues."""
        kind = getattr(retrain.errors, fault.error, RetrainError)
        if issubclass(kind, DeviceLost):
            slot.fault = fault.text
            return
        error = kind.__new__(kind)  # some errors take more arguments than their text
        error.args = (fault.text,)
        self._forget(name, slot.label)
        self._error = self._error or error
        for handle in self._jobs.values():
            handle.stop()

    def _forget(self, name: str, worker: str) -> None:
        del self._jobs[name]
        self.tasks.forget(name, worker)

    # -- end --------------------------------------------------------------------------------------------------------

    def _kill_training(self) -> None:
        # Nothing is saved, and the jobs are dropped
        claims = self.tasks.claims() if self._jobs else {}
        training = {claims[name] for name in self._jobs if name in claims}
        for slot in self._slots.values():
            if slot.label in training:
                self._kill(slot)
                slot.vacate()
        for name in [*self._jobs]:
            self.tasks.withdraw(name)
            self._forget(name, claims.get(name, ""))

    def _kill(self, slot: WorkerSlot) -> None:
        self.executor.kill(slot.number)
        with suppress(NotReadable, OSError):
            match lease_of(slot.home):
                case {"pid": int(pid)} as lease if is_here(lease) and has_living_worker(slot.home):
                    os.kill(pid, signal.SIGKILL)  # left by an earlier controller

    def _is_running(self, slot: WorkerSlot) -> bool:
        if not slot.is_occupied or slot.reported_end is not None or self.executor.look(slot.number) is not None:
            return False
        # A worker that has not written anything yet will find no task.
        is_starting = slot.events is None and newest(slot.home) <= slot.process
        return is_starting or has_living_worker(slot.home)


def has_living_worker(home: Path) -> bool:
    with suppress(NotReadable):
        lease = lease_of(home)
        return lease is not None and LeaseWatch(home).is_alive()
    return True  # a worker whose lease cannot be read is not to be replaced


def can_adopt_workers(plan: Plan) -> bool:
    """Return whether living workers may continue: all their runs are in this plan with the same settings. If not, they
    are requested to finish their step, save and end. False without living workers."""
    directory, tasks = plan.directory, Tasks.of(plan.directory)
    homes = [home for home in (directory / WORKERS).glob("worker_*/") if has_living_worker(home)]
    if not homes:
        return False
    labels = {f"{home.name}-{newest(home)}" for home in homes}
    planned = {spec.run_id: json.loads(json.dumps(spec.to_json())) for spec in plan.specs}
    claims = {name: worker for name, worker in tasks.claims().items() if worker in labels}
    runs = [run for name, worker in claims.items() for run in tasks.content(name, worker)["runs"]]
    uses_workers = plan.specs[0].config.campaign.executor != "inprocess"
    if uses_workers and all(planned.get(run["run_id"]) == run for run in runs):
        return True
    tasks.open()
    tasks.close()
    for name in claims:
        tasks.stop(name)
    return False


def _covers(claimed: Values, job: Values) -> bool:
    # Some of the task's runs may have ended since it was claimed
    is_same_kind = claimed["kind"] == job["kind"] and claimed.get("subfolder") == job.get("subfolder")
    return is_same_kind and all(run in claimed["runs"] for run in job["runs"])
