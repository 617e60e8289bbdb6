"""Build answers in OpenAI's format, whole or streamed, for completions and chats alike."""

import json
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import ClassVar, Generic, TypeVar

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from retrain.serving.batching import GenerationState, Piece
from retrain.serving.schema import SamplingBody, ServingError
from retrain.serving.scoring import Tops
from retrain.serving.service import Service

LEAST_LOGPROB = -9999.0  # Stands for −∞, which JSON does not have
JsonObject = dict[str, object]
BodyType = TypeVar("BodyType", bound=SamplingBody)


class ChoicesResponse(StreamingResponse, Generic[BodyType]):
    """HTTP response with ``body.n`` choices for each prompt (token ids). When it ends, also because the client
    disconnected, generations that still run are cancelled."""

    kind: ClassVar[str]  # Value of "object" in an answer
    chunk_kind: ClassVar[str]  # Value of "object" in a part of a streamed answer
    id_prefix: ClassVar[str]

    def __init__(self, service: Service, body: BodyType, prompts: Sequence[tuple[int, ...]], max_tokens: int):
        super().__init__(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.service, self.body, self.prompts = service, body, prompts
        self.generations = service.begin(prompts, max_tokens, body)
        self.served = self.generations[0].served
        self.head: JsonObject = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": self.served.name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self.generations:
                generation.is_cancelled = True

    async def stream_response(self, send: Send) -> None:
        """Send one JSON answer, or server-sent events if the request asks for a stream."""
        if self.body.stream:
            await super().stream_response(send)
            return
        async for _ in self._pieces():
            pass
        choices = [await self._choice(each, each.total) for each in self.generations]
        answer = JSONResponse(self.head | {"choices": choices, "usage": self._usage()} | self.prompt_ids())
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _pieces(self) -> AsyncIterator[tuple[GenerationState, Piece]]:
        """Yield pieces until the last generation ends. Raises ServingError when a generation fails."""
        running = len(self.generations)
        while running:
            generation, piece = await self.generations[0].pieces.get()
            if isinstance(piece, ServingError):
                raise piece
            running -= piece.finish_reason is not None
            if self.body.stream or piece.finish_reason is not None:  # decodes all tokens again
                piece.text = generation.new_text(piece)
            yield generation, piece

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks():
                yield _event(chunk)
        except ServingError as refusal:  # the status has already been sent
            yield _event(refusal.body)
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[JsonObject]:
        for choice in self.opening():
            yield self.head | {"choices": [choice]} | self.prompt_ids()
        async for generation, piece in self._pieces():
            yield self.head | {"choices": [await self._choice(generation, piece)]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self.head | {"choices": [], "usage": self._usage()}

    async def _choice(self, generation: GenerationState, piece: Piece) -> JsonObject:
        choice: JsonObject = {
            "index": generation.index,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice | await self.content(generation, piece)

    def _usage(self) -> JsonObject:
        read, written = sum(map(len, self.prompts)), sum(len(each.total.token_ids) for each in self.generations)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def tops(self, generation: GenerationState, piece: Piece, top: int) -> Sequence[Tops]:
        """Return, for each token of ``piece``, the ``top`` most probable tokens in its place."""
        if not top or not piece.token_ids:
            return [()] * len(piece.token_ids)
        begin = len(generation.prompt_ids) + piece.begin
        token_ids = (*generation.prompt_ids, *generation.total.token_ids[: piece.begin], *piece.token_ids)
        return (await self.service.score(self.served, token_ids, begin, self.body, top))[1]

    def token_text(self, token_id: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.decoded(token_id)

    def decoded(self, token_id: int) -> str:
        return self.service.tokenizer.source.decode([token_id], skip_special_tokens=False)

    @abstractmethod
    async def content(self, generation: GenerationState, piece: Piece) -> JsonObject:
        """Return the text or message of a choice, or of a streamed part of it, and its log-probabilities, by field."""

    def opening(self) -> Iterable[JsonObject]:
        """Return the choices that a stream begins with."""
        return ()

    def prompt_ids(self) -> JsonObject:
        """Return the answer's field with the prompt's token ids; {} if the answer has no such field outside of its
        choices."""
        return {}


def finite(logprob: float) -> float:
    """Return the log-probability, raised to ``LEAST_LOGPROB`` if it is lower, infinite or NaN."""
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB


def _event(content: JsonObject) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"
