"""What the page knows of a directory, whoever wrote it: a protocol for each kind of directory, and its findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrain.config.evaluation import PART
from retrain.ui.numbers import Numbers, Pool
from retrain.ui.places import Places

QUIET_S = 600.0  # Seconds without writes after which a run without a lock counts as stopped


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
    pair: tuple[int, int]
    age_s: float | None = None
    worker: str | None = None

    def to_json(self) -> dict[str, Any]:
        names = ("place", "run_id", "label", "index", "seed", "state", "reason", "step", "max_steps", "age_s", "worker")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Home:
    """A campaign or a single run: what one entry of the first page is about. ``manifest`` is that of retrain."""

    place: str
    path: Path
    kind: str
    source: Source
    name: str
    runs: Sequence[Run]
    created: float | None = None
    updated: float | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    missing: Sequence[str] = ()

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


class Source(Protocol):
    """A kind of directory."""

    @property
    def name(self) -> str: ...

    @property
    def missing(self) -> Sequence[str]:
        """What this kind of directory does not hold."""
        ...

    def is_home(self, path: Path, places: Places) -> bool:
        """Whether a directory is a campaign or a run of this kind."""
        ...

    def read(self, path: Path, places: Places) -> Home | None:
        """What it holds now; None where it is none any more."""
        ...

    def numbers(self, run: Run, places: Places, pool: Pool) -> Numbers: ...

    def settings(self, run: Run, places: Places) -> dict[str, Any]:
        """The resolved settings of one of its runs, nested or flat."""
        ...


def sets_of(names: Iterable[str]) -> list[str]:
    """The held-out sets among the names of evaluations, each once; one on a part of the problems is for the curve."""
    return [name for name in dict.fromkeys(names) if not name.endswith(PART)]


def whole(value: object, default: int = 0) -> int:
    """A whole number out of a file."""
    return int(value) if isinstance(value, int | float) and abs(value) < 1e15 else default


def touched(path: Path | None) -> float | None:
    """When a file was last written, in unix seconds."""
    with suppress(OSError):
        return None if path is None else path.stat().st_mtime
    return None


def age(path: Path | None) -> float | None:
    """Seconds since then."""
    moment = touched(path)
    return None if moment is None else max(0.0, time.time() - moment)
