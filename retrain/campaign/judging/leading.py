"""Where the learning curves of a campaign's conditions lead: ``maths.scaling`` fitted to each, for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrain.campaign.judging.evidence import Campaign
from retrain.campaign.judging.report_sections import cell, figure, table_of
from retrain.campaign.judging.results import RunResult
from retrain.maths.scaling import MIN_EVALUATIONS, Sigmoid, fit_sigmoid, sigmoid_interval
from retrain.maths.statistics import Interval
from retrain.record import charts
from retrain.record.charts import Series
from retrain.record.html import escape
from retrain.record.numbers import duration, percent
from retrain.record.tables import accuracy_name

AHEAD = 2.0
"""The curve is drawn so far beyond the last evaluation, in shares of its steps."""
DRAWN = 60


@dataclass(frozen=True)
class Leading:
    """The curve of one condition: over steps, through the mean of its finished runs at ``steps``."""

    label: str
    index: int
    seeds: int
    steps: Sequence[int]
    means: Sequence[float]
    curve: Sigmoid
    ceiling: Interval
    midpoint: Interval
    """In steps."""
    seconds_per_step: float
    """Of the device."""


def leading(campaign: Campaign) -> list[Leading]:
    """The curves of all conditions that have enough evaluations, on the held-out set of the primary metric."""
    key = f"eval/{campaign.shown_set}/correct_rate"
    found = (_of(campaign.of(label), label, index, key) for index, label in enumerate(campaign.labels))
    return [each for each in found if each is not None]


def _of(runs: Sequence[RunResult], label: str, index: int, key: str) -> Leading | None:
    finished = [run for run in runs if run.done]
    curves = [dict(run.curve(key)) for run in finished]
    common = sorted(set.intersection(*(set(each) for each in curves))) if curves else []
    steps = [step for step in common if step > 0]
    if len(steps) < MIN_EVALUATIONS or 0 not in common:
        return None
    start = sum(each[0] for each in curves) / len(curves)
    rows = [[each[step] for step in steps] for each in curves]
    means = [sum(each) / len(rows) for each in zip(*rows, strict=True)]
    own = [run.device_seconds / len(run.rows) for run in finished if run.rows]
    return Leading(
        label,
        index,
        len(rows),
        steps,
        means,
        fit_sigmoid(steps, means, start),
        sigmoid_interval(steps, rows, start, "asymptote"),
        sigmoid_interval(steps, rows, start, "midpoint"),
        sum(own) / len(own) if own else 0.0,
    )


def leading_section(campaign: Campaign) -> str:
    """The fitted curves, drawn on to twice the steps, and their numbers; "" where evaluations are too few."""
    found = leading(campaign)
    if not found:
        return ""
    key = f"eval/{campaign.shown_set}/correct_rate"
    chart = charts.line_chart(
        [_series(each) for each in found],
        label="fitted curves of held-out accuracy over steps, by condition",
        x_title="step", unit="%", limits=(0.0, 1.0),
    )  # fmt: skip
    words = "line: fitted, drawn on to twice the steps; small and open: means of the seeds, through which it goes"
    head = ("condition", "seeds", "before", "last evaluation", "levels off at", "half of the way at step",
            "of device time", "steepness")  # fmt: skip
    rows = [_row(each) for each in found]
    body = f"<div class='plots'>{figure(f'{accuracy_name(key)}: where it leads', words, chart)}</div>"
    body += table_of(head, rows, "tight")
    notes = (
        "R(C) = R₀ + (A − R₀)/(1 + (C_mid/C)^B), ScaleRL's curve (arXiv 2510.13786), over steps; intervals are 95 %, "
        "over seeds. An end that is open (…) is one that these evaluations cannot tell. No verdicts here: nothing of "
        "this was declared before."
    )
    return body + f"<p class='muted'>{escape(notes)}</p>"


def _series(each: Leading) -> Series:
    last = float(each.steps[-1])
    spots = [AHEAD * last * i / DRAWN for i in range(DRAWN + 1)]
    line = [(at, each.curve.at(at)) for at in spots]
    means = [(0.0, each.curve.start), *((float(s), y) for s, y in zip(each.steps, each.means, strict=True))]
    return Series(each.label, each.index, line, loose=means, loose_are="mean of the seeds")


def _row(each: Leading) -> list[str]:
    half, last = each.midpoint.estimate, each.steps[-1]
    seen = half <= last
    return [
        f"<span class='key whole' style='--series:{charts.colour(each.index)}'>{escape(each.label)}</span>",
        str(each.seeds),
        percent(each.curve.start, 1),
        percent(each.means[-1], 1),
        cell(percent(each.ceiling.estimate, 1) + _ends(each.ceiling, lambda value: f"{100 * value:.1f}")),
        cell((f"{half:.0f}" if seen else f"beyond {last}") + _ends(each.midpoint, lambda value: f"{value:.0f}")),
        duration(half * each.seconds_per_step) if seen and each.seconds_per_step else "–",
        f"{each.curve.exponent:.1f}",
    ]


def _ends(found: Interval, form: Callable[[float], str]) -> str:
    """The interval behind its estimate, "…" for an end that is open; "" where both are."""
    ends = ["…" if end is None else form(end) for end in (found.low, found.high)]
    return "" if ends == ["…", "…"] else f" [{', '.join(ends)}]"
