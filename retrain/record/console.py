"""What a person sees while runs go on: a live view on a terminal, plain lines everywhere else.

Everything that a model, a file or a plug-in wrote is shown as text: neither rich's markup nor a terminal's escape
sequences in it are obeyed.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from retrain.record.board import Board, RunView
from retrain.record.html import visible
from retrain.record.numbers import duration, number
from retrain.record.observer import Observer, SpecLike
from retrain.record.views import board_view

PROGRESS_EVERY_S = 10.0
"""Seconds after which a progress line is due before a tenth of all steps is done."""
LEVEL_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def make_console(stream: IO[str] | None = None, plain: bool = False, verbose: bool = False) -> Observer:
    """Return the live view when ``stream`` (default: standard output) is a capable terminal, else plain lines.

    ``plain``, the variable ``NO_COLOR`` and ``TERM=dumb`` ask for plain lines on a terminal too. With ``verbose`` they
    contain every step of every run.
    """
    out = stream or sys.stdout
    plain = plain or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "") in ("dumb", "unknown")
    return PlainConsole(out, verbose) if plain or not out.isatty() else LiveConsole(Console(file=out))


class PlainConsole(Board):
    """One line per event as ``key=value`` pairs, flushed, without colours or cursor movements.

    Steps are summarised for all runs: a progress line is printed after a step when a tenth of all steps, or ten
    seconds, have passed since the last one. With ``verbose`` every step of every run has a line instead.
    """

    def __init__(self, stream: IO[str] | None = None, verbose: bool = False):
        super().__init__()
        self.stream = stream or sys.stdout
        self.verbose = verbose
        self._began: float | None = None
        self._last_line = 0.0
        self._steps = 0
        """Steps since the start, and of them those since the last progress line."""
        self._unreported = 0

    def plan(self, specs: Sequence[SpecLike]) -> None:
        """``plan runs=…``."""
        super().plan(specs)
        labels = dict.fromkeys(spec.label for spec in specs)
        seeds = dict.fromkeys(str(spec.seed) for spec in specs)
        self._event("plan", {"runs": len(specs), "conditions": ",".join(labels), "seeds": ",".join(seeds)})

    def placed(self, spec: SpecLike, worker: str) -> None:
        """``worker run=… worker=…``."""
        super().placed(spec, worker)
        self._event("worker", {"run": spec.run_id, "worker": worker.replace(" ", "_")})

    def run_started(self, spec: SpecLike, step: int, max_steps: int) -> None:
        """``start run=… step=… max_steps=…``."""
        super().run_started(spec, step, max_steps)
        if self._began is None:
            self._began = self._last_line = self.clock()
        self._event("start", {"run": spec.run_id, "step": step, "max_steps": max_steps})

    def step(self, spec: SpecLike, row: Mapping[str, Any]) -> None:
        """Print a progress line if one is due; with ``verbose`` always ``step run=… step=… done=…/… reward=… …``, the
        step's number as in its row and the number of finished steps."""
        super().step(spec, row)
        if not self.verbose:
            self._progress()
            return
        view = self.runs[spec.run_id]
        pairs = {
            "run": spec.run_id,
            "step": row["step"],
            "done": f"{view.steps_done}/{view.max_steps}",
            "reward": number(row.get("mean_reward")),
            "correct": number(row.get("correct_rate")),
            "loss": "placeholder" if row.get("loss_is_placeholder") else number(row.get("loss"), 5),
            "length": number(row.get("completions/mean_length"), 1),
            "truncated": number(row.get("max_token_hit_rate")),
            "entropy": number(row.get("entropy")),
            "lambda": number(view.pooling, 2),
            "tokens_per_s": number(row.get("perf/completion_tokens_per_s"), 0),
            "seconds": number(row.get("step_time_s"), 2),
            "eta": duration(view.eta(self.clock())),
        }
        self._event("step", pairs)

    def evaluated(self, spec: SpecLike, name: str, row: Mapping[str, Any]) -> None:
        """``eval run=… name=… step=… reward=… correct=… low=… high=…``."""
        super().evaluated(spec, name, row)
        prefix = f"eval/{name}"
        pairs = {
            "run": spec.run_id,
            "name": name,
            "step": row.get(f"{prefix}/step", "-"),
            "reward": number(row.get(f"{prefix}/reward_mean")),
            "correct": number(row.get(f"{prefix}/correct_rate")),
            "low": number(row.get(f"{prefix}/ci_low")),
            "high": number(row.get(f"{prefix}/ci_high")),
            "before": number(self.runs[spec.run_id].evaluations[name].before),
            "problems": row.get(f"{prefix}/problems", "-"),
        }
        self._event("eval", pairs)

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """``end run=… status=…``, with the reason after a failure."""
        super().run_finished(spec, status, message)
        self._event("end", {"run": spec.run_id, "status": status} | ({"message": message} if message else {}))

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

        elapsed = now - (now if self._began is None else self._began)
        pairs = {
            "done": f"{done}/{total}",
            "running": len(running),
            "waiting": sum(view.state == "waiting" for view in self.runs.values()),
            "reward": number(mean("mean_reward")),
            "correct": number(mean("correct_rate")),
            "length": number(mean("completions/mean_length"), 1),
            "truncated": number(mean("max_token_hit_rate")),
            "entropy": number(mean("entropy")),
            "eta": duration(elapsed / self._steps * (total - done)),
        }
        self._event("progress", pairs)

    def message(self, text: str, level: str = "info") -> None:
        """The text, after its level unless that is info."""
        self._write(message_text(text, level).plain)

    def _event(self, name: str, pairs: Mapping[str, object]) -> None:
        line = " ".join([name, *(f"{key}={value}" for key, value in pairs.items())])
        self._write(visible(" ".join(line.split())))

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class LiveConsole(Board):
    """A table that is redrawn in place: one row per run, the last steps below; messages scroll by above."""

    def __init__(self, console: Console | None = None):
        super().__init__()
        self.console = console or Console()
        self.live = Live(
            console=self.console, get_renderable=self._drawn, refresh_per_second=2, vertical_overflow="crop"
        )

    def view(self, spec: SpecLike) -> RunView:
        """The run's view; with the first one the drawing begins."""
        view = super().view(spec)
        if not self.live.is_started:
            self.live.start()
            atexit.register(self.live.stop)  # a hidden cursor must not outlive the process
        return view

    def run_finished(self, spec: SpecLike, status: str, message: str = "") -> None:
        """A failure is also printed above the table, where it stays."""
        super().run_finished(spec, status, message)
        if status == "failed":
            self.message(f"{spec.run_id} failed: {message}", level="error")

    def message(self, text: str, level: str = "info") -> None:
        """One line above the table."""
        self.console.print(message_text(text, level))

    def close(self) -> None:
        """Draw once more and leave the last view on the screen."""
        if self.live.is_started:
            self.live.stop()
            atexit.unregister(self.live.stop)

    def _drawn(self) -> RenderableType:
        return board_view(self, self.console.width, self.console.height, self.clock())


def message_text(text: str, level: str) -> Text:
    """The line as rich text that obeys no markup."""
    prefix = "" if level == "info" else f"{level}: "
    return Text(prefix + visible(text), style=LEVEL_STYLES.get(level, ""))
