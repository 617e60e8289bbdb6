"""Format results and print them: rich's tables, as wide as the terminal, or plain lines of any length elsewhere."""

import io
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from retrain.config.campaign import condition_name
from retrain.files import dumps
from retrain.records.schema.base import Values
from retrain.records.tables import accuracy_name, rate, short_metric, squeeze_cells, squeeze_columns, squeeze_words
from retrain.util.text import NOTHING, duration, one_line, percent, plain, points, short, visible

Report = TypeVar("Report")
COMPARISON_COLUMNS = ("condition", "seeds", "before → after", "95 % interval", "vs baseline", "p", "verdict")
SECONDARY_COLUMNS = ("metric", "condition", "seeds", "before → after", "vs baseline")
WIDE = 110  # Terminal columns from which a verdict fits beside the numbers
NARROW = 76
"""Terminal columns below which intervals, p-values and verdict words are left out; the files contain them."""
PLAIN = 1_000_000  # Columns of plain output, in which no line is broken


def print_report(
    report: Report,
    as_json: bool,
    on_terminal: Callable[[Report], object],
    elsewhere: Callable[[Report], object] | None = None,
) -> None:
    """Print a report: as JSON, or by ``on_terminal`` on a terminal and by ``elsewhere`` (default: ``on_terminal``) into
    a file or pipe."""
    if as_json:
        print(dumps(report, indent=2))
    elif sys.stdout.isatty() or elsewhere is None:
        on_terminal(report)
    else:
        elsewhere(report)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left_aligned: Sequence[str] = ()) -> None:
    cells = [[Text(one_line(cell)) for cell in row] for row in rows]
    print_rich(lambda width: table(headings, cells, left_aligned))


def print_rich(view_of: Callable[[int], RenderableType], plain: bool = False) -> None:
    """Print ``view_of(width)`` for the terminal's width. With ``plain`` or without a terminal, print it without colours
    and without breaking lines."""
    if plain or not sys.stdout.isatty():
        print(plain_text(view_of(WIDE)))
    else:
        console = Console()
        console.print(view_of(console.width), crop=False)


def plain_text(view: RenderableType) -> str:
    # Without force_terminal=False, FORCE_COLOR would make this console a terminal, and TERM=dumb one of 80 columns.
    console = Console(file=io.StringIO(), width=PLAIN, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table(headings: Sequence[str], rows: Iterable[Sequence[Text]], left_aligned: Sequence[str], gap: int = 2) -> Table:
    """Return a table without lines; ``gap``: columns between its cells. Left-aligned cells break into lines."""
    result = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        justify = "left" if heading in left_aligned else "right"
        wraps = bool(heading) and justify == "left"
        title, overflow = Text(one_line(heading)), "fold" if wraps else "ellipsis"
        result.add_column(title, justify=justify, no_wrap=not wraps, overflow=overflow)
    for row in rows:
        result.add_row(*row)
    return result


def print_tables_of(summary: Values, plain: bool) -> None:
    """Print the results of a campaign or run: comparison or accuracy, recommended ranks, failures and paths."""
    print()
    if summary["comparison"]:
        print_comparison(summary["comparison"], plain)
        print()
    trained = any(run["max_steps"] for run in summary["runs"])
    lines = [accuracy_line(name, accuracy, trained) for name, accuracy in summary["evaluations"].items()]
    for report in filter(None, (summary["squeeze"], *(summary.get("squeezes") or {}).values())):
        lines.append(squeeze_line(report))
        if report.get("compressed"):
            lines.append(f"compressed  {report['compressed']}")
    if lines:
        print(*lines, "", sep="\n")
    for run in summary["runs"]:
        if run["state"] == "failed":
            print(f"failed      {run['run_id']}: {visible(str(run['reason']))}")
    for name, path in summary["paths"].items():
        print(f"{name:<12}{path}")
    directory = Path(summary["paths"]["directory"])
    beside = directory if directory.parent == Path() else directory.parent
    print(f"{'look at it':<12}retrain ui {shlex.quote(str(beside))}")


def print_comparison(report: Values, plain: bool = False, secondary: bool = False) -> None:
    """Print the conditions against the baseline and the verdicts, with the ``secondary`` measures if asked for."""
    print_rich(lambda width: comparison_table(report, width), plain)
    if secondary and report["secondary"]:
        print("\nAlso measured, without a verdict and without correction for their number")
        rows = [
            [
                f"{measure['summary']} {visible(short_metric(measure['metric']))}",
                visible(condition_name(condition["label"])),
                str(len(condition["finished"])),
                *_levels_and_difference(condition, report["baseline"], measure["share"]),
            ]
            for measure in report["secondary"]
            for condition in measure["conditions"]
        ]
        print_table(SECONDARY_COLUMNS, rows, left_aligned=("metric", "condition"))


def print_squeeze(report: Values) -> None:
    print_rich(lambda width: squeeze_table(report, width))
    if report.get("compressed"):
        print(f"compressed  {report['compressed']}")
    enough = (report.get("verified") or {}).get("enough")
    if enough is not None and enough != report["recommended_rank"]:
        print(f"for rank {enough}  retrain squeeze {report['run']} --to {enough}")


def note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr)


def print_text(text: str, indent: int, limit: int = 1500) -> None:
    """Print a model's or data set's text with │ before each line, so that it cannot be mistaken for output of retrain.
    Text over ``limit`` characters loses its middle."""
    if len(text) > limit:
        left_out = f"\n… {len(text) - limit:,} characters, which --json has …\n"
        text = text[: limit * 2 // 3] + left_out + text[-limit // 3 :]
    for line in text.split("\n"):
        print(f"{' ' * indent}│ {one_line(line)}")


def print_record(kind: str, **values: object) -> None:
    """Print one line for scripts: ``kind key=value …``, every value as JSON; None is left out."""
    rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
    print(kind, *(f"{key}={dumps(value)}" for key, value in rounded.items() if value is not None))


def comparison_table(report: Values, width: int = WIDE) -> RenderableType:
    """Return a table that compares the conditions with the baseline, and sentences on the findings below it. Terminals
    under ``WIDE`` columns get no verdicts, terminals under ``NARROW`` no intervals and p-values. ``report`` is a
    ``schema.comparison.Comparison`` as JSON."""
    left_out = set() if width >= WIDE else {"verdict"}
    left_out |= {"95 % interval", "p"} if width < NARROW else set()
    headings = [heading for heading in COMPARISON_COLUMNS if heading not in left_out]
    rows = []
    for condition in report["conditions"]:
        cells = comparison_cells(condition, report["baseline"], report["share"])
        styles = {"verdict": "green" if condition["verdict"].endswith("better") else ""}
        rows.append([Text(cells[heading], styles.get(heading, "")) for heading in headings])
    lines = [Text(visible(condition["sentence"])) for condition in report["conditions"] if condition["sentence"]]
    power, _, command = report["follow_up"].partition("\n")
    lines += [Text(line, "dim") for line in (_measured(report), visible(report["note"]), visible(power)) if line]
    if command:
        lines.append(Text(visible(command), "dim", no_wrap=True, overflow="ignore"))  # to be copied
    view = table(headings, rows, ("condition", "verdict"), 2 if width >= WIDE else 1)
    read = [Text(visible(line), "dim") for line in report.get("read", ())]
    return Group(*read, Text(_comparison_title(report), "bold"), view, *lines)


def _measured(report: Values) -> str:
    """Return a line with the metric, and the costs of the runs or the files of other tools."""
    if report.get("source"):
        return f"metric {visible(report['metric'])} ({report['summary']}); {visible(report['source'])}"
    tokens = sum(condition["tokens"] for condition in report["conditions"])
    seconds = sum(condition["seconds"] for condition in report["conditions"])
    return (
        f"metric {report['metric']} ({report['summary']}); {short(tokens)} tokens, {duration(seconds)} of device time"
    )


def _comparison_title(report: Values) -> str:
    metric = report["metric"]
    if name := metric if report.get("source") else accuracy_name(metric):
        means = {"auc": ", mean over training", "last3": ", mean of the last three evaluations"}
        return f"{visible(name)} by condition{means.get(report['summary'], '')}"
    return f"Conditions compared by {metric}" if metric.startswith("eval/") else "Conditions compared"


def comparison_cells(condition: Values, baseline: str, share: bool) -> dict[str, str]:
    """Return a row of the comparison; ``share``: the metric lies in [0, 1] and is shown in per cent."""
    seeds, finished = len(condition["seeds"]), len(condition["finished"])
    ends, p_value = condition["interval"], condition["p_value"]
    levels, difference = _levels_and_difference(condition, baseline, share)
    return {
        "condition": visible(condition_name(condition["label"])),
        "seeds": str(seeds) if finished == seeds else f"{finished}/{seeds}",
        "before → after": levels,
        "95 % interval": interval(ends) if share or not ends else " to ".join(map(plain, ends)),
        "vs baseline": difference,
        "p": NOTHING if p_value is None else f"{p_value:.3f}",
        "verdict": visible(condition["verdict"]),
    }


def _levels_and_difference(condition: Values, baseline: str, share: bool) -> tuple[str, str]:
    """Return before → after, and the typical difference with its interval, in points for a share."""
    level, amount = (rate, points) if share else (plain, partial(plain, sign=True))
    difference = amount(condition["typical_difference"])
    if condition["difference_interval"]:
        difference += f" [{', '.join(map(amount, condition['difference_interval']))}]"
    levels = f"{level(condition['before'])} → {level(condition['after_mean'])}"
    return levels, "baseline" if condition["label"] == baseline else difference


def accuracy_line(name: str, accuracy: Values, trained: bool = True) -> str:
    """Return a line with a run's accuracy on the held-out set ``name``, first evaluation → last, and the 95 % interval
    of the last over problems. Without ``trained``, the run has had its warm-up only."""
    low_high = (accuracy["ci_low"], accuracy["ci_high"])
    ends = "" if None in low_high else f", 95 % interval over problems {interval(low_high)}"
    levels = f"{rate(accuracy['before'])} → {rate(accuracy['after'])}"
    if not trained:
        levels = f"{rate(accuracy['after'])} after the warm-up, with no step of reinforcement learning"
    return f"{accuracy_name(f'eval/{name}/correct_rate')}: {levels}{ends}"


def squeeze_table(report: Values, width: int = WIDE) -> RenderableType:
    """Return energy and weight error by rank, with held-out accuracy where verified. The recommended row is marked,
    under ``NARROW`` columns by an arrow alone.

    ``report``: ``{"run": str, "source_rank": int, "recommended_rank": int | None, "rows": [{"rank", "mean_variance",
    "min_variance", "relative_error"}], "message": str, "verified": {"full": {"rank", "accuracy"}, "ranks": [{"rank",
    "accuracy", "difference": {"mean", "low", "high"}}], "sentence": str}}``; ``verified`` is missing if accuracy was
    not measured.
    """
    is_narrow = width < NARROW
    left_out = {"worst layer", "weight error"} if is_narrow and report.get("verified") else set()
    headings = [heading for heading in squeeze_columns(report) if heading not in left_out]
    rows = []
    for row in report["rows"]:
        cells = squeeze_cells(row, report)
        style = "bold green" if cells[""] else ""
        cells[""] = cells[""][:2] if is_narrow else cells[""]
        rows.append([Text(cells[heading], style) for heading in headings])
    title = f"LoRA-Squeeze of {visible(report['run'])}, rank {report['source_rank']}"
    view = table(headings, rows, ("",), 1 if is_narrow else 2)
    return Group(Text(title, "bold"), *([view] if rows else []), *map(Text, squeeze_words(report)))


def squeeze_line(report: Values) -> str:
    text = squeeze_words(report)
    if report.get("recommended_rank") is not None:
        recommended, evidence = text[-2:]
        text = [f"{recommended}. {evidence}"]
    if report["rows"] and Path(report["run"]).is_dir():  # the user may have removed it
        text.append(f"All ranks: retrain squeeze {shlex.quote(report['run'])} (--to RANK compresses to another)")
    return visible(" ".join(text))


def interval(ends: Sequence[float] | None) -> str:
    return NOTHING if not ends else f"{100 * ends[0]:.0f} to {percent(ends[1])}"
