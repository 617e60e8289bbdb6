"""Commands and answers as files, for a worker on a machine that shares nothing with the controller but a file system.

Each file is only appended to, by one process, and closed after every line: another machine that opens an NFS file sees
what was there when its writer last closed it. Whoever reads opens it anew each time and goes on where it was. What has
appeared is found by listing the directory, because a name that was looked up in vain may be remembered as absent.

A worker's folder has ``commands_<k>.jsonl`` and ``answers_<k>.jsonl`` for its k-th process, and ``closed`` once no
further process is wanted.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CLOSED = "closed"
_ANSWERS = re.compile(r"answers_(\d+)\.jsonl")


def commands_of(folder: Path, number: int) -> Path:
    """Where the commands for a worker's process of this number are."""
    return folder / f"commands_{number}.jsonl"


def answers_of(folder: Path, number: int) -> Path:
    return folder / f"answers_{number}.jsonl"


def newest(folder: Path) -> int:
    """The number of the newest process that has answered; 0 before the first."""
    with suppress(FileNotFoundError):
        return max((int(match[1]) for name in os.listdir(folder) if (match := _ANSWERS.fullmatch(name))), default=0)
    return 0


def is_closed(folder: Path) -> bool:
    """Whether no further process is wanted; also where the folder has been removed."""
    try:
        return CLOSED in os.listdir(folder)
    except FileNotFoundError:
        return True


def append(path: Path, *lines: bytes | Mapping[str, Any]) -> None:
    """Append lines, of which those that are bytes end with a newline. Raises OSError when they cannot be written; no
    part of them stays then."""
    data = memoryview(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    with open(path, "ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):  # the failed write is the error to report
                file.truncate(before)
            raise


class Tail:
    """Reads what has been appended to a file since the last time."""

    def __init__(self, path: Path):
        self.path, self._offset = path, 0

    def lines(self) -> list[bytes]:
        """The whole lines since the last time, with their newlines. Half a line is waited for, and so is one of which
        the length has arrived and not yet the bytes, which NFS shows as zeros."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read().partition(b"\0")[0]
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines(keepends=True)
