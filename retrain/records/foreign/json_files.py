"""JSON documents and JSON lines of other tools, with the errors that name file and line."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from retrain.errors import NotReadable, UsageError, first_line
from retrain.files import read_json
from retrain.records.foreign.table import ReadRequest
from retrain.records.schema.base import Row
from retrain.util.jsonl import LONGEST_LINE, parse_row

FIRST_BYTES = 4096
LARGEST = 1 << 30  # Bytes of a document, which takes several times as much memory


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, without a byte-order mark; none if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(FIRST_BYTES).removeprefix(b"\xef\xbb\xbf")
    except OSError:
        return b""


def first_row(path: Path) -> Row:
    """Return the object in the first line of a file; {} if the line is anything else."""
    try:
        with open(path, "rb") as file:
            return parse_row(file.readline(LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return {}


def json_document(path: Path) -> Any:
    try:
        if path.stat().st_size > LARGEST:
            raise UsageError(
                f"{path} is larger than {LARGEST >> 20:,} MiB: give a path that excludes it, or write a table of it"
            )
        return read_json(path)
    except OSError as error:
        raise NotReadable(path, error) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}): restore the file, or give a path that excludes it") from error


def json_object(path: Path) -> Row:
    content = json_document(path)
    if not isinstance(content, dict):
        raise UsageError(f"{path} is no JSON object: restore the file, or give a path that excludes it")
    return content


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for the lines of a file. Raises UsageError for a line that is longer than LONGEST_LINE."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), start=1):
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    raise UsageError(
                        f"{path}:{number} is longer than {LONGEST_LINE >> 20} MiB: give a path that excludes it"
                    )
                yield number, line
    except OSError as error:
        raise NotReadable(path, error) from error


def json_rows(path: Path, is_growing: bool = False) -> Iterator[tuple[int, Row]]:
    """Yield (line, object) for the lines of a file that are not blank. Raises UsageError if a line is no object.

    ``is_growing`` leaves out an incomplete last line, which the tool may be writing.
    """
    for number, line in numbered_lines(path):
        if not line.isspace() and (line.endswith(b"\n") or not is_growing):
            yield number, json_row(path, number, line)


def json_row(path: Path, number: int, line: str | bytes) -> Row:
    try:
        return parse_row(line)
    except (ValueError, RecursionError) as error:
        fix = "remove that line, or the file"
        raise UsageError(f"{path}:{number} is no JSON object ({first_line(error)}): {fix}") from error


def step_of(row: Row, where: str) -> int:
    """Return the number of updates in a line. Raises UsageError if it is missing; ``where`` begins the message."""
    if not isinstance(step := row.get("step"), int):
        raise UsageError(f"{where}: step is {step!r:.80}, which is not an integer")
    return step


def number(value: object, where: str) -> float | None:
    """Return a value of a file as a number; None, which means not graded, for null, NaN and infinities. Raises
    UsageError, which begins with ``where``, for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise UsageError(f"{where} is {value!r:.80}, which is not a number: give another metric")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the largest float
        return None


def numbers(
    values: Iterable[tuple[str, object]], request: ReadRequest, where: str
) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of the requested metrics among (name, value). Texts, lists and objects are left out, unless
    the request names them."""
    for name, value in values:
        if name == request.metric or (request.needs(name) and isinstance(value, int | float | None)):
            yield name, number(value, f"{where}: {name}")


def problem_key(content: object) -> str:
    """Return the key of a problem whose text is ``content``: the same for objects with the same keys in other order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
