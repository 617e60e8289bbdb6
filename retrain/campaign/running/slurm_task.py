"""What runs on a node for a worker: the worker's process, between the files of its folder and its two pipes.

It keeps a worker process there until nobody wants one any more: one that was killed is followed by another, in the same
job. It ends, with everything saved, when its folder is closed, when the campaign's controller is gone (its lease stands
still, or is another's), and when Slurm asks for it. After SIGUSR1, which Slurm sends before the time limit, submitit
puts the job back into the queue; after SIGTERM, which it sends to jobs that are preempted or cancelled, Slurm does with
the job what it had in mind.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.campaign.running.exchange import Tail, answers_of, append, commands_of, is_closed, newest
from retrain.campaign.running.session import lease_of
from retrain.campaign.running.spawning import Spawned, end_words, spawn, write_all
from retrain.device import OWN_GPU
from retrain.errors import NotReadable

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

POLL_SECONDS = 1.0
BEAT_SECONDS = 10.0  # Seconds of silence after which a task sends a heartbeat
PATIENCE_SECONDS = 90.0
"""How long the controller's lease may stand still: file attributes are up to a minute old on NFS."""
KILL_SECONDS = 120.0
"""After SIGTERM: how long a task that is done waits for Slurm to end it, which then puts it back into the queue, or
not. Longer than the usual time between SIGTERM and SIGKILL; one that ended by itself would count as completed."""


@dataclass
class Pace:
    """How often is looked and said, in seconds."""

    poll: float = POLL_SECONDS
    beat: float = BEAT_SECONDS
    patience: float = PATIENCE_SECONDS
    kill: float = KILL_SECONDS


@dataclass
class Task:
    """A task of a job array, as submitit pickles it. ``directory`` is the campaign's, ``folder`` the worker's;
    ``token`` is in the lease of the controller that asked for it; ``path`` and ``boot`` are what a worker process
    imports from and runs, ``threads`` how many it computes with unless the environment says that."""

    directory: str
    folder: str
    token: str
    path: list[str]
    boot: str
    threads: int | None = None
    gpu: bool = True
    pace: Pace = field(default_factory=Pace)
    _keeper: Keeper | None = field(default=None, init=False, repr=False)

    def __call__(self) -> None:
        """Keep a worker until none is wanted; in the main thread of the job's process."""
        keeper = self._keeper = Keeper(self)
        signal.signal(signal.SIGTERM, lambda number, frame: keeper.leave())
        thread = threading.Thread(target=keeper.keep, name="keeper", daemon=True)
        thread.start()
        # A handler of signals runs on top of this frame and waits for the thread as well: no lock is held here.
        while not keeper.over:
            time.sleep(self.pace.poll / 5)
        if keeper.fault is not None:
            raise keeper.fault
        end = time.monotonic() + self.pace.kill
        while keeper.leaving and time.monotonic() < end:
            time.sleep(self.pace.poll / 5)

    def checkpoint(self) -> DelayedSubmission:
        """What submitit puts back into the queue, called at its signal: this task, once all is saved."""
        from submitit.helpers import DelayedSubmission

        if self._keeper is not None:
            self._keeper.leave(again=True)
            while not self._keeper.over:
                time.sleep(self.pace.poll / 5)
        return DelayedSubmission(replace(self))


class Keeper:
    """The work of a task, in a thread of its own. ``over``: nothing runs any more."""

    def __init__(self, task: Task):
        self.task, self.folder, self.pace = task, Path(task.folder), task.pace
        self.over, self.leaving, self.again = False, False, False
        self.fault: BaseException | None = None
        self._wake = threading.Event()
        self._writing = threading.Lock()
        self._lease: tuple[Any, float] = None, time.monotonic()

    def leave(self, again: bool = False) -> None:
        """Ask for an end after the step that is under way; ``again``: the job will be back. For handlers of signals."""
        self.leaving, self.again = True, self.again or again
        self._wake.set()

    def keep(self) -> None:
        """Run one worker process after the other while they are wanted."""
        try:
            while self._is_wanted():
                self._work()
        except BaseException as error:
            self.fault = error
        finally:
            self.over = True

    def _is_wanted(self) -> bool:
        return not self.leaving and not is_closed(self.folder) and self._has_controller()

    def _has_controller(self) -> bool:
        """Whether the controller that asked for this task lives."""
        lease, now = None, time.monotonic()
        with suppress(NotReadable):  # a network file system that does not answer at the moment
            lease = lease_of(Path(self.task.directory))
        if lease is not None:
            if lease.get("token") != self.task.token:
                return False
            if lease.get("count") != self._lease[0]:
                self._lease = lease.get("count"), now
        return now - self._lease[1] < self.pace.patience

    def _work(self) -> None:
        number = newest(self.folder) + 1
        answers = answers_of(self.folder, number)
        commands_of(self.folder, number).touch()
        worker = self._start()
        self._say(answers, {"up": socket.gethostname(), "process": worker.process.pid})
        pump = threading.Thread(target=self._pump, args=(worker, answers), name="answers", daemon=True)
        pump.start()
        self._pass_on(worker, Tail(commands_of(self.folder, number)), answers)
        pump.join()
        status = worker.process.wait()
        self._say(answers, {"ended": end_words(status), "again": self.again})
        if status and not self.leaving:
            self._wake.wait(self.pace.poll)  # one that cannot even begin is not begun without pause

    def _start(self) -> Spawned:
        own = {} if self.task.threads is None else {"OMP_NUM_THREADS": str(self.task.threads)}
        environment = own | dict(os.environ) | ({OWN_GPU: "1"} if self.task.gpu else {})
        # Slurm may send the signal for this process to all that descend from it: there it is to mean nothing.
        meant_for_us = {signal.SIGUSR1, signal.SIGUSR2}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, meant_for_us)
        try:
            return spawn(None, self.task.boot, self.task.path, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _pass_on(self, worker: Spawned, commands: Tail, answers: Path) -> None:
        """Give the worker its commands until it has ended; no longer wanted, it hears that there are no more."""
        listening, beat = True, time.monotonic() + self.pace.beat
        while worker.process.poll() is None:
            for line in commands.lines():
                command = json.loads(line)
                if "kill" in command:
                    worker.process.kill()
                elif "end" not in command and listening:
                    write_all(worker.commands, line)
                    continue
                if listening:
                    os.close(worker.commands)
                    listening = False
            if listening and not self._is_wanted():
                os.close(worker.commands)
                listening = False
            if time.monotonic() > beat:
                self._say(answers, {"beat": True})
                beat = time.monotonic() + self.pace.beat
            if self._wake.wait(self.pace.poll):
                self._wake.clear()
        if listening:
            os.close(worker.commands)

    def _pump(self, worker: Spawned, answers: Path) -> None:
        """Write down what the worker says; half a line at the end, of one that was killed, is left out."""
        with os.fdopen(worker.answers, "rb") as said:
            for line in said:
                if line.endswith(b"\n"):
                    self._say(answers, line)

    def _say(self, answers: Path, line: bytes | Mapping[str, Any]) -> None:
        while True:
            with self._writing, suppress(OSError):
                append(answers, line)
                return
            if is_closed(self.folder):
                return  # nobody reads it
            time.sleep(self.pace.poll)
