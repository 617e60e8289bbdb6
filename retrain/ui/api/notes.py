"""``/api/notes`` and ``/api/log``: remarks over all runs of a place, and the lines of a run's log from its end."""

import re
from typing import Any

from starlette.routing import Route

from retrain.config.legacy import removed_note
from retrain.records.reader import log_lines, read_object
from retrain.records.schema.layout import CONFIG, LOG
from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.sources import Run
from retrain.ui.summary import notes_of

MOST_NOTES, MOST_LINES = 2_000, 500
SHOWN = 20_000  # Characters of a line that are shown
LEVEL = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\w+) +")


def routes(library: Library) -> list[Route]:
    def notes(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        search, level = query.text("search", "").lower(), query.text("level", "")
        rows = []
        for run in home.runs:
            rows += [_row(run, note) for note in notes_of(library, run)]
        if home.runs and (ignored := removed_note(read_object(library.places.file(home.path, CONFIG)))):
            remedy = "a run that is resumed continues without them"
            rows.append(_row(home.runs[0], {"step": 0, "key": "removed_keys", "level": "info", "text": ignored,
                                            "remedy": remedy}))  # fmt: skip
        chosen = [row for row in rows if (not level or row["level"] == level) and _has(row, search)]
        chosen.sort(key=lambda row: row["step"] if isinstance(row["step"], int) else -1, reverse=True)
        return {"notes": chosen[:MOST_NOTES], "total": len(chosen), "of": len(rows)}

    def log(query: Query) -> dict[str, Any]:
        run = library.run(query.text("at"))
        before = query.number("before", -1, -1, 1 << 50)
        path = library.file(run, LOG)
        if path is None:
            return {"place": run.place, "lines": [], "before": None}
        found, before, _ = log_lines(path, before, query.text("search", "").lower(), MOST_LINES)
        lines = [{"byte": at, "text": text[:SHOWN], "level": _level(text)} for at, text in found]
        return {"place": run.place, "lines": lines, "before": before}

    return [json_route("/api/notes", notes), json_route("/api/log", log)]


def _row(run: Run, note: dict[str, Any]) -> dict[str, Any]:
    about = {"place": run.place, "run": run.run_id, "label": run.label, "index": run.index, "seed": run.seed}
    return about | {key: note.get(key) for key in ("step", "key", "level", "text", "remedy")}


def _has(row: dict[str, Any], search: str) -> bool:
    return not search or any(search in str(row[key]).lower() for key in ("run", "key", "text", "remedy"))


def _level(text: str) -> str | None:
    match = LEVEL.match(text)
    return match[1] if match else None
