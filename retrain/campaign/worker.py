"""Run a worker of a campaign: claim tasks from its directory and run them over one base in memory.

    python -m retrain.campaign.worker DIR --slot N

Executors (``campaign.executors``) start it. It holds the leases of its slot and of every run that it trains, and
appends events to its own file. It ends when no task is left and no living controller could add one. On SIGTERM it
finishes its step and saves; as a Slurm task (``--requeue``) also on SIGUSR1.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from retrain.campaign.running.jobs import InProcess
from retrain.campaign.running.protocol import (
    EvaluationDone,
    Event,
    Facts,
    Job,
    JobStarted,
    Message,
    RunEnded,
    RunStarted,
    SealChanged,
    SqueezeJob,
    StepDone,
    WorkerFault,
    event_to_json,
    job_from_json,
)
from retrain.campaign.running.tasks import WORKERS, Tasks, append, events_of, home_of, newest
from retrain.campaign.running.team import Team
from retrain.config.runs import run_directory, run_place
from retrain.engines.server.fleet import RemoteFleet
from retrain.errors import RetrainError, UsageError
from retrain.ownership import Owner, owner_of, remove_leftovers
from retrain.records.observer import NullObserver, SpecLike
from retrain.records.schema.base import Values
from retrain.records.schema.layout import SERVER_NEWS
from retrain.training.inputs import CohortJob
from retrain.util.jsonl import NewLines, parse_row
from retrain.util.processes import end_with_parent
from retrain.util.session import DirectoryLock, LeaseWatch, leases_of

POLL_SECONDS = 0.25  # Seconds between polls of the campaign's directory
# Seconds for which the controller's lease may stay unchanged: NFS caches file attributes for up to a minute
PATIENCE_SECONDS = 90.0
WRITE_SECONDS = 60.0  # Seconds for which a failed write of an event is retried
# Seconds for which a preempted Slurm task waits for SIGKILL. If it exited by itself, Slurm would count it as completed
# and not requeue it
KILL_SECONDS = 120.0


@dataclass(frozen=True)
class Options:
    """Command line of a worker. ``slot`` counts from 1. ``name`` is slot and device, for messages. ``folder`` is the
    base of relative paths in the campaign's file; None selects the folder in the task. ``requeue``: started by Slurm.
    ``parent``: process whose death ends the worker, 0 for none."""

    directory: Path
    slot: int
    name: str
    folder: Path | None = None
    requeue: bool = False
    parent: int = 0

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> "Options":
        parser = argparse.ArgumentParser(prog="python -m retrain.campaign.worker", description="Train for a campaign.")
        parser.add_argument("directory", type=Path, help="the campaign's directory")
        parser.add_argument("--slot", type=int, required=True, help="number of this worker in the campaign, from 1")
        parser.add_argument("--device", default="cpu", help="name of the device, for messages")
        parser.add_argument("--folder", type=Path, help="base of relative paths in the campaign's file")
        parser.add_argument("--requeue", action="store_true", help="run as a Slurm task: requeue after SIGUSR1")
        parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
        options = parser.parse_args(arguments)
        name = f"{options.slot} {options.device}"
        return cls(options.directory, options.slot, name, options.folder, options.requeue, options.parent)


class EventSender(NullObserver):
    """Observer that writes everything as events; its methods are thread-safe."""

    def __init__(self, send: Callable[[Event], None]):
        self.send = send

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self.send(RunStarted(spec.run_id, step, max_steps))

    def step(self, spec: SpecLike, row: Values) -> None:
        self.send(StepDone(spec.run_id, dict(row)))

    def sealed(self, spec: SpecLike, seal: Values) -> None:
        self.send(SealChanged(spec.run_id, dict(seal)))

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self.send(EvaluationDone(spec.run_id, name, dict(row)))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        self.send(RunEnded(spec.run_id, status, message))

    def message(self, text: str, level: str = "info") -> None:
        self.send(Message(text, level))

    def note(self, facts: Values) -> None:
        self.send(Facts(dict(facts)))


class Worker:
    def __init__(self, options: Options, process: int, lock: DirectoryLock, owner: Owner):
        self.options, self.lock, self.owner = options, lock, owner
        self.directory, self.tasks = options.directory, Tasks.of(options.directory)
        self.events = events_of(home_of(options.directory, options.slot), process)
        self.label = f"worker_{options.slot}-{process}"  # Part of the names of claimed tasks
        self.servers = RemoteFleet()
        self.ending = threading.Event()  # Set once no further task may start
        self.requeued = False
        self._stopped: frozenset[str] = frozenset()
        self._controller = LeaseWatch(options.directory, PATIENCE_SECONDS)
        self._writing = threading.Lock()
        self._server_news = NewLines(options.directory / WORKERS / SERVER_NEWS, awaits_bytes=True)

    def run(self, trainer: InProcess) -> int:
        self.write({"up": self.options.name, "process": os.getpid()})
        self._read_server_news(first=True)
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
                job = job_from_json(content)
                folder = self.options.folder or job.folder
                self._do(trainer, task, replace(job, directory=self.directory, folder=folder))
            except RetrainError as error:  # not a run's fault: the next task would fail too
                self.send(task, WorkerFault(type(error).__name__, str(error)))
                return error.exit_status
        trainer.close()
        return 0

    def stop_after_step(self, requeue: bool = False) -> None:
        """Let the worker finish its current step, save, and end. ``requeue``: Slurm has announced the time limit."""
        self.requeued = self.requeued or requeue
        self.ending.set()

    def write(self, facts: Values) -> None:
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

    def send(self, task: str, event: Event) -> None:
        self.write({"task": task, "event": event_to_json(event)})

    def _do(self, trainer: InProcess, task: str, job: Job) -> None:
        config = job.runs[0].config
        if trainer.team is None and config.backend.shard != "none":
            trainer.team = Team(config)
        if config.inference.beside_trainer:
            trainer.servers, trainer.server_directory = None, home_of(self.directory, self.options.slot)
        runs = [spec.run_id for spec in job.runs] if isinstance(job, CohortJob) else []
        self.send(task, JobStarted(task, self.options.name, runs))
        places = [(run_directory(job.directory, spec), self.owner.at(run_place(spec))) for spec in job.runs]
        with leases_of(places) as locks:
            analysed = [job.directory / job.subfolder] if isinstance(job, SqueezeJob) else []
            for directory in [*locks, *analysed]:  # left half-written by a killed worker
                remove_leftovers(directory)

            def stop() -> bool:
                for lock in (self.lock, *locks.values()):
                    lock.check()
                return self.ending.is_set() or task in self._stopped

            trainer.guard = lambda directory: locks[directory].check
            end = trainer.do(job, EventSender(partial(self.send, task)), stop)
            stop()  # raises LeaseLost for runs that another process has taken over: they did not end here
        # Sent after the leases are released, because the controller may let another worker continue the runs.
        self.send(task, replace(end, job=task))

    def _watch(self) -> None:
        # A thread, because a step may take minutes
        while True:
            with suppress(OSError):
                self._stopped = self.tasks.stopped()
                self._read_server_news()
            if self.servers.urls and not self._controller.is_alive():
                self.servers.update(self.servers.urls, "the controller, which ran the servers, has ended")
            time.sleep(POLL_SECONDS)

    def _read_server_news(self, first: bool = False) -> None:
        for line in map(parse_row, self._server_news):
            if "urls" in line:
                self.servers.update(line["urls"], line["gave_up"])
            elif not first:
                self.servers.record(line["message"], line["level"])


# Signal that Slurm sends before the time limit, possibly to every process of the task. It is blocked before any thread
# starts: graders and tools inherit the mask and survive, and one thread waits for it
NOTICE = {signal.SIGUSR1, signal.SIGUSR2}


def listen(worker: Worker, options: Options) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: worker.stop_after_step())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # signals of a terminal: the controller decides what to do
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if options.requeue:

        def wait_for_notice() -> None:
            signal.sigwait(NOTICE)
            worker.stop_after_step(requeue=True)

        threading.Thread(target=wait_for_notice, name="notice", daemon=True).start()
    if options.parent:
        end_with_parent(options.parent)


def main(make_trainer: Callable[[RemoteFleet], InProcess] = lambda servers: InProcess(servers=servers)) -> int:
    options = Options.parse()
    if options.requeue:
        signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE)
    owner = owner_of(options.directory)
    if owner is None:
        print(f"{options.directory} is not the directory of a campaign on this machine", file=sys.stderr)
        return UsageError.exit_status
    home = home_of(options.directory, options.slot)
    try:
        with leases_of([(home, owner.at(f"{WORKERS}/{home.name}"))]) as locks:
            worker = Worker(options, newest(home) + 1, locks[home], owner)
            listen(worker, options)
            status = worker.run(make_trainer(worker.servers))
            _hand_back(worker)
    except RetrainError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return status


def _hand_back(worker: Worker) -> None:
    # Slurm counts a preempted task that exits by itself as completed, so this waits to be killed
    if not worker.options.requeue or not worker.ending.is_set():
        return
    worker.write({"requeued": worker.requeued})
    if worker.requeued:
        job, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
        task = f"{job}_{index}" if job and index else os.environ.get("SLURM_JOB_ID", "")
        with suppress(OSError):
            subprocess.run(["scontrol", "requeue", task], check=False)
    time.sleep(KILL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
