"""``retrain ui --bundle OUT``: a copy of the page and of what it shows, as files that a browser opens without a server.

The answers are those of the API, asked for here and written as scripts that the page loads when a view needs them
(``static/copy.js``). A copy holds what a reader of a finished campaign looks at: all curves and metrics over steps,
the chief ones over tokens and time, verdicts, problems, the newest recorded rollouts token by token, the same prompt
under every condition, notes, timelines and adapters. Filters, searches and histograms need the server. Of the paths of
the machine that settings, notes and logs name, a copy has the last part alone.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from retrain.errors import RetrainError, UsageError
from retrain.files import dumps, write_text
from retrain.records.pages import STATIC
from retrain.records.pages.scripts import joined
from retrain.ui.answers import ApiError, JsonRoute, Query
from retrain.ui.findings import Findings
from retrain.ui.iterations import Index
from retrain.ui.library import Library
from retrain.ui.numbers import AXES
from retrain.ui.problems import SORTS, evolutions
from retrain.ui.server import api_routes, shell_html
from retrain.ui.sources import Home, Run

POLICY = (
    "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src 'self' file: data:"
)
LOADED = ("theme.js", "uPlot.iife.min.js", "LICENSE")
"""Files that are copied besides styles and pictures; all modules are in the joined script."""
POINTS = 600
ROLLOUTS, PROBLEMS, ITERATIONS = 64, 400, 3
"""Rollouts of an iteration, problems of a set, and recorded iterations of each run, the newest, that a copy holds."""
WAIT_MS = 60_000

FREE = ("points", "wait_ms", "since", "count")
PLAIN = ("first=0", "down=0", "sort=index", "sample=0")
"""Parts of a query that do not change the name of an answer, as in ``static/copy.js``."""

OF_THE_MACHINE = ("places", "campaign", "compare", "log", "notes", "why", "timeline", "lora", "run", "runs")
"""Answers whose texts are of programs and settings; those of models and problems stay as they are."""
ABSOLUTE = re.compile(
    r"(?:(?<=file://)|(?<![\w/.:~…]))/(?!dev/null)(?:[^\s/\"'<>|:,;()\[\]{}]+/)+([^\s/\"'<>|:,;()\[\]{}]*)"
)

Answer = Callable[[Query], Any]
Question = tuple[str, dict[str, Any]]  # The name of an endpoint and its query


def write_bundle(library: Library, out: Path, progress: Callable[[int, int], None] = lambda done, of: None) -> int:
    """Write the copy into ``out``, which must not exist or be empty; return the bytes written. ``progress`` is called
    with how many campaigns and runs are done, and of how many.

    Raises UsageError where something is there already, or there is nothing to show; StorageError of a disk.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already; give a new directory: --bundle {out}-2")
    homes = library.homes()
    if not homes:
        raise UsageError("there is no campaign and no run to copy; type: retrain ui DIR --bundle OUT")
    findings = Findings(library)
    answers = {
        route.path.removeprefix("/api/"): route.answer
        for route in api_routes(library, findings, lambda: True)
        if isinstance(route, JsonRoute)
    }
    files: dict[str, str] = {}
    for number, home in enumerate(homes):
        for group, asked in _of_home(answers, library, home):
            name = f"{number:03d}_{group}"
            _write_answers(out / "data" / f"{name}.js", answers, asked, name, files)
        _write_evolutions(out / "data", answers, library, home, f"{number:03d}_problem", files)
        progress(number + 1, len(homes))
    _write_answers(out / "data" / "places.js", answers, [("places", {})], "places", files)
    about = {"made": time.strftime("%Y-%m-%d"), "homes": [home.place for home in homes], "files": files}
    write_text(out / "data.js", f"globalThis.RETRAIN_COPY = {dumps(about)};\n")
    _write_page(out)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _write_page(out: Path) -> None:
    write_text(out / "app.js", joined(STATIC, "app.js"))
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and (path.suffix in (".css", ".svg") or path.name in LOADED):
            _copied(path, out / "page" / path.relative_to(STATIC))
    write_text(out / "index.html", shell_html(static="page", copy=POLICY))


def _copied(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write_answers(
    path: Path, answers: Mapping[str, Answer], asked: Sequence[Question], name: str, files: dict[str, str]
) -> None:
    """Write one file of answers and add it to ``files`` by the answers' names. Refused questions are left out."""
    found = {}
    for endpoint, query in asked:
        try:
            answer = answers[endpoint](_query(query))
            found[key_of(endpoint, query)] = without_paths(answer) if endpoint in OF_THE_MACHINE else answer
        except (ApiError, RetrainError, OSError):
            continue
    _write_found(path, found, name, files)


def without_paths(value: Any) -> Any:
    """Return an answer in whose texts absolute paths are shortened to their last part."""
    if isinstance(value, str):
        return ABSOLUTE.sub(r"…/\1", value)
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value


def _write_found(path: Path, found: Mapping[str, Any], name: str, files: dict[str, str]) -> None:
    if found:
        files |= dict.fromkeys(found, name)
        write_text(path, f"retrainAnswers({dumps(found)});\n", durable=False)


def _write_evolutions(
    data: Path, answers: Mapping[str, Answer], library: Library, home: Home, name: str, files: dict[str, str]
) -> None:
    """Write every held-out problem over the evaluations: all at once, since each answer would read every file."""
    runs = {label: [library.index(run) for run in home.of(label)] for label in home.labels}
    found = {}
    for held_out in _sets(answers, home):
        every = evolutions(runs, held_out)
        found |= {
            key_of("problem", {"at": home.place, "set": held_out, "id": one}): body for one, body in every.items()
        }
    _write_found(data / f"{name}.js", found, name, files)


def _sets(answers: Mapping[str, Answer], home: Home) -> list[str]:
    return answers["problems"](_query({"at": home.place}))["sets"]


def _query(values: Mapping[str, Any]) -> Query:
    return Query(QueryParams(urlencode([(key, str(value)) for key, value in values.items()])))


def key_of(endpoint: str, query: Mapping[str, Any]) -> str:
    """Return the name of an answer, as ``nameOf`` in ``static/copy.js``."""
    pairs = sorted(f"{key}={value}" for key, value in query.items() if key not in FREE and value not in (None, ""))
    return f"{endpoint}?{'&'.join(pair for pair in pairs if pair not in PLAIN)}"


def _of_home(answers: Mapping[str, Answer], library: Library, home: Home) -> Iterator[tuple[str, list[Question]]]:
    """Yield groups of questions about a campaign or run, each for a file of its own."""
    at = home.place
    places = list(dict.fromkeys([at, *(run.place for run in home.runs)]))
    metrics = answers["metrics"](_query({"at": at}))
    keys, watched = [metric["key"] for metric in metrics["metrics"]], metrics["watch"]
    yield "campaign", [("campaign", {"at": at, "wait_ms": WAIT_MS}), ("runs", {"at": at}), ("metrics", {"at": at})]
    by_section: dict[str, list[str]] = {}
    for key in keys:
        by_section.setdefault(key.partition("/")[0] if "/" in key else "general", []).append(key)
    for number, names in enumerate(by_section.values()):
        yield f"columns_{number}", [("columns", {"at": at, "key": key, "x": "step", "points": POINTS}) for key in names]
    axes = [axis for axis in AXES if axis != "step"]
    yield "axes", [("columns", {"at": at, "key": key, "x": x, "points": POINTS}) for key in watched for x in axes]
    if home.kind == "campaign":
        chief = list(dict.fromkeys([key for key in keys if key.startswith("eval/")][:40] + watched))
        yield "curves", [("curves", {"at": at, "key": key, "x": "step"}) for key in chief]
        yield "curves_axes", [("curves", {"at": at, "key": key, "x": x}) for key in chief[:1] + watched for x in axes]
        yield "compare", list(_comparisons(home))
        yield from _problems(answers, library, home)
    yield "why", [("why", {"key": key, "at": run.place}) for key in watched for run in home.runs[:12]]
    yield "notes", [*(("notes", {"at": each}) for each in places), *(("log", {"at": run.place}) for run in home.runs)]
    yield "runs", [("run", {"at": run.place, "x": x}) for run in home.runs for x in AXES]
    yield "timeline", [("timeline", {"at": each}) for each in places]
    yield "lora", [("lora", {"at": each}) for each in places]
    for number, run in enumerate(home.runs):
        yield f"rollouts_{number}", list(_rollouts(library, run))


def _comparisons(home: Home) -> Iterator[Question]:
    """Yield the first run of every condition against the first of the baseline."""
    first = [own[0] for label in home.labels if (own := home.of(label))]
    for other in first[1:]:
        yield "compare", {"a": first[0].place, "b": other.place}


def _rollouts(library: Library, run: Run) -> Iterator[Question]:
    """Yield the newest recorded iterations of each split, with their first rollouts."""
    known = library.index(run).refresh()
    yield "iterations", {"at": run.place}
    yield "campaign", {"at": run.place, "wait_ms": WAIT_MS}
    yield "metrics", {"at": run.place}
    splits = dict.fromkeys(split for split, _ in known)
    for split in splits:
        kept = [one for (own, _), one in known.items() if own == split and one.tokens][-ITERATIONS:]
        for one in kept:
            shared = {"at": run.place, "split": split}
            numbered = [shared | {"iteration": one.number}, *([shared] if one is kept[-1] else [])]
            for about in numbered:
                yield "rollouts", about
                yield from (("rollout", about | {"index": i}) for i in range(min(one.rollouts or 0, ROLLOUTS)))


def _problems(answers: Mapping[str, Answer], library: Library, home: Home) -> Iterator[tuple[str, list[Question]]]:
    """Yield every held-out set by problem, and each of its problems under the baseline and under every other condition
    where their last evaluations are recorded."""
    at = home.place
    first = [runs[0] for label in home.labels if (runs := home.of(label))]
    for number, held_out in enumerate(_sets(answers, home)):
        own, split = {"at": at, "set": held_out}, f"eval/{held_out}"
        plain = [{"at": at}] if number == 0 else []
        orders = [about | more for about in (*plain, own) for more in ({}, *({"sort": sort} for sort in SORTS))]
        yield f"problems_{number}", [("problems", about | {"count": PROBLEMS}) for about in orders]
        listed = answers["problems"](_query(own | {"sort": "problem", "count": PROBLEMS}))["problems"]
        recorded = [run for run in first if _is_recorded(library.index(run), split)]
        for other, run in enumerate(recorded[1:]):
            sides = {"a": recorded[0].place, "b": run.place, "split": split}
            asked = ({}, *({"problem": each["id"]} for each in listed))
            yield f"prompts_{number}_{other}", [("prompt", sides | more) for more in asked]


def _is_recorded(index: Index, split: str) -> bool:
    return any(one.tokens for (own, _), one in index.refresh().items() if own == split)
