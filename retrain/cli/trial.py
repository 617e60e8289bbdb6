"""``try``: show prompts, answers and rewards before training."""

from pathlib import Path

from retrain.campaign.planning.plan import Plan
from retrain.campaign.planning.references import check
from retrain.cli.arguments import AS_JSON, FILE, SETS, option, read
from retrain.cli.output import note, print_record, print_report, print_text
from retrain.config.campaign import condition_name
from retrain.errors import RunFailed, plural
from retrain.records.schema.base import Values
from retrain.util.text import approximate_duration, one_line


def try_(
    file: Path = FILE,
    problems: int = option("--problems N", "How many problems.", 4, min=1),
    samples: int | None = option("--samples N", "Answers to each; without it 4, or the group size.", min=1),
    condition: str | None = option("--condition LABEL", "Which condition of a campaign; without it the first."),
    sets: list[str] | None = SETS,
    as_json: bool = AS_JSON,
) -> None:
    """Show a file's prompts, sampled answers and rewards; train nothing.

    Problems and answers are those of the first step. Exit status 1 if the reward grades none of the answers.
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
    for number, prompt in enumerate(report["prompts"], start=1):
        reference = f", answer {one_line(prompt['answer'])[:80]}" if prompt["answer"] else ""
        print(f"problem {number}  {one_line(prompt['id'])}, {plural(prompt['tokens'], 'token')}{reference}")
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
        print(f"rewards   {verdict_text(verdict)}")
    for advice in advice_of(report):
        print(f"careful   {advice}")


def print_trial_lines(report: Values) -> None:
    print_record("run", run=report["run"], seed=report["seed"], model=report["model"])
    for number, prompt in enumerate(report["prompts"], start=1):
        facts = {key: prompt[key] for key in ("id", "tokens", "answer")}
        print_record("prompt", prompt=number, **facts, text=prompt["rendered"])
        for place, sample in enumerate(prompt["samples"], start=1):
            facts = {key: value for key, value in sample.items() if value not in ({}, []) and key != "text"}
            print_record("answer", prompt=number, answer=place, **facts, text=sample["text"])
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


def verdict_text(verdict: Values) -> str:
    cut = f", {verdict['truncated']} cut off at max_tokens = {verdict['max_tokens']}" if verdict["truncated"] else ""
    return (
        f"{number_text(verdict['mean_reward'])} on average, {verdict['correct']} of {verdict['answers']} correct, "
        f"{verdict['mixed_groups']} of {plural(verdict['groups'], 'group')} with rewards that differ{cut}"
    )


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
