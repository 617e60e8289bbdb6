"""The inside of a worker process: one loop that answers jobs over a socket until the trainer closes it.

The process is started by ``workers.WorkerPool`` with stdin, stdout and stderr on the null device, so that nothing
a reward prints reaches the terminal or the protocol. Frames are those of ``multiprocessing.connection``: jobs
are pickled (they come from the trainer), replies are JSON (they come from code that is not trusted).
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import struct
from multiprocessing.connection import Connection
from typing import Any

from retrain.errors import RetrainError
from retrain.plugins import described
from retrain.rewards.base import printable

LIMIT = struct.Struct(">d")  # Seconds that a job may take, at the beginning of its frame
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(descriptor: int) -> None:
    """Serve jobs on the socket ``descriptor``. The first frame is the set-up: entry, arguments, limits.

    The entry ``module:function`` is called once with the arguments and returns the function that grades a job.
    Replies: ``{"ready": true, "facts": …}`` once (the function's attribute ``facts``, JSON), then
    ``{"value": …}`` or ``{"error": text}`` for each job; ``"retire"`` asks to be replaced (memory ran out).
    """
    _leave_the_end_to_the_trainer()
    connection = Connection(descriptor)
    first = _receive(connection)
    if not first:  # the trainer ended meanwhile
        return
    setup = pickle.loads(first)
    _limit(setup["memory_bytes"], setup["memory_kind"])
    try:
        module, _, function = setup["entry"].partition(":")
        grade = getattr(importlib.import_module(module), function)(**setup["arguments"])
    except BaseException as error:  # SystemExit of a user's module too: the trainer reports it
        _send(connection, {"fatal": printable(str(error) if isinstance(error, RetrainError) else described(error))})
        return
    _send(connection, {"ready": True, "facts": getattr(grade, "facts", {})})
    _ignore_endings()  # again: a module that was imported may have put its own handlers there
    # If the trainer is killed while a job hangs, the alarm's default action kills this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while frame := _receive(connection):
        signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT.unpack_from(frame)[0] + 5)
        reply, retire = _reply(grade, frame[LIMIT.size :], setup["what"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)
        if retire:
            return


def _leave_the_end_to_the_trainer() -> None:
    """Ignore SIGTERM, SIGINT and SIGHUP in this process.

    Schedulers (Slurm, systemd) send them to all processes of a job; the trainer finishes its step, for which it needs
    the answers that are under way. What this process starts is ended by them as ever.
    """
    _ignore_endings()
    masks: list[set[int]] = []

    def in_child() -> None:
        for number in ENDINGS:
            signal.signal(number, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    # A signal that reaches a fork before its handlers are the default ones waits until they are.
    os.register_at_fork(
        before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)),
        after_in_parent=unblock,
        after_in_child=in_child,
    )


def _ignore_endings() -> None:
    for number in ENDINGS:
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which programs started from here would inherit


def _reply(grade: Any, frame: bytes, what: str) -> tuple[dict[str, Any], bool]:
    """Return the reply to one job, and whether this process should be replaced."""
    try:
        value = grade(pickle.loads(frame))
        json.dumps(value)
        return {"value": value}, False
    except MemoryError:
        return {"error": f"MemoryError: {what} needed more memory than its limit", "retire": True}, True
    except BaseException as error:  # whatever a reward raises costs one completion, never the run
        text = str(error) if isinstance(error, RetrainError) else described(error)
        return {"error": printable(text)}, False


def _limit(memory_bytes: int, memory_kind: str) -> None:
    """Bound this process's memory (``memory_kind`` RLIMIT_AS or RLIMIT_DATA), and leave no core dumps."""
    for kind, wanted in ((memory_kind, memory_bytes), ("RLIMIT_CORE", 0)):
        _, hard = resource.getrlimit(getattr(resource, kind))
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses memory limits; the time limit still holds
            resource.setrlimit(getattr(resource, kind), (allowed, hard))


def _receive(connection: Connection) -> bytes:
    """Return the payload of the next frame; b"" when the trainer closed the connection."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return b""


def _send(connection: Connection, reply: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(reply).encode())
