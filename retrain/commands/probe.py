"""``probe``: the conditions of a file compared before its campaign, by their updates or by late forks."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from retrain.commands.arguments import AsJson, ConfigFile, Sets, read
from retrain.commands.output import duration, note, print_table, visible
from retrain.config import Loaded
from retrain.errors import UsageError
from retrain.files import dumps
from retrain.records.text import interval, minus, number, percent, short

BATCHES, SEEDS = 16, 4


def probe(
    file: ConfigFile,
    batches: Annotated[
        int | None,
        typer.Option("--batches", metavar="N", min=1, help=f"Batches of training rollouts to sample ({BATCHES})."),
    ] = None,
    fork: Annotated[
        int | None,
        typer.Option(
            "--fork", metavar="STEPS", min=1, help="Continue every condition so many steps from a checkpoint, and rank."
        ),
    ] = None,
    at: Annotated[
        Path | None,
        typer.Option("--at", metavar="CHECKPOINT", help="With --fork: checkpoint of one of the file's runs."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", min=2, help=f"With --fork: fresh seeds ({SEEDS}).")
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Compare the updates of all conditions on the same rollouts: direction, length and noise. Nothing is trained.

    With --fork, continue all conditions from the same late checkpoint, and rank them by their held-out change.
    """
    if fork is None and (at is not None or seeds is not None):
        raise UsageError("--at and --seeds are for forks: type --fork STEPS too")
    if fork is not None and (at is None or batches is not None):
        raise UsageError("--fork needs a checkpoint and samples no --batches: type --fork STEPS --at CHECKPOINT")
    loaded = read(file, sets)
    if fork is not None and at is not None:
        report, show = _forks(loaded, at, fork, seeds or SEEDS), _print_forks
    else:
        report, show = _gradients(loaded, batches or BATCHES), _print_gradients
    if as_json:
        print(dumps({"file": str(file), **report}, indent=2))
    else:
        show(report)


def _gradients(loaded: Loaded, batches: int) -> dict[str, Any]:
    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.planning.references import check
    from retrain.probe.gradients import comparable, probe

    plan = Plan.of(loaded)
    comparable(plan)  # reports a file with nothing to compare before anything is loaded
    return probe(check(plan, places=False), batches, _progress)


def _forks(loaded: Loaded, checkpoint: Path, steps: int, seeds: int) -> dict[str, Any]:
    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.planning.references import check
    from retrain.probe.forks import plan_fork, run_fork

    plan = Plan.of(loaded)
    fork = plan_fork(plan, checkpoint, steps, seeds)
    check(plan, places=False)
    return run_fork(fork, _progress)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(visible(text), file=sys.stderr)


def _print_gradients(report: Mapping[str, Any]) -> None:
    from retrain.config.campaign import condition_name

    for text in report["notes"]:
        note(text)
    if report["uniform_batches"]:
        note(f"{report['uniform_batches']} batches have equal rewards in every group, and no gradient")
    print(
        f"{visible(report['begins'])}, step {report['step']}: {report['batches']} batches of {report['prompts']} × "
        f"{report['samples']} answers, {100 * report['success']:.0f} % right"
    )
    print()
    rows = [
        [
            visible(condition_name(each["label"])),
            f"{each['norm']:.3g}",
            interval(each["length"], 2) if i else "baseline",
            interval(each["cosine"], 3) if i else "baseline",
            minus(number(each["halves"])),
        ]
        for i, each in enumerate(report["conditions"])
    ]
    print_table(("condition", "gradient", "relative length", "cosine", "own halves"), rows, left=("condition",))
    print()
    print(f"{duration(report['seconds'])} for {len(rows)} conditions")


def _print_forks(report: Mapping[str, Any]) -> None:
    from retrain.config.campaign import condition_name
    from retrain.verdicts.results import Measure

    for text in report["notes"]:
        note(text)
    is_share, seeds = Measure(key=report["metric"]).is_share, report["seeds"]
    before = percent(report["before"], 1) if is_share else number(report["before"])
    print(
        f"{visible(report['run'])} at step {report['step']} of {report['max_steps']}, {report['metric']} {before}: "
        f"forks to step {report['end']}, seeds {seeds[0]} to {seeds[-1]}"
    )
    print()

    def cell(bounds: Mapping[str, float | None] | None) -> str:
        scaled = bounds and {
            name: end if end is None else end * (100 if is_share else 1) for name, end in bounds.items()
        }
        return interval(scaled, 1 if is_share else 3)

    rows = [
        [
            str(rank) if each["change"] else "-",
            visible(condition_name(each["label"])),
            cell(each["change"]),
            "baseline" if each["label"] == report["baseline"] else cell(each["difference"]),
        ]
        for rank, each in enumerate(report["conditions"], 1)
    ]
    unit = "change, points" if is_share else "change"
    print_table(("rank", "condition", unit, "against the baseline"), rows, left=("condition",))
    print()
    print(
        f"{short(report['tokens'])} sampled tokens in {duration(report['seconds'])}, "
        f"{100 * report['share']:.0f} % of the steps of the file"
    )
    print(report["forecast"])
