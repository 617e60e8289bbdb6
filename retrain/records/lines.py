"""Growing files of lines, read on from where reading stopped, and found out when they are other ones."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import IO

from retrain.records.schema.base import Row

LAST_BLOCK = 1 << 16  # Bytes read from the end of a file when only its last rows are wanted
SEAM_BYTES = 64  # Bytes before the place where reading stopped that must still be the same for reading to go on there
CHUNK = 1 << 22
LONGEST_LINE = 64 << 20  # Bytes; retrain writes no longer ones


def whole_lines(file: IO[bytes], begin: int) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines from byte ``begin`` on, with the byte behind each; reads in chunks."""
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
    """The place where reading stopped, and the bytes before it."""

    def __init__(self) -> None:
        self.end, self._bytes = 0, b""

    def passed(self, line: bytes, end: int) -> None:
        self.end, self._bytes = end, (self._bytes + line)[-SEAM_BYTES:]

    def holds(self, file: IO[bytes]) -> bool:
        """Return whether the file continues from there."""
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
        """Return whether the file has been cut or replaced since the last call, and the new rows in order without
        damaged ones, which ``resume`` names by their numbers."""
        replaced, lines = self.lines()
        return replaced, _whole_rows(lines)

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
        """Return where the rows to read first begin."""
        size = os.fstat(file.fileno()).st_size
        if not self.last_only or size <= LAST_BLOCK:
            return 0
        file.seek(size - LAST_BLOCK)
        block = file.read(LAST_BLOCK)
        first, last = block.find(b"\n"), block.rfind(b"\n")
        return size - LAST_BLOCK + first + 1 if first < last else 0


def parse_row(line: bytes) -> Row:
    """Return the object of a line. Raises ValueError, or RecursionError, for what is none."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


def _whole_rows(lines: Iterable[bytes]) -> list[Row]:
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(parse_row(line))
    return rows


class LineIndex:
    """Offsets of the whole lines of a growing file, found again when the file is another one."""

    def __init__(self, path: Path):
        self.path, self._lock = path, Lock()
        self._begins, self._seam = [0], Seam()

    def refresh(self) -> int:
        """Read what is new; return the number of whole lines."""
        with self._lock, open(self.path, "rb") as file:
            if not self._seam.holds(file):
                self._begins, self._seam = [0], Seam()
            for line, end in whole_lines(file, self._seam.end):
                self._begins.append(end)
                self._seam.passed(line, end)
            return len(self._begins) - 1

    def read(self, start: int, end: int) -> list[Row]:
        """Return the objects in these lines without damaged ones."""
        with self._lock:
            begins = self._begins[start : end + 1]
        if len(begins) < 2:
            return []
        with open(self.path, "rb") as file:
            file.seek(begins[0])
            text = file.read(begins[-1] - begins[0])
        return _whole_rows(text.split(b"\n"))


def json_lines(path: Path | None, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Row]]:
    """Yield the objects between two bytes of a file, each with the byte at which it begins, one line in memory at a
    time. Damaged lines and missing files give nothing."""
    with contextlib.suppress(OSError):
        if path is None:
            return
        with open(path, "rb") as file:
            file.seek(begin)
            at, is_complete = begin, True
            while (end is None or at < end) and (line := file.readline(LONGEST_LINE)):
                begins, at = is_complete, at + len(line)
                is_complete = line.endswith(b"\n")
                with contextlib.suppress(ValueError, RecursionError):
                    if begins:
                        yield at - len(line), parse_row(line)
