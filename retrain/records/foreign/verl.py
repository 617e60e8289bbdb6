"""Results of verl 0.9.1: validation answers (``trainer.validation_data_dir``) and the logger ``file``.

``<step>.jsonl`` has a line for each answer, sorted by a random uid, without its data source. An agent loop with several
outputs writes a line for each of them, all with the score of the session; their uid is
``<problem>_<session>_<index of the output>``. Sessions that fail have no line, while the logger counts them as wrong
(``acc``). Reopened by a resumed run, the logger's file begins anew.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from retrain.errors import UsageError, first_line
from retrain.records.foreign import numbers
from retrain.records.foreign.table import HELDOUT_SET, Format, MetricFacts, Request, ResultRow
from retrain.records.schema import layout
from retrain.records.schema.base import Row
from retrain.util.jsonl import LONGEST_LINE, parse_row

ANSWER = frozenset({"input", "output", "score", "step"})  # Keys that a line of every answer has
NO_METRICS = frozenset({"input", "output", "gts", "step", "uid", "request_id"})
RANDOM = frozenset({"uid", "request_id"})
SESSION = re.compile(r"(.+_\d+)_(\d+)")
VALIDATION = re.compile(r"val-(?:core|aux)/(.+)/([^/]+/[^/]+@\d+(?:/[^/]+)?)")  # Data source, metric
ACCURACY = MetricFacts(higher_is_better=True, unit="share")


class Answer(NamedTuple):
    problem: str
    # Hash of the line without its random parts, by which the answers to one problem are sorted
    digest: str
    step: int | None
    values: dict[str, float | None]
    line: int


def _rows(path: Path, request: Request) -> Iterator[ResultRow]:
    if not _is_answer(_first(path)):
        yield from _logged(path, request)
        return
    answers = sorted(_answers(path, request), key=lambda answer: (answer.problem, answer.digest))
    metrics = sorted({metric for answer in answers for metric, value in answer.values.items() if value is not None})
    samples = Counter[str]()
    for answer in answers:
        for metric in metrics:
            yield ResultRow(
                metric, answer.values.get(metric), answer.step, problem=answer.problem, line=answer.line,
                sample=samples[answer.problem],
            )  # fmt: skip
        samples[answer.problem] += 1


def _answers(path: Path, request: Request) -> Iterator[Answer]:
    """Yield the last output of every session, with the problem of its first output: later inputs may contain what the
    policy wrote."""
    sessions: dict[str, dict[int, Answer]] = {}
    for line, row in _lines(path):
        if not _is_answer(row):
            raise UsageError(f"{path}:{line} is no answer of verl, which has {', '.join(sorted(ANSWER))}")
        match = SESSION.fullmatch(str(row.get("uid")))
        session, index = (match[1], int(match[2])) if match else (str(line), 0)
        sessions.setdefault(session, {})[index] = _answer(path, line, row, request)
    for outputs in sessions.values():
        yield outputs[max(outputs)]._replace(problem=outputs[min(outputs)].problem)


def _answer(path: Path, line: int, row: Row, request: Request) -> Answer:
    items = ((name, value) for name, value in row.items() if name not in NO_METRICS)
    values = dict(numbers(items, request.metric, f"{path}:{line}"))
    problem = _digest([row["input"], row.get("gts")])[:16]
    content = _digest({name: value for name, value in row.items() if name not in RANDOM})
    return Answer(problem, content, _step(path, line, row), values, line)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _step(path: Path, line: int, row: Row) -> int | None:
    step = row.get("step")
    if step is None and path.stem.isdecimal():
        return int(path.stem)
    if not isinstance(step, int):
        raise UsageError(f"{path}:{line}: step is {step!r}, which is no number of updates")
    return step


def _logged(path: Path, request: Request) -> Iterator[ResultRow]:
    for line, row in _lines(path, is_growing=True):
        step, data = _step(path, line, row), row.get("data")
        if not isinstance(data, dict):
            raise UsageError(f"{path}:{line} has no data: give the file of verl's logger")
        for key, content in data.items():
            source, name = _source_and_metric(key)
            for metric, value in numbers([(name, content)], request.metric, f"{path}:{line}"):
                yield ResultRow(metric, value, step, source, line=line)


def _source_and_metric(key: str) -> tuple[str, str]:
    """Split a key of the logger: ``val-core/openai/gsm8k/acc/mean@4`` is ``acc/mean@4`` on ``openai/gsm8k``."""
    if match := VALIDATION.fullmatch(key):
        return match[1], match[2]
    return HELDOUT_SET if key.startswith("val-") else layout.TRAIN, key


def _lines(path: Path, is_growing: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield (number, object) of each line. An incomplete last line of a file that is growing is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if is_growing and not line.endswith(b"\n"):
                return
            try:
                yield number, parse_row(line)
            except (ValueError, RecursionError) as error:
                advice = "remove the file if verl was stopped while it wrote it"
                raise UsageError(f"{path}:{number} is no JSON object ({first_line(error)}): {advice}") from error


def _first(path: Path) -> Row:
    with open(path, "rb") as file:
        try:
            return parse_row(file.readline(LONGEST_LINE))
        except (ValueError, RecursionError):
            return {}


def _is_answer(row: Row) -> bool:
    return row.keys() >= ANSWER


def _recognises(path: Path) -> bool:
    row = _first(path) if path.suffix == ".jsonl" else {}
    return _is_answer(row) or (row.keys() == {"step", "data"} and isinstance(row["data"], dict))


FORMAT = Format(
    tool="verl",
    patterns=("*.jsonl",),
    recognises=_recognises,
    rows=_rows,
    facts=lambda path: dict.fromkeys(("acc", "acc/mean@*", "acc/best@*", "acc/worst@*", "acc/maj@*"), ACCURACY),
)
