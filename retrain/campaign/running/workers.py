"""The workers of a campaign, as its controller sees them: tasks there, events back, and whether each still lives.

An executor starts them; everything else goes through the campaign's directory (``tasks``). A controller that was killed
and started again finds the workers by their leases, and the tasks that they have claimed go on.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from retrain.campaign.running.session import LeaseWatch, is_here, lease_of
from retrain.campaign.running.tasks import SERVERS, WORKERS, Tail, Tasks, append, events_of, home_of, newest
from retrain.engines.server.fleet import Fleet, Tell
from retrain.errors import DeviceLost, NotReadable, RetrainError, WorkersLost
from retrain.files import writing

TICK_SECONDS = 0.25  # Seconds between looks at the workers
PATIENCE_SECONDS = 10.0  # How long workers without a task may take to end before they are killed
WORDS_SECONDS = 3.0  # How long it may take until somebody says how a worker has ended
SILENCE_SECONDS = 120.0  # Seconds for which the lease of a worker on another machine may stand still


@dataclass(eq=False)
class JobHandle:
    """A job that waits or is under way. See ``Handle``."""

    id: str
    job: Job
    tasks: Tasks
    stopping: bool = False

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.tasks.stop(self.id)


@dataclass(eq=False)
class Seat:
    """A slot and its worker: whether one was ``started``, its newest ``process`` whose events are read, how it ended
    where it or its host said so, and why it will end (``dying``)."""

    slot: int
    home: Path
    started: bool = False
    process: int = 0
    tail: Tail | None = None
    name: str = ""
    pid: int = 0
    said: WorkerEnd | None = None
    dying: str = ""
    missed: float = 0.0  # Since when its lease has been dead
    lease: LeaseWatch = field(init=False)

    def __post_init__(self) -> None:
        self.name = str(self.slot)
        self.lease = LeaseWatch(self.home, SILENCE_SECONDS)

    @property
    def label(self) -> str:
        """The worker as the names of claimed tasks have it."""
        return f"worker_{self.slot}-{self.process}"

    @property
    def title(self) -> str:
        return f"worker {self.name} (process {self.pid})" if self.pid else f"worker {self.name}"

    def follow(self, process: int) -> None:
        """Read the events of this process from now on."""
        self.process, self.started, self.missed = process, True, 0.0
        self.tail, self.said, self.dying = Tail(events_of(self.home, process)), None, ""
        self.lease = LeaseWatch(self.home, SILENCE_SECONDS)

    def end(self) -> None:
        self.started, self.tail, self.said, self.dying, self.pid = False, None, None, "", 0
        self.name = str(self.slot)


class Workers:
    """Has jobs done by the workers that ``executor`` starts for a campaign's ``directory``; see ``JobRunner``.

    ``fleet`` starts the servers that all of them sample from, when there is something to do."""

    def __init__(self, executor: Executor, directory: Path, fleet: Callable[[Tell], Fleet] | None = None):
        self.executor, self.directory, self.fleet = executor, directory, fleet
        self.tasks = Tasks.of(directory)
        self.slots = executor.slots
        self._seats: dict[int, Seat] = {}
        self._jobs: dict[str, JobHandle] = {}  # That have not ended
        self._adoptable: dict[str, dict[str, Any]] = {}  # Tasks that living workers have claimed before
        self._count = -1
        self._lost: dict[int, str] = {}  # Why no worker is started in a slot any more
        self._servers: Fleet | None = None
        self._told: dict[str, Any] = {}
        self._notes: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._fault: RetrainError | None = None

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
        handle = self._jobs[name] = JobHandle(name, job, self.tasks)
        return handle

    def events(self) -> Generator[Event, None, None]:
        """See ``JobRunner.events``. A fault that is no run's own has the other workers end after their step first."""
        try:
            for name in self._adoptable:  # nobody wants these any more
                self.tasks.stop(name)
            while True:
                yield from self._stopped_early()
                yield from self._noted()
                if self._fault is not None and not self._jobs:
                    fault, self._fault = self._fault, None
                    raise fault
                if not self._jobs:
                    return
                self._keep_servers()
                self._start()
                silent = True
                for seat in [*self._seats.values()]:
                    for event in self._hear(seat):
                        silent = False
                        yield event
                if silent:
                    time.sleep(TICK_SECONDS)
                    yield Tick()
        finally:
            self._kill_busy()

    def close(self) -> None:
        if self._count >= 0:
            for name in [*self._jobs]:
                self.tasks.withdraw(name)
            self._kill_busy()
            with suppress(RetrainError):
                self.tasks.close()
            end = time.monotonic() + PATIENCE_SECONDS
            alive = [seat for seat in self._seats.values() if seat.started]
            while (alive := [seat for seat in alive if self._is_there(seat)]) and time.monotonic() < end:
                time.sleep(TICK_SECONDS / 5)
            for seat in alive:
                self._kill(seat)
        self.executor.close()
        if self._servers is not None:
            self._servers.close()
        for seat in self._seats.values():
            for path in seat.home.glob("events_*.jsonl"):
                path.unlink(missing_ok=True)
        self._seats.clear()
        self._count = -1

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find what an earlier controller, which was killed, has left: workers that live, and what they do."""
        self._count = self.tasks.open()
        (self.directory / WORKERS / SERVERS).unlink(missing_ok=True)
        for slot in range(1, self.slots + 1):
            self._seats[slot] = Seat(slot, home_of(self.directory, slot))
        for home in (self.directory / WORKERS).glob("worker_*/"):
            if has_living_worker(home) and (process := newest(home)):
                slot = int(home.name.partition("_")[2])
                self._seats.setdefault(slot, Seat(slot, home)).follow(process)
        living = {seat.label for seat in self._seats.values() if seat.started}
        for name, worker in self.tasks.claims().items():
            if worker in living:
                self._adoptable[name] = self.tasks.content(name, worker)
            else:
                self.tasks.forget(name, worker)
        for seat in self._seats.values():
            if not seat.started:
                seat.process = newest(seat.home)

    def _start(self) -> None:
        """Have as many workers started as there are jobs for."""
        if self._fault is not None:
            return
        more = len(self._jobs) - sum(seat.started for seat in self._seats.values())
        free = [slot for slot in range(1, self.slots + 1) if slot not in self._lost and not self._seats[slot].started]
        if more > 0 and free:
            self.executor.start(free[:more])
            for slot in free[:more]:
                self._seats[slot].started = True

    # -- servers ------------------------------------------------------------------------------------------------------

    def _keep_servers(self) -> None:
        """Have servers started before they are needed, and the workers told where they are."""
        if self.fleet is None:
            return
        if self._servers is None:
            self._servers = self.fleet(lambda text, level: self._notes.put(Message(text, level)))
        now = {"urls": self._servers.urls, "gave_up": self._servers.gave_up}
        if now != self._told:
            self._told = now
            self._report(now)

    def _report(self, facts: Mapping[str, Any]) -> None:
        path = self.directory / WORKERS / SERVERS
        with writing(path):
            append(path, facts)

    def _noted(self) -> Iterator[Event]:
        """Pass on what the user should know; of servers also to the workers, which write the records of their runs."""
        yield from self.executor.notes()
        while not self._notes.empty():
            note = self._notes.get()
            self._report({"message": note.text, "level": note.level})
            yield note

    # -- events -------------------------------------------------------------------------------------------------------

    def _stopped_early(self) -> Iterator[Event]:
        """Take back what was asked to stop before a worker had it; none may be there for hours."""
        for name, handle in [*self._jobs.items()]:
            if (handle.stopping or self._fault is not None) and self.tasks.withdraw(name):
                self._forget(name, "")
                yield JobEnded(name, "stopped")

    def _hear(self, seat: Seat) -> Iterator[Event]:
        """Yield what a worker has said since the last time, and how it has ended."""
        # Both before what has been said is read: nothing follows after them.
        look = self.executor.look(seat.slot) if seat.started else None
        process = newest(seat.home)
        if seat.tail is None and process > seat.process:
            seat.follow(process)
        if seat.tail is not None:
            for line in seat.tail.lines():
                yield from self._take(seat, line)
        end = seat.said
        if end is None and seat.tail is not None and process > seat.process:
            end = WorkerEnd("was lost with its machine", excused=True)
        if end is None and look is not None:
            end = look
        if end is None and seat.tail is not None and self._is_silent(seat):
            end = WorkerEnd("is gone")
            self._kill(seat)
        if end is not None:
            yield from self._end(seat, end)

    def _is_silent(self, seat: Seat) -> bool:
        """Whether the lease says that a worker is gone, and nobody who watches it has said how for a while."""
        if seat.lease.is_alive():
            seat.missed = 0.0
            return False
        seat.missed = seat.missed or time.monotonic()
        return time.monotonic() - seat.missed > WORDS_SECONDS

    def _take(self, seat: Seat, line: dict[str, Any]) -> Iterator[Event]:
        if "up" in line:
            seat.name, seat.pid = line["up"], line["process"]
        elif "ended" in line:
            seat.said = WorkerEnd(line["ended"], excused=line["in_order"])
        elif "requeued" in line:
            seat.said = WorkerEnd("gave its place back", excused=True)
            if line["requeued"]:
                yield Message(f"{seat.title} was told to make room: all is saved, and Slurm has it wait again")
        elif line["task"] in self._jobs:
            event = event_from_json(line["event"])
            if isinstance(event, WorkerFault):
                self._take_fault(seat, line["task"], event)
                return
            if isinstance(event, JobEnded):
                self._forget(event.job, seat.label)
            yield event

    def _end(self, seat: Seat, end: WorkerEnd) -> Iterator[Event]:
        words = f"{seat.title} ended: {seat.dying}" if seat.dying else f"{seat.title} {end.words}"
        if end.final:
            self._lost[seat.slot] = words
        claims, label, dying = self.tasks.claims(), seat.label, seat.dying
        seat.end()
        for name, handle in [*self._jobs.items()]:
            if claims.get(name) == label:
                self._forget(name, label)
                excused = end.excused and not dying and not handle.stopping
                yield JobEnded(name, "stopped" if excused else "died", words)
        if len(self._lost) == self.slots and self._jobs:
            raise WorkersLost(f"no worker is left: {words}")

    def _take_fault(self, seat: Seat, name: str, fault: WorkerFault) -> None:
        """A worker cannot do its job: on a lost device a new worker may, otherwise the campaign ends."""
        kind = getattr(retrain.errors, fault.error, RetrainError)
        if issubclass(kind, DeviceLost):
            seat.dying = fault.text
            return
        error = kind.__new__(kind)  # some take more than their text
        error.args = (fault.text,)
        self._forget(name, seat.label)
        self._fault = self._fault or error
        for handle in self._jobs.values():
            handle.stop()

    def _forget(self, name: str, worker: str) -> None:
        del self._jobs[name]
        self.tasks.forget(name, worker)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _kill_busy(self) -> None:
        """Give up what has not ended, without saving."""
        claims = self.tasks.claims() if self._jobs else {}
        busy = {claims[name] for name in self._jobs if name in claims}
        for seat in self._seats.values():
            if seat.label in busy:
                self._kill(seat)
                seat.end()
        for name in [*self._jobs]:
            self.tasks.withdraw(name)
            self._forget(name, claims.get(name, ""))

    def _kill(self, seat: Seat) -> None:
        self.executor.kill(seat.slot)
        with suppress(NotReadable, OSError):
            lease = lease_of(seat.home)
            if lease is not None and is_here(lease) and has_living_worker(seat.home):  # of an earlier controller
                os.kill(lease["pid"], signal.SIGKILL)

    def _is_there(self, seat: Seat) -> bool:
        return seat.started and self.executor.look(seat.slot) is None and seat.said is None and self._lives(seat)

    def _lives(self, seat: Seat) -> bool:
        if seat.tail is None:  # it has not said anything yet: it finds that there is nothing to do
            process = newest(seat.home)
            return process <= seat.process or has_living_worker(seat.home)
        return has_living_worker(seat.home)


def has_living_worker(home: Path) -> bool:
    """Return whether the lease of a worker is there and, on this machine, its process too."""
    with suppress(NotReadable):
        lease = lease_of(home)
        return lease is not None and LeaseWatch(home).is_alive()
    return True


def adopts(plan: Plan) -> bool:
    """Return whether living workers do just what this plan asks for, so that a new controller lets them go on. Has
    them end after their step where it is something else."""
    directory, tasks = plan.directory, Tasks.of(plan.directory)
    homes = [home for home in (directory / WORKERS).glob("worker_*/") if has_living_worker(home)]
    if not homes:
        return False
    labels = {f"{home.name}-{newest(home)}" for home in homes}
    planned = {spec.run_id: json.loads(json.dumps(spec.to_json())) for spec in plan.specs}
    claims = {name: worker for name, worker in tasks.claims().items() if worker in labels}
    runs = [run for name, worker in claims.items() for run in _runs_of(tasks.content(name, worker))]
    workers = plan.specs[0].config.campaign.executor != "inprocess"
    if workers and all(planned.get(run["run_id"]) == run for run in runs):
        return True
    tasks.open()
    tasks.close()
    for name in claims:
        tasks.stop(name)
    return False


def _runs_of(content: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    return content["runs"] if content["kind"] == "CohortJob" else [content["run"]]


def _covers(claimed: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Return whether a claimed task does what a job asks for: some of its runs may have ended since."""
    same = claimed["kind"] == asked["kind"] and claimed.get("place") == asked.get("place")
    return same and all(run in _runs_of(claimed) for run in _runs_of(asked))
