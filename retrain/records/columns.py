"""The numbers of ``metrics.jsonl`` as columns, so that one metric of a long run is read without reading all of them.

``metrics.f32`` is a cache beside ``metrics.jsonl``, appended to and never changed: blocks of ``BLOCK`` rows, each a
head, the key list where it differs from the block before, and float32 [keys, rows], one key after the other. Rows
that fill no block yet are in ``metrics.jsonl`` alone, behind the byte that the last block names. What is no number
is NaN; a key that is ever a text in a block has no column there.

A block names the last line that it covers by its length and checksum: a cache of other rows (a file that was cut or
continued without it) is detected and made again.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.files import append_bytes, writing
from retrain.records.lines import parse_row, whole_lines
from retrain.records.schema.base import Values
from retrain.records.schema.layout import COLUMNS

BLOCK = 64  # Rows of a block: reading one key of 10,000 rows takes 157 short reads

_HEAD = struct.Struct("<4sIIIQII")
_MAGIC = b"RTC1"
_MOST_KEYS = 1 << 20


@dataclass(frozen=True)
class _Block:
    """Rows that were written together, with the keys that they have."""

    at: int  # Byte of the column file at which its numbers begin
    rows: int
    column_of: Mapping[str, int]  # Column of each key
    end: int  # Byte of metrics.jsonl at which its last row ends
    line: int  # Bytes of that row's line; ``crc`` is the line's checksum
    crc: int

    @property
    def over(self) -> int:
        return self.at + 4 * self.rows * len(self.column_of)


class ColumnWriter:
    """Writes the blocks of ``metrics`` to ``columns``. Call ``follow`` after rows were appended; it reads them from
    ``metrics`` itself when it did not see them, so it also makes a missing file, and continues one after a resume.

    Files that cannot be written raise StorageError.
    """

    def __init__(self, metrics: Path, columns: Path | None = None):
        self.metrics = metrics
        self.columns = metrics.with_name(COLUMNS) if columns is None else columns
        self._blocks: list[_Block] | None = None
        self._waiting: list[tuple[Values, int, bytes]] = []  # rows, the byte behind each, and their lines

    def forget(self) -> None:
        """``metrics`` was cut or replaced: the blocks of what is gone are cut off, and both files looked at anew."""
        self._waiting = []
        with writing(self.columns):
            self._blocks = self._valid_blocks()

    def follow(self, progress: Callable[[int], None] = lambda read: None) -> list[Path]:
        """Read all whole lines that ``metrics`` has gained; return the paths that were written. ``progress`` gets the
        number of bytes read so far."""
        with writing(self.columns):
            if self._blocks is None:
                self._blocks = self._valid_blocks()
            begin = self._waiting[-1][1] if self._waiting else self._blocks[-1].end if self._blocks else 0
            written = False
            for line, end in _lines(self.metrics, begin):
                self._waiting.append((_parsed(line), end, line))
                if len(self._waiting) == BLOCK:
                    self._write_block()
                    written = True
                    progress(end)
        return [self.columns] if written else []

    def _valid_blocks(self) -> list[_Block]:
        """Return the blocks that hold the rows of ``metrics``; what follows them is cut off."""
        blocks = _blocks_after(None, self.columns, self.metrics)
        over = blocks[-1].over if blocks else 0
        if self.columns.exists() and self.columns.stat().st_size > over:
            os.truncate(self.columns, over)
        return blocks

    def _write_block(self) -> None:
        assert self._blocks is not None
        rows = [row for row, _, _ in self._waiting]
        keys = number_keys(rows)
        before = self._blocks[-1] if self._blocks else None
        names = b""
        if before is None or list(before.column_of) != keys:
            names = json.dumps(keys, ensure_ascii=False).encode()
            names += b" " * (-len(names) % 4)
        _, end, line = self._waiting[-1]
        body = np.array([[_number(row.get(key)) for row in rows] for key in keys], np.float32).tobytes()
        head = _HEAD.pack(_MAGIC, len(rows), len(keys), len(names), end, len(line), zlib.crc32(line))
        at = append_bytes(self.columns, head + names + body) + _HEAD.size + len(names)
        column_of = before.column_of if before is not None and not names else {key: i for i, key in enumerate(keys)}
        self._blocks.append(_Block(at, len(rows), column_of, end, len(line), zlib.crc32(line)))
        self._waiting = []


class _Rows:
    """Rows that no block has yet, as numbers: a dict for each would take ten times the memory."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.last: Values = {}
        self._column_of: dict[str, int] = {}
        self._texts: dict[str, int] = {}  # keys that were a text, and the byte behind the last such row
        self._numbers: list[np.ndarray] = []

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def keys(self) -> list[str]:
        """Those that were a number, or nothing, in every row."""
        return [key for key in self._column_of if key not in self._texts]

    def add(self, row: Values, end: int) -> None:
        """Add a row; ``end`` is the byte behind it."""
        self._texts.update((key, end) for key, value in row.items() if not _is_number(value))
        for key in row:
            self._column_of.setdefault(key, len(self._column_of))
        numbers = np.full(len(self._column_of), np.nan, np.float32)
        numbers[[self._column_of[key] for key in row]] = [_number(value) for value in row.values()]
        self._numbers.append(numbers)
        self.ends.append(end)
        self.last = row

    def drop(self, over: int) -> None:
        """Forget the rows up to byte ``over``."""
        gone = sum(end <= over for end in self.ends)
        self.ends, self._numbers = self.ends[gone:], self._numbers[gone:]
        self._texts = {key: end for key, end in self._texts.items() if end > over}

    def column(self, key: str) -> np.ndarray:
        """float32 [rows]."""
        column = self._column_of.get(key)
        if column is None or key in self._texts:
            return np.full(len(self), np.nan, np.float32)
        return np.array([row[column] if column < len(row) else np.nan for row in self._numbers], np.float32)


class Columns:
    """The numbers of one run, for reading: blocks from ``columns`` and the newest rows from ``metrics``.

    ``refresh`` reads what is new. Either file may be missing, cut, torn or replaced at any moment; a cache that does
    not belong to ``metrics`` counts as missing, and then all rows are read from the lines.
    """

    def __init__(self, metrics: Path, columns: Path | None = None):
        self.metrics = metrics
        self.columns = metrics.with_name(COLUMNS) if columns is None else columns
        self._reset()

    def _reset(self) -> None:
        self._blocks: list[_Block] = []
        self._rest = _Rows()
        self._file = -1
        self._seam = (0, 0, 0)
        self._keys: dict[str, None] = {}

    def __len__(self) -> int:
        return sum(block.rows for block in self._blocks) + len(self._rest)

    @property
    def keys(self) -> list[str]:
        """Every key that has been a number, in the order in which they came."""
        return list(self._keys | dict.fromkeys(self._rest.keys))

    @property
    def uncovered(self) -> int:
        """Rows that no block covers; many of them are worth a ``ColumnWriter``."""
        return len(self._rest)

    @property
    def last(self) -> Values:
        """The newest row, whole; {} where there is none outside of the blocks."""
        return self._rest.last if len(self._rest) else {}

    def refresh(self) -> bool:
        """Read what is new; return whether rows that were there before were cut or replaced."""
        replaced = not self._stands()
        if replaced:
            self._reset()
        try:
            self._file = self.metrics.stat().st_ino
        except OSError:
            return replaced
        new = _blocks_after(self._blocks[-1] if self._blocks else None, self.columns, self.metrics)
        for block in new:
            self._keys.update(dict.fromkeys(block.column_of))
        self._blocks += new
        over = self._blocks[-1].end if self._blocks else 0
        self._rest.drop(over)
        for line, end in _lines(self.metrics, max([over, *self._rest.ends[-1:]])):
            self._rest.add(_parsed(line), end)
            self._seam = (len(line), end, zlib.crc32(line))
        return replaced

    def column(self, key: str, since: int = 0) -> np.ndarray:
        """Return one metric in every row from row ``since`` on: float32 [rows], NaN where it has no value."""
        blocks, over = [], 0
        for block in self._blocks:
            over += block.rows
            if over > since:
                blocks.append(block)
        covered = sum(block.rows for block in blocks)
        numbers = np.full(covered + len(self._rest), np.nan, np.float32)
        numbers[covered:] = self._rest.column(key)
        if blocks:
            with suppress(OSError), open(self.columns, "rb") as file:  # gone since the last refresh: the next finds out
                if hasattr(os, "posix_fadvise"):  # a page of each block is wanted, and not those behind it
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                _read(file.fileno(), blocks, key, numbers[:covered])
        return numbers[max(0, len(numbers) - max(0, len(self) - since)) :]

    def _stands(self) -> bool:
        """Return whether what was read is still the beginning of the files."""
        if self._file == -1:
            return True
        try:
            if self.metrics.stat().st_ino != self._file:
                return False
            if len(self._rest) and not _same_line(self.metrics, *self._seam):
                return False
            if not self._blocks:
                return True
            last = self._blocks[-1]
            return self.columns.stat().st_size >= last.over and _agrees(last, self.metrics)
        except OSError:
            return False


def _read(file: int, blocks: Sequence[_Block], key: str, to: np.ndarray) -> None:
    """Read one key of these blocks into float32 [rows]; what a block does not have, or has lost to a cut, stays."""
    room, begin, read = to.data.cast("B"), 0, os.preadv
    for block in blocks:
        end = begin + 4 * block.rows
        column = block.column_of.get(key)
        if column is not None:
            got = read(file, [room[begin:end]], block.at + (end - begin) * column)
            if got < end - begin:
                to[(begin + got) // 4 : end // 4] = np.nan
        begin = end


def number_keys(rows: Sequence[Values]) -> list[str]:
    """Return the keys that are a number (or nothing) in every row, in the order of the rows."""
    kinds: dict[str, bool] = {}
    for row in rows:
        for key, value in row.items():
            kinds[key] = kinds.get(key, True) and _is_number(value)
    return [key for key, number in kinds.items() if number]


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def _number(value: object) -> float:
    """Return the value as float32 holds it: infinite beyond its range, NaN for what is no number."""
    if not isinstance(value, (bool, int, float)):
        return np.nan
    try:
        number = float(value)
    except OverflowError:
        return np.inf if value > 0 else -np.inf
    return number if abs(number) <= 3.4e38 or number != number else np.copysign(np.inf, number)


def _parsed(line: bytes) -> Values:
    """Return the row of a line; {} for a damaged one, so that later rows keep their numbers."""
    with suppress(ValueError, RecursionError):
        return parse_row(line)
    return {}


def _lines(path: Path, begin: int) -> Iterator[tuple[bytes, int]]:
    with suppress(FileNotFoundError), open(path, "rb") as file:
        yield from whole_lines(file, begin)


def _agrees(block: _Block, metrics: Path) -> bool:
    return _same_line(metrics, block.line, block.end, block.crc)


def _same_line(path: Path, length: int, end: int, crc: int) -> bool:
    """Return whether the line of ``length`` bytes that ends at byte ``end`` has this checksum."""
    try:
        with open(path, "rb") as file:
            return zlib.crc32(os.pread(file.fileno(), length, end - length)) == crc
    except OSError:
        return False


def _blocks_after(last: _Block | None, columns: Path, metrics: Path) -> list[_Block]:
    """Return the whole blocks behind ``last`` that hold rows of ``metrics``, without those of rows that were cut or
    replaced."""
    blocks: list[_Block] = []
    with suppress(OSError), open(columns, "rb") as file:
        while block := _next_block(file.fileno(), last):
            blocks.append(block)
            last = block
    while blocks and not _agrees(blocks[-1], metrics):
        blocks.pop()
    return blocks


def _next_block(file: int, last: _Block | None) -> _Block | None:
    at, column_of, begin = (last.over, last.column_of, last.end) if last else (0, {}, 0)
    size, head = os.fstat(file).st_size, os.pread(file, _HEAD.size, at)
    if len(head) < _HEAD.size:
        return None
    magic, rows, keys, named, end, line, crc = _HEAD.unpack(head)
    if magic != _MAGIC or not 0 < rows <= BLOCK or keys > _MOST_KEYS or named > size or line > end or end <= begin:
        return None
    at += _HEAD.size
    if named:
        try:
            names = json.loads(os.pread(file, named, at))
        except ValueError:
            return None
        if not isinstance(names, list):
            return None
        column_of = {str(key): number for number, key in enumerate(names)}
    block = _Block(at + named, rows, column_of, end, line, crc)
    return block if len(column_of) == keys and block.over <= size else None
