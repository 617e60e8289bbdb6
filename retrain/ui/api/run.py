"""``/api/run``: a run's latest numbers, the command that launched it, and the steps that its charts mark."""

import re
import shlex
from pathlib import Path

import numpy as np

from retrain.records.reader import read_object
from retrain.records.schema.layout import CHECKPOINTS, LOG, PLAN
from retrain.ui.answers import ApiError, JsonObject, Query, plain
from retrain.ui.banner import shown_path
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.measured import points_of
from retrain.ui.metrics import about, named
from retrain.ui.numbers import AXES, Numbers, xs_of
from retrain.ui.rates import evaluation_rate, rate_of
from retrain.ui.sources import RunSource
from retrain.verdicts.results import Measure

TILES = {
    "mean_reward": "reward", "eval/<name>/correct_rate": "held-out", "entropy": "entropy",
    "completions/mean_length": "length", "max_token_hit_rate": "truncated", "perf/completion_tokens_per_s": "tokens/s",
}  # fmt: skip
"""Metrics of the catalogue that are shown above the charts, with their names there."""
RESUMED = re.compile(rb"^[\d:. -]+info +continues at step (\d+)\r?$", re.MULTILINE)
MOST_MARKS = 400  # Most marks of each kind
COMPLETIONS = "env/all/total_episodes"  # Number of completions of a step, the n of its truncated share
LOG_BYTES = 4 << 20  # Bytes at the end of the log that are searched for resumes


def run(context: ApiContext, query: Query) -> JsonObject:
    library = context.library
    run, x = library.run(query.text("at")), query.choice("x", AXES)
    tiles = tiles_of(library.numbers(run))
    return {"tiles": tiles, "command": command_of(library, run), "marks": marks_of(library, run, x)}


def tiles_of(numbers: Numbers) -> list[JsonObject]:
    """Return the last value of each of ``TILES`` with its step; for a rate, also its interval and ``n``."""
    tiles = []
    for pattern, name in TILES.items():
        for key in named(pattern, numbers.keys):
            steps, values = points_of(numbers, key)
            if not len(steps):
                continue
            tile: JsonObject = {"key": key, "name": name, "unit": about(key)["unit"], "value": plain(values[-1:])[0],
                    "step": int(steps[-1])}  # fmt: skip
            held_out = Measure(key=key).held_out
            rows = [row for row in numbers.evaluations() if held_out is not None and row.get("name") == held_out]
            if rows:
                rate = evaluation_rate(rows[-1], str(held_out))
                tile |= {"low": rate["low"], "high": rate["high"], "n": rate["n"] or None}
                tile["name"] = name if held_out == "heldout" else f"{name}: {held_out}"
            elif name == "truncated" and len(counts := points_of(numbers, COMPLETIONS)[1]):
                rate = rate_of(values[-1] * counts[-1], int(counts[-1]))
                tile |= {"low": rate["low"], "high": rate["high"], "n": rate["n"]}
            tiles.append(tile)
    return tiles


def command_of(library: Library, run: RunSource) -> str | None:
    home = library.campaign(run.location)
    plan = read_object(library.places.file(home.path, PLAN))
    if not isinstance(plan.get("file"), str):
        return None
    path = Path(str(plan.get("folder") or "."), plan["file"])
    sets = [word for text in plan.get("sets") or () for word in ("--set", str(text))]
    return shlex.join(["retrain", "train", shown_path(path), "--out", shown_path(home.path), *sets])


def marks_of(library: Library, run: RunSource, x: str) -> list[JsonObject]:
    """Return at most ``MOST_MARKS`` evaluations, checkpoints and resumes each, in order: "kind", "step" (number of
    updates done) and "x", the position on the axis ``x``. Empty for a run without that axis."""
    numbers = library.numbers(run, refresh=False)
    steps = {
        "evaluation": [row.get("step") for row in numbers.evaluations()],
        "checkpoint": [row.get("batch") for row in library.rows(run, CHECKPOINTS)],
        "resume": _resumes(library.file(run, LOG)),
    }
    marks: list[tuple[int, str]] = []
    for kind, values in steps.items():
        unique = sorted({step for step in values if isinstance(step, int)})
        marks += [(step, kind) for step in unique[:: 1 + len(unique) // MOST_MARKS]]
    marks.sort()
    if not marks or not len(numbers):
        return []
    try:
        xs = plain(xs_of(numbers, x, np.array([step for step, _ in marks], np.float64), updates=True))
    except ApiError:  # a run that has no such axis
        return []
    return [{"x": at, "step": step, "kind": kind} for at, (step, kind) in zip(xs, marks, strict=True) if at is not None]


def _resumes(log: Path | None) -> list[int]:
    if log is None:
        return []
    with open(log, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        return [int(step) for step in RESUMED.findall(file.read())]
