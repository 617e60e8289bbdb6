"""Growing files of lines, read on from where reading stopped, and found out when they are other ones."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

LAST_BLOCK = 1 << 16  # Bytes read from the end of a file when only its last rows are wanted
SEAM_BYTES = 64  # Bytes before the place where reading stopped that must still be the same for reading to go on there
CHUNK = 1 << 22

Row = dict[str, Any]


def whole_lines(file: IO[bytes], begin: int) -> Iterator[tuple[bytes, int]]:
    """The whole lines from byte ``begin`` on, with the byte behind each; read in pieces."""
    file.seek(begin)
    parts, end = [b""], begin
    while chunk := file.read(CHUNK):
        parts.append(chunk)
        if b"\n" not in chunk:
            continue
        *lines, rest = b"".join(parts).split(b"\n")
        parts = [rest]
        for line in lines:
            end += len(line) + 1
            yield line + b"\n", end


class Seam:
    """Where reading stopped, and the bytes before it."""

    def __init__(self) -> None:
        self.end, self._bytes = 0, b""

    def passed(self, line: bytes, end: int) -> None:
        """This line, up to byte ``end``, was read."""
        self.end, self._bytes = end, (self._bytes + line)[-SEAM_BYTES:]

    def holds(self, file: IO[bytes]) -> bool:
        """Whether the file goes on from there."""
        before = os.pread(file.fileno(), len(self._bytes), self.end - len(self._bytes))
        return os.fstat(file.fileno()).st_size >= self.end and before == self._bytes


class Tail:
    """The complete rows that have been added to one JSONL file since it was last read.

    ``last_only``: of what is there at first, or after the file was cut, only the last ``LAST_BLOCK`` bytes are read,
    or all of it when no complete row lies in them.
    """

    def __init__(self, path: Path, last_only: bool = False):
        self.path, self.last_only = path, last_only
        self._seam: Seam | None = None

    def rows(self) -> tuple[bool, list[Row]]:
        """(whether the file has been cut or replaced since the last call, new rows in order without damaged ones)."""
        replaced, lines = self.lines()
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):  # ``resume`` names damaged lines by their numbers
                rows.append(row_of(line))
        return replaced, rows

    def lines(self) -> tuple[bool, list[bytes]]:
        replaced, lines = self._seam is not None, []
        try:
            with open(self.path, "rb") as file:
                if self._seam is not None and self._seam.holds(file):
                    replaced = False
                else:
                    self._seam = Seam()
                    self._seam.end = self._first(file)
                for line, end in whole_lines(file, self._seam.end):
                    self._seam.passed(line, end)
                    if text := line[:-1].strip():
                        lines.append(text)
        except OSError:  # not there yet, or no longer
            self._seam = None
            return replaced, []
        return replaced, lines

    def _first(self, file: IO[bytes]) -> int:
        """Where the rows to read first begin."""
        size = os.fstat(file.fileno()).st_size
        if not self.last_only or size <= LAST_BLOCK:
            return 0
        file.seek(size - LAST_BLOCK)
        block = file.read(LAST_BLOCK)
        first, last = block.find(b"\n"), block.rfind(b"\n")
        return size - LAST_BLOCK + first + 1 if first < last else 0


def row_of(line: bytes) -> Row:
    """The object of a line. Raises ValueError, or RecursionError, for what is none."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row
