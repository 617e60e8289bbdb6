"""Run golden scenarios with the version of retrain that PYTHONPATH names, each in a process of its own.

    PYTHONPATH=TREE python driver.py WORLD WORK RESULTS [SCENARIO …]

Third-party packages are imported once and every command runs in a fork, so that a command costs what it does and not
the five seconds of importing torch. Nothing of retrain is imported here: what runs is ``python -m retrain``.
"""

import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
PROGRESS = ("progress ", "step ")


class Session:
    """One scenario while it runs: a folder, and a record of each command with its status and output."""

    def __init__(self, name: str, folder: Path, world: Path):
        self.name, self.folder, self.world = name, folder, world
        self.record: list[dict[str, Any]] = []

    def write(self, name: str, text: str) -> str:
        """Write a file of the scenario; ``{world}`` stands for the folder of the shared model."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{world}", str(self.world)))
        return name

    def run(self, *arguments: str, before: Callable[[], None] = lambda: None, sort: bool = False) -> None:
        """Run a command to its end; ``before`` is called in its process first. With ``sort`` the lines that it prints
        are recorded in alphabetical order, for workers that print side by side."""
        child, files = self._start(arguments, before)
        _, status = os.waitpid(child, 0)
        stdout, stderr = (path.read_text(errors="replace") for path in files)
        # How many progress lines there are depends on the clock; metrics.jsonl has every step.
        stdout = "".join(line for line in stdout.splitlines(keepends=True) if not line.startswith(PROGRESS))
        if sort:
            stdout = "\n".join(sorted(stdout.splitlines())) + "\n"
        status = os.waitstatus_to_exitcode(status)
        self.record.append({"command": list(arguments), "status": status, "stdout": stdout, "stderr": stderr})
        for path in files:
            path.unlink()

    def kill(self, *arguments: str, when: Callable[[], bool]) -> None:
        """Run a command and kill it, with all processes it started, as soon as ``when()`` holds."""
        child, _ = self._start(arguments)
        end = time.monotonic() + START_SECONDS
        while not when():
            if os.waitpid(child, os.WNOHANG)[0] or time.monotonic() > end:
                raise RuntimeError(f"{self.name}: the command ended before it was killed")
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def serve(self, *arguments: str, requests: Sequence[tuple[str, dict[str, Any] | None]], ready: str) -> None:
        """Run a server with ``--port``, ask it, and end it. A request is a path with the JSON to post, or None."""
        port = _free_port()
        child, _ = self._start((*arguments, "--port", str(port)))
        url = f"http://127.0.0.1:{port}"
        try:
            end = time.monotonic() + START_SECONDS
            while _ask(url + ready, None)[0] != 200:
                if time.monotonic() > end:
                    raise RuntimeError(f"{self.name}: the server does not answer")
                time.sleep(0.05)
            for path, body in requests:
                status, answer = _ask(url + path, body)
                while _is_unfinished(answer) and time.monotonic() < end:
                    time.sleep(0.1)
                    status, answer = _ask(url + path, body)
                self.record.append({"request": path, "body": body, "status": status, "answer": answer})
        finally:
            os.killpg(child, signal.SIGTERM)
            os.waitpid(child, 0)

    def _start(
        self, arguments: Sequence[str], before: Callable[[], None] = lambda: None
    ) -> tuple[int, tuple[Path, Path]]:
        files = self.folder / "stdout.txt", self.folder / "stderr.txt"
        child = os.fork()
        if child:
            return child, files
        status = 70
        try:
            os.setpgid(0, 0)
            os.chdir(self.folder)
            for path, descriptor in zip(files, (1, 2), strict=True):
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(opened, descriptor)
            sys.argv = ["retrain", *arguments]
            before()
            status = _main()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _main() -> int:
    try:
        runpy.run_module("retrain", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def _ask(url: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} if data else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    except OSError:
        return 0, None
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def _is_unfinished(answer: Any) -> bool:
    """Return whether the page's server says that it is still reading what it was asked about."""
    reading = answer.get("reading") if isinstance(answer, dict) else None
    return isinstance(reading, dict) and reading.get("done") != reading.get("of")


def preload() -> None:
    """Import what every command needs and what does not depend on the version of retrain."""
    import numpy  # noqa: F401
    import peft  # noqa: F401
    import pydantic  # noqa: F401
    import rich.console  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    import typer  # noqa: F401

    torch.set_num_threads(1)  # no pool of threads: it would not survive the fork


def main() -> int:
    world, work, results, *names = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    from scenarios import SCENARIOS

    preload()
    failed = 0
    for name in names or SCENARIOS:
        folder = Path(work) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        session, begin = Session(name, folder, Path(world)), time.monotonic()
        try:
            SCENARIOS[name](session)
        except Exception:
            failed += 1
            session.record.append({"failed": traceback.format_exc()})
            traceback.print_exc()
        (folder / "session.json").write_text(json.dumps(session.record, indent=1))
        target = Path(results) / name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)
        print(f"{name} {time.monotonic() - begin:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
