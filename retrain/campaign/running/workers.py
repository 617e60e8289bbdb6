"""An executor of workers, wherever they live: cohorts side by side, each over a base of its own.

A ``Link`` is the controller's end of one worker: processes of this machine (``processes``) and others speak the same
lines of JSON with ``worker.Worker``. A worker keeps its base in memory between jobs. One that dies ends its job as
"died"; the next job of its slot gets a new worker.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import retrain.errors
from retrain.campaign.running.protocol import (
    CohortJob,
    Event,
    Job,
    JobEnded,
    JobStarted,
    Message,
    Tick,
    event_from_json,
    job_to_json,
)
from retrain.engines.server.fleet import Fleet, Tell
from retrain.errors import DeviceLost, RetrainError

TICK_SECONDS = 0.25  # Seconds without an event after which a Tick is emitted
PATIENCE_SECONDS = 10.0  # How long workers without a job may take to end before they are killed


class Link(Protocol):
    """The controller's end of one worker."""

    @property
    def name(self) -> str:
        """What a person calls the worker, such as "1 gpu:0"; final once it has said something."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it takes a job now; one that waits for a machine does not yet."""
        ...

    def post(self, command: Mapping[str, Any]) -> None:
        """Send a command; one that is dead does not hear it, which is found out when its lines end."""

    def lines(self) -> Iterator[bytes]:
        """What the worker says, a JSON object each, as it comes; blocks, and ends when the worker has ended. Called
        once, in a thread of its own. An object with "message" (and perhaps "level") is for the reader."""
        ...

    def ended(self, why: str = "") -> str:
        """How the worker ended, in words, with what it said itself about ``why``; waits until it has."""
        ...

    def excused(self, begun: bool) -> bool:
        """Whether its end, of which it has told, is no death of its job: it ended as asked before the job had
        ``begun``, or its machine was taken away."""
        ...

    def release(self) -> None:
        """There will be no further commands: it ends after the step that is under way, saved."""

    def kill(self) -> None:
        """End it at once, and wait until it has; where somebody else ends it, until they have been told."""

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, within ``seconds``."""
        ...


@dataclass(eq=False)
class JobHandle:
    """A job that waits or is under way. See ``Handle``."""

    id: str
    job: Job
    worker: Seat | None = None
    stopping: bool = False

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            if self.worker is not None:
                self.worker.link.post({"id": self.id})


@dataclass(eq=False)
class Seat:
    """A worker and what it works on, which it has ``begun`` or not. ``dying`` is why it will end, where it said so;
    ``servers`` is the command by which it was told where these are."""

    link: Link
    job: JobHandle | None = None
    begun: bool = False
    dying: str = ""
    servers: dict[str, Any] | None = None


@dataclass
class Workers:
    """See ``Executor``: ``start`` begins the workers of these slots, each with its slot, and leaves out slots that will
    have none any more; it raises StorageError when what they write cannot be written. ``fleet`` starts the servers that
    all of them sample from, when there is something to do. ``finish`` is called at the end, when all workers have been
    released."""

    slots: int
    gpus: bool
    start: Callable[[Sequence[int]], Iterable[tuple[int, Link]]]
    finish: Callable[[], None] = lambda: None
    fleet: Callable[[Tell], Fleet] | None = None
    _servers: Fleet | None = field(default=None, init=False)
    _notes: queue.SimpleQueue[Message] = field(default_factory=queue.SimpleQueue, init=False)
    _seats: list[Seat | None] = field(default_factory=list, init=False)
    _waiting: deque[JobHandle] = field(default_factory=deque, init=False)
    _said: queue.SimpleQueue[tuple[Seat, bytes | None]] = field(default_factory=queue.SimpleQueue, init=False)
    _count: int = field(default=0, init=False)
    _fault: RetrainError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._seats.extend([None] * self.slots)

    def has_gpu(self) -> bool:
        return self.gpus

    def submit(self, job: Job) -> JobHandle:
        self._count += 1
        handle = JobHandle(str(self._count), job)
        self._waiting.append(handle)
        return handle

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``. A fault that is no run's own has the other workers end after their step first."""
        try:
            while True:
                yield from self._stopped_early()
                yield from self._noted()
                self._keep_servers()
                self._assign()
                busy = any(seat.job is not None for seat in self._alive())
                if not busy and self._fault is not None:
                    fault, self._fault = self._fault, None
                    raise fault
                if not busy and not self._waiting:
                    return
                try:
                    seat, line = self._said.get(timeout=TICK_SECONDS)
                except queue.Empty:
                    yield Tick()
                    continue
                if seat in self._seats:  # else it was given up before this line was read
                    yield from self._end(seat) if line is None else self._take(seat, json.loads(line))
        finally:
            self._kill_busy()

    def close(self) -> None:
        self._waiting.clear()
        self._kill_busy()
        alive = self._alive()
        self._seats = [None for _ in self._seats]
        for seat in alive:
            seat.link.release()
        for seat in alive:
            if not seat.link.wait(PATIENCE_SECONDS):
                seat.link.kill()
        if self._servers is not None:
            self._servers.close()
        self.finish()

    def _alive(self) -> list[Seat]:
        return [seat for seat in self._seats if seat is not None]

    def _assign(self) -> None:
        """Give what waits to workers without a job; those that have begun first: their base is loaded. For what is more
        than these, new ones begin."""
        if self._fault is not None:
            return
        idle = [seat for seat in self._alive() if seat.job is None]
        more = max(0, len(self._waiting) - len(idle))
        free = [number for number, seat in enumerate(self._seats) if seat is None][:more]
        for number, link in self.start(free) if free else ():
            seat = self._seats[number] = Seat(link)
            threading.Thread(target=self._listen, args=(seat,), name=f"worker {number + 1}", daemon=True).start()
            idle.append(seat)
        for seat in idle:
            if self._waiting and seat.link.ready:
                handle = self._waiting.popleft()
                seat.job, seat.begun, handle.worker = handle, False, seat
                self._tell_servers(seat)
                seat.link.post({"id": handle.id, "job": job_to_json(handle.job)})

    def _keep_servers(self) -> None:
        """Have servers started before they are needed, and everybody who has been told of them told of others."""
        if self.fleet is not None and self._servers is None and self._waiting:
            self._servers = self.fleet(lambda text, level: self._notes.put(Message(text, level)))
        for seat in self._alive():
            if seat.servers is not None:
                self._tell_servers(seat)

    def _tell_servers(self, seat: Seat) -> None:
        if self._servers is None:
            return
        now = {"servers": self._servers.urls, "gave_up": self._servers.gave_up}
        if seat.servers != now:
            seat.servers = now
            seat.link.post(now)

    def _noted(self) -> Iterator[Event]:
        """Pass on what was said of servers, also to the workers, which write the records of their runs."""
        while not self._notes.empty():
            note = self._notes.get()
            for seat in self._alive():
                if seat.job is not None:
                    seat.link.post({"server_message": note.text, "level": note.level})
            yield note

    def _stopped_early(self) -> Iterator[Event]:
        """What was asked to stop before a worker had it; none may be there for hours."""
        while (handle := next((each for each in self._waiting if each.stopping), None)) is not None:
            self._waiting.remove(handle)
            yield JobEnded(handle.id, "stopped")

    def _listen(self, seat: Seat) -> None:
        """Pass on what a worker says, from a thread of its own."""
        try:
            for line in seat.link.lines():
                self._said.put((seat, line))
        finally:
            self._said.put((seat, None))

    def _take(self, seat: Seat, answer: dict[str, Any]) -> Iterator[Event]:
        if "message" in answer:
            yield Message(answer["message"], answer.get("level", "info"))
            return
        handle = seat.job
        if "fault" in answer and handle is None and answer["id"] is None:
            self._take_fault(seat, answer["fault"])
        if handle is None or answer["id"] not in (handle.id, None):
            return
        if "begun" in answer:
            seat.begun = True
            runs = [spec.run_id for spec in handle.job.runs] if isinstance(handle.job, CohortJob) else []
            yield JobStarted(handle.id, seat.link.name, runs)
        elif "fault" in answer:
            self._take_fault(seat, answer["fault"])
        else:
            event = event_from_json(answer["event"])
            if isinstance(event, JobEnded):
                seat.job = None
            yield event

    def _end(self, seat: Seat) -> Iterator[Event]:
        self._forget(seat)
        how = seat.link.ended(seat.dying)
        if seat.job is not None:
            excused = not seat.dying and not (seat.begun and seat.job.stopping) and seat.link.excused(seat.begun)
            yield JobEnded(seat.job.id, "stopped" if excused else "died", how)

    def _take_fault(self, seat: Seat, fault: dict[str, str]) -> None:
        """A worker cannot do its job: on a lost device a new worker may, otherwise the campaign ends."""
        kind = getattr(retrain.errors, fault["kind"], RetrainError)
        if issubclass(kind, DeviceLost):
            seat.dying = fault["text"]
            return
        error = kind.__new__(kind)  # some take more than their text
        error.args = (fault["text"],)
        seat.job = None
        self._fault = self._fault or error
        self._waiting.clear()
        for other in self._alive():
            if other.job is not None:
                other.job.stop()

    def _forget(self, seat: Seat) -> None:
        """Let go of a worker; one that still runs ends after its step."""
        seat.link.release()
        self._seats = [None if each is seat else each for each in self._seats]

    def _kill_busy(self) -> None:
        for seat in self._alive():
            if seat.job is not None:
                seat.link.kill()
                self._forget(seat)
