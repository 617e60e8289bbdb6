"""The worker of a campaign: it claims tasks from the campaign's directory and does them over one base in memory.

    python -m retrain.campaign.worker DIR --slot N

Whoever starts it (``campaign.executors``), it is the only program that trains in another process. It holds the lease of
its slot and of every run that it trains, says what happens in an event file of its own, and ends when nothing is left
to claim and nobody is there who could add anything. SIGTERM lets it finish its step and save; with ``--requeue`` it is
a task of Slurm, and SIGUSR1 does the same before Slurm puts the task back into the queue.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from retrain.campaign.running.in_process import InProcess
from retrain.campaign.running.protocol import (
    CohortJob,
    Evaluated,
    Event,
    Facts,
    Guard,
    Job,
    JobEnded,
    JobObserver,
    JobStarted,
    Message,
    RunEnded,
    RunStarted,
    SqueezeJob,
    StepDone,
    WorkerFault,
    event_to_json,
    job_from_json,
    specs_of,
)
from retrain.campaign.running.session import DirectoryLock, LeaseWatch, wait_for_writers
from retrain.campaign.running.tasks import SERVERS, WORKERS, Tail, Tasks, append, events_of, home_of, newest
from retrain.campaign.running.team import OtherRank, Team
from retrain.config.runs import run_directory, run_place
from retrain.engines.server.fleet import Told
from retrain.errors import NotOurs, RetrainError, UsageError
from retrain.ownership import Owner, owner_of, remove_leftovers
from retrain.records.observer import NullObserver, SpecLike
from retrain.records.schema.base import Values

POLL_SECONDS = 0.25  # Seconds between looks at the campaign's directory
PATIENCE_SECONDS = 90.0
"""How long the controller's lease may stand still before it counts as gone: file attributes are up to a minute old on
NFS."""
WRITE_SECONDS = 60.0  # How long an event that cannot be written is tried again
KILL_SECONDS = 120.0
"""How long a task of Slurm waits after SIGTERM for Slurm to end it, longer than the usual time between SIGTERM and
SIGKILL: one that ended by itself would count as completed, and would not be put back into the queue."""
PR_SET_PDEATHSIG = 1


class Trains(Protocol):
    """Does jobs; ``InProcess`` is the one that trains."""

    guard: Guard
    team: Team | OtherRank | None

    def do(self, job: Job, observer: JobObserver, stop: Callable[[], bool]) -> JobEnded: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Options:
    """What a worker is told on its command line: the campaign's ``directory``; the ``slot``, counted from 1; its
    ``name`` for people; ``folder``, where relative paths of the campaign's file are looked up, None for
    where the task says; whether Slurm started it (``requeue``); the ``parent`` with which it ends, 0 for none."""

    directory: Path
    slot: int
    name: str
    folder: Path | None = None
    requeue: bool = False
    parent: int = 0

    @classmethod
    def parse(cls, words: Sequence[str] | None = None) -> "Options":
        parser = argparse.ArgumentParser(prog="python -m retrain.campaign.worker", description="Train for a campaign.")
        parser.add_argument("directory", type=Path, help="the campaign's directory")
        parser.add_argument("--slot", type=int, required=True, help="which of its workers this is, counted from 1")
        parser.add_argument("--device", default="cpu", help="what it computes on, for people")
        parser.add_argument("--folder", type=Path, help="where relative paths of the campaign's file lie here")
        parser.add_argument("--requeue", action="store_true", help="it is a task of Slurm")
        parser.add_argument("--parent", type=int, default=0, help="the process with which it ends")
        given = parser.parse_args(words)
        name = f"{given.slot} {given.device}"
        return cls(given.directory, given.slot, name, given.folder, given.requeue, given.parent)


class EventSender(NullObserver):
    """Sends its calls as events. They come from any thread."""

    def __init__(self, send: Callable[[Event], None]):
        self.send = send

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self.send(RunStarted(spec.run_id, step, max_steps))

    def step(self, spec: SpecLike, row: Values) -> None:
        self.send(StepDone(spec.run_id, dict(row)))

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self.send(Evaluated(spec.run_id, name, dict(row)))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        self.send(RunEnded(spec.run_id, status, message))

    def message(self, text: str, level: str = "info") -> None:
        self.send(Message(text, level))

    def note(self, facts: Mapping[str, Any]) -> None:
        self.send(Facts(dict(facts)))


class Worker:
    """One worker, between taking its slot's lease and letting go of it."""

    def __init__(self, options: Options, process: int, lock: DirectoryLock, owner: Owner):
        self.options, self.lock, self.owner = options, lock, owner
        self.directory, self.tasks = options.directory, Tasks.of(options.directory)
        self.events = events_of(home_of(options.directory, options.slot), process)
        self.label = f"worker_{options.slot}-{process}"  # In the names of what it has claimed
        self.servers = Told()
        self.ending = threading.Event()  # Set once no further task may start
        self.requeued = False
        self._stopped: frozenset[str] = frozenset()
        self._controller = LeaseWatch(options.directory, PATIENCE_SECONDS)
        self._writing = threading.Lock()
        self._reported = Tail(options.directory / WORKERS / SERVERS)

    def work(self, trains: Trains) -> int:
        """Do tasks until the end; return the exit status."""
        self.say({"up": self.options.name, "process": os.getpid()})
        self._hear_of_servers(first=True)
        threading.Thread(target=self._watch, name="directory", daemon=True).start()
        while not self.ending.is_set():
            claimed = self.tasks.claim(self.label)
            if claimed is None:
                if self.tasks.is_closed() or not self._controller.is_alive():
                    break
                self.ending.wait(POLL_SECONDS)
                continue
            task, content = claimed
            try:
                self._do(trains, task, self._here(job_from_json(content)))
            except RetrainError as error:  # no fault of a run: the next task would meet it too
                self.tell(task, WorkerFault(type(error).__name__, str(error)))
                return error.exit_status
        trains.close()
        return 0

    def leave(self, requeue: bool = False) -> None:
        """End after the step that is under way, saved."""
        self.requeued = self.requeued or requeue
        self.ending.set()

    def say(self, facts: Mapping[str, Any]) -> None:
        """Write a line of events; a file system that does not take it is asked again for a while."""
        end = time.monotonic() + WRITE_SECONDS
        while True:
            try:
                with self._writing:
                    return append(self.events, facts)
            except OSError:
                if time.monotonic() > end or self.ending.is_set():
                    self.ending.set()
                    return None
                time.sleep(POLL_SECONDS)

    def tell(self, task: str, event: Event) -> None:
        self.say({"task": task, "event": event_to_json(event)})

    def _here(self, job: Job) -> Job:
        """Return a job with the directories as this machine has them."""
        return replace(job, directory=self.directory, folder=self.options.folder or job.folder)

    def _do(self, trains: Trains, task: str, job: Job) -> None:
        config = specs_of(job)[0].config
        if trains.team is None and config.backend.shard != "none":
            trains.team = Team(config)
        runs = [spec.run_id for spec in job.runs] if isinstance(job, CohortJob) else []
        self.tell(task, JobStarted(task, self.options.name, runs))
        with _leases(job, self.owner) as locks:

            def stop() -> bool:
                for lock in (self.lock, *locks.values()):
                    lock.check()
                return self.ending.is_set() or task in self._stopped

            trains.guard = lambda directory: locks[directory].check
            end = trains.do(job, EventSender(partial(self.tell, task)), stop)
            stop()  # runs that another process has taken over have not ended here
        # After the leases: the controller may have the runs trained on elsewhere.
        self.tell(task, replace(end, job=task))

    def _watch(self) -> None:
        """Look for requests and for news of the servers, from a thread of its own: also while a step is under way."""
        while True:
            with suppress(OSError):
                self._stopped = self.tasks.stopped()
                self._hear_of_servers()
            if self.servers.urls and not self._controller.is_alive():
                self.servers.tell(self.servers.urls, "whoever kept the servers is gone")
            time.sleep(POLL_SECONDS)

    def _hear_of_servers(self, first: bool = False) -> None:
        for line in self._reported.lines():
            if "urls" in line:
                self.servers.tell(line["urls"], line["gave_up"])
            elif not first:
                self.servers.record(line["message"], line["level"])


@contextmanager
def _leases(job: Job, owner: Owner) -> Iterator[dict[Path, DirectoryLock]]:
    """Hold the leases of all runs that a job writes, as soon as nobody else has them; what a worker that was killed
    left half-written there, and where the job writes besides, is removed."""
    places = [(run_directory(job.directory, spec), owner.at(run_place(spec))) for spec in specs_of(job)]
    while True:
        wait_for_writers([directory for directory, _ in places])
        with ExitStack() as stack:
            try:
                locks = {place: stack.enter_context(DirectoryLock(place, owner=mine)) for place, mine in places}
            except UsageError as error:
                if isinstance(error, NotOurs):
                    raise
                continue  # taken in this moment
            for directory in [directory for directory, _ in places] + (
                [job.directory / job.place] if isinstance(job, SqueezeJob) else []
            ):
                remove_leftovers(directory)
            yield locks
            return


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when ``parent`` has ended, where it can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


NOTICE = {signal.SIGUSR1, signal.SIGUSR2}
"""Slurm's notice. It may reach every process of the task: it is blocked before any thread begins, so that graders and
tools, which inherit that, are not ended by it, and heard by one thread."""


def listen(worker: Worker, options: Options) -> None:
    """Handle the signals of a worker."""
    signal.signal(signal.SIGTERM, lambda number, frame: worker.leave())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the controller says what is to be done
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if options.requeue:

        def hear() -> None:
            signal.sigwait(NOTICE)
            worker.leave(requeue=True)

        threading.Thread(target=hear, name="notice", daemon=True).start()
    if options.parent:
        end_with_parent(options.parent)


def main(trains: Callable[[Told], Trains] = lambda servers: InProcess(servers=servers)) -> int:
    """Work until nothing is left, in this process; return the exit status."""
    options = Options.parse()
    if options.requeue:
        signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE)
    owner = owner_of(options.directory)
    if owner is None:
        print(f"{options.directory} is no directory of a campaign on this machine", file=sys.stderr)
        return UsageError.exit_status
    home = home_of(options.directory, options.slot)
    try:
        with ExitStack() as stack:
            lock = _slot_lock(home, owner, stack)
            worker = Worker(options, newest(home) + 1, lock, owner)
            listen(worker, options)
            status = worker.work(trains(worker.servers))
            _hand_back(worker)
    except RetrainError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return status


def _slot_lock(home: Path, owner: Owner, stack: ExitStack) -> DirectoryLock:
    """Take the lease of a slot, once the worker that had it before has ended."""
    while True:
        wait_for_writers([home])
        try:
            return stack.enter_context(DirectoryLock(home, owner=owner.at(f"{WORKERS}/{home.name}")))
        except UsageError as error:
            if isinstance(error, NotOurs):
                raise
            time.sleep(POLL_SECONDS)


def _hand_back(worker: Worker) -> None:
    """Have Slurm put this task back into the queue, or wait until it has done so itself."""
    if not worker.options.requeue or not worker.ending.is_set():
        return
    worker.say({"requeued": worker.requeued})
    if worker.requeued:
        job, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        task = f"{job}_{index}" if job and index else os.environ.get("SLURM_JOB_ID", "")
        with suppress(OSError):
            subprocess.run(["scontrol", "requeue", task], check=False)
    time.sleep(KILL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
