"""``probe``: the updates that the conditions of a file would make, compared on the same rollouts before any run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from retrain.commands.arguments import AsJson, ConfigFile, Sets, read
from retrain.commands.output import duration, note, print_table, visible
from retrain.files import dumps, write_text
from retrain.record.numbers import interval, minus, number


def probe(
    file: ConfigFile,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="DIR",
            help="Run, checkpoint or adapter directory to probe at, or base; may be repeated; else where runs begin.",
            show_default=False,
        ),
    ] = None,
    rollouts: Annotated[
        str | None,
        typer.Option(
            "--rollouts",
            metavar="RUN",
            help="Run directory whose recorded rollouts to credit, at its own checkpoints, instead of sampling any.",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            "--batches",
            metavar="N",
            min=1,
            help="Batches of training rollouts, without it 16; of recorded steps the newest, without it all.",
        ),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option("--problems", metavar="N", min=0, help="Held-out problems; 0: none, without it 64."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=2, help="Answers to each of them; without it 16.")
    ] = None,
    sets: Sets = None,
    as_json: AsJson = False,
    html: Annotated[bool, typer.Option("--html", help="Write a page with charts and coloured tokens too.")] = False,
) -> None:
    """Compare the updates of all conditions on the same rollouts: direction, length, noise, alignment with success.

    Nothing is trained. The report is kept beside the file (FILE.probe.json), where explain and report find it.
    """
    from retrain.campaign.judging.probed import probe_digest, probe_path
    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.planning.references import check
    from retrain.probe.measure import Effort, comparable
    from retrain.probe.measure import probe as compare
    from retrain.probe.points import points_of
    from retrain.probe.recorded import points_at, recorded_of
    from retrain.probe.words import lines_of

    plan = Plan.of(read(file, sets))
    recorded = None if rollouts is None else recorded_of(rollouts, batches)
    comparable(plan, recorded)  # a file with nothing to compare is told before anything is loaded
    begin, left_out = plan.specs[0].config.resume.from_, list[str]()
    if recorded is None:
        points = points_of(at or [], begin)
    else:
        points, left_out = points_at(recorded, at or [], begin)
    asked = {"batches": batches, "problems": problems, "samples": samples}
    effort = Effort(**{name: number for name, number in asked.items() if number is not None})
    found = compare(check(plan, places=False), points, effort, _progress, recorded=recorded)
    found["notes"] += left_out
    report = {"file": str(file), "digest": probe_digest(plan.specs), **found}
    report["lines"] = [vars(line) for line in lines_of(report)]
    write_text(probe_path(file), dumps(report, indent=2) + "\n")
    if html:
        from retrain.probe.page import probe_page

        write_text(probe_path(file, "html"), probe_page(report))
    if as_json:
        print(dumps(report, indent=2))
        return
    print_probe(report)
    kept = [probe_path(file), *([probe_path(file, "html")] if html else [])]
    print(f"kept in {', '.join(map(str, kept))}")


def _progress(text: str) -> None:
    """A line on standard error for a person who waits."""
    if sys.stderr.isatty():
        print(visible(text), file=sys.stderr)


def print_probe(report: Mapping[str, Any]) -> None:
    """The probe for a person or a log: a table and a matrix for each point, then what they come to."""
    from retrain.campaign.judging.probed import whole_line
    from retrain.config.campaign import with_condition_names
    from retrain.probe.words import recorded_words

    report = with_condition_names(report, report["conditions"])
    for text in report["notes"]:
        note(text)
    for point in report["points"]:
        success = f", {100 * point['success']:.0f} % right"
        print(
            f"{visible(point['at'])}: {point['batches']} batches of {report['prompts']} × {report['samples']} answers"
            f"{success}; against {visible(report['baseline'])}"
        )
        if point["recorded"] is not None:
            print(visible(recorded_words(report, point)))
        if point["uniform_batches"]:
            note(f"{point['uniform_batches']} batches have nothing to learn from")
        print()
        print_table(COLUMNS, [_row(point, number) for number in range(len(point["conditions"]))], left=("condition",))
        print()
        print_matrix(point)
        if not all(each["same_rollouts"] for each in point["conditions"]):
            print("* other rollouts: in the table the cosine of expectations, in the matrix none")
        print()
    for line in report["lines"]:
        print(visible(whole_line(line, report["could_show"])))
    print(f"{duration(report['seconds'])} for {len(report['points'])} × {len(report['conditions'])} conditions")


COLUMNS = ("condition", "cosine", "gradient", "clipped", "AdamW", "equal lr", "signal/noise", "prompts for 1",
           "gain, points/step", "vs baseline")  # fmt: skip


def _row(point: Mapping[str, Any], number: int) -> list[str]:
    condition = point["conditions"][number]
    length, alignment = condition["length"], condition["alignment"] or {}
    needed = condition["prompts_for_one"]
    return [
        visible(condition["label"]),
        "baseline" if number == 0 else _cosine(point, number),
        *(interval(length[kind], 2) for kind in ("gradient", "clipped", "adamw")),
        "-" if condition["equal_lr"] is None else f"{condition['equal_lr']:.2g}",
        interval(condition["signal_to_noise"], 2),
        "-" if needed is None else f"{needed:,.0f}",
        interval(alignment.get("gain"), 2, 100),
        interval(alignment.get("versus_baseline"), 2, 100),
    ]


def _cosine(point: Mapping[str, Any], number: int) -> str:
    """With the baseline: on the same batch; with rollouts of its own, marked, the cosine of expectations."""
    condition = point["conditions"][number]
    if condition["same_rollouts"]:
        return interval(point["cosines"][0][number], 3)
    return f"{interval(condition['expected_cosine'], 3)} *"


def print_matrix(point: Mapping[str, Any]) -> None:
    """Cosines of all pairs on the same batch, * where there is none; on the diagonal, in brackets, of two batches under
    one condition."""
    labels = [condition["label"] for condition in point["conditions"]]
    sampled = [condition["rollouts"] for condition in point["conditions"]]
    rows = []
    for i, row in enumerate(point["cosines"]):
        cells = [minus(number(None if cell is None else cell["estimate"])) for cell in row]
        cells = [cell if own == sampled[i] else "*" for cell, own in zip(cells, sampled, strict=True)]
        cells[i] = f"({cells[i]})"
        rows.append([f"{i + 1} {visible(labels[i])}", *cells])
    print_table(("cosine", *(str(i + 1) for i in range(len(labels)))), rows, left=("cosine",))
