"""Print the progress of campaigns: a live view on a terminal, plain lines everywhere else.

Rich markup and terminal escape sequences in text from models, files and plug-ins have no effect.
"""

import atexit
import errno
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import IO, Any, NamedTuple, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from retrain.cli.run_status import NO_CHANGE, AccuracyChange, RunView
from retrain.records.observer import NullObserver, Observer, SpecLike
from retrain.records.schema.base import Values
from retrain.util.text import change, duration, number, percent, short, visible

PROGRESS_EVERY_S = 10.0  # Seconds after which a progress line is printed even if few steps are new
GONE = (errno.EIO, errno.EPIPE)
"""Errors of writing to a closed terminal or to a pipe without a reader."""
LEVEL_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
STATE_STYLES = {
    "done": "green", "failed": "bold red", "interrupted": "yellow", "stopped": "yellow", "running": "cyan",
    "waiting": "dim",
}  # fmt: skip
NUMBERS = {
    "reward": ("mean_reward", 3), "correct": ("correct_rate", 3), "loss": ("loss", 5),
    "length": ("completions/mean_length", 1), "truncated": ("max_token_hit_rate", 3), "entropy": ("entropy", 3),
}  # fmt: skip
"""Numbers in a plain line: printed name → metric key and number of decimals."""
FRAME_LINES = 10
"""Lines of the live view that are not rows: two headings with their rules, the summary, and space for messages."""


def make_console(stream: IO[str] | None = None, plain: bool = False, verbose: bool = False) -> Observer:
    """Return the live view when ``stream`` (default: standard output) is a capable terminal, else plain lines.

    ``plain``, the variable ``NO_COLOR`` and ``TERM=dumb`` select plain lines on a terminal too. With ``verbose``, plain
    lines contain every step of every run.
    """
    out = stream or sys.stdout
    plain = plain or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "") in ("dumb", "unknown")
    return PlainConsole(out, verbose) if plain or not out.isatty() else LiveConsole(Console(file=out))


class Board(NullObserver):
    """Observer that keeps the current state of every run and the rows of the last steps."""

    def __init__(self) -> None:
        self.runs: dict[str, RunView] = {}
        self.steps: deque[tuple[str, Values]] = deque(maxlen=200)
        self.clock = time.monotonic

    def view(self, spec: SpecLike) -> RunView:
        return self.runs.setdefault(spec.run_id, RunView(spec.run_id, spec.label, spec.seed))

    def steps_of_all(self) -> tuple[int, int]:
        """Return the finished and the planned steps of all runs. A waiting run counts with the steps of the longest
        started run, a failed or stopped one with its finished steps."""
        views = self.runs.values()
        longest = max((view.max_steps for view in views), default=0)
        ended = ("failed", "stopped")
        total = sum(view.steps_done if view.state in ended else view.max_steps or longest for view in views)
        return sum(view.steps_done for view in views), total

    def plan(self, specs: Sequence[SpecLike]) -> None:
        for spec in specs:
            self.view(spec)

    def placed(self, spec: SpecLike, worker: str) -> None:
        self.view(spec).worker = worker

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        view = self.view(spec)
        view.state, view.first_step, view.steps_done, view.max_steps = "running", step, step, max_steps
        view.started = self.clock()

    def step(self, spec: SpecLike, row: Values) -> None:
        view = self.view(spec)
        view.row, view.steps_done = row, int(row["step"]) + 1
        self.steps.append((spec.run_id, row))

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        self.view(spec).add_evaluation(name, row)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        self.view(spec).state = status


class PlainConsole(Board):
    """Prints one line per event as ``key=value`` pairs, flushed, without colours or cursor movements.

    Steps are summarised for all runs: a progress line is printed after a step when a tenth of all steps, or ten
    seconds, have passed since the last one. With ``verbose`` every step of every run has a line instead.
    """

    def __init__(self, stream: IO[str], verbose: bool = False):
        super().__init__()
        self.stream, self.verbose = stream, verbose
        self._began: float | None = None
        self._last_line = 0.0
        self._steps = self._unreported = 0  # since the start, and since the last progress line

    def plan(self, specs: Sequence[SpecLike]) -> None:
        super().plan(specs)
        labels = dict.fromkeys(spec.label for spec in specs)
        seeds = dict.fromkeys(str(spec.seed) for spec in specs)
        self._event("plan", {"runs": len(specs), "conditions": ",".join(labels), "seeds": ",".join(seeds)})

    def placed(self, spec: SpecLike, worker: str) -> None:
        super().placed(spec, worker)
        self._event("worker", {"run": spec.run_id, "worker": worker.replace(" ", "_")})

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        super().run_started(spec, step, max_steps)
        if self._began is None:
            self._began = self._last_line = self.clock()
        self._event("start", {"run": spec.run_id, "step": step, "max_steps": max_steps})

    def step(self, spec: SpecLike, row: Values) -> None:
        """Print ``step run=… step=… done=…/… reward=… …`` if ``verbose``, else a progress line if one is due."""
        super().step(spec, row)
        if not self.verbose:
            self._progress()
            return
        view = self.runs[spec.run_id]
        pairs = {"run": spec.run_id, "step": row["step"], "done": f"{view.steps_done}/{view.max_steps}"}
        pairs |= {name: number(row.get(key), digits) for name, (key, digits) in NUMBERS.items()}
        pairs |= {"loss": "placeholder"} if row.get("loss_is_placeholder") else {}
        pairs |= {
            "lambda": number(view.pooling, 2),
            "tokens_per_s": number(row.get("perf/completion_tokens_per_s"), 0),
            "seconds": number(row.get("step_time_s"), 2),
            "eta": duration(view.eta(self.clock())),
        }
        self._event("step", pairs)

    def evaluated(self, spec: SpecLike, name: str, row: Values) -> None:
        super().evaluated(spec, name, row)
        prefix = f"eval/{name}"
        pairs = {"run": spec.run_id, "name": name, "step": row.get(f"{prefix}/step", "-")}
        keys = {"reward": "reward_mean", "correct": "correct_rate", "low": "ci_low", "high": "ci_high"}
        pairs |= {word: number(row.get(f"{prefix}/{key}")) for word, key in keys.items()}
        pairs["before"] = number(self.runs[spec.run_id].evaluations[name].before)
        pairs["problems"] = row.get(f"{prefix}/problems", "-")
        self._event("eval", pairs)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        super().run_finished(spec, status, message)
        self._event("end", {"run": spec.run_id, "status": status} | ({"message": message} if message else {}))

    def message(self, text: str, level: str = "info") -> None:
        self._write(message_text(text, level).plain)

    def _progress(self) -> None:
        """Print ``progress done=…/… running=… waiting=… reward=… …`` if it is due: steps of all runs, and means over
        the last steps of the running ones."""
        self._steps += 1
        self._unreported += 1
        done, total = self.steps_of_all()
        now = self.clock()
        if 10 * self._unreported < total and now - self._last_line < PROGRESS_EVERY_S:
            return
        self._unreported, self._last_line = 0, now
        running = [view for view in self.runs.values() if view.state == "running"]

        def mean(key: str) -> float | None:
            values = [view.row[key] for view in running if view.row.get(key) is not None]
            return sum(values) / len(values) if values else None

        waiting = sum(view.state == "waiting" for view in self.runs.values())
        pairs = {"done": f"{done}/{total}", "running": len(running), "waiting": waiting}
        pairs |= {name: number(mean(key), digits) for name, (key, digits) in NUMBERS.items() if name != "loss"}
        elapsed = now - (now if self._began is None else self._began)
        self._event("progress", pairs | {"eta": duration(elapsed / self._steps * (total - done))})

    def _event(self, name: str, pairs: Mapping[str, object]) -> None:
        line = " ".join([name, *(f"{key}={value}" for key, value in pairs.items())])
        self._write(visible(" ".join(line.split())))

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class LiveConsole(Board):
    """Redraws a table in place, with one row per run and the last steps below; messages are printed above it."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console
        self.live = Live(console=console, get_renderable=self._drawn, refresh_per_second=2, vertical_overflow="crop")

    def view(self, spec: SpecLike) -> RunView:
        view = super().view(spec)
        if not self.live.is_started:
            self.live.start()
            atexit.register(self.live.stop)  # a hidden cursor must not outlive the process
        return view

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        super().run_finished(spec, status, message)
        if status == "failed":
            self.message(f"{spec.run_id} failed: {message}", level="error")

    def message(self, text: str, level: str = "info") -> None:
        self.console.print(message_text(text, level))

    def close(self) -> None:
        if self.live.is_started:
            self.live.stop()
            atexit.unregister(self.live.stop)

    def _drawn(self) -> RenderableType:
        return board_view(self, self.console.width, self.console.height, self.clock())


def message_text(text: str, level: str) -> Text:
    prefix = "" if level == "info" else f"{level}: "
    return Text(prefix + visible(text), style=LEVEL_STYLES.get(level, ""))


def board_view(board: Board, width: int, height: int, now: float) -> RenderableType:
    """Return the runs that fit (active ones first), a summary line and the last steps."""
    views, steps = list(board.runs.values()), list(board.steps)
    room = max(4, height - FRAME_LINES)
    last = min(8, len(steps), max(2, room // 3))
    rows = visible_runs(views, room - last)
    summary = Text()
    for state, style in STATE_STYLES.items():
        if count := sum(view.state == state for view in views):
            summary.append(f"{' · ' if summary else ''}{count} {state}", style=style)
    if hidden := sum(view.state != "waiting" for view in views) - len(rows):
        summary.append(f" · {hidden} not shown", style="dim")
    runs = _table("run", _run_columns(rows, width, now), [(view, view.row) for view in rows], width)
    if not steps:
        return Group(runs, summary)
    latest = [(board.runs[run_id], row) for run_id, row in steps[-last:]]
    return Group(runs, summary, _table("last steps", STEP_COLUMNS, latest, width, is_dim=True))


def visible_runs(views: list[RunView], room: int) -> list[RunView]:
    """Choose at most ``room`` runs: running ones first, then failed ones, then the latest finished ones. Return them in
    the planned order."""
    rank = {"running": 0, "failed": 1, "interrupted": 1, "done": 2, "stopped": 2}
    candidates = [view for view in views if view.state in rank]
    chosen = sorted(reversed(candidates), key=lambda view: rank[view.state])[: max(1, room)]
    names = {view.run_id for view in chosen}
    return [view for view in views if view.run_id in names]


class Column(NamedTuple):
    """Column of the live view. ``cell`` makes the cell from a run and a metrics row. ``room``: terminal width from
    which the column is shown; ``least``: the column's least width."""

    heading: str
    cell: Callable[[RunView, Values], RenderableType]
    room: int = 0
    least: int = 0


STEP_COLUMNS = (
    Column("step", lambda view, row: str(row["step"])),
    Column("reward", lambda view, row: number(row.get("mean_reward"))),
    Column("correct", lambda view, row: percent(row.get("correct_rate"))),
    Column("mixed", lambda view, row: percent(row.get("env/all/by_group/frac_mixed")), 70),
    Column("loss", lambda _, row: "(none)" if row.get("loss_is_placeholder") else number(row.get("loss"), 4), 76),
    Column("length", lambda view, row: number(row.get("completions/mean_length"), 0), 50),
    Column("entropy", lambda view, row: number(row.get("entropy")), 76),
    Column("|grad|", lambda view, row: number(row.get("optim/grad_norm")), 90),
    Column("s", lambda view, row: number(row.get("step_time_s"), 1)),
)


def _run_columns(views: list[RunView], width: int, now: float) -> list[Column]:
    def remaining(view: RunView, row: Values) -> RenderableType:
        return duration(view.eta(now)) if view.state == "running" else Text(view.state, STATE_STYLES[view.state])

    def bar(view: RunView, row: Values) -> RenderableType:
        style = STATE_STYLES[view.state]
        return ProgressBar(
            view.max_steps or 1, view.steps_done, bar_width, style="bright_black", complete_style=style,
            finished_style=style,
        )  # fmt: skip

    def accuracy(name: str) -> Column:
        return Column(name, lambda view, row: change(*view.evaluations.get(name, NO_CHANGE)), least=9)

    bar_width = min(24, width - 80)
    columns = [
        Column("", bar, 86, bar_width),
        Column("done", lambda view, row: f"{view.steps_done}/{view.max_steps}", 0, 7),
        Column("ETA", remaining, 0, 5),
        Column("reward", lambda view, row: number(row.get("mean_reward")), 56, 6),
        Column("correct", lambda view, row: percent(row.get("correct_rate")), 0, 7),
        Column("held-out", lambda view, row: change(*view.held_out), 52, 9),
        Column("tok/s", lambda view, row: short(row.get("perf/completion_tokens_per_s")), 76, 5),
        Column("λ", lambda view, row: number(view.pooling, 2), 76, 4),
    ]
    if any(view.worker for view in views):
        columns.append(Column("worker", lambda view, _: visible(view.worker) if view.state == "running" else "", 0, 5))
    other_sets = dict.fromkeys(name for view in views for name in [*view.evaluations][1:])
    return columns + [accuracy(name) for name in [*other_sets][: max(0, (width - 76) // 10)]]


def _table(
    name: str, columns: Sequence[Column], rows: Sequence[tuple[RunView, Values]], width: int, is_dim: bool = False
) -> Table:
    """Return a table with one row for each pair of a run and a metrics row. Names of runs get the width that
    ``columns`` leave."""
    columns = [column for column in columns if width >= column.room]
    header, style = ("bold dim", "dim") if is_dim else ("bold", "")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style=header, style=style)
    cells = [[column.cell(view, row) for column in columns] for view, row in rows]
    taken = sum(
        max(column.least, len(column.heading), *(len(cell) for cell in values if isinstance(cell, str | Text))) + 1
        for column, *values in zip(columns, *cells, strict=True)
    )
    least = 12 if is_dim else 8  # without these bounds rich would shrink the names to nothing before any other column
    table.add_column(name, no_wrap=True, overflow="ellipsis", min_width=least, max_width=max(least, width - taken))
    for column in columns:
        table.add_column(Text(visible(column.heading)), justify="right", no_wrap=True, min_width=column.least)
    for (view, _), values in zip(rows, cells, strict=True):
        table.add_row(Text(visible(view.run_id), "" if is_dim else STATE_STYLES[view.state]), *values)
    return table


def status_view(status: Values, width: int = 80) -> RenderableType:
    """Return the live view's table for the runs of ``read_status``, with reasons of failures and the age of the latest
    row below it."""
    board = Board()
    for run in status["runs"]:
        board.runs[run["run_id"]] = RunView(
            run["run_id"], run["label"], run["seed"], "waiting" if run["state"] == "pending" else run["state"],
            worker=run["worker"] or "", steps_done=run["step"], max_steps=run["max_steps"], row=run["row"],
            evaluations={name: AccuracyChange(**rates) for name, rates in run["evaluations"].items()},
        )  # fmt: skip
    notes = [Text(visible(f"{run['run_id']}: {run['reason']}"), style="red") for run in status["runs"] if run["reason"]]
    ages = [run["age_s"] for run in status["runs"] if run["age_s"] is not None]
    if ages:
        notes.append(Text(f"last row written {duration(min(ages))} ago", style="dim"))
    if status["recommended_rank"]:
        notes.append(Text(f"recommended rank {status['recommended_rank']}"))
    return Group(board_view(board, width, len(board.runs) + 100, 0.0), *notes)


class LastingStream:
    """Text stream whose reader may disappear; later output is discarded and the program continues."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        return partial(self._without_reader, value) if name in ("write", "flush") else value

    def _without_reader(self, method: Callable[..., object], *arguments: str) -> object:
        try:
            return method(*arguments)
        except OSError as error:
            if error.errno not in GONE:
                raise
            # Replace the descriptor itself, so that buffered output can be flushed when the process ends.
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Keep writes to standard output and error from failing when their reader disappears."""
    out, err = cast("IO[str]", LastingStream(sys.stdout)), cast("IO[str]", LastingStream(sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
