"""``/api/metrics`` and ``/api/why``: what the numbers of runs are called, what they mean, and what an odd one says."""

from collections.abc import Sequence
from typing import Any

from starlette.routing import Route

from retrain.records.notes import RULES
from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.metrics import about, listed, tags_of, watched
from retrain.ui.sources import Run
from retrain.ui.summary import notes_of

MOST_KEYS, MOST_PLACES = 5_000, 64


def routes(library: Library) -> list[Route]:
    def metrics(query: Query) -> dict[str, Any]:
        homes = [library.home(place) for place in query.texts("at", MOST_PLACES)]
        runs = [run for home in homes for run in home.runs]
        keys = keys_of(library, runs)
        ranges: dict[str, Any] = {}
        for run in runs:
            declared = library.settings(run).get("ranges")
            ranges |= declared if isinstance(declared, dict) else {}
        shown = [{"place": run.place, "label": run.label, "index": run.index, "seed": run.seed} for run in runs]
        return {"metrics": listed(keys, ranges), "watch": watched(keys), "tags": tags_of(keys), "runs": shown,
                "missing": [text for home in homes for text in home.missing]}  # fmt: skip

    def why(query: Query) -> dict[str, Any]:
        run, key = library.run(query.text("at")), query.text("key")
        notes = [note for note in notes_of(library, run) if concerns(note, key)]
        last = library.numbers(run).last.get(key)
        return {"metric": about(key), "value": last if isinstance(last, int | float) else None,
                "step": library.numbers(run, refresh=False).last.get("step"), "notes": notes}  # fmt: skip

    return [json_route("/api/metrics", metrics), json_route("/api/why", why)]


def keys_of(library: Library, runs: Sequence[Run]) -> list[str]:
    """Return every key that any of the runs has, in their order."""
    found: dict[str, None] = {}
    for run in runs:
        found |= dict.fromkeys(library.numbers(run).keys)
    return list(found)[:MOST_KEYS]


def concerns(note: dict[str, Any], key: str) -> bool:
    """Return whether a note is about this metric: its rule looks at it."""
    rule = RULES.get(str(note.get("key")))
    name = about(key)["alias_of"] or key
    named = f" {note.get('text')} {note.get('remedy')} "
    return note.get("key") == key or f" {name} " in named or bool(rule and any(name == need for need, _ in rule.needs))
