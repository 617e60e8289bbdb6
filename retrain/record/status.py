"""How a run or campaign stands, read from its files alone; nothing here needs the process that writes them."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from retrain.config.evaluation import HELDOUT
from retrain.errors import CheckpointError, UsageError
from retrain.files import read_jsonl
from retrain.record.board import NO_CHANGE, Board, Change, RunView
from retrain.record.numbers import duration
from retrain.record.states import MANIFEST, read_manifest
from retrain.record.views import board_view

LAST_BLOCK = 1 << 16
"""Bytes first read from the end of a file when its last row is wanted."""

VIEW_STATES = {"pending": "waiting"}
"""Manifest states → states of the live view, where they differ."""


def read_status(directory: Path) -> dict[str, Any]:
    """The state of every run at ``directory`` (a campaign, a single run, or a directory of run directories).

    Returns ``{"directory", "kind": "campaign" | "run", "runs": [{"run_id", "label", "seed", "state", "reason",
    "step", "max_steps", "path", "row": last metrics row, "heldout_before", "heldout_now", "evaluations", "age_s"}],
    "recommended_rank"}``; ``step`` counts finished steps, ``evaluations`` has the accuracy on each held-out set,
    {name: {"before", "now"}}, and the first of them is also ``heldout_before`` and ``heldout_now``.

    Raises:
        UsageError: the directory holds no runs, or its manifest is damaged.
        CheckpointError: records of a run are damaged.
    """
    directory = Path(directory)
    manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else None
    entries = manifest["runs"] if manifest is not None else run_entries(directory)
    if not entries:
        raise UsageError(f"{directory} holds no runs: give a campaign's or a run's directory, such as logs/quickstart")
    runs = [_run_status(directory, entry) for entry in entries]
    squeeze = (manifest or {}).get("squeeze") or {}
    return {
        "directory": str(directory),
        "kind": "campaign" if len(runs) > 1 or runs[0]["path"] not in (".", "") else "run",
        "runs": runs,
        "recommended_rank": squeeze.get("recommended_rank"),
    }


def status_view(status: dict[str, Any], width: int = 80) -> RenderableType:
    """The runs as in the live view, with the time since their last row and the reasons of failures."""
    board = Board()
    for run in status["runs"]:
        state = str(VIEW_STATES.get(run["state"], run["state"]))
        board.runs[run["run_id"]] = RunView(
            run["run_id"], run["label"], run["seed"], state, steps_done=run["step"], max_steps=run["max_steps"],
            row=run["row"], evaluations={name: Change(**rates) for name, rates in run["evaluations"].items()},
        )  # fmt: skip
    notes = [Text(f"{run['run_id']}: {run['reason']}", style="red") for run in status["runs"] if run["reason"]]
    ages = [run["age_s"] for run in status["runs"] if run["age_s"] is not None]
    if ages:
        notes.append(Text(f"last row written {duration(min(ages))} ago", style="dim"))
    if status["recommended_rank"]:
        notes.append(Text(f"recommended rank {status['recommended_rank']}"))
    return Group(board_view(board, width, len(board.runs) + 100, 0.0), *notes)


def last_row(path: Path) -> dict[str, Any]:
    """The last complete row of a JSONL file without reading all of it; empty when there is none.

    Raises CheckpointError when that is no JSON object.
    """
    if not path.is_file():
        return {}
    size, block = path.stat().st_size, LAST_BLOCK
    with open(path, "rb") as file:
        while True:
            file.seek(max(0, size - block))
            lines = file.read(block).split(b"\n")[:-1]  # what follows the last line break is torn
            if len(lines) >= 2 or (lines and block >= size):
                return _object(lines[-1], path)
            if block >= size:
                return {}
            block *= 4


def _object(line: bytes, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CheckpointError(f"the last line of {path} is damaged ({error}): remove that line") from error
    if not isinstance(row, dict):
        raise CheckpointError(f"the last line of {path} is damaged (no object): remove that line")
    return row


def _run_status(directory: Path, entry: dict[str, Any]) -> dict[str, Any]:
    path = directory / entry["path"]
    metrics = path / "metrics.jsonl"
    row, rates = last_row(metrics), dict[str, list[float | None]]()
    for each in read_jsonl(path / "evals.jsonl"):
        name = str(each.get("name", HELDOUT))
        if f"eval/{name}/correct_rate" in each:
            rates.setdefault(name, []).append(each[f"eval/{name}/correct_rate"])
    changes = {name: Change(own[0], own[-1] if len(own) > 1 else None) for name, own in rates.items()}
    first = next(iter(changes.values()), NO_CHANGE)
    return {
        **{key: entry.get(key) for key in ("run_id", "label", "seed", "state", "reason", "path")},
        "step": row["step"] + 1 if row else entry.get("step") or 0,
        "max_steps": entry.get("max_steps") or 0,
        "row": row,
        "heldout_before": first.before,
        "heldout_now": first.now,
        "evaluations": {name: change._asdict() for name, change in changes.items()},
        "age_s": max(0.0, time.time() - metrics.stat().st_mtime) if metrics.is_file() else None,
    }


def run_entries(directory: Path) -> list[dict[str, Any]]:
    """What a manifest would say of the runs in and under a directory that has none.

    A run of a campaign, looked at alone, is told as the campaign's manifest tells it.
    """
    campaign = campaign_of(directory)
    if (campaign / MANIFEST).is_file():
        path = f"runs/{directory.absolute().name}"
        return [entry | {"path": "."} for entry in read_manifest(campaign)["runs"] if entry["path"] == path]
    paths = [directory, *sorted((directory / "runs").glob("*"))]
    return [_entry(directory, path) for path in paths if (path / "metrics.jsonl").is_file()]


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


def with_living_runs(report: dict[str, Any]) -> dict[str, Any]:
    """The report, with runs that are "running" called "interrupted" when no process holds the directory's lock."""
    if not is_written(Path(report["directory"])):
        for run in report["runs"]:
            if run["state"] == "running":
                run["state"] = "interrupted"
    return report


def campaign_of(directory: Path) -> Path:
    """Where the campaign of ``<campaign>/runs/<run>`` would be."""
    return directory.absolute().parent.parent


def is_written(home: Path) -> bool:
    """Whether a process holds the lock of this run or campaign, or of the campaign that this run belongs to."""
    own = home / ".lock"
    try:
        with open(own if own.is_file() else campaign_of(home) / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
