"""``compare``: judge retrain's campaigns, or results of other tools. It never imports torch."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from retrain.cli.arguments import AS_JSON, argument, option, output_path, require_directory
from retrain.cli.output import print_comparison, print_report
from retrain.config.checking import KeyLocations
from retrain.config.comparing import ComparisonFile, is_comparison_file, load_comparison, parse_comparison
from retrain.config.describe import toml
from retrain.errors import UsageError
from retrain.records.foreign.collect import collect
from retrain.records.schema.layout import MANIFEST, PLAN
from retrain.verdicts.evidence import campaign_of_tables
from retrain.verdicts.export import export as export_campaign
from retrain.verdicts.lock import declare as write_lock
from retrain.verdicts.lock import lock_note, read_lock, standing_of
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.report import write_campaign
from retrain.verdicts.tables import judge_tables


def compare(
    paths: list[str] = argument(
        "PATH",
        "Directories of campaigns or runs; or one comparison file (TOML); or files, directories and patterns of other "
        "tools' results, such as 'runs/{condition}/seed{seed}'.",
    ),
    metric: str | None = option(
        "--metric METRIC",
        "final, last3 or auc, a metric's key, or auc:KEY; short for held-out ones, as in pass@4. Without it "
        "what the campaign declared.",
    ),
    baseline: str | None = option(
        "--baseline LABEL", "Condition that the others are compared with; without it the first."
    ),
    as_json: bool = AS_JSON,
    higher_is_better: bool | None = option(
        "--higher-is-better/--lower-is-better", "For other tools' results: whether larger values are an improvement."
    ),
    unit: str | None = option("--unit UNIT", "share for values from 0 to 1, number for any other."),
    steps: int | None = option("--steps N", "Number of updates after which a run must end.", min=0),
    pairing: str | None = option("--pairing HOW", "seed or none: whether runs with one seed are compared in pairs."),
    models: bool = option("--models", "Compare one model of each condition, by problem.", False),
    format: str | None = option(
        "--format NAME", "Format of the files, where it is not recognised, or module:function for a reader."
    ),
    declare: bool = option(
        "--declare", "Declare the comparison file before there are results: write FILE.lock.", False
    ),
    export: Path | None = option(
        "--export FILE", "Write a campaign's results as a long table (CSV), with its declaration.", parser=output_path
    ),
    report: Path | None = option(
        "--report FILE", "Write the report of other tools' results (HTML).", parser=output_path
    ),
) -> None:
    """Compare conditions over seeds: paired differences, confidence intervals, verdicts.

    Runs of several directories are pooled by condition. Only finished runs count; all others are named.
    """
    options = {"metric": metric, "baseline": baseline, "higher_is_better": higher_is_better, "unit": unit,
               "steps": steps, "pairing": pairing, "replicate": "none" if models else None}  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    if any(_is_ours(Path(path)) for path in paths):
        if given.keys() - {"metric", "baseline"} or format or declare or report:
            raise UsageError(
                "directories of retrain are compared as their campaigns declared it: only --metric, --baseline, --json "
                "and --export apply to them (for a report type: retrain report)"
            )
        _compare_ours(paths, given, as_json, export)
        return
    if export is not None:
        raise UsageError("--export writes a campaign of retrain as a table; name its directory")
    file, path = _comparison(paths, given, format)
    if not declare:
        _compare_others(file, path, " ".join(paths), as_json, report)
    elif path is None:
        raise UsageError("--declare needs a comparison file: write [compare] and [[results]] into FILE.toml")
    else:
        tables = collect(file.results, file.compare, path.parent, allow_missing=True)
        print(*write_lock(path, file, tables, time.time()), sep="\n")


def _is_ours(path: Path) -> bool:
    """Return whether this is the directory of a campaign or run of retrain, or lies where a campaign has its runs."""
    full = path.absolute()
    campaign = full.parent.parent if full.parent.name == "runs" else full.parent if full.name == "runs" else full
    files = [directory / name for directory in (full, campaign) for name in (MANIFEST, PLAN)]
    return path.is_dir() and any(file.is_file() for file in files)


def _compare_ours(paths: Sequence[str], given: Mapping[str, str], as_json: bool, export: Path | None) -> None:
    """Compare campaigns and runs of retrain, or export one campaign. Raises UsageError for other tools' results."""
    directories = [Path(path) for path in paths]
    if other := next((path for path in directories if not _is_ours(path)), None):
        ours = next(path for path in directories if _is_ours(path))
        raise UsageError(
            f"{ours} is retrain's and {other} is not: retrain compare {ours} --export FILE.csv writes a table, "
            "which can be compared with other tools' results"
        )
    if export is not None:
        if len(paths) > 1 or given:
            raise UsageError("--export writes one campaign as it was declared: name one directory and no other option")
        print(*export_campaign(directories[0], export), sep="\n")
        return
    for directory in directories:
        require_directory(directory)
    comparison = compare_directories(directories, metric=given.get("metric"), baseline=given.get("baseline"))
    print_report(comparison, as_json, lambda row: print_comparison(row, secondary=True))


def _comparison(
    paths: Sequence[str], given: Mapping[str, object], format: str | None
) -> tuple[ComparisonFile, Path | None]:
    """Return the comparison that file or command line describe, and the path of the file."""
    files = [Path(path) for path in paths if path.endswith(".toml")]
    if not files:
        results = [{"path": path} | ({"format": format} if format else {}) for path in paths]
        return parse_comparison({"compare": dict(given), "results": results}, KeyLocations("command line")), None
    path = files[0]
    if len(paths) > 1:
        raise UsageError(f"{path} describes all of a comparison: put the other paths into it, under [[results]]")
    if path.is_file() and not is_comparison_file(path):
        raise UsageError(f"{path} has no [[results]], so it is no comparison; to train it type: retrain train {path}")
    file = load_comparison(path)
    if format:
        raise UsageError(f'{path} names formats itself: write format = "{format}" under [[results]]')
    for key, value in given.items():
        if key in file.compare.model_fields_set and getattr(file.compare, key) != value:
            values = f"{toml(getattr(file.compare, key))}, and on the command line {toml(value)}"
            raise UsageError(f"{path} has {key} = {values}: leave out one of the two")
    data = file.model_dump(exclude_unset=True)
    data["compare"] = {**data.get("compare", {}), **given}
    return parse_comparison(data, KeyLocations("command line")), path


def _compare_others(file: ComparisonFile, path: Path | None, name: str, as_json: bool, report: Path | None) -> None:
    lock, base = (read_lock(path), path.parent) if path else (None, Path())
    tables = collect(file.results, file.compare, base, allow_missing=lock is not None, every_step=report is not None)
    if not tables:
        raise UsageError(f"{name}: there are no results yet at {', '.join(entry.path for entry in file.results)}")
    notes = [lock_note(lock, file, tables)] if lock else []
    judged = judge_tables(tables, file.compare, standing_of(lock, file, tables), notes)
    if report is not None:
        write_campaign(campaign_of_tables(name, judged), report, "--report")
    print_report(judged.comparison.to_json(), as_json, lambda row: print_comparison(row, secondary=True))
    if report is not None and not as_json:
        print(report)
