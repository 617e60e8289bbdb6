"""The executor of worker processes on this machine: cohorts side by side, each over a base of its own.

Jobs go to a worker and events come back as lines of JSON through two pipes (``worker``). A worker keeps its base in
memory between jobs. One that dies ends its job as "died"; the next job of its slot gets a new process.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import retrain.errors
from retrain.campaign.running.protocol import CohortJob, Event, Job, JobEnded, JobStarted, Tick, from_json, to_json
from retrain.errors import DeviceLost, RetrainError, StorageError
from retrain.gpus import OWN_GPU

FOLDER = "workers"
"""In a campaign's directory: what its workers printed."""
TICK_SECONDS = 0.25
"""Nothing heard for so long: whoever listens gets a Tick."""
PATIENCE_SECONDS = 10.0
"""How long workers without a job may take to end before they are killed."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]);"
    "from retrain.campaign.running.worker import main; main(*map(int, sys.argv[1:4]))"
)


@dataclass(frozen=True)
class Slot:
    """Where a worker computes: ``device`` is "cpu" or a GPU such as "gpu:1", ``visible`` that GPU as
    ``CUDA_VISIBLE_DEVICES`` has it, ``threads`` its share of the cores."""

    device: str
    threads: int
    visible: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a worker has in its environment. A number of threads that the user has set stays."""
        own = {"OMP_NUM_THREADS": str(self.threads)} | dict(os.environ)
        return own | {"CUDA_VISIBLE_DEVICES": self.visible, OWN_GPU: "1"} if self.visible else own


@dataclass(eq=False)
class JobHandle:
    """A job that waits or is under way. See ``Handle``."""

    id: str
    job: Job
    worker: Worker | None = None
    stopping: bool = False

    def stop(self) -> None:
        """See ``Handle.stop``."""
        if not self.stopping:
            self.stopping = True
            if self.worker is not None:
                self.worker.post({"id": self.id})


@dataclass(eq=False)
class Worker:
    """One process. ``job`` is what it works on."""

    name: str
    process: subprocess.Popen[bytes]
    commands: int
    answers: int
    log: Path
    job: JobHandle | None = None
    received: bytearray = field(default_factory=bytearray)
    dying: str = ""
    """Why it will end, where it said so."""

    @classmethod
    def start(cls, number: int, slot: Slot, directory: Path) -> Worker:
        """Start a process. Raises StorageError when its log cannot be written."""
        log = directory / FOLDER / f"worker_{number}.log"
        theirs, commands = os.pipe()
        answers, their_answers = os.pipe()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as output:
                words = [str(theirs), str(their_answers), str(os.getpid()), json.dumps(sys.path)]
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *words],
                    pass_fds=[theirs, their_answers],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches the controller only
                    env=slot.environment,
                )
        except OSError as error:
            os.close(commands)
            os.close(answers)
            raise StorageError(log, error) from error
        finally:
            os.close(theirs)
            os.close(their_answers)
        return cls(f"{number} {slot.device}", process, commands, answers, log)

    def post(self, command: dict[str, Any]) -> None:
        """Send a command; one that is dead does not hear it, which is found out when its answers end."""
        data = memoryview(json.dumps(command).encode() + b"\n")
        with suppress(OSError):
            while data:
                data = data[os.write(self.commands, data) :]

    def lines(self) -> Iterator[dict[str, Any]]:
        """The answers that have come whole."""
        *whole, rest = bytes(self.received).split(b"\n")
        self.received[:] = rest
        for line in whole:
            yield json.loads(line)

    def ended(self) -> str:
        """How the process ended, in words; waits until it has."""
        status = self.process.wait()
        who = f"worker {self.name} (process {self.process.pid})"
        if self.dying:
            return f"{who} ended: {self.dying}"
        if status < 0:
            name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
            more = ", as when memory runs out" if name == "SIGKILL" else ""
            return f"{who} was ended by {name}{more}"
        return f"{who} ended with exit status {status}; what it printed is in {self.log}"

    def close(self) -> None:
        """Close the pipes: a process that still runs ends after its step."""
        for descriptor in (self.commands, self.answers):
            with suppress(OSError):
                os.close(descriptor)
        self.commands = self.answers = -1


class Processes:
    """See ``Executor``: one worker for each of ``slots``. ``directory`` is the campaign's, for the workers' logs."""

    def __init__(self, slots: Sequence[Slot], directory: Path):
        self._places, self.directory = list(slots), directory
        self._workers: list[Worker | None] = [None] * len(self._places)
        self._waiting: deque[JobHandle] = deque()
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._fault: RetrainError | None = None

    @property
    def slots(self) -> int:
        """See ``Executor.slots``."""
        return len(self._places)

    def has_gpu(self) -> bool:
        """See ``Executor.has_gpu``."""
        return any(place.visible for place in self._places)

    def submit(self, job: Job) -> JobHandle:
        """See ``Executor.submit``."""
        self._count += 1
        handle = JobHandle(str(self._count), job)
        self._waiting.append(handle)
        return handle

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``. A fault that is no run's own has the other workers end after their step first."""
        try:
            while True:
                yield from self._assign()
                busy = [worker for worker in self._workers if worker is not None and worker.job is not None]
                if not busy and self._fault is not None:
                    fault, self._fault = self._fault, None
                    raise fault
                if not busy and not self._waiting:
                    return
                ready = self._selector.select(TICK_SECONDS)
                for key, _ in ready:
                    yield from self._read(key.data)
                if not ready:
                    yield Tick()
        finally:
            self._kill_busy()

    def close(self) -> None:
        """See ``Executor.close``."""
        self._waiting.clear()
        self._kill_busy()
        alive = [worker for worker in self._workers if worker is not None]
        for worker in alive:
            self._forget(worker)
        for worker in alive:
            try:
                worker.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._selector.close()

    def _assign(self) -> Iterator[Event]:
        """Give what waits to workers without a job; those that have a process first: their base is loaded."""
        free = [number for number, worker in enumerate(self._workers) if worker is None or worker.job is None]
        free.sort(key=lambda number: self._workers[number] is None)
        while free and self._waiting and self._fault is None:
            number, handle = free.pop(0), self._waiting.popleft()
            worker = self._workers[number]
            if worker is None:
                worker = self._workers[number] = Worker.start(number + 1, self._places[number], self.directory)
                self._selector.register(worker.answers, selectors.EVENT_READ, worker)
            worker.job, handle.worker = handle, worker
            runs = [run["run_id"] for run in handle.job.runs] if isinstance(handle.job, CohortJob) else []
            yield JobStarted(handle.id, worker.name, runs)
            worker.post({"id": handle.id, "job": to_json(handle.job)})
            if handle.stopping:
                worker.post({"id": handle.id})

    def _read(self, worker: Worker) -> Iterator[Event]:
        """What a worker has said since the last time; the end of its job when it is gone."""
        data = os.read(worker.answers, 1 << 16)
        worker.received += data
        for answer in worker.lines():
            if worker.job is None or answer["id"] != worker.job.id:
                continue
            if "fault" in answer:
                self._take_fault(worker, answer["fault"])
                continue
            event = from_json(answer["event"])
            if isinstance(event, JobEnded):
                worker.job = None
            yield event
        if not data:
            self._forget(worker)
            how, job = worker.ended(), worker.job
            worker.job = None
            if job is not None:
                yield JobEnded(job.id, "died", how)

    def _take_fault(self, worker: Worker, fault: dict[str, str]) -> None:
        """A worker cannot do its job: on a lost device a new process may, otherwise the campaign ends."""
        kind = getattr(retrain.errors, fault["kind"], RetrainError)
        if kind is DeviceLost:
            worker.dying = fault["text"]
            return
        error = kind.__new__(kind)  # some take more than their text
        error.args = (fault["text"],)
        worker.job = None
        self._fault = self._fault or error
        self._waiting.clear()
        for other in self._workers:
            if other is not None and other.job is not None:
                other.job.stop()

    def _forget(self, worker: Worker) -> None:
        """Let go of a worker's pipes; one that still runs ends after its step."""
        self._selector.unregister(worker.answers)
        worker.close()
        self._workers = [None if each is worker else each for each in self._workers]

    def _kill_busy(self) -> None:
        """Give up what is under way, without saving."""
        for worker in self._workers:
            if worker is not None and worker.job is not None:
                worker.process.kill()
                worker.process.wait()
                worker.job = None
                self._forget(worker)
