"""Format results as tables and lines for a terminal or plain text."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.config.campaign import condition_name
from retrain.records.schema.base import Values
from retrain.records.tables import accuracy_name, rate, short_metric, squeeze_cells, squeeze_columns, squeeze_words
from retrain.util.text import NOTHING, duration, minus, percent, points, short, visible

COMPARISON_COLUMNS = ("condition", "seeds", "before → after", "95 % interval", "vs baseline", "p", "verdict")
SECONDARY_COLUMNS = ("metric", "condition", "seeds", "before → after", "vs baseline")
WIDE = 110  # Terminal columns from which a verdict fits beside the numbers
NARROW = 76
"""Terminal columns below which intervals, p-values and verdict words are left out; the files contain them."""


class ResultTable(NamedTuple):
    """Table for a terminal or plain text, with the lines that follow it. ``gap``: terminal columns between cells."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Text]]
    left_aligned: Sequence[str]
    lines: Sequence[Text] = ()
    gap: int = 2

    def rich(self) -> RenderableType:
        if self.title and not self.rows:
            return Group(*self.lines)
        table = Table(box=None, padding=(0, self.gap, 0, 0), pad_edge=False, header_style="bold")
        for heading in self.headings:
            wraps = bool(heading) and heading in self.left_aligned
            justify, overflow = "left" if heading in self.left_aligned else "right", "fold" if wraps else "ellipsis"
            table.add_column(heading, justify=justify, no_wrap=not wraps, overflow=overflow)
        for row in self.rows:
            table.add_row(*row)
        return Group(*([Text(self.title, style="bold")] if self.title else []), table, *self.lines)

    def text(self) -> str:
        rows = [self.headings, *([cell.plain for cell in row] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        is_left = [heading in self.left_aligned or not heading for heading in self.headings]
        lines = [self.title] if self.title else []
        for row in rows if self.rows or not self.title else ():
            cells = zip(row, widths, is_left, strict=True)
            lines.append("  ".join(cell.ljust(n) if to_left else cell.rjust(n) for cell, n, to_left in cells).rstrip())
        return "\n".join([*lines, *(line.plain for line in self.lines)])


def comparison_table(report: Values, width: int = WIDE) -> ResultTable:
    """Return conditions against the baseline with intervals over seeds, and the findings as sentences below. Terminals
    under ``WIDE`` columns get no verdicts, under ``NARROW`` no intervals and p-values. ``report`` is a
    ``schema.comparison.Comparison`` as JSON."""
    left_out = set() if width >= WIDE else {"verdict"}
    left_out |= {"95 % interval", "p"} if width < NARROW else set()
    headings = [heading for heading in COMPARISON_COLUMNS if heading not in left_out]
    rows = []
    for condition in report["conditions"]:
        texts = map(Text, comparison_cells(condition, report["baseline"], report["share"]))
        cells: dict[str, Text] = dict(zip(COMPARISON_COLUMNS, texts, strict=True))
        cells["verdict"].stylize("green" if condition["verdict"].endswith("better") else "")
        rows.append([cells[heading] for heading in headings])
    lines = [Text(visible(condition["sentence"])) for condition in report["conditions"] if condition["sentence"]]
    power, _, command = report["follow_up"].partition("\n")
    lines += [Text(line, style="dim") for line in (_costs(report), visible(report["note"]), visible(power)) if line]
    if command:
        lines.append(Text(visible(command), style="dim", no_wrap=True, overflow="ignore"))  # to be copied
    gap = 2 if width >= WIDE else 1
    return ResultTable(comparison_title(report), headings, rows, ("condition", "verdict"), lines, gap)


def _costs(report: Values) -> str:
    tokens = sum(condition["tokens"] for condition in report["conditions"])
    seconds = sum(condition["seconds"] for condition in report["conditions"])
    return (
        f"metric {report['metric']} ({report['summary']}); {short(tokens)} tokens, {duration(seconds)} of device time"
    )


def comparison_title(report: Values) -> str:
    metric = report["metric"]
    if name := accuracy_name(metric):
        means = {"auc": ", mean over training", "last3": ", mean of the last three evaluations"}
        return f"{name} by condition{means.get(report['summary'], '')}"
    return f"Conditions compared by {metric}" if metric.startswith("eval/") else "Conditions compared"


def comparison_cells(condition: Values, baseline: str, share: bool) -> list[str]:
    """Return a row of the comparison; ``share``: the metric lies in [0, 1] and is shown in per cent."""
    seeds, finished = len(condition["seeds"]), len(condition["finished"])
    ends, p_value = condition["interval"], condition["p_value"]
    levels, difference = _levels_and_difference(condition, baseline, share)
    return [
        visible(condition_name(condition["label"])),
        str(seeds) if finished == seeds else f"{finished}/{seeds}",
        levels,
        interval(ends) if share or not ends else f"{plain_number(ends[0])} to {plain_number(ends[1])}",
        difference,
        NOTHING if p_value is None else f"{p_value:.3f}",
        visible(condition["verdict"]),
    ]


def secondary_rows(report: Values) -> list[list[str]]:
    return [
        [
            f"{measure['summary']} {visible(short_metric(measure['metric']))}",
            visible(condition_name(condition["label"])),
            str(len(condition["finished"])),
            *_levels_and_difference(condition, report["baseline"], measure["share"]),
        ]
        for measure in report["secondary"]
        for condition in measure["conditions"]
    ]


def _levels_and_difference(condition: Values, baseline: str, share: bool) -> tuple[str, str]:
    """Return before → after, and the typical difference with its interval, in points for a share."""
    level, amount = (rate, points) if share else (plain_number, plain_number)
    difference = amount(condition["typical_difference"])
    if condition["difference_interval"]:
        low, high = condition["difference_interval"]
        difference += f" [{amount(low)}, {amount(high)}]"
    levels = f"{level(condition['before'])} → {level(condition['after_mean'])}"
    return levels, "baseline" if condition["label"] == baseline else difference


def accuracy_line(name: str, accuracy: Values) -> str:
    """Return a line with a run's accuracy on the held-out set ``name``: at its first evaluation → at its last, with the
    interval of the last over problems."""
    low_high = (accuracy["ci_low"], accuracy["ci_high"])
    ends = "" if None in low_high else f", 95 % interval over problems {interval(low_high)}"
    levels = f"{rate(accuracy['before'])} → {rate(accuracy['after'])}"
    return f"{accuracy_name(f'eval/{name}/correct_rate')}: {levels}{ends}"


def squeeze_table(report: Values, width: int = WIDE) -> ResultTable:
    """Return energy and weight error by rank, with held-out accuracy where verified. The recommended row is marked,
    under ``NARROW`` columns by an arrow alone.

    ``report``: ``{"run": str, "source_rank": int, "recommended_rank": int | None, "rows": [{"rank", "mean_variance",
    "min_variance", "relative_error"}], "message": str, "verified": {"full": {"rank", "accuracy"}, "ranks": [{"rank",
    "accuracy", "difference": {"mean", "low", "high"}}], "sentence": str}}``; ``verified`` is missing if accuracy was
    not measured.
    """
    left_out = {"worst layer", "weight error"} if width < NARROW and report.get("verified") else set()
    headings = [heading for heading in squeeze_columns(report) if heading not in left_out]
    rows = []
    for row in report["rows"]:
        cells = squeeze_cells(row, report)
        style = "bold green" if cells[""] else ""
        cells[""] = cells[""][:2] if width < NARROW else cells[""]
        rows.append([Text(cells[heading], style=style) for heading in headings])
    title = f"LoRA-Squeeze of {visible(report['run'])}, rank {report['source_rank']}"
    lines = [Text(line) for line in squeeze_words(report)]
    return ResultTable(title, headings, rows, ("",), lines, 1 if width < NARROW else 2)


def squeeze_line(report: Values) -> str:
    text = squeeze_words(report)
    if report.get("recommended_rank") is not None:
        recommended, evidence = text[-2:]
        text = [f"{recommended}. {evidence}"]
    if report["rows"]:
        text.append(f"All ranks: retrain squeeze {shlex.quote(report['run'])} (--to RANK compresses to another)")
    return visible(" ".join(text))


def plain_number(value: float | None) -> str:
    return NOTHING if value is None else minus(f"{value:.3g}")


def interval(ends: Sequence[float] | None) -> str:
    return NOTHING if not ends else f"{100 * ends[0]:.0f} to {percent(ends[1])}"
