"""A worker: a process that does the jobs of a campaign's controller, one after the other, over one base in memory.

Started as ``main(commands, answers)`` with two pipes of its own, so that what libraries print gets nowhere between:
one JSON object a line, jobs, requests to stop and servers' addresses on the first, events on the second. Standard
output and error are the worker's log. It holds the lease of every run that it trains. When nobody is at the other end
any more it ends after its step, with everything saved.
"""

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from retrain.campaign.running.in_process import InProcess
from retrain.campaign.running.protocol import (
    CohortJob,
    Evaluated,
    Event,
    Facts,
    Job,
    Message,
    RunEnded,
    RunStarted,
    SqueezeJob,
    StepDone,
    event_to_json,
    job_from_json,
)
from retrain.campaign.running.session import DirectoryLock, wait_for_writers
from retrain.campaign.running.team import Team
from retrain.config.runs import RunSpec, run_directory, run_place
from retrain.engines.server.fleet import Told
from retrain.errors import DeviceLost, NotOurs, RetrainError, UsageError
from retrain.ownership import claim, remove_leftovers
from retrain.records.observer import NullObserver, SpecLike
from retrain.records.schema.base import Values

PR_SET_PDEATHSIG = 1


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
    """Does jobs until the commands end, or it is told to by SIGTERM."""

    def __init__(self, commands: int, answers: int):
        for descriptor in (commands, answers):  # not for processes that graders and tools start
            os.set_inheritable(descriptor, False)
        self.commands = os.fdopen(commands, "rb")
        self.answers = os.fdopen(answers, "wb", buffering=0)
        self.servers = Told()
        self.executor = InProcess(servers=self.servers)  # Its ranks are started with its first job
        self.ending = False  # Whether no further job may start
        self._jobs: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._unwanted: set[str] = set()
        self._writing = threading.Lock()

    def work(self) -> int:
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        while (item := self._jobs.get()) is not None and not self.ending:
            name, job = item
            try:
                self._do(name, job)
            except RetrainError as error:
                self._say(name, fault={"kind": type(error).__name__, "text": str(error)})
                if isinstance(error, DeviceLost):
                    return error.exit_status  # nothing on the device can be used by the next job
        self.executor.close()
        return 0

    def end(self) -> None:
        self.ending = True
        self._jobs.put(None)

    def _listen(self) -> None:
        """Take commands, from a thread of its own: they have to be heard while a step is under way."""
        with suppress(ValueError):  # half a line: whoever wrote it was killed
            for line in self.commands:
                command = json.loads(line)
                if "job" in command:
                    self._jobs.put((command["id"], job_from_json(command["job"])))
                    continue
                if "servers" in command:
                    self.servers.tell(command["servers"], command["gave_up"])
                    continue
                if "server_message" in command:
                    self.servers.record(command["server_message"], command["level"])
                    continue
                self._unwanted.add(command["id"])
        self.servers.tell(self.servers.urls, "whoever kept the servers is gone")
        self.end()

    def _do(self, name: str, job: Job) -> None:
        config = _specs(job)[0].config
        if self.executor.team is None and config.backend.shard != "none":
            self.executor.team = Team(config)
        self._say(name, begun=True)
        with _leases(job) as locks:

            def stop() -> bool:
                for lock in locks.values():
                    lock.check()
                return self.ending or name in self._unwanted

            self.executor.guard = lambda directory: locks[directory].check
            end = self.executor.do(job, EventSender(partial(self._say, name)), stop)
            stop()  # runs that another process has taken over have not ended here
        # After the leases: the controller may have the runs trained on elsewhere.
        self._say(name, replace(end, job=name))

    def _say(self, name: str, event: Event | None = None, **facts: Any) -> None:
        if event is not None:
            facts["event"] = event_to_json(event)
        data = memoryview(json.dumps({"id": name, **facts}).encode() + b"\n")
        try:
            with self._writing:
                while data:
                    data = data[self.answers.write(data) :]
        except OSError:  # nobody listens any more
            self.end()


@contextmanager
def _leases(job: Job) -> Iterator[dict[Path, DirectoryLock]]:
    """The leases of all runs that a job writes, as soon as nobody else has them; what a worker that was killed left
    half-written there, and where the job writes besides, is removed."""
    owner = claim(job.directory)
    places = [(run_directory(job.directory, spec), owner.at(run_place(spec))) for spec in _specs(job)]
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


def _specs(job: Job) -> list[RunSpec]:
    return [*job.runs] if isinstance(job, CohortJob) else [job.run]


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when ``parent`` has ended, where it can; the end of the pipes says so as well."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def main(commands: int, answers: int, parent: int) -> None:
    """Work until the end, and end this process."""
    worker = Worker(commands, answers)
    signal.signal(signal.SIGTERM, lambda number, frame: worker.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the controller says what is to be done
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_parent(parent)
    sys.exit(worker.work())
