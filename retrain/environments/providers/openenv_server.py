"""Start an OpenEnv server from a command on a free loopback port; it ends with the process that started it."""

import contextlib
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO

import httpx

from retrain.errors import PluginError, printable

HOST = "127.0.0.1"
# On Linux the kernel kills the server when its parent ends, also by SIGKILL. PR_SET_PDEATHSIG is 1.
_GUARD = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux':\n"
    "    ctypes.CDLL(None).prctl(1, 9)\n"
    "    if os.getppid() != int(sys.argv[1]): sys.exit('the process that started this one is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class OpenEnvServer:
    """Process of ``command``, in which ``{port}`` and ``{host}`` are replaced; PORT and HOST are also in its
    environment. Waits up to ``seconds`` until ``/health`` answers. Raises PluginError, which begins with ``owner``, if
    there is no such program, the process ends or it does not answer. Programs beside this Python come before those in
    PATH, so that an environment need not be activated. ``sessions``: open episodes, of which it takes at most
    ``most_sessions``."""

    def __init__(self, command: Sequence[str], seconds: float, owner: str):
        with socket.create_server((HOST, 0)) as probe:
            port = int(probe.getsockname()[1])
        self.url = f"http://{HOST}:{port}"
        self.sessions, self.most_sessions = 0, math.inf
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        program = shutil.which(command[0], path=path)
        if program is None:
            raise PluginError(f"{owner}: there is no program {command[0]!r} to start the server with")
        arguments = [word.replace("{port}", str(port)).replace("{host}", HOST) for word in command[1:]]
        # A file, not a pipe: a pipe that is not read fills up and blocks the server.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(os.getpid()), program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PORT": str(port), "HOST": HOST},
        )
        self.close = weakref.finalize(self, _end, self.process, self._output)
        self._wait(seconds, owner, " ".join(command))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _wait(self, seconds: float, owner: str, command: str) -> None:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.05)
        status = self.process.poll()
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - 400))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        last = f": {printable(lines[-1])}" if lines else ""
        self.close()
        if status is not None:
            raise PluginError(f"{owner}: the server {command!r} ended with status {status}{last}")
        raise PluginError(f"{owner}: {self.url}/health of {command!r} did not answer within {seconds:g} s{last}")


def _end(process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    process.kill()
    process.wait()
    output.close()
