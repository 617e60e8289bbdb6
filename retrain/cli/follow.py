"""Follow runs that another process writes, from the new rows of their files.

An observer (a console, or ``JsonLines``) is called as if the runs trained in this process. Files may be truncated by a
resume, vanish, or end in an incomplete line at any time.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from retrain.cli.run_status import recommended_rank
from retrain.config.evaluation import HELDOUT
from retrain.errors import UsageError
from retrain.files import dumps
from retrain.records.observer import NullObserver, Observer, SpecLike
from retrain.records.reader import homes_of_runs, read_manifest, run_entries
from retrain.records.schema import events
from retrain.records.schema.base import Values
from retrain.records.schema.campaign import ENDED, RunEntry
from retrain.records.schema.layout import EVALS, METRICS
from retrain.util.jsonl import Tail


class _Run:
    """A followed run: the attributes that observers read (``SpecLike``), and the positions in its files up to which
    events were reported."""

    def __init__(self, run_id: str, entry: RunEntry, path: Path):
        self.run_id, self.label, self.seed = run_id, entry.label, entry.seed or 0
        self.metrics = Tail(path / METRICS, last_only=True)
        self.evals = Tail(path / EVALS)
        self.state = "pending"
        self.last_step = -1
        self.next_evaluation: dict[str, int] = {}

    def begins(self, state: str, replaced: bool) -> bool:
        """Return whether the run has started since the last report, or restarted after its files were truncated."""
        is_new = self.state == "pending" or replaced or (state == "running" and self.state != state)
        return is_new and state != "pending"


class Follower:
    """Reports events of the runs at ``directory`` (a run, a campaign, or a directory of those) to ``observer``."""

    def __init__(self, directory: Path, observer: Observer):
        self.directory, self.observer = Path(directory), observer
        self._runs: dict[Path, _Run] = {}
        self._with_rank: set[Path] = set()

    def poll(self) -> bool:
        """Report new events; return whether every run has ended (False if there are no runs)."""
        homes = homes_of_runs(self.directory) if self.directory.is_dir() else []
        states: dict[Path, str] = {}
        for home in homes:
            states |= self._poll_one(home, "" if self.directory in homes else f"{home.name}/")
        for path in self._runs.keys() - states.keys():
            self.observer.run_finished(self._runs.pop(path), "interrupted", "its files are gone")
        return bool(states) and all(state in ENDED for state in states.values())

    def _poll_one(self, home: Path, prefix: str) -> dict[Path, str]:
        """Report new events of one campaign or run; return the state of each run. ``prefix`` goes before run ids."""
        manifest = None
        with suppress(UsageError):  # missing or damaged
            manifest = read_manifest(home)
        entries = {home / entry.path: entry for entry in run_entries(home, manifest)}
        unseen = [path for path in entries if path not in self._runs]
        for path in unseen:
            self._runs[path] = _Run(prefix + entries[path].run_id, entries[path], path)
        if unseen:
            self.observer.plan([self._runs[path] for path in unseen])
        for path, entry in entries.items():
            self._report(self._runs[path], entry)
        rank = recommended_rank(manifest)
        if rank and home not in self._with_rank:
            self._with_rank.add(home)
            self.observer.message(f"{home}: recommended rank {rank}")
        return {path: entry.state for path, entry in entries.items()}

    def _report(self, run: _Run, entry: RunEntry) -> None:
        replaced, rows = run.metrics.rows()
        _, evaluations = run.evals.rows()
        if replaced:
            run.last_step = -1
        if run.last_step < 0:
            rows = rows[-1:]  # earlier events are not reported
        if run.begins(entry.state, replaced):
            if entry.worker:
                self.observer.placed(run, entry.worker)
            self.observer.run_started(run, int(rows[0]["step"]) if rows else entry.step or 0, entry.max_steps or 0)
            run.state = "running"
        for row in evaluations:
            name, step = str(row.get("name", HELDOUT)), row.get("step", 0)
            if step >= run.next_evaluation.get(name, 0):  # after a truncation, earlier rows are reported again
                run.next_evaluation[name] = step + 1
                self.observer.evaluated(run, name, row)
        for row in rows:
            run.last_step = int(row["step"])
            self.observer.step(run, row)
        if entry.state not in (run.state, "pending"):
            run.state = entry.state
            self.observer.run_finished(run, entry.state, entry.reason or "")


class JsonLines(NullObserver):
    """Prints one JSON object per event (``schema.events``), flushed."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def plan(self, specs: Sequence[SpecLike]) -> None:
        self._print(events.PlanEvent([spec.run_id for spec in specs]))

    def placed(self, spec: SpecLike, worker: str) -> None:
        self._print(events.WorkerEvent(spec.run_id, worker))

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        self._print(events.StartEvent(spec.run_id, spec.label, spec.seed, step, max_steps))

    def step(self, spec: SpecLike, row: Values) -> None:
        self._print(events.StepEvent(spec.run_id, row["step"], dict(row)))

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self._print(events.EvaluationEvent(spec.run_id, name, dict(row)))

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        self._print(events.EndEvent(spec.run_id, status, message or None))

    def message(self, text: str, level: str = "info") -> None:
        self._print(events.MessageEvent(level, text))

    def _print(self, event: events.Event) -> None:
        self.stream.write(dumps(event.to_row()) + "\n")
        self.stream.flush()
