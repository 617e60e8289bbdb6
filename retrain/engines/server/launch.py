"""Starts a server process, restarts it when it dies or hangs, and ends it; fleets call it.

The server runs in its own session, so that Ctrl-C reaches only this process, which then ends the server; its output
goes to a log file. A ``minder`` process ends the server when this process is killed. The server's process id is written
next to the log, so that a server whose minder was killed too is ended at the next start.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from retrain.device import OWN_ALLOCATOR
from retrain.engines.server import minder
from retrain.engines.server.automatic import is_composed
from retrain.errors import UsageError
from retrain.files import read_json, write_json

RESTARTS = 3  # Most consecutive restarts of a server
STEADY_S = 120.0  # Seconds of operation after which the restart count is reset
GRACE_S = minder.GRACE_S + 5.0  # Seconds from SIGTERM to SIGKILL; the minder kills the server earlier


class HealthWaits(NamedTuple):
    check_s: float = 5.0  # Between two checks
    answer_s: float = 10.0  # Timeout of one check
    hung_s: float = 120.0  # Without an answer, after which a server that has answered before is restarted


HEALTH_WAITS = HealthWaits()
EVERYWHERE = ("0.0.0.0", "::")  # Hosts that mean every address of the machine
PORT_IN_USE = "address already in use"  # In the log, in lower case, of a server whose port another process has
TAIL = 8  # Lines of the log that an error quotes
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}  # Without it, vLLM loads no adapters at run time
KEY_VARIABLE = "VLLM_API_KEY"
SLEEP_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # vLLM has the sleep routes only with this one


def server_environment(gpus: str | None, sleeps: bool = False, key: str = "") -> dict[str, str]:
    environment = {**ENVIRONMENT, **(SLEEP_ENVIRONMENT if sleeps else {}), **os.environ}
    if key:
        environment[KEY_VARIABLE] = key
    if environment.pop(OWN_ALLOCATOR, ""):
        environment.pop("PYTORCH_ALLOC_CONF", None)  # vLLM's sleep mode does not work with expandable segments
    return environment if gpus is None else environment | {"CUDA_VISIBLE_DEVICES": gpus}


class ServerProcess:
    """A running server. In ``command``, ``{port}``, ``{host}`` and ``{model}`` are replaced; a command without
    ``--port`` or ``--host`` gets a free port and ``host``. ``name`` is the stem of the log file. Raises UsageError if
    the command cannot be started."""

    def __init__(
        self,
        command: str,
        model: str,
        directory: Path,
        environment: Mapping[str, str],
        notify: Callable[[str, str], None],
        *,
        name: str = "server",
        host: str = "127.0.0.1",
        health_waits: HealthWaits = HEALTH_WAITS,
    ):
        self.log, self._identity = directory / f"{name}.log", identity_of(directory, name)
        self.notify, self.gave_up = notify, ""
        self._closing, self._may_start = threading.Event(), threading.Event()
        self._may_start.set()
        self._environment = environment
        with contextlib.ExitStack() as stack:
            reserved, port = _reserved_port()
            stack.callback(reserved.close)
            self.arguments, host, self.port = _filled(command, model, host, port)
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
            self._restarts = Restarts(0 if is_composed(command) else RESTARTS)
            self._health = Health(self.url, health_waits)
            _check_exists(self.arguments[0])
            directory.mkdir(parents=True, exist_ok=True)
            self._end_abandoned()
            self._process = self._start()
            self._release_port = stack.pop_all().close
        self._watcher = threading.Thread(target=self._watch, name="server", daemon=True)
        self._watcher.start()
        atexit.register(self.close)  # the server must not outlive this process

    @property
    def answered_s(self) -> float:
        return self._health.answered_s

    def tail(self) -> str:
        with contextlib.suppress(OSError):
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
            return "\n".join(line for line in text.splitlines() if line.strip())[-1500:].split("\n", 1)[-1]
        return ""

    def hold_restarts(self, held: bool) -> None:
        """While ``held``, a server that dies is not started again: its GPU's memory is in use."""
        (self._may_start.clear if held else self._may_start.set)()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._may_start.set()
        atexit.unregister(self.close)
        self._watcher.join()
        _end(self._process.pid, self._process.poll)
        _release_minder(self._process)
        self._release_port()
        self._identity.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        import psutil

        _check_exists(self.arguments[0])
        with open(self.log, "ab") as log:
            log.write(f"\n# {shlex.join(self.arguments)}\n".encode())
            log.flush()
            try:
                process = subprocess.Popen(
                    [sys.executable, minder.__file__, *self.arguments],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"[inference] launch: {self.arguments[0]} cannot be started: {error}") from error
        with contextlib.suppress(psutil.Error):
            write_json(self._identity, {"pid": process.pid, "created": psutil.Process(process.pid).create_time()})
        return process

    def _watch(self) -> None:
        while not self._closing.wait(0.2):
            status = self._process.poll()
            if status is None:
                if not self._health.is_hung():
                    continue
                _end(self._process.pid, self._process.poll)
            how = f"no answer for {self._health.waits.hung_s:.0f} s"
            if status is not None:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                _end(self._process.pid, lambda: 0)  # child processes that outlived it
            _release_minder(self._process)
            if self._health.has_answered or PORT_IN_USE in self.tail().lower():
                self._restarts.most = RESTARTS
            steady, self._health = self.answered_s, Health(self.url, self._health.waits)
            if self._restarts.count_end(steady):
                tail = "\n".join(self.tail().splitlines()[-TAIL:])
                times = f"{self._restarts.count} times in a row, last" if self._restarts.count > 1 else "at its start"
                self.gave_up = f"the server died {times} by {how}; {self.log} ends with:\n{tail}"
                return
            when = "" if self._may_start.is_set() else " when the update ends"
            text = f"the server has died ({how}) and is started again{when}; its output is in {self.log}"
            self.notify(text, "warning")
            self._may_start.wait()
            if self._closing.is_set():
                return
            try:
                self._process = self._start()
            except Exception as error:  # reported by ``gave_up`` to the engine
                self.gave_up = f"the server died ({how}) and cannot be started again: {error}"
                return

    def _end_abandoned(self) -> None:
        import psutil

        if not self._identity.is_file():
            return
        with contextlib.suppress(psutil.Error, ValueError, KeyError, TypeError, OSError):
            identity = read_json(self._identity)
            process = psutil.Process(identity["pid"])
            # Process ids are reused: only the start time identifies the server.
            if abs(process.create_time() - identity["created"]) < 0.01:
                self.notify(
                    f"ending the server that an earlier process left behind (process {identity['pid']})", "info"
                )
                _end(
                    identity["pid"],
                    lambda: None if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else 0,
                )


def identity_of(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"


@dataclass
class Restarts:
    """Limits consecutive restarts to ``most``. For a command that retrain has composed it is 0 until the server has
    answered, because a planned server that fails at its start would fail again."""

    most: int = RESTARTS
    count: int = 0

    def count_end(self, answered_s: float) -> bool:
        """Count an end of the server; return whether there were more than ``most`` in a row. Answers for longer than
        ``STEADY_S`` before the end reset the count."""
        if answered_s > STEADY_S:
            self.count = 0
        self.count += 1
        return self.count > self.most


class Health:
    """Detects a server that has answered before and no longer does; any HTTP status is an answer."""

    def __init__(self, url: str, waits: HealthWaits):
        self.url, self.waits = url, waits
        self._checked, self._first, self._answered = time.monotonic(), 0.0, 0.0

    @property
    def answered_s(self) -> float:
        return self._answered - self._first

    @property
    def has_answered(self) -> bool:
        return bool(self._first)

    def is_hung(self) -> bool:
        """Return whether the server has not answered for ``hung_s``. Sends a request every ``check_s``."""
        now = time.monotonic()
        if now - self._checked < self.waits.check_s:
            return False
        if self._answers():
            self._answered = time.monotonic()
            self._first = self._first or self._answered
        self._checked = time.monotonic()
        return bool(self._answered) and self._checked - self._answered > self.waits.hung_s

    def _answers(self) -> bool:
        try:
            # Not through a proxy that the environment names.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            opener.open(f"{self.url}/health", timeout=self.waits.answer_s)
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False
        return True


def _check_exists(program: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"[inference] launch: there is no program {program!r}; give its path")


def _release_minder(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _end(leader: int, poll: Callable[[], int | None]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + GRACE_S
        while poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if number == signal.SIGTERM and poll() is not None:
            time.sleep(0.2)  # children end after their parent


def _filled(command: str, model: str, host: str, free_port: int) -> tuple[list[str], str, int]:
    """Return the arguments with placeholders replaced, and the host and port to which requests are sent: ``free_port``
    if the command names no port."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"[inference] launch: {error}: {command!r}") from error
    port, option = free_port, _option(arguments, "--port")
    adds_port = not any("{port}" in argument for argument in arguments)
    if option.isdigit():
        port, adds_port = int(option), False
    has_host = any(
        argument == "--host" or argument.startswith("--host=") or "{host}" in argument for argument in arguments
    )
    values = {"{port}": str(port), "{host}": host, "{model}": model}
    filled = [reduce(lambda text, pair: text.replace(*pair), values.items(), argument) for argument in arguments]
    filled += (["--port", str(port)] if adds_port else []) + ([] if has_host else ["--host", host])
    listens_on = _option(filled, "--host")
    return filled, host if listens_on in ("", *EVERYWHERE) else listens_on, port


def _option(arguments: Sequence[str], option: str) -> str:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == option:
            return following
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return ""


def _reserved_port() -> tuple[socket.socket, int]:
    """Return a free port, and a socket that is bound to it and does not listen. Under Linux the system gives the port
    to no other process until the socket is closed, so that servers that start together cannot clash; a server that sets
    SO_REUSEADDR, as web servers do, can listen there."""
    reserved = socket.socket()
    reserved.bind(("", 0))
    port = int(reserved.getsockname()[1])
    if sys.platform == "linux":
        # After ``bind``: with this option, the system may bind two processes to the same free port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        reserved.close()
    return reserved, port
