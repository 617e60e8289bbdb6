"""Build answers in OpenAI's format, whole or streamed, for completions and chats alike."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.serving.batching import Piece
from retrain.serving.schema import SamplingBody
from retrain.serving.scoring import Tops
from retrain.serving.service import GenerationSet, Service
from retrain.serving.streams import Events, cancel_on_disconnect

LEAST_LOGPROB = -9999.0  # Stands for −∞, which JSON does not have
JsonObject = dict[str, Any]
BodyType = TypeVar("BodyType", bound=SamplingBody)


class ChoiceBuilder(ABC, Generic[BodyType]):
    """Builds the answer to a request: ``n`` choices for each of the prompts, which are token ids. Without a generation
    set the choices have no tokens."""

    kind: ClassVar[str]  # "object" of an answer
    chunk_kind: ClassVar[str]  # "object" of a part of a streamed answer
    id_prefix: ClassVar[str]

    def __init__(
        self, service: Service, body: BodyType, prompts: Sequence[tuple[int, ...]], generation_set: GenerationSet | None
    ):
        self.service, self.body, self.prompts, self.generation_set = service, body, prompts, generation_set
        self.served = service.find(body.model) if generation_set is None else generation_set.served
        self.drawn = [Piece() for _ in range(len(prompts) * (body.n or 1))]
        self.head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": self.served.name,
        }

    async def answer(self, request: Request) -> Response:
        """Return the whole answer or the stream that the request asks for."""
        if self.body.stream and self.generation_set is not None:
            return Events(self.generation_set, self._chunks(self.generation_set))
        return await cancel_on_disconnect(request, self._full_response())

    async def _full_response(self) -> Response:
        if self.generation_set is None:
            self.drawn = [Piece(finish_reason="length") for _ in self.drawn]
        else:
            self.drawn = await self.generation_set.all()
        choices = []
        for index, tokens in enumerate(self.drawn):
            text = self.service.writer(self.body).add(tokens.token_ids, tokens.stop_reason, last=True)
            choices.append(await self._choice(index, tokens, text, True))
        return JSONResponse(self.head | {"choices": choices, "usage": self._usage()} | self.prompt_ids())

    async def _chunks(self, generation_set: GenerationSet) -> AsyncIterator[JsonObject]:
        writers = [self.service.writer(self.body) for _ in self.drawn]
        for choice in self.opening():
            yield self.head | {"choices": [choice]} | self.prompt_ids()
        async for index, piece in generation_set.iter_pieces():
            is_first = not self.drawn[index].token_ids
            self.drawn[index].add(piece)
            text = writers[index].add(piece.token_ids, piece.stop_reason, piece.finish_reason is not None)
            yield self.head | {"choices": [await self._choice(index, piece, text, is_first)]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self.head | {"choices": [], "usage": self._usage()}

    def prompt_of(self, index: int) -> int:
        return index // (self.body.n or 1)

    async def _choice(self, index: int, piece: Piece, text: str, is_first: bool) -> JsonObject:
        """Return a choice, or the streamed part ``piece`` of it, of which ``drawn`` has everything until now."""
        choice = {
            "index": index,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice | await self.content(index, piece, text, is_first)

    def _usage(self) -> JsonObject:
        read, written = sum(map(len, self.prompts)), sum(len(tokens.token_ids) for tokens in self.drawn)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def tops(self, index: int, piece: Piece, top: int) -> Sequence[Tops]:
        """Return the ``top`` most probable tokens at each token of ``piece``."""
        if not top or not piece.token_ids:
            return [()] * len(piece.token_ids)
        token_ids = (*self.prompts[self.prompt_of(index)], *self.drawn[index].token_ids)
        begin = len(token_ids) - len(piece.token_ids)
        return (await self.service.score(self.served, token_ids, begin, self.service.sampling(self.body, 1), top))[1]

    def token_text(self, token_id: int) -> str:
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self.service.tokenizer.decode([token_id], skip_special_tokens=False)

    @abstractmethod
    async def content(self, index: int, piece: Piece, text: str, is_first: bool) -> JsonObject:
        """Return the text or message of a choice, or of a streamed part of it, and its log-probabilities."""

    def opening(self) -> Iterable[JsonObject]:
        """Return the choices that a stream begins with."""
        return ()

    def prompt_ids(self) -> JsonObject:
        """Return the prompt's token ids where the answer has them beside its choices."""
        return {}


def finite(logprob: float) -> float:
    """Return a log-probability as a number that JSON can represent."""
    return max(float(logprob), LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
