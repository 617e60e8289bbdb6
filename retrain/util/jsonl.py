"""Reads JSON-lines files while other processes write them.

A torn last line is left out, and a file that is not there has no rows. ``Tail`` and ``LineIndex`` do not read again
what they have read, and detect when a file was cut or replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

from retrain.errors import CheckpointError

Row = dict[str, Any]
"""One JSON object of a file."""
LAST_BLOCK = 1 << 16  # Bytes read from the end of a file when only its last rows are wanted
LONGEST_LINE = 64 << 20  # Bytes; retrain writes no longer ones


class LineMark(NamedTuple):
    """The last line that was read from a growing file: the byte behind it, its length and its checksum."""

    end: int = 0
    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, line: bytes, end: int) -> LineMark:
        return cls(end, len(line), zlib.crc32(line))

    def is_in(self, file: IO[bytes]) -> bool:
        """Return whether the file has this line at this place, so that reading can go on behind it."""
        line = os.pread(file.fileno(), self.length, self.end - self.length)
        return os.fstat(file.fileno()).st_size >= self.end and zlib.crc32(line) == self.crc


class NewLines:
    """The whole lines of a growing file, which need not be there yet: each loop over it goes on behind ``mark``."""

    def __init__(self, path: Path, mark: LineMark | None = None):
        self.path, self.mark = path, mark or LineMark()

    def __iter__(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.mark.end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.mark = LineMark.of(line, self.mark.end + len(line))
                yield line

    def is_current(self) -> bool:
        """Return whether the file still has the last line that was read; else it was cut, replaced or removed."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            return self.mark.is_in(file)
        return False


class Tail:
    """The complete rows that have been added to one JSONL file since it was last read.

    ``last_only``: of what is there at first, or after the file was cut, only the last ``LAST_BLOCK`` bytes are read,
    or all of it when no complete row lies in them.
    """

    def __init__(self, path: Path, last_only: bool = False):
        self.path, self.last_only = path, last_only
        self._lines: NewLines | None = None

    def rows(self) -> tuple[bool, list[Row]]:
        """Return whether the file has been cut or replaced since the last call, and the new rows in order without
        damaged ones, which ``resume`` names by their numbers."""
        replaced, lines = self.lines()
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(parse_row(line))
        return replaced, rows

    def lines(self) -> tuple[bool, list[bytes]]:
        """Return the new lines without blank ones and line ends."""
        replaced = self._lines is not None and not self._lines.is_current()
        if replaced or self._lines is None:
            begin = self._begin()
            self._lines = None if begin is None else NewLines(self.path, LineMark(begin))
        return replaced, [text for line in self._lines or () if (text := line[:-1].strip())]

    def _begin(self) -> int | None:
        """Return where the rows to read first begin; None where there is no regular file."""
        if not os.path.isfile(self.path):  # opening a pipe would wait for a writer
            return None
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            start = os.fstat(file.fileno()).st_size - LAST_BLOCK if self.last_only else 0
            block = os.pread(file.fileno(), LAST_BLOCK, start) if start > 0 else b""
            first, last = block.find(b"\n"), block.rfind(b"\n")
            return start + first + 1 if first < last else 0
        return None


def parse_row(line: bytes) -> Row:
    """Return the object of a line. Raises ValueError, or RecursionError, for what is none."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


class LineIndex:
    """Offsets of the whole lines of a growing file, found again when the file is another one."""

    def __init__(self, path: Path):
        self.path, self._lock = path, Lock()
        self._begins, self._lines = [0], NewLines(path)

    def refresh(self) -> int:
        """Read what is new; return the number of whole lines."""
        with self._lock:
            if not self._lines.is_current():
                self._begins, self._lines = [0], NewLines(self.path)
            self._begins += (self._lines.mark.end for _ in self._lines)
            return len(self._begins) - 1

    def read(self, start: int, end: int) -> list[Row]:
        """Return the objects in these lines without damaged ones."""
        with self._lock:
            begins = self._begins[start : end + 1]
        return [row for _, row in json_lines(self.path, begins[0], begins[-1])] if len(begins) > 1 else []


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


def last_row(path: Path) -> Row:
    """Return the last complete row of a JSONL file without reading all of it; {} if there is none.

    Raises CheckpointError when that is no JSON object.
    """
    _, lines = Tail(path, last_only=True).lines()
    try:
        return parse_row(lines[-1]) if lines else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error
