"""Check the values of a JSON line, which may be damaged."""

from collections.abc import Callable, Mapping
from typing import TypeGuard

from retrain.records.schema.base import Row

LARGEST = 1e300  # Larger absolute values are rejected: they are no measurements, and sums of them may overflow

Kind = Callable[[object], bool]
FieldKinds = Mapping[Kind, str]  # From a check to the names of the fields that must pass it, separated by blanks


def is_anything(value: object) -> bool:
    return True


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -LARGEST < value < LARGEST


def are_numbers(value: object) -> bool:
    return isinstance(value, list) and all(item is None or is_number(item) for item in value)


def is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 40


def is_text(value: object) -> bool:
    return isinstance(value, str)


def are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


DESCRIPTIONS: Mapping[Kind, str] = {
    is_number: "a finite number",
    are_numbers: "a list of numbers, null where there is none",
    is_count: "a whole number from 0 to 2⁴⁰",
    is_text: "a text",
    are_texts: "a list of texts",
    is_object: "an object",
    are_objects: "a list of objects",
}


def checked(row: object, required: FieldKinds, optional: FieldKinds | None = None) -> Row:
    """Return ``row`` if every field passes its check. ``optional`` fields may also be null or missing. Raises a
    ValueError with the name of the first field that fails."""
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    for kinds, are_required in ((required, True), (optional or {}, False)):
        for kind, names in kinds.items():
            for name in names.split():
                if are_required and name not in row:
                    raise ValueError(f"it has no {name}")
                if (are_required or row.get(name) is not None) and not kind(row[name]):
                    raise ValueError(f"{name} is not {DESCRIPTIONS[kind]}")
    return row
