"""Results of verl 0.9.1: validation answers (``trainer.validation_data_dir``) and the logger ``file``.

``<step>.jsonl`` has a line for each answer, in random order, without its data source. An agent loop with several
outputs writes a line for each of them, all with the score of the session; their uid is
``<problem>_<session>_<index of the output>``. Sessions that fail have no line, while the logger counts them as wrong
(``acc``). Reopened by a resumed run, the logger's file begins anew.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.json_files import first_row, json_rows, numbers, problem_key, step_of
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, ReadRequest, ResultRow
from retrain.records.schema import layout
from retrain.records.schema.base import Row

ANSWER = frozenset({"input", "output", "score", "step"})  # Keys that a line of every answer has
NO_METRICS = frozenset({"input", "output", "gts", "step", "uid", "request_id"})
SESSION = re.compile(r"(.+_\d+)_(\d{1,9})")
VALIDATION = re.compile(r"val-(?:core|aux)/(.+)/([^/]+/[^/]+@\d+(?:/[^/]+)?)")  # Data source, metric
ACCURACY = MetricFacts(higher_is_better=True, unit="share")


def _recognises(path: Path) -> bool:
    row = first_row(path) if path.suffix == ".jsonl" else {}
    return row.keys() >= ANSWER or (row.keys() == {"step", "data"} and isinstance(row["data"], dict))


def _rows(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    return _answers(path, request) if first_row(path).keys() >= ANSWER else _logged(path, request)


def _answers(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    """Yield the values of the last output of every session, with the problem of its first output: later inputs may
    contain what the policy wrote. A metric that a line lacks was not graded."""
    sessions: dict[str, dict[int, ResultRow]] = {}
    values: dict[int, dict[str, float | None]] = {}
    for line, row in json_rows(path):
        if not row.keys() >= ANSWER:
            raise UsageError(f"{path}:{line} is no answer of verl, which has {', '.join(sorted(ANSWER))}")
        match = SESSION.fullmatch(str(row.get("uid")))
        session, index = (match[1], int(match[2])) if match else (str(line), 0)
        problem, step = problem_key([row["input"], row.get("gts")]), _step(path, line, row)
        answer = ResultRow("", None, step, problem=problem, sample=None, line=line)
        sessions.setdefault(session, {})[index] = answer
        items = ((name, value) for name, value in row.items() if name not in NO_METRICS)
        values[line] = dict(numbers(items, request, f"{path}:{line}"))
    metrics = sorted({name for of_line in values.values() for name, value in of_line.items() if value is not None})
    for outputs in sessions.values():
        first, last = outputs[min(outputs)], outputs[max(outputs)]
        for metric in metrics:
            yield last._replace(metric=metric, value=values[last.line].get(metric), problem=first.problem)


def _step(path: Path, line: int, row: Row) -> int:
    """Return the step of an answer, which an older file has in its name alone."""
    is_named = row["step"] is None and path.stem.isdecimal()
    return int(path.stem) if is_named else step_of(row, f"{path}:{line}")


def _logged(path: Path, request: ReadRequest) -> Iterator[ResultRow]:
    for line, row in json_rows(path, is_growing=True):
        step, data = step_of(row, f"{path}:{line}"), row.get("data")
        if not isinstance(data, dict):
            raise UsageError(f"{path}:{line} has no data: give the file of verl's logger")
        for key, content in data.items():
            source, name = _source_and_metric(key)
            for metric, value in numbers([(name, content)], request, f"{path}:{line}"):
                yield ResultRow(metric, value, step, source, line=line)


def _source_and_metric(key: str) -> tuple[str, str]:
    """Split a key of the logger: ``val-core/openai/gsm8k/acc/mean@4`` is ``acc/mean@4`` on ``openai/gsm8k``."""
    if match := VALIDATION.fullmatch(key):
        return match[1], match[2]
    return HELDOUT_SET if key.startswith("val-") else layout.TRAIN, key


FORMAT = Format(
    tool="verl",
    patterns=("*.jsonl",),
    recognises=_recognises,
    rows=_rows,
    facts=lambda path: dict.fromkeys(("acc", "acc/mean@*", "acc/best@*", "acc/worst@*", "acc/maj@*"), ACCURACY),
)
