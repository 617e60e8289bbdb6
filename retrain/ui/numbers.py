"""Read the metrics of runs one column at a time, cached while their files do not change.

Reads ``metrics.f32`` beside ``metrics.jsonl`` if the run wrote it. Otherwise columns are made once, in the user's cache
directory: nothing is ever written below the directories that are shown.
"""

import fcntl
import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import RLock

import numpy as np

from retrain.errors import StorageError
from retrain.files import stamp_of
from retrain.records.columns import Columns, ColumnWriter, float32
from retrain.records.foreign import FindFile, ForeignReader, ForeignRun
from retrain.records.kinds import is_number
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import COLUMNS, EVALS, LOCK, METRICS
from retrain.ui.answers import ApiError
from retrain.ui.sources import RunSource
from retrain.util.jsonl import Tail, last_row
from retrain.verdicts.results import OWN_SPANS, SHARED_SPANS

AXES = ("step", "tokens", "device", "wall")
"""The x axes of a chart; ``device`` and ``wall`` in seconds. Without a recorded wall clock, the seconds of a run's
steps are added up, without the pauses between them."""
WALL_CLOCK = "timing_wall_clock"
UNPLACED = "rows of an earlier release, which did not record the wall clock: these are left out"
STEP_KEYS = ("step", "progress/batch")
TOKEN_KEYS = ("num_tokens",)
STEP_TIME_KEYS = ("step_time_s", "time/total", "step_time")
CACHED_FROM = 1 << 20  # Size of `metrics.jsonl` in bytes from which its columns are cached in a file
CACHED_BYTES = 48 << 20  # Bytes of columns in memory, over all runs
UNUSED_S = 30 * 86400.0


class Store:
    """Columns of all runs in memory, up to ``CACHED_BYTES``; the least recently used are dropped first."""

    def __init__(self) -> None:
        self._columns: OrderedDict[tuple[Path, str], tuple[int, np.ndarray]] = OrderedDict()
        self._bytes, self._lock = 0, RLock()

    def get(self, path: Path, key: str, version: int) -> np.ndarray | None:
        with self._lock:
            version_there, column = self._columns.get((path, key), (None, None))
            if version_there != version:
                return None
            self._columns.move_to_end((path, key))
            return column

    def put(self, path: Path, key: str, version: int, column: np.ndarray) -> None:
        with self._lock:
            _, before = self._columns.pop((path, key), (0, np.empty(0)))
            self._columns[path, key] = version, column
            self._bytes += column.nbytes - before.nbytes
            while self._bytes > CACHED_BYTES and self._columns:
                _, (_, dropped) = self._columns.popitem(last=False)
                self._bytes -= dropped.nbytes


class RunNumbers:
    """Metrics of a directory with ``metrics.jsonl`` and ``evals.jsonl``; thread-safe.

    ``metrics`` and ``evals`` are resolved paths inside the given directories; the files may be missing. While
    ``reading`` is true, the columns of a long run have not been made yet, and there are no rows.
    """

    def __init__(self, metrics: Path, evals: Path, store: Store, cache: Path | None = None):
        self.metrics, self._store, self._cache = metrics, store, cache
        self._lock = RLock()
        self._columns = Columns(metrics)
        self._evals, self._rows = Tail(evals), list[Row]()
        self._version, self.reading = 0, False
        self._signature: object = None
        self._keys: dict[str, None] | None = None

    def refresh(self, make: bool = False) -> None:
        """Read what is new in the files. If a long run has neither recorded columns nor current ones in the cache,
        ``reading`` becomes true and there are no rows, until a call with ``make`` writes the columns into the cache,
        which takes seconds."""
        if self._lacks_columns() and (make or self._is_cached()):
            self._make()
        with self._lock:
            self.reading = self._lacks_columns()
            if not self.reading:
                self._refresh()
            replaced, rows = self._evals.rows()
            if replaced or rows:
                self._rows, self._keys = rows if replaced else self._rows + rows, None

    def _refresh(self) -> None:
        signature = stamp_of(self.metrics), stamp_of(self._columns.columns)
        if signature == self._signature:
            return
        self._version += self._columns.refresh()  # rows that were read before have been cut or replaced
        self._signature, self._keys = signature, None

    def _lacks_columns(self) -> bool:
        if self._signature is not None:  # read already
            return False
        metrics, beside = stamp_of(self.metrics), self.metrics.with_name(COLUMNS)
        is_long = metrics is not None and metrics.size > CACHED_FROM
        return is_long and (beside.is_symlink() or not beside.is_file())

    def _is_cached(self) -> bool:
        cache, metrics = stamp_of(self._cache), stamp_of(self.metrics)
        return cache is not None and metrics is not None and cache.written >= metrics.written

    def _make(self) -> None:
        """Write the columns into the cache, and read them from there. Without a cache, all rows are held in memory."""
        columns = Columns(self.metrics)
        if self._cache is not None:
            with suppress(StorageError, OSError):
                self._cache.parent.mkdir(parents=True, exist_ok=True)
                with open(self._cache.with_suffix(LOCK), "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    ColumnWriter(self.metrics, self._cache).follow()
                os.utime(self._cache)
                columns = Columns(self.metrics, self._cache)
        columns.refresh()  # outside of the lock, so that other threads need not wait: they get no rows
        with self._lock:
            if self._signature is None:  # else another thread was faster, and columns of its rows are in the store
                self._columns = columns
                self._refresh()

    def __len__(self) -> int:
        with self._lock:
            return len(self._columns)

    @property
    def keys(self) -> Collection[str]:
        """Keys that had a number in some row, then those of evaluations; a mapping's keys, so that ``in`` is fast."""
        with self._lock:
            if self._keys is None:
                of_sets = (key for row in self._rows for key, value in row.items()
                           if key.startswith("eval/") and isinstance(value, int | float | None))  # fmt: skip
                self._keys = dict.fromkeys([*self._columns.keys, *of_sets])
            return self._keys

    @property
    def last(self) -> Values:
        with self._lock:
            if row := self._columns.last:
                return row
        with suppress(Exception):
            return last_row(self.metrics)
        return {}

    def column(self, key: str) -> np.ndarray:
        """Return float32 [rows], NaN where a row has no such number."""
        with self._lock:
            column = self._store.get(self.metrics, key, self._version)
            if column is None or len(column) < len(self._columns):
                before = np.empty(0, np.float32) if column is None else column
                column = np.concatenate([before, self._columns.column(key, since=len(before))])
                column.setflags(write=False)
                self._store.put(self.metrics, key, self._version, column)
            return column

    def evaluations(self) -> list[Row]:
        with self._lock:
            return self._rows

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock of ``refresh``: while it is held, all columns have the same rows."""
        return self._lock


class TableNumbers:
    reading = False

    def __init__(self, run: ForeignRun, reader: ForeignReader, find: FindFile):
        self._run, self._reader, self._find, self._lock = run, reader, find, RLock()
        self._stamp: Hashable = None
        self._rows: list[Row] = []
        self._columns: dict[str, np.ndarray] = {}

    def refresh(self, make: bool = False) -> None:
        """Read the rows if they have changed; keep the previous ones if they cannot be read."""
        stamp = self._reader.stamp(self._run, self._find)
        with self._lock:
            if stamp != self._stamp and (rows := self._reader.rows(self._run, self._find)) is not None:
                self._rows, self._stamp = rows, stamp
                keys = dict.fromkeys(key for row in rows for key, value in row.items() if is_number(value))
                self._columns = {key: np.array([float32(row.get(key)) for row in rows], np.float32) for key in keys}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> Collection[str]:
        return self._columns.keys()

    @property
    def last(self) -> Values:
        return self._rows[-1] if self._rows else {}

    def column(self, key: str) -> np.ndarray:
        return self._columns.get(key, np.full(len(self._rows), np.nan, np.float32))

    def evaluations(self) -> list[Row]:
        return []

    def lock(self) -> AbstractContextManager[object]:
        return self._lock


Numbers = RunNumbers | TableNumbers


def numbers_of(run: RunSource, find: FindFile, store: Store, cache: Path | None) -> Numbers:
    """Return the metrics of a run. The caller has checked that its files are inside the given directories."""
    foreign, reader = run.foreign, run.reader
    if foreign is not None and reader is not None and reader.metrics_file(foreign, find) is None:
        return TableNumbers(foreign, reader, find)
    name = f"{hashlib.sha256(os.fsencode(run.path)).hexdigest()[:32]}.f32"
    return RunNumbers(run.path / METRICS, run.path / EVALS, store, cache / name if cache is not None else None)


def cache_directory() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "retrain" / "columns"


def steps_of(numbers: Numbers) -> np.ndarray:
    """Return the step of every row, float64 [rows]; the index of a row that records no step."""
    with numbers.lock():
        column, rows = _first(numbers, STEP_KEYS), len(numbers)
    count = np.arange(rows, dtype=np.float64)
    return count if column is None else np.where(np.isfinite(column), column, count).astype(np.float64)


def axis_of(numbers: Numbers, x: str) -> np.ndarray:
    """Return the position of every row on the axis ``x``, float64 [rows]; NaN for rows of earlier releases, which did
    not record the wall clock. Raises ApiError (400) if the run does not record the axis."""
    if x == "step":
        return steps_of(numbers)
    if x == "tokens":
        column = _first(numbers, TOKEN_KEYS)
        if column is None:
            raise ApiError(400, "these runs do not count their tokens: take x=step")
        return np.maximum.accumulate(np.nan_to_num(column.astype(np.float64)))
    clock = _first(numbers, (WALL_CLOCK,)) if x == "wall" else None
    if clock is not None and np.isfinite(clock).any():
        return np.where(np.isfinite(clock), np.fmax.accumulate(clock.astype(np.float64)), np.nan)
    seconds = own_seconds(numbers) if x == "device" else _first(numbers, STEP_TIME_KEYS)
    if seconds is None:
        raise ApiError(400, "these runs do not say how long their steps took: take x=step")
    return np.cumsum(np.nan_to_num(seconds.astype(np.float64)))


def xs_of(numbers: Numbers, x: str, steps: np.ndarray, updates: bool) -> np.ndarray:
    """Return the positions of ``steps`` on the axis ``x``, float64, NaN if unknown. With ``updates``, ``steps`` are
    numbers of updates done, as for evaluations, and a position is the end of the last of these updates."""
    if x == "step":
        return steps
    with numbers.lock():
        done, rows = axis_of(numbers, x), steps_of(numbers)
    if not updates:
        return done[np.minimum(np.searchsorted(rows, steps), len(done) - 1)]
    begin = np.nan if len(done) and np.isnan(done[0]) else 0.0
    return np.concatenate([[begin], done])[np.searchsorted(rows, steps - 0.5)]


def own_seconds(numbers: Numbers) -> np.ndarray | None:
    """Return the device seconds of each step for this run alone, float64 [rows], as comparisons count them; for other
    tools' runs, the step's time. None if neither is recorded."""
    with numbers.lock():
        keys = numbers.keys
        if f"time/{SHARED_SPANS[0]}" not in keys:
            return _first(numbers, STEP_TIME_KEYS)

        def total(parts: tuple[str, ...]) -> np.ndarray:
            columns = [numbers.column(f"time/{part}").astype(np.float64) for part in parts if f"time/{part}" in keys]
            return np.nansum(columns, axis=0) if columns else np.zeros(len(numbers))

        cohort = np.nan_to_num(numbers.column("cohort_size").astype(np.float64))
        return total(OWN_SPANS) + total(SHARED_SPANS) / np.where(cohort > 0, cohort, 1.0)


def _first(numbers: Numbers, names: tuple[str, ...]) -> np.ndarray | None:
    keys = numbers.keys
    return next((numbers.column(name) for name in names if name in keys), None)


def tidy(cache: Path) -> None:
    for path in cache.glob("*.*") if cache.is_dir() else ():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
