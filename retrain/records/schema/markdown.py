"""The tables of ``docs/outputs.md``: the declared types, with the docstrings of their fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import TypeAdapter

from retrain.records.schema.base import Record, Row
from retrain.records.schema.campaign import CampaignManifest, CheckpointFiles, RunEntry
from retrain.records.schema.comparison import Comparison, ConditionComparison, SecondaryComparison
from retrain.records.schema.events import EVENTS
from retrain.records.schema.rows import (
    Checkpoint,
    Evaluation,
    Generation,
    HeldOutCompletion,
    Iteration,
    Note,
    StepSpans,
    StepSummary,
    TrajectorySummary,
)

TABLES: Mapping[str, type[Record]] = {
    record.__name__: record
    for record in (
        Evaluation, StepSummary, Generation, HeldOutCompletion, TrajectorySummary, Iteration, Note, StepSpans,
        Checkpoint, CheckpointFiles, RunEntry, CampaignManifest, Comparison, ConditionComparison, SecondaryComparison,
    )
}  # fmt: skip
REGION = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Return a page whose regions ``<!-- table NAME -->`` to ``<!-- end -->`` hold the table of that type; that of
    ``Events`` holds all events."""
    return REGION.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n{match[3]}", text)


def _table(name: str) -> str:
    if name == "Events":
        rows = [_event_row(record) for record in EVENTS]
        return _lines(("`event`", "what has happened", "further keys"), rows)
    return _lines(
        ("key", "value", "meaning"), [_field_row(key, schema) for key, schema in _fields(TABLES[name]).items()]
    )


def _lines(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _fields(record: type[Record]) -> dict[str, Row]:
    """Return the JSON schema of each field. Pydantic reads docstrings of a class's own fields only."""
    found: dict[str, Row] = {}
    for cls in reversed(record.__mro__):
        if issubclass(cls, Record):
            for key, schema in TypeAdapter(cls).json_schema().get("properties", {}).items():
                found.setdefault(key, schema)
    return found


def _field_row(key: str, schema: Row) -> tuple[str, str, str]:
    return f"`{key}`", _kind(schema), " ".join(schema["description"].split())


def _event_row(record: type[Record]) -> tuple[str, str, str]:
    event, *others = _fields(record).items()
    further = "; ".join(f"`{key}`: {schema['description']}".rstrip(".") for key, schema in others)
    return f"`{event[1]['default']}`", (record.__doc__ or "").strip(), further


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
