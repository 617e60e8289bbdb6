"""A pool of worker processes whose time and memory limits hold, whatever the work does.

A job that hangs, allocates without end, calls ``os._exit`` or is killed costs that one job: its worker is killed
with all its children and replaced. Workers are plain ``python -c`` processes (no fork of the trainer, no import
of its main module or of torch), started when the first job comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from retrain.errors import PluginError
from retrain.rewards.worker import HEADER, LIMIT

START_SECONDS = 60.0  # imports of a worker on a slow or busy machine
MAX_REPLY_BYTES = 16 << 20
MAX_FAILED_STARTS = 3
MAX_TIMEOUTS_IN_A_ROW = 16  # whatever the reward waits for is missing: a batch must not take hours to fail
_BOOT = (
    "import json, sys; own = json.loads(sys.argv[2]); sys.path[:] = own + [p for p in sys.path if p not in own]; "
    "from retrain.rewards.worker import main; main(int(sys.argv[1]))"
)


class Flooded(ValueError):
    """A reply of more than ``MAX_REPLY_BYTES``."""


@dataclass
class Reply:
    """What became of a job: ``value`` as the worker returned it, or ``error`` in words with its ``kind``."""

    value: Any = None
    error: str | None = None
    kind: Literal["raised", "timeout", "died", "flooded"] | None = None


@dataclass(eq=False)
class _Worker:
    """One process: ``job`` is the index that it works on, ``deadline`` (monotonic seconds) when it is killed."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    deadline: float
    ready: bool = False
    job: int | None = None
    received: bytearray = field(default_factory=bytearray)

    def frame(self) -> dict[str, Any] | None:
        """The reply, None while it is incomplete. Raises ValueError for anything else."""
        if len(self.received) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.received)
        if length > MAX_REPLY_BYTES:
            raise Flooded(f"reply of {length} bytes")
        if len(self.received) < HEADER.size + length:
            return None
        if len(self.received) > HEADER.size + length:
            raise ValueError("more than one reply")
        reply = json.loads(bytes(self.received[HEADER.size :]))
        self.received.clear()
        if not isinstance(reply, dict):
            raise ValueError("not an object")
        return reply


class WorkerPool:
    """Runs jobs in up to ``workers`` processes.

    ``what`` does the work, in messages; ``python`` is another interpreter than this process's, which then sees this
    package and ``folders`` alone of what this one can import. ``entry`` is ``module:function``: called in the worker
    with ``arguments``, it returns the function that takes a job and returns a JSON value. ``timeout_s`` is the
    wall-clock limit of one job, ``memory_bytes`` the limit of the address space (RLIMIT_AS) or, for work that maps more
    than it uses, of private memory (RLIMIT_DATA). ``start_s`` is how long a process may take to be ready.
    """

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int,
        memory_kind: Literal["RLIMIT_AS", "RLIMIT_DATA"] = "RLIMIT_AS",
        what: str = "the reward",
        python: str | None = None,
        folders: Sequence[str] = (),
        start_s: float = START_SECONDS,
    ):
        self.start_s = start_s
        self.workers, self.timeout_s, self.what = max(1, workers), timeout_s, what
        self.python = python or sys.executable
        self.path = [str(Path(__file__).parents[2]), *folders] if python else sys.path
        self._setup = pickle.dumps(
            {
                "entry": entry,
                "arguments": dict(arguments),
                "memory_bytes": memory_bytes,
                "memory_kind": memory_kind,
                "what": what,
            }
        )
        self._limit_s = timeout_s
        self.facts: dict[str, Any] = {}
        """The attribute ``facts`` of the entry's function; known after ``start``."""
        self._alive: list[_Worker] = []
        self._failed_starts = self._timeouts = 0
        self._fatal: str | None = None  # why no further job of this batch is given out
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._alive)

    def start(self) -> None:
        """Start one worker and wait until it can take jobs. Raises PluginError with the reason if it cannot."""
        with self._lock:
            self._failed_starts, self._fatal = 0, None
            if not self._alive:
                self._spawn()
            while not any(worker.ready for worker in self._alive):
                self._wait([])
                if self._fatal is not None:
                    raise PluginError(self._fatal)
                if not self._alive:
                    self._spawn()

    def map(self, jobs: Sequence[Any], timeout_s: float | None = None) -> list[Reply]:
        """One reply for each job, in order, of which each may take ``timeout_s``. Never raises for what a job does."""
        with self._lock:
            self._limit_s = timeout_s or self.timeout_s
            replies = [Reply(error="not graded") for _ in jobs]
            waiting = deque(range(len(jobs)))
            self._failed_starts, self._timeouts, self._fatal = 0, 0, None
            try:
                while waiting or any(worker.job is not None for worker in self._alive):
                    if self._fatal is not None:
                        for index in waiting:
                            replies[index] = Reply(error=self._fatal)
                        waiting.clear()
                        continue
                    busy = sum(worker.job is not None for worker in self._alive)
                    for _ in range(min(self.workers, busy + len(waiting)) - len(self._alive)):
                        self._spawn()
                    for worker in [worker for worker in self._alive if worker.ready and worker.job is None]:
                        if waiting:
                            self._assign(worker, waiting, jobs)
                    self._wait(replies)
            except BaseException:  # interrupted between frames: no worker may answer the next call's jobs
                _kill_all(self._alive)
                raise
            return replies

    def close(self) -> None:
        """Kill the workers; a later ``map`` starts new ones."""
        with self._lock:
            _kill_all(self._alive)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            process = subprocess.Popen(
                [self.python, "-c", _BOOT, str(theirs.fileno()), json.dumps(self.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the trainer only; killpg reaches the worker's children too
                env=environment,
            )
        worker = _Worker(process, ours, time.monotonic() + self.start_s)
        self._alive.append(worker)
        if not self._post(worker, self._setup):
            self._failed_start(worker, "it ended at once")

    def _assign(self, worker: _Worker, waiting: deque[int], jobs: Sequence[Any]) -> None:
        """Give the next job to an idle worker; one that died meanwhile is replaced, and the job stays in line."""
        if not self._post(worker, LIMIT.pack(self._limit_s) + pickle.dumps(jobs[waiting[0]])):
            self._discard(worker)
            return
        worker.job = waiting.popleft()
        worker.deadline = time.monotonic() + self._limit_s

    def _post(self, worker: _Worker, payload: bytes) -> bool:
        """Send a frame; False when the worker is dead or does not take it."""
        if worker.process.poll() is not None:
            return False
        worker.connection.settimeout(self.timeout_s)
        try:
            worker.connection.sendall(HEADER.pack(len(payload)) + payload)
        except OSError:
            return False
        return True

    def _wait(self, replies: list[Reply]) -> None:
        """Wait for the next reply or deadline, and handle both."""
        pending = [worker for worker in self._alive if worker.job is not None or not worker.ready]
        if not pending:
            return
        timeout = max(0.0, min(worker.deadline for worker in pending) - time.monotonic())
        with selectors.DefaultSelector() as selector:
            for worker in pending:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            for key, _ in selector.select(timeout):
                self._read(key.data, replies)
        now = time.monotonic()
        for worker in [worker for worker in pending if worker in self._alive and worker.deadline <= now]:
            if not worker.ready:
                self._failed_start(worker, f"it was not ready after {self.start_s:g} s")
            elif worker.job is not None:
                self._give_up(
                    worker, replies, f"{self.what} took longer than {self._limit_s:g} s (timeout_s)", "timeout"
                )
                self._timeouts += 1
                if self._timeouts >= MAX_TIMEOUTS_IN_A_ROW:
                    self._fatal = f"not tried after {self._timeouts} time-outs of {self.timeout_s:g} s in a row"

    def _read(self, worker: _Worker, replies: list[Reply]) -> None:
        try:
            worker.connection.settimeout(0)
            part = worker.connection.recv(1 << 20)
            worker.received += part
            reply = worker.frame() if part else None
        except (OSError, ValueError, RecursionError) as error:
            kind = "flooded" if isinstance(error, Flooded) else "died"
            self._give_up(worker, replies, f"{self.what}'s worker sent an invalid reply ({error})", kind)
            return
        if not part:
            self._give_up(worker, replies, f"{self.what}'s worker ended", "died")
        elif reply is None:
            return
        elif not worker.ready:
            if "fatal" in reply:
                self._fatal = str(reply["fatal"])
                self._discard(worker)
            else:
                worker.ready, self._failed_starts = True, 0
                self.facts = dict(reply.get("facts") or {})
        elif worker.job is not None:
            error = reply.get("error")
            kind = None if error is None else "died" if reply.get("retire") else "raised"
            replies[worker.job] = Reply(reply.get("value"), None if error is None else str(error), kind)
            worker.job, self._timeouts = None, 0
            if reply.get("retire"):
                self._discard(worker)

    def _give_up(
        self, worker: _Worker, replies: list[Reply], reason: str, kind: Literal["timeout", "died", "flooded"]
    ) -> None:
        """Kill a worker; its job, if it has one, gets the reason and how the process ended."""
        if not worker.ready:
            self._failed_start(worker, reason)
            return
        ending = self._discard(worker)
        if worker.job is not None:
            replies[worker.job] = Reply(error=reason + ending, kind=kind)

    def _failed_start(self, worker: _Worker, reason: str) -> None:
        ending = self._discard(worker)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._fatal = f"{self.what}'s worker process cannot start: {reason}{ending}"

    def _discard(self, worker: _Worker) -> str:
        """Kill a worker and its children; returns how it had ended by itself, "" if it had not."""
        self._alive.remove(worker)
        if worker.deadline > time.monotonic():  # its socket closed: let it finish dying, to learn how
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(0.1)
        status = worker.process.poll()
        _kill(worker)
        if status is None:
            return ""
        return f" (exit status {status})" if status >= 0 else f" (signal {-status})"


def _kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone already
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    worker.connection.close()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        _kill(workers.pop())
