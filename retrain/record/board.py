"""The state of all runs as an observer sees it; every console shows this one board."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from retrain.config.campaign import transform_of
from retrain.config.evaluation import PART
from retrain.record.observer import NullObserver, SpecLike


class Change(NamedTuple):
    """Accuracy at the first evaluation, and at the latest one after it."""

    before: float | None = None
    now: float | None = None


NO_CHANGE = Change()


@dataclass
class RunView:
    """One run as it stands."""

    run_id: str
    label: str
    seed: int
    state: str = "waiting"
    """waiting, running, done, failed, interrupted or stopped."""
    worker: str = ""
    """What trains it, where there are several workers."""
    first_step: int = 0
    steps_done: int = 0
    max_steps: int = 0
    started: float = 0.0
    row: Mapping[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Change] = field(default_factory=dict)
    """Accuracy on each held-out set, the first one first; behind them that on the parts that are for the curve."""

    def add_evaluation(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep the first and the latest accuracy on the set."""
        rate = row.get(f"eval/{name}/correct_rate")
        before = self.evaluations.setdefault(name, NO_CHANGE).before
        self.evaluations = dict(sorted(self.evaluations.items(), key=lambda each: each[0].endswith(PART)))
        if rate is not None:
            self.evaluations[name] = Change(rate) if before is None else Change(before, rate)

    @property
    def held_out(self) -> Change:
        """The first held-out set, for where there is room for one."""
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


class Board(NullObserver):
    """An observer that remembers: one ``RunView`` per run, and the last steps."""

    def __init__(self) -> None:
        self.runs: dict[str, RunView] = {}
        self.steps: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=200)
        self.clock = time.monotonic

    def view(self, spec: SpecLike) -> RunView:
        """The run's view, made on first sight."""
        return self.runs.setdefault(spec.run_id, RunView(spec.run_id, spec.label, spec.seed))

    def steps_of_all(self) -> tuple[int, int]:
        """Return the finished and the planned steps of all runs.

        A waiting run counts with the steps of the longest started run, a failed or stopped one with those it has done.
        """
        views = self.runs.values()
        longest = max((view.max_steps for view in views), default=0)
        ended = ("failed", "stopped")
        total = sum(view.steps_done if view.state in ended else view.max_steps or longest for view in views)
        return sum(view.steps_done for view in views), total

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """Put all runs on the board."""
        for spec in specs:
            self.view(spec)

    def placed(self, spec: SpecLike, worker: str) -> None:
        """Keep which worker trains it."""
        self.view(spec).worker = worker

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """Start the run's clock."""
        view = self.view(spec)
        view.state, view.first_step, view.steps_done, view.max_steps = "running", step, step, max_steps
        view.started = self.clock()

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """Keep the row."""
        view = self.view(spec)
        view.row, view.steps_done = row, int(row["step"]) + 1
        self.steps.append((spec.run_id, row))

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        """Keep the accuracy."""
        self.view(spec).add_evaluation(name, row)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """Keep how it ended."""
        self.view(spec).state = status
