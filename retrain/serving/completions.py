"""Handle ``/v1/completions``: texts or token ids in, texts and token ids out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.serving.adapters import ServedWeights
from retrain.serving.answers import completion_logprobs, head, new_id, usage
from retrain.serving.batching import Piece
from retrain.serving.schema import CompletionBody, read
from retrain.serving.scoring import Tops
from retrain.serving.service import CompletionTokens, GenerationSet, Service
from retrain.serving.streams import Events, cancel_on_disconnect
from retrain.serving.tokens import encoded


@dataclass(frozen=True)
class Echo:
    """Prompt as repeated in the answer, with the log-probabilities of all tokens but the first."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: list[float | None]
    tops: list[Tops | None]


async def answer(service: Service, request: Request) -> Response:
    body = read(CompletionBody, await request.body())
    body.check()
    service.find(body.model)
    inputs = body.prompts()
    special = body.add_special_tokens is not False
    if isinstance(inputs[0], str):
        prompts = await service.with_tokenizer(lambda tokenizer: [encoded(tokenizer, text, special) for text in inputs])
    else:
        prompts = [tuple(token_ids) for token_ids in inputs]
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    for prompt_ids in prompts:
        service.check_prompt(prompt_ids, max_tokens)
    sampling = service.sampling(body, max_tokens)
    if not max_tokens:  # only echoes the prompts
        choices = ChoiceBuilder(service, body, inputs, prompts, service.find(body.model))
        return await cancel_on_disconnect(request, choices.response(None))
    generation_set = service.begin(body.model, prompts, sampling, body)
    choices = ChoiceBuilder(service, body, inputs, prompts, generation_set.served)
    if body.stream:
        return Events(generation_set, choices.chunks(generation_set))
    return await cancel_on_disconnect(request, choices.response(generation_set))


@dataclass(frozen=True)
class ChoiceBuilder:
    """Builds the choices of a request, ``n`` for each prompt; ``inputs`` are the prompts as given."""

    service: Service
    body: CompletionBody
    inputs: list[Any]
    prompts: list[tuple[int, ...]]
    served: ServedWeights

    async def response(self, generation_set: GenerationSet | None) -> Response:
        """Return the complete response; None: choices without tokens."""
        count = len(self.prompts) * (self.body.n or 1)
        empty = [CompletionTokens(finish_reason="length") for _ in range(count)]
        drawn = await generation_set.all() if generation_set is not None else empty
        echoes, choices = await self._echoes(), []
        for index, tokens in enumerate(drawn):
            text = self.service.writer(self.body).add(tokens.token_ids, tokens.stop_reason, last=True)
            choices.append(await self._choice(index, tokens, tokens, text, echoes[self._prompt_of(index)]))
        top = head("text_completion", new_id("cmpl"), self.served.name)
        return JSONResponse(top | {"choices": choices, "usage": self._usage(drawn)})

    async def chunks(self, generation_set: GenerationSet) -> AsyncIterator[dict[str, Any]]:
        top = head("text_completion", new_id("cmpl"), self.served.name)
        writers = [self.service.writer(self.body) for _ in generation_set.generations]
        drawn = [CompletionTokens() for _ in generation_set.generations]
        offsets = [0] * len(drawn)
        echoes = await self._echoes()
        async for number, piece in generation_set.iter_pieces():
            tokens, last = drawn[number], piece.finish_reason is not None
            first = not tokens.token_ids
            tokens.add(piece)
            text = writers[number].add(piece.token_ids, piece.stop_reason, last)
            echo = echoes[self._prompt_of(number)] if first else None
            choice = await self._choice(number, tokens, piece, text, echo, offsets[number], first)
            offsets[number] += sum(map(len, (choice["logprobs"] or {}).get("tokens", ())))
            yield top | {"choices": [choice]}
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield top | {"choices": [], "usage": self._usage(drawn)}

    def _prompt_of(self, index: int) -> int:
        return index // (self.body.n or 1)

    def _usage(self, drawn: list[CompletionTokens]) -> dict[str, Any]:
        return usage(sum(map(len, self.prompts)), sum(len(tokens.token_ids) for tokens in drawn))

    async def _echoes(self) -> list[Echo | None]:
        if not self.body.echo:
            return [None] * len(self.prompts)
        echoes: list[Echo | None] = []
        for source, prompt_ids in zip(self.inputs, self.prompts, strict=True):
            text = source if isinstance(source, str) else self.service.tokenizer.decode(list(prompt_ids))
            logprobs: list[float | None] = [None]
            tops: list[Tops | None] = [None]
            if self.body.logprobs is not None and len(prompt_ids) > 1:
                scored, best = await self.service.score(self.served, prompt_ids, 1, None, self.body.logprobs)
                logprobs += scored
                tops += best or [()] * len(scored)
            echoes.append(Echo(text, prompt_ids, logprobs, tops))
        return echoes

    async def _choice(
        self,
        index: int,
        drawn: CompletionTokens,
        piece: Piece | CompletionTokens,
        text: str,
        echo: Echo | None,
        offset: int = 0,
        first: bool = True,
    ) -> dict[str, Any]:
        """Return a choice, or the streamed part ``piece`` of it; ``drawn`` holds everything sampled so far."""
        body, prompt_ids = self.body, self.prompts[self._prompt_of(index)]
        logprobs = None
        if body.logprobs is not None:
            token_ids, sampled = list(piece.token_ids), list[float | None](piece.logprobs)
            tops: list[Tops | None] = [()] * len(sampled)
            if body.logprobs and sampled:
                read_ids = (*prompt_ids, *drawn.token_ids)
                sampling = self.service.sampling(body, body.max_tokens or 16)
                begin = len(read_ids) - len(sampled)
                _, best = await self.service.score(self.served, read_ids, begin, sampling, body.logprobs)
                tops = list(best)
            if echo is not None:
                token_ids = [*echo.token_ids, *token_ids]
                sampled, tops = [*echo.logprobs, *sampled], [*echo.tops, *tops]
            as_ids = bool(body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(self.service.tokenizer, token_ids, sampled, tops, as_ids, offset)
        choice = {
            "index": index,
            "text": text if echo is None else echo.text + text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            choice["prompt_token_ids"] = list(prompt_ids) if first else None
        return choice
