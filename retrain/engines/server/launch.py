"""A server that this process starts, watches, starts again when it dies or hangs, and ends.

It has a session of its own, so that Ctrl-C reaches this process alone, which then ends it; what it says goes into a
file. A minder beside it ends it when this process is killed. Who it is stands beside the file, so that one whose minder
was killed as well is found, and ended, at the next start.
"""

import atexit
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from retrain.engines.server import minder
from retrain.errors import UsageError
from retrain.files import read_json, write_json

RESTARTS = 3  # Most consecutive restarts of a server
STEADY_S = 120.0  # Seconds of operation after which the restart count is reset
GRACE_S = minder.GRACE_S + 5.0  # Seconds between asking it to end and ending it: its minder does so before


class HealthWaits(NamedTuple):
    """Seconds of the health checks of a server."""

    check_s: float = 5.0  # Between two checks
    answer_s: float = 10.0  # For the answer to one
    hung_s: float = 120.0  # Without an answer, after which a server that had answered counts as hung


HEALTH_WAITS = HealthWaits()
EVERYWHERE = ("0.0.0.0", "::")  # Hosts that mean every address of the machine
TAIL = 8  # Lines of its log that an error repeats
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
"""What a server's environment has beside ours, where ours does not say otherwise: the right to load adapters."""
SLEEP_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # Additional environment for a server that is put to sleep


class Launched:
    """One server process. ``command`` is as typed, with ``{port}``, ``{host}`` and ``{model}`` to be filled in; a free
    port and ``host`` are added where it has none of its own. ``gpus``: CUDA_VISIBLE_DEVICES of the server; ``name``:
    that of its files. Raises UsageError when the command cannot be started."""

    def __init__(
        self,
        command: str,
        model: str,
        directory: Path,
        gpus: str | None,
        sleeps: bool,
        tell: Callable[[str, str], None],
        *,
        name: str = "server",
        host: str = "127.0.0.1",
        health_waits: HealthWaits = HEALTH_WAITS,
    ):
        self.log, self._identity = directory / f"{name}.log", identity_of(directory, name)
        self.tell, self.gave_up = tell, ""
        self.words, host, self.port = _filled(command, model, host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._environment = {**ENVIRONMENT, **(SLEEP_ENVIRONMENT if sleeps else {}), **os.environ}
        if gpus is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpus
        _find(self.words[0])
        directory.mkdir(parents=True, exist_ok=True)
        self._end_left_over()
        self._closing = threading.Event()
        self._restarts, self._health = Restarts(), Health(self.url, health_waits)
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="server", daemon=True)
        self._watcher.start()
        atexit.register(self.close)  # whatever else goes wrong, it does not outlive us

    @property
    def answered_s(self) -> float:
        """For how many seconds its present process has been answering."""
        return self._health.answered_s

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
            return "\n".join(line for line in text.splitlines() if line.strip())[-1500:].split("\n", 1)[-1]
        return ""

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._watcher.join()
        _end(self._process.pid, self._process.poll)
        _let_go(self._process)
        self._identity.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        import psutil

        _find(self.words[0])
        with open(self.log, "ab") as log:
            log.write(f"\n# {shlex.join(self.words)}\n".encode())
            log.flush()
            try:
                process = subprocess.Popen(
                    [sys.executable, minder.__file__, *self.words],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"[inference] launch: {self.words[0]} cannot be started: {error}") from error
        with contextlib.suppress(psutil.Error):
            write_json(self._identity, {"pid": process.pid, "created": psutil.Process(process.pid).create_time()})
        return process

    def _watch(self) -> None:
        while not self._closing.wait(0.2):
            status = self._process.poll()
            if status is None:
                if not self._health.hung():
                    continue
                _end(self._process.pid, self._process.poll)
            how = f"no answer for {self._health.waits.hung_s:.0f} s"
            if status is not None:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                _end(self._process.pid, lambda: 0)  # what it has started and left behind
            _let_go(self._process)
            steady, self._health = self.answered_s, Health(self.url, self._health.waits)
            if self._restarts.spent(steady):
                tail = "\n".join(self.tail().splitlines()[-TAIL:])
                self.gave_up = (
                    f"the server died {RESTARTS + 1} times in a row, last by {how}; {self.log} ends with:\n{tail}"
                )
                return
            try:
                self.tell(f"the server has died ({how}) and is started again; what it said is in {self.log}", "warning")
                self._process = self._start()
            except Exception as error:  # whoever waits for it hears of it
                self.gave_up = f"the server died ({how}) and cannot be started again: {error}"
                return

    def _end_left_over(self) -> None:
        """End the server of a process that was killed before it could."""
        import psutil

        if not self._identity.is_file():
            return
        with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError, OSError):
            known = read_json(self._identity)
            process = psutil.Process(known["pid"])
            if abs(process.create_time() - known["created"]) < 0.01:
                self.tell(f"ending the server that an earlier process left behind (process {known['pid']})", "info")
                _end(known["pid"], lambda: None if process.is_running() and _lives(process) else 0)


def identity_of(directory: Path, name: str) -> Path:
    """The file that says which process a server of this directory is."""
    return directory / f"{name}.json"


class Restarts:
    """How often in a row something has been started again."""

    def __init__(self) -> None:
        self.count = 0

    def spent(self, answered_s: float) -> bool:
        """It has ended: whether that was once too often. An end after it had answered for long is not in a row."""
        if answered_s > STEADY_S:
            self.count = 0
        self.count += 1
        return self.count > RESTARTS


class Health:
    """Whether a server that has answered once goes on answering, whatever it says."""

    def __init__(self, url: str, waits: HealthWaits):
        self.url, self.waits = url, waits
        self._looked, self._first, self._answered = time.monotonic(), 0.0, 0.0

    @property
    def answered_s(self) -> float:
        return self._answered - self._first

    def hung(self) -> bool:
        """Whether it has been silent for too long; looks now and then."""
        now = time.monotonic()
        if now - self._looked < self.waits.check_s:
            return False
        if self._answers():
            self._answered = time.monotonic()
            self._first = self._first or self._answered
        self._looked = time.monotonic()
        return bool(self._answered) and self._looked - self._answered > self.waits.hung_s

    def _answers(self) -> bool:
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(f"{self.url}/health", timeout=self.waits.answer_s)
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False
        return True


def _find(program: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"[inference] launch: there is no program {program!r}; give its path")


def _let_go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _lives(process: object) -> bool:
    return process.status() != "zombie"  # type: ignore[attr-defined]


def _end(leader: int, poll: Callable[[], int | None]) -> None:
    """End a process group: asked first, then by force."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, ending)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + GRACE_S
        while poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if ending == signal.SIGTERM and poll() is not None:
            time.sleep(0.2)  # its children end after it


def _filled(command: str, model: str, host: str) -> tuple[list[str], str, int]:
    """The words of the command with its placeholders filled in, and the host and port that the server answers at."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"[inference] launch: {error}: {command!r}") from error
    port, typed, added = _free_port(), _typed(words, "--port"), not any("{port}" in word for word in words)
    if typed.isdigit():
        port, added = int(typed), False
    own_host = any(word == "--host" or word.startswith("--host=") or "{host}" in word for word in words)
    values = {"{port}": str(port), "{host}": host, "{model}": model}
    filled = [reduce(lambda text, pair: text.replace(*pair), values.items(), word) for word in words]
    filled += (["--port", str(port)] if added else []) + ([] if own_host else ["--host", host])
    own = _typed(filled, "--host")
    return filled, host if own in ("", *EVERYWHERE) else own, port


def _typed(words: Sequence[str], option: str) -> str:
    """The value of an option, "" where it has none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
