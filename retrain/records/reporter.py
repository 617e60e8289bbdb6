"""Create the trackers of a run, and send them its rows and evaluations.

Every tracker is called on its own thread, so that a slow service delays neither the training nor the files. A tracker
that cannot start stops the run; a later failure does not affect the training.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path

from retrain.config.evaluation import trackers
from retrain.errors import PluginError, RetrainError
from retrain.files import dumps, iter_jsonl
from retrain.plugins import load_function
from retrain.records.catalogue import wandb_name
from retrain.records.context import RunContext
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import EVALS, METRICS
from retrain.records.trackers import TRACKERS, TrackedRun, Tracker, Warn, is_evaluation
from retrain.threads import Thread

NOT_TRACKED = ("step", "condition", "advantage_mode", "transform_mode")
WAITING_ROWS = 1000  # Rows that may wait for a tracker; with more, it gets no further rows
START_SECONDS = 10.0  # How long the start of a run waits for a tracker to start
FINISH_SECONDS = 120.0  # How long the end of a run waits for a tracker to send its queued rows


def make_trackers(context: RunContext, run_dir: Path, warn: Warn = lambda text: None) -> dict[str, Tracker]:
    """Return trackers by name: those in ``[logging] report_to``, and wandb if ``wandb_project`` is set.

    A plug-in tracker is the return value of the user's ``module:function``, called with ``run_dir``. Raises PluginError
    if it cannot be loaded or is not a tracker.
    """
    names = trackers(context.config.logging.report_to, context.config.logging.wandb_project)
    return {
        name: TRACKERS[name](context, run_dir, warn) if name in TRACKERS else _plugin(name, context, run_dir)
        for name in names
    }


def _plugin(plugin: str, context: RunContext, run_dir: Path) -> Tracker:
    key = f"logging.report_to: {plugin!r}"
    try:
        tracker = load_function(plugin, context.folder, "logging.report_to:")(run_dir)
    except PluginError:
        raise
    except Exception as error:  # the user's code
        raise PluginError(f"{key} raised {type(error).__name__}: {error}") from error
    for method in ("start", "log"):
        if not callable(getattr(tracker, method, None)):
            raise PluginError(f"{key} returned {type(tracker).__name__}, which has no method {method}")
    return tracker


class Reporter:
    """Calls all methods of a tracker on a separate thread.

    After the start, errors and delays of the tracker do not affect the training: its first failure is reported through
    ``warn``, and it gets no further rows. ``state`` is the return value of the tracker's last ``start``, in this
    process or an earlier one; ``sent`` is the first step whose row the tracker has not received.
    """

    def __init__(self, name: str, tracker: Tracker, warn: Warn):
        self.name, self.tracker, self.warn = name, tracker, warn
        self.broken = False
        self.state: Row | None = None
        self.sent = 0
        self._evaluations: dict[int, Row] = {}  # by step, until the next row is logged
        self._thread = Thread(f"tracker {name}", WAITING_ROWS)

    def start(self, context: RunContext) -> None:
        """Start the tracker; wait at most ``START_SECONDS``. An error within this time is raised, because a run must
        not begin without its tracker; a later error is handled like any other failure."""
        errors: list[BaseException] = []
        late = threading.Event()

        def begin() -> None:
            try:
                self.state = start_tracker(self.name, self.tracker, context, self.state)
            except BaseException as error:  # SystemExit and KeyboardInterrupt too
                self.broken = True  # so that ``finish`` does not call a tracker that has not started
                errors.append(error)
                if late.is_set():
                    self.warn(f"{error}; training goes on without it")

        self._thread.put(begin)
        if not self._thread.wait(START_SECONDS):
            late.set()
        if errors:
            self._thread.close()
            raise errors[0]
        if late.is_set():
            self.warn(f"{self.name} has not started after {START_SECONDS:g} s; training goes on, and its rows wait")

    def send_history(self, directory: Path, finished: int) -> None:
        """Send rows of earlier processes that the tracker may lack. ``finished`` is the number of steps that these
        processes recorded."""
        first = 0 if getattr(self.tracker, "skips_sent_steps", False) else self.sent

        def send() -> None:
            try:
                for step, values in recorded_history(directory, first, finished):
                    self._send(step, values)
            except RetrainError as error:
                self._give_up(f"cannot be sent the earlier steps: {error}")

        self._thread.put(send)

    def log_evaluation(self, step: int, row: Row) -> None:
        self._evaluations.setdefault(step, {}).update(row)

    def log_row(self, step: int, row: Row) -> None:
        """Queue the row of a step and the evaluations since the last row, in the order of their steps; never waits."""
        self._log([(step, without_evaluations(row))])

    def finish(self, failed: bool) -> None:
        """Send the queued rows and close the tracker; abandon it after ``FINISH_SECONDS``, or if it has failed."""
        self._log([])
        if not self.broken and callable(getattr(self.tracker, "finish", None)):
            self._thread.put(lambda: self._call("finish", failed), wait=False)
        if self.broken:
            return
        if self._thread.wait(FINISH_SECONDS):
            self._thread.close()
        else:
            self._give_up(f"has not finished after {FINISH_SECONDS:g} s and is not waited for")

    def _log(self, rows: Iterable[tuple[int, Row]]) -> None:
        evaluations, self._evaluations = self._evaluations, {}
        for step, values in in_order(evaluations, rows):
            if not self.broken and not self._thread.put(partial(self._send, step, values), wait=False):
                self._give_up(f"is {WAITING_ROWS} rows behind")

    def _send(self, step: int, values: Values) -> None:
        self._call("log", step, tracker_values(values))
        if not self.broken and not is_evaluation(values):
            self.sent = step + 1

    def _call(self, method: str, *arguments: object) -> None:
        if self.broken:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:  # any failure of a third party's client
            self._give_up(f"failed in {method}: {error!r}")

    def _give_up(self, reason: str) -> None:
        self.broken = True
        advice = getattr(self.tracker, "advice", "")
        self.warn(f"{self.name} {reason}; it gets no further rows, training goes on{advice and f'. {advice}'}")


def recorded_history(directory: Path, first: int, finished: int) -> Iterable[tuple[int, Row]]:
    """Return (step, numbers) of the rows and evaluations that earlier processes have recorded, from step ``first`` on,
    in the order in which a tracker receives them. ``finished`` is the number of recorded steps."""
    evaluations: dict[int, Row] = {}
    for line in iter_jsonl(directory / EVALS):
        if first <= line["step"] <= finished:
            numbers = {key: value for key, value in line.items() if key.startswith("eval/")}
            evaluations.setdefault(line["step"], {}).update(numbers)
    rows = takewhile(lambda row: row["step"] < finished, iter_jsonl(directory / METRICS))
    numbers = ((row["step"], without_evaluations(row)) for row in rows if row["step"] >= first)
    return in_order(evaluations, numbers)


def in_order(evaluations: Mapping[int, Row], rows: Iterable[tuple[int, Row]]) -> Iterable[tuple[int, Row]]:
    """Merge evaluations and rows into pairs (step, numbers), sorted by step; an evaluation precedes the row of its
    step."""
    return heapq.merge(sorted(evaluations.items()), rows, key=itemgetter(0))


def start_tracker(name: str, tracker: Tracker, context: RunContext, state: Values | None) -> Row:
    """Start a tracker and return its state, which a later ``start`` gets on resume. Raises RetrainError if it cannot
    start."""
    try:
        returned = tracker.start(TrackedRun.of(context), dict(state) if state else None)
    except RetrainError:
        raise
    except Exception as error:  # whatever a client raises for logins, networks and names
        raise RetrainError(
            f"{name} could not start: {type(error).__name__}: {error}. Correct it, or leave it out of "
            "[logging] report_to"
        ) from error
    try:
        dumps(dict(returned or {}))
    except (TypeError, ValueError) as error:
        raise PluginError(f"{name}: start returned {returned!r}, not None or a dict of JSON") from error
    return dict(returned or {})


def tracker_values(row: Values) -> Row:
    """Return a row with the metrics' names in trackers, without None and ``NOT_TRACKED`` keys; booleans become 0 and
    1."""
    return {
        wandb_name(key): int(value) if isinstance(value, bool) else value
        for key, value in row.items()
        if value is not None and key not in NOT_TRACKED
    }


def without_evaluations(row: Values) -> Row:
    """Return a row without its evaluations, which trackers receive separately, at the step of the evaluation."""
    prefixes = tuple(key.removesuffix("step") for key in row if key.startswith("eval/") and key.endswith("/step"))
    return {key: value for key, value in row.items() if not key.startswith(prefixes)}
