"""``retrain ui --bundle OUT``: a copy of the page and of what it shows, as files that a browser opens without a server.

Answers of the API are computed here and written as scripts that the page loads when a view needs them
(``static/copy.js``). A copy holds what a reader of a finished campaign looks at: all curves and metrics over steps, the
chief ones over tokens and time, verdicts, problems, the newest recorded rollouts token by token, the same prompt under
every condition, notes, timelines and adapters. Filters, searches and histograms need the server. Absolute paths in
settings, notes and logs are cut to their last part.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from retrain.errors import RetrainError, UsageError
from retrain.files import dumps, write_text
from retrain.records.pages import STATIC
from retrain.records.pages.scripts import joined
from retrain.ui.answers import ApiError, JsonObject, Query
from retrain.ui.api.problems import indices_of
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.numbers import AXES
from retrain.ui.problems import SORTS, evolutions
from retrain.ui.server import api_routes, shell_html
from retrain.ui.sources import Home, RunSource

POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src 'self' file: data:"
)
LOADED = ("theme.js", "uPlot.iife.min.js", "LICENSE")
"""Files that are copied besides styles and pictures; all modules are in the joined script."""
POINTS = 600
ROLLOUTS, PROBLEMS, ITERATIONS = 64, 400, 3
"""Most rollouts of an iteration, problems of a set, and newest recorded iterations of a run that a copy holds."""
WAIT_MS = 60_000

FREE = ("points", "wait_ms", "since", "count")
PLAIN = ("first=0", "down=0", "sort=index", "sample=0")
"""Parts of a query that are left out of an answer's name: the parameters ``FREE``, and parameters that have the default
values ``PLAIN``. ``static/copy.js`` has the same lists."""

OF_THE_MACHINE = ("places", "campaign", "compare", "log", "notes", "why", "timeline", "lora", "run", "runs")
"""Endpoints in whose answers absolute paths are shortened. Texts of models and problems are not changed."""
ABSOLUTE = re.compile(
    r"(?:(?<=file://)|(?<![\w/.:~…]))/(?!dev/null)(?:[^\s/\"'<>|:,;()\[\]{}]+/)+([^\s/\"'<>|:,;()\[\]{}]*)"
)

Question = tuple[str, JsonObject]  # The name of an endpoint and its query
Questions = Iterator[tuple[str, list[Question]]]  # (name of the file for the answers, questions)


def write_bundle(library: Library, out: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> int:
    """Write the copy into ``out``, a missing or empty directory; return the bytes written. ``progress`` gets the number
    of campaigns and runs that are copied, and the number of all.

    Raises UsageError if ``out`` is in use or there is nothing to show, StorageError if a file cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already; give a new directory: --bundle {out}-2")
    homes = library.homes()
    if not homes:
        raise UsageError("there is no campaign and no run to copy; type: retrain ui DIR --bundle OUT")
    answers = Answers(ApiContext.over(library), out / "data")
    for number, home in enumerate(homes):
        for run in home.runs:
            with suppress(ApiError):
                library.numbers(run, make=True)
        for group, questions in (*_of_metrics(answers, home), *_of_runs(library, home)):
            answers.write(f"{number:03d}_{group}", questions)
        answers.write_evolutions(f"{number:03d}_problem", home)
        progress(number + 1, len(homes))
    answers.write("places", [("places", {})])
    about = {"made": time.strftime("%Y-%m-%d"), "homes": [home.location for home in homes], "files": answers.files}
    write_text(out / "data.js", f"globalThis.RETRAIN_COPY = {dumps(about)};\n")
    _write_page(out)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _write_page(out: Path) -> None:
    write_text(out / "app.js", joined(STATIC, "app.js"))
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and (path.suffix in (".css", ".svg") or path.name in LOADED):
            target = out / "page" / path.relative_to(STATIC)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    write_text(out / "index.html", shell_html(static="page", copy=POLICY))


class Answers:
    """Writes answers of the API to files of a copy. ``files``: name of the file of each answer, by ``key_of``."""

    def __init__(self, context: ApiContext, folder: Path):
        self.context, self.folder = context, folder
        self.files: dict[str, str] = {}
        self._routes = {route.path.removeprefix("/api/"): route.answer for route in api_routes(context)}

    def get(self, endpoint: str, query: JsonObject) -> Any:
        pairs = [(key, str(value)) for key, value in query.items()]
        return self._routes[endpoint](Query(QueryParams(urlencode(pairs))))

    def write(self, name: str, questions: Iterable[Question]) -> None:
        answers: JsonObject = {}
        for endpoint, query in questions:
            with suppress(ApiError, RetrainError, OSError):
                answer = self.get(endpoint, query)
                answers[key_of(endpoint, query)] = without_paths(answer) if endpoint in OF_THE_MACHINE else answer
        self._write(name, answers)

    def write_evolutions(self, name: str, home: Home) -> None:
        """Write the answers of ``/api/problem`` for all held-out problems. They are computed together, because each
        answer alone would read every file."""
        runs = indices_of(self.context.library, home)
        answers: JsonObject = {}
        for held_out in self.sets(home):
            for problem, body in evolutions(runs, held_out).items():
                answers[key_of("problem", {"at": home.location, "set": held_out, "id": problem})] = body
        self._write(name, answers)

    def sets(self, home: Home) -> list[str]:
        return self.get("problems", {"at": home.location})["sets"]

    def _write(self, name: str, answers: JsonObject) -> None:
        if answers:
            self.files |= dict.fromkeys(answers, name)
            write_text(self.folder / f"{name}.js", f"retrainAnswers({dumps(answers)});\n", durable=False)


def without_paths(value: object) -> object:
    if isinstance(value, str):
        return ABSOLUTE.sub(r"…/\1", value)
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value


def key_of(endpoint: str, query: JsonObject) -> str:
    """Return the name of an answer. ``nameOf`` in ``static/copy.js`` returns the same name."""
    pairs = sorted(f"{key}={value}" for key, value in query.items() if key not in FREE and value not in (None, ""))
    return f"{endpoint}?{'&'.join(pair for pair in pairs if pair not in PLAIN)}"


def _of_metrics(answers: Answers, home: Home) -> Questions:
    at: JsonObject = {"at": home.location}
    metrics = answers.get("metrics", at)
    keys, watched = [metric["key"] for metric in metrics["metrics"]], metrics["watch"]
    yield "campaign", [("campaign", at | {"wait_ms": WAIT_MS}), ("runs", at), ("metrics", at)]
    for number, names in enumerate(_by_section(keys)):
        yield f"columns_{number}", [("columns", at | {"key": key, "x": "step", "points": POINTS}) for key in names]
    axes = AXES[1:]  # all but the steps
    yield "axes", [("columns", at | {"key": key, "x": x, "points": POINTS}) for key in watched for x in axes]
    if home.kind == "campaign":
        chief = list(dict.fromkeys([key for key in keys if key.startswith("eval/")][:40] + watched))
        yield "curves", [("curves", at | {"key": key, "x": "step"}) for key in chief]
        yield "curves_axes", [("curves", at | {"key": key, "x": x}) for key in chief[:1] + watched for x in axes]
        yield from _of_conditions(answers, home)
    yield "why", [("why", {"key": key, "at": run.location}) for key in watched for run in home.runs[:12]]


def _by_section(keys: Iterable[str]) -> list[list[str]]:
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(key.partition("/")[0] if "/" in key else "general", []).append(key)
    return list(sections.values())


def _of_conditions(answers: Answers, home: Home) -> Questions:
    """Yield the queries that compare conditions: the first run of each condition with that of the baseline, every
    held-out set by problem, and each problem under the baseline and another condition, if both recorded their
    evaluations."""
    first = [runs[0] for label in home.labels if (runs := home.of(label))]
    yield "compare", [("compare", {"a": first[0].location, "b": other.location}) for other in first[1:]]
    for number, held_out in enumerate(answers.sets(home)):
        about: JsonObject = {"at": home.location, "set": held_out, "count": PROBLEMS}
        usual: list[JsonObject] = [{"at": home.location, "count": PROBLEMS}] if number == 0 else []
        sorts: list[JsonObject] = [{}, *({"sort": sort} for sort in SORTS)]
        yield f"problems_{number}", [("problems", query | sort) for query in (*usual, about) for sort in sorts]
        problems = answers.get("problems", about | {"sort": "problem"})["problems"]
        named: list[JsonObject] = [{}, *({"problem": problem["id"]} for problem in problems)]
        split = f"eval/{held_out}"
        index = answers.context.library.index
        recorded = [run.location for run in first if any(each.tokens for each in index(run).of_split(split))]
        for other, location in enumerate(recorded[1:]):
            sides = {"a": recorded[0], "b": location, "split": split}
            yield f"prompts_{number}_{other}", [("prompt", sides | query) for query in named]


def _of_runs(library: Library, home: Home) -> Questions:
    runs = [run.location for run in home.runs]
    everything = list(dict.fromkeys([home.location, *runs]))
    yield "notes", [*(("notes", {"at": at}) for at in everything), *(("log", {"at": at}) for at in runs)]
    yield "runs", [("run", {"at": at, "x": x}) for at in runs for x in AXES]
    yield "timeline", [("timeline", {"at": at}) for at in everything]
    yield "lora", [("lora", {"at": at}) for at in everything]
    for number, run in enumerate(home.runs):
        yield f"rollouts_{number}", list(_of_rollouts(library, run))


def _of_rollouts(library: Library, run: RunSource) -> Iterator[Question]:
    index = library.index(run)
    at: JsonObject = {"at": run.location}
    yield "iterations", at
    yield "campaign", at | {"wait_ms": WAIT_MS}
    yield "metrics", at
    for split in dict.fromkeys(split for split, _ in index.refresh()):
        recorded = [iteration for iteration in index.of_split(split) if iteration.tokens][-ITERATIONS:]
        for iteration in recorded:
            queries = [at | {"split": split, "iteration": iteration.number}]
            queries += [at | {"split": split}] if iteration is recorded[-1] else []
            for query in queries:
                yield "rollouts", query
                yield from (("rollout", query | {"index": i}) for i in range(min(iteration.rollouts or 0, ROLLOUTS)))
