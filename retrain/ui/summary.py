"""One campaign or run in a few numbers: an entry of the first page."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from retrain.files import Stamp, stamp_of
from retrain.records.reader import Tail
from retrain.records.schema.layout import NOTES
from retrain.ui.findings import Findings, verdict_of
from retrain.ui.library import Library
from retrain.ui.sources import Home, Run, touched

MOST_NOTES = 4_096  # Runs whose last note is kept


def summary_of(library: Library, findings: Findings, home: Home) -> dict[str, Any]:
    """The ``Summary`` of the API; what takes long to find out is null until the background has read it."""
    states = [run.state for run in home.runs]
    seeds = {run.seed for run in home.runs if run.seed is not None}
    done = {seed for seed in seeds if all(run.state == "done" for run in home.runs if run.seed == seed)}
    seconds = findings.device_seconds(home)
    return {
        "place": home.place,
        "kind": home.kind,
        "source": home.source,
        "name": home.name,
        "state": home.state,
        "runs": {
            "planned": len(states),
            **{state: states.count(state) for state in ("done", "failed", "running", "stopped", "interrupted")},
        },
        "workers": sorted({run.worker for run in home.runs if run.worker is not None}, key=_by_number),
        "seeds": {"planned": len(seeds), "done": len(done)},
        "steps": {"done": sum(run.step for run in home.runs), "planned": sum(run.max_steps for run in home.runs)},
        "conditions": home.labels,
        "verdict": verdict_of(findings.known(home)) if home.kind == "campaign" else None,
        "device_hours": None if seconds is None else seconds / 3600.0,
        "created": home.created,
        "updated": home.updated,
        "note": newest_note(library, home),
        "missing": list(home.missing),
    }


def _by_number(worker: str) -> tuple[int, str]:
    """Workers in the order of the numbers that their names begin with: 9 before 10."""
    return len(worker.partition(" ")[0]), worker


def newest_note(library: Library, home: Home) -> dict[str, Any] | None:
    """The last warning of the run that was noted last; without any, the last remark."""
    found: list[tuple[bool, float, dict[str, Any]]] = []
    for run in home.runs:
        path = library.file(run, NOTES)
        stamp = stamp_of(path)
        note = _last_note(path, stamp) if path is not None and stamp is not None else None
        if note is not None:
            short = {key: note.get(key) for key in ("level", "step", "text")} | {"run": run.run_id, "place": run.place}
            found.append((note.get("level") == "warning", touched(path) or 0.0, short))
    return max(found, key=lambda each: each[:2])[2] if found else None


def notes_of(library: Library, run: Run) -> list[dict[str, Any]]:
    """All whole rows of a run's ``notes.jsonl``."""
    path = library.file(run, NOTES)
    return Tail(path).rows()[1] if path is not None else []


@lru_cache(MOST_NOTES)
def _last_note(path: Path, stamp: Stamp) -> dict[str, Any] | None:
    """Return the last warning of the file's last rows, else the last row; read again only where the file changed."""
    _, rows = Tail(path, last_only=True).rows()
    warnings = [row for row in rows if row.get("level") == "warning"]
    return (warnings or rows)[-1] if rows else None
