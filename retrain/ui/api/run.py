"""``/api/run``: one run at a glance: its numbers of late, how it was launched, and what happened at which step."""

import re
from contextlib import suppress
from typing import Any

import numpy as np
from starlette.routing import Route

from retrain.records.kinds import is_number
from retrain.records.reader import json_lines, log_lines
from retrain.records.schema.layout import CHECKPOINTS, LOG
from retrain.ui.answers import Query, Refusal, json_route, plain
from retrain.ui.banner import launch_command, resume_command
from retrain.ui.library import Library
from retrain.ui.metrics import about, name_in
from retrain.ui.numbers import AXES, Numbers, steps_of, xs_of
from retrain.ui.rates import evaluation_rate, rate_of
from retrain.ui.sources import Run, sets_of

TILES = {
    "reward": "mean_reward", "entropy": "entropy", "length": "completions/mean_length",
    "truncated": "max_token_hit_rate", "tokens per second": "perf/completion_tokens_per_s",
}  # fmt: skip
COMPLETIONS = "env/all/total_episodes"
RESUMED = re.compile(r"records truncated to the (\d{1,12}) finished steps")
MOST_RESUMES, MOST_MARKS = 200, 2_000


def routes(library: Library) -> list[Route]:
    def run(query: Query) -> dict[str, Any]:
        home = library.home(query.text("at"))
        one = library.run(home.place)
        numbers = library.numbers(one)
        rows = numbers.evaluations()
        return {
            "run": one.to_json(), "tiles": [*held_out_tiles(rows), *tiles_of(numbers)],
            "launch": launch_command(library, home), "resume": resume_command(library, home),
            "marks": marks_of(library, one, numbers, query.choice("x", AXES)),
        }  # fmt: skip

    return [json_route("/api/run", run)]


def tiles_of(numbers: Numbers) -> list[dict[str, Any]]:
    """Return the last value of each number of ``TILES`` that the run has, under whatever name."""
    tiles = []
    with numbers.still():
        steps = steps_of(numbers)
        for title, own in TILES.items():
            key = name_in(own, numbers.keys)
            column = numbers.column(key)
            known = np.flatnonzero(np.isfinite(column))
            if not len(known):
                continue
            value, last = float(column[known[-1]]), known[-1]
            counts = numbers.column(COMPLETIONS)
            count = int(counts[last]) if np.isfinite(counts[last]) else 0
            rate = rate_of(value * count, count) if title == "truncated" and count else {}
            tiles.append({"title": title, "key": key, "value": plain(column[last : last + 1])[0],
                          "unit": about(key)["unit"], "step": int(steps[last]), **rate})  # fmt: skip
    return tiles


def held_out_tiles(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last accuracy on each held-out set, with its interval."""
    tiles = []
    for name in sets_of(str(row.get("name")) for row in rows):
        key = f"eval/{name}/correct_rate"
        own = [row for row in rows if row.get("name") == name and is_number(row.get(key))]
        if own:
            tiles.append({"title": name, "key": key, "value": own[-1][key], "unit": "share",
                          "step": own[-1].get("step"), **evaluation_rate(own[-1], name)})  # fmt: skip
    return tiles


def marks_of(library: Library, run: Run, numbers: Numbers, x: str) -> list[dict[str, Any]]:
    """Return what happened after which step, with its place on the x axis: the step counts the updates done."""
    saves = (row for _, row in json_lines(library.file(run, CHECKPOINTS)))
    marks = [
        *(("evaluation", row.get("step"), str(row.get("name"))) for row in numbers.evaluations()),
        *(("checkpoint", row.get("batch"), str(row.get("name"))) for row in saves),
        *(("resume", step, "") for step in _resumes(library, run)),
    ]
    marks = [mark for mark in marks if isinstance(mark[1], int) and 0 <= mark[1] < 1 << 53][-MOST_MARKS:]
    steps = np.array([step for _, step, _ in marks], np.float64)
    try:
        places = plain(xs_of(numbers, x, steps, updates=True)) if marks and (x == "step" or len(numbers)) else []
    except Refusal:  # these runs do not say how far they were there
        places = []
    found = [{"kind": kind, "step": step, "x": place, "text": text}
             for (kind, step, text), place in zip(marks, places, strict=bool(places)) if place is not None]  # fmt: skip
    return sorted(found, key=lambda mark: mark["step"])


def _resumes(library: Library, run: Run) -> list[int]:
    """Return the steps at which another process went on with the run, as its log says."""
    path = library.file(run, LOG)
    with suppress(OSError):
        lines = log_lines(path, -1, "records truncated to", MOST_RESUMES).lines if path is not None else []
        return [int(match[1]) for _, text in lines if (match := RESUMED.search(text))]
    return []
