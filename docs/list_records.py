"""Write ``docs/metrics.md`` from the catalogue, and ``docs/fields.md`` from the declared types of records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

from retrain.files import write_text
from retrain.records.catalogue import METRICS, SCALED_ALIASES, SECTIONS, TOOLS, Metric
from retrain.records.schema.base import Record, Row
from retrain.records.schema.campaign import CampaignManifest, CheckpointFiles, InterimAnalysis, RunEntry, Seal
from retrain.records.schema.comparison import Comparison, ConditionComparison, SecondaryComparison
from retrain.records.schema.events import EVENTS, Event
from retrain.records.schema.layout import RUN_FILES
from retrain.records.schema.registry import Declaration, FinishedRun

RECORDS: Mapping[str, type[Record]] = {
    **{file.name: file.row for file in RUN_FILES if file.row is not None},
    "checkpoints/step_<n>/manifest.json": CheckpointFiles,
    "manifest.json": CampaignManifest,
    "manifest.json, interim": InterimAnalysis,
    "manifest.json, runs": RunEntry,
    "manifest.json, seal of a run": Seal,
    "registry.jsonl, a declaration": Declaration,
    "registry.jsonl, a run": FinishedRun,
    "comparison.json": Comparison,
    "comparison.json, conditions": ConditionComparison,
    "comparison.json, secondary": SecondaryComparison,
}
"""File, or part of one, → type of its rows or of its object."""
FIELDS_INTRODUCTION = """\
# Fields of the records

Made from `retrain/records/schema/` by `make docs`; edit the types there.

What the files are for: [what a run leaves behind](outputs.md). Rows of `metrics.jsonl`: [metrics](metrics.md).
"""


def fields_markdown() -> str:
    parts = [FIELDS_INTRODUCTION]
    for name, record in RECORDS.items():
        rows = [(f"`{key}`", *texts) for key, texts in _fields(record).items()]
        file, comma, part = name.partition(", ")
        parts.append(f"## `{file}`{comma}{part}\n\n{_lines(('key', 'value', 'meaning'), rows)}")
    events = _lines(("`event`", "what has happened", "further keys"), [_event_row(event) for event in EVENTS])
    return "\n".join([*parts, f"## Events of `retrain status DIR --json`\n\n{events}"])


REQUIREMENTS = {
    "ahead": "with `max_off_policy_steps`",
    "critic": "with a critic",
    "distillation": "with a teacher",
    "rejection": "with `rejection`, `m2po` or `rejection_denominator`",
    "updates": "with several updates",
    "dynamic": "with `dynamic_sampling`",
    "tools": "with tools",
    "unit_tests": "with `unit_tests`",
    "episodes": "with `[environment]`",
    "evaluation": "with evaluation",
    "warmup": "of a warm-up: in its own `metrics.jsonl`",
    "weights": "with a gtpo transform",
    "pooling": "with gtpo_sepa",
}
"""Features that metrics require (``Metric.requires``), in words."""
INTRODUCTION = f"""\
# Metrics

Made from `retrain/records/catalogue.py` by `make docs`; edit the table there.

Every step writes one row to `metrics.jsonl`, whether or not anything trained. A row always carries every key
that the run's configuration can define, and `null` where a value does not exist at that step; NaN and
infinity never appear. Values are per optimizer step and computed on everything that was sampled, before any
filtering, unless the definition says otherwise. Standard deviations divide by n.

Aliases repeat a value under the name that another tool's scripts read. `[logging] aliases` chooses the tools
(default: {", ".join(f"`{tool}`" for tool in TOOLS)}). wandb shows a metric under its wandb name where one
is given, otherwise under its key. A number that a reward, environment or plug-in adds under a further key
joins the row from the step where it first appears.
"""


def metrics_markdown() -> str:
    parts = [INTRODUCTION]
    for section, metrics in SECTIONS.items():
        table = _lines(("key", "definition", "unit", "healthy", "aliases", "wandb"), list(map(_metric_row, metrics)))
        parts.append(f"## {section}\n\n{table}")
    parts.append("## Aliases by tool\n")
    for tool in TOOLS:
        names = sorted({alias for metric in METRICS for alias in metric.aliases.get(tool, ())})
        parts.append(f"- **{tool}**: {', '.join(f'`{name}`' for name in names)}")
    return "\n".join(parts) + "\n"


def _metric_row(metric: Metric) -> tuple[str, ...]:
    named = [(alias, tool) for tool, names in metric.aliases.items() for alias in names]
    notes = {alias: f" ({note})" for alias, (note, *_) in SCALED_ALIASES.items()}
    aliases = "<br>".join(f"`{alias}`{notes.get(alias, '')} {tool}" for alias, tool in named)
    definition = metric.definition + (f" ({REQUIREMENTS[metric.requires]})" if metric.requires else "")
    wandb = f"`{metric.wandb}`" if metric.wandb else ""
    return f"`{metric.key}`", definition, metric.unit, metric.healthy, aliases, wandb


def _lines(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def _fields(record: type[Record]) -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each field."""
    schemas = TypeAdapter(record).json_schema()["properties"]
    hints = get_type_hints(record, include_extras=True)
    return {key: (_kind(schemas[key]), hints[key].__metadata__[0]) for key in record.field_names()}


def _event_row(event: type[Event]) -> tuple[str, str, str]:
    keys = "; ".join(f"`{key}`: {meaning}".rstrip(".") for key, (_, meaning) in _fields(event).items())
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


if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    for name, text in (("metrics.md", metrics_markdown()), ("fields.md", fields_markdown())):
        write_text(docs / name, text)
        sys.stdout.write(f"wrote {docs / name}\n")
