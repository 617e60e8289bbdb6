"""Graded answers in the JSON files of other tools: lines, numbers, keys of problems and indices of answers."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from retrain.errors import NotReadable, UsageError
from retrain.records.foreign.table import ResultRow
from retrain.records.schema.base import Row
from retrain.util.jsonl import parse_row


def first_row(path: Path) -> Row:
    """Return the object in the first line of a file; {} if the line is anything else."""
    try:
        with open(path, "rb") as file:
            return parse_row(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}


def begins_with(path: Path, text: str) -> bool:
    """Return whether a text stands in the first 4 KiB of a file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return text in file.read(4096)
    except OSError:
        return False


def json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line, object) for the lines of a file that are not blank. Raises UsageError if a line is no object."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parsed(line, path, number)
    except OSError as error:
        raise NotReadable(path, error) from error


def number(value: object, where: str) -> float | None:
    """Return a value of a file as a number; None, which means not graded, for null, NaN and infinities. ``where`` names
    file, line and key in the error for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise UsageError(f"{where} is {value!r:.80}, not a number")
    return float(value) if math.isfinite(value) else None


def content_key(content: object) -> str:
    """Return the key of a problem whose text is ``content``: the same for objects with the same keys in other order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def indexed_by_value(answers: Iterable[ResultRow]) -> Iterator[ResultRow]:
    """Yield the answers with ``sample`` set to the index among those to the same problem. They are sorted by value, so
    that the order of lines in the file does not matter; answers without a grade come last."""
    groups: dict[str | None, list[ResultRow]] = {}
    for answer in answers:
        groups.setdefault(answer.problem, []).append(answer)
    for group in groups.values():
        group.sort(key=lambda answer: (answer.value is None, answer.value or 0.0))
        yield from (answer._replace(sample=sample) for sample, answer in enumerate(group))


def _parsed(line: bytes, path: Path, number: int) -> Row:
    try:
        return parse_row(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}:{number} is no JSON object ({error}): remove that line, or the file") from error
