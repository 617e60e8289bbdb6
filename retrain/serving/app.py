"""Route OpenAI's completions and chats, and vLLM's adapter management, as one ASGI application."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrain import __version__
from retrain.serving import chat, completions, tokens
from retrain.serving.refusal import ServingError
from retrain.serving.schema import LoadBody, UnloadBody, read
from retrain.serving.service import Service
from retrain.util.addresses import is_local

MAX_UPLOAD = 1 << 30  # Bytes of the body of a request that holds an adapter

Handler = Callable[[Service, Request], Awaitable[Response]]


def app_of(service: Service, api_key: str | None = None) -> Starlette:
    """Return the application. ``api_key`` is the Bearer token; None accepts this machine only."""

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    app = Starlette(
        routes=[
            route("/health", health),
            route("/version", version),
            route("/v1/models", models),
            route("/v1/completions", completions.answer, "POST"),
            route("/v1/chat/completions", chat.answer, "POST"),
            route("/tokenize", tokens.tokenize, "POST"),
            route("/detokenize", tokens.detokenize, "POST"),
            route("/v1/load_lora_adapter", load_adapter, "POST"),
            route("/v1/unload_lora_adapter", unload_adapter, "POST"),
        ],
        exception_handlers=dict.fromkeys((ServingError, HTTPException, ClientDisconnect, Exception), _refused),
    )
    app.router.redirect_slashes = False
    app.add_middleware(Gate, api_key=api_key, max_body=service.max_body)
    return app


class Gate:
    """Checks every request before its handler: API key or local address, JSON, and size of the body."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int):
        self.app, self.api_key, self.max_body = app, api_key, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check(Request(scope))
        except ServingError as refusal:
            await _answer(refusal)(scope, receive, send)
            return
        limit = MAX_UPLOAD if scope["path"] == "/v1/load_lora_adapter" else self.max_body
        too_long = ServingError(413, f"the body has more than {limit} bytes, the limit of {scope['path']}")
        seen = 0
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            await _answer(too_long)(scope, receive, send)
            return

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise too_long
            return message

        await self.app(scope, bounded, send)

    def _check(self, request: Request) -> None:
        if self.api_key is None:
            if not is_local(request.url.hostname or "") or (request.client and not is_local(request.client.host)):
                raise ServingError(403, "this server answers programs of its own machine only")
        elif request.url.path.startswith(("/v1", "/tokenize", "/detokenize")):
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), self.api_key.encode()):
                raise ServingError(401, "the key is missing or wrong: send it as Authorization: Bearer …")
        if request.method == "POST":
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ServingError(415, "send JSON, with Content-Type: application/json")


def _answer(refusal: ServingError) -> JSONResponse:
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


async def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that has raised an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        path, status = request.url.path, error.status_code
        texts = {404: f"there is no {path}", 405: f"{path} takes no {request.method}"}
        return _answer(ServingError(status, texts.get(status, str(error.detail))))
    internal = ServingError(500, "internal error: see the server's log")
    return _answer(error if isinstance(error, ServingError) else internal)


async def health(service: Service, request: Request) -> Response:
    return Response(status_code=503 if service.batcher.failure else 200)


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": __version__})


async def models(service: Service, request: Request) -> Response:
    cards = [
        {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "retrain",
            "root": served.root,
            "parent": served.parent,
            "max_model_len": service.base.context_length,
        }
        for served in service.served.values()
    ]
    return JSONResponse({"object": "list", "data": cards})


async def load_adapter(service: Service, request: Request) -> Response:
    body = read(LoadBody, await request.body())
    await service.load(body.lora_name, body.lora_path, body.files, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(service: Service, request: Request) -> Response:
    body = read(UnloadBody, await request.body())
    service.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
