"""Comparison and squeeze as tables and as lines, from plain dicts: rich for a terminal, aligned text elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.config.campaign import condition_name
from retrain.config.evaluation import HELDOUT
from retrain.record.html import visible
from retrain.record.numbers import NOTHING, duration, minus, percent, points, short

Report = Mapping[str, Any]

COMPARISON_COLUMNS = ("condition", "seeds", "before → after", "95 % interval", "vs baseline", "p", "verdict")
SECONDARY_COLUMNS = ("metric", "condition", "seeds", "before → after", "vs baseline")
WIDE = 110
"""Terminal columns from which a verdict fits beside the numbers."""
NARROW = 76
"""Terminal columns below which intervals, p-values and words beside a mark are left out (the files have them)."""
SQUEEZE_COLUMNS = ("rank", "mean energy", "worst layer", "weight error", "held-out", "vs full", "")
VERIFIED_COLUMNS = ("held-out", "vs full")
BY_ENERGY = "By energy alone, which is no accuracy: 95 % of it is a 22 % error of the weights. Not verified."


def comparison_table(report: Report, width: int) -> RenderableType:
    """Conditions against the baseline, the seed being the unit; verdicts beside the numbers, or below in a terminal
    with fewer than ``WIDE`` columns.

    ``report``: ``{"baseline": label, "metric": key, "conditions": [{"label", "seeds": [...], "before": float | None,
    "after_mean": float | None, "after_values": [...], "interval": [low, high] | None, "difference": float | None,
    "difference_interval": [low, high] | None, "p_value": float | None, "pairs": int, "verdict": str, "failed": int,
    "tokens": int, "seconds": float}], "note": str}``. Rates are shares; differences are shown in percentage points.
    ``p_holm``, when there, is shown instead of ``p_value``.
    """
    wide = width >= WIDE
    left_out = set() if wide else {"verdict"}
    if width < NARROW:
        left_out |= {"95 % interval", "p"}
    columns: list[str] = [heading for heading in COMPARISON_COLUMNS if heading not in left_out]
    table = Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in columns:
        left = heading in ("condition", "verdict")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    sentences = []
    for condition in report["conditions"]:
        texts = map(Text, comparison_cells(condition, report["baseline"], report.get("share", True)))
        cells: dict[str, Text] = dict(zip(COMPARISON_COLUMNS, texts, strict=True))
        verdict = cells["verdict"]
        verdict.stylize("green" if verdict.plain.startswith("better") else "")
        table.add_row(*(cells[heading] for heading in columns))
        if condition.get("sentence"):
            sentences.append(Text(visible(condition["sentence"])))
        elif verdict.plain not in ("", "baseline") and not wide:
            sentences.append(Text(f"{visible(condition_name(condition['label']))}: ") + verdict)
    last = [Text(line, style="dim") for line in (comparison_costs(report), visible(report.get("note") or "")) if line]
    return Group(Text(comparison_title(report), style="bold"), table, *sentences, *last)


def comparison_text(report: Report) -> str:
    """The same as aligned plain text, one line per condition."""
    rows = [
        comparison_cells(condition, report["baseline"], report.get("share", True)) for condition in report["conditions"]
    ]
    table = aligned(COMPARISON_COLUMNS, rows, left=("condition", "verdict"))
    sentences = [visible(one["sentence"]) for one in report["conditions"] if one.get("sentence")]
    note = [visible(report["note"])] if report.get("note") else []
    return "\n".join([comparison_title(report), *table, *sentences, comparison_costs(report), *note])


def accuracy_name(metric: str) -> str:
    """What the accuracy on a held-out set is called; "" for any other metric."""
    parts = metric.split("/")
    if len(parts) != 3 or (parts[0], parts[2]) != ("eval", "correct_rate"):
        return ""
    return "Held-out accuracy" if parts[1] == HELDOUT else f"Held-out accuracy on {visible(parts[1])}"


def accuracy_line(name: str, accuracy: Report) -> str:
    """Return a run's accuracy on the held-out set ``name`` at its first evaluation → at its last, whose interval is
    over problems."""
    low_high = (accuracy["ci_low"], accuracy["ci_high"])
    ends = "" if None in low_high else f", 95 % interval over problems {interval(low_high)}"
    levels = f"{rate(accuracy['before'])} → {rate(accuracy['after'])}"
    return f"{accuracy_name(f'eval/{name}/correct_rate')}: {levels}{ends}"


def short_metric(metric: str) -> str:
    """A metric's key without what goes without saying: that it is of held-out problems, and their set's usual name."""
    return metric.removeprefix("eval/").removeprefix(f"{HELDOUT}/")


def comparison_title(report: Report) -> str:
    """What is compared, in words."""
    metric = report["metric"]
    if name := accuracy_name(metric):
        mean = {"auc": ", mean over training", "last3": ", mean of the last three evaluations"}.get(
            report.get("summary", ""), ""
        )
        return f"{name} by condition{mean}"
    return f"Conditions compared by {metric}" if metric.startswith("eval/") else "Conditions compared"


def comparison_cells(condition: Report, baseline: str, share: bool = True) -> list[str]:
    """One row of the comparison; ``share``: whether the metric lies in [0, 1] and is shown in per cent."""
    seeds, counted = len(condition["seeds"]), len(condition.get("finished", condition["seeds"]))
    counted -= 0 if "finished" in condition else condition.get("failed", 0)
    ends = condition.get("interval")
    p_value = condition.get("p_holm", condition.get("p_value"))
    levels, difference = _measured(condition, baseline, share)
    return [
        visible(condition_name(condition["label"])),
        str(seeds) if counted == seeds else f"{counted}/{seeds}",
        levels,
        interval(ends) if share or not ends else f"{plain_number(ends[0])} to {plain_number(ends[1])}",
        difference,
        NOTHING if p_value is None else f"{p_value:.3f}",
        visible(condition.get("verdict", "")),
    ]


def secondary_rows(report: Report) -> list[list[str]]:
    """Further measures of a comparison, one row for each measure and condition."""
    return [
        [
            f"{measure['summary']} {visible(short_metric(measure['metric']))}",
            visible(condition_name(condition["label"])),
            str(len(condition["finished"])),
            *_measured(condition, report["baseline"], measure["share"]),
        ]
        for measure in report["secondary"]
        for condition in measure["conditions"]
    ]


def _measured(condition: Report, baseline: str, share: bool) -> tuple[str, str]:
    """Before → after, and the difference to the baseline with its interval: points of a share, the plain number of
    anything else."""
    level, amount = (rate, points) if share else (plain_number, plain_number)
    difference = amount(condition.get("difference"))
    if condition.get("difference_interval"):
        low, high = condition["difference_interval"]
        difference += f" [{amount(low)}, {amount(high)}]"
    levels = f"{level(condition.get('before'))} → {level(condition.get('after_mean'))}"
    return levels, "baseline" if condition["label"] == baseline else difference


def plain_number(value: float | None) -> str:
    """Three digits."""
    return NOTHING if value is None else minus(f"{value:.3g}")


def comparison_costs(report: Report) -> str:
    """One line: what is compared, and what it took."""
    conditions = report["conditions"]
    tokens = sum(condition.get("tokens") or 0 for condition in conditions)
    seconds = sum(condition.get("seconds") or 0.0 for condition in conditions)
    summary = f"{report['summary']} " if report.get("summary") else ""
    return f"metric {summary}{report['metric']}; {short(tokens)} tokens, {duration(seconds)} of device time"


def squeeze_table(report: Report, width: int) -> RenderableType:
    """Energy and weight error by rank, with held-out accuracy where it was verified, the recommended row marked; with
    an arrow alone in a terminal with fewer than ``NARROW`` columns.

    ``report``: ``{"run": str, "source_rank": int, "recommended_rank": int | None, "rows": [{"rank", "mean_variance",
    "min_variance", "relative_error"}], "message": str, "verified": {"full": {"rank", "accuracy"}, "ranks": [{"rank",
    "accuracy", "difference": {"mean", "low", "high"}}], "sentence": str}}``, the last one only where it was.
    """
    narrow, words = width < NARROW, [Text(line) for line in squeeze_words(report)]
    if not report["rows"]:
        return Group(*words)
    left_out = {"worst layer", "weight error"} if narrow and report.get("verified") else set()
    headings = [heading for heading in squeeze_columns(report) if heading not in left_out]
    table = Table(box=None, padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in report["rows"]:
        cells = squeeze_cells(row, report)
        style = "bold green" if cells[""] else ""
        cells[""] = cells[""][:2] if narrow else cells[""]
        table.add_row(*(cells[heading] for heading in headings), style=style)
    return Group(Text(squeeze_title(report), style="bold"), table, *words)


def squeeze_text(report: Report) -> str:
    """The same as aligned plain text."""
    headings = squeeze_columns(report)
    rows = [[squeeze_cells(row, report)[heading] for heading in headings] for row in report["rows"]]
    return "\n".join([squeeze_title(report), *(aligned(headings, rows) if rows else []), *squeeze_words(report)])


def squeeze_line(report: Report) -> str:
    """Return the recommendation without its table, and the command that prints the table."""
    words = squeeze_words(report)
    if report.get("recommended_rank") is not None:
        recommended, evidence = words[-2:]
        words = [f"{recommended}. {evidence}"]
    if report["rows"]:
        words.append(f"All ranks: retrain squeeze {shlex.quote(report['run'])} (--to RANK compresses to another)")
    return visible(" ".join(words))


def squeeze_title(report: Report) -> str:
    """Whose ranks the table shows."""
    return f"LoRA-Squeeze of {visible(report['run'])}, rank {report['source_rank']}"


def squeeze_columns(report: Report) -> list[str]:
    """Headings of the rank table: held-out accuracy only where it was measured."""
    return [heading for heading in SQUEEZE_COLUMNS if report.get("verified") or heading not in VERIFIED_COLUMNS]


def squeeze_cells(row: Report, report: Report) -> dict[str, str]:
    """One row of the rank table, by heading; the full adapter has no difference to itself."""
    verified = report.get("verified")
    measured = {each["rank"]: each for each in [verified["full"], *verified["ranks"]]} if verified else {}
    own = measured.get(row["rank"], {})
    gain = own.get("difference")
    return {
        "rank": str(row["rank"]),
        "mean energy": rate(row["mean_variance"]),
        "worst layer": rate(row["min_variance"]),
        "weight error": rate(row["relative_error"]),
        "held-out": rate(own.get("accuracy")),
        "vs full": f"{points(gain['mean'])} [{points(gain['low'])}, {points(gain['high'])}]" if gain else NOTHING,
        "": "<- recommended" if row["rank"] == report.get("recommended_rank") else "",
    }


def squeeze_words(report: Report) -> list[str]:
    """What the table comes to: the rank by energy, and whether held-out problems agree."""
    lines = [visible(report["message"])] if report.get("message") else []
    if report.get("recommended_rank") is not None:
        lines.append(f"recommended by energy: rank {report['recommended_rank']} of {report['source_rank']}")
        lines.append(report["verified"]["sentence"] if report.get("verified") else BY_ENERGY)
    return lines


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """Lines of a plain table; columns are set right unless named in ``left`` or without a heading."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    return [
        "  ".join(
            cell.ljust(width) if heading in left or not heading else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ).rstrip()
        for row in [headings, *rows]
    ]


def rate(value: float | None) -> str:
    """A share in per cent with one decimal."""
    return percent(value, 1)


def interval(ends: Sequence[float] | None) -> str:
    """Both ends in per cent."""
    return NOTHING if not ends else f"{100 * ends[0]:.0f} to {percent(ends[1])}"
