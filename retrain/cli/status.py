"""``status``: show the state of runs from their files, once or continuously. Never imports torch."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from retrain.cli.arguments import AS_JSON, PLAIN, VERBOSE
from retrain.cli.console import make_console, status_view
from retrain.cli.follow import Follower, JsonLines
from retrain.cli.output import print_table
from retrain.cli.run_status import read_status
from retrain.errors import UsageError
from retrain.files import dumps
from retrain.records.reader import homes_of_runs
from retrain.records.schema.base import Values
from retrain.util.text import number

LOOK_EVERY_S = 1.0
HOW_TO_HAVE_RUNS = (
    "type: retrain train FILE, to have one (retrain init writes a first FILE), or retrain status DIR, for those in DIR"
)


def status(
    directory: Path = typer.Argument(Path("logs"), metavar="DIR", help="A run, a campaign, or a directory of those."),
    watch: bool = typer.Option(False, "--watch", "-w", help="Follow them until all have ended or Ctrl-C is pressed."),
    as_json: bool = AS_JSON,
    plain: bool = PLAIN,
    verbose: bool = VERBOSE,
) -> None:
    """Show runs: state, steps, reward and held-out accuracy.

    Reads their files alone.
    """
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise UsageError(f"no runs to show: {directory} {problem}; {HOW_TO_HAVE_RUNS}")
    if watch:
        follow(directory, as_json, plain, verbose)
        return
    reports = [read_status(home) for home in homes_of_runs(directory)]
    if as_json:
        print(dumps(reports, indent=2))
    elif not reports:
        print(f"No runs under {directory}; {HOW_TO_HAVE_RUNS}")
    elif sys.stdout.isatty() and not plain:
        _print_views(reports)
    else:
        _print_status_table(reports)


def _print_views(reports: Sequence[Values]) -> None:
    console = Console()
    for report in reports:
        console.print(Text(f"\n{report['directory']}", style="bold"), status_view(report, console.width), sep="\n")


def _print_status_table(reports: Sequence[Values]) -> None:
    runs = [(report["directory"], run) for report in reports for run in report["runs"]]
    other_sets = dict.fromkeys(name for _, run in runs for name in [*run["evaluations"]][1:])
    other_columns = [(name, when) for name in other_sets for when in ("before", "now")]
    rows = []
    for directory, run in runs:
        rates = [run["row"].get("mean_reward"), run["row"].get("correct_rate"), run["heldout_before"]]
        rates += [run["heldout_now"], *(run["evaluations"].get(name, {}).get(when) for name, when in other_columns)]
        why = run["reason"] or (f"worker {run['worker']}" if run.get("worker") else "")
        names = directory, run["run_id"], run["state"], str(run["step"]), str(run["max_steps"])
        rows.append([*names, *map(number, rates), why])
    others = [f"{name} {when}" for name, when in other_columns]
    headings = "directory", "run", "state", "step", "of", "reward", "correct", "before", "now", *others, "why"
    print_table(headings, rows, left_aligned=("directory", "run", "state", "why"))


def follow(directory: Path, as_json: bool, plain: bool, verbose: bool) -> None:
    """Print events until every run has ended; Ctrl-C ends it earlier with exit status 0."""
    observer = JsonLines(sys.stdout) if as_json else make_console(plain=plain, verbose=verbose)
    follower = Follower(directory, observer)
    try:
        while not follower.poll():
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return
    finally:
        observer.close()
