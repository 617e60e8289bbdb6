"""Runs a command until the other end of this process's standard input is closed.

So a server ends with the process that started it, even if that is killed. ``launch`` runs this file by its path, with
the command as arguments, as the leader of the command's process group; it exits with the command's status.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1
GRACE_S = 15.0  # Seconds from SIGTERM to SIGKILL


def main(command: list[str]) -> None:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the group: the command decides
    orphaned = threading.Event()
    threading.Thread(target=_end_with_owner, args=(process, orphaned), daemon=True).start()
    status = process.wait()
    if orphaned.is_set():
        os.killpg(0, signal.SIGKILL)  # child processes that outlived it
    if status < 0:
        # End by the same signal, so that the parent sees how the command ended.
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _end_with_parent() -> None:
    # Runs in the command before exec: if the minder is killed, the kernel ends the command.
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_with_owner(process: subprocess.Popen[bytes], orphaned: threading.Event) -> None:
    # Reads b"" once the owner has closed the pipe, or was killed.
    while os.read(0, 4096):
        pass
    orphaned.set()
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
