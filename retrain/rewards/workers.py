"""Runs untrusted jobs in worker processes with enforced limits of time and memory.

A job that hangs, exhausts memory, calls ``os._exit`` or is killed fails alone: its worker is killed with all its
children and replaced. Workers are plain ``python -c`` processes (no fork of the trainer, no import
of its main module or of torch), which start with the first job. Their stdin, stdout and stderr are the null device,
so that nothing a reward prints reaches the terminal or the protocol.

Frames are those of ``multiprocessing.connection``: jobs are pickled (they come from the trainer), replies are JSON
(they come from code that is not trusted).
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from retrain.errors import PluginError, RetrainError, printable
from retrain.plugins import described

LENGTH = struct.Struct("!i")  # Header of a frame: its length in bytes
LIMIT = struct.Struct(">d")  # Header of a job: its time limit in seconds
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
START_SECONDS = 60.0  # time limit for a worker's imports on a slow or busy machine
MAX_REPLY_BYTES = 16 << 20
BAD_LENGTH = "bad message length"
MAX_FAILED_STARTS = 3
MAX_TIMEOUTS_IN_A_ROW = 16  # after which a batch fails, instead of waiting for hours
_BOOT = (
    "import json, sys; own = json.loads(sys.argv[2]); sys.path[:] = own + [p for p in sys.path if p not in own]; "
    "from retrain.rewards.workers import serve; serve(int(sys.argv[1]))"
)


@dataclass
class Reply:
    value: Any = None  # Return value of the job
    error: str | None = None  # Why the job returned nothing
    kind: Literal["raised", "timeout", "died", "flooded"] | None = None


class _Worker:
    def __init__(self, python: str, path: Sequence[str]):
        self.socket, theirs = socket.socketpair()
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONHASHSEED"] = "0"  # iteration over sets has the same order in every process
        with theirs:
            self.process = subprocess.Popen(
                [python, "-c", _BOOT, str(theirs.fileno()), json.dumps(path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the trainer only; killpg reaches the worker's children too
                env=os.environ | environment,
            )

    def ask(self, payload: bytes, limit_s: float) -> dict[str, object]:
        """Return the reply to a frame. Raises TimeoutError after ``limit_s`` seconds, EOFError if the process has
        ended, OSError or ValueError for anything but a single reply."""
        deadline = time.monotonic() + limit_s
        try:
            self.socket.settimeout(limit_s)
            self.socket.sendall(LENGTH.pack(len(payload)) + payload)
            (size,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
            if not 0 <= size <= MAX_REPLY_BYTES:
                raise ValueError(BAD_LENGTH)
            reply = json.loads(self._read(size, deadline))
        except ConnectionError:
            raise EOFError from None
        if not isinstance(reply, dict):
            raise ValueError("not an object")
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self.socket.recv(1, socket.MSG_PEEK):  # empty if the process has ended meanwhile
                raise ValueError("more than one reply")
        return reply

    def _read(self, size: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            self.socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self.socket.recv(size - len(received))
            if not part:
                raise EOFError
            received += part
        return bytes(received)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):  # a child that has left the group may have the other end too
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.kill()
        self.socket.close()


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of a worker process. ``timeout_s``: wall-clock seconds per job. ``memory_bytes``: private memory
    (RLIMIT_DATA, because libraries such as torch map far more address space than they use). ``start_s``: seconds until
    the worker is ready."""

    timeout_s: float
    memory_bytes: int
    start_s: float = START_SECONDS


class WorkerPool:
    """Runs jobs in up to ``workers`` processes, with one waiting thread per process.

    ``entry`` names a factory as ``module:function``. A worker calls it with ``arguments`` and gets the function that
    runs a job and returns a JSON value. ``subject``: name of the jobs in messages. ``python``: another interpreter for
    the workers; besides its own packages it can import only retrain and modules in ``folders``.
    """

    def __init__(
        self,
        entry: str,
        arguments: Mapping[str, object],
        *,
        workers: int,
        limits: WorkerLimits,
        subject: str = "the reward",
        python: str | None = None,
        folders: Sequence[str] = (),
    ):
        self.start_s = limits.start_s
        self.workers, self.timeout_s, self.subject = max(1, workers), limits.timeout_s, subject
        self.python = python or sys.executable
        self.path = [str(Path(__file__).parents[2]), *folders] if python else sys.path
        setup = {"entry": entry, "arguments": dict(arguments), "subject": subject}
        setup |= {"memory_bytes": limits.memory_bytes, "start_s": limits.start_s}
        self._setup = pickle.dumps(setup)
        self.facts: dict[str, Any] = {}  # The attribute `facts` of the entry's function; known after `start`
        self._alive: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._failed_starts = self._timeouts = 0
        self._fatal: str | None = None  # Why the remaining jobs of this batch are not run
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        weakref.finalize(self, _close_all, self._alive)

    def start(self) -> None:
        """Start one worker and wait until it can take jobs. Raises PluginError with the reason if it cannot."""
        with self._lock:
            self._failed_starts, self._fatal = 0, None
            self._idle.append(self._ready_worker())

    def map(self, jobs: Sequence[object], timeout_s: float | None = None) -> list[Reply]:
        """Return one reply per job, in order. A job that fails does not raise: its reply has an ``error``.
        ``timeout_s``: time limit of a job in place of the pool's."""
        limit_s = timeout_s or self.timeout_s
        with self._lock:
            self._failed_starts, self._timeouts, self._fatal = 0, 0, None
            with ThreadPoolExecutor(min(self.workers, max(1, len(jobs)))) as threads:
                futures = [threads.submit(self._answer, job, limit_s) for job in jobs]
                try:
                    return [future.result() for future in futures]
                except BaseException:  # a worker that is still busy would send this job's reply to the next call
                    with self._starting:
                        self._fatal = "interrupted"
                        for worker in list(self._alive):
                            worker.kill()
                    raise

    def close(self) -> None:
        """Kill the workers; a later ``map`` starts new ones."""
        with self._lock:
            self._idle.clear()
            _close_all(self._alive)

    def _answer(self, job: object, limit_s: float) -> Reply:
        payload = LIMIT.pack(limit_s) + pickle.dumps(job)
        try:
            worker = self._ready_worker()
        except PluginError as error:
            return Reply(error=str(error))
        try:
            reply = worker.ask(payload, limit_s)
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= MAX_TIMEOUTS_IN_A_ROW:
                self._fatal = f"not tried after {self._timeouts} time-outs of {self.timeout_s:g} s in a row"
            self._discard(worker)
            return Reply(error=f"{self.subject} took longer than {limit_s:g} s (timeout_s)", kind="timeout")
        except (EOFError, OSError, ValueError, RecursionError) as error:
            kind = "flooded" if str(error) == BAD_LENGTH else "died"
            return Reply(error=self._ending(worker, error), kind=kind)
        self._timeouts = 0
        if reply.get("retire"):
            self._discard(worker)
        else:
            self._idle.append(worker)
        error = reply.get("error")
        kind = None if error is None else "died" if reply.get("retire") else "raised"
        return Reply(reply.get("value"), None if error is None else str(error), kind)

    def _ready_worker(self) -> _Worker:
        while True:
            with self._starting:
                if self._fatal is not None:
                    raise PluginError(self._fatal)
                while self._idle:
                    worker = self._idle.pop()
                    if worker.process.poll() is None:
                        return worker
                    self._discard(worker)  # it died since
                worker = _Worker(self.python, self.path)
                self._alive.append(worker)
            try:
                reply = worker.ask(self._setup, self.start_s)
            except TimeoutError:
                reason = f"it was not ready after {self.start_s:g} s"
                self._discard(worker)
            except (EOFError, OSError, ValueError, RecursionError) as error:
                reason = self._ending(worker, error)
            else:
                if "fatal" not in reply:
                    facts = reply.get("facts")
                    self._failed_starts, self.facts = 0, facts if isinstance(facts, dict) else {}
                    return worker
                self._fatal = str(reply["fatal"])
                self._discard(worker)
                continue
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._fatal = f"{self.subject}'s worker process cannot start: {reason}"

    def _ending(self, worker: _Worker, error: Exception) -> str:
        """Discard a worker after a fault. Return a description of the fault, with the exit status if the process has
        ended."""
        fault = "ended" if isinstance(error, EOFError) else f"sent an invalid reply ({error})"
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be ending just now
            worker.process.wait(0.1)
        status = worker.process.poll()
        self._discard(worker)
        ending = "" if status is None else f" (exit status {status})" if status >= 0 else f" (signal {-status})"
        return f"{self.subject}'s worker {fault}{ending}"

    def _discard(self, worker: _Worker) -> None:
        self._alive.remove(worker)
        worker.close()


def _close_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().close()


def serve(descriptor: int) -> None:
    """Serve jobs on the socket ``descriptor``. The first frame is the set-up: entry, arguments, subject, memory limit,
    time limit of the start.

    The entry ``module:function`` is called once with the arguments and returns the function that runs a job. The first
    reply is ``{"ready": true, "facts": …}`` (the function's attribute ``facts``) or ``{"fatal": text}``. Each job then
    has the reply ``{"value": …}`` or ``{"error": text}``; with ``"retire": true``, memory ran out and this process
    ends.
    """
    _ignore_termination_signals()
    connection = Connection(descriptor)
    first = _receive(connection)
    if not first:  # the trainer ended meanwhile
        return
    setup = pickle.loads(first)
    _limit(setup["memory_bytes"])
    # If the trainer is killed while an import or a job hangs, the alarm's default action kills this process.
    signal.setitimer(signal.ITIMER_REAL, 2 * setup["start_s"] + 5)
    try:
        module, _, function = setup["entry"].partition(":")
        grade = getattr(importlib.import_module(module), function)(**setup["arguments"])
    except BaseException as error:  # SystemExit of a user's module too: the trainer reports it
        _send(connection, {"fatal": _reason(error)})
        return
    _send(connection, {"ready": True, "facts": getattr(grade, "facts", {})})
    _install_empty_handlers()  # again, because an imported module may have installed its own
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while frame := _receive(connection):
        signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT.unpack_from(frame)[0] + 5)
        reply = _reply(grade, frame[LIMIT.size :], setup["subject"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)
        if "retire" in reply:
            return


def _ignore_termination_signals() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP in this process.

    Schedulers (Slurm, systemd) send them to all processes of a job; the trainer finishes its step, for which it needs
    the pending answers. Programs started from this process keep the default actions.
    """
    _install_empty_handlers()

    def in_child() -> None:
        for number in TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS)

    # The signals are blocked around a fork until the child has the default handlers.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION_SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION_SIGNALS),
        after_in_child=in_child,
    )


def _install_empty_handlers() -> None:
    for number in TERMINATION_SIGNALS:
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which programs started from here would inherit


def _reply(grade: Callable[[Any], object], frame: bytes, subject: str) -> dict[str, object]:
    try:
        value = grade(pickle.loads(frame))
        json.dumps(value)
        return {"value": value}
    except MemoryError:
        return {"error": f"MemoryError: {subject} needed more memory than its limit", "retire": True}
    except BaseException as error:  # an error of a reward costs one completion, never the run
        return {"error": _reason(error)}


def _reason(error: BaseException) -> str:
    return printable(str(error) if isinstance(error, RetrainError) else described(error))


def _limit(memory_bytes: int) -> None:
    for kind, wanted in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses memory limits; the time limit still holds
            resource.setrlimit(kind, (allowed, hard))


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""


def _send(connection: Connection, reply: Mapping[str, object]) -> None:
    connection.send_bytes(json.dumps(reply).encode())
