"""The record of a campaign's runs and their states: one file, replaced atomically at every event.

``plan.json`` beside it holds what was asked: the resolved configuration of every run, which is all that a later
process needs to continue. Both are also written for a single run.
"""

from __future__ import annotations

import fcntl
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.campaign.plan import RunSpec
from retrain.config import parse_dict
from retrain.errors import UsageError
from retrain.files import dumps, prepare_directory, read_json, write_json

MANIFEST, PLAN = "manifest.json", "plan.json"
LOCK_TRIES = 5
STATES = ("pending", "running", "interrupted", "done", "failed")


def fingerprint(spec: RunSpec) -> str:
    """Hash of everything that defines a run: its resolved configuration, without what only names outputs.

    Only what differs from the defaults counts, so that a later release with further keys still continues the run.
    """
    config = spec.config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    config.pop("logging", None)
    config.pop("squeeze", None)
    for section, key in (
        ("campaign", "seeds"),
        ("campaign", "conditions"),
        ("campaign", "lanes"),
        ("campaign", "name"),
        ("campaign", "primary_metric"),
        ("campaign", "equivalence_margin"),
    ):
        config.get(section, {}).pop(key, None)
    # Values made by a factory (empty tables and lists) are dumped although they are the default.
    config = {name: {k: v for k, v in table.items() if v not in ({}, [])} for name, table in config.items()}
    config = {name: table for name, table in config.items() if table}
    return hashlib.sha256(dumps(config).encode()).hexdigest()[:16]


def run_directory(directory: Path, spec: RunSpec) -> Path:
    """Where a run's files are: ``runs/<run_id>`` in a campaign, the directory itself for a single run."""
    return directory / "runs" / spec.run_id if spec.is_campaign else directory


class Manifest:
    """``manifest.json`` of one directory, in memory and on disk."""

    def __init__(self, directory: Path, content: dict[str, Any]):
        self.directory, self.content = directory, content

    @classmethod
    def open(cls, directory: Path, name: str, specs: Sequence[RunSpec]) -> Manifest:
        """Create the directory's manifest, or continue the one that is there.

        New runs of an extended plan are added. Raises UsageError when a run of the same name was defined otherwise.
        """
        path = directory / MANIFEST
        content = read_json(path) if path.exists() else {"format": 1, "name": name, "created": time.time(), "runs": []}
        known = {run["run_id"]: run for run in content["runs"]}
        for spec in specs:
            digest, run = fingerprint(spec), known.get(spec.run_id)
            if run is not None and run["fingerprint"] != digest:
                raise UsageError(
                    f"{directory} holds run {spec.run_id} made with other settings "
                    f"(see {directory / PLAN}): give another directory with --out, or move the old one away"
                )
            if run is None:
                content["runs"].append(
                    {
                        "run_id": spec.run_id,
                        "label": spec.label,
                        "seed": spec.config.training.seed,
                        "state": "pending",
                        "reason": None,
                        "step": 0,
                        "max_steps": spec.config.training.max_steps,
                        "path": str(run_directory(directory, spec).relative_to(directory)),
                        "fingerprint": digest,
                    }
                )
        manifest = cls(directory, content)
        manifest.write()
        return manifest

    def run(self, run_id: str) -> dict[str, Any]:
        """The entry of one run."""
        return next(run for run in self.content["runs"] if run["run_id"] == run_id)

    def update(self, run_id: str, **changes: Any) -> None:
        """Change a run's entry (state, reason, step, …) and write."""
        self.run(run_id).update(changes)
        self.write()

    def note(self, **facts: Any) -> None:
        """Set facts of the whole campaign (squeeze, comparison, …) and write."""
        self.content.update(facts)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        self.content["updated"] = time.time()
        write_json(self.directory / MANIFEST, self.content)


def write_plan(directory: Path, specs: Sequence[RunSpec], toml_text: str, toml_path: Path) -> None:
    """Write ``plan.json``: the file as it was given, where it lay (relative paths in it are looked up there), and
    every run with its resolved configuration."""
    runs = [
        {
            "run_id": spec.run_id,
            "label": spec.label,
            "seed": spec.seed,
            "condition_index": spec.condition_index,
            "overrides": spec.overrides,
            "is_campaign": spec.is_campaign,
            "config": spec.config.model_dump(mode="json", by_alias=True),
        }
        for spec in specs
    ]
    file = {"file": toml_path.name, "folder": str(toml_path.resolve().parent), "toml": toml_text}
    write_json(directory / PLAN, {"format": 1, **file, "runs": runs})


def read_plan(directory: Path) -> tuple[list[RunSpec], Path]:
    """The runs of ``plan.json`` and the folder of their file. Raises UsageError when the directory holds no plan."""
    path = directory / PLAN
    if not path.is_file():
        campaign = directory.absolute().parent.parent  # of logs/<campaign>/runs/<run>
        hint = f"; it is a run of a campaign, type: retrain resume {campaign}" if (campaign / PLAN).is_file() else ""
        raise UsageError(f"{directory} is not a run or campaign directory of retrain: it has no {PLAN}{hint}")
    content = read_json(path)
    specs = [
        RunSpec(
            run_id=run["run_id"],
            label=run["label"],
            seed=run["seed"],
            condition_index=run["condition_index"],
            overrides=run["overrides"],
            config=parse_dict(run["config"]),
            is_campaign=run["is_campaign"],
        )
        for run in content["runs"]
    ]
    return specs, Path(content["folder"])


class DirectoryLock:
    """One process at a time writes a directory. The lock goes with the process that holds it, however it dies."""

    def __init__(self, directory: Path):
        self.path = directory / ".lock"
        self._file: Any = None

    def __enter__(self) -> DirectoryLock:
        prepare_directory(self.path.parent)
        self._file = open(self.path, "a+")
        for _ in range(LOCK_TRIES):  # ``status`` looks at the lock for a moment
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self
            except OSError:
                time.sleep(0.1)
        self._file.close()
        raise UsageError(f"another retrain process is writing {self.path.parent}: wait for it, or use --out")

    def __exit__(self, *exc: object) -> None:
        self._file.close()
