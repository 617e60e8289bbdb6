"""Format tables and numbers: rich on a terminal, aligned plain columns everywhere else."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from retrain.cli.tables import (
    SECONDARY_COLUMNS,
    WIDE,
    ResultTable,
    accuracy_line,
    comparison_table,
    secondary_rows,
    squeeze_line,
    squeeze_table,
)
from retrain.files import dumps
from retrain.records.schema.base import Values
from retrain.util.text import one_line


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Sequence[str] = ()) -> None:
    _print(lambda width: ResultTable("", headings, [list(map(Text, row)) for row in rows], left_aligned))


def print_tables_of(summary: Values, plain: bool) -> None:
    """Print the results of a campaign or run: comparison or accuracy, recommended ranks, failures and paths."""
    print()
    if summary["comparison"]:
        print_comparison(summary["comparison"], plain)
        print()
    lines = [accuracy_line(name, accuracy) for name, accuracy in summary["evaluations"].items()]
    for report in (summary["squeeze"], *(summary.get("squeezes") or {}).values()):
        if report:
            lines.append(squeeze_line(report))
            if report.get("compressed"):
                lines.append(f"compressed  {report['compressed']}")
    if lines:
        print(*lines, "", sep="\n")
    for run in summary["runs"]:
        if run["state"] == "failed":
            print(f"failed      {run['run_id']}: {run['reason']}")
    for name, path in summary["paths"].items():
        print(f"{name:<12}{path}")
    directory = Path(summary["paths"]["directory"])
    beside = directory if directory.parent == Path() else directory.parent
    print(f"{'look at it':<12}retrain ui {shlex.quote(str(beside))}")


def print_comparison(report: Values, plain: bool, secondary: bool = False) -> None:
    """Print the conditions against the baseline and the verdicts, with the ``secondary`` measures if asked for."""
    _print(lambda width: comparison_table(report, width), plain)
    if secondary and report["secondary"]:
        print("\nAlso measured, without a verdict and without correction for their number")
        print_table(SECONDARY_COLUMNS, secondary_rows(report), left_aligned=("metric", "condition"))


def print_squeeze(report: Values, plain: bool) -> None:
    _print(lambda width: squeeze_table(report, width), plain)
    if report.get("compressed"):
        print(f"compressed  {report['compressed']}")
    enough = (report.get("verified") or {}).get("enough")
    if enough is not None and enough != report["recommended_rank"]:
        print(f"for rank {enough}  retrain squeeze {report['run']} --to {enough}")


def _print(table_of: Callable[[int], ResultTable], plain: bool = False) -> None:
    if plain or not sys.stdout.isatty():
        print(table_of(WIDE).text())
    else:
        console = Console()
        console.print(table_of(console.width).rich(), crop=False)


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
