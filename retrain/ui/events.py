"""``/api/events``: changes of files, detected by size and time, as server-sent events for open pages.

Files are checked once a second, and only while a page listens.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from retrain.files import dumps, stamp_of
from retrain.records.schema.layout import EVALS, ITERATIONS, LOG, METRICS, NOTES, SPANS
from retrain.ui.answers import ApiError, JsonObject, Query, error_response
from retrain.ui.context import ApiContext
from retrain.ui.library import Library
from retrain.ui.sources import Home, RunSource

LOOK_EVERY_S = 1.0
BEAT_S = 15.0  # Seconds between keep-alive comments, for proxies that close idle connections
MOST_LISTENERS = 64
FOREIGN = "foreign"
WATCHED = {
    METRICS: "metrics", EVALS: "evals", NOTES: "notes", LOG: "log", ITERATIONS: "rollouts", SPANS: "timeline",
    FOREIGN: "metrics",
}  # fmt: skip
"""Growing files of a run → name of their change in events. ``FOREIGN`` stands for the files of another tool."""

Snapshot = dict[str, JsonObject]  # Stamps and states of runs, by location


def events_route(context: ApiContext, closing: Callable[[], bool]) -> Route:
    listeners: set[object] = set()

    async def events(request: Request) -> Response:
        try:
            query = Query(request)
            location = request.query_params.get("at") or None
            if location is not None:
                context.library.places.find(query.text("at"))
            if len(listeners) >= MOST_LISTENERS:
                raise ApiError(503, f"{MOST_LISTENERS} pages listen already: close some")
        except ApiError as error:
            return error_response(error.status, error.text)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        lines = stream(context, location, listeners, closing)
        return StreamingResponse(lines, media_type="text/event-stream", headers=headers)

    return Route("/api/events", events, methods=["GET"])


async def stream(
    context: ApiContext, location: str | None, listeners: set[object], closing: Callable[[], bool]
) -> AsyncIterator[str]:
    """Yield events about one location, or about all if it is None, for one page. The page counts in ``listeners`` until
    its connection is closed."""
    listener = object()
    listeners.add(listener)
    try:
        before, beat = await run_in_threadpool(snapshot, context, location), time.monotonic()
        yield "retry: 2000\n\n"
        while not closing():
            await asyncio.sleep(LOOK_EVERY_S)
            now = await run_in_threadpool(snapshot, context, location)
            changed = await run_in_threadpool(changes, context.library, before, now)
            for each in changed:
                yield f"event: changed\ndata: {dumps(each)}\n\n"
            before = now
            if changed:
                beat = time.monotonic()
            elif time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                yield ": still here\n\n"
    finally:
        listeners.discard(listener)


def snapshot(context: ApiContext, location: str | None) -> Snapshot:
    try:
        homes = context.library.homes() if location is None else [context.library.home(location)]
    except (ApiError, OSError):  # moved away; it may come back
        return {}
    now: Snapshot = {}
    for home in homes:
        if location is not None:
            context.findings.ask([home])
        for run in home.runs:
            now[run.location] = _stamps(context.library, home, run)
        if home.runs and home.manifest:
            now.setdefault(home.location, {})["comparison"] = context.findings.last(home)
    return now


def changes(library: Library, before: Snapshot, now: Snapshot) -> list[JsonObject]:
    out: list[JsonObject] = []
    for location, facts in now.items():
        old = before.get(location, {})
        kinds = list(dict.fromkeys(WATCHED.get(name, name) for name, value in facts.items()
                                   if name != "run" and old.get(name) != value))  # fmt: skip
        if not kinds:
            continue
        change: JsonObject = {"place": location, "what": kinds}
        run = facts.get("run")
        if isinstance(run, RunSource) and any(old.get(name) != facts.get(name) for name in (METRICS, FOREIGN)):
            change["rows"] = _rows(library, run)
        out.append(change)
    return out + [{"place": location, "what": ["state"]} for location in before if location not in now]


def _stamps(library: Library, home: Home, run: RunSource) -> JsonObject:
    facts: JsonObject = {name: stamp_of(library.file(run, name)) for name in WATCHED if name != FOREIGN}
    if run.reader is not None and run.foreign is not None:
        facts[FOREIGN] = run.reader.stamp(run.foreign, library.places.file)
    facts[METRICS] = facts[METRICS], _is_reading(library, run)
    return facts | {"state": (home.state, run.state, run.worker), "run": run}


def _is_reading(library: Library, run: RunSource) -> bool:
    try:
        return library.numbers(run, refresh=False).reading
    except ApiError:
        return False


def _rows(library: Library, run: RunSource) -> int | None:
    try:
        return len(library.numbers(run))
    except (ApiError, OSError):
        return None
