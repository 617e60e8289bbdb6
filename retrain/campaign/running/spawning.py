"""Starting a worker's process with its two pipes, and saying how it ended; for whoever is at the other end of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]);"
    "from retrain.campaign.running.worker import main; main(*map(int, sys.argv[1:4]))"
)
"""What a worker's process runs: its arguments are both pipes, its parent, and where it imports from."""


class Spawned(NamedTuple):
    """A worker that runs, and this end of its two pipes."""

    process: subprocess.Popen[bytes]
    commands: int
    answers: int


def spawn(
    output: IO[bytes] | None, boot: str, path: Sequence[str], env: Mapping[str, str], start_new_session: bool = False
) -> Spawned:
    """Start a worker that prints to ``output``, or where this process does, and imports from ``path``; the rest is
    Popen's."""
    theirs, commands = os.pipe()
    answers, their_answers = os.pipe()
    try:
        words = [str(theirs), str(their_answers), str(os.getpid()), json.dumps([*path])]
        process = subprocess.Popen(
            [sys.executable, "-c", boot, *words],
            pass_fds=[theirs, their_answers],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=start_new_session,
        )
    except OSError:
        os.close(commands)
        os.close(answers)
        raise
    finally:
        os.close(theirs)
        os.close(their_answers)
    return Spawned(process, commands, answers)


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    with suppress(OSError):
        while left:
            left = left[os.write(descriptor, left) :]


def end_words(status: int) -> str:
    """How a process ended, in words, by its exit status or, below 0, the signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was ended by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
