"""Cells of a table of results: which column holds which field of ``ResultRow``, and how its values are converted."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from retrain.errors import UsageError, listed, printable
from retrain.records.foreign.table import CORRECT, HELDOUT_SET, ReadRequest, ResultRow, RunState

Value = TypeVar("Value")

MOST_CONVERTED = 1 << 20  # Distinct values of a column whose conversion is remembered
MOST_NAMES, LONGEST_NAME = 20, 40  # Columns in a message
FIELDS = tuple(name for name in ResultRow._fields if name != "line")
STATES: Mapping[RunState, Sequence[str]] = {
    "done": ("done", "finished"),
    "failed": ("failed", "crashed", "killed"),
    "unfinished": ("unfinished", "running", "pending", "preempting", "preempted"),
    "unknown": ("unknown",),
}
# Unix times outside are elapsed seconds, or milliseconds
EARLIEST, LATEST = 1e9, 1e11

# Line numbers, and the values of each column in these lines
Batch = tuple[Sequence[int], Mapping[str, Sequence[object]]]


def as_number(raw: object) -> float | None:
    """Return a finite number; None for NaN, an empty text and null. Raises ValueError for anything else."""
    text = raw.strip().lower() if isinstance(raw, str) else raw
    if text in (None, "", "null"):
        return None
    if text in ("true", "false"):
        return float(text == "true")
    try:
        number = float(text)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError("which is not a number such as 0.5: leave the cell empty for a missing one") from None
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if math.isinf(number):
        raise ValueError("which is not finite")
    return None if math.isnan(number) else number


def as_integer(raw: object) -> int | None:
    if isinstance(raw, int) or (isinstance(raw, str) and raw.strip().isdecimal()):
        return int(raw)  # seeds may have more digits than a float
    number = as_number(raw)
    if number is not None and number != int(number):
        raise ValueError("which is no whole number")
    return None if number is None else int(number)


def as_text(raw: object) -> str | None:
    """Return the text of a value, None for null. Whole numbers have no decimal point: Parquet files that pandas writes
    hold 1.0 for 1 in columns with nulls."""
    if raw is None or raw == "" or raw != raw:
        return None
    if isinstance(raw, list | dict):
        raise ValueError("which is no text")
    return str(int(raw)) if isinstance(raw, float) and raw.is_integer() else str(raw)


def as_time(raw: object) -> float | None:
    """Return a Unix time; None for elapsed seconds. Times without a time zone are in UTC."""
    try:
        number = as_number(raw)
    except ValueError:
        try:
            at = raw if isinstance(raw, datetime) else datetime.fromisoformat(str(raw).strip())
        except ValueError:
            raise ValueError("which is no time in ISO 8601 or Unix seconds") from None
        number = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if number is not None and number > LATEST:
        raise ValueError("which is no time in seconds")
    return number if number is not None and number >= EARLIEST else None


def as_state(raw: object) -> RunState:
    text = (as_text(raw) or "unknown").lower()
    for state, names in STATES.items():
        if text in names:
            return state
    raise ValueError(f"which is no state: {', '.join(STATES)}")


def as_metric(raw: object) -> str:
    if (text := as_text(raw)) is None:
        raise ValueError("but every row needs the name of its metric")
    return text


CONVERSIONS: Mapping[str, Callable[[object], object]] = {
    "metric": as_metric,
    "value": as_number,
    "step": as_integer,
    "set": lambda raw: as_text(raw) or HELDOUT_SET,
    "problem": as_text,
    "sample": lambda raw: as_integer(raw) or 0,
    "condition": as_text,
    "run": as_text,
    "seed": as_integer,
    "state": as_state,
    "time": as_time,
}


class CellConverter(dict[object, Value], Generic[Value]):
    """Cache of converted values by raw value: a call of ``convert`` for every cell would take most of the time of a
    large table. Equal values become one object, which saves the memory of repeated texts."""

    def __init__(self, convert: Callable[[object], Value]):
        super().__init__()
        self.convert = convert

    def __missing__(self, raw: object) -> Value:
        if len(self) >= MOST_CONVERTED:
            self.clear()
        value = self[raw] = self.convert(raw)
        return value

    def column(self, path: Path, name: str, lines: Sequence[int], raw: Sequence[object]) -> list[Value]:
        """Return the converted values. Raises UsageError, with the line, for the first invalid one."""
        try:
            return list(map(self.__getitem__, raw))
        except (TypeError, ValueError):  # an invalid value, or a list or an object, which is not hashable
            for line, value in zip(lines, raw, strict=True):
                try:
                    self.convert(value)
                except ValueError as error:
                    text = printable(str(value))
                    raise UsageError(f'{path}:{line}  column "{name}" holds "{text}", {error}') from None
            raise


class TableLayout(NamedTuple):
    """Column of each field that a table has. ``metric``: name of the metric of all rows, if no column names it."""

    columns: Mapping[str, str]
    metric: str | None

    @property
    def is_wide(self) -> bool:
        """True if the value's column is named after its metric, so that other rows may hold other metrics."""
        return self.metric not in (None, "value", CORRECT)


def layout_of(path: Path, names: Sequence[str], request: ReadRequest) -> TableLayout:
    """Return the layout of a table with these columns. Raises UsageError for a column that is missing."""
    if unknown := next((field for field in request.columns if field not in FIELDS), None):
        raise UsageError(f'{path}: columns has no "{unknown}"; it has {", ".join(FIELDS)}')
    columns = {field: field for field in FIELDS if field in names} | dict(request.columns)
    is_long = "value" in request.columns or {"metric", "value"} <= columns.keys()
    if request.metric in names and not is_long:
        columns["value"] = str(request.metric)
        columns.pop("metric", None)
    columns.setdefault("value", CORRECT if CORRECT in names else "value")
    if missing := next((column for column in (*columns.values(), *request.where) if column not in names), None):
        raise _missing_column(path, missing, names, columns, request)
    return TableLayout(columns, None if "metric" in columns else columns["value"])


def _missing_column(
    path: Path, missing: str, names: Sequence[str], columns: Mapping[str, str], request: ReadRequest
) -> UsageError:
    """Return the error for a column that a table lacks, with the columns that it has and what to type."""
    short = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in names]
    field = next((field for field, column in columns.items() if column == missing), None)
    if field == "value" and "value" not in request.columns:
        free = next((name for name in reversed(short) if name and name not in columns.values()), "COLUMN")
        fix = f"Name the one that holds the values, such as --metric {shlex.quote(free)}"
    else:
        example = (
            f'where = {{ NAME = "{request.where[missing]}" }}' if field is None else f'columns = {{ {field} = "NAME" }}'
        )
        fix = f"Name the right one under [[results]], such as {example}"
    known = printable(listed(short, MOST_NAMES)) or "none"
    return UsageError(f'{path} has no column "{missing}"; it has {known}. {fix}')
