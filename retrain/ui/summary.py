"""Summarise campaigns and runs in a few numbers: the entries of the first page."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrain.config.evaluation import HELDOUT
from retrain.records.kinds import is_number
from retrain.records.schema.base import Row
from retrain.records.schema.layout import EVALS, NOTES
from retrain.ui.answers import JsonObject
from retrain.ui.decimation import evenly_spaced
from retrain.ui.findings import Finding, Findings, verdict_of
from retrain.ui.library import Library
from retrain.ui.rates import evaluation_rate
from retrain.ui.sources import Home, RunSource, sets_of, touched

SPARK_POINTS, SPARK_CONDITIONS = 30, 8
STATES = ("done", "failed", "running", "stopped", "interrupted")
DETAILS = ("devices", "heldout", "note", "verdict")


class Summaries:
    def __init__(self, library: Library, findings: Findings):
        self._library, self._findings = library, findings
        self._details: dict[Path, tuple[Home, Finding | None, Row]] = {}

    def is_known(self, home: Home) -> bool:
        read_home, finding, _ = self._details.get(home.path, (None, None, {}))
        return read_home is home and finding is self._findings.last(home)

    def of(self, home: Home, read: bool = True) -> JsonObject:
        """Return the ``Summary`` of the API. If ``read`` is false, ``DETAILS`` that are not known yet are None."""
        is_known = self.is_known(home)
        if read and not is_known:
            self._details[home.path] = home, self._findings.last(home), self._read_details(home)
        summary: Row = summary_of(home)
        # ``is_known`` is not checked again: a comparison that ends meanwhile makes the details old, but not unknown.
        summary |= self._details[home.path][2] if is_known or read else dict.fromkeys(DETAILS)
        seconds, estimate = self._findings.device_seconds(home), summary.pop("seconds", None)
        seconds = estimate if seconds is None else seconds
        return summary | {"device_hours": None if seconds is None else seconds / 3600.0,
                          "devices": summary["workers"] or summary["devices"]}  # fmt: skip

    def _read_details(self, home: Home) -> Row:
        comparison = self._findings.last_comparison(home) if home.kind == "campaign" else None
        conditions = comparison["conditions"] if comparison else []
        seconds = sum((each.get("seconds_per_run") or 0.0) * len(each["finished"]) for each in conditions)
        return {
            "devices": devices_of(self._library, home),
            "heldout": heldout_of(self._library, home),
            "note": newest_note(self._library, home),
            "verdict": verdict_of(comparison),
            "seconds": seconds or None,
        }


def summary_of(home: Home) -> JsonObject:
    states = [run.state for run in home.runs]
    seeds = {run.seed for run in home.runs if run.seed is not None}
    done = {seed for seed in seeds if all(run.state == "done" for run in home.runs if run.seed == seed)}
    return {
        "place": home.location,
        "kind": home.kind,
        "source": home.source,
        "name": home.name,
        "state": home.state,
        "runs": {"planned": len(states), **{state: states.count(state) for state in STATES}},
        "workers": sorted({run.worker for run in home.runs if run.worker is not None}, key=_by_number),
        "seeds": {"planned": len(seeds), "done": len(done)},
        "steps": {"done": sum(run.step for run in home.runs), "planned": sum(run.max_steps for run in home.runs)},
        "left_s": seconds_left(home.runs),
        "conditions": home.labels,
        "updated": home.updated,
        "missing": list(home.missing),
    }


def _by_number(worker: str) -> tuple[int, str]:
    """Return a key that sorts workers by the number that begins their names, 9 before 10."""
    return len(worker.partition(" ")[0]), worker


def devices_of(library: Library, home: Home) -> list[str]:
    built = library.settings(home.runs[0]).get("built") if home.runs and home.runs[0].reader is None else None
    device = built.get("device") if isinstance(built, dict) else None
    return [device] if isinstance(device, str) else []


def seconds_left(runs: Sequence[RunSource]) -> float | None:
    """Return the seconds that the remaining steps take at the pace of the running runs; None if no run is running."""
    rate = sum(1.0 / run.pace for run in runs if run.state == "running" and run.pace)
    steps = sum(max(0, run.max_steps - run.step) for run in runs if run.state in ("running", "pending", "interrupted"))
    return steps / rate if rate else None


def heldout_of(library: Library, home: Home) -> JsonObject | None:
    """Return the accuracy on the first held-out set by condition: ``points`` [step, mean over runs], ``SPARK_POINTS``
    at most, and the ``last`` evaluation with its interval. None if nothing was evaluated."""
    rows = {run.location: library.rows(run, EVALS) for run in home.runs}
    names = sets_of(str(row.get("name", HELDOUT)) for each in rows.values() for row in each)
    conditions = []
    for index, label in enumerate(home.labels[:SPARK_CONDITIONS] if names else ()):
        evaluated = [curve for run in home.of(label) if (curve := _by_step(rows[run.location], names[0]))]
        steps = sorted(set.intersection(*map(set, evaluated))) if evaluated else []
        if not steps:
            continue
        chosen = evenly_spaced(steps, SPARK_POINTS)
        key = f"eval/{names[0]}/correct_rate"
        points = [[step, float(np.mean([curve[step][key] for curve in evaluated]))] for step in chosen]
        last = {"step": steps[-1], **mean_evaluation([curve[steps[-1]] for curve in evaluated], names[0])}
        conditions.append({"label": label, "index": index, "points": points, "last": last})
    return {"set": names[0], "conditions": conditions} if conditions else None


def _by_step(rows: Sequence[Row], held_out: str) -> dict[int, Row]:
    named = [row for row in rows if row.get("name", HELDOUT) == held_out and isinstance(row.get("step"), int)]
    return {row["step"]: row for row in named if is_number(row.get(f"eval/{held_out}/correct_rate"))}


def mean_evaluation(rows: Sequence[Row], held_out: str) -> JsonObject:
    """Return the mean accuracy of an evaluation of several runs. All answered the same problems, so that the interval
    is that of one run with this accuracy."""
    if len(rows) == 1:
        return {**evaluation_rate(rows[0], held_out), "runs": 1}
    key, problems = (f"eval/{held_out}/{name}" for name in ("correct_rate", "problems"))
    mean = {key: float(np.mean([row[key] for row in rows])), problems: rows[0].get(problems)}
    return {**evaluation_rate(mean, held_out), "runs": len(rows)}


def newest_note(library: Library, home: Home) -> JsonObject | None:
    """Return the newest warning of the campaign's runs, or their newest note if none has a warning. Only the end of
    each run's notes is read. Of several runs with a warning, the one whose file was written last counts."""
    notes: list[tuple[bool, float, JsonObject]] = []
    for run in home.runs:
        if rows := library.rows(run, NOTES, last_only=True):
            warnings = [row for row in rows if row.get("level") == "warning"]
            note: JsonObject = {key: (warnings or rows)[-1].get(key) for key in ("level", "step", "text")}
            written = touched(library.file(run, NOTES)) or 0.0
            notes.append((bool(warnings), written, note | {"run": run.run_id, "place": run.location}))
    return max(notes, key=lambda each: each[:2])[2] if notes else None
