"""``check``, ``report`` and ``compare``: commands that read and print, and never import torch."""

from pathlib import Path
from typing import Annotated

from retrain.campaign.planning import references
from retrain.campaign.planning.plan import Plan
from retrain.cli.arguments import (
    AsJson,
    ConfigFile,
    RunDirectory,
    Sets,
    argument,
    option,
    output_path,
    read,
    require_directory,
)
from retrain.cli.output import print_comparison, print_report
from retrain.errors import plural
from retrain.verdicts.design import verdict_lines
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.report import write_report


def check(file: ConfigFile, sets: Sets = None) -> None:
    """Check a file and print every mistake with its fix.

    Exit status 2 if there is any.
    """
    plan = references.check(Plan.of(read(file, sets)), places=False)
    print(f"{file}: fine, {plural(len(plan.specs), 'run')}")
    for line in verdict_lines(plan.specs, None, None, plan.directory):
        print(f"  {line}")


def report(
    directory: RunDirectory,
    out: Annotated[
        Path | None, option("--out FILE", "Where to write it; without it report.html in DIR.", output_path)
    ] = None,
) -> None:
    """Write the HTML report of a campaign or run.

    It is one file, and also covers campaigns and runs that are not finished.
    """
    require_directory(directory)
    print(write_report(directory, out))


def compare(
    directories: Annotated[list[Path], argument("DIR", "Directories of campaigns or runs.")],
    metric: Annotated[
        str | None,
        option(
            "--metric METRIC",
            "final, last3 or auc, a metric's key, or auc:KEY; short for held-out ones, as in pass@4. Without it "
            "what the campaign declared.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("--baseline LABEL", "Condition that the others are compared with; without it the first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare conditions over seeds: paired differences, confidence intervals, verdicts.

    Runs of several directories are pooled by condition. Only finished runs count; all others are named.
    """
    for directory in directories:
        require_directory(directory)
    report = compare_directories(directories, metric=metric, baseline=baseline)
    print_report(report, as_json, lambda report: print_comparison(report, secondary=True))
