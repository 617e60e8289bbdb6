"""``eval``: evaluate models on held-out problems."""

from pathlib import Path

from retrain.cli.arguments import AS_JSON, BASE, SETS, argument, option, output_path
from retrain.cli.output import note, print_report, print_table
from retrain.errors import UsageError
from retrain.records.schema.base import Values
from retrain.util.text import NOTHING, duration, one_line, percent, short


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
    from retrain.campaign.planning.plan import Plan
    from retrain.config import load
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
