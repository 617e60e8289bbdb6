"""Build the texts and tables of a report for ``ui/templates/report.html``, which escapes all of them."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from retrain.errors import plural, printable
from retrain.files import read_jsonl
from retrain.records.schema.base import Row, Values
from retrain.records.schema.comparison import ConditionComparison, ConditionSummary
from retrain.records.schema.layout import EVALS, LOG, METRICS, WARMUP
from retrain.records.tables import short_metric, squeeze_cells, squeeze_columns, squeeze_words
from retrain.util.text import duration, percent, points, probability, short
from retrain.verdicts.declaration import EXPLORATORY, INTERIM
from retrain.verdicts.evidence import Campaign, Completion, completions, settings, twins
from retrain.verdicts.problem_scores import problem_scores
from retrain.verdicts.report_charts import name_of
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.wording import brackets, difference_words, new_problems, number

NOTHING = "–"
TWINS = 8  # Prompts shown for each comparison
COSTS = ("tokens / run", "s / run")
RESULTS = ("condition", "finished", "before", "after", "IQM", "typical difference", "p", "mean difference", "P(better)",
           *COSTS)  # fmt: skip


def facts(campaign: Campaign) -> list[str]:
    runs, conditions = campaign.runs, campaign.comparison.conditions
    states = {state: sum(run.state == state for run in runs) for state in dict.fromkeys(run.state for run in runs)}
    lines = [
        f"{plural(len(campaign.labels), 'condition')} × {plural(len({run.seed for run in runs}), 'seed')}",
        ", ".join(f"{count} {state}" for state, count in states.items()),
    ]
    made = f"{datetime.datetime.fromtimestamp(campaign.manifest['updated'], datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if campaign.foreign is not None:
        return [*lines, made]
    if config := next(iter(campaign.configs.values()), {}):
        training = config["training"]
        lines += [
            f"{config['model']['model']}, rank {config['model']['lora_rank']}",
            f"{training['max_steps']} steps × {training['batch_size']} prompts × {training['group_size']} completions",
            f"data {config['data']['source']}",
        ]
    name = campaign.shown_set
    for path in sorted(campaign.directory.glob(f"{WARMUP}/*/{EVALS}")):
        rates = [percent(row[f"eval/{name}/correct_rate"]) for row in read_jsonl(path) if row["name"] == name]
        for base, after in zip(rates[::2], rates[1::2], strict=False):  # the table begins after the warm-up
            lines.append(f"accuracy on {name} {base} (base) → {after} (after the warm-up)")
    tokens, seconds = sum(level.tokens for level in conditions), sum(level.seconds for level in conditions)
    return [*lines, f"{short(tokens)} tokens, {duration(seconds)} of device time", made]


def verdicts(campaign: Campaign) -> list[tuple[str, str, str]]:
    """Return (CSS class, heading, sentence) for every condition but the baseline."""
    baseline, *others = campaign.comparison.conditions
    if not others:
        level = "no finished run" if baseline.after_mean is None else _level(baseline, campaign.measure)
        return [("unclear", "One condition: nothing is compared", f"{baseline.label}: {level}")]
    lines = []
    for condition in others:
        verdict = condition.verdict
        word = verdict.removeprefix("typical runs ").removeprefix("these models: ").split()[0].rstrip(":")
        css = {"better": "up", "worse": "down", **dict.fromkeys(("cannot", INTERIM, EXPLORATORY), "unclear")}.get(word)
        head = f"{condition.label} against {baseline.label}: {verdict[0].upper()}{verdict[1:]}"
        lines.append((css or "", head, condition.sentence))
    return lines


def title_of(measure: Measure) -> str:
    name = name_of(measure)
    if measure.summary == "last3":
        return f"{name[:1].upper()}{name[1:]}, mean of the last three evaluations"
    return f"Area under {name}" if measure.summary == "auc" else f"Final {name}"


def results(campaign: Campaign) -> tuple[Sequence[str], list[list[str]]]:
    """Return headings, and one row per condition."""
    heads = RESULTS if campaign.foreign is None else RESULTS[: -len(COSTS)]
    rows = [_result(condition, campaign.measure) for condition in campaign.comparison.conditions]
    return heads, [row[: len(heads)] for row in rows]


def _result(condition: ConditionComparison, measure: Measure) -> list[str]:
    unit = "%" if measure.is_share else ""

    def level(value: float | None) -> str:
        return NOTHING if value is None else f"{number(value, measure)}{unit}"

    iqm, better, seconds = condition.iqm, condition.probability_of_improvement, condition.seconds_per_run
    difference = difference_words(condition, measure) or NOTHING
    difference += brackets(new_problems(condition, measure), measure)
    return [
        condition.label,
        f"{len(condition.finished)} of {len(condition.seeds)}",
        level(condition.before),
        _level(condition, measure),
        level(iqm.estimate if iqm else None),
        "baseline" if condition.verdict == "baseline" else difference,
        NOTHING if condition.p_value is None else probability(condition.p_value),
        NOTHING if condition.difference is None else number(condition.difference, measure, sign=True),
        NOTHING if better is None or better.estimate is None else f"{better.estimate:.2f}",
        NOTHING if condition.tokens_per_run is None else short(condition.tokens_per_run),
        NOTHING if seconds is None else f"{seconds:.0f}",
    ]


def _level(condition: ConditionSummary, measure: Measure) -> str:
    if condition.after_mean is None:
        return NOTHING
    unit = "%" if measure.is_share else ""
    return f"{number(condition.after_mean, measure)}{unit}" + brackets(condition.interval, measure, sign=False)


def secondary(campaign: Campaign) -> tuple[list[str], list[list[str]]]:
    """Return headings, and one row per secondary metric: name, level of each condition, differences to the baseline."""
    labels = campaign.labels
    heads, rows = ["metric", *labels, *(f"{label} − baseline" for label in labels[1:])], []
    for comparison in campaign.comparison.secondary:
        measure = campaign.measure_of(comparison.summary, comparison.metric)
        name = "" if measure.summary == "final" else f"{measure.summary}:"
        levels = [_level(condition, measure) for condition in comparison.conditions]
        differences = [difference_words(condition, measure) or NOTHING for condition in comparison.conditions[1:]]
        rows.append([f"{name}{short_metric(measure.key)}", *levels, *differences])
    return heads, rows


def same_prompts(campaign: Campaign) -> tuple[str, list[Row]]:
    """Return a phrase that names the completions, and for each pair of sides the prompts whose solve rate differs most.
    The pairs are baseline and condition after training, then each condition before and after training. The texts of
    other tools are not kept."""
    if campaign.foreign is not None:
        return "", []
    sampled = {run.run_id: completions(run, campaign.shown_set) for run in campaign.runs if run.done}
    baseline, *others = campaign.labels
    base = {run.pair: run for run in campaign.of(baseline) if run.done}

    def finished(label: str) -> list[RunResult]:
        return [run for run in campaign.of(label) if run.done]

    blocks = []
    for label in others:
        sides = [(run.seed, sampled[base[run.pair].run_id][1], sampled[run.run_id][1])
                 for run in finished(label) if run.pair in base]  # fmt: skip
        blocks.append(_twins(f"{baseline} → {label}, after training", (baseline, label), sides))
    for label in campaign.labels:
        sides = [(run.seed, *sampled[run.run_id][:2]) for run in finished(label)]
        blocks.append(_twins(f"{label}: first → last", ("first", "last"), sides))
    return next(iter(sampled.values()), ("", "", ""))[2], [block for block in blocks if block["twins"]]


def _twins(title: str, names: tuple[str, str], sides: list[tuple[int, list[Completion], list[Completion]]]) -> Row:
    extremes, count = twins(sides, TWINS)
    return {"title": title, "names": names, "count": count,
            "twins": [(twin, f"{points(twin.change, 0)} points") for twin in extremes]}  # fmt: skip


def problem_changes(campaign: Campaign) -> list[Row]:
    """Return tables of the problems whose mean score over runs of other tools differs most between two sides: baseline
    and condition, then the first and the last evaluation of each condition."""
    if campaign.foreign is None:
        return []
    first: dict[str, dict[str, float]] = {}
    last: dict[str, dict[str, float]] = {}
    for label in campaign.labels:
        runs = [run for run in campaign.of(label) if run.done]
        last[label] = _mean_scores([problem_scores(run, campaign.measure) for run in runs])
        first[label] = _mean_scores([_first_scores(run, campaign.measure) for run in runs])
    baseline, *others = campaign.labels
    sides = [(f"{baseline} → {label}", (baseline, label), last[baseline], last[label]) for label in others]
    sides += [(f"{label}: first → last", ("first", "last"), first[label], last[label]) for label in campaign.labels]
    blocks = [_changes(title, names, before, after, campaign.measure) for title, names, before, after in sides]
    return [block for block in blocks if block["rows"]]


def _mean_scores(runs: Sequence[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the mean over runs of the score on each problem; only problems that all runs have."""
    scored = [scores for scores in runs if scores]
    common = set.intersection(*map(set, scored)) if scored else set[str]()
    return {problem: sum(scores[problem] for scores in scored) / len(scored) for problem in common}


def _first_scores(run: RunResult, measure: Measure) -> Mapping[str, float] | None:
    """Return the scores of the first evaluation, None if it is part of the run's result."""
    step = min(run.problems or {}, default=None)
    return None if step is None or run.problems is None or step in run.weights(measure) else run.problems[step]


def _changes(
    title: str, names: tuple[str, str], first: Mapping[str, float], second: Mapping[str, float], measure: Measure
) -> Row:
    changes = {problem: second[problem] - first[problem] for problem in sorted(first.keys() & second.keys())}
    rises = sorted((problem for problem in changes if changes[problem] > 0), key=lambda problem: -changes[problem])
    falls = sorted((problem for problem in changes if changes[problem] < 0), key=changes.__getitem__)
    unit = "%" if measure.is_share else ""
    rows = [
        [printable(problem), number(first[problem], measure) + unit, number(second[problem], measure) + unit,
         number(changes[problem], measure, sign=True)]
        for problem in (*rises[:TWINS], *falls[:TWINS])
    ]  # fmt: skip
    counts = f"{plural(len(changes), 'problem')}: {len(rises)} higher, {len(falls)} lower"
    heads = ["problem", *names, "change, points" if measure.is_share else "change"]
    return {"title": title, "heads": heads, "rows": rows, "counts": counts}


def squeeze_table(report: Values) -> Row:
    rows = [squeeze_cells(row, report) for row in report.get("rows") or []]
    heads = squeeze_columns(report)
    lines = squeeze_words(report) if rows else [report["message"]] if report.get("message") else []
    return {"name": report.get("run_id") or report["run"], "words": lines, "heads": heads,
            "rows": [[row[head] for head in heads] for row in rows]}  # fmt: skip


def settings_rows(campaign: Campaign) -> tuple[list[str], list[list[str]]]:
    """Return the conditions whose settings are known, and [key, *their values] for every setting that differs."""
    configs = {label: campaign.configs[label] for label in campaign.labels if label in campaign.configs}
    return list(configs), [[key, *values] for key, values in settings([*configs.values()])]


def run_rows(campaign: Campaign) -> list[Row]:
    rows = []
    for run in sorted(campaign.runs, key=lambda run: (campaign.labels.index(run.label), run.pair)):
        value = run.result(campaign.measure)
        links, pages = _links(run, campaign.directory) if campaign.foreign is None else ([], 0)
        rows.append({
            "run": run, "css": {"failed": "bad", "done": ""}.get(run.state, "warn"),
            "steps": len(run.rows) or max((int(row["step"]) for row in run.evaluations), default=0),
            "value": NOTHING if value is None else number(value, campaign.measure) + "%" * campaign.measure.is_share,
            "links": links, "pages": pages,
        })  # fmt: skip
    return rows


def _links(run: RunResult, directory: Path) -> tuple[list[tuple[str, str]], int]:
    """Return (address, text) of the run's files that are linked, and the number of its pages if some are not."""
    pages = sorted(run.path.glob("*_iteration_*.html"))
    linked = pages if len(pages) <= 4 else [pages[0], pages[len(pages) // 2], pages[-1]]
    files = [(path, _page_name(path)) for path in linked]
    files += [(run.path / name, name) for name in (METRICS, LOG) if (run.path / name).is_file()]
    links = [(quote(str(path.relative_to(directory))), text) for path, text in files]
    return links, len(pages) if len(pages) > len(linked) else 0


def _page_name(path: Path) -> str:
    kind, _, step = path.stem.partition("_iteration_")
    return f"{kind.replace('eval_', 'evaluation ').replace('train', 'step')} {int(step) if step.isdigit() else step}"
