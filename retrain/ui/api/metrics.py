"""``/api/metrics``: names and meanings of runs' metrics; ``/api/why``: a metric's last value and the notes about it."""

from collections.abc import Sequence

from retrain.records.notes import RULES
from retrain.records.schema.base import Row
from retrain.records.schema.layout import NOTES
from retrain.ui.answers import JsonObject, Query
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.metrics import about, listed, tags_of, watched
from retrain.ui.sources import RunSource

MOST_KEYS, MOST_PLACES = 5_000, 64


def metrics(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    homes = [library.home(at) for at in query.texts("at", MOST_PLACES)]
    runs = [run for home in homes for run in home.runs]
    keys = keys_of(library, runs)
    ranges: Row = {}
    for run in runs:
        declared = library.settings(run).get("ranges")
        ranges |= declared if isinstance(declared, dict) else {}
    return {"metrics": listed(keys, ranges), "watch": watched(keys), "tags": tags_of(keys),
            "runs": [run.head for run in runs],
            "missing": [text for home in homes for text in home.missing]}  # fmt: skip


def why(context: ApiContext, query: Query) -> JsonObject:
    run, key = context.library.run(query.text("at")), query.text("key")
    notes = [note for note in context.library.rows(run, NOTES) if concerns(note, key)]
    last = context.library.numbers(run).last
    value = last.get(key)
    return {"metric": about(key), "value": value if isinstance(value, int | float) else None,
            "step": last.get("step"), "notes": notes}  # fmt: skip


def keys_of(library: Library, runs: Sequence[RunSource]) -> list[str]:
    keys = dict.fromkeys(key for run in runs for key in library.numbers(run).keys)
    return list(keys)[:MOST_KEYS]


def concerns(note: Row, key: str) -> bool:
    rule = RULES.get(str(note.get("key")))
    name = about(key)["alias_of"] or key
    text = f" {note.get('text')} {note.get('remedy')} "
    return note.get("key") == key or f" {name} " in text or bool(rule and any(name == need for need, _ in rule.needs))
