"""``timeline.html``: where the wall clock of a run went, from ``timing_spans.jsonl`` alone.

A bar per step and a table of the phases are drawn here; the zoomable detail is drawn by the page's script from the
spans themselves, which the page carries as integers (milliseconds since the first span). No step boundary is
recorded: a step lasts from the end of the one before to its own last span, and what no span names is ``other``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.files import read_jsonl, write_text
from retrain.record import numbers
from retrain.record.html import asset, data_block, escape, page
from retrain.record.numbers import percent

PHASES = ("rollout", "score", "credit", "update", "eval", "checkpoint", "record", "cohort")
"""Phases that the loop has, in its order; others follow by name, ``other`` comes last."""
SPANS_SHOWN = 20_000
"""Spans in the zoomable detail: of a longer run the last steps."""
BARS = 240
"""Bars in the chart of steps; of a longer run each stands for several."""
CHART_WIDTH, CHART_HEIGHT = 960, 190


@dataclass(frozen=True)
class Step:
    """One step on the clock: ``seconds`` by phase, ``other`` included."""

    number: int
    start: float
    end: float
    spans: tuple[tuple[str, float, float], ...]
    seconds: dict[str, float]


def write_timeline(directory: Path) -> Path | None:
    """Write ``timeline.html`` beside ``timing_spans.jsonl``; None, and nothing written, while there is no span."""
    rows = read_jsonl(directory / "timing_spans.jsonl")
    steps = steps_of(rows)
    if not steps:
        return None
    path = directory / "timeline.html"
    write_text(path, timeline_page(steps, directory.resolve().name), durable=False)
    return path


def steps_of(rows: Sequence[dict[str, Any]]) -> list[Step]:
    """Steps from the rows of ``timing_spans.jsonl``.

    Spans of a row that begin before the step before has ended (its checkpoint and record, written down later) count
    where they lie on the clock. A gap of a resumed run, in which no process worked, belongs to no step.
    """
    steps: list[Step] = []
    for row in rows:
        named = ((str(s["name"]), float(s["wall_start"]), float(s["wall_end"])) for s in row["spans"])
        spans = sorted((span for span in named if span[2] >= span[1]), key=lambda span: span[1])
        if not spans:
            continue
        first, end = spans[0][1], max(span[2] for span in spans)
        before = steps[-1] if steps else None
        start = first
        if before is not None and 0 <= first - before.end < 1.0 + (before.end - before.start):
            start = before.end
        seconds: dict[str, float] = {}
        for name, begin, stop in spans:
            seconds[name] = seconds.get(name, 0.0) + stop - begin
        seconds["other"] = max(0.0, end - start - sum(seconds.values()))
        steps.append(Step(int(row["step"]), start, end, tuple(spans), seconds))
    return steps


def phases_of(steps: Sequence[Step]) -> list[str]:
    """Names of all phases that occur, in the order in which they are shown."""
    found = {name for step in steps for name in step.seconds if name != "other"}
    return [name for name in PHASES if name in found] + sorted(found - set(PHASES)) + ["other"]


def timeline_page(steps: Sequence[Step], run: str) -> str:
    """The whole page."""
    phases = phases_of(steps)
    total = sum(step.end - step.start for step in steps)
    facts = [
        ("steps", f"{len(steps):,}"),
        ("in steps", duration(total)),
        ("mean step", duration(total / len(steps))),
        ("longest step", duration(max(step.end - step.start for step in steps))),
    ]
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    body = f"""<header><h1>Timeline</h1><p class="muted">{escape(run)}</p></header>
<dl class="facts">{items}</dl>
{_share_bar(steps, phases, total)}
{_phase_table(steps, phases, total)}
<h2>Each step</h2>
{_step_chart(steps, phases)}
{_detail(steps, phases)}"""
    return page(f"Timeline · {run}", body, styles=asset("timeline.css"), script=asset("timeline.js"))


def colour(phases: Sequence[str], name: str) -> str:
    """CSS class of a phase."""
    order = [*PHASES, *(phase for phase in phases if phase not in PHASES and phase != "other")]
    return "po" if name == "other" else f"p{order.index(name) % 8 + 1}"


def _totals(steps: Sequence[Step], name: str) -> list[float]:
    return [step.seconds.get(name, 0.0) for step in steps]


def _share_bar(steps: Sequence[Step], phases: Sequence[str], total: float) -> str:
    parts = "".join(
        f'<i class="{colour(phases, name)}" style="flex-grow:{sum(_totals(steps, name)):.6f}" '
        f'title="{escape(name)}: {percent(sum(_totals(steps, name)) / total, 1)}"></i>'
        for name in phases
        if total > 0 and sum(_totals(steps, name)) > 0
    )
    return f'<div class="share">{parts}</div>'


def _phase_table(steps: Sequence[Step], phases: Sequence[str], total: float) -> str:
    rows = []
    for name in phases:
        values = _totals(steps, name)
        spent, longest = sum(values), max(values)
        at = steps[values.index(longest)].number
        share = spent / total if total > 0 else 0.0
        rows.append(
            f'<tr><td><i class="key {colour(phases, name)}"></i>{escape(name)}</td>'
            f'<td class="number">{escape(duration(spent))}</td><td class="number">{percent(share, 1)}</td>'
            f'<td class="number">{escape(duration(spent / len(steps)))}</td>'
            f'<td class="number">{escape(duration(longest))}</td>'
            f'<td class="number">{at}</td></tr>'
        )
    heads = "".join(
        f'<th{"" if first else " class=number"}>{text}</th>'
        for first, text in ((True, "phase"), (False, "time"), (False, "share"), (False, "per step"),
                            (False, "longest"), (False, "in step"))
    )  # fmt: skip
    return (
        f'<div class="scroll"><table class="phases"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        '</div><p class="muted small">cohort is waiting for runs that train together with this one; other is what no '
        "phase names.</p>"
    )


def _step_chart(steps: Sequence[Step], phases: Sequence[str]) -> str:
    """Stacked bars, one for each step or for several."""
    width = -(-len(steps) // BARS)
    bins = [steps[i : i + width] for i in range(0, len(steps), width)]
    heights = [{name: sum(_totals(part, name)) / len(part) for name in phases} for part in bins]
    highest = _round_up(max(sum(values.values()) for values in heights))
    left, bottom, top = 52, 24, 8
    room, high = CHART_WIDTH - left, CHART_HEIGHT - bottom - top
    slot = room / len(bins)
    bar = min(46.0, max(1.0, slot * 0.82))
    drawn = []
    for index, (part, values) in enumerate(zip(bins, heights, strict=True)):
        x, y = left + index * slot + (slot - bar) / 2, CHART_HEIGHT - bottom
        pieces = []
        for name in phases:
            tall = values[name] / highest * high
            if tall > 0.05:
                y -= tall
                pieces.append(
                    f'<rect class="{colour(phases, name)}" x="{x:.1f}" y="{y:.2f}" '
                    f'width="{bar:.1f}" height="{tall:.2f}"/>'
                )
        steps_named = f"step {part[0].number}" + (f"–{part[-1].number}, mean" if len(part) > 1 else "")
        words = ", ".join(
            f"{name} {duration(values[name])}"
            for name in sorted(phases, key=lambda name: -values[name])
            if values[name] > 0.005 * sum(values.values())
        )
        told = escape(f"{steps_named}: {duration(sum(values.values()))} = {words}")
        drawn.append(
            f'<g class="bar" data-step="{part[0].number}" data-told="{told}"><rect class="hit" '
            f'x="{left + index * slot:.1f}" y="{top}" width="{slot:.1f}" height="{high}"/>{"".join(pieces)}'
            f"<title>{told}</title></g>"
        )
    ticks = "".join(
        f'<line x1="{left}" x2="{CHART_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/><text x="{left - 8}" y="{y + 4:.1f}" '
        f'text-anchor="end">{label}</text>'
        for label, y in ((duration(highest * share), CHART_HEIGHT - bottom - share * high) for share in (0.0, 0.5, 1.0))
    )
    names = _axis(bins, left, slot)
    return (
        f'<div class="scroll"><svg class="chart" id="steps" viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" '
        f'aria-label="seconds of each step by phase"><g class="axis">{ticks}{names}</g>{"".join(drawn)}</svg></div>'
        '<output class="told mono no-print" id="steptold"> </output>'
    )


def _round_up(value: float) -> float:
    """The next 1, 2, 3, 4, 5, 6 or 8 of its power of ten; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next((n for n in (1, 2, 3, 4, 5, 6, 8) if n * power >= value * (1 - 1e-9)), 10)


def _axis(bins: Sequence[Sequence[Step]], left: float, slot: float) -> str:
    every = max(1, -(-len(bins) // 12))
    return "".join(
        f'<text x="{left + (i + 0.5) * slot:.1f}" y="{CHART_HEIGHT - 7}" text-anchor="middle">'
        f"{bins[i][0].number}</text>"
        for i in range(0, len(bins), every)
    )


def _detail(steps: Sequence[Step], phases: Sequence[str]) -> str:
    shown, count = [], 0
    for step in reversed(steps):
        count += len(step.spans)
        if count > SPANS_SHOWN and shown:
            break
        shown.append(step)
    shown.reverse()
    left_out = len(steps) - len(shown)
    origin = min(step.start for step in shown)
    lanes = [name for name in phases if name != "other"]
    data = {
        "lanes": lanes,
        "classes": [colour(phases, name) for name in lanes],
        "steps": [
            [step.number, _ms(step.start, origin), _ms(step.end, origin),
             [n for name, begin, end in step.spans for n in (lanes.index(name), _ms(begin, origin), _ms(end, origin))]]
            for step in shown
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
<button type="button" data-do="all">everything</button><output class="told mono" id="told"> </output></div>
<svg id="detail" tabindex="0" role="img" aria-label="spans on the clock"></svg></section>
{data_block("spans", data)}"""


def _ms(moment: float, origin: float) -> float:
    return round(1000 * (moment - origin), 1)


def duration(seconds: float) -> str:
    """``850 ms``, ``2.5 s``, ``3:05``, ``1:02:03``; ``<0.1 ms`` for what would be shown as nothing."""
    if 0 < seconds < 5e-5:
        return "<0.1 ms"
    if seconds < 0.9995:
        return "0" if seconds == 0 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return numbers.duration(seconds)
