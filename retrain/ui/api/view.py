"""``/api/events`` and ``POST /api/view``: what changes is told to open pages, and a program may move them."""

import json
import re
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from retrain.ui.answers import ApiError, Query, error_response
from retrain.ui.context import ApiContext
from retrain.ui.events import Pages, stream

MOST_BODY = 16_384
MOST_URL = 8_192


def routes(context: ApiContext, views: Sequence[str], closing: Callable[[], bool]) -> list[Route]:
    pages = Pages()

    async def events(request: Request) -> Response:
        try:
            query = Query(request)
            location = request.query_params.get("at") or None
            if location is not None:
                context.library.places.find(query.text("at"))
            pages.check()
        except ApiError as error:
            return error_response(error.status, error.text)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            stream(context, location, pages, closing), media_type="text/event-stream", headers=headers
        )

    async def view(request: Request) -> Response:
        try:
            url = view_in(await _body(request), views)
        except ApiError as error:
            return error_response(error.status, error.text)
        return JSONResponse({"url": url, "pages": pages.move(url)})

    return [Route("/api/events", events, methods=["GET"]), Route("/api/view", view, methods=["POST"])]


def view_in(body: bytes, views: Sequence[str]) -> str:
    """Return the address in a request's body. Raises ApiError if it is not one of this server's pages."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        message = None
    url = message.get("url") if isinstance(message, dict) else None
    if not isinstance(url, str) or not _is_page(url, views):
        known = ", ".join(f"/{name}/…" for name in views[:3])
        raise ApiError(400, f'send {{"url": "…"}} with the address of a page of this server: /, {known}')
    return url


def _is_page(url: str, views: Sequence[str]) -> bool:
    path = url.partition("?")[0].partition("#")[0]
    odd = len(url) > MOST_URL or re.search(r"[\x00-\x20\\\x7f-\x9f]", url) is not None
    return not odd and path.startswith("/") and (path == "/" or path.split("/")[1] in views)


async def _body(request: Request) -> bytes:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                raise ApiError(413, f"the body is longer than {MOST_BODY} bytes")
    except ClientDisconnect:
        raise ApiError(400, "the body ended early") from None
    return body
