"""Observers of runs: consoles, tests and anything else that receives the events of a campaign inside the process."""

from collections.abc import Callable, Sequence
from typing import Protocol

from retrain.records.schema.base import Values


class SpecLike(Protocol):
    """Identity of a run, planned (``config.runs.RunSpec``) or found in a directory."""

    @property
    def run_id(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def seed(self) -> int: ...


class Observer(Protocol):
    """Receiver of a campaign's events.

    ``plan`` is called first. Then follow, for each run, ``placed`` (only with several workers), ``run_started``, any
    number of ``step`` and ``evaluated``, and ``run_finished``. ``sealed`` follows ``run_started`` and precedes each
    ``evaluated`` of a new evaluation.
    """

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """Called with all runs before the first starts."""

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """Called when a run begins at ``step`` (above 0 when resumed)."""

    def placed(self, spec: SpecLike, worker: str) -> None:
        """Called when one of several workers has taken the run, before it starts there."""

    def step(self, spec: SpecLike, row: Values) -> None:
        pass

    def sealed(self, spec: SpecLike, seal: Values) -> None:
        """Called with the ``Seal`` of all evaluations that the run has recorded."""

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        """Called with the ``eval/<name>/…`` keys of an evaluation."""

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """Called when a run ends. ``status`` is done, failed, interrupted or stopped; ``message`` says why."""

    def message(self, text: str, level: str = "info") -> None:
        """Called with a line for the user; ``level`` is info, warning or error."""

    def note(self, facts: Values) -> None:
        """Called with entries of the campaign's manifest that a run or an analysis has changed."""

    def close(self) -> None:
        pass


class NullObserver(Observer):
    pass


class Messages(NullObserver):
    def __init__(self, notify: Callable[[str], None]):
        self.notify = notify

    def message(self, text: str, level: str = "info") -> None:
        self.notify(text)
