"""Campaigns and runs as the page sees them, whichever tool wrote their directories."""

import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from retrain.config.evaluation import PART
from retrain.errors import RetrainError
from retrain.files import stamp_of
from retrain.ownership import MARK
from retrain.records.foreign import ForeignReader, ForeignRun, integer, is_recent
from retrain.records.kinds import is_number
from retrain.records.reader import is_held, read_manifest, read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CONFIG, EVALS, FINAL, LOCK, LOG, MANIFEST, METRICS, NOTES
from retrain.ui.answers import JsonObject
from retrain.ui.places import Places, stays_inside
from retrain.util.jsonl import Tail

OURS = "retrain"
FOLLOWED = (METRICS, EVALS, NOTES, CONFIG)  # Files of a retrain run whose content the first page shows


@dataclass(frozen=True)
class RunSource:
    """One run. ``index``: number of its condition, 0 for the baseline. ``seed``: equal for runs of two conditions that
    are paired. ``worker``: the worker that trains it now, such as "1 gpu:0"; None if there is only one."""

    location: str
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
    pace: float | None = None  # Median seconds of the latest steps; None if the run has ended
    worker: str | None = None
    foreign: ForeignRun | None = None
    reader: ForeignReader | None = None

    @property
    def head(self) -> JsonObject:
        return {"place": self.location, "label": self.label, "index": self.index, "seed": self.seed}

    def to_json(self) -> JsonObject:
        names = ("run_id", "label", "index", "seed", "state", "reason", "step", "max_steps", "worker")
        seconds = None if self.written is None else max(0.0, time.time() - self.written)
        return {"place": self.location, **{name: getattr(self, name) for name in names}, "age_s": seconds}


@dataclass(frozen=True)
class Home:
    """A campaign or a single run, one entry of the first page. ``manifest``: retrain's manifest; {} if there is
    none."""

    location: str
    path: Path
    kind: str
    source: str
    name: str
    runs: Sequence[RunSource]
    updated: float | None = None
    manifest: Row = field(default_factory=dict)
    missing: Sequence[str] = ()
    is_lockless: bool = False  # There is no lock: the time of the last row decides whether it trains

    @property
    def labels(self) -> list[str]:
        by_index = {run.index: run.label for run in self.runs}
        return [by_index[index] for index in sorted(by_index)]

    @property
    def state(self) -> str:
        states = {run.state for run in self.runs}
        order = ("running", "interrupted", "pending", "failed", "done", "stopped")
        if "pending" in states and states & {"done", "failed", "stopped"} and not states & {"running", "interrupted"}:
            return "interrupted"
        return next((state for state in order if state in states), "pending")

    def of(self, label: str) -> list[RunSource]:
        return sorted((run for run in self.runs if run.label == label), key=lambda run: run.seed or 0)

    def of_run(self, run: RunSource) -> "Home":
        return replace(self, location=run.location, path=run.path, kind="run", name=run.run_id, runs=[run], manifest={})

    def stamp(self, places: Places) -> Hashable:
        recent = [is_recent(run.written) for run in self.runs] if self.is_lockless else None
        if self.source != OURS:
            readers = [run.reader.stamp(run.foreign, places.file) for run in self.runs if run.reader and run.foreign]
            return stamp_of(self.path), recent, readers
        lock = self.path / LOCK
        held = any(run.state in ("running", "interrupted") for run in self.runs) and lock.exists() and is_held(lock)
        files = [stamp_of(run.path / name) for run in self.runs for name in FOLLOWED]
        return stamp_of(self.path / MANIFEST), held, recent, files


def our_home(path: Path, places: Places) -> Home | None:
    location = places.location_of(path)
    if places.file(path, MANIFEST) is None:
        return _without_manifest(path, location, places) if is_our_run(path, places) else None
    try:
        manifest = read_manifest(path)
    except RetrainError as error:
        return Home(location, path, "campaign", OURS, path.name, [], missing=[places.with_places(str(error))])
    entries, labels = manifest["runs"], _labels(manifest)
    lock = places.file(path, LOCK)
    held = lock is not None and is_held(lock)
    runs = [
        _run(path, location, entry, labels.index(entry["label"]), held, places)
        for entry in entries
        if stays_inside(path / entry["path"], places)
    ]
    single = len(entries) == 1 and entries[0]["path"] == "."
    updated = max([manifest.get("updated") or 0.0, *(run.written for run in runs if run.written)])
    missing = [] if len(runs) == len(entries) else ["runs whose files lie outside of the directories given"]
    name = str(manifest.get("name") or path.name)
    return Home(location, path, "run" if single else "campaign", OURS, name, runs, updated, manifest, missing)


def _labels(manifest: Row) -> list[str]:
    labels = list(dict.fromkeys(str(entry["label"]) for entry in manifest["runs"]))
    first = (manifest.get("declared") or {}).get("baseline")
    return [first, *(label for label in labels if label != first)] if first in labels else labels


def _run(home: Path, location: str, entry: Row, index: int, held: bool, places: Places) -> RunSource:
    is_single = entry["path"] == "."
    path = home if is_single else home / entry["path"]
    metrics = places.file(path, METRICS)
    state = "interrupted" if entry["state"] == "running" and not held else entry["state"]
    rows = _last_rows(metrics) if state in ("running", "interrupted", "failed") else []
    step = max([integer(entry["step"]), *(integer(row.get("step"), -1) + 1 for row in rows[-1:])])
    seconds = [row["step_time_s"] for row in rows if is_number(row.get("step_time_s"))]
    worker = entry.get("worker") if state == "running" else None
    return RunSource(
        location if is_single else f"{location}/{entry['path']}", path, entry["run_id"], str(entry["label"]), index,
        integer(entry.get("seed")), state, entry.get("reason"), step, integer(entry.get("max_steps")), touched(metrics),
        median(seconds) if seconds else None,
        worker if isinstance(worker, str) else None,
    )  # fmt: skip


def _without_manifest(path: Path, location: str, places: Places) -> Home | None:
    if not stays_inside(path, places):
        return None
    facts, metrics = read_object(places.file(path, CONFIG)), places.file(path, METRICS)
    row, training, written = (_last_rows(metrics) or [{}])[-1], facts.get("training") or {}, touched(metrics)
    ended = places.folder(path, FINAL) is not None
    run = RunSource(
        location, path, path.name, str(facts.get("condition") or row.get("condition") or path.name), 0,
        integer(training.get("seed")), "done" if ended else "running" if is_recent(written) else "interrupted", None,
        integer(row.get("step"), -1) + 1, integer(training.get("max_steps")), written,
    )  # fmt: skip
    return Home(location, path, "run", OURS, path.name, [run], written, is_lockless=True)


def is_our_run(path: Path, places: Places) -> bool:
    if places.file(path, METRICS) is None and places.file(path, LOG) is None:
        return False
    facts = read_object(places.file(path, CONFIG))
    return places.file(path, MARK) is not None or ("run_id" in facts and "condition" in facts)


def foreign_home(path: Path, reader: ForeignReader, places: Places) -> Home | None:
    location, foreign = places.location_of(path), reader.runs(path, places.file)
    single = len(foreign) == 1 and foreign[0].directory == path
    labels = list(dict.fromkeys(run.condition for run in foreign))
    runs = [
        RunSource(
            location if single else f"{location}/{run.name}", run.directory, run.name, run.condition,
            labels.index(run.condition), run.seed, run.state, None, run.step, run.max_steps, run.written, foreign=run,
            reader=reader,
        )
        for run in foreign
    ]  # fmt: skip
    updated = max((run.written for run in runs if run.written), default=None)
    kind = "run" if single else "campaign"
    home = Home(location, path, kind, reader.tool, path.name, runs, updated, {}, reader.missing, is_lockless=True)
    return home if runs else None


def sets_of(names: Iterable[str]) -> list[str]:
    """Return the distinct held-out sets among names of evaluations, without partial sets, which only draw curves."""
    return [name for name in dict.fromkeys(names) if not name.endswith(PART)]


def _last_rows(metrics: Path | None) -> list[Row]:
    return Tail(metrics, last_only=True).rows()[1] if metrics is not None else []


def touched(path: Path | None) -> float | None:
    """Return the Unix time at which a file was last written; None if it is missing."""
    stamp = stamp_of(path)
    return None if stamp is None else stamp.written / 1e9
