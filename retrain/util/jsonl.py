"""Reads JSON-lines files while other processes write them.

An incomplete last line is skipped, and a missing file has no rows. ``Tail`` and ``LineIndex`` read every line once, and
start again when the file was truncated or replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from retrain.errors import CheckpointError

Row = dict[str, Any]
LAST_BLOCK = 1 << 16  # Bytes that ``Tail(last_only=True)`` reads from the end of a file
LONGEST_LINE = 64 << 20  # Bytes; longer lines are skipped, retrain writes none


class LineMark(NamedTuple):
    """The last line read from a growing file: the offset of its end, its length and its CRC-32."""

    end: int = 0
    length: int = 0
    crc: int = 0

    @classmethod
    def of(cls, line: bytes, end: int) -> LineMark:
        return cls(end, len(line), zlib.crc32(line))


class NewLines:
    """The complete lines of a growing file that may not exist yet; each iteration continues after ``mark``.

    The file is reopened each time, because NFS shows another machine the state at which the writer last closed it.
    With ``awaits_bytes``, a line that contains zero bytes counts as incomplete and ends the iteration, because NFS can
    show a file's new length before its bytes. Without it, such a line is yielded like any damaged line, so that it does
    not hide the lines after it.
    """

    def __init__(self, path: Path, mark: LineMark | None = None, awaits_bytes: bool = False):
        self.path, self.mark, self.awaits_bytes = path, mark or LineMark(), awaits_bytes

    def __iter__(self) -> Iterator[bytes]:
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.mark.end)
            for line in file:
                if not line.endswith(b"\n") or (self.awaits_bytes and b"\0" in line):
                    return
                self.mark = LineMark.of(line, self.mark.end + len(line))
                yield line

    def is_current(self) -> bool:
        """Return whether the file still contains the last line read; else it was truncated, replaced or removed."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            line = os.pread(file.fileno(), self.mark.length, self.mark.end - self.mark.length)
            return os.fstat(file.fileno()).st_size >= self.mark.end and zlib.crc32(line) == self.mark.crc
        return False


class Tail:
    """Reads the complete rows that were added to a JSONL file since the last call.

    ``last_only``: the first call, and the first one after a truncation, reads only the last ``LAST_BLOCK`` bytes, or
    the whole file if these contain no complete row.
    """

    def __init__(self, path: Path, last_only: bool = False):
        self.path, self.last_only = path, last_only
        self._lines: NewLines | None = None

    def rows(self) -> tuple[bool, list[Row]]:
        """Return whether the file was truncated or replaced since the last call, and the new rows in order. Damaged
        rows are skipped; ``retrain resume`` reports them by line number."""
        replaced, lines = self.lines()
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(parse_row(line))
        return replaced, rows

    def lines(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was truncated or replaced since the last call, and the new lines that are not
        blank."""
        replaced = self._lines is not None and not self._lines.is_current()
        if replaced or self._lines is None:
            begin = self._begin()
            self._lines = None if begin is None else NewLines(self.path, LineMark(begin))
        return replaced, [text for line in self._lines or () if (text := line[:-1].strip())]

    def _begin(self) -> int | None:
        if not os.path.isfile(self.path):  # opening a pipe would wait for a writer
            return None
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            start = os.fstat(file.fileno()).st_size - LAST_BLOCK if self.last_only else 0
            block = os.pread(file.fileno(), LAST_BLOCK, start) if start > 0 else b""
            first, last = block.find(b"\n"), block.rfind(b"\n")
            return start + first + 1 if first < last else 0
        return None


def parse_row(line: str | bytes) -> Row:
    """Return the JSON object in a line. Raises ValueError or RecursionError for anything else."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    return row


class LineIndex:
    """Offsets of the complete lines of a growing file; rebuilt when the file was truncated or replaced."""

    def __init__(self, path: Path):
        self.path, self._lock = path, Lock()
        self._begins, self._lines = [0], NewLines(path)

    def refresh(self) -> int:
        with self._lock:
            if not self._lines.is_current():
                self._begins, self._lines = [0], NewLines(self.path)
            self._begins += (self._lines.mark.end for _ in self._lines)
            return len(self._begins) - 1

    def read(self, start: int, end: int) -> list[Row]:
        """Return the objects in lines [start, end); damaged lines are skipped."""
        with self._lock:
            begins = self._begins[start : end + 1]
        return [row for _, row in json_lines(self.path, begins[0], begins[-1])] if len(begins) > 1 else []


def json_lines(path: Path | None, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Row]]:
    """Yield (offset, object) for the lines between two offsets of a file, with one line in memory at a time. Damaged
    lines are skipped; a missing file yields nothing."""
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

    Raises CheckpointError if that row is not a JSON object.
    """
    _, lines = Tail(path, last_only=True).lines()
    try:
        return parse_row(lines[-1]) if lines else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error
