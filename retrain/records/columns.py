"""The numbers of ``metrics.jsonl`` as columns, so that one metric of a long run is read without reading all metrics.

``metrics.f32`` is a cache beside ``metrics.jsonl``, only ever appended to: blocks of ``BLOCK`` rows, each a head, the
key list where it differs from the previous block, and float32 [keys, rows], one key after the other. Rows that do not
fill a block yet are only in ``metrics.jsonl``, after the last line of the last block. Values that are not numbers are
NaN; a key with a text anywhere in a block has no column there.

A block records length and checksum of its last line: a cache of other rows (a file that was cut or continued without
it) is detected and rebuilt.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from retrain.files import append_bytes, stamp_of, writing
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import COLUMNS
from retrain.util.jsonl import LineMark, NewLines, parse_row

BLOCK = 64  # Rows of a block: reading one key of 10,000 rows takes 157 short reads

_HEAD = struct.Struct("<4sIIIQII")
_MAGIC = b"RTC1"
_MOST_KEYS = 1 << 20


@dataclass(frozen=True)
class _Block:
    begin: int  # Byte of the column file at which its numbers begin
    rows: int
    column_of: Mapping[str, int]
    last_line: LineMark

    @property
    def end(self) -> int:
        return self.begin + 4 * self.rows * len(self.column_of)


@dataclass
class _Rows:
    """Rows that are not yet in a block of the file, as float32 columns: dicts would take ten times the memory."""

    last: Row = field(default_factory=dict)
    _count: int = 0
    _columns: dict[str, array[float]] = field(default_factory=dict)
    _text_keys: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> list[str]:
        return [key for key in self._columns if key not in self._text_keys]

    def add(self, row: Row) -> None:
        for key, value in row.items():
            column = self._columns.setdefault(key, array("f"))
            if missing := self._count - len(column):
                column.extend([np.nan] * missing)
            column.append(float32(value))
            if value is not None and not isinstance(value, (int, float)):
                self._text_keys.add(key)
        self._count += 1
        self.last = row

    def column(self, key: str) -> np.ndarray:
        numbers = np.full(self._count, np.nan, np.float32)
        if key not in self._text_keys:
            known = self._columns.get(key, array("f"))
            numbers[: len(known)] = known
        return numbers


class Columns:
    """The numbers of one run, for reading: blocks from ``columns`` and the newest rows from ``metrics``.

    ``refresh`` reads new rows. Either file may be missing, cut, torn or replaced at any moment; a cache that does not
    belong to ``metrics`` counts as missing, and then all rows are read from the lines.
    """

    def __init__(self, metrics: Path, columns: Path | None = None):
        self.metrics = metrics
        self.columns = metrics.with_name(COLUMNS) if columns is None else columns
        self._reset()

    def _reset(self) -> None:
        self._blocks: list[_Block] = []
        self._keys: dict[str, None] = {}
        self._rest, self._lines = _Rows(), NewLines(self.metrics)  # Rows after the blocks, and lines not read yet

    def __len__(self) -> int:
        return sum(block.rows for block in self._blocks) + len(self._rest)

    @property
    def keys(self) -> list[str]:
        return list(self._keys | dict.fromkeys(self._rest.keys))

    @property
    def uncovered(self) -> int:
        """Number of rows that no block covers; if there are many, a ``ColumnWriter`` makes reading faster."""
        return len(self._rest)

    @property
    def last(self) -> Values:
        """The newest row with all its keys; {} if it is in a block."""
        return self._rest.last

    def refresh(self) -> bool:
        """Read new rows; return whether rows that were read before have been cut or replaced."""
        replaced = len(self) > 0 and not self._is_current()
        if replaced:
            self._reset()
        if blocks := _blocks_after(self._blocks[-1] if self._blocks else None, self.columns, self.metrics):
            self._blocks += blocks
            self._keys.update((key, None) for block in blocks for key in block.column_of)
            self._rest, self._lines = _Rows(), NewLines(self.metrics, blocks[-1].last_line)
        for line in self._lines:
            self._add(line)
        return replaced

    def _add(self, line: bytes) -> None:
        row: Row = {}  # of a damaged line, so that later rows keep their numbers
        with suppress(ValueError, RecursionError):
            row = parse_row(line)
        self._rest.add(row)

    def column(self, key: str, since: int = 0) -> np.ndarray:
        """Return one metric in every row from row ``since`` on: float32 [rows], NaN where it has no value."""
        numbers = np.full(len(self), np.nan, np.float32)
        numbers[len(self) - len(self._rest) :] = self._rest.column(key)
        with suppress(OSError), open(self.columns, "rb") as file:  # gone since the last refresh: the next finds out
            if hasattr(os, "posix_fadvise"):  # a page of each block is wanted, and not those behind it
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            begin = 0
            for block in self._blocks:
                end = begin + block.rows
                column = block.column_of.get(key)
                if column is not None and end > since:
                    part = numbers[begin:end]
                    read = os.preadv(file.fileno(), [part.data], block.begin + part.nbytes * column)
                    if read < part.nbytes:  # lost to a cut
                        part[read // 4 :] = np.nan
                begin = end
        return numbers[since:]

    def _is_current(self) -> bool:
        columns = stamp_of(self.columns)
        has_blocks = not self._blocks or (columns is not None and columns.size >= self._blocks[-1].end)
        return has_blocks and self._lines.is_current()


class ColumnWriter(Columns):
    """Writes the blocks of ``metrics`` to ``columns``. Call ``follow`` after rows were appended; it reads them from
    ``metrics`` itself, so it also makes a missing file, and continues one after a resume.

    Files that cannot be written raise StorageError.
    """

    def forget(self) -> None:
        """Cut off blocks of rows that ``metrics`` no longer has, and an incomplete block."""
        self._reset()
        with writing(self.columns):
            blocks = _blocks_after(None, self.columns, self.metrics)
            end = blocks[-1].end if blocks else 0
            if self.columns.exists() and self.columns.stat().st_size > end:
                os.truncate(self.columns, end)
        if blocks:
            self._blocks, self._lines = blocks, NewLines(self.metrics, blocks[-1].last_line)

    def follow(self) -> list[Path]:
        """Read the new complete lines of ``metrics`` and write full blocks; return the paths that were written."""
        if not len(self) or not self._is_current():
            self.forget()
        before = len(self._blocks)
        with writing(self.columns):
            self.refresh()
        return [self.columns] if len(self._blocks) > before else []

    def _add(self, line: bytes) -> None:
        super()._add(line)
        if len(self._rest) == BLOCK:
            self._write_block(self._rest.keys, self._lines.mark)

    def _write_block(self, keys: list[str], last_line: LineMark) -> None:
        names, column_of = b"", self._blocks[-1].column_of if self._blocks else {}
        if not self._blocks or list(column_of) != keys:
            names = json.dumps(keys, ensure_ascii=False).encode()
            names += b" " * (-len(names) % 4)
            column_of = {key: number for number, key in enumerate(keys)}
        head = _HEAD.pack(_MAGIC, BLOCK, len(keys), len(names), *last_line)
        numbers = b"".join(self._rest.column(key).tobytes() for key in keys)
        begin = append_bytes(self.columns, head + names + numbers) + len(head) + len(names)
        self._blocks.append(_Block(begin, BLOCK, column_of, last_line))
        self._rest = _Rows()


def float32(value: object) -> float:
    """Return the value in the range of float32: infinite beyond it, NaN for values that are not numbers."""
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
    """Return the block after ``last``; None if the file has no complete block there."""
    at, column_of, covered = (last.end, last.column_of, last.last_line.end) if last else (0, {}, 0)
    size, head = os.fstat(file).st_size, os.pread(file, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, rows, keys, name_bytes, *line = _HEAD.unpack(head)
    last_line = LineMark(*line)
    if magic != _MAGIC or not 0 < rows <= BLOCK or keys > _MOST_KEYS or name_bytes > size:
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
