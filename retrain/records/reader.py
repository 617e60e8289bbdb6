"""Reads the files of runs and campaigns, also while other processes write them.

A torn last line is left out, and a file that is not there has no rows. ``Tail`` and ``LineIndex``, as
``columns.Columns``, do not read again what they have read, and find out when a file is another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import IO, NamedTuple

from retrain.config.legacy import REMOVED, without_removed
from retrain.errors import CheckpointError, UsageError
from retrain.files import Stamp, iter_jsonl, read_json, read_json_if_present, read_jsonl, stamp_of
from retrain.ownership import not_readable
from retrain.records.schema import layout
from retrain.records.schema.base import Row
from retrain.records.schema.campaign import STATES, RunEntry
from retrain.records.schema.rows import Note

LAST_BLOCK = 1 << 16  # Bytes read from the end of a file when only its last rows are wanted
LONGEST_LINE = 64 << 20  # Bytes; retrain writes no longer ones
LOG_BLOCK, LOG_BYTES = 1 << 18, 16 << 20  # Bytes of a log that are read first, and if they have too few lines
MAX_OBJECT_BYTES = 64 << 20  # Bytes of a JSON file that `read_object` reads
KEPT_OBJECTS = 128
SUMMARY_FILE = re.compile(r"(train|eval_(.+))_iteration_(\d{6,})" + re.escape(layout.SUMMARIES))


class RunReader:
    """Reads one run's directory.

    Methods raise CheckpointError, with file and line, for a line that is no JSON.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def config(self) -> Row:
        """Return ``config.json``; {} where there is none. Raises ValueError where it is no JSON."""
        path = self.directory / layout.CONFIG
        return read_json(path) if path.is_file() else {}

    def intact_config(self) -> Row:
        """Return ``config.json``; {} where there is none or it is damaged. Raises NotReadable."""
        facts = read_json_if_present(self.directory / layout.CONFIG)
        return facts if isinstance(facts, dict) else {}

    def environment(self) -> Row:
        """Return ``environment.json``. Raises OSError where there is none, ValueError where it is no JSON."""
        return read_json(self.directory / layout.ENVIRONMENT)

    def rows(self, name: str) -> list[Row]:
        """Return the rows of one of the run's JSONL files."""
        return read_jsonl(self.directory / name)

    def metrics(self) -> list[Row]:
        return self.rows(layout.METRICS)

    def iter_metrics(self) -> Iterator[Row]:
        return iter_jsonl(self.directory / layout.METRICS)

    def last_row(self) -> Row:
        """Return the last row of metrics, without reading the others; {} where there is none."""
        return last_row(self.directory / layout.METRICS)

    def evaluations(self, name: str | None = None) -> list[Row]:
        """Return the evaluations of the held-out set ``name``, or of all."""
        rows = self.rows(layout.EVALS)
        return rows if name is None else [row for row in rows if row.get("name") == name]

    def generations(self) -> list[Row]:
        return self.rows(layout.GENERATIONS)

    def held_out_completions(self, name: str | None) -> list[Row]:
        """Return the completions of all evaluations of the held-out set ``name``."""
        return [row for row in iter_jsonl(self.directory / layout.EVALUATIONS) if row.get("name") == name]

    def checkpoints(self) -> list[Row]:
        """Return the lines of ``checkpoints.jsonl`` that are objects: other tools have such a file, too."""
        return [row for row in self.rows(layout.CHECKPOINTS) if isinstance(row, dict)]

    def checkpoint_directories(self) -> list[Path]:
        """Return what is named as a checkpoint, whole or not and whoever wrote it, in the order of the names."""
        return sorted((self.directory / layout.SAVED).glob("step_*"))

    def summary_files(self) -> list[tuple[str, int, str]]:
        """Return split, iteration and name of each file of summaries, by iteration, then by split."""
        try:
            matches = map(SUMMARY_FILE.fullmatch, os.listdir(self.directory))
        except OSError:
            return []
        files = [
            (layout.TRAIN if match[2] is None else f"eval/{match[2]}", int(match[3]), match[0])
            for match in matches
            if match is not None
        ]
        return sorted(files, key=lambda file: (file[1], file[0]))

    def notes(self) -> list[Note]:
        return [Note.from_row(row) for row in self.rows(layout.NOTES)]

    def spans(self) -> list[Row]:
        return self.rows(layout.SPANS)


def last_row(path: Path) -> Row:
    """Return the last complete row of a JSONL file without reading all of it; {} if there is none.

    Raises CheckpointError when that is no JSON object.
    """
    _, lines = Tail(path, last_only=True).lines()
    try:
        return parse_row(lines[-1]) if lines else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error


def read_manifest(directory: Path) -> Row:
    """Return the content of ``manifest.json`` (``CampaignManifest``).

    Raises UsageError when it is damaged or names files outside the directory, NotOurs when it is no manifest of
    retrain.
    """
    path = directory / layout.MANIFEST
    try:
        content = read_json(path)
        for run in content["runs"]:
            run_id, where = run["run_id"], run["path"]
            if where not in (".", f"runs/{run_id}") or not is_run_id(run_id):
                raise UsageError(f"{path} names {where!r}, which is not a run of this directory")
            if run["state"] not in STATES or not isinstance(run["step"], int):
                raise ValueError(f"run {run_id} is in no known state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(path, error, "restore it from a copy, or begin anew with another --out") from error
    return content


def read_plan_file(directory: Path) -> Row:
    """Return the content of ``plan.json`` without removed keys. Raises UsageError when it is damaged, NotOurs when it
    is no plan of retrain."""
    path = directory / layout.PLAN
    try:
        content = read_json(path)
        for run in content["runs"]:
            if not is_run_id(run["run_id"]):
                raise UsageError(f"{path} names {run['run_id']!r}, which is not a run of this directory")
            if not isinstance(run["config"], dict) or not isinstance(run["overrides"], dict):
                raise ValueError(f"{run['run_id']} has no configuration")
            run["config"] = without_removed(run["config"])
            run["overrides"] = {key: value for key, value in run["overrides"].items() if key not in REMOVED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(path, error, "type retrain train with the file and --out") from error
    return content


def planned_configs(directory: Path) -> dict[str, Row]:
    """Return the resolved configurations of the directory's runs by run id; empty before the first start."""
    if not (directory / layout.PLAN).is_file():
        return {}
    return {run["run_id"]: run["config"] for run in read_plan_file(directory)["runs"]}


def is_run_id(value: object) -> bool:
    """Return whether this is a plain name, not a path that could lead elsewhere."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_+~=.\-]+", value) is not None and value[0] != "."


def run_entries(directory: Path, manifest: Mapping[str, object] | None) -> list[RunEntry]:
    """Return the runs as their manifest has them, or as it would have those in and under a directory without one.

    A run of a campaign, looked at alone, is as in the campaign's manifest. "running" becomes "interrupted" where no
    process holds the directory's lock.
    """
    campaign = directory.absolute().parent.parent
    if manifest is not None:
        entries = _entries(manifest)
    elif (campaign / layout.MANIFEST).is_file():
        path = f"runs/{directory.absolute().name}"
        entries = [entry for entry in _entries(read_manifest(campaign)) if entry.path == path]
        entries = [replace(entry, path=".") for entry in entries]
    else:
        paths = [directory, *sorted((directory / "runs").glob("*"))]
        entries = [_entry_from_records(directory, path) for path in paths if (path / layout.METRICS).is_file()]
    owners = [directory] if (directory / layout.LOCK).is_file() and manifest is not None else [directory, campaign]
    if any(is_held(owner / layout.LOCK) for owner in owners):
        return entries
    return [replace(entry, state="interrupted") if entry.state == "running" else entry for entry in entries]


def _entries(manifest: Mapping[str, object]) -> list[RunEntry]:
    runs = manifest["runs"]
    assert isinstance(runs, list)
    return [RunEntry.from_row(run) for run in runs]


def _entry_from_records(directory: Path, path: Path) -> RunEntry:
    row = last_row(path / layout.METRICS)
    share = row.get("progress/done_frac")
    return RunEntry(
        run_id=path.name,
        label=row.get("condition", path.name),
        state="done" if (path / layout.FINAL).is_dir() else "interrupted",
        max_steps=round((row["step"] + 1) / share) if share else 0,
        path=os.path.relpath(path, directory),
    )


def verification_files(directory: Path) -> list[Path]:
    """Return where a run or campaign may have verifications of adapters; those of other conditions come last."""
    home = directory / layout.SQUEEZE
    return [home / layout.VERIFICATION, *sorted(home.glob(f"*/{layout.VERIFICATION}"))]


def final_adapters(directory: Path) -> list[Path]:
    """Return the adapters that the runs of a campaign have ended with, by run id."""
    return sorted(path.parent for path in directory.glob(f"runs/*/{layout.FINAL}/{layout.ADAPTER_WEIGHTS}"))


def homes_of_runs(directory: Path) -> list[Path]:
    """Return ``directory`` itself when it is a run or a campaign, else those of its subdirectories that are."""

    def is_home(path: Path) -> bool:
        return (path / layout.MANIFEST).is_file() or (path / layout.METRICS).is_file()

    return [directory] if is_home(directory) else [path for path in sorted(directory.iterdir()) if is_home(path)]


def is_held(lock: Path) -> bool:
    """Return whether a process holds this lock."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_object(path: Path | None) -> Row:
    """Return the object of a JSON file, kept until the file changes and not to be changed.

    Returns {} for a file that is missing, damaged, no object or larger than ``MAX_OBJECT_BYTES``.
    """
    stamp = stamp_of(path)
    return _object(path, stamp) if path is not None and stamp is not None and stamp.size <= MAX_OBJECT_BYTES else {}


@lru_cache(KEPT_OBJECTS)
def _object(path: Path, stamp: Stamp) -> Row:
    try:
        content = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_text(path: Path | None, characters: int) -> str:
    """Return the first characters of a text file; "" where there is none."""
    if path is None:
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(characters)


class LogLines(NamedTuple):
    """Lines of a log, each with the byte at which it begins; ``before``: the byte before which a search continues, None
    at the beginning of the file."""

    lines: list[tuple[int, str]]
    before: int | None
    size: int


def log_lines(path: Path, before: int, search: str, most: int) -> LogLines:
    """Return the last ``most`` lines, in the file's order, that end before byte ``before`` (-1: the end of the file)
    and contain ``search``, which is lower case. Reads ``LOG_BYTES`` at most."""
    matches: list[tuple[int, str]] = []
    begin = 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = size if before < 0 else min(before, size)
        for reach in (LOG_BLOCK, LOG_BYTES):
            file.seek(start := max(0, end - reach))
            data = file.read(end - start)
            lines = data.splitlines(keepends=True)
            cut = lines.pop(0) if start and lines else b""  # may have its beginning further ahead
            begin = start + len(cut) if lines else start
            position, matches = end, []
            for line in reversed(lines):
                position -= len(line)
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if search in text.lower():
                    matches.append((position, text))
                    if len(matches) == most:
                        return LogLines(matches[::-1], position or None, size)
            if not start:
                break
    return LogLines(matches[::-1], begin or None, size)


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
