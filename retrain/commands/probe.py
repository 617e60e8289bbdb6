"""``probe``: the updates that the conditions of a file would make, compared on the same rollouts before any run."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from retrain.commands.arguments import AsJson, ConfigFile, Sets, read
from retrain.commands.output import duration, note, print_table, visible
from retrain.files import dumps
from retrain.records.text import interval, minus, number


def probe(
    file: ConfigFile,
    batches: Annotated[
        int, typer.Option("--batches", metavar="N", min=1, help="Batches of training rollouts to sample.")
    ] = 16,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Compare the updates of all conditions on the same rollouts: direction, length and noise. Nothing is trained."""
    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.planning.references import check
    from retrain.probe import comparable
    from retrain.probe import probe as compare

    plan = Plan.of(read(file, sets))
    comparable(plan)  # reports a file with nothing to compare before anything is loaded
    report = compare(check(plan, places=False), batches, _progress)
    if as_json:
        print(dumps({"file": str(file), **report}, indent=2))
    else:
        _print_report(report)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(visible(text), file=sys.stderr)


def _print_report(report: Mapping[str, Any]) -> None:
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
