"""``check``, ``report`` and ``compare``: commands that read and print, and never import torch."""

from pathlib import Path

from retrain.campaign.planning import references
from retrain.campaign.planning.plan import Plan
from retrain.cli.arguments import (
    AS_JSON,
    FILE,
    RUN_DIRECTORY,
    SETS,
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


def check(file: Path = FILE, sets: list[str] | None = SETS) -> None:
    """Check a file and print every mistake with its fix.

    Exit status 2 if there is any.
    """
    plan = references.check(Plan.of(read(file, sets)), places=False)
    print(f"{file}: fine, {plural(len(plan.specs), 'run')}")
    for line in verdict_lines(plan.specs, None, None, plan.directory):
        print(f"  {line}")


def report(
    directory: Path = RUN_DIRECTORY,
    out: Path | None = option("--out FILE", "Where to write it; without it report.html in DIR.", parser=output_path),
) -> None:
    """Write the HTML report of a campaign or run.

    It is one file, and also covers campaigns and runs that are not finished.
    """
    require_directory(directory)
    print(write_report(directory, out))


def compare(
    directories: list[Path] = argument("DIR", "Directories of campaigns or runs."),
    metric: str | None = option(
        "--metric METRIC",
        "final, last3 or auc, a metric's key, or auc:KEY; short for held-out ones, as in pass@4. Without it "
        "what the campaign declared.",
    ),
    baseline: str | None = option(
        "--baseline LABEL", "Condition that the others are compared with; without it the first."
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Compare conditions over seeds: paired differences, confidence intervals, verdicts.

    Runs of several directories are pooled by condition. Only finished runs count; all others are named.
    """
    for directory in directories:
        require_directory(directory)
    report = compare_directories(directories, metric=metric, baseline=baseline)
    print_report(report, as_json, lambda report: print_comparison(report, secondary=True))
