"""The states of runs as a ``manifest.json`` has them, and reading one that anybody may have damaged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from retrain.errors import UsageError
from retrain.files import read_json
from retrain.ownership import not_readable

MANIFEST = "manifest.json"
STATES = ("pending", "running", "interrupted", "done", "failed", "stopped")
ENDED = ("done", "failed", "stopped")
"""States that a run does not leave by itself."""


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
