"""Campaigns and runs of retrain."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.errors import RetrainError
from retrain.ownership import MARK
from retrain.records.reader import is_held, last_row, read_manifest, read_object
from retrain.records.schema.layout import CONFIG, FINAL, LOCK, LOG, MANIFEST, METRICS
from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places, stays_inside
from retrain.ui.sources import QUIET_S, Home, Run, age, touched, whole


class RetrainRuns:
    """A directory with ``manifest.json``, or one run of a campaign alone."""

    name = "retrain"
    missing = ()

    def is_home(self, path: Path, places: Places) -> bool:
        """Whether it has a manifest, or is a run."""
        return places.file(path, MANIFEST) is not None or _is_run(path, places)

    def read(self, path: Path, places: Places) -> Home | None:
        """All runs that the manifest names, those that have not begun included."""
        place = places.place_of(path)
        if places.file(path, MANIFEST) is None:
            return _alone(self, path, place, places) if _is_run(path, places) else None
        try:
            manifest = read_manifest(path)
        except RetrainError as error:
            return Home(place, path, "campaign", self, path.name, [], missing=[places.told(str(error))])
        entries = manifest["runs"]
        lock = places.file(path, LOCK)
        dead = {} if lock is not None and is_held(lock) else {"running": "interrupted"}
        labels = _labels(manifest)
        runs = [
            _run(path, place, entry, labels.index(entry["label"]), dead, places)
            for entry in entries
            if stays_inside(path / entry["path"], places)
        ]
        single = len(entries) == 1 and entries[0]["path"] == "."
        times = [touched(run.path / METRICS) for run in runs]
        return Home(
            place, path, "run" if single else "campaign", self, str(manifest.get("name") or path.name), runs,
            manifest.get("created"), max([manifest.get("updated") or 0.0, *filter(None, times)]), manifest,
            [] if len(runs) == len(entries) else ["runs whose files lie outside of the directories given"],
        )  # fmt: skip

    def numbers(self, run: Run, places: Places, pool: Pool) -> Numbers:
        """Of ``metrics.jsonl`` and ``evals.jsonl``."""
        return pool.of(run.path)

    def settings(self, run: Run, places: Places) -> dict[str, Any]:
        """``config.json``: the resolved configuration and what it ran with."""
        return read_object(places.file(run.path, CONFIG))


def _labels(manifest: Mapping[str, Any]) -> list[str]:
    labels = list(dict.fromkeys(str(entry["label"]) for entry in manifest["runs"]))
    first = (manifest.get("declared") or {}).get("baseline")
    return [first, *(label for label in labels if label != first)] if first in labels else labels


def _run(home: Path, place: str, entry: Mapping[str, Any], index: int, dead: Mapping[str, str], places: Places) -> Run:
    path = (home / entry["path"]) if entry["path"] != "." else home
    metrics = places.file(path, METRICS)
    state = dead.get(entry["state"], entry["state"])
    step = whole(entry["step"])
    if metrics is not None and state in ("running", "interrupted", "failed"):
        with suppress(RetrainError, OSError):
            step = max(step, whole(last_row(metrics).get("step"), -1) + 1)
    seed, worker = whole(entry.get("seed")), entry.get("worker")
    return Run(
        place if entry["path"] == "." else f"{place}/{entry['path']}",
        path, entry["run_id"], str(entry["label"]), index, seed, state, entry.get("reason"), step,
        whole(entry.get("max_steps")), (0, seed), age(metrics),
        worker if state == "running" and isinstance(worker, str) else None,
    )  # fmt: skip


def _alone(source: RetrainRuns, path: Path, place: str, places: Places) -> Home | None:
    """A run of a campaign that is looked at without it, from its own files."""
    if not stays_inside(path, places):
        return None
    facts, metrics = read_object(places.file(path, CONFIG)), places.file(path, METRICS)
    seconds, row = age(metrics), {}
    if metrics is not None:
        with suppress(RetrainError, OSError):
            row = last_row(metrics)
    steps = whole((facts.get("training") or {}).get("max_steps"))
    step = whole(row.get("step"), -1) + 1
    ended = places.folder(path, FINAL) is not None
    state = "done" if ended else "running" if seconds is not None and seconds < QUIET_S else "interrupted"
    seed = whole((facts.get("training") or {}).get("seed"))
    label = str(facts.get("condition") or row.get("condition") or path.name)
    run = Run(place, path, path.name, label, 0, seed, state, None, step, steps, (0, seed), seconds)
    updated = touched(metrics)
    return Home(place, path, "run", source, path.name, [run], None, updated)


def _is_run(path: Path, places: Places) -> bool:
    if places.file(path, METRICS) is None and places.file(path, LOG) is None:
        return False
    if places.file(path, MARK) is not None:
        return True
    facts = read_object(places.file(path, CONFIG))
    return "run_id" in facts and "condition" in facts
