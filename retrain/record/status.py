"""How a run or campaign stands, read from its files alone; nothing here needs the process that writes them."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from retrain.config.evaluation import HELDOUT
from retrain.errors import CheckpointError, UsageError
from retrain.files import read_jsonl
from retrain.record.board import Board, Change, RunView
from retrain.record.lines import Row, Tail, row_of
from retrain.record.numbers import duration
from retrain.record.states import MANIFEST, read_manifest
from retrain.record.views import board_view


def last_row(path: Path) -> Row:
    """The last complete row of a JSONL file without reading all of it; empty when there is none.

    Raises CheckpointError when that is no JSON object.
    """
    _, lines = Tail(path, last_only=True).lines()
    try:
        return row_of(lines[-1]) if lines else {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error


def read_status(directory: Path) -> dict[str, Any]:
    """The state of every run at ``directory`` (a campaign, a single run, or a directory of run directories).

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
    """What the squeeze of a campaign recommends, where there was one."""
    return ((manifest or {}).get("squeeze") or {}).get("recommended_rank")


def status_view(status: dict[str, Any], width: int = 80) -> RenderableType:
    """The runs as in the live view, with the time since their last row and the reasons of failures."""
    board = Board()
    for run in status["runs"]:
        board.runs[run["run_id"]] = RunView(
            run["run_id"], run["label"], run["seed"], "waiting" if run["state"] == "pending" else run["state"],
            worker=run["worker"] or "", steps_done=run["step"], max_steps=run["max_steps"], row=run["row"],
            evaluations={name: Change(**rates) for name, rates in run["evaluations"].items()},
        )  # fmt: skip
    notes = [Text(f"{run['run_id']}: {run['reason']}", style="red") for run in status["runs"] if run["reason"]]
    ages = [run["age_s"] for run in status["runs"] if run["age_s"] is not None]
    if ages:
        notes.append(Text(f"last row written {duration(min(ages))} ago", style="dim"))
    if status["recommended_rank"]:
        notes.append(Text(f"recommended rank {status['recommended_rank']}"))
    return Group(board_view(board, width, len(board.runs) + 100, 0.0), *notes)


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
    """Whether a process holds the lock of this run or campaign."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
