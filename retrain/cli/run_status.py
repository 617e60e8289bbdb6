"""Read the state of runs and campaigns from their files, without the process that writes them."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from retrain.config.evaluation import HELDOUT, PART
from retrain.errors import UsageError
from retrain.records.reader import evaluation_rows, read_manifest, run_entries
from retrain.records.schema.base import Row, Values
from retrain.records.schema.campaign import RunEntry
from retrain.records.schema.layout import MANIFEST, METRICS
from retrain.util.jsonl import last_row


class AccuracyChange(NamedTuple):
    """Accuracy before the first step, and at the latest evaluation after it; None without such an evaluation."""

    before: float | None = None
    now: float | None = None


NO_CHANGE = AccuracyChange()


@dataclass
class RunView:
    run_id: str
    label: str
    seed: int
    state: str = "waiting"  # waiting, running, done, failed, interrupted or stopped
    worker: str = ""  # Worker that trains the run, if there are several
    first_step: int = 0
    steps_done: int = 0
    max_steps: int = 0
    started: float = 0.0
    row: Values = field(default_factory=dict)
    evaluations: dict[str, AccuracyChange] = field(default_factory=dict)
    """Accuracy on each held-out set, in the order of the file; partial sets, which only draw curves, come last."""

    def add_evaluation(self, name: str, row: Values) -> None:
        change = self.evaluations.setdefault(name, NO_CHANGE)
        self.evaluations = dict(sorted(self.evaluations.items(), key=lambda each: each[0].endswith(PART)))
        if (rate := row.get(f"eval/{name}/correct_rate")) is not None:
            is_later = bool(row.get(f"eval/{name}/step"))
            self.evaluations[name] = change._replace(now=rate) if is_later else change._replace(before=rate)

    @property
    def held_out(self) -> AccuracyChange:
        return next((rates for name, rates in self.evaluations.items() if not name.endswith(PART)), NO_CHANGE)

    @property
    def pooling(self) -> float | None:
        """SEPA's λ at the last step; None in other transform modes, whose rows have 0."""
        return self.row.get("sepa_lambda") if self.label.partition("~")[0].endswith("+gtpo_sepa") else None

    def eta(self, now: float) -> float | None:
        """Return the remaining seconds at the present pace; None before the first step and after the end."""
        done = self.steps_done - self.first_step
        if self.state != "running" or done <= 0:
            return None
        return (now - self.started) / done * max(0, self.max_steps - self.steps_done)


def read_status(directory: Path) -> Row:
    """Return the state of every run at ``directory`` (a campaign, a single run, or a directory of run directories).

    For each run, ``step`` counts finished steps, ``row`` is the last metrics row, ``evaluations`` has the accuracy on
    each held-out set, of which the first is also ``heldout_before`` and ``heldout_now``.

    Raises:
        UsageError: the directory holds no runs, or its manifest is damaged.
        CheckpointError: records of a run are damaged.
    """
    manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    runs = [_run_status(directory, entry) for entry in run_entries(directory, manifest)]
    if not runs:
        raise UsageError(f"{directory} holds no runs: give a campaign's or a run's directory, such as logs/quickstart")
    return {
        "directory": str(directory),
        "kind": "campaign" if len(runs) > 1 or runs[0]["path"] not in (".", "") else "run",
        "runs": runs,
        "recommended_rank": recommended_rank(manifest),
    }


def recommended_rank(manifest: Values | None) -> int | None:
    return ((manifest or {}).get("squeeze") or {}).get("recommended_rank")


def _run_status(directory: Path, entry: RunEntry) -> Row:
    run = directory / entry.path
    metrics = run / METRICS
    row, view = last_row(metrics), RunView(entry.run_id, entry.label, entry.seed or 0)
    for evaluation in evaluation_rows(run):
        view.add_evaluation(str(evaluation.get("name", HELDOUT)), evaluation)
    return {
        **{name: getattr(entry, name) for name in ("run_id", "label", "seed", "state", "reason", "path")},
        "step": row["step"] + 1 if row else entry.step or 0,
        "max_steps": entry.max_steps or 0,
        "row": row,
        "heldout_before": view.held_out.before,
        "heldout_now": view.held_out.now,
        "evaluations": {name: change._asdict() for name, change in view.evaluations.items()},
        "age_s": max(0.0, time.time() - metrics.stat().st_mtime) if metrics.is_file() else None,
        "worker": entry.worker if entry.state == "running" else None,
    }
