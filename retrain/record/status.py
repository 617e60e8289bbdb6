"""State of runs and campaigns, read from their files alone; nothing here needs the process that writes them."""

import fcntl
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from retrain.config.campaign import transform_of
from retrain.config.evaluation import HELDOUT, PART
from retrain.errors import CheckpointError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.ownership import not_readable
from retrain.record.lines import Row, Tail, row_of

MANIFEST = "manifest.json"
STATES = ("pending", "running", "interrupted", "done", "failed", "stopped")
ENDED = ("done", "failed", "stopped")  # Final states of a run


class Change(NamedTuple):
    """Accuracy at the first evaluation, and at the latest one after it."""

    before: float | None = None
    now: float | None = None


NO_CHANGE = Change()


@dataclass
class RunView:
    """Current state of one run."""

    run_id: str
    label: str
    seed: int
    state: str = "waiting"  # waiting, running, done, failed, interrupted or stopped
    worker: str = ""  # Worker that trains the run, if there are several
    first_step: int = 0
    steps_done: int = 0
    max_steps: int = 0
    started: float = 0.0
    row: Mapping[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Change] = field(default_factory=dict)
    """Accuracy on each held-out set, in the order of the file; partial sets, which only draw curves, come last."""

    def add_evaluation(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep the first and the latest accuracy on the set."""
        rate = row.get(f"eval/{name}/correct_rate")
        before = self.evaluations.setdefault(name, NO_CHANGE).before
        self.evaluations = dict(sorted(self.evaluations.items(), key=lambda each: each[0].endswith(PART)))
        if rate is not None:
            self.evaluations[name] = Change(rate) if before is None else Change(before, rate)

    @property
    def held_out(self) -> Change:
        return next((rates for name, rates in self.evaluations.items() if not name.endswith(PART)), NO_CHANGE)

    @property
    def pooling(self) -> float | None:
        """SEPA's λ at the last step; None in other transform modes, whose rows have 0."""
        return self.row.get("sepa_lambda") if transform_of(self.label) == "gtpo_sepa" else None

    def eta(self, now: float) -> float | None:
        """Seconds to go at the pace so far; None before the first step and after the end."""
        done = self.steps_done - self.first_step
        if self.state != "running" or done <= 0:
            return None
        return (now - self.started) / done * max(0, self.max_steps - self.steps_done)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of ``manifest.json``. Raises UsageError when it is damaged or names files outside the directory,
    NotOurs when it is no manifest of retrain."""
    path = directory / MANIFEST
    try:
        content = read_json(path)
        for run in content["runs"]:
            run_id, where = run["run_id"], run["path"]
            if where not in (".", f"runs/{run_id}") or not is_name(run_id):
                raise UsageError(f"{path} names {where!r}, which is not a run of this directory")
            if run["state"] not in STATES or not isinstance(run["step"], int):
                raise ValueError(f"run {run_id} is in no known state")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_readable(path, error, "restore it from a copy, or begin anew with another --out") from error
    return content


def is_name(run_id: Any) -> bool:
    """Whether a run id is a plain name: not a path that could lead elsewhere."""
    return isinstance(run_id, str) and re.fullmatch(r"[A-Za-z0-9_+~=.\-]+", run_id) is not None and run_id[0] != "."


def last_row(path: Path) -> Row:
    """Return the last complete row of a JSONL file without reading all of it; empty if there is none.

    Raises CheckpointError when that is no JSON object.
    """
    _, lines = Tail(path, last_only=True).lines()
    try:
        return row_of(lines[-1]) if lines else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error


def read_status(directory: Path) -> dict[str, Any]:
    """Return the state of every run at ``directory`` (a campaign, a single run, or a directory of run directories).

    Returns ``{"directory", "kind": "campaign" | "run", "runs": [{"run_id", "label", "seed", "state", "reason",
    "step", "max_steps", "path", "row": last metrics row, "heldout_before", "heldout_now", "evaluations", "age_s",
    "worker"}], "recommended_rank"}``; ``step`` counts finished steps, ``evaluations`` has the accuracy on each held-out
    set, {name: {"before", "now"}}, and the first of them is also ``heldout_before`` and ``heldout_now``; ``worker`` is
    what trains it just now, where there are several.

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


def recommended_rank(manifest: Mapping[str, Any] | None) -> int | None:
    return ((manifest or {}).get("squeeze") or {}).get("recommended_rank")


def _run_status(directory: Path, entry: dict[str, Any]) -> dict[str, Any]:
    path = directory / entry["path"]
    metrics = path / "metrics.jsonl"
    row, view = last_row(metrics), RunView(entry["run_id"], entry.get("label", ""), entry.get("seed") or 0)
    for each in read_jsonl(path / "evals.jsonl"):
        view.add_evaluation(str(each.get("name", HELDOUT)), each)
    return {
        **{key: entry.get(key) for key in ("run_id", "label", "seed", "state", "reason", "path")},
        "step": row["step"] + 1 if row else entry.get("step") or 0,
        "max_steps": entry.get("max_steps") or 0,
        "row": row,
        "heldout_before": view.held_out.before,
        "heldout_now": view.held_out.now,
        "evaluations": {name: change._asdict() for name, change in view.evaluations.items()},
        "age_s": max(0.0, time.time() - metrics.stat().st_mtime) if metrics.is_file() else None,
        "worker": entry.get("worker") if entry.get("state") == "running" else None,
    }


def run_entries(directory: Path, manifest: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The runs as their manifest has them, or as it would have those in and under a directory without one.

    A run of a campaign, looked at alone, is as in the campaign's manifest. "running" becomes "interrupted" where no
    process holds the directory's lock.
    """
    campaign = directory.absolute().parent.parent
    if manifest is not None:
        entries = manifest["runs"]
    elif (campaign / MANIFEST).is_file():
        path = f"runs/{directory.absolute().name}"
        entries = [entry | {"path": "."} for entry in read_manifest(campaign)["runs"] if entry["path"] == path]
    else:
        paths = [directory, *sorted((directory / "runs").glob("*"))]
        entries = [_entry(directory, path) for path in paths if (path / "metrics.jsonl").is_file()]
    owners = [directory] if (directory / ".lock").is_file() and manifest is not None else [directory, campaign]
    dead = {} if any(is_held(owner / ".lock") for owner in owners) else {"running": "interrupted"}
    return [entry | {"state": dead.get(entry["state"], entry["state"])} for entry in entries]


def _entry(directory: Path, path: Path) -> dict[str, Any]:
    row = last_row(path / "metrics.jsonl")
    share = row.get("progress/done_frac")
    return {
        "run_id": path.name,
        "label": row.get("condition", path.name),
        "seed": None,
        "state": "done" if (path / "final").is_dir() else "interrupted",
        "reason": None,
        "step": 0,
        "max_steps": round((row["step"] + 1) / share) if share else 0,
        "path": os.path.relpath(path, directory),
    }


def homes_of_runs(directory: Path) -> list[Path]:
    """``directory`` itself when it is a run or a campaign, else those of its subdirectories that are."""

    def is_home(path: Path) -> bool:
        return (path / MANIFEST).is_file() or (path / "metrics.jsonl").is_file()

    return [directory] if is_home(directory) else [path for path in sorted(directory.iterdir()) if is_home(path)]


def is_held(lock: Path) -> bool:
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
