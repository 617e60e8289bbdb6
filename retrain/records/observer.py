"""Who is informed while runs go on: consoles, tests, anything that follows a campaign from inside the process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from retrain.config import Config
from retrain.records.schema.base import Values


class SpecLike(Protocol):
    """What an observer needs of a planned run (``campaign.planning.plan.RunSpec`` has it)."""

    @property
    def run_id(self) -> str:
        """Name of the run, unique in its campaign."""
        ...

    @property
    def label(self) -> str: ...

    @property
    def seed(self) -> int: ...


class RunSpecLike(SpecLike, Protocol):
    """What a run needs of its plan besides."""

    @property
    def config(self) -> Config: ...

    @property
    def export(self) -> Path | None:
        """The user's directory that also receives the final adapter."""


class Observer(Protocol):
    """Calls in order: ``plan``; for each run ``placed`` (where there are several workers), ``run_started``, any
    ``step`` and ``evaluated``, ``run_finished``."""

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """All runs that will be made, before the first starts."""

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """A run begins at ``step`` (above 0 when resumed)."""

    def placed(self, spec: SpecLike, worker: str) -> None:
        """A worker has taken the run, before it starts there; only where there are several."""

    def step(self, spec: SpecLike, row: Values) -> None:
        """A step was recorded; ``row`` is its metrics row."""

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        """An evaluation was recorded; ``row`` has the ``eval/<name>/…`` keys."""

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """``status`` is done, failed, interrupted or stopped; ``message`` says why."""

    def message(self, text: str, level: str = "info") -> None:
        """One line for the reader; ``level`` is info, warning or error."""

    def close(self) -> None:
        """Nothing more will come."""


class NullObserver(Observer):
    """Ignores everything."""
