"""``timeline.html``: where the wall clock of a run went, from ``timing_spans.jsonl`` alone.

A bar per step and a table of the phases are drawn here; the zoomable detail is drawn by the page's script from the
spans themselves, which the page carries as integers (milliseconds since the first span). No step boundary is
recorded: a step lasts from the end of the one before to its own last span, and what no span names is ``other``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from retrain.files import write_text
from retrain.records import text
from retrain.records.catalogue import BESIDE
from retrain.records.html import asset, data_block, facts, page, table
from retrain.records.reader import RunReader
from retrain.records.schema.base import Row
from retrain.records.schema.layout import TIMELINE
from retrain.records.text import escape, percent

PHASES = ("rollout", "score", "credit", "update", "eval", "checkpoint", "record", "cohort")
"""Phases that the loop has, in its order; others follow by name, ``other`` comes last."""
SPANS_SHOWN = 20_000  # Spans in the zoomable detail: of a longer run the last steps
BARS = 240  # Bars in the chart of steps; of a longer run each stands for several
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 190, 52, 24, 8  # The chart of steps and its margins


@dataclass(frozen=True)
class StepTimes:
    """One step on the clock: ``seconds`` by phase, ``other`` included."""

    number: int
    start: float
    end: float
    spans: tuple[tuple[str, float, float], ...]
    seconds: dict[str, float]


def write_timeline(directory: Path) -> Path | None:
    """Write ``timeline.html`` beside ``timing_spans.jsonl``; None, and nothing written, while there is no span."""
    steps = steps_of(RunReader(directory).spans())
    if not steps:
        return None
    path = directory / TIMELINE
    write_text(path, timeline_page(steps, directory.resolve().name), durable=False)
    return path


def steps_of(rows: Sequence[Row]) -> list[StepTimes]:
    """Return steps from the rows of ``timing_spans.jsonl``.

    Spans of a row that begin before the step before has ended (its checkpoint and record, written down later) count
    where they lie on the clock, and rollouts that were sampled beside earlier steps are shown, but are no part of the
    step's time. A gap of a resumed run, in which no process worked, belongs to no step.
    """
    steps: list[StepTimes] = []
    for row in rows:
        named = ((str(s["name"]), float(s["wall_start"]), float(s["wall_end"])) for s in row["spans"])
        spans = sorted((span for span in named if span[2] >= span[1]), key=lambda span: span[1])
        in_step = [span for span in spans if span[0] != BESIDE]
        if not in_step:
            continue
        start, end = in_step[0][1], max(span[2] for span in in_step)
        before = steps[-1] if steps else None
        if before is not None and 0 <= start - before.end < 1.0 + (before.end - before.start):
            start = before.end
        seconds: dict[str, float] = {}
        for name, begin, stop in in_step:
            seconds[name] = seconds.get(name, 0.0) + stop - begin
        seconds["other"] = max(0.0, end - start - sum(seconds.values()))
        steps.append(StepTimes(int(row["step"]), start, end, tuple(spans), seconds))
    return steps


def phases_of(steps: Sequence[StepTimes]) -> dict[str, str]:
    """Return CSS classes of all phases that occur, in the order in which they are shown."""
    names = {name for step in steps for name in step.seconds if name != "other"}
    order = [*PHASES, *sorted(names - set(PHASES))]
    return {name: f"p{i % 8 + 1}" for i, name in enumerate(order) if name in names} | {"other": "po"}


def timeline_page(steps: Sequence[StepTimes], run: str) -> str:
    phases, lengths = phases_of(steps), [step.end - step.start for step in steps]
    seconds = {name: [step.seconds.get(name, 0.0) for step in steps] for name in phases}
    numbers_shown = facts([
        ("steps", f"{len(steps):,}"),
        ("in steps", duration(sum(lengths))),
        ("mean step", duration(sum(lengths) / len(steps))),
        ("longest step", duration(max(lengths))),
    ])  # fmt: skip
    body = f"""<header><h1>Timeline</h1><p class="muted">{escape(run)}</p></header>
{numbers_shown}
{_phases(steps, phases, seconds, sum(lengths))}
<h2>Each step</h2>
{_step_chart(steps, phases)}
{_detail(steps, phases)}"""
    return page(f"Timeline · {run}", body, styles=asset("timeline.css"), script=asset("timeline.js"))


def _phases(
    steps: Sequence[StepTimes], phases: Mapping[str, str], seconds: Mapping[str, Sequence[float]], total: float
) -> str:
    """Return the share of each phase as a bar, and as a table."""
    bar, rows = [], []
    for name, css in phases.items():
        spent, longest = sum(seconds[name]), max(seconds[name])
        share = percent(spent / total if total > 0 else 0.0, 1)
        if total > 0 and spent > 0:
            bar.append(f'<i class="{css}" style="flex-grow:{spent:.6f}" title="{escape(name)}: {share}"></i>')
        times = [escape(duration(time)) for time in (spent, spent / len(steps), longest)]
        at = steps[seconds[name].index(longest)].number
        rows.append([f'<i class="key {css}"></i>{escape(name)}', times[0], share, *times[1:], str(at)])
    heads = ("phase", "time", "share", "per step", "longest", "in step")
    ahead = "rollout is waiting for what is sampled ahead; " * any(_has_beside(step) for step in steps)
    return (
        f'<div class="share">{"".join(bar)}</div>\n{table(heads, rows, {0}, "phases")}<p class="muted small">'
        f"{ahead}cohort is waiting for runs that train together with this one; other is what no phase names.</p>"
    )


def _has_beside(step: StepTimes) -> bool:
    return any(name == BESIDE for name, *_ in step.spans)


def _step_chart(steps: Sequence[StepTimes], phases: Mapping[str, str]) -> str:
    """Return stacked bars, one for each step or for several."""
    width = -(-len(steps) // BARS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    heights = [{name: sum(step.seconds.get(name, 0.0) for step in part) / len(part) for name in phases}
               for part in bins]  # fmt: skip
    highest, high = _round_up(max(sum(values.values()) for values in heights)), HEIGHT - BOTTOM - TOP
    slot = (WIDTH - LEFT) / len(bins)
    bar = min(46.0, max(1.0, slot * 0.82))
    every = -(-len(bins) // 12)
    axis, bars = [], []
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - BOTTOM - share * high
        axis.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        axis.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{duration(highest * share)}</text>')
    for index, (part, values) in enumerate(zip(bins, heights, strict=True)):
        x, y, number = LEFT + index * slot, float(HEIGHT - BOTTOM), part[0].number
        if index % every == 0:
            axis.append(f'<text x="{x + slot / 2:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number}</text>')
        pieces = []
        for name, css in phases.items():
            tall = values[name] / highest * high
            if tall > 0.05:
                y -= tall
                place = f'x="{x + (slot - bar) / 2:.1f}" y="{y:.2f}" width="{bar:.1f}" height="{tall:.2f}"'
                pieces.append(f'<rect class="{css}" {place}/>')
        total = sum(values.values())
        parts = ", ".join(
            f"{name} {duration(values[name])}"
            for name in sorted(phases, key=lambda name: -values[name])
            if values[name] > 0.005 * total
        )
        steps_named = f"step {number}" + (f"–{part[-1].number}, mean" if len(part) > 1 else "")
        title = escape(f"{steps_named}: {duration(total)} = {parts}")
        bars.append(
            f'<g class="bar" data-step="{number}" data-text="{title}"><rect class="hit" x="{x:.1f}" y="{TOP}" '
            f'width="{slot:.1f}" height="{high}"/>{"".join(pieces)}<title>{title}</title></g>'
        )
    return (
        f'<div class="scroll"><svg class="chart" id="steps" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="seconds of each step by phase"><g class="axis">{"".join(axis)}</g>{"".join(bars)}</svg></div>'
        '<output class="readout mono no-print" id="stepreadout"> </output>'
    )


def _round_up(value: float) -> float:
    """Return the next 1, 2, 3, 4, 5, 6 or 8 of its power of ten; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next((n for n in (1, 2, 3, 4, 5, 6, 8) if n * power >= value * (1 - 1e-9)), 10)


def _detail(steps: Sequence[StepTimes], phases: Mapping[str, str]) -> str:
    counts = accumulate(len(step.spans) for step in reversed(steps))
    detailed = steps[-max(1, sum(count <= SPANS_SHOWN for count in counts)) :]
    left_out = len(steps) - len(detailed)
    beside = [BESIDE] if any(_has_beside(step) for step in detailed) else []
    lanes = [*beside, *(name for name in phases if name != "other")]
    phases = {BESIDE: "p1", **phases}
    origin = min(min(step.start, step.spans[0][1]) for step in detailed)

    def ms(moment: float) -> float:
        return round(1000 * (moment - origin), 1)

    data = {
        "lanes": lanes,
        "classes": [phases[name] for name in lanes],
        "steps": [
            [step.number, ms(step.start), ms(step.end),
             [n for name, begin, end in step.spans for n in (lanes.index(name), ms(begin), ms(end))]]
            for step in detailed
        ],
    }  # fmt: skip
    note = f" The first {left_out:,} steps are not shown here." if left_out else ""
    return f"""<section class="no-print"><h2>Detail</h2>
<p class="muted small">Wheel or + and − zoom, dragging or ← and → move; a click on a bar above goes to its step.
{note}</p>
<div class="tools"><button type="button" data-do="in" aria-label="zoom in">+</button>
<button type="button" data-do="out" aria-label="zoom out">−</button>
<button type="button" data-do="left" aria-label="earlier">←</button>
<button type="button" data-do="right" aria-label="later">→</button>
<button type="button" data-do="all">everything</button><output class="readout mono" id="readout"> </output></div>
<svg id="detail" tabindex="0" role="img" aria-label="spans on the clock"></svg></section>
{data_block("spans", data)}"""


def duration(seconds: float) -> str:
    """Return ``850 ms``, ``2.5 s``, ``3:05``, ``1:02:03``; ``<0.1 ms`` for what would be shown as nothing."""
    if 0 < seconds < 5e-5:
        return "<0.1 ms"
    if seconds < 0.9995:
        return "0" if seconds == 0 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else text.duration(seconds)
