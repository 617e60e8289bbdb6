"""Runs of trackio: one SQLite file for each project, ``<project>.db``, as trackio 0.43 writes it.

Table ``metrics`` has a row for each call of ``log``: the run, the step and a JSON object, in which NaN and infinities
are texts. Table ``configs`` has the settings of each run; the entry ``_Group`` is the run's group. A file with a
write-ahead log is copied and the copy is read, so that nothing in the directory changes.
"""

import shutil
import sqlite3
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from retrain.errors import UsageError, first_line
from retrain.files import stamp_of
from retrain.records.foreign import (
    NO_VERDICT,
    FindFile,
    ForeignReader,
    ForeignRun,
    condition_and_seed,
    integer,
    is_recent,
)
from retrain.records.foreign.json_files import first_bytes
from retrain.records.foreign.table import HELDOUT_SET, Format, ReadRequest, ResultRow
from retrain.records.foreign.trl import evaluations, rows_by_step
from retrain.records.schema import layout
from retrain.records.schema.base import Row
from retrain.util.jsonl import parse_row

EVALUATION, UPDATES = "eval/", "train/global_step"  # Names of transformers' Trainer
HEADER = b"SQLite format 3\0"
LOG = "-wal"  # Appended to the database's file name: its write-ahead log
MOST_FILES, TRIES = 64, 3
_RUNS = "SELECT run_id, run_name, MAX(step), MAX(timestamp) FROM metrics GROUP BY run_id ORDER BY MIN(id)"


class TrackioReader(ForeignReader):
    tool = "trackio"
    missing = (NO_VERDICT, "the number of steps planned, and whether a run has ended", "notes and spans of time")

    def __init__(self) -> None:
        self._runs_of: dict[Path, tuple[Hashable, list[tuple[ForeignRun, str, Row]]]] = {}

    def runs(self, directory: Path, find: FindFile) -> list[ForeignRun]:
        return [run for run, _, _, _ in self._entries(directory, find)]

    def rows(self, run: ForeignRun, find: FindFile) -> list[Row] | None:
        entries = self._entries(run.directory, find)
        path, run_id = next(((path, run_id) for each, path, run_id, _ in entries if each.name == run.name), (None, ""))
        if path is None:
            return None
        try:
            with _opened(path) as database:
                return rows_by_step(((step, row) for _, step, _, row in _logged(database, run_id)), EVALUATION)
        except (sqlite3.Error, OSError, ValueError, TypeError):
            return None

    def config(self, run: ForeignRun, find: FindFile) -> Row:
        return next((config for each, _, _, config in self._entries(run.directory, find) if each.name == run.name), {})

    def stamp(self, run: ForeignRun, find: FindFile) -> Hashable:
        return tuple((path, _stamp(path)) for path in _databases(run.directory, find))

    def _entries(self, directory: Path, find: FindFile) -> Iterator[tuple[ForeignRun, Path, str, Row]]:
        """Yield (run, file, run id, settings) for every run. If the directory has several files, names of runs and
        conditions begin with the project's name."""
        files = _databases(directory, find)
        for path in files:
            for run, run_id, config in self._of(path):
                state = "running" if is_recent(run.written) else "done"
                named = replace(run, directory=directory, state=state)
                if len(files) > 1:
                    named = replace(named, name=f"{path.stem}/{run.name}", condition=f"{path.stem}: {run.condition}")
                yield named, path, run_id, config

    def _of(self, path: Path) -> list[tuple[ForeignRun, str, Row]]:
        stamp = _stamp(path)
        if path not in self._runs_of or self._runs_of[path][0] != stamp:
            # Suppressed: the file is being written, or trackio did not write it
            with suppress(sqlite3.Error, OSError, ValueError, TypeError), _opened(path) as database:
                self._runs_of[path] = stamp, list(_runs_in(database, path.parent))
        return self._runs_of.setdefault(path, (stamp, []))[1]


def _runs_in(database: sqlite3.Connection, directory: Path) -> Iterator[tuple[ForeignRun, str, Row]]:
    configs = {run_id: _object(text) for run_id, text in database.execute("SELECT run_id, config FROM configs")}
    names: set[str] = set()
    for run_id, run_name, step, written in database.execute(_RUNS).fetchall():
        name = str(run_name).replace("/", "_") or run_id
        if name in names:
            name = f"{name}_{run_id[:8]}"
        names.add(name)
        config = configs.get(run_id, {})
        condition, seed = condition_and_seed(name)
        seed = config["seed"] if isinstance(config.get("seed"), int) else seed
        condition = str(config.get("_Group") or condition)
        at = datetime.fromisoformat(written).timestamp()
        yield ForeignRun(directory, name, condition, seed, "done", int(step) + 1, 0, at), run_id, config


def _logged(database: sqlite3.Connection, run_id: str) -> Iterator[tuple[int, int, float, Row]]:
    """Yield (number of the row, step, Unix time, metrics) of each call of ``log``. transformers' Trainer gives no step,
    so that trackio counts the calls, and logs the number of updates as a metric."""
    query = "SELECT id, step, timestamp, metrics FROM metrics WHERE run_id = ? ORDER BY id"
    for number, step, written, text in database.execute(query, (run_id,)):
        row = _object(text)
        yield number, integer(row.get(UPDATES), step), datetime.fromisoformat(written).timestamp(), row


def _databases(directory: Path, find: FindFile) -> list[Path]:
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".db"))[:MOST_FILES]
    except OSError:
        return []
    return [path for name in names if (path := find(directory, name)) is not None]


def _stamp(path: Path) -> Hashable:
    return stamp_of(path), stamp_of(path.with_name(path.name + LOG))


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    log = path.with_name(path.name + LOG)
    with tempfile.TemporaryDirectory() as folder:
        address = f"{path.as_uri()}?mode=ro&immutable=1"
        if log.is_file() and not log.is_symlink() and log.stat().st_size:
            address = _copied(path, log, Path(folder) / path.name).as_uri()
        with closing(sqlite3.connect(address, uri=True)) as database:
            yield database


def _copied(path: Path, log: Path, copy: Path) -> Path:
    """Copy a database, then its log, and return ``copy``. If the database changed meanwhile, they may not belong
    together and are copied again. Raises sqlite3.OperationalError after ``TRIES`` attempts."""
    for _ in range(TRIES):
        before = stamp_of(path)
        shutil.copyfile(path, copy)
        with suppress(FileNotFoundError):
            shutil.copyfile(log, copy.with_name(copy.name + LOG))
        if stamp_of(path) == before:
            return copy
    raise sqlite3.OperationalError(f"{path} is being written")


def _object(text: str | bytes) -> Row:
    try:
        found = parse_row(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    texts = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
    return {key: texts.get(value, value) if isinstance(value, str) else value for key, value in found.items()}


def _is_database(path: Path) -> bool:
    return path.suffix == ".db" and first_bytes(path).startswith(HEADER)


def _result_rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield one row per run, step, set and metric; a resumed run continues in the same table."""
    try:
        with _opened(path.absolute()) as database:
            for run, run_id, _ in _runs_in(database, path.parent):
                logged = list(_logged(database, run_id))
                times = {number: time for number, _, time, _ in logged}
                lines = ((number, step, line) for number, step, _, line in logged)
                for row in evaluations(lines, request, path, EVALUATION):
                    held_out = HELDOUT_SET if row.set == layout.TRAIN else row.set
                    yield row._replace(
                        set=held_out, condition=run.condition, run=run.name, seed=run.seed, time=times[row.line]
                    )
    except (sqlite3.Error, OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no project of trackio ({first_line(error)}): name another file in path") from error


FORMAT = Format(tool="trackio", patterns=("*.db",), recognises=_is_database, rows=_result_rows)
