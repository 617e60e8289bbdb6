"""Checks of the values of a JSON line that may be damaged."""

from collections.abc import Callable, Mapping
from typing import TypeGuard

from retrain.records.schema.base import Row

LARGEST = 1e300  # Amounts beyond it are no measurement, and their sums no float

Kind = Callable[[object], bool]
Wanted = Mapping[Kind, str]  # Names of fields by what they should be, separated by blanks


def anything(value: object) -> bool:
    """Anything."""
    return True


def number(value: object) -> TypeGuard[float]:
    """A finite number."""
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


def numbers(value: object) -> bool:
    """A list of numbers, null where there is none."""
    return isinstance(value, list) and all(each is None or number(each) for each in value)


def count(value: object) -> bool:
    """A whole number from 0 to 2⁴⁰."""
    return isinstance(value, int) and 0 <= value < 1 << 40


def text(value: object) -> bool:
    """A text."""
    return isinstance(value, str)


def texts(value: object) -> bool:
    """A list of texts."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def table(value: object) -> bool:
    """An object."""
    return isinstance(value, dict)


def tables(value: object) -> bool:
    """A list of objects."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def checked(row: object, needed: Wanted, optional: Wanted | None = None) -> Row:
    """Return the row if these fields are of their kinds; ``optional`` ones may also be null or missing. Raises
    ValueError that names the first that is not."""
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    for kind, names in needed.items():
        for name in names.split():
            if name not in row:
                raise ValueError(f"it has no {name}")
            _check(name, row[name], kind)
    for kind, names in (optional or {}).items():
        for name in names.split():
            if row.get(name) is not None:
                _check(name, row[name], kind)
    return row


def _check(name: str, value: object, kind: Kind) -> None:
    if not kind(value):
        words = (kind.__doc__ or "").rstrip(".")
        raise ValueError(f"{name} is not {words[0].lower()}{words[1:]}")
