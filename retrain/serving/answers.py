"""Answer ``/v1/completions`` and ``/v1/chat/completions`` in OpenAI's format, whole or streamed."""

import inspect
import itertools
import json
import math
import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from retrain.config.tasks import Data
from retrain.data.prompts import Renderer
from retrain.environments.tools.calls import read_calls
from retrain.errors import RetrainError
from retrain.serving.batching import GenerationState, Piece
from retrain.serving.schema import ChatBody, CompletionBody, MessageBody, SamplingBody, ServingError, Tools
from retrain.serving.scoring import Tops
from retrain.serving.service import Service
from retrain.types import Problem

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


async def answer_completion(service: Service, body: CompletionBody) -> ChoicesResponse[CompletionBody]:
    service.find(body.model)
    prompts = await service.with_tokenizer(
        lambda tokenizer: [
            encoded(tokenizer, prompt, body.add_special_tokens) if isinstance(prompt, str) else tuple(prompt)
            for prompt in body.prompt
        ]
    )
    return CompletionResponse(service, body, prompts, body.max_tokens)


def encoded(tokenizer: Any, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


class CompletionResponse(ChoicesResponse[CompletionBody]):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionBody, prompts: Sequence[tuple[int, ...]], max_tokens: int):
        super().__init__(service, body, prompts, max_tokens)
        self._offsets = Counter[int]()  # Characters of the tokens of each choice until now
        self._prompt_scores: dict[tuple[int, ...], tuple[list[float], list[Tops]]] = {}

    async def content(self, generation: GenerationState, piece: Piece) -> JsonObject:
        body, prompt_ids, is_first = self.body, generation.prompt_ids, piece.begin == 0
        echoes, text = body.echo and is_first, piece.text
        if echoes:
            prompt = body.prompt[generation.index // body.n]
            text = (prompt if isinstance(prompt, str) else self.service.tokenizer.source.decode(prompt)) + text
        content: JsonObject = {"text": text}
        if body.logprobs is not None:
            token_ids, logprobs = piece.token_ids, piece.logprobs
            tops = await self.tops(generation, piece, body.logprobs)
            if echoes:
                scored, likeliest = await self._scores_of(prompt_ids, body.logprobs)
                token_ids, logprobs = [*prompt_ids, *token_ids], [None, *scored, *logprobs]
                tops = [(), *likeliest, *tops]
            content["logprobs"] = self._logprobs(generation.index, token_ids, logprobs, tops)
        if body.return_token_ids:
            content["prompt_token_ids"] = list(prompt_ids) if is_first else None
        return content

    async def _scores_of(self, prompt_ids: tuple[int, ...], top: int) -> tuple[list[float], list[Tops]]:
        """Return log-probabilities and top tokens of a prompt from its second token on, at temperature 1 and without
        truncation of the distribution."""
        if prompt_ids not in self._prompt_scores and len(prompt_ids) > 1:
            self._prompt_scores[prompt_ids] = await self.service.score(self.served, prompt_ids, 1, None, top)
        return self._prompt_scores.get(prompt_ids, ([], []))

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Tops]
    ) -> JsonObject:
        """Return OpenAI's ``logprobs`` of a choice. The top tokens always include the token itself. A log-probability
        of None marks a prompt's first token, which has no top tokens."""
        names = [self.token_text(token_id) for token_id in token_ids]
        ends = list(itertools.accumulate(map(len, names), initial=self._offsets[index]))
        self._offsets[index] = ends[-1]
        best: list[dict[str, float] | None] = []
        for name, logprob, top in zip(names, logprobs, tops, strict=True):
            likely = {} if logprob is None else {name: finite(logprob)}
            for token_id, other in top if likely else ():
                likely.setdefault(self.token_text(token_id), finite(other))
            best.append(likely or None)
        return {
            "text_offset": ends[:-1],
            "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
            "tokens": names,
            "top_logprobs": best,
        }


async def answer_chat(service: Service, body: ChatBody) -> ChoicesResponse[ChatBody]:
    service.find(body.model)
    prompt_ids = await service.with_tokenizer(
        lambda tokenizer: rendered(tokenizer, body.messages, body.tools, body.chat_template_kwargs)
    )
    max_tokens = body.max_completion_tokens or body.max_tokens or service.base.context_length - len(prompt_ids)
    return ChatResponse(service, body, [prompt_ids], max(1, max_tokens))


def rendered(tokenizer: Any, messages: Sequence[MessageBody], tools: Tools, more: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a conversation up to the start of the answer. ``more`` are further variables for the chat
    template. Raises ServingError (400) if the template rejects the conversation or a variable has a reserved name."""
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := sorted(reserved & set(more)):
        raise ServingError(400, f"chat_template_kwargs cannot hold {taken[0]}", "chat_template_kwargs")
    renderer = Renderer(tokenizer, Data().model_copy(update={"chat_template_kwargs": dict(more)}), tools_prompt="")
    plain: Any = [message.model_dump(exclude_none=True) for message in messages]
    try:
        return renderer.prompt(Problem("of the request", "", ""), plain, tools).token_ids
    except (RetrainError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ServingError(400, f"the conversation cannot be rendered: {error}"[:1000], "messages") from error


class ChatResponse(ChoicesResponse[ChatBody]):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self) -> Iterable[JsonObject]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": each.index, "delta": delta, "logprobs": None, "finish_reason": None} for each in self.generations
        ]

    def prompt_ids(self) -> JsonObject:
        return {"prompt_token_ids": list(self.prompts[0])} if self.body.return_token_ids else {}

    async def content(self, generation: GenerationState, piece: Piece) -> JsonObject:
        reason, calls = piece.finish_reason, []
        message: JsonObject = {"content": piece.text}
        if self.body.tools:  # calls can only be recognised at the end
            text, calls = read_calls(generation.total.text, self.body.tools) if reason else ("", [])
            message = {"content": text if not calls else text or None} if reason else {}
        if calls:
            message["tool_calls"] = [
                ({"index": index} if self.body.stream else {})
                | {
                    "id": f"call_{secrets.token_hex(12)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for index, call in enumerate(calls)
            ]
            reason = "tool_calls" if reason == "stop" else reason
        whole = {} if self.body.stream else {"role": "assistant", "refusal": None}
        content: JsonObject = {"delta" if self.body.stream else "message": whole | message, "finish_reason": reason}
        if self.body.logprobs:
            tops = await self.tops(generation, piece, self.body.top_logprobs)
            tokens = [
                self._token(token_id, logprob) | {"top_logprobs": [self._token(*likely) for likely in top]}
                for token_id, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True)
            ]
            content["logprobs"] = {"content": tokens, "refusal": None}
        return content

    def _token(self, token_id: int, logprob: float) -> JsonObject:
        data = list(self.decoded(token_id).encode(errors="replace"))
        return {"token": self.token_text(token_id), "logprob": finite(logprob), "bytes": data}
