"""The numbers of ``metrics.jsonl`` as columns, so that one metric of a long run is read without reading all metrics.

``metrics.f32`` is a cache beside ``metrics.jsonl`` that is only appended to. It consists of blocks of ``BLOCK`` rows. A
block has a head, the list of keys as JSON if it differs from the previous block's, and the values, float32
[keys, rows]. The newest rows, which do not fill a block yet, are read from ``metrics.jsonl``. None becomes NaN; a key
that has a text in any row of a block has no column in that block.

The head holds the position, length and checksum of the line in ``metrics.jsonl`` from which the block's last row was
read. If the file no longer has this line, because it was cut or rewritten, the cache is rebuilt.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import numpy as np

from retrain.files import append_bytes, stamp_of, writing
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import COLUMNS
from retrain.util.jsonl import LineMark, NewLines, parse_row

BLOCK = 64  # Rows of a block: reading one key of 10,000 rows takes 157 short reads

_HEAD = struct.Struct("<4sIIIQII")
_MAGIC = b"RTC1"
_NUMBERS = (int, float, NoneType)


@dataclass(frozen=True)
class _Block:
    begin: int  # Byte of the column file at which its numbers begin
    rows: int
    column_of: Mapping[str, int]
    last_line: LineMark

    @property
    def end(self) -> int:
        return self.begin + 4 * self.rows * len(self.column_of)


class Columns:
    """Reader of one run's numbers: blocks from the file ``columns``, the newest rows from the file ``metrics``.

    ``refresh`` reads new rows. Either file may be missing, cut, half written or replaced at any moment. A cache that
    does not belong to ``metrics`` counts as missing: all rows are then read from ``metrics``.
    """

    def __init__(self, metrics: Path, columns: Path | None = None):
        self.metrics = metrics
        self.columns = metrics.with_name(COLUMNS) if columns is None else columns
        self._reset()

    def _reset(self) -> None:
        self._blocks: list[_Block] = []
        self._keys: dict[str, None] = {}
        self._read_after(None)

    def _read_after(self, line: LineMark | None) -> None:
        """Read lines from now on after ``line``, the last line that a block covers (None: from the first line)."""
        self._lines = NewLines(self.metrics, line)
        # Rows read from these lines: columns for each BLOCK rows, which need less memory than dicts, then the rest
        self._packed: list[Mapping[str, np.ndarray]] = []
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return sum(block.rows for block in self._blocks) + self.uncovered

    @property
    def keys(self) -> list[str]:
        texts = {key for row in self._rows for key, value in row.items() if not isinstance(value, _NUMBERS)}
        return list(self._keys | {key: None for row in self._rows for key in row if key not in texts})

    @property
    def uncovered(self) -> int:
        """Number of rows after the last block. If they are many, reading is faster once a ``ColumnWriter`` has written
        them into blocks."""
        return BLOCK * len(self._packed) + len(self._rows)

    @property
    def last(self) -> Values:
        """The newest row with all its keys, texts included; {} if only the columns of its block are kept."""
        return self._rows[-1] if self._rows else {}

    def refresh(self) -> bool:
        """Read new rows. If rows that were read before have been cut or replaced, read all rows again and return
        True."""
        replaced = len(self) > 0 and not self._is_current()
        if replaced:
            self._reset()
        self._read_blocks()
        for line in self._lines:
            self._rows.append({})  # stays empty for a damaged line, so that later rows keep their positions
            with suppress(ValueError, RecursionError):
                self._rows[-1] = parse_row(line)
            if len(self._rows) == BLOCK:
                self._add(_columns(self._rows))
                self._rows = []
        return replaced

    def _read_blocks(self) -> None:
        if blocks := _blocks_after(self._blocks[-1] if self._blocks else None, self.columns, self.metrics):
            self._blocks += blocks
            self._keys.update((key, None) for block in blocks for key in block.column_of)
            self._read_after(blocks[-1].last_line)

    def _add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Keep the columns of ``BLOCK`` rows, the last of which is the line read last."""
        self._packed.append(columns)
        self._keys.update(dict.fromkeys(columns))

    def column(self, key: str, since: int = 0) -> np.ndarray:
        """Return one metric in every row from row ``since`` on: float32 [rows], NaN where it has no value."""
        numbers = np.full(len(self), np.nan, np.float32)
        parts = [*(columns.get(key) for columns in self._packed), _column(self._rows, key)]
        for begin, part in zip(range(len(self) - self.uncovered, len(self) + 1, BLOCK), parts, strict=True):
            if part is not None:
                numbers[begin : begin + BLOCK] = part
        with suppress(OSError), open(self.columns, "rb") as file:  # removed meanwhile: the next refresh notices
            if hasattr(os, "posix_fadvise"):  # one page of each block is needed: no read-ahead
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            begin = 0
            for block in self._blocks:
                end = begin + block.rows
                column = block.column_of.get(key)
                if column is not None and end > since:
                    part = numbers[begin:end]
                    read = os.preadv(file.fileno(), [part.data], block.begin + part.nbytes * column)
                    if read < part.nbytes:  # the file was cut since the last refresh
                        part[read // 4 :] = np.nan
                begin = end
        return numbers[since:]

    def _is_current(self) -> bool:
        columns = stamp_of(self.columns)
        has_blocks = not self._blocks or (columns is not None and columns.size >= self._blocks[-1].end)
        return has_blocks and self._lines.is_current()


class ColumnWriter(Columns):
    """Writer of the cache. Call ``follow`` after rows were appended to ``metrics``: it reads the rows from there, so
    that it also creates a missing cache and continues one after a resume.

    Methods raise StorageError if ``columns`` cannot be written.
    """

    def forget(self) -> None:
        """Truncate the cache after the last complete block whose rows are still in ``metrics``."""
        self._reset()
        with writing(self.columns):
            self._read_blocks()
            end = self._blocks[-1].end if self._blocks else 0
            if self.columns.exists() and self.columns.stat().st_size > end:
                os.truncate(self.columns, end)

    def follow(self) -> list[Path]:
        """Read the new complete lines of ``metrics`` and write full blocks; return the paths that were written."""
        if not len(self) or not self._is_current():
            self.forget()
        before = len(self._blocks)
        with writing(self.columns):
            self.refresh()
        return [self.columns] if len(self._blocks) > before else []

    def _add(self, columns: Mapping[str, np.ndarray]) -> None:
        keys, last_line = list(columns), self._lines.mark
        names, column_of = b"", self._blocks[-1].column_of if self._blocks else {}
        if not self._blocks or list(column_of) != keys:
            names = json.dumps(keys, ensure_ascii=False).encode()
            names += b" " * (-len(names) % 4)
            column_of = {key: number for number, key in enumerate(keys)}
        head = _HEAD.pack(_MAGIC, BLOCK, len(keys), len(names), *last_line)
        numbers = b"".join(column.tobytes() for column in columns.values())
        begin = append_bytes(self.columns, head + names + numbers) + len(head) + len(names)
        self._blocks.append(_Block(begin, BLOCK, column_of, last_line))


def _column(rows: Sequence[Row], key: str) -> np.ndarray | None:
    """Return the values of a key as float32 [rows], NaN for None; return None if any value is a text."""
    values = [row.get(key) for row in rows]
    is_numeric = all(isinstance(value, _NUMBERS) for value in values)
    return np.array([float32(value) for value in values], np.float32) if is_numeric else None


def _columns(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    columns = {key: _column(rows, key) for key in dict.fromkeys(key for row in rows for key in row)}
    return {key: column for key, column in columns.items() if column is not None}


def float32(value: object) -> float:
    """Return the value if it is a number in the range of float32, ±infinity if it is beyond, NaN if it is no number."""
    if not isinstance(value, (int, float)):
        return np.nan
    try:
        number = float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf
    return number if abs(number) <= 3.4e38 or number != number else np.copysign(np.inf, number)


def _blocks_after(last: _Block | None, columns: Path, metrics: Path) -> list[_Block]:
    """Return the complete blocks after ``last``, up to the newest whose rows are still in ``metrics``."""
    blocks: list[_Block] = []
    with suppress(OSError), open(columns, "rb") as file:
        while block := _next_block(file.fileno(), last):
            blocks.append(block)
            last = block
    while blocks and not NewLines(metrics, blocks[-1].last_line).is_current():
        blocks.pop()
    return blocks


def _next_block(file: int, last: _Block | None) -> _Block | None:
    at, column_of, covered = (last.end, last.column_of, last.last_line.end) if last else (0, {}, 0)
    size, head = os.fstat(file).st_size, os.pread(file, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, rows, keys, name_bytes, *line = _HEAD.unpack(head)
    last_line = LineMark(*line)
    if magic != _MAGIC or not 0 < rows <= BLOCK or name_bytes > size:
        return None
    if last_line.length > last_line.end or last_line.end <= covered:
        return None
    at += _HEAD.size
    if name_bytes:
        try:
            names = json.loads(os.pread(file, name_bytes, at))
        except ValueError:
            return None
        if not isinstance(names, list):
            return None
        column_of = {str(key): number for number, key in enumerate(names)}
    block = _Block(at + name_bytes, rows, column_of, last_line)
    return block if len(column_of) == keys and block.end <= size else None
