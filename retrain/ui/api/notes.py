"""``/api/notes`` and ``/api/log``: remarks over all runs of a place, and the lines of a run's log from its end."""

import os
import re
from pathlib import Path
from typing import Any

from starlette.routing import Route

from retrain.config.legacy import removed_note
from retrain.records.reader import read_object
from retrain.records.schema.layout import CONFIG, LOG
from retrain.ui.answers import Query, json_route
from retrain.ui.library import Library
from retrain.ui.sources import Run
from retrain.ui.summary import notes_of

MOST_NOTES, MOST_LINES = 2_000, 500
BLOCK = 1 << 16
MOST_READ = 16 << 20  # Bytes of a log that one search goes through
MOST_LINE, SHOWN = 1 << 20, 20_000  # Bytes of a line that is searched, and characters of one that is shown
LEVEL = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (\w+) +")


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
            return {"place": run.place, "lines": [], "before": None, "size": 0}
        return {"place": run.place} | lines_before(path, before, query.text("search", "").lower())

    return [json_route("/api/notes", notes), json_route("/api/log", log)]


def _row(run: Run, note: dict[str, Any]) -> dict[str, Any]:
    about = {"place": run.place, "run": run.run_id, "label": run.label, "index": run.index, "seed": run.seed}
    return about | {key: note.get(key) for key in ("step", "key", "level", "text", "remedy")}


def _has(row: dict[str, Any], search: str) -> bool:
    return not search or any(search in str(row[key]).lower() for key in ("run", "key", "text", "remedy"))


def lines_before(path: Path, before: int, search: str) -> dict[str, Any]:
    """The last lines that end before byte ``before`` (-1: the end of the file) and hold the text that is searched, in
    the file's order; ``before`` of the answer goes on from there, null at the beginning."""
    found: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        at = size if before < 0 else min(before, size)
        rest, least = b"", max(0, at - MOST_READ)  # rest: the end of a line whose beginning is not read yet
        while at > least:
            start = max(0, at - BLOCK)
            file.seek(start)
            data = file.read(at - start) + rest
            first = data.find(b"\n") + 1 if start else 0
            at, position = start, start + len(data)
            if start and (first == 0 or first == len(data)):
                rest = data if len(data) < MOST_LINE else b""
                continue
            for line in reversed(data[first:].splitlines(keepends=True)):
                position -= len(line)
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if search in text.lower():
                    found.append({"byte": position, "text": text[:SHOWN]} | _parts(text))
                    if len(found) == MOST_LINES:
                        return {"lines": found[::-1], "before": position or None, "size": size}
            rest = data[:first]
    return {"lines": found[::-1], "before": at + len(rest) if at else None, "size": size}


def _parts(text: str) -> dict[str, str | None]:
    match = LEVEL.match(text)
    return {"time": match[1] if match else None, "level": match[2] if match else None}
