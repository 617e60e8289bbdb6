"""Start Python processes, end them with their parent, and describe how processes ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.files import writing

PR_SET_PDEATHSIG = 1


def with_imports(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with this process's import path in PYTHONPATH, so that workers find the same modules."""
    installed = (sys.prefix, sys.base_prefix)
    own = [path or os.getcwd() for path in sys.path if not path.startswith(installed)]
    before = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*own, *before]))}


def end_words(status: int) -> str:
    """Return a phrase on how a process ended. ``status``: its exit status, or the negative number of the signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")


def start_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach, with its output appended to ``log``. Raises StorageError."""
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM when this process's parent ends (Linux only); send it now if ``parent`` has ended."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
