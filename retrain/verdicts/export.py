"""Write a campaign of retrain as a long table, which ``retrain compare`` and other tools read.

The table has a row for each number of a held-out evaluation and for each graded answer. ``FILE.toml`` beside it is the
comparison as the campaign declared it, ``FILE.toml.lock`` its declaration with the time of the campaign's.
"""

import csv
import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from os.path import lexists
from pathlib import Path

from retrain.config.campaign import condition_name
from retrain.config.comparing import ComparisonFile
from retrain.config.describe import document, toml
from retrain.errors import NotOurs, StorageError, UsageError, printable
from retrain.files import dumps, iter_jsonl, write_text
from retrain.records.reader import held_out_completions, read_manifest
from retrain.records.schema.base import Row, Values
from retrain.records.schema.layout import EVALS, SPANS
from retrain.verdicts.declaration import EXPLORATORY
from retrain.verdicts.lock import Lock, lock_path
from retrain.verdicts.pooling import Source, compare_directories, read_source
from retrain.verdicts.problem_scores import problem_scores
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.rule import interim_seeds

COLUMNS: Sequence[str] = (
    "condition", "run", "seed", "state", "step", "set", "metric", "value", "problem", "sample", "time",
)  # fmt: skip
ACCURACY = "correct_rate"
TRAINING = "training"  # Set of a metric of training, whose one row has the run's value


def export(directory: Path, target: Path) -> list[str]:
    """Write the campaign's results to ``target`` (.csv) and its declaration beside it; return lines to print.

    Raises UsageError for another ending, NotOurs if one of the files exists.
    """
    if target.suffix != ".csv":
        raise UsageError(f"{target} has to end in .csv: the results are written as a table of text")
    file = target.with_suffix(".toml")
    for path in (target, file, lock_path(file)):
        if lexists(path):
            raise NotOurs(f"{path} exists and is left as it is: delete it or give another file with --export")
    source, comparison = read_source(directory), compare_directories([directory])
    measure = Measure(comparison["summary"], comparison["metric"])
    compare = _declaration(source, measure, comparison["margin"])
    declared = {"compare": compare, "results": [{"path": target.name, "format": "table"}]}
    notes = _losses(source, measure)
    is_exploratory = comparison["standing"] == EXPLORATORY
    if is_exploratory:
        reasons = dict.fromkeys(reason for each in comparison["conditions"] for reason in each["standing_reasons"])
        notes.append(f"note: no lock is written, the comparison is exploratory: {'; '.join(reasons)}")
    command = shlex.join(["retrain", "compare", str(directory), "--export", str(target)])
    texts = {target: _csv_text(source, measure), file: _toml_text([f"Written by: {command}", *notes], declared)}
    if not is_exploratory:
        lock = Lock.of(ComparisonFile.model_validate(declared), _declaration_time(directory))
        texts[lock_path(file)] = dumps(lock.to_row(), indent=2) + "\n"
    try:
        for path, text in texts.items():
            write_text(path, text)
    except StorageError as error:
        raise UsageError(f"{error}; give another path") from error
    return [*map(str, texts), *notes]


def _declaration(source: Source, measure: Measure, margin: float | None) -> Row:
    """Return the section [compare] as plain data."""
    has_sets = len({name for run in source.runs for name in run.set_names}) > 1
    set_name = [measure.held_out or TRAINING] if has_sets or not measure.is_held_out else []
    metric, steps = "/".join([*set_name, _metric(measure)]), _max_steps(source)
    compare = {
        "metric": metric if measure.summary == "final" else f"{measure.summary}:{metric}",
        "higher_is_better": measure.higher_is_better or None,
        "unit": "share" if measure.is_share else "number",
        "baseline": condition_name(source.labels[0]),
        "conditions": [condition_name(label) for label in source.labels],
        "seeds": source.declared.get("seeds") or sorted({run.seed for run in source.runs}),
        "steps": steps.pop() if len(steps) == 1 else None,
        "equivalence_margin": margin,
    }
    return {key: value for key, value in compare.items() if value is not None}


def _max_steps(source: Source) -> set[int]:
    """Return the declared numbers of steps of all conditions."""
    return {*(source.declared.get("max_steps") or {}).values()}


def _metric(measure: Measure) -> str:
    """Return the name of the deciding metric in the table."""
    return measure.key.removeprefix(f"eval/{measure.held_out}/")


def _losses(source: Source, measure: Measure) -> list[str]:
    """Return notes on what the table cannot express of the campaign."""
    losses = []
    if source.rule.has_interim_analysis and interim_seeds(len({run.seed for run in source.runs})) is not None:
        losses.append("note: the table is judged without the campaign's interim analysis")
    vary = next((run.config["campaign"].get("vary") for run in source.runs if run.config.get("campaign")), "all")
    if vary not in (None, "all"):
        losses.append(f'note: the runs were trained with vary = "{vary}", which the table does not say')
    if not measure.is_held_out:
        losses.append(f"note: {measure.name} is a number of training: the table has one value for each run")
    if len(_max_steps(source)) > 1 and measure.summary != "auc":
        losses.append("note: conditions were declared with different numbers of steps: compare refuses the table")
    return losses


def _declaration_time(directory: Path) -> float:
    """Return the time of the campaign's line in the registry, else the time at which the campaign was first started."""
    manifest = read_manifest(directory)
    with suppress(ValueError):  # "on", "off" or none
        return datetime.fromisoformat(str(manifest.get("registry"))).timestamp()
    return float(manifest["created"])


def _csv_text(source: Source, measure: Measure) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in source.runs:
        state = run.state if run.state in ("done", "failed") else "unfinished"
        first = {"condition": condition_name(run.label), "run": run.run_id, "seed": run.seed, "state": state}
        rows = [*_numbers(run, measure), *_answers(run, measure)]
        if not rows and state == "failed":
            rows = [{"set": measure.held_out or TRAINING, "metric": _metric(measure)}]
        writer.writerows(first | row for row in rows)
    return text.getvalue()


def _numbers(run: RunResult, measure: Measure) -> Iterator[Row]:
    """Yield the accuracies and the values of the deciding metric in all evaluations."""
    times = _Times(run)
    for row in run.evaluations:
        name, step = str(row.get("name")), int(row["step"])
        metrics = {ACCURACY, _metric(measure)} if measure.held_out == name else {ACCURACY}
        for metric in sorted(metrics) if name in run.set_names else ():
            value = row.get(f"eval/{name}/{metric}")
            yield {"step": step, "set": name, "metric": metric, "value": value, "time": times(step)}
    value = run.value(measure)
    if not measure.is_held_out and value is not None:
        step = run.rows[-1]["step"] + 1
        yield {"step": step, "set": TRAINING, "metric": measure.key, "value": value, "time": times(step)}


def _answers(run: RunResult, measure: Measure) -> Iterator[Row]:
    """Yield the graded answers of the evaluations on which the deciding metric depends, and of the first. Yields none
    unless the metric is an accuracy (of all problems or of a tag) that equals the mean of the answers."""
    tag, _, metric = _metric(measure).rpartition("/")
    if metric != ACCURACY or problem_scores(run, measure) is None:
        return
    steps, times = {0, *run.weights(measure)}, _Times(run)
    for row in held_out_completions(run.path, measure.held_out):
        if row["step"] in steps and (not tag or tag in row["tags"]):
            yield {
                "step": row["step"], "set": row["name"], "metric": _metric(measure), "value": int(row["correct"]),
                "problem": row["problem_id"], "sample": row["sample"], "time": times(row["step"]),
            }  # fmt: skip


class _Times:
    """Times at which a run's evaluations ended (seconds since the epoch), by the spans of its steps, else the time of
    the file of evaluations."""

    def __init__(self, run: RunResult):
        self._spans: dict[int, list[float]] = {}
        for row in iter_jsonl(run.path / SPANS):
            self._spans[row["step"]] = [span["wall_end"] for span in row["spans"] if span["name"] == "eval"]
        self._latest: float | None = None
        with suppress(OSError):
            self._latest = (run.path / EVALS).stat().st_mtime

    def __call__(self, step: int) -> float | None:
        # Spans of a step include the evaluation after its update, and those of step 0 also the one before it
        ends = self._spans.get(max(step - 1, 0))
        time = ends[-1 if step else 0] if ends else self._latest
        return None if time is None else round(time, 3)


def _toml_text(comments: Sequence[str], declared: Values) -> str:
    results = [f"{key} = {toml(value)}" for key, value in declared["results"][0].items()]
    compare = document({"compare": declared["compare"]})
    return "\n".join([*(f"# {printable(line)}" for line in comments), compare, "[[results]]", *results]) + "\n"
