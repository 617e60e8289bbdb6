"""``/api/timeline``: the time spans of some steps of a run, by lane."""

from retrain.records.pages.timeline import spans_json, steps_of
from retrain.records.schema.base import Row
from retrain.records.schema.layout import SPANS
from retrain.ui.answers import JsonObject, Query
from retrain.ui.context import ApiContext
from retrain.util.jsonl import LineIndex

MOST_STEPS, USUAL_STEPS, MOST_SPANS = 1_000, 100, 40_000


def timeline(context: ApiContext, query: Query) -> JsonObject:
    run = context.library.run(query.text("at"))
    path = context.library.file(run, SPANS)
    lines = context.spans.setdefault(path, LineIndex(path)) if path is not None else None
    count = lines.refresh() if lines is not None else 0
    # Row i is step i. After a resume, the row of a step may have a smaller index, never a larger one.
    start = query.number("from", max(0, count - USUAL_STEPS), 0, 1 << 40)
    end = query.number("to", start + USUAL_STEPS, 0, 1 << 40)
    start, end = min(start, count), min(end, start + MOST_STEPS, count)
    rows = [row for row in lines.read(start, end) if _is_complete(row)] if lines is not None else []
    return {"place": run.location, "steps": count, "from": start, "to": end, **spans_json(steps_of(rows), MOST_SPANS)}


def _is_complete(row: Row) -> bool:
    spans = row.get("spans")
    if not isinstance(row.get("step"), int) or not isinstance(spans, list):
        return False
    ends = ("wall_start", "wall_end")
    return all(isinstance(span, dict) and "name" in span and all(isinstance(span.get(end), int | float) for end in ends)
               for span in spans)  # fmt: skip
