"""Build the application: the API, the page's files, and one HTML document for the addresses of all pages."""

import asyncio
import zlib
from collections.abc import Callable
from functools import cache, partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from retrain import __version__
from retrain.records.pages import STATIC, environment
from retrain.ui.answers import JsonRoute, error_response
from retrain.ui.api.campaign import campaign, places, runs
from retrain.ui.api.columns import columns
from retrain.ui.api.compare import compare
from retrain.ui.api.curves import curves
from retrain.ui.api.histogram import histogram
from retrain.ui.api.lora import lora
from retrain.ui.api.metrics import metrics, why
from retrain.ui.api.notes import log, notes
from retrain.ui.api.problems import problem, problems, prompt
from retrain.ui.api.rollouts import iterations, rollout, rollouts, search
from retrain.ui.api.run import run
from retrain.ui.api.timeline import timeline
from retrain.ui.context import ApiContext, Endpoint
from retrain.ui.events import events_route
from retrain.ui.guard import Guard
from retrain.ui.library import Library

ENDPOINTS: tuple[Endpoint, ...] = (
    places, campaign, runs, curves, metrics, why, columns, run, histogram, notes, log, compare, timeline, lora,
    iterations, rollouts, rollout, search, problems, problem, prompt,
)  # fmt: skip

VIEWS = (
    "campaign", "metrics", "problems", "prompt", "rollouts", "tokens", "timeline", "lora", "compare", "notes",
)  # fmt: skip
"""Pages besides the first one: ``/<view>/<location>?…``."""
FILES = ("/api/", "/static/")
FOR_EVER = "public, max-age=31536000, immutable"
STATIC_FILES = StaticFiles(directory=STATIC)


def app_of(
    library: Library,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    closing: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    context = ApiContext.over(library)
    app = Starlette(
        routes=[*api_routes(context), events_route(context, closing), *page_routes()],
        exception_handlers={HTTPException: _http, Exception: _failed},
    )
    app.router.redirect_slashes = False
    app.add_middleware(GZipMiddleware, minimum_size=2_000, compresslevel=1)
    context.findings.ask_where_needed(library.homes())
    return Guard(app, host, token, port)


def api_routes(context: ApiContext) -> list[JsonRoute]:
    return [JsonRoute(f"/api/{answer.__name__}", partial(answer, context)) for answer in ENDPOINTS]


def page_routes() -> list[BaseRoute]:
    shells = [
        Route(path, _shell, methods=["GET"]) for name in VIEWS for path in (f"/{name}", f"/{name}/{{location:path}}")
    ]
    return [Route("/", _shell, methods=["GET"]), *shells, Route("/static/{path:path}", _static, methods=["GET"])]


@cache
def static_version() -> str:
    digest = zlib.crc32(__version__.encode())
    files = {path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*")) if path.is_file()}
    for name, path in files.items():
        digest = zlib.crc32(path.read_bytes(), zlib.crc32(name.encode(), digest))
    return f"{digest:08x}"


@cache
def shell_html(static: str | None = None, copy: str = "") -> str:
    """Return the page's HTML document. ``static``: address of its files. ``copy``: content security policy of a copy
    that opens without a server; "" on a server."""
    template = environment().get_template("shell.html")
    return template.render(version=__version__, static=static or f"/static/{static_version()}", copy=copy)


def _shell(request: Request) -> Response:
    return HTMLResponse(shell_html(), headers={"Cache-Control": "no-cache"})


async def _static(request: Request) -> Response:
    name: str = request.path_params["path"]
    version, _, rest = name.partition("/")
    is_versioned = version == static_version()
    answer = await STATIC_FILES.get_response(rest if is_versioned else name, request.scope)
    answer.headers["Cache-Control"] = FOR_EVER if is_versioned else "no-cache"
    return answer


def _http(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address or method. A browser that asks for an unknown page gets the HTML
    document, any other request a JSON error."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404 and "text/html" in request.headers.get("accept", "") and not path.startswith(FILES):
        return HTMLResponse(shell_html(), 404, headers={"Cache-Control": "no-cache"})
    if error.status_code == 404:
        return error_response(404, f"there is no {request.url.path[:100]!r} here")
    return error_response(error.status_code, str(error.detail))


async def _failed(request: Request, error: Exception) -> JSONResponse:
    await asyncio.sleep(0)
    return error_response(500, f"retrain ui failed here ({type(error).__name__}); the terminal shows where")
