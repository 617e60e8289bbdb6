"""The live view as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.record.board import NO_CHANGE, Board, RunView
from retrain.record.html import visible
from retrain.record.numbers import change, duration, number, percent, short

STATE_STYLES = {
    "done": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "stopped": "yellow",
    "running": "cyan",
    "waiting": "dim",
}
RUN_COLUMNS = (
    ("done", 7, 0),
    ("ETA", 5, 0),
    ("reward", 6, 56),
    ("correct", 7, 0),
    ("held-out", 9, 52),
    ("tok/s", 5, 76),
    ("λ", 4, 76),
)
"""Heading, least width, and the terminal width from which the column is shown."""

STEP_COLUMNS = (
    ("step", 0),
    ("reward", 0),
    ("correct", 0),
    ("mixed", 70),
    ("loss", 76),
    ("length", 50),
    ("entropy", 76),
    ("|grad|", 90),
    ("s", 0),
)
"""Heading, and the terminal width from which the column is shown."""

FRAME_LINES = 10
"""Lines of the view that are not rows: two headings with their rules, the summary, and room for messages."""


def board_view(board: Board, width: int, height: int, now: float) -> RenderableType:
    """Runs (active ones first, finished ones while there is room), a summary line and the last steps."""
    views = list(board.runs.values())
    steps = list(board.steps)
    room = max(4, height - FRAME_LINES)
    last = min(8, len(steps), max(2, room // 3))
    shown = visible_runs(views, room - last)
    parts: list[RenderableType] = [runs_table(shown, width, now), summary_line(views, shown)]
    if steps:
        parts.append(steps_table([(board.runs[run_id], row) for run_id, row in steps[-last:]], width))
    return Group(*parts)


def visible_runs(views: list[RunView], room: int) -> list[RunView]:
    """The runs that get a row: running ones, then failed, then the latest finished, in their planned order."""
    rank = {"running": 0, "failed": 1, "interrupted": 1, "done": 2, "stopped": 2}
    candidates = [view for view in views if view.state in rank]
    chosen = sorted(reversed(candidates), key=lambda view: rank[view.state])[: max(1, room)]
    names = {view.run_id for view in chosen}
    return [view for view in views if view.run_id in names]


def runs_table(views: list[RunView], width: int, now: float) -> Table:
    """One row per run; the bar takes what the width leaves."""
    bar = min(24, width - 80)
    columns = [(heading, least) for heading, least, room in RUN_COLUMNS if width >= room]
    if any(view.worker for view in views):
        columns.append(("worker", 5))
    further = list(dict.fromkeys(name for view in views for name in [*view.evaluations][1:]))
    room = (width - max(room for *_, room in RUN_COLUMNS)) // 10
    columns += [(name, 9) for name in further[: max(0, room)]]
    longest = max((len(view.state) for view in views if view.state != "running"), default=0)  # stands under ETA
    taken = sum(max(least, longest if heading == "ETA" else 0) + 1 for heading, least in columns)
    name = max(8, width - taken - (bar + 1 if bar >= 6 else 0))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=name)
    if bar >= 6:
        table.add_column("", width=bar, no_wrap=True)
    for heading, least in columns:
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    for view in views:
        row = view.row
        cells: list[RenderableType] = [Text(visible(view.run_id), style=STATE_STYLES[view.state])]
        if bar >= 6:
            cells.append(bar_text(view, bar))
        state: RenderableType = Text(view.state, style=STATE_STYLES[view.state])
        values: dict[str, RenderableType] = {
            "done": f"{view.steps_done}/{view.max_steps}",
            "ETA": duration(view.eta(now)) if view.state == "running" else state,
            "reward": number(row.get("mean_reward")),
            "correct": percent(row.get("correct_rate")),
            "held-out": change(*view.held_out),
            "tok/s": short(row.get("perf/completion_tokens_per_s")),
            "λ": number(view.pooling, 2),
            "worker": visible(view.worker) if view.state == "running" else "",
        }
        values |= {name: change(*view.evaluations.get(name, NO_CHANGE)) for name in further}
        table.add_row(*cells, *(values[heading] for heading, _ in columns))
    return table


def steps_table(rows: list[tuple[RunView, Mapping[str, Any]]], width: int) -> Table:
    """The last steps of all runs, the newest at the bottom."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold dim", style="dim")
    table.add_column("last steps", no_wrap=True, overflow="ellipsis", min_width=12)
    headings = [heading for heading, room in STEP_COLUMNS if width >= room]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for view, row in rows:
        values = {
            "step": str(row["step"]),
            "reward": number(row.get("mean_reward")),
            "correct": percent(row.get("correct_rate")),
            "mixed": percent(row.get("env/all/by_group/frac_mixed")),
            "loss": "(none)" if row.get("loss_is_placeholder") else number(row.get("loss"), 4),
            "length": number(row.get("completions/mean_length"), 0),
            "entropy": number(row.get("entropy")),
            "|grad|": number(row.get("optim/grad_norm")),
            "s": number(row.get("step_time_s"), 1),
        }
        table.add_row(Text(visible(view.run_id)), *(values[heading] for heading in headings))
    return table


def summary_line(views: list[RunView], shown: list[RunView]) -> Text:
    """How many runs are in which state, and how many have no row."""
    counts = {state: sum(view.state == state for view in views) for state in STATE_STYLES}
    text = Text()
    for state, count in counts.items():
        if count:
            text.append(f"{' · ' if text else ''}{count} {state}", style=STATE_STYLES[state])
    hidden = sum(view.state != "waiting" for view in views) - len(shown)
    if hidden:
        text.append(f" · {hidden} not shown", style="dim")
    return text


def bar_text(view: RunView, width: int) -> Text:
    """A progress bar of exactly ``width`` cells."""
    share = min(1.0, view.steps_done / view.max_steps) if view.max_steps else 0.0
    full = round(share * width)
    return Text("━" * full, style=STATE_STYLES[view.state]) + Text("━" * (width - full), style="bright_black")
