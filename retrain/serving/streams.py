"""Cancel generations whose client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from retrain.serving.refusal import ServingError
from retrain.serving.service import GenerationSet

T = TypeVar("T")
END = b"data: [DONE]\n\n"  # The last event of a stream


async def cancel_on_disconnect(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``coroutine``; cancel it and raise ClientDisconnect if the client disconnects first."""
    task, gone = asyncio.ensure_future(coroutine), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Server-sent events of generations, which are cancelled when the client stops reading."""

    def __init__(self, generation_set: GenerationSet, chunks: AsyncIterator[dict[str, Any]]):
        self._generation_set = generation_set
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation_set.cancel()


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except ServingError as refusal:  # the status has already been sent
        yield _event(refusal.body())
    yield END


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
