"""Describe what a key accepts, in words and as TOML, for error messages and the reference."""

import datetime
import json
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue

from retrain.config.base import (
    DEVICE_PATTERN,
    DEVICES_PATTERN,
    GPU_PATTERN,
    INT_MAX,
    PLUGIN_PATTERN,
    ConfigIssue,
    UnsupportedValues,
)

_PATTERNS = {
    DEVICE_PATTERN: '"auto", "cpu" or a GPU such as "gpu:0"',
    DEVICES_PATTERN: '"auto", "all", "cpu", a GPU such as "gpu:0" or a range of them such as "gpu:0-7"',
    GPU_PATTERN: 'GPUs such as "gpu:0"',
    PLUGIN_PATTERN: 'a "module:function" of your own',
}


def show(value: object, limit: int = 60) -> str:
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


KINDS: tuple[tuple[type | types.UnionType, str], ...] = (
    (bool, "a boolean"),
    (int | float, "a number"),
    (str, "a string"),
    (list, "a list"),
    (Mapping, "a table"),
    (datetime.date | datetime.time, "a date or time"),
)


def no_effect(key: str, other: str, value: object, fix: str = "remove the line") -> ConfigIssue:
    return ConfigIssue((key, other), f"has no effect with {other.rpartition('.')[2]} = {show(value)}", fix)


def kind(value: object) -> str:
    return next((words for types, words in KINDS if isinstance(value, types)), type(value).__name__)


def adapter_of(annotation: object, metadata: Sequence[object] = ()) -> TypeAdapter[object]:
    kind: Any = Annotated[annotation, "", *metadata]  # "": Annotated needs at least one argument
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def schema_of(annotation: object, metadata: Sequence[object] = ()) -> JsonSchemaValue:
    """Return the JSON schema of a type's values, after validators have converted other forms to them."""
    return adapter_of(annotation, metadata).json_schema(mode="serialization")


def choices(field: FieldInfo) -> list[str]:
    """Return all strings that a field with a fixed set of values accepts."""
    schema = schema_of(field.annotation, field.metadata)
    return [value for option in schema.get("anyOf", [schema]) for value in _values(option)]


def _values(schema: JsonSchemaValue) -> list[str]:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])


def expected(schema: JsonSchemaValue, plural: bool = False, limits: bool = False) -> str:
    """Return what a JSON schema accepts, such as ``an integer ≥ 1, or "auto"``; ``limits`` adds the largest integer."""
    if "anyOf" in schema:
        return ", or ".join(expected(option, plural, limits) for option in _options(schema["anyOf"]))
    if values := _values(schema):
        quoted = [f'"{value}"' for value in values]
        return quoted[0] if len(quoted) == 1 else "one of " + ", ".join(quoted)
    match schema.get("type"):
        case "array":
            return f"a list of {expected(schema['items'], plural=True, limits=limits)}"
        case "boolean":
            return "true or false"
        case "integer" | "number":
            return _expected_number(schema, plural, limits)
        case "string":
            return _expected_text(schema, plural)
    return "tables" if plural and "$ref" in schema else "a table"


def _options(schemas: Sequence[JsonSchemaValue]) -> list[JsonSchemaValue]:
    kinds = [schema.get("type") for schema in schemas]
    dropped = ("null", "integer") if "number" in kinds else ("null",)
    return [schema for schema in reversed(schemas) if schema.get("type") not in dropped]


def _expected_number(schema: JsonSchemaValue, plural: bool, limits: bool) -> str:
    number = schema["type"]
    ends = [(sign, schema[name]) for name, sign in SIGNS.items() if name in schema]
    bounds = [f"{sign} {end}" for sign, end in ends if limits or end not in LARGEST]
    word = f"{number}s" if plural else f"{'an' if number == 'integer' else 'a'} {number}"
    return f"{word} {' and '.join(bounds)}".rstrip()


def _expected_text(schema: JsonSchemaValue, plural: bool) -> str:
    if (pattern := schema.get("pattern")) in _PATTERNS:
        return _PATTERNS[pattern]
    return "strings" if plural else "a string that is not empty" if "minLength" in schema else "a string"


SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
LARGEST = (INT_MAX, 2**63 - 1)
"""Upper bounds that only keep integers within the range of arrays and random streams."""


def field_expected(field: FieldInfo, value: object = None) -> str:
    """Return what a field accepts; names the largest integer if ``value`` contains one that may exceed it."""
    values = value if isinstance(value, list) else [value]
    limits = any(type(item) is int and item > INT_MAX for item in values)
    return expected(schema_of(field.annotation, field.metadata), limits=limits)


def unsupported(field: FieldInfo, value: object) -> tuple[str, str] | None:
    """Return why a value of other tools is not supported and what to type instead, or None."""
    for item in field.metadata:
        if isinstance(item, UnsupportedValues) and isinstance(value, str):
            return item.values.get(value)
    return None


def accepts(field: FieldInfo, value: object) -> bool:
    try:
        adapter_of(field.annotation, field.metadata).validate_python(value)
    except ValidationError:
        return False
    return True


def default_of(field: FieldInfo) -> object:
    return None if field.is_required() else field.get_default(call_default_factory=True)  # type: ignore[call-arg]
