"""``check``, ``explain``, ``report`` and ``compare``: commands that read and print, and never import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.commands.arguments import (
    AsJson,
    ConfigFile,
    Detect,
    Devices,
    ExecutorName,
    Out,
    Pilot,
    RunDirectory,
    Sets,
    WorkerCount,
    executor_sets,
    output_path,
    read,
    require_directory,
)
from retrain.commands.output import print_comparison, print_table
from retrain.errors import UsageError
from retrain.files import dumps
from retrain.wording import listed, plural

if TYPE_CHECKING:
    from retrain.campaign.planning.devices import Fleet
    from retrain.campaign.planning.plan import Plan, RunSpec
    from retrain.config import Config

CONDITION_COLUMNS = (
    "condition", "credit for a completion with reward r", "credit for its tokens", "differs from the first in",
)  # fmt: skip

FILE_COLUMNS = ("file", "what it holds")

CAMPAIGN_FILES = (
    ("manifest.json", "every run and its state, the comparison, the recommended rank"),
    ("plan.json", "the file as it was given, every run as it was resolved"),
    ("retrain.json", "the mark of whose this directory is"),
    ("comparison.json", "conditions against the first, paired by seed"),
    ("report.html", "verdict, curves, distributions, the same prompt under two conditions: one file, no network"),
    ("base/evaluation_<how>.npz", "the untrained model's held-out answers, sampled once for all runs"),
    ("squeeze/analysis.json", "energy by LoRA rank, from the first run"),
    ("squeeze/verification.json", "held-out accuracy at every rank beside the full adapter, paired by problem"),
    ("squeeze/rank_<r>/", "an adapter compressed to the recommended rank, if that is known"),
    ("config.json", "every key as it was resolved, package versions, git revision"),
    ("environment.json", "machine, GPUs, Python, all installed packages"),
    ("code.diff", "uncommitted changes of the code around"),
)

ONLY_OF_CAMPAIGNS = ("comparison.json", "report.html", "base/evaluation_<how>.npz")

RUN_FILES = (
    ("retrain.json", "the mark of whose this directory is; also in every checkpoint and adapter"),
    ("config.json", "every key resolved for this run, seeds, data hash, base model"),
    ("environment.json", "machine, GPUs, Python, all installed packages"),
    ("code.diff", "uncommitted changes of the code around"),
    ("metrics.jsonl", "one row per step"),
    ("metrics.f32", "the same numbers as columns, from 64 steps on"),
    ("evals.jsonl", "one row per held-out evaluation"),
    ("emergence/steps.jsonl", "reward and correct count per step"),
    ("emergence/generations.jsonl", "every completion"),
    ("emergence/evaluations.jsonl", "every completion of the held-out evaluations"),
    ("train_iteration_<n>_rollout_summaries.jsonl", "one line per trajectory, every step"),
    ("train_iteration_<n>.html, _logtree.json", "prompts and samples to read, every rollouts_every steps"),
    ("tokens_<n>.safetensors", "every token of those steps with its numbers, texts uncut"),
    ("eval_<name>_iteration_<n>…", "the same of every held-out evaluation"),
    ("iterations.jsonl", "the index of these files, and where the step's completions lie"),
    ("timing_spans.jsonl", "what each step spent its time on"),
    ("timeline.html", "the same as a picture"),
    ("notes.jsonl", "what odd numbers mean, each noted once"),
    ("run.log", "what happened when, tracebacks included"),
    ("checkpoints.jsonl", "one line per saved checkpoint"),
    ("checkpoints/step_<n>/", "adapter, optimizer and all other state"),
    ("final/", "the trained PEFT adapter"),
)


def check(file: ConfigFile, sets: Sets = None) -> None:
    """Check a file: one line for each mistake, with the line to type instead; exit status 2 if there is any."""
    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.planning.references import check as examine

    plan = examine(Plan.of(read(file, sets)), places=False)
    print(f"{file}: fine, {plural(len(plan.specs), 'run')}")


def explain(
    file: ConfigFile,
    sets: Sets = None,
    out: Out = None,
    pilot: Pilot = None,
    detect: Detect = None,
    devices: Devices = None,
    executor: ExecutorName = None,
    workers: WorkerCount = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --devices: print what it takes there as JSON.")] = False,
) -> None:
    """Show what a file would train, what can be detected, what it costs and what it writes; nothing is started."""
    from retrain.campaign.planning.devices import parse_fleet
    from retrain.campaign.planning.plan import Plan

    fleet = parse_fleet(devices) if devices is not None else None
    if as_json and fleet is None:
        raise UsageError(
            f"--json prints what a file takes on other devices: type retrain explain {file} --devices H100 --json"
        )
    plan = Plan.of(read(file, [*(sets or ()), *executor_sets(executor, workers, None)]), out)
    if as_json and fleet is not None:
        from retrain.commands.forecast import forecast_json

        print(dumps({"file": str(file), **forecast_json(plan, fleet, executor == "inprocess")}, indent=2))
    else:
        print_explanation(plan, pilot, detect, fleet, executor == "inprocess")


def print_explanation(
    plan: Plan,
    pilot: Path | None = None,
    detect: float | None = None,
    fleet: Fleet | None = None,
    one_process: bool = False,
) -> None:
    """Print conditions × seeds, what can be detected, costs and files of a file's plan: here, or on a ``fleet``, which
    ``one_process`` uses one device of."""
    from retrain.commands.costs import print_costs, print_forecast, print_work
    from retrain.commands.formulas import (
        credit_formula,
        critic_words,
        distillation_words,
        environment_words,
        loss_words,
        reward_words,
    )

    loaded, specs = plan.source, plan.specs
    assert loaded is not None
    seeds = list(dict.fromkeys(spec.seed for spec in specs))
    conditions = [spec for spec in specs if spec.seed == seeds[0]]
    counts = [plural(len(each), word) for each, word in ((conditions, "condition"), (seeds, "seed"), (specs, "run"))]
    print(f"{loaded.path}: {counts[0]} × {counts[1]} = {counts[2]}\n")
    print_table(CONDITION_COLUMNS, [condition_row(spec, conditions[0]) for spec in conditions], left=CONDITION_COLUMNS)
    print()
    print_by_words("token credit", credit_formula, conditions)
    print_by_words("critic", critic_words, conditions)
    print_by_words("distillation", distillation_words, conditions)
    print_by_words("loss", loss_words, conditions)
    print_by_words("reward", reward_words, conditions)
    if conditions[0].config.environment.hosted:
        print(f"environment   {environment_words(conditions[0].config)}")
    prompt_tokens = print_problems(plan)
    print(f"seeds         {' '.join(map(str, seeds))}")
    print_sets(specs[0].config)
    print_design(specs, pilot, detect)
    print_work(specs, prompt_tokens)
    if fleet is None:
        print_costs(specs, prompt_tokens)
    else:
        print_forecast(specs, fleet, prompt_tokens, one_process)
    print_files(plan)


def print_by_words(name: str, words_of: Callable[[Config], str], conditions: list[RunSpec]) -> None:
    """Print what ``words_of`` says of the conditions, each text once with those that it holds for; no empty one."""
    for words in filter(None, dict.fromkeys(words_of(spec.config) for spec in conditions)):
        having = [spec.label for spec in conditions if words_of(spec.config) == words]
        print(f"{name:<14}{words}" + ("" if len(having) == len(conditions) else f"  ({', '.join(having)})"))


def print_problems(plan: Plan) -> int | None:
    """Print what there is to solve, the same for all conditions; returns the usual length of a prompt in tokens, None
    where it is not known."""
    from retrain.campaign.planning.references import data_problems
    from retrain.commands.problems import problem_lines, typical

    assert plan.source is not None
    lines, lengths = problem_lines([spec.config for spec in plan.specs], plan.folder)
    for name, text in lines:
        print(f"{name:<14}{text}")
    for problem in data_problems(plan, plan.source) if lengths is None else ():
        print(f"note: {problem}", file=sys.stderr)
    return typical(lengths)


def condition_row(spec: RunSpec, first: RunSpec) -> tuple[str, str, str, str]:
    """Label, the two formulas in words, and the differences from the first condition."""
    from retrain.campaign.planning.changes import differences
    from retrain.commands.formulas import advantage_words, credit_words

    changed = [
        f"{key.removeprefix('algorithm.')} = {value}"
        for key, (_, value) in differences(first.config.model_dump(), spec.config.model_dump()).items()
    ]
    return spec.label, advantage_words(spec.config), credit_words(spec.config), ", ".join(changed) or "-"


def print_sets(config: Config) -> None:
    """Print the held-out sets that have names of their own, how each is sampled, and when, if few are whole."""
    for i, each in enumerate(config.held_out if config.evaluation.sets else ()):
        source = each.data.eval_source or each.data.source
        decides = "; the primary metric's" if each == config.decisive else ""
        asked = each.sampling
        cuts = (("top_p", asked.top_p, 1), ("top_k", asked.top_k, 0), ("min_p", asked.min_p, 0))
        cut = "".join(f" {key} {value:g}," for key, value, off in cuts if value != off and asked.temperature)
        line = (
            f"{each.name}: {each.problems} problems × {each.samples} of {source}, at temperature {asked.temperature:g},"
            f"{cut} at most {asked.max_tokens} tokens{decides}"
        )
        print(f"{'' if i else 'held out':<14}{line}")
    if config.evaluation.schedule == "verdict" and config.held_out:
        print(f"evaluated     {schedule_words(config)}")


def schedule_words(config: Config) -> str:
    """After which steps all held-out problems are asked, and after how many others a part of them."""
    from retrain.config.schedule import part_evaluations, whole_evaluations

    training, evaluation = config.training, config.evaluation
    asked = (evaluation.schedule, training.max_steps, training.eval_every)
    whole = [*([0] if evaluation.at_start else []), *whole_evaluations(*asked)]
    few = sum(each.part.problems for each in config.held_out)
    parts = part_evaluations(*asked)
    words = f"all problems after {listed(list(map(str, whole)), len(whole))} steps"
    return words + (f", {few} of them, once each, {plural(len(parts), 'time')} between" if parts else "")


def print_design(specs: list[RunSpec], pilot: Path | None, detect: float | None) -> None:
    """Print what the comparison can detect, and where its design misleads."""
    from retrain.campaign.judging.design import verdict_lines, warnings_of

    for name, lines in (("verdict", verdict_lines(specs, pilot, detect)), ("careful", warnings_of(specs))):
        for i, line in enumerate(lines):
            print(f"{'' if i and name == 'verdict' else name:<14}{line}")


def print_files(plan: Plan) -> None:
    """Print every file that training would write, with a phrase for each."""
    specs = plan.specs
    print(f"\nwrites        {plan.directory}/")
    if not specs[0].is_campaign:
        files = {name: text for name, text in CAMPAIGN_FILES if name not in ONLY_OF_CAMPAIGNS} | dict(RUN_FILES)
        print_table(FILE_COLUMNS, [(f"  {name}", text) for name, text in files.items()], left=FILE_COLUMNS)
        return
    rows = [(f"  {name}", text) for name, text in CAMPAIGN_FILES]
    if specs[0].config.campaign.executor != "inprocess":
        rows.append(("  workers/worker_<n>.log", "what worker processes printed"))
    if specs[0].config.campaign.executor == "slurm":
        rows.append(("  workers/slurm_<k>/", "what was asked of Slurm, what its jobs printed, and their commands"))
    rows.append(("  runs/<run>/", f"one directory for each of the {len(specs)} runs, such as runs/{specs[0].run_id}/"))
    rows += [(f"    {name}", text) for name, text in RUN_FILES]
    print_table(FILE_COLUMNS, rows, left=FILE_COLUMNS)


def report(
    directory: RunDirectory,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", parser=output_path, help="Where to write it; without it report.html in DIR."
        ),
    ] = None,
) -> None:
    """Write the report of a campaign or run as one HTML file, from its files; also of one that is not finished."""
    from retrain.campaign.judging.report import write_report

    require_directory(directory)
    print(write_report(directory, out))


def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Directories of campaigns or runs.", show_default=False)
    ],
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="METRIC",
            help="final, last3 or auc, a metric's key, or auc:KEY; short for held-out ones, as in pass@4. Without it "
            "what the campaign declared.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="LABEL", help="Condition that the others are compared with; without it the first."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare conditions over seeds: paired differences with intervals, exact p-values, and the verdict in words.

    Runs of several directories are pooled by condition. Only finished runs count; all others are named.
    """
    from retrain.campaign.judging.pooling import compare_directories

    for directory in directories:
        require_directory(directory)
    report = compare_directories(directories, metric=metric, baseline=baseline)
    if as_json:
        print(dumps(report, indent=2))
    else:
        print_comparison(report, plain=not sys.stdout.isatty(), secondary=True)
