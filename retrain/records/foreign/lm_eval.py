"""Evaluations by lm-eval (lm-evaluation-harness) 0.4: ``results_<time>.json`` and ``samples_<task>_<time>.jsonl``.

A metric is named with the filter that extracted the answers: ``exact_match,strict``. The filter may be omitted if a
task has only one. The seeds in the files belong to the evaluation, so they are not read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.answers import json_rows, number
from retrain.records.foreign.json_files import first_bytes, json_object, names_in_rows
from retrain.records.foreign.table import Format, MetricFacts, Request, ResultRow
from retrain.records.schema.base import Row, Values

TIME = r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?"
SAMPLES = re.compile(rf"samples_(?P<task>.+)_(?P<time>{TIME})\.jsonl")
RESULTS_START = re.compile(rb'\s*\{\s*"results":\s*\{.*"alias":', re.DOTALL)
SAMPLES_START = re.compile(rb'\{"doc_id": ?\d+, ?"doc":')
SHARES = re.compile(r"exact_match|(.*_)?acc(_.*)?")  # Metrics with values from 0 to 1


def recognises(path: Path) -> bool:
    start = SAMPLES_START if path.suffix == ".jsonl" else RESULTS_START
    return path.suffix in (".json", ".jsonl") and start.match(first_bytes(path)) is not None


def rows(path: Path, request: Request) -> Iterator[ResultRow]:
    results = _results(path)
    read = _answers if path.suffix == ".jsonl" else _numbers
    model, date = results.get("model_name"), results.get("date")
    time = float(date) if isinstance(date, int | float) else None
    for row in read(path, request.metric):
        yield row._replace(condition=str(model) if model else None, state="done", time=time)


def _numbers(path: Path, requested: str | None) -> Iterator[ResultRow]:
    tasks = _results(path).get("results")
    if not isinstance(tasks, dict):
        raise UsageError(f'{path} has no object "results"')
    for task, values in tasks.items():
        metrics = {key: value for key, value in values.items() if _is_metric(key) and isinstance(value, int | float)}
        for key, name in names_in_rows(metrics, requested, _without_filter, f"{path}, task {task}").items():
            yield ResultRow(name, number(metrics[key], f"{path}, {key}"), set=task)


def _answers(path: Path, requested: str | None) -> Iterator[ResultRow]:
    match = SAMPLES.fullmatch(path.name)
    task = match["task"] if match else path.stem
    found: dict[str, None] = {}
    for line, document in json_rows(path):
        grades = _grades(document, path, line)
        found.update(dict.fromkeys(grades))
        names = names_in_rows(found, requested, _without_filter, path)
        problem = f"{document['doc_hash']}:{document['doc_id']}"
        for metric, value in grades.items():
            if metric in names:
                yield ResultRow(names[metric], value, set=task, problem=problem, line=line)


def _grades(document: Row, path: Path, line: int) -> dict[str, float | None]:
    """Return the metrics of a document that have one number for each answer."""
    try:
        values = {f"{metric},{document['filter']}": document[metric] for metric in document["metrics"]}
        _ = document["doc_hash"], document["doc_id"]
    except (KeyError, TypeError):
        raise UsageError(
            f"{path}:{line}  lacks doc_id, doc_hash, filter or metrics: write it with lm-eval 0.4 and --log_samples"
        ) from None
    return {
        name: number(value, f"{path}:{line}, {name}")
        for name, value in values.items()
        if value is None or isinstance(value, int | float)
    }


def _results(path: Path) -> Row:
    """Return the content of the results file, or of that which was written together with a samples file; {} if that is
    missing."""
    if match := SAMPLES.fullmatch(path.name):
        path = path.with_name(f"results_{match['time']}.json")
        return json_object(path) if path.is_file() else {}
    return json_object(path) if path.suffix == ".json" else {}


def _is_metric(key: str) -> bool:
    return "," in key and not key.partition(",")[0].endswith("_stderr")


def _without_filter(name: str) -> tuple[str]:
    return (name.partition(",")[0],)


def facts(path: Path) -> Mapping[str, MetricFacts]:
    """Return the direction of the metrics, which is left open where two tasks contradict each other."""
    found: dict[str, MetricFacts] = {}
    for directions in _results(path).get("higher_is_better", {}).values():
        for metric, is_higher in directions.items():
            fact = MetricFacts(is_higher, "share" if SHARES.fullmatch(metric) else None)
            agrees = found.get(metric, fact) == fact
            found[metric] = found[f"{metric},*"] = fact if agrees else fact._replace(higher_is_better=None)
    return found


def config(path: Path) -> Values:
    results = _results(path)
    names = ("model_name", "config", "n-shot", "versions", "task_hashes", "lm_eval_version")
    return {name: results[name] for name in names if name in results}


FORMAT = Format(
    "lm-eval",
    ("results_*.json", "samples_*.jsonl", "*_20*T*.json", "**/results_*.json", "**/samples_*.jsonl"),
    recognises,
    rows,
    facts=facts,
    config=config,
    names_models=True,
)
