"""Campaigns and runs as the page sees them, whichever tool wrote their directories."""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from retrain.config.evaluation import PART
from retrain.errors import RetrainError
from retrain.files import stamp_of
from retrain.ownership import MARK
from retrain.records.foreign import ForeignReader, ForeignRun, integer, is_recent
from retrain.records.kinds import is_number
from retrain.records.reader import is_held, read_manifest, read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CONFIG, EVALS, FINAL, LOCK, LOG, MANIFEST, METRICS, NOTES
from retrain.ui.places import Places, stays_inside
from retrain.util.jsonl import Tail, last_row

OURS = "retrain"
FOLLOWED = (METRICS, EVALS, NOTES, CONFIG)  # Files of a run of ours that the first page shows something of


@dataclass(frozen=True)
class Run:
    """One run. ``index`` is that of its condition, the baseline's 0; ``pair`` is what runs of different conditions
    share when they are a pair; ``worker`` is who trains it now, as in "1 gpu:0", where there are several."""

    place: str
    path: Path
    run_id: str
    label: str
    index: int
    seed: int | None
    state: str
    reason: str | None
    step: int
    max_steps: int
    written: float | None = None
    pace: float | None = None  # Seconds of a step of late, where the run is not at its end
    worker: str | None = None
    foreign: ForeignRun | None = None
    reader: ForeignReader | None = None

    @property
    def pair(self) -> tuple[int, int]:
        return 0, self.seed or 0

    def to_json(self) -> dict[str, Any]:
        names = ("place", "run_id", "label", "index", "seed", "state", "reason", "step", "max_steps", "worker")
        seconds = None if self.written is None else max(0.0, time.time() - self.written)
        return {name: getattr(self, name) for name in names} | {"age_s": seconds}


@dataclass(frozen=True)
class Home:
    """A campaign or a single run: what one entry of the first page is about. ``manifest`` is that of retrain."""

    place: str
    path: Path
    kind: str
    source: str
    name: str
    runs: Sequence[Run]
    updated: float | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()
    is_lockless: bool = False  # Only the time of its last row says whether it trains

    @property
    def labels(self) -> list[str]:
        by_index = {run.index: run.label for run in self.runs}
        return [by_index[index] for index in sorted(by_index)]

    @property
    def state(self) -> str:
        states = {run.state for run in self.runs}
        order = ("running", "interrupted", "pending", "failed", "stopped", "done")
        if "pending" in states and states & {"done", "failed", "stopped"} and not states & {"running", "interrupted"}:
            return "interrupted"
        return next((state for state in order if state in states), "pending")

    def of(self, label: str) -> list[Run]:
        return sorted((run for run in self.runs if run.label == label), key=lambda run: run.pair)

    def of_run(self, run: Run) -> "Home":
        """Return one of its runs as a home of its own."""
        return replace(self, place=run.place, path=run.path, kind="run", name=run.run_id, runs=[run], manifest={})

    def stamp(self, places: Places) -> Hashable:
        """Return what changes when the directory has to be read again."""
        recent = [is_recent(run.written) for run in self.runs] if self.is_lockless else None
        if self.source != OURS:
            readers = [run.reader.stamp(run.foreign, places.file) for run in self.runs if run.reader and run.foreign]
            return stamp_of(self.path), recent, readers
        lock = self.path / LOCK
        held = any(run.state in ("running", "interrupted") for run in self.runs) and lock.exists() and is_held(lock)
        files = [stamp_of(run.path / name) for run in self.runs for name in FOLLOWED]
        return stamp_of(self.path / MANIFEST), held, recent, files


def our_home(path: Path, places: Places) -> Home | None:
    """Return a campaign or run of retrain with all runs that its manifest names; None for another directory."""
    place = places.place_of(path)
    if places.file(path, MANIFEST) is None:
        return _without_manifest(path, place, places) if is_our_run(path, places) else None
    try:
        manifest = read_manifest(path)
    except RetrainError as error:
        return Home(place, path, "campaign", OURS, path.name, [], missing=[places.with_places(str(error))])
    entries, labels = manifest["runs"], _labels(manifest)
    lock = places.file(path, LOCK)
    held = lock is not None and is_held(lock)
    runs = [
        _run(path, place, entry, labels.index(entry["label"]), held, places)
        for entry in entries
        if stays_inside(path / entry["path"], places)
    ]
    single = len(entries) == 1 and entries[0]["path"] == "."
    updated = max([manifest.get("updated") or 0.0, *(run.written for run in runs if run.written)])
    missing = [] if len(runs) == len(entries) else ["runs whose files lie outside of the directories given"]
    name = str(manifest.get("name") or path.name)
    return Home(
        place, path, "run" if single else "campaign", OURS, name, runs, updated, manifest, missing
    )  # fmt: skip


def _labels(manifest: Mapping[str, Any]) -> list[str]:
    labels = list(dict.fromkeys(str(entry["label"]) for entry in manifest["runs"]))
    first = (manifest.get("declared") or {}).get("baseline")
    return [first, *(label for label in labels if label != first)] if first in labels else labels


def _run(home: Path, place: str, entry: Mapping[str, Any], index: int, held: bool, places: Places) -> Run:
    own = entry["path"] == "."
    path = home if own else home / entry["path"]
    metrics = places.file(path, METRICS)
    state = "interrupted" if entry["state"] == "running" and not held else entry["state"]
    step, rows = integer(entry["step"]), []
    if state in ("running", "interrupted", "failed") and metrics is not None:
        rows = Tail(metrics, last_only=True).rows()[1]
        step = max([step, *(integer(row.get("step"), -1) + 1 for row in rows[-1:])])
    seconds = [row["step_time_s"] for row in rows if is_number(row.get("step_time_s"))]
    worker = entry.get("worker") if state == "running" else None
    return Run(
        place if own else f"{place}/{entry['path']}", path, entry["run_id"], str(entry["label"]), index,
        integer(entry.get("seed")), state, entry.get("reason"), step, integer(entry.get("max_steps")), touched(metrics),
        median(seconds) if seconds else None,
        worker if isinstance(worker, str) else None,
    )  # fmt: skip


def _without_manifest(path: Path, place: str, places: Places) -> Home | None:
    """Return a run of a campaign that is looked at without it, from its own files."""
    if not stays_inside(path, places):
        return None
    facts, metrics = read_object(places.file(path, CONFIG)), places.file(path, METRICS)
    row, training, written = _last_row(metrics), facts.get("training") or {}, touched(metrics)
    ended = places.folder(path, FINAL) is not None
    run = Run(
        place, path, path.name, str(facts.get("condition") or row.get("condition") or path.name), 0,
        integer(training.get("seed")), "done" if ended else "running" if is_recent(written) else "interrupted", None,
        integer(row.get("step"), -1) + 1, integer(training.get("max_steps")), written,
    )  # fmt: skip
    return Home(place, path, "run", OURS, path.name, [run], written, is_lockless=True)


def is_our_run(path: Path, places: Places) -> bool:
    """Return whether a directory without a manifest is a run of retrain."""
    if places.file(path, METRICS) is None and places.file(path, LOG) is None:
        return False
    facts = read_object(places.file(path, CONFIG))
    return places.file(path, MARK) is not None or ("run_id" in facts and "condition" in facts)


def foreign_home(path: Path, reader: ForeignReader, places: Places) -> Home | None:
    """Return a run of another tool, or a folder of them as a campaign; the first condition by name is the baseline."""
    place, found = places.place_of(path), reader.runs(path, places.file)
    single = len(found) == 1 and found[0].directory == path
    labels = list(dict.fromkeys(run.condition for run in found))
    runs = [
        Run(
            place if single else f"{place}/{run.name}", run.directory, run.name, run.condition,
            labels.index(run.condition), run.seed, run.state, None, run.step, run.max_steps, run.written, foreign=run,
            reader=reader,
        )
        for run in found
    ]  # fmt: skip
    times = [run.written for run in runs if run.written]
    kind, updated = "run" if single else "campaign", max(times, default=None)
    home = Home(place, path, kind, reader.tool, path.name, runs, updated, {}, reader.missing, is_lockless=True)
    return home if runs else None


def sets_of(names: Iterable[str]) -> list[str]:
    """Return the held-out sets among the names of evaluations; one on a part of the problems is for the curve."""
    return [name for name in dict.fromkeys(names) if not name.endswith(PART)]


def _last_row(metrics: Path | None) -> Row:
    if metrics is not None:
        with suppress(RetrainError, OSError):
            return last_row(metrics)
    return {}


def touched(path: Path | None) -> float | None:
    """Return when a file was last written, as Unix time."""
    found = stamp_of(path)
    return None if found is None else found.written / 1e9
