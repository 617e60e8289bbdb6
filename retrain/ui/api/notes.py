"""``/api/notes``: notes of all runs at a location; ``/api/log``: lines of a run's log, from its end."""

import re

from retrain.config.legacy import removed_note
from retrain.records.reader import log_lines, read_object
from retrain.records.schema.base import Row
from retrain.records.schema.layout import CONFIG, LOG, NOTES
from retrain.ui.answers import JsonObject, Query
from retrain.ui.context import ApiContext
from retrain.ui.sources import RunSource

MOST_NOTES, MOST_LINES = 2_000, 500
MOST_CHARACTERS = 20_000  # Most characters of a line of the log
LEVEL = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (\w+) +")


def notes(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    home = library.home(query.text("at"))
    search, level = query.text("search", "").lower(), query.text("level", "")
    rows = [_row(run, note) for run in home.runs for note in library.rows(run, NOTES)]
    if home.runs and (ignored := removed_note(read_object(library.places.file(home.path, CONFIG)))):
        remedy = "a run that is resumed continues without them"
        note = {"step": 0, "key": "removed_keys", "level": "info", "text": ignored, "remedy": remedy}
        rows.append(_row(home.runs[0], note))
    chosen = [row for row in rows if (not level or row["level"] == level) and _has(row, search)]
    chosen.sort(key=lambda row: row["step"] if isinstance(row["step"], int) else -1, reverse=True)
    return {"notes": chosen[:MOST_NOTES], "total": len(chosen), "of": len(rows)}


def log(context: ApiContext, query: Query) -> JsonObject:
    run = context.library.run(query.text("at"))
    before = query.number("before", -1, -1, 1 << 50)
    path = context.library.file(run, LOG)
    if path is None:
        return {"place": run.location, "lines": [], "before": None}
    read = log_lines(path, before, query.text("search", "").lower(), MOST_LINES)
    lines = [{"byte": at, "text": text[:MOST_CHARACTERS], "level": _level(text)} for at, text in read.lines]
    return {"place": run.location, "lines": lines, "before": read.before}


def _row(run: RunSource, note: Row) -> Row:
    about = {"place": run.location, "run": run.run_id, **run.head}
    return about | {key: note.get(key) for key in ("step", "key", "level", "text", "remedy")}


def _has(row: Row, search: str) -> bool:
    return not search or any(search in str(row[key]).lower() for key in ("run", "key", "text", "remedy"))


def _level(text: str) -> str | None:
    match = LEVEL.match(text)
    return match[1] if match else None
