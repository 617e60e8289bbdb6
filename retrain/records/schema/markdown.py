"""The tables of ``docs/outputs.md``: the declared types, with the docstrings of their fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import TypeAdapter

from retrain.records.schema.base import Record, Row
from retrain.records.schema.campaign import CampaignManifest, CheckpointFiles, RunEntry
from retrain.records.schema.comparison import Comparison, ConditionComparison, SecondaryComparison
from retrain.records.schema.events import EVENTS, Event
from retrain.records.schema.layout import RUN_FILES

TABLES: Mapping[str, type[Record]] = {
    record.__name__: record
    for record in (
        *(file.row for file in RUN_FILES if file.row is not None),
        CheckpointFiles, RunEntry, CampaignManifest, Comparison, ConditionComparison, SecondaryComparison,
    )
}  # fmt: skip
REGION = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Return a page whose regions ``<!-- table NAME -->`` to ``<!-- end -->`` hold the table of that type; that of
    ``Events`` holds all events."""
    return REGION.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n{match[3]}", text)


def _table(name: str) -> str:
    if name == "Events":
        rows = [_event_row(event) for event in EVENTS]
        return _lines(("`event`", "what has happened", "further keys"), rows)
    rows = [_field_row(key, schema) for key, schema in _fields(TABLES[name]).items()]
    return _lines(("key", "value", "meaning"), rows)


def _lines(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _fields(record: type[Record]) -> dict[str, Row]:
    """Return the JSON schema of each field. Pydantic reads docstrings of a class's own fields only."""
    schemas: dict[str, Row] = {}
    for cls in reversed(record.__mro__):
        if issubclass(cls, Record):
            for key, schema in TypeAdapter(cls).json_schema().get("properties", {}).items():
                schemas.setdefault(key, schema)
    return schemas


def _field_row(key: str, schema: Row) -> tuple[str, str, str]:
    return f"`{key}`", _kind(schema), " ".join(schema["description"].split())


def _event_row(event: type[Event]) -> tuple[str, str, str]:
    keys = "; ".join(f"`{key}`: {schema['description']}".rstrip(".") for key, schema in _fields(event).items())
    return f"`{event.event}`", (event.__doc__ or "").strip(), keys


def _kind(schema: Row) -> str:
    """Return the kind of a value in words."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        if "items" not in schema:
            return "pair of integers"
        kind, _, of_what = _kind(schema["items"]).partition(" ")
        return f"list of {kind}s {of_what}".rstrip()
    return schema.get("type", "object")
