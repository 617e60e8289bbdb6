"""Evaluations by lm-eval (lm-evaluation-harness) 0.4: ``results_<time>.json`` and ``samples_<task>_<time>.jsonl``.

A metric is named with the filter that extracted the answers: ``exact_match,strict``. Condition and seed are those in
the model's name (``org/grpo-s1``). The seeds in the files belong to the evaluation, so they are not read.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign import condition_and_seed
from retrain.records.foreign.json_files import first_bytes, json_object, json_rows, number, numbers
from retrain.records.foreign.table import Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.schema.base import Row

SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
RESULTS_START = re.compile(rb'\s*\{\s*"results":\s*\{.*"alias":', re.DOTALL)
SAMPLES_START = re.compile(rb'\{"doc_id": ?\d+, ?"doc":')


def _recognises(path: Path) -> bool:
    start = SAMPLES_START if path.suffix == ".jsonl" else RESULTS_START
    return path.suffix in (".json", ".jsonl") and start.match(first_bytes(path)) is not None


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    results = _results(path)
    model, date = results.get("model_name"), results.get("date")
    condition, seed = condition_and_seed(str(model)) if model else (None, None)
    time = number(date, "") if isinstance(date, int | float) else None
    for row in _answers(path, request) if path.suffix == ".jsonl" else _numbers(path, results, request):
        yield row._replace(condition=condition, seed=seed, state="done", time=time)


def _numbers(path: Path, results: Row, request: ReadRequest) -> Iterator[ResultRow]:
    tasks = results.get("results")
    if not isinstance(tasks, dict) or not all(isinstance(values, dict) for values in tasks.values()):
        raise UsageError(f'{path} has no object "results" with the metrics of tasks: name a file that lm-eval wrote')
    for task, values in tasks.items():
        metrics = {key: value for key, value in values.items() if "," in key and "_stderr," not in key}
        for metric, value in numbers(metrics.items(), request, f"{path}, task {task}"):
            yield ResultRow(metric, value, set=task)


def _answers(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield the metrics of every document that have one number for each answer."""
    match = SAMPLES.fullmatch(path.name)
    task = match["task"] if match else path.stem
    for line, document in json_rows(path):
        try:
            problem = f"{document['doc_hash']}:{document['doc_id']}"
            values = {f"{metric},{document['filter']}": document[metric] for metric in document["metrics"]}
        except (KeyError, TypeError):
            raise UsageError(
                f"{path}:{line} lacks doc_id, doc_hash, filter or metrics: write it with lm-eval 0.4 and --log_samples"
            ) from None
        for metric, value in numbers(values.items(), request, f"{path}:{line}"):
            yield ResultRow(metric, value, set=task, problem=problem, line=line)


def _results(path: Path) -> Row:
    """Return the content of the results file, or of that which was written together with a samples file; {} if that is
    missing."""
    if path.suffix == ".json":
        return json_object(path)
    match = SAMPLES.fullmatch(path.name)
    path = path.with_name(f"results_{match['time']}.json") if match else path
    return json_object(path) if match and path.is_file() else {}


def _facts(path: Path) -> Mapping[str, MetricFacts]:
    tasks = _results(path).get("higher_is_better")
    directions = [
        of_task for of_task in (tasks.values() if isinstance(tasks, dict) else ()) if isinstance(of_task, dict)
    ]
    return {f"{name},*": MetricFacts(is_higher) for of_task in directions for name, is_higher in of_task.items()}


FORMAT = Format(
    tool="lm-eval",
    patterns=("results_*.json", "samples_*.jsonl", "*_20*T*.json", "**/results_*.json", "**/samples_*.jsonl"),
    recognises=_recognises,
    rows=_rows,
    facts=_facts,
)
