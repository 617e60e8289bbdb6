"""The application: the API, the page's files, and one shell for every address of a page."""

import asyncio
import functools
import mimetypes
import zlib
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from retrain import __version__
from retrain.records.pages import STATIC, environment
from retrain.ui.answers import error_response
from retrain.ui.api import (
    campaign,
    columns,
    compare,
    curves,
    histogram,
    lora,
    metrics,
    notes,
    places,
    problems,
    rollouts,
    run,
    timeline,
    view,
)  # fmt: skip
from retrain.ui.findings import Findings
from retrain.ui.guard import Guard
from retrain.ui.library import Library
from retrain.ui.summary import Summaries

VIEWS = (
    "campaign", "metrics", "problems", "prompt", "rollouts", "tokens", "timeline", "lora", "compare", "notes",
)  # fmt: skip
"""Pages besides the first one: ``/<view>/<place>?…``."""
FILES = ("/api/", "/static/")
FOR_EVER = "public, max-age=31536000, immutable"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


def app_of(
    library: Library,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    closing: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """Return the application. ``host`` and ``port`` are where it listens, ``token`` what a request must bring;
    ``closing`` returns whether the server ends."""
    findings = Findings(library)
    app = Starlette(
        routes=[*api_routes(library, findings, closing), *page_routes()],
        exception_handlers={HTTPException: _http, Exception: _failed},
    )
    app.router.redirect_slashes = False
    app.add_middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1)
    findings.ask_where_needed(library.homes())
    return Guard(app, host, token, port)


def api_routes(library: Library, findings: Findings, closing: Callable[[], bool]) -> list[BaseRoute]:
    summaries = Summaries(library, findings)
    return [
        *places.routes(library, findings, summaries),
        *campaign.routes(library, findings, summaries),
        *curves.routes(library),
        *metrics.routes(library),
        *columns.routes(library),
        *(route for group in (run, histogram, notes, compare, timeline, lora) for route in group.routes(library)),
        *rollouts.routes(library),
        *problems.routes(library),
        *view.routes(library, findings, VIEWS, closing),
    ]


def page_routes() -> list[BaseRoute]:
    """Return routes for the page's files, and for its shell at every address that a page can have."""
    shells = [
        Route(path, _shell, methods=["GET"]) for name in VIEWS for path in (f"/{name}", f"/{name}/{{place:path}}")
    ]
    return [Route("/", _shell, methods=["GET"]), *shells, Route("/static/{path:path}", _static, methods=["GET"])]


@functools.cache
def static_version() -> str:
    """Return a checksum of the page's files: URLs with it may be cached for ever."""
    digest = zlib.crc32(__version__.encode())
    files = {path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*")) if path.is_file()}
    for name, path in files.items():
        digest = zlib.crc32(path.read_bytes(), zlib.crc32(name.encode(), digest))
    return f"{digest:08x}"


@functools.cache
def shell_html(static: str | None = None, copy: str = "") -> str:
    """Return the page's one document. ``static``: where its files are; ``copy``: the content policy of a copy without
    a server, which holds its scripts beside it."""
    return (
        environment()
        .get_template("shell.html")
        .render(version=__version__, static=static or f"/static/{static_version()}", copy=copy)
    )


def _shell(request: Request) -> Response:
    return HTMLResponse(shell_html(), headers={"Cache-Control": "no-cache"})


def _static(request: Request) -> Response:
    """Answer with a file of the page, with the version in its address or without."""
    name: str = request.path_params["path"]
    version, _, rest = name.partition("/")
    kept = version == static_version()
    found = _inside(rest if kept else name)
    if found is None:
        return error_response(404, f"the page has no file {name[:100]!r}")
    kind = TYPES.get(found.suffix) or mimetypes.guess_type(found.name)[0] or "application/octet-stream"
    headers = {"Cache-Control": FOR_EVER if kept else "no-cache"}
    return Response(found.read_bytes(), media_type=kind, headers=headers)


def _inside(name: str) -> Path | None:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") or part.startswith(".") for part in parts):
        return None
    path = STATIC.joinpath(*parts)
    return path if path.is_file() and path.resolve().is_relative_to(STATIC.resolve()) else None


def _http(request: Request, error: Exception) -> Response:
    """Answer for an unknown address or method: with the page in a browser, else as JSON."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404 and "text/html" in request.headers.get("accept", "") and not path.startswith(FILES):
        return HTMLResponse(shell_html(), 404, headers={"Cache-Control": "no-cache"})
    if error.status_code == 404:
        return error_response(404, f"there is no {request.url.path[:100]!r} here")
    return error_response(error.status_code, str(error.detail))


async def _failed(request: Request, error: Exception) -> JSONResponse:
    """Answer after a mistake of ours, whose traceback is in the terminal."""
    await asyncio.sleep(0)
    return error_response(500, f"retrain ui failed here ({type(error).__name__}); the terminal shows where")
