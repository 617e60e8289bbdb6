"""Write ``docs/metrics.md`` from the catalogue, and the tables of ``docs/outputs.md`` from the declared types."""

from __future__ import annotations

import re
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

TABLES: Mapping[str, type[Record]] = {
    record.__name__: record
    for record in (
        *(file.row for file in RUN_FILES if file.row is not None),
        CheckpointFiles, RunEntry, Seal, CampaignManifest, InterimAnalysis, Declaration, FinishedRun,
        Comparison, ConditionComparison, SecondaryComparison,
    )
}  # fmt: skip
REGION = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """Return a page whose regions ``<!-- table NAME -->`` to ``<!-- end -->`` hold the table of that type; that of
    ``Events`` holds all events."""
    return REGION.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n{match[3]}", text)


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


def _table(name: str) -> str:
    if name == "Events":
        rows = [_event_row(event) for event in EVENTS]
        return _lines(("`event`", "what has happened", "further keys"), rows)
    rows = [(f"`{key}`", *texts) for key, texts in _fields(TABLES[name]).items()]
    return _lines(("key", "value", "meaning"), rows)


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
    outputs = docs / "outputs.md"
    for path, text in ((docs / "metrics.md", metrics_markdown()), (outputs, with_tables(outputs.read_text("utf-8")))):
        write_text(path, text)
        sys.stdout.write(f"wrote {path}\n")
