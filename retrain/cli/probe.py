"""``eval``, ``try`` and ``probe``: sample from models, and train nothing that is kept."""

import sys
from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.cli.arguments import AS_JSON, BASE, FILE, SETS, argument, option, output_path, read
from retrain.cli.output import note, print_record, print_report, print_table, print_text
from retrain.config import load
from retrain.config.campaign import condition_name
from retrain.errors import RunFailed, UsageError, plural
from retrain.records.schema.base import Values
from retrain.util.text import NOTHING, approximate_duration, duration, interval, minus, number, one_line, percent, short

BATCHES, SEEDS = 16, 4  # Defaults of --batches and --seeds


def eval_(
    models: list[str] = argument(
        "MODEL", "Models to evaluate, the baseline first: a model's name or directory, a run, checkpoint or adapter."
    ),
    file: Path | None = option(
        "--file FILE", "File with the held-out problems, reward and sampling; without it the settings of the first run."
    ),
    sets: list[str] | None = SETS,
    out: Path | None = option(
        "--out DIR", "Directory to write to, or to continue; without it a new one, eval-NAME.", parser=output_path
    ),
    base: str | None = BASE,
    as_json: bool = AS_JSON,
) -> None:
    """Evaluate models on held-out problems; train nothing.

    Several models are compared by problem with the first.
    """
    if len(set(models)) < len(models):
        raise UsageError("a model is named twice: name each once")
    from retrain.probe.subjects import recorded_plan, subjects_of

    plan = recorded_plan(models, sets or ()) if file is None else Plan.of(load(file, sets or ()))
    subjects = subjects_of(models, base, plan.specs[0])
    from retrain.probe import evaluation

    report = evaluation.evaluate(plan, evaluation.check_subjects(plan, subjects, note), out, note)
    print_report(report, as_json, print_evaluation)


def print_evaluation(report: Values) -> None:
    rows = [(model["name"], name, row) for model in report["models"] for name, row in model["sets"].items()]
    ks = sorted({row["samples"] for _, _, row in rows} - {1})
    headings = ["model", "set", "problems", "pass@1", *(f"pass@{k}" for k in ks), "truncated", "tokens", "seconds"]
    cells = [
        [
            one_line(name),
            held_out,
            str(row["problems"]),
            _score(row["correct_rate"], row["ci_low"], row["ci_high"]),
            *(_score(*(row.get(f"pass@{k}{end}") for end in ("", "/ci_low", "/ci_high"))) for k in ks),
            percent(row["max_token_hit_rate"]),
            short(row["tokens"]),
            f"{row['seconds']:.1f}" if row["seconds"] < 60 else duration(row["seconds"]),
        ]
        for name, held_out, row in rows
    ]
    print_table(headings, cells, left_aligned=("model", "set"))
    print()
    for comparison in report["comparisons"]:
        print(one_line(comparison["sentence"]))
    if report["comparisons"]:
        print(report["scope"])
    print(f"written to {one_line(report['out'])}")


def _score(rate: float | None, low: float | None, high: float | None) -> str:
    ends = "" if low is None or high is None else f" [{100 * low:.1f}, {100 * high:.1f}]"
    return NOTHING if rate is None else percent(rate, 1) + ends


def try_(
    file: Path = FILE,
    problems: int = option("--problems N", "How many problems.", 4, min=1),
    samples: int | None = option("--samples N", "Answers to each; without it 4, or the group size.", min=1),
    condition: str | None = option("--condition LABEL", "Which condition of a campaign; without it the first."),
    sets: list[str] | None = SETS,
    as_json: bool = AS_JSON,
) -> None:
    """Show a file's prompts, sampled answers and rewards; train nothing.

    Problems and answers are those of the first step, without a warm-up. Exit status 1 if the reward grades none
    of the answers.
    """
    plan = check(Plan.of(read(file, sets)), places=False)
    from retrain.probe.trial import others, trial

    for label in map(condition_name, others(plan, condition)):
        note(f"{label} has another reward or sampling: type --condition '{label}'")
    report = trial(plan, problems, samples, condition, note)
    print_report({"file": str(file), **report}, as_json, print_trial, print_trial_lines)
    if report["verdict"]["all_failed"]:
        reasons = "; ".join(f"{reason} ({count} ×)" for reason, count in report["verdict"]["reasons"].items())
        raise RunFailed(f"the reward graded none of {report['verdict']['answers']} answers: {reasons}")


def print_trial(report: Values) -> None:
    for index, prompt in enumerate(report["prompts"], start=1):
        reference = f", answer {one_line(prompt['answer'])[:80]}" if prompt["answer"] else ""
        print(f"problem {index}  {one_line(prompt['id'])}, {plural(prompt['tokens'], 'token')}{reference}")
        print_text(prompt["rendered"], 2)
        for place, sample in enumerate(prompt["samples"], start=1):
            print(f"  answer {place}  {sample_text(sample)}")
            print_text(sample["text"], 4)
        print()
    sampling, grading, verdict = report["sampling"], report["grading"], report["verdict"]
    step = " to ".join(dict.fromkeys(seconds_text(each) for each in sampling["step_seconds"]))
    print(f"run       {report['run']} with {one_line(report['model'])}, its first step")
    print(
        f"sampling  {sampling['answers']} answers of {sampling['tokens']:,} tokens in"
        f" {seconds_text(sampling['seconds'])}; the {sampling['step_answers']:,} of a step: {step}"
    )
    at_once = f", {grading['workers']} at once" if grading["workers"] > 1 else ""
    limit = f", given up after {grading['timeout_s']:g} s" if grading["timeout_s"] else ""
    print(
        f"grading   {seconds_text(grading['mean_seconds'])} for an answer, {seconds_text(grading['slowest_seconds'])}"
        f" at most{limit}; the {grading['step_answers']:,} of a step{at_once}:"
        f" {seconds_text(grading['step_seconds'])}"
    )
    for reason, count in verdict["reasons"].items():
        print(f"failed    {count} of {verdict['answers']}: {one_line(reason)}")
    if not verdict["all_failed"]:
        cut = verdict["truncated"]
        print(
            f"rewards   {number_text(verdict['mean_reward'])} on average, {verdict['correct']} of {verdict['answers']} "
            f"correct, {verdict['mixed_groups']} of {plural(verdict['groups'], 'group')} with rewards that differ"
            + (f", {cut} cut off at max_tokens = {verdict['max_tokens']}" if cut else "")
        )
    for advice in advice_of(report):
        print(f"careful   {advice}")


def print_trial_lines(report: Values) -> None:
    print_record("run", run=report["run"], seed=report["seed"], model=report["model"])
    for index, prompt in enumerate(report["prompts"], start=1):
        facts = {key: prompt[key] for key in ("id", "tokens", "answer")}
        print_record("prompt", prompt=index, **facts, text=prompt["rendered"])
        for place, sample in enumerate(prompt["samples"], start=1):
            facts = {key: value for key, value in sample.items() if value not in ({}, []) and key != "text"}
            print_record("answer", prompt=index, answer=place, **facts, text=sample["text"])
    for kind in ("sampling", "grading", "verdict"):
        print_record(kind, **{key: value for key, value in report[kind].items() if key != "reasons"})
    for reason, count in report["verdict"]["reasons"].items():
        print_record("failed", answers=count, reason=reason)
    for advice in advice_of(report):
        note(advice)


def sample_text(sample: Values) -> str:
    length = plural(sample["tokens"], "token") + (" (cut off)" if sample["stop"] == "length" else "")
    took = seconds_text(sample["seconds"])
    if sample["reward"] is None:
        return f"no reward: {one_line(sample['error'] or '')}; {length}, {took}"
    numbers = {**sample["components"], **sample["sample_metrics"]}
    components = [
        f"{one_line(name)} {number_text(value)}"
        for name, value in numbers.items()
        if len(numbers) > 1 or value != sample["reward"]
    ]
    parts = [f"reward {number_text(sample['reward'])}", "correct" if sample["correct"] else "wrong", *components]
    if sample["tags"]:
        parts.append("tags " + " ".join(map(one_line, sample["tags"])))
    return f"{', '.join(parts)}; {length}, {took}"


def number_text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def seconds_text(seconds: float | None) -> str:
    """Format seconds as "0.2 ms", "35 ms", "1.2 s" or "3 min"."""
    if seconds is None or seconds != seconds:
        return "not tried"
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 90 else approximate_duration(seconds)


def advice_of(report: Values) -> list[str]:
    grading, verdict, lines = report["grading"], report["verdict"], []
    if not verdict["all_failed"] and not verdict["mixed_groups"] and verdict["answers"] > verdict["groups"]:
        lines.append(
            f"{plural(verdict['groups'], 'group')} tried, and none has rewards that differ: such groups teach nothing"
        )
    if 2 * verdict["truncated"] > verdict["answers"]:
        lines.append(f"{verdict['truncated']} of {verdict['answers']} answers are cut off: raise [training] max_tokens")
    if grading["step_seconds"] > max(report["sampling"]["step_seconds"][1], 1.0):
        lines.append("grading a step takes longer than sampling it: raise [reward] workers, or make the reward faster")
    samples = [sample for prompt in report["prompts"] for sample in prompt["samples"]]
    if errors := [sample["audit_error"] for sample in samples if "audit_error" in sample]:
        lines.append(f"{len(errors)} of {verdict['answers']} answers could not be audited: {one_line(errors[0])}")
    return lines


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
