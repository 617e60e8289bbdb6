"""Cells of a table of results: which column holds which field of ``ResultRow``, and how its values are converted.

Values are converted by the column, because a call of a Python function for every cell would take most of the time of a
large table.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from retrain.errors import UsageError, listed, printable
from retrain.records.foreign.table import CORRECT, HELDOUT_SET, Request, ResultRow, RunState

Value = TypeVar("Value")

MOST_CONVERTED = 1 << 20  # Distinct values of a column whose conversion is remembered
FIELDS = tuple(name for name in ResultRow._fields if name != "line")
MOST_NAMES, LONGEST_NAME = 20, 40  # Columns in a message
MISSING = object()  # A cell of a JSON object without the key
STATES: Mapping[str, RunState] = {
    "done": "done",
    "finished": "done",
    "failed": "failed",
    "crashed": "failed",
    "unfinished": "unfinished",
    "running": "unfinished",
    "unknown": "unknown",
}
# Unix times outside are elapsed seconds, or milliseconds
EARLIEST, LATEST = 1e9, 1e11

# Line numbers, and the values of each column in these lines
Batch = tuple[Sequence[int], Mapping[str, Sequence[object]]]


def is_empty(raw: object) -> bool:
    return raw is None or raw is MISSING or (isinstance(raw, str) and raw.strip().lower() in ("", "null"))


def as_number(raw: object) -> float | None:
    """Return a finite number; None for NaN, an empty text and null. Raises ValueError for anything else."""
    if is_empty(raw):
        return None
    if isinstance(raw, str) and raw.strip().lower() in ("true", "false"):
        return float(raw.strip().lower() == "true")
    try:
        number = float(raw)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ValueError("which is no number such as 0.5: leave the cell empty for a missing one") from None
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
    if raw is None or raw is MISSING or raw == "" or raw != raw:
        return None
    if isinstance(raw, list | dict):
        raise TypeError("which is no text")
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
    if text not in STATES:
        raise ValueError(f"which is no state: {', '.join(STATES)}")
    return STATES[text]


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


class Converted(dict[object, Value], Generic[Value]):
    """Converted values by the raw ones. Equal values become one object, which saves the memory of repeated texts."""

    def __init__(self, convert: Callable[[object], Value]):
        super().__init__()
        self.convert = convert

    def __missing__(self, raw: object) -> Value:
        if len(self) >= MOST_CONVERTED:
            self.clear()
        value = self[raw] = self.convert(raw)
        return value

    def column(self, raw: Sequence[object], path: Path, name: str, lines: Sequence[int]) -> list[Value]:
        """Return the converted values. Raises UsageError, with the line, for the first invalid one."""
        try:
            return list(map(self.__getitem__, raw))
        except (TypeError, ValueError):  # an invalid value, or one that is not hashable
            values, line, value = list[Value](), 0, None
            try:
                for line, value in zip(lines, raw, strict=True):  # noqa: B007
                    values.append(self.convert(value))
            except (TypeError, ValueError) as error:
                raise UsageError(f'{path}:{line}  column "{name}" holds "{printable(str(value))}", {error}') from None
            return values


class Layout(NamedTuple):
    """Column of each field that a table has. ``metric``: name of the metric of all rows, if no column names it.
    ``is_wide``: the value's column is named after its metric, and other rows may hold other metrics."""

    columns: Mapping[str, str]
    metric: str | None
    is_wide: bool


def layout_of(path: Path, names: Iterable[str], request: Request) -> Layout:
    """Return the layout of a table with these columns. Raises UsageError for a column that is missing."""
    names = list(names)
    if unknown := next((field for field in request.columns if field not in FIELDS), None):
        raise UsageError(f'{path}: columns has no "{unknown}"; it has {", ".join(FIELDS)}')
    columns = {field: field for field in FIELDS if field in names} | dict(request.columns)
    is_long = "value" in request.columns or {"metric", "value"} <= columns.keys()
    wide = request.column or request.metric
    if wide in names and not is_long:
        columns["value"] = str(wide)
        columns.pop("metric", None)
    elif CORRECT in names:
        columns.setdefault("value", CORRECT)
    columns.setdefault("value", "value")
    free = next((name for name in reversed(names) if name and name not in columns.values()), "NAME")
    examples = {column: f'columns = {{ {field} = "{free}" }}' for field, column in columns.items()}
    examples |= {column: f'where = {{ "{free}" = "…" }}' for column in request.where}
    for column, example in examples.items():
        if column not in names:
            known = listed(
                [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in names], MOST_NAMES
            )
            if request.column is None and request.columns.get("value") is None and columns["value"] == column:
                fix = f"Name the one that holds the values, such as --metric {free:.{LONGEST_NAME}}"
            else:
                fix = f"Name the right one under [[results]], such as {example:.200}"
            raise UsageError(f'{path} has no column "{column}"; it has {printable(known) or "none"}. {fix}')
    metric = None if "metric" in columns else columns["value"]
    return Layout(columns, metric, is_wide=metric not in (None, "value", CORRECT))


def matches(wanted: object, raw: object) -> bool:
    """Return whether a cell holds a value of ``Request.where``, which is text in CSV files."""
    if isinstance(wanted, str):
        return as_text(raw) == wanted
    try:
        return (as_number(raw) if isinstance(wanted, bool | float) else as_integer(raw)) == wanted
    except ValueError:
        return False
