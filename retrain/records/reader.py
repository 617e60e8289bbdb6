"""Reads the files of runs and campaigns, also while other processes write them.

A torn last line is left out, and a file that is not there has no rows. Growing files are read by ``lines.Tail``,
``lines.LineIndex`` and ``columns.Columns``, which do not read again what they have read.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from retrain.errors import CheckpointError, UsageError
from retrain.files import iter_jsonl, read_json, read_jsonl
from retrain.ownership import not_readable
from retrain.records.lines import Tail, parse_row
from retrain.records.schema import layout
from retrain.records.schema.base import Row
from retrain.records.schema.campaign import STATES, RunEntry
from retrain.records.schema.rows import Note


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

    def metrics(self) -> list[Row]:
        return read_jsonl(self.directory / layout.METRICS)

    def iter_metrics(self) -> Iterator[Row]:
        return iter_jsonl(self.directory / layout.METRICS)

    def last_row(self) -> Row:
        """Return the last row of metrics, without reading the others; {} where there is none."""
        return last_row(self.directory / layout.METRICS)

    def evaluations(self, name: str | None = None) -> list[Row]:
        """Return the evaluations of the held-out set ``name``, or of all."""
        rows = read_jsonl(self.directory / layout.EVALS)
        return rows if name is None else [row for row in rows if row.get("name") == name]

    def generations(self) -> list[Row]:
        return read_jsonl(self.directory / layout.GENERATIONS)

    def held_out_completions(self, name: str | None) -> list[Row]:
        """Return the completions of all evaluations of the held-out set ``name``."""
        return [row for row in iter_jsonl(self.directory / layout.EVALUATIONS) if row.get("name") == name]

    def checkpoints(self) -> list[Row]:
        """Return the lines of ``checkpoints.jsonl`` that are objects: other tools have such a file, too."""
        return [row for row in read_jsonl(self.directory / layout.CHECKPOINTS) if isinstance(row, dict)]

    def notes(self) -> list[Note]:
        return [Note.from_row(row) for row in read_jsonl(self.directory / layout.NOTES)]

    def spans(self) -> list[Row]:
        return read_jsonl(self.directory / layout.SPANS)


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
