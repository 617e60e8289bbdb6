"""Describe what a key accepts, in words and as TOML, for error messages and the reference."""

import datetime
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from retrain.config.base import (
    DEVICE_PATTERN,
    DEVICES_PATTERN,
    GPU_PATTERN,
    INT_MAX,
    PLUGIN_PATTERN,
    ConfigIssue,
    Section,
    UnsupportedValues,
)

NUMBER_WORDS = {int: "an integer", float: "a number"}
_PATTERNS = {
    DEVICE_PATTERN: '"auto", "cpu" or a GPU such as "gpu:0"',
    DEVICES_PATTERN: '"auto", "all", "cpu", a GPU such as "gpu:0" or a range of them such as "gpu:0-7"',
    GPU_PATTERN: 'GPUs such as "gpu:0"',
    PLUGIN_PATTERN: 'a "module:function" of your own',
}


def show(value: object, limit: int = 60) -> str:
    """Return ``value`` as TOML, shortened to ``limit`` characters."""
    text = toml(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = _pairs(value)
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    return str(value)


def document(data: Mapping[str, object]) -> str:
    """Return sections and their keys as a TOML file, without keys that are None."""
    loose = _pairs({name: value for name, value in data.items() if not isinstance(value, Mapping)})
    tables = [[f"[{_name(name)}]", *_pairs(table)] for name, table in data.items() if isinstance(table, Mapping)]
    return "\n\n".join("\n".join(lines) for lines in [loose, *tables] if lines) + "\n"


def _pairs(table: Mapping[str, object]) -> list[str]:
    return [f"{_name(key)} = {toml(value)}" for key, value in table.items() if value is not None]


def _name(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "a boolean"),
    (int | float, "a number"),
    (str, "a string"),
    (list, "a list"),
    (Mapping, "a table"),
    (datetime.date | datetime.time, "a date or time"),
)


def no_effect(key: str, other: str, value: object, fix: str = "remove the line") -> ConfigIssue:
    """Return the issue that ``key`` has no effect while the key ``other`` has this value."""
    return ConfigIssue((key, other), f"has no effect with {other.rpartition('.')[2]} = {show(value)}", fix)


def kind(value: object) -> str:
    return next((words for types, words in KINDS if isinstance(value, types)), type(value).__name__)


def choices(field: FieldInfo) -> list[str]:
    """Return all strings that a field with a fixed set of values accepts."""
    return [value for value in _literals(field.annotation) if isinstance(value, str)]


def _literals(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is not list:
        for part in get_args(annotation):
            yield from _literals(part)


def expected(annotation: Any, metadata: Sequence[object] = (), plural: bool = False, limits: bool = False) -> str:
    """Return what a type accepts, such as ``an integer ≥ 1, or "auto"``; ``limits`` adds the largest integer."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return expected(inner, [*_flat(more), *metadata], plural, limits)
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        parts = [part for part in parts if not (part is int and float in parts)]
        # Bounds on a union apply to its numbers.
        return ", or ".join(expected(part, metadata, plural, limits) for part in reversed(parts))
    if origin is Literal:
        values = [f'"{value}"' for value in get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if origin is list:
        return f"a list of {expected(get_args(annotation)[0], plural=True, limits=limits)}"
    if annotation is bool:
        return "true or false"
    if annotation in NUMBER_WORDS:
        article, word = NUMBER_WORDS[annotation].split()
        return f"{f'{word}s' if plural else f'{article} {word}'} {bound(metadata, limits)}".rstrip()
    if annotation is str:
        for item in metadata:
            if (pattern := getattr(item, "pattern", None)) in _PATTERNS:
                return _PATTERNS[pattern]
        return "strings" if plural else "a string that is not empty" if bound(metadata) else "a string"
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return "tables" if plural and is_section else "a table"


def _flat(metadata: Sequence[object]) -> Iterator[object]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
LARGEST = (INT_MAX, 2**63 - 1)
"""Upper bounds that only keep integers within the range of arrays and random streams."""


def bound(metadata: Sequence[object], limits: bool = False) -> str:
    """Return the bounds in a field's metadata, such as ``≥ 0 and < 1``; ``limits`` includes those in ``LARGEST``."""
    bounds = []
    for item in _flat(metadata):
        for name, sign in SIGNS.items():
            end = getattr(item, name, None)
            if end is not None and (limits or name != "le" or end not in LARGEST):
                bounds.append(f"{sign} {end}")
        if isinstance(item, annotated_types.MinLen):
            bounds.append("not empty")
    return " and ".join(bounds)


def field_expected(field: FieldInfo, value: object = None) -> str:
    """Return what a field accepts; names the largest integer if ``value`` contains one that may exceed it."""
    values = value if isinstance(value, list) else [value]
    return expected(field.annotation, field.metadata, limits=any(type(v) is int and v > INT_MAX for v in values))


def unsupported(field: FieldInfo, value: object) -> tuple[str, str] | None:
    """Return why a value of other tools is not supported and what to type instead, or None."""
    for item in field.metadata:
        if isinstance(item, UnsupportedValues) and isinstance(value, str):
            return item.values.get(value)
    return None


def accepts(field: FieldInfo, value: object) -> bool:
    kind = Annotated[field.annotation, "", *field.metadata]  # "" because it takes one at least
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


def default_of(field: FieldInfo) -> Any:
    """Return the field's default; None also if it has none."""
    return None if field.is_required() else field.get_default(call_default_factory=True)  # type: ignore[call-arg]
