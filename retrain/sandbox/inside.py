"""The program inside the sandbox. It forks an interpreter for each call and watches it.

``sandbox.py`` passes this file's text to a Python that has only its standard library, so it must not import retrain.
Calls and replies are frames on stdin and stdout: a 4-byte big-endian length and JSON. The policy's code runs in a fork
without these pipes. The fork can neither trace nor read this process, which is not dumpable, nor kill or stop it,
because it is process 1 of its namespace. When its stdin closes, this process exits, and the namespace ends with it.

With ``keep_state`` one fork runs all calls, and its processes are stopped between calls; without it they are killed
when the call ends.

With ``modules`` the code may exchange lines with the caller of the sandbox: it reads from the descriptor ``REQUESTS``
and writes to ``ANSWERS``, which are new pipes for each call. This process relays one line of the code for each line of
the caller, so that code which floods the pipe only blocks itself.
"""

import ast
import codecs
import contextlib
import ctypes
import gc
import json
import linecache
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types
from io import FileIO, StringIO
from typing import Any, NoReturn, TypedDict

HEADER = struct.Struct(">I")
LOOK_MS = 25  # interval of memory measurements
FLOOD = 1 << 20  # characters of output beyond which the code is stopped
FRAMES = 8  # innermost frames of a traceback that are printed
FILE_BYTES = 1024  # approximate kernel memory of a file besides its content
FILES = 256  # limit of open files per process
WRITABLE = ("/tmp", "/dev/shm")
REQUESTS, ANSWERS = 100, 101  # descriptors of the code's lines, above those that code opens by itself
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


class Setup(TypedDict):  # First frame: three fields of its own and those of ``SandboxLimits``
    keep_state: bool
    modules: dict[str, str]  # Source texts by name, imported before the first call
    uids: list[int]  # Switch to the first of these users that exists; []: stay
    timeout_s: float
    memory_mb: int
    output_characters: int
    processes: int
    file_mb: int


def main() -> None:
    calls, replies = FileIO(os.dup(0)), os.dup(1)  # unbuffered, because it is polled
    setup = receive(calls)
    if setup is None:
        return
    confine(setup)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore
    sys.path.insert(0, "/tmp")
    for name, source in setup["modules"].items():
        sys.modules[name] = types.ModuleType(name)
        exec(compile(source, f"<{name}>", "exec"), sys.modules[name].__dict__)
    clean = contents()
    gc.freeze()  # otherwise a garbage collection in a fork would copy all memory pages of this process
    interpreter = None
    send(replies, {"ready": True})
    while (call := receive(calls)) is not None:
        if "code" not in call:  # sent to code that had ended meanwhile
            continue
        deadline = time.monotonic() + setup["timeout_s"]
        if interpreter is None:
            interpreter = Interpreter(setup, calls, replies)
        interpreter.order(call["code"])
        reply = interpreter.watch(deadline)
        if not interpreter.alive:
            interpreter = None
            reply["clean"] = contents() == clean
        send(replies, reply)


def confine(setup: Setup) -> None:
    """Drop root's privileges and set the resource limits of this process and its forks."""
    if (os.getpid(), os.getppid()) != (1, 0):
        raise PermissionError("this is not a process namespace of its own")  # end() would kill foreign processes
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel's first victim when memory runs out
    if setup["uids"]:
        become(setup["uids"])
    with open("/proc/self/status") as file:
        capabilities = [line.split()[1] for line in file if line.startswith(("CapPrm", "CapEff", "CapAmb"))]
    if any(int(mask, 16) for mask in capabilities):
        raise PermissionError("the sandbox still has capabilities")
    limits = {
        "RLIMIT_AS": setup["memory_mb"] << 20,
        "RLIMIT_FSIZE": setup["file_mb"] << 20,
        "RLIMIT_NPROC": setup["processes"] + 1,  # and this process
        "RLIMIT_NOFILE": FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(getattr(resource, kind))
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, kind), (value, value))
    prctl(PR_SET_DUMPABLE, 0)  # processes of the same user may not trace this one or read its memory
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # become() has cleared what bubblewrap set
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored: the first process of a namespace has no default action


def become(uids: list[int]) -> None:
    """Switch to the first of these user ids that exists here. Raises OSError if none does."""
    # Each sandbox has a user of its own, because the limit of processes counts by user.
    for number, uid in enumerate(uids, start=1):
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            return
        except OSError:
            if number == len(uids):
                raise


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) is refused")


class Interpreter:
    """A fork that runs the policy's code: a single call, or with ``keep_state`` call after call."""

    def __init__(self, setup: Setup, calls: FileIO, replies: int):
        self.setup, self.calls, self.replies = setup, calls, replies
        self.alive, self.status = True, 0
        self.output, theirs = os.pipe()
        orders, self.orders = os.pipe()
        self.done, done = os.pipe()
        read_end, self.requests = os.pipe()
        self.answers, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            mine = (calls.fileno(), replies, self.output, self.orders, self.done, self.requests, self.answers)
            for descriptor in mine:
                os.close(descriptor)
            for descriptor in (1, 2):
                os.dup2(theirs, descriptor)
            if setup["modules"]:
                os.dup2(read_end, REQUESTS)
                os.dup2(write_end, ANSWERS)
            for descriptor in (theirs, read_end, write_end):
                os.close(descriptor)
            prctl(PR_SET_DUMPABLE, 1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            serve(orders, done, setup["keep_state"])
        for descriptor in (theirs, orders, done, read_end, write_end):
            os.close(descriptor)
        # Readable for poll() once the process has ended.
        self.process = os.pidfd_open(self.pid)
        for descriptor in (self.output, self.requests, self.answers):
            os.set_blocking(descriptor, False)
        self.line, self.unsent, self.may_answer = b"", b"", True  # Bytes from the code, bytes for it, whose turn it is

    def order(self, code: str) -> None:
        """Run ``code`` in the fork; processes that were stopped after an earlier call continue."""
        with contextlib.suppress(ProcessLookupError):
            # −1 is every process of the namespace but this one (kill(2)).
            os.kill(-1, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # the fork was killed meanwhile: watch() reports that
            send(self.orders, code)

    def watch(self, deadline: float) -> dict[str, object]:
        """Wait until the code given to ``order`` ends or exceeds a limit. Return its output, its exit ``status`` and,
        as ``ended``, ``done``, ``exit`` (the interpreter ended), ``stopped`` (by the caller) or the limit (``time``,
        ``memory``, ``output``). Meanwhile pass on lines between the code and the caller.

        When the caller closes its end of ``calls``, this process exits, and with it the sandbox.
        """
        setup = self.setup
        printed, ended, status = Output(), "", 0
        poll = select.poll()
        for descriptor in (self.output, self.process, self.calls.fileno()):
            poll.register(descriptor, select.POLLIN)
        if setup["keep_state"]:  # otherwise code could claim to be done, and live on to see the next call
            poll.register(self.done, select.POLLIN)
        if setup["modules"]:
            poll.register(self.answers, select.POLLIN)
        look = time.monotonic() + LOOK_MS / 1000
        while not ended:
            ready = dict(poll.poll(LOOK_MS))
            now = time.monotonic()
            if self.output in ready and not printed.read_from(self.output):
                poll.unregister(self.output)  # the code closed its stdout and stderr
            if self.pass_on(ready, poll):
                ended = "stopped"
            elif self.process in ready:
                ended = "exit"
            elif self.done in ready:
                ended, status = self.read_done(poll)
            else:
                ended = self.exceeded(printed.tell(), now >= deadline, now >= look)
                look = look if now < look else now + LOOK_MS / 1000
        if ended != "done":
            status = self.end()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP)  # nothing but this process runs between calls
        while printed.tell() <= FLOOD and printed.read_from(self.output):
            pass
        self.relay_answer(poll)  # the line that the code wrote just before it ended
        if not self.alive:
            self.close()
        output = shortened(printed.getvalue(), setup["output_characters"])
        return {"ended": ended, "status": status, "clean": True, "output": output}

    def exceeded(self, printed: int, is_late: bool, measures_memory: bool) -> str:
        if printed > FLOOD or len(self.line) > FLOOD:
            return "output"
        if is_late:
            return "time"
        if not measures_memory:
            return ""
        self.reap(os.WNOHANG)  # ended processes count until they are reaped
        return "memory" if memory() > self.setup["memory_mb"] << 20 else ""

    def pass_on(self, ready: dict[int, int], poll: select.poll) -> bool:
        """Pass on lines between the code and the caller. Return whether the caller stops the code."""
        is_stopped = self.calls.fileno() in ready and self.receive_frame(poll)
        if self.answers in ready:
            self.relay_answer(poll)
        if self.requests in ready:
            self.send_unsent(poll)
        return is_stopped

    def receive_frame(self, poll: select.poll) -> bool:
        """Read a frame of the caller: a line for the code, or the request to stop it. Return whether to stop."""
        frame = receive(self.calls)
        if frame is None:
            os._exit(0)
        if "line" in frame:
            self.unsent += frame["line"].encode() + b"\n"
            self.send_unsent(poll)
            self.may_answer = True
            poll.register(self.answers, select.POLLIN)
            self.relay_answer(poll)  # a line may have been read before
        return "stop" in frame

    def send_unsent(self, poll: select.poll) -> None:
        """Write bytes for the code without blocking. Poll for room in the pipe if some are left."""
        poll.register(self.requests, select.POLLOUT)
        try:
            self.unsent = self.unsent[os.write(self.requests, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the code closed the pipe
            self.unsent = b""
        if not self.unsent:
            poll.unregister(self.requests)

    def relay_answer(self, poll: select.poll) -> None:
        """Read the code's bytes without blocking. If it is its turn and a line is complete, pass the line on."""
        data = b"-"
        with contextlib.suppress(BlockingIOError):
            while data and len(self.line) <= FLOOD and b"\n" not in self.line:
                data = os.read(self.answers, 1 << 16)
                self.line += data
        if self.may_answer and b"\n" in self.line:
            line, _, self.line = self.line.partition(b"\n")
            self.may_answer = False
            send(self.replies, {"line": line.decode("utf-8", "replace")})
        if not data or not self.may_answer:
            poll.register(self.answers, 0)  # known to poll(), so that unregister() does not raise
            poll.unregister(self.answers)

    def close(self) -> None:
        for descriptor in (self.output, self.done, self.orders, self.process, self.requests, self.answers):
            os.close(descriptor)

    def read_done(self, poll: select.poll) -> tuple[str, int]:
        code = os.read(self.done, 1)
        if code:
            return "done", code[0]
        poll.unregister(self.done)  # the code closed it, or the interpreter is about to end
        return "", 0

    def end(self) -> int:
        """Kill all processes of the sandbox. Return the fork's exit status, negative for a signal."""
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        self.reap(0)
        return os.waitstatus_to_exitcode(self.status)

    def reap(self, options: int) -> None:
        """Reap the fork and orphaned processes that have ended; ``options`` 0 waits for all."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, options))[0]:
                if ended[0] == self.pid:
                    self.status = ended[1]


def serve(orders: int, done: int, keep_state: bool) -> NoReturn:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    number, pid = 0, os.getpid()
    stream = FileIO(orders)
    while (code := receive(stream)) is not None:
        number += 1
        status = execute(code, module.__dict__, f"<code {number}>" if keep_state else "<code>")
        if not keep_state or os.getpid() != pid:  # the code forked
            leave(status)
        flush()
        os.write(done, bytes([status & 255]))
    os._exit(0)


def leave(status: int) -> NoReturn:
    """Exit as a script does: join threads and run ``atexit``. Modules are not torn down, which would take 20 ms."""
    for module, function in (("threading", "_shutdown"), ("atexit", "_run_exitfuncs")):
        if module in sys.modules:
            try:
                getattr(sys.modules[module], function)()
            except BaseException as error:
                report(error)
    flush()
    os._exit(status & 255)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def execute(code: str, namespace: dict[str, object], name: str) -> int:
    """Run ``code`` as Python's prompt does: print the value of a last expression, and errors. Return the exit
    status."""
    try:
        try:
            tree = ast.parse(code, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            body = compile(tree, name, "exec", dont_inherit=True)
            expression = compile(ast.Interactive([last]), name, "single", dont_inherit=True) if last else None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            sys.stderr.write("".join(traceback.format_exception_only(error)))
            return 1
        linecache.cache[name] = (len(code), None, [f"{line}\n" for line in code.splitlines()], name)
        exec(body, namespace)
        if expression is not None:
            exec(expression, namespace)
        return 0
    except SystemExit as leaving:
        if isinstance(leaving.code, int) or leaving.code is None:
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException as error:
        report(error)
        return 1


def report(error: BaseException) -> None:
    try:
        trace = error.__traceback__ and error.__traceback__.tb_next
        lines = traceback.format_exception(type(error), error, trace, limit=-FRAMES)
        sys.stderr.write("".join(lines))
    except BaseException:  # out of memory or of stack, or the error's own text raises
        os.write(2, f"{type(error).__name__}\n".encode())


class Output(StringIO):
    def __init__(self) -> None:
        super().__init__()
        # Incremental: a read may end inside a character.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_from(self, descriptor: int) -> bool:
        """Read once; return False at the end of the stream or when it has no data."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        self.write(self.decoder.decode(data, not data))
        return bool(data)


def shortened(text: str, characters: int) -> str:
    """Return ``text``; if it is longer than ``characters``, replace the middle by a note of its length."""
    head, left_out = characters // 2, len(text) - characters
    return text if left_out <= 0 else f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}"


def memory() -> int:
    """Return the bytes used by all processes and files of the sandbox; pages that forks share count for each fork."""
    total = 0
    for path in WRITABLE:
        seen = os.statvfs(path)
        total += (seen.f_blocks - seen.f_bfree) * seen.f_frsize + (seen.f_files - seen.f_ffree) * FILE_BYTES
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/status") as file:  # it may have ended
                lines = [line.split() for line in file if line.startswith(("RssAnon", "RssShmem"))]
                total += sum(int(line[1]) for line in lines) * 1024
    return total


def contents() -> list[tuple[str, int, list[str]]]:
    return [(path, os.stat(path).st_mode, sorted(os.listdir(path))) for path in WRITABLE]


def receive(stream: FileIO) -> Any:
    header = read_bytes(stream, HEADER.size)
    payload = read_bytes(stream, HEADER.unpack(header)[0]) if header else b""
    return json.loads(payload) if payload else None


def read_bytes(stream: FileIO, size: int) -> bytes:
    """Return ``size`` bytes, or b"" if the stream ends before."""
    data = b""
    while len(data) < size and (part := stream.read(size - len(data))):
        data += part
    return data if len(data) == size else b""


def send(descriptor: int, value: object) -> None:
    payload = json.dumps(value).encode()
    data = memoryview(HEADER.pack(len(payload)) + payload)
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
