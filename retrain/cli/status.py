"""``status``: show the state of runs from their files, once or continuously. Never imports torch.

``Follower`` calls an observer (a console, or ``JsonLines``) as if the runs trained in this process. Files may be
truncated by a resume, vanish, or end in an incomplete line at any time.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import typer
from rich.console import Console
from rich.text import Text

from retrain.cli.arguments import AS_JSON, PLAIN, VERBOSE
from retrain.cli.console import make_console, status_view
from retrain.cli.output import print_table
from retrain.cli.run_status import read_status, recommended_rank
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
from retrain.util.text import number

LOOK_EVERY_S = 1.0
HOW_TO_HAVE_RUNS = (
    "type: retrain train FILE, to have one (retrain init writes a first FILE), or retrain status DIR, for those in DIR"
)


def status(
    directory: Path = typer.Argument(Path("logs"), metavar="DIR", help="A run, a campaign, or a directory of those."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Follow them until all have ended or Ctrl-C is pressed."),
    as_json: bool = AS_JSON,
    plain: bool = PLAIN,
    verbose: bool = VERBOSE,
) -> None:
    """Show runs: state, steps, reward and held-out accuracy.

    Reads their files alone.
    """
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise UsageError(f"no runs to show: {directory} {problem}; {HOW_TO_HAVE_RUNS}")
    if watch:
        follow(directory, as_json, plain, verbose)
        return
    reports = [read_status(home) for home in homes_of_runs(directory)]
    if as_json:
        print(dumps(reports, indent=2))
    elif not reports:
        print(f"No runs under {directory}; {HOW_TO_HAVE_RUNS}")
    elif sys.stdout.isatty() and not plain:
        _print_views(reports)
    else:
        _print_status_table(reports)


def _print_views(reports: Sequence[Values]) -> None:
    console = Console()
    for report in reports:
        console.print(Text(f"\n{report['directory']}", style="bold"), status_view(report, console.width), sep="\n")


def _print_status_table(reports: Sequence[Values]) -> None:
    runs = [(report["directory"], run) for report in reports for run in report["runs"]]
    other_sets = dict.fromkeys(name for _, run in runs for name in [*run["evaluations"]][1:])
    other_columns = [(name, when) for name in other_sets for when in ("before", "now")]
    rows = []
    for directory, run in runs:
        rates = [run["row"].get("mean_reward"), run["row"].get("correct_rate"), run["heldout_before"]]
        rates += [run["heldout_now"], *(run["evaluations"].get(name, {}).get(when) for name, when in other_columns)]
        why = run["reason"] or (f"worker {run['worker']}" if run.get("worker") else "")
        names = directory, run["run_id"], run["state"], str(run["step"]), str(run["max_steps"])
        rows.append([*names, *map(number, rates), why])
    others = [f"{name} {when}" for name, when in other_columns]
    headings = "directory", "run", "state", "step", "of", "reward", "correct", "before", "now", *others, "why"
    print_table(headings, rows, left_aligned=("directory", "run", "state", "why"))


def follow(directory: Path, as_json: bool, plain: bool, verbose: bool) -> None:
    """Print events until every run has ended; Ctrl-C ends it earlier with exit status 0."""
    observer = JsonLines(sys.stdout) if as_json else make_console(plain=plain, verbose=verbose)
    follower = Follower(directory, observer)
    try:
        while not follower.poll():
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        observer.close()


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
