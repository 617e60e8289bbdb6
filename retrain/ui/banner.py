"""Build a campaign's banner: its state, its failures, the command to resume, and the verdict in one sentence."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from retrain.errors import plural
from retrain.records.reader import log_lines
from retrain.records.schema.base import Row
from retrain.records.schema.layout import LOG
from retrain.ui.answers import JsonObject
from retrain.ui.findings import verdict_of
from retrain.ui.library import Library
from retrain.ui.sources import Home, RunSource

MOST_FAILURES = 20
LOG_LINES = 400  # Last lines of a log that are searched for a traceback
TRACEBACK = "Traceback (most recent call last):"
WORDS = {"done": "finished", "running": "in training", "pending": "not begun"}


def banner_of(library: Library, home: Home, comparison: Row | None, why: str | None) -> JsonObject:
    failed = [run for run in home.runs if run.state == "failed"]
    verdict = verdict_of(comparison)
    return {
        "state": "failed" if failed else home.state,
        "words": state_words(home.runs),
        "failed": [failure_of(library, run) for run in failed[:MOST_FAILURES]],
        "resume": resume_command(library, home),
        "verdict": verdict["sentence"] if verdict else None,
        "why": None if verdict else why,
    }


def state_words(runs: Sequence[RunSource]) -> str:
    states = [run.state for run in runs]
    order = ("failed", "interrupted", "running", "pending", "stopped", "done")
    counts = [f"{states.count(state)} {WORDS.get(state, state)}" for state in order if state in states]
    return f"{plural(len(states), 'run')}: {', '.join(counts)}" if counts else "no runs"


def failure_of(library: Library, run: RunSource) -> JsonObject:
    line, log = (run.reason or "").partition("\n")[0], None
    path = library.file(run, LOG)
    if path is not None:
        log = {"name": LOG, "byte": None}
        with suppress(OSError):
            lines = [(at, _message(text)) for at, text in log_lines(path, -1, "", LOG_LINES).lines]
            begins = [number for number, (_, text) in enumerate(lines) if text == TRACEBACK]
            if begins:
                line = next((text for _, text in lines[begins[-1] + 1 :] if not text.startswith(" ")), "") or line
                log = {"name": LOG, "byte": lines[begins[-1]][0]}
    return {"place": run.location, "run_id": run.run_id, "label": run.label, "seed": run.seed, "step": run.step,
            "reason": run.reason, "line": line, "log": log}  # fmt: skip


def _message(text: str) -> str:
    return text[28:] if text[20:27].rstrip() in ("info", "warning", "error") else text


def resume_command(library: Library, home: Home) -> JsonObject | None:
    """Return the ``command`` that continues failed and interrupted runs, and ``now``, which is true if no run is
    training, so that the command can be typed at once. None if there is nothing to resume, or another tool trained the
    runs."""
    campaign = library.campaign(home.location)
    states = {run.state for run in campaign.runs}
    is_running = "running" in states
    if not campaign.manifest or states <= {"done", "stopped"} or (is_running and "failed" not in states):
        return None
    words = ["retrain", "resume", shown_path(campaign.path), *(["--retry-failed"] if "failed" in states else [])]
    return {"command": shlex.join(words), "now": not is_running}


def shown_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
