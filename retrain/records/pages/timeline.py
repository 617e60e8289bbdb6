"""``timeline.html``: where the wall clock of a run went, from ``timing_spans.jsonl`` alone.

The HTML contains a table of the phases, and data from which scripts draw the bars and spans of the steps. The
boundaries of steps are not recorded: a step lasts from the end of the previous step to the end of its own last span.
Time in a step without a span is the phase ``other``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from retrain.files import read_jsonl, write_text
from retrain.records.catalogue import BESIDE
from retrain.records.pages import document
from retrain.records.schema.base import Row
from retrain.records.schema.layout import SPANS, TIMELINE
from retrain.util import text
from retrain.util.text import percent

# Phases of the training loop, in its order; further phases follow by name, and ``other`` comes last
PHASES = ("rollout", "score", "credit", "update", "eval", "checkpoint", "record", "cohort")
SPANS_SHOWN = 20_000  # Most spans in the page; a longer run has only its last steps there


@dataclass(frozen=True)
class StepTimes:
    """Wall-clock times of one step: ``start``, ``end`` and ``spans`` (name, start, end) in Unix seconds, and the
    ``seconds`` of each phase, ``other`` included."""

    number: int
    start: float
    end: float
    spans: tuple[tuple[str, float, float], ...]
    seconds: dict[str, float]


def write_timeline(directory: Path, check: Callable[[], None]) -> None:
    """Write ``timeline.html`` beside ``timing_spans.jsonl``, unless that file has no span yet. ``check`` is called
    between making and writing the page; if it raises, nothing is written."""
    if steps := steps_of(read_jsonl(directory / SPANS)):
        page = timeline_page(steps, directory.resolve().name)
        check()
        write_text(directory / TIMELINE, page, durable=False)


def steps_of(rows: Sequence[Row]) -> list[StepTimes]:
    """Return steps from the rows of ``timing_spans.jsonl``.

    A row may have spans that began before the previous step ended: a checkpoint and the writing of records are reported
    with the next row. They count in the step of that row, at their recorded times. Rollouts sampled while earlier
    steps trained are in ``spans`` but not in ``seconds``. The gap before a resume, in which no process ran, belongs to
    no step.
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


def phases_of(steps: Sequence[StepTimes]) -> list[str]:
    """Return the names of all phases that occur, in the order of display; the last is always ``other``."""
    names = {name for step in steps for name in step.seconds if name != "other"}
    order = [*PHASES, *sorted(names - set(PHASES))]
    return [*(name for name in order if name in names), "other"]


def spans_json(steps: Sequence[StepTimes], most: int) -> dict[str, object]:
    """Return the steps as JSON for the page's scripts: seconds by phase, and spans as [index of the lane, begin, end],
    in seconds since the first span. Only the first ``most`` spans are included; ``cut`` is true once there are
    ``most``."""
    if not steps:
        return {"origin": None, "lanes": [], "phases": [], "shown": [], "cut": False}
    phases = phases_of(steps)
    lanes = list(dict.fromkeys([*(name for name in phases if name != "other"),
                                *(span[0] for step in steps for span in step.spans)]))  # fmt: skip
    origin = min(min(step.start, *(span[1] for span in step.spans)) for step in steps)
    lane_of, room = {name: i for i, name in enumerate(lanes)}, most
    rows: list[Row] = []
    for step in steps:
        spans = step.spans[: max(0, room)]
        room -= len(spans)
        rows.append({
            "step": step.number, "start": round(step.start - origin, 4), "end": round(step.end - origin, 4),
            "seconds": {name: round(value, 4) for name, value in step.seconds.items()},
            "spans": [[lane_of[name], round(begin - origin, 4), round(end - origin, 4)]
                      for name, begin, end in spans],
        })  # fmt: skip
    return {"origin": origin, "lanes": lanes, "phases": phases, "shown": rows, "cut": room <= 0}


def timeline_page(steps: Sequence[StepTimes], run: str) -> str:
    lengths = [step.end - step.start for step in steps]
    counts = accumulate(len(step.spans) for step in reversed(steps))
    drawn = max(1, sum(count <= SPANS_SHOWN for count in counts))
    numbers = [
        ("steps", f"{len(steps):,}", ""),
        ("in steps", duration(sum(lengths)), ""),
        ("mean step", duration(sum(lengths) / len(steps)), ""),
        ("longest step", duration(max(lengths)), ""),
    ]
    return document(
        "timeline.html", styles=["charts.css", "pages/timeline.css"], script="pages/timeline.js",
        title=f"Timeline · {run}", run=run, numbers=numbers, rows=_phase_rows(steps, sum(lengths)),
        has_ahead=any(span[0] == BESIDE for step in steps for span in step.spans), left_out=len(steps) - drawn,
        data=spans_json(steps[-drawn:], 2 * SPANS_SHOWN),
    )  # fmt: skip


def _phase_rows(steps: Sequence[StepTimes], total: float) -> list[list[str]]:
    """Return for each phase: name, total time, share of all steps, mean per step, longest time and its step."""
    rows = []
    for name in phases_of(steps):
        seconds = [step.seconds.get(name, 0.0) for step in steps]
        longest = max(seconds)
        share = percent(sum(seconds) / total if total > 0 else 0.0, 1)
        per_step, at = duration(sum(seconds) / len(steps)), steps[seconds.index(longest)].number
        rows.append([name, duration(sum(seconds)), share, per_step, duration(longest), str(at)])
    return rows


def duration(seconds: float) -> str:
    """Format a time such as ``850 ms``, ``2.5 s``, ``3:05``, ``1:02:03``; positive values that would print as 0 become
    ``<0.1 ms``."""
    if 0 < seconds < 5e-5:
        return "<0.1 ms"
    if seconds < 0.9995:
        return "0" if seconds == 0 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else text.duration(seconds)
