"""``check`` and ``report``: commands that read and print, and never import torch."""

from collections.abc import Sequence
from pathlib import Path

from retrain.campaign.planning import references
from retrain.campaign.planning.plan import Plan
from retrain.cli.arguments import FILE, RUN_DIRECTORY, SETS, option, output_path, read, require_directory
from retrain.config.comparing import is_comparison_file, load_comparison
from retrain.errors import plural
from retrain.records.foreign.collect import collect
from retrain.verdicts.declaration import Standing
from retrain.verdicts.design import verdict_lines
from retrain.verdicts.lock import lock_path
from retrain.verdicts.report import write_report
from retrain.verdicts.tables import judge_tables


def check(file: Path = FILE, sets: list[str] | None = SETS) -> None:
    """Check a file and print every mistake with its fix.

    Exit status 2 if there is any.
    """
    if is_comparison_file(file):
        _check_comparison(file, sets)
        return
    plan = references.check(Plan.of(read(file, sets)), places=False)
    print(f"{file}: fine, {plural(len(plan.specs), 'run')}")
    for line in verdict_lines(plan.specs, None, None, plan.directory):
        print(f"  {line}")


def _check_comparison(path: Path, sets: Sequence[str] | None) -> None:
    file = load_comparison(path, sets or ())
    tables = collect(file.results, file.compare, path.parent, allow_missing=lock_path(path).is_file())
    if not tables:
        print(f"{path}: fine, and there are no results yet")
        return
    comparison, _, measure = judge_tables(tables, file.compare, Standing())
    print(f"{path}: fine, {comparison.read[0]}; metric {measure.name}")


def report(
    directory: Path = RUN_DIRECTORY,
    out: Path | None = option("--out FILE", "Where to write it; without it report.html in DIR.", parser=output_path),
) -> None:
    """Write the HTML report of a campaign or run.

    It is one file, and also covers campaigns and runs that are not finished.
    """
    require_directory(directory)
    print(write_report(directory, out))
