"""Processes: what they import, how they are asked to stop, when they end, and how they ended in words.

The first signal asks for an end after the step, the second for one at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from retrain.device import torchrun_rank
from retrain.files import writing
from retrain.util.lease import DirectoryLock

PR_SET_PDEATHSIG = 1


def with_imports(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with this process's import path, so that workers find the same modules."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path or os.getcwd() for path in sys.path if not path.startswith(installed)]
    before = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*own, *before]))}


def end_words(status: int) -> str:
    """Return how a process ended, by its exit status or, below 0, the signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")


def start_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that a terminal's Ctrl-C does not reach, with all that it prints appended to ``log``. Raises
    StorageError."""
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when ``parent`` has ended (Linux only)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


ECHO_SECONDS = 3.0
"""torchrun passes a Ctrl-C on to processes that the terminal has already sent it to; within so long it is the same."""
ABANDON_SECONDS = 8.0
"""After a second signal the process ends by itself, whatever it is doing, at the latest after so long."""


class Ending(NamedTuple):
    """Consequences of a signal that asks for an end: the exit status, the runs' reason in the manifest, and whether a
    second one means haste. A closing terminal sends several hangups, also after a SIGTERM."""

    status: int
    reason: str
    urgent: bool


ENDINGS = {
    signal.SIGINT: Ending(130, "stopped by the user", urgent=True),
    signal.SIGTERM: Ending(130, "stopped by SIGTERM", urgent=True),
    signal.SIGHUP: Ending(129, "stopped by SIGHUP, as when a terminal closes", urgent=False),
}


class StopRequest:
    """Request of the user, or of whoever preempts this machine, for an end. The first SIGINT, SIGTERM or SIGHUP
    asks for one after the step, the second ends the process within seconds.

    A handler in Python runs only between two bytecodes of the main thread, which may wait minutes inside a kernel, or
    be in the middle of a write that must not be begun again. So a thread also hears of every signal (through the wakeup
    descriptor): it says what will happen, and ends the process itself when the second one has had no effect in time.
    """

    def __init__(self, lock: DirectoryLock | None = None):
        self.lock = lock
        self.echo_seconds = 0.0 if torchrun_rank() is None else ECHO_SECONDS
        self.signal: signal.Signals | None = None  # First signal received, if any

    def is_due(self) -> bool:
        """Return whether to end after the steps under way. Raises LeaseLost when the directory is another process's
        now."""
        if self.lock is not None:
            self.lock.check()
        return self.signal is not None

    @contextmanager
    def listening(self, message: Callable[[str, str], None]) -> Iterator[StopRequest]:
        """Handle the signals while inside (only the main thread may); one that is ignored stays so, as nohup wants."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        urged: float | None = None

        def handle(number: int, frame: object) -> None:
            nonlocal urged
            came, now = signal.Signals(number), time.monotonic()
            if urged is not None and ENDINGS[came].urgent and now - urged >= self.echo_seconds:
                raise KeyboardInterrupt
            if urged is None and ENDINGS[came].urgent:
                urged = now
            if self.signal is None:
                self.signal = came

        heeded = [number for number in ENDINGS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in heeded}
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ours, ended, message), name="signals", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            ended.set()
            signal.set_wakeup_fd(wakeup)
            theirs.close()
            watcher.join()
            ours.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self, descriptor: socket.socket, ended: threading.Event, message: Callable[[str, str], None]) -> None:
        heard, said, first = 0, False, None
        while heard < 2:
            received = descriptor.recv(64)
            if not received:
                return
            if not said and any(number in ENDINGS for number in received):
                said = True
                with suppress(OSError, ValueError):  # nobody may be there to read it
                    message("finishing the step and saving; once more to stop without saving", "warning")
            urgent = sum(ending.urgent * received.count(number) for number, ending in ENDINGS.items())
            now = time.monotonic()
            if urgent and first is None:
                first, heard = now, 1 if self.echo_seconds else urgent
            elif first is not None and now - first >= self.echo_seconds:
                heard += urgent
        if not ended.wait(ABANDON_SECONDS):
            where = f" Type: retrain resume {self.lock.directory}" if self.lock else ""
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"stopped at the last checkpoint.{where}\n".encode())
            os._exit(ENDINGS[signal.SIGINT].status)
