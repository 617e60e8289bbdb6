"""Runs a command for as long as somebody holds the other end of this process's standard input.

So a server ends with the process that has started it, also where that one is killed. Run by its path, with the command
as its arguments, as the leader of a process group, which is the command's too; it ends as the command does.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1
GRACE_S = 15.0  # Seconds between asking the command to end and ending it


def main(words: list[str]) -> None:
    """Run the command, and end this process."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the group: the command decides
    alone = threading.Event()
    threading.Thread(target=_end_with_owner, args=(process, alone), daemon=True).start()
    status = process.wait()
    if alone.is_set():
        os.killpg(0, signal.SIGKILL)  # what it has started and left behind
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _end_with_parent() -> None:
    """Have the kernel end this process when its parent is killed, where it can."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_with_owner(process: subprocess.Popen[bytes], alone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    alone.set()
    os.killpg(0, signal.SIGTERM)
    if not _ended(process):
        os.killpg(0, signal.SIGKILL)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
