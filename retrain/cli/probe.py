"""``probe``: compare the conditions of a file before its campaign, by their updates or by late forks."""

import sys
from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.cli.arguments import AS_JSON, FILE, SETS, option, read
from retrain.cli.output import note, print_report, print_table
from retrain.config.campaign import condition_name
from retrain.errors import UsageError
from retrain.records.schema.base import Values
from retrain.util.text import approximate_duration, interval, minus, number, one_line, short

BATCHES, SEEDS = 16, 4  # Defaults of --batches and --seeds


def probe(
    file: Path = FILE,
    batches: int | None = option("--batches N", "Batches of training rollouts to sample (16).", min=1),
    fork: int | None = option("--fork STEPS", "Continue all conditions for this many steps.", min=1),
    at: Path | None = option("--at CHECKPOINT", "With --fork: where all conditions begin."),
    seeds: int | None = option("--seeds N", "With --fork: fresh seeds of each condition (4).", min=2),
    sets: list[str] | None = SETS,
    as_json: bool = AS_JSON,
) -> None:
    """Compare the updates of all conditions on the same rollouts.

    Reports direction, length and noise; nothing is trained. With --fork, continue all conditions from the same late
    checkpoint, and rank them by their held-out change.
    """
    if (fork is None) != (at is None):
        raise UsageError("--fork and --at belong together: type --fork STEPS --at CHECKPOINT")
    if fork is not None and batches is not None:
        raise UsageError("--batches is for a probe without --fork: leave one of them out")
    if fork is None and seeds is not None:
        raise UsageError("--seeds is for --fork: type --fork STEPS --at CHECKPOINT")
    plan = Plan.of(read(file, sets))
    from retrain.probe import forks, gradients

    # What cannot be compared or continued is reported before anything is loaded.
    if fork is None or at is None:
        gradients.comparable(plan)
        report, show = gradients.probe(check(plan, places=False), batches or BATCHES, _progress), _print_gradients
    else:
        planned = forks.plan_fork(plan, at, fork, seeds or SEEDS)
        check(plan, places=False)
        report, show = forks.run_fork(planned, _progress), _print_forks
    print_report({"file": str(file), **report}, as_json, show)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(one_line(text), file=sys.stderr)


def _print_gradients(report: Values) -> None:
    for text in report["notes"]:
        note(text)
    if report["uniform_batches"]:
        note(f"{report['uniform_batches']} batches have equal rewards in every group, and no gradient")
    print(
        f"{one_line(report['begins'])}, step {report['step']}: {report['batches']} batches of {report['prompts']} × "
        f"{report['samples']} answers, {100 * report['success']:.0f} % right"
    )
    print()
    rows = [
        [
            one_line(condition_name(each["label"])),
            f"{each['norm']:.3g}",
            interval(each["length"], 2) if i else "baseline",
            interval(each["cosine"], 3) if i else "baseline",
            minus(number(each["halves"])),
        ]
        for i, each in enumerate(report["conditions"])
    ]
    print_table(("condition", "gradient", "relative length", "cosine", "own halves"), rows, left_aligned=("condition",))
    print()
    print(f"{approximate_duration(report['seconds'])} for {len(rows)} conditions")


def _print_forks(report: Values) -> None:
    for text in report["notes"]:
        note(text)
    print(
        f"{one_line(report['run'])} at step {report['step']} of {report['max_steps']}, {report['metric']} "
        f"{number(report['before'])}: forks to step {report['end']}, seeds {report['seeds']}"
    )
    print()
    rows = [
        [
            str(rank) if each["change"] else "-",
            one_line(condition_name(each["label"])),
            interval(each["change"], 3),
            "baseline" if each["label"] == report["baseline"] else interval(each["difference"], 3),
        ]
        for rank, each in enumerate(report["conditions"], 1)
    ]
    print_table(("rank", "condition", "change", "against the baseline"), rows, left_aligned=("condition",))
    print()
    print(
        f"{short(report['tokens'])} sampled tokens in {approximate_duration(report['seconds'])}, "
        f"{100 * report['share']:.0f} % of the steps of the file"
    )
    print(report["forecast"])
