"""Server-sent events for open pages: changes of files, seen by their sizes and times, and views to move to.

Files are looked at once a second, and only while somebody listens.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.concurrency import run_in_threadpool

from retrain.files import dumps, stamp_of
from retrain.records.schema.layout import EVALS, ITERATIONS, LOG, METRICS, NOTES, SPANS
from retrain.ui.answers import ApiError
from retrain.ui.findings import Findings
from retrain.ui.library import Library
from retrain.ui.sources import Home, Run

LOOK_EVERY_S = 1.0
BEAT_S = 15.0  # Seconds between keep-alive comments, for proxies that close idle connections
MOST_LISTENERS = 64
FOREIGN = "foreign"
WATCHED = {
    METRICS: "metrics", EVALS: "evals", NOTES: "notes", LOG: "log", ITERATIONS: "rollouts", SPANS: "timeline",
    FOREIGN: "metrics",
}  # fmt: skip
"""Files of a run that grow, and what a page calls it; last those of another tool."""

Snapshot = dict[str, dict[str, Any]]  # Stamps and states of runs, by place


class Pages:
    """The open pages that listen for events; ``move`` sends all of them to a view."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[str]] = set()

    def check(self) -> None:
        """Raise ApiError where there are too many."""
        if len(self._queues) >= MOST_LISTENERS:
            raise ApiError(503, f"{MOST_LISTENERS} pages listen already: close some")

    @contextmanager
    def joined(self) -> Iterator[asyncio.Queue[str]]:
        """Provide a listener's queue of views, for as long as it listens."""
        queue: asyncio.Queue[str] = asyncio.Queue(8)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def move(self, url: str) -> int:
        """Move every page to this view; return how many there are."""
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait(url)
        return len(self._queues)


async def stream(
    library: Library, findings: Findings, place: str | None, pages: Pages, closing: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield the events of one listener, about one place or all. It counts as a listener while it is read."""
    with pages.joined() as queue:
        before, beat = await run_in_threadpool(snapshot, library, findings, place), time.monotonic()
        yield "retry: 2000\n\n"
        while not closing():
            try:
                url = await asyncio.wait_for(queue.get(), LOOK_EVERY_S)
                yield event("view", {"url": url})
                continue
            except TimeoutError:
                pass
            now = await run_in_threadpool(snapshot, library, findings, place)
            changed = await run_in_threadpool(changes, library, before, now)
            for each in changed:
                yield event("changed", each)
            before = now
            if changed:
                beat = time.monotonic()
            elif time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                yield ": still here\n\n"


def event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {dumps(data)}\n\n"


def snapshot(library: Library, findings: Findings, place: str | None) -> Snapshot:
    """Return sizes, times and states of the runs by place; of all campaigns where no place is named."""
    try:
        homes = library.homes() if place is None else [library.home(place)]
    except (ApiError, OSError):  # taken away: it may come back
        return {}
    found: Snapshot = {}
    for home in homes:
        if place is not None:
            findings.ask([home])
        for run in home.runs:
            found[run.place] = _stamps(library, home, run)
        if home.runs and home.manifest:
            found.setdefault(home.place, {})["comparison"] = findings.version(home)
    return found


def changes(library: Library, before: Snapshot, now: Snapshot) -> list[dict[str, Any]]:
    """Return what is different, by run; ``rows`` where numbers came."""
    out = []
    for place, facts in now.items():
        old = before.get(place, {})
        names = (METRICS, FOREIGN)
        what = list(dict.fromkeys(WATCHED.get(name, name) for name, value in facts.items()
                                  if name != "run" and old.get(name) != value))  # fmt: skip
        if not what:
            continue
        change: dict[str, Any] = {"place": place, "what": what}
        if "run" in facts and any(old.get(name) != facts.get(name) for name in names):
            change["rows"] = _rows(library, facts["run"])
        out.append(change)
    return out + [{"place": place, "what": ["state"]} for place in before if place not in now]


def _stamps(library: Library, home: Home, run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {name: stamp_of(library.file(run, name)) for name in WATCHED if name != FOREIGN}
    if run.reader is not None and run.foreign is not None:
        facts[FOREIGN] = run.reader.stamp(run.foreign, library.places.file)
    facts[METRICS] = facts[METRICS], _is_reading(library, run)
    return facts | {"state": (home.state, run.state, run.worker), "run": run}


def _is_reading(library: Library, run: Run) -> bool:
    try:
        return library.numbers(run, refresh=False).reading
    except ApiError:
        return False


def _rows(library: Library, run: Run) -> int | None:
    try:
        return len(library.numbers(run))
    except (ApiError, OSError):
        return None
