"""Make the ASGI application with the routes of OpenAI's completions and chats and of vLLM's adapter management."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from retrain import __version__
from retrain.serving import schema
from retrain.serving.answers import answer_chat, answer_completion, encoded, rendered
from retrain.serving.schema import ModelT, ServingError
from retrain.serving.service import Service
from retrain.util.addresses import is_local

MAX_UPLOAD = 1 << 30  # Bytes of the body of a request that holds an adapter


def app_of(service: Service, api_key: str | None = None) -> Starlette:
    """Return the application. ``api_key`` is the Bearer token; if it is None, only this machine has access."""

    def get(path: str, handler: Callable[[Service], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            _check_access(request, api_key)
            return handler(service)

        return Route(path, endpoint)

    def post(
        path: str,
        kind: type[ModelT],
        handler: Callable[[Service, ModelT], Awaitable[Response]],
        limit: int | None = None,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            _check_access(request, api_key)
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ServingError(415, "send JSON, with Content-Type: application/json")
            return await handler(service, schema.read(kind, await _body(request, limit or service.max_body)))

        return Route(path, endpoint, methods=["POST"])

    app = Starlette(
        routes=[
            get("/health", health),
            get("/version", lambda service: JSONResponse({"version": __version__})),
            get("/v1/models", models),
            post("/v1/completions", schema.CompletionBody, answer_completion),
            post("/v1/chat/completions", schema.ChatBody, answer_chat),
            post("/tokenize", schema.TokenizeBody, tokenize),
            post("/detokenize", schema.DetokenizeBody, detokenize),
            post("/v1/load_lora_adapter", schema.LoadBody, load_adapter, MAX_UPLOAD),
            post("/v1/unload_lora_adapter", schema.UnloadBody, unload_adapter),
        ],
        exception_handlers=dict.fromkeys((ServingError, HTTPException, ClientDisconnect, Exception), _refused),
    )
    app.router.redirect_slashes = False
    return app


def _check_access(request: Request, api_key: str | None) -> None:
    """Raise ServingError: 401 without the key (/health and /version need none), or 403 from another machine if no key
    is set."""
    if api_key is None:
        if not is_local(request.url.hostname or "") or (request.client and not is_local(request.client.host)):
            raise ServingError(403, "this server answers programs of its own machine only")
    elif request.url.path not in ("/health", "/version"):
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), api_key.encode()):
            raise ServingError(401, "the key is missing or wrong: send it as Authorization: Bearer …")


async def _body(request: Request, limit: int) -> bytes:
    """Return the body. Raises ServingError (413) for more than ``limit`` bytes, without reading all of them."""
    declared, body = request.headers.get("content-length", ""), bytearray()
    too_long = ServingError(413, f"the body has more than {limit} bytes, the limit of {request.url.path}")
    if declared.isdigit() and int(declared) > limit:
        raise too_long
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_long
    return bytes(body)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        path, status = request.url.path, error.status_code
        texts = {404: f"there is no {path}", 405: f"{path} takes no {request.method}"}
        error = ServingError(status, texts.get(status, str(error.detail)))
    elif not isinstance(error, ServingError):
        error = ServingError(500, "internal error: see the server's log")
    retry = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error.body, error.status, retry)


def health(service: Service) -> Response:
    return Response(status_code=503 if service.batcher.failure else 200)


def models(service: Service) -> Response:
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


async def load_adapter(service: Service, body: schema.LoadBody) -> Response:
    await service.load(body.lora_name, body.lora_path, body.files, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(service: Service, body: schema.UnloadBody) -> Response:
    service.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def tokenize(service: Service, body: schema.TokenizeBody) -> Response:
    service.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ServingError(400, "give either prompt or messages", "prompt")

    def token_ids(tokenizer: Any) -> tuple[int, ...]:
        if body.messages is not None:
            return rendered(tokenizer, body.messages, body.tools, {})
        return encoded(tokenizer, body.prompt or "", body.add_special_tokens)

    tokens = await service.with_tokenizer(token_ids)
    return JSONResponse({"count": len(tokens), "max_model_len": service.base.context_length, "tokens": tokens})


async def detokenize(service: Service, body: schema.DetokenizeBody) -> Response:
    service.find(body.model)
    if any(token >= service.base.vocab_size for token in body.tokens):
        raise ServingError(400, "a token is out of vocabulary", "tokens")
    return JSONResponse({"prompt": await service.with_tokenizer(lambda tokenizer: tokenizer.decode(body.tokens))})
