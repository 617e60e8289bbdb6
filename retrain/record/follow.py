"""Following runs that another process writes: from their files alone, reading only what is new.

An observer (a console, or ``JsonLines``) is told what it would have been told inside the process. Files may be cut and
continued by a resume, vanish, or end in half a line at any moment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from retrain.config.evaluation import HELDOUT
from retrain.errors import UsageError
from retrain.files import dumps
from retrain.record.observer import NullObserver, Observer, SpecLike
from retrain.record.states import ENDED, MANIFEST, read_manifest
from retrain.record.status import LAST_BLOCK, homes_of_runs, is_written, run_entries

SEAM_BYTES = 64
"""Bytes before the place where reading stopped that must still be the same for reading to go on there."""

Row = dict[str, Any]


class Tail:
    """The complete rows that have been added to one JSONL file since it was last read.

    ``last_only``: of what is there at first, or after the file was cut, only the last ``LAST_BLOCK`` bytes are read.
    """

    def __init__(self, path: Path, last_only: bool = False):
        self.path, self.last_only = path, last_only
        self._offset, self._seam = 0, b""
        self._begun = False

    def rows(self) -> tuple[bool, list[Row]]:
        """(whether the file has been cut or replaced since the last call, new rows in order)."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                anew = self._begun and not self._continues(file, size)
                if anew or not self._begun:
                    self._offset, self._seam = self._first(file, size), b""
                file.seek(self._offset)
                data = file.read(size - self._offset)
        except OSError:  # not there yet, or no longer
            anew = self._begun
            self._offset, self._seam, self._begun = 0, b"", False
            return anew, []
        self._begun = True
        whole = data[: data.rfind(b"\n") + 1]  # what follows is half a line
        self._offset += len(whole)
        self._seam = (self._seam + whole)[-SEAM_BYTES:]
        return anew, [row for line in whole.split(b"\n") if (row := _object(line)) is not None]

    def _continues(self, file: IO[bytes], size: int) -> bool:
        if size < self._offset:
            return False
        file.seek(self._offset - len(self._seam))
        return file.read(len(self._seam)) == self._seam

    def _first(self, file: IO[bytes], size: int) -> int:
        """Where the rows to read first begin."""
        if not self.last_only or size <= LAST_BLOCK:
            return 0
        file.seek(size - LAST_BLOCK)
        block = file.read(LAST_BLOCK)
        first = block.find(b"\n") + 1
        return size - LAST_BLOCK + first if 0 < first < len(block) else 0


def _object(line: bytes) -> Row | None:
    """The row in a line; None for an empty or damaged one, of which ``resume`` tells with its number."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


@dataclass(frozen=True)
class Followed:
    """A run as observers name it."""

    run_id: str
    label: str
    seed: int


class _Run:
    """What has been told of one run."""

    def __init__(self, spec: Followed, path: Path):
        self.spec = spec
        self.metrics = Tail(path / "metrics.jsonl", last_only=True)
        self.evals = Tail(path / "evals.jsonl")
        self.state = "pending"
        self.told_step = -1
        self.told_evals: dict[str, int] = {}


class Follower:
    """Tells ``observer`` of the runs at ``directory``: a run, a campaign, or a directory of those."""

    def __init__(self, directory: Path, observer: Observer):
        self.directory, self.observer = Path(directory), observer
        self._runs: dict[Path, _Run] = {}
        self._manifests: dict[Path, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        self._told_ranks: set[Path] = set()

    def look(self) -> bool:
        """Tell what is new; whether every run there is has ended (false as long as there is none)."""
        homes = homes_of_runs(self.directory) if self.directory.is_dir() else []
        states = []
        present = set()
        for home in homes:
            manifest = self._manifest(home)
            entries = manifest["runs"] if manifest else run_entries(home)
            alive = is_written(home)
            unseen = [entry for entry in entries if home / entry["path"] not in self._runs]
            several = self.directory not in homes
            for entry in unseen:
                run_id = f"{home.name}/{entry['run_id']}" if several else entry["run_id"]
                spec = Followed(run_id, entry["label"], entry["seed"] or 0)
                self._runs[home / entry["path"]] = _Run(spec, home / entry["path"])
            if unseen:
                self.observer.plan([self._runs[home / entry["path"]].spec for entry in unseen])
            for entry in entries:
                state = "interrupted" if entry["state"] == "running" and not alive else entry["state"]
                self._tell(self._runs[home / entry["path"]], entry, state)
                states.append(state)
                present.add(home / entry["path"])
            rank = ((manifest or {}).get("squeeze") or {}).get("recommended_rank")
            if rank and home not in self._told_ranks:
                self._told_ranks.add(home)
                self.observer.message(f"{home}: recommended rank {rank}")
        for path in set(self._runs) - present:
            self.observer.run_finished(self._runs.pop(path).spec, "interrupted", "its files are gone")
        return bool(states) and all(state in ENDED for state in states)

    def _manifest(self, home: Path) -> dict[str, Any] | None:
        """The manifest, read again only when it has been replaced; None where there is none."""
        path = home / MANIFEST
        try:
            status = path.stat()
            signature = (status.st_mtime_ns, status.st_size, status.st_ino)
            if path not in self._manifests or self._manifests[path][0] != signature:
                self._manifests[path] = (signature, read_manifest(home))
        except (OSError, UsageError):
            return None
        return self._manifests[path][1]

    def _tell(self, run: _Run, entry: Mapping[str, Any], state: str) -> None:
        anew, rows = run.metrics.rows()
        _, evaluations = run.evals.rows()
        if anew:
            run.told_step = -1
        if run.told_step < 0:
            rows = rows[-1:]  # what happened before is history
        if state != "pending" and (run.state == "pending" or anew or (state == "running" and run.state != state)):
            step = int(rows[0]["step"]) if rows else entry["step"] or 0
            self.observer.run_started(run.spec, step, entry["max_steps"] or 0)
            run.state = "running"
        for row in evaluations:
            name, step = str(row.get("name", HELDOUT)), row.get("step", 0)
            if step >= run.told_evals.get(name, 0):  # after a cut the earlier ones come again
                run.told_evals[name] = step + 1
                self.observer.evaluated(run.spec, name, row)
        for row in rows:
            run.told_step = int(row["step"])
            self.observer.step(run.spec, row)
        if state != run.state and state != "pending":
            run.state = state
            self.observer.run_finished(run.spec, state, entry.get("reason") or "")


class JsonLines(NullObserver):
    """One JSON object per event, flushed: ``event`` (start, step, eval, end, message), ``run``, and what belongs to it.

    A ``step`` has the whole ``row`` of metrics.jsonl, an ``eval`` that of evals.jsonl.
    """

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """``start``."""
        self._line(event="start", run=spec.run_id, label=spec.label, seed=spec.seed, step=step, max_steps=max_steps)

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """``step``."""
        self._line(event="step", run=spec.run_id, step=row["step"], row=dict(row))

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        """``eval``."""
        self._line(event="eval", run=spec.run_id, name=name, row=dict(row))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """``end``."""
        self._line(event="end", run=spec.run_id, status=status, reason=message or None)

    def message(self, text: str, level: str = "info") -> None:
        """``message``."""
        self._line(event="message", level=level, text=text)

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """``plan``: the runs that there are."""
        self._line(event="plan", runs=[spec.run_id for spec in specs])

    def _line(self, **facts: Any) -> None:
        self.stream.write(dumps(facts) + "\n")
        self.stream.flush()
