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
from retrain.serving.streams import Events, unless_gone
from retrain.serving.text import Writer
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
    how = service.sampling(body, max_tokens)
    if not max_tokens:  # the prompts alone
        drawn = [CompletionTokens(finish_reason="length") for _ in range(len(prompts) * (body.n or 1))]
        served = service.find(body.model)
        return await unless_gone(request, _response(service, body, inputs, prompts, served, drawn))
    drawing = service.begin(body.model, prompts, [how] * len(prompts), body)
    if body.stream:
        return Events(drawing, _chunks(service, body, inputs, prompts, drawing))
    return await unless_gone(request, _full_response(service, body, inputs, prompts, drawing))


async def _full_response(
    service: Service, body: CompletionBody, inputs: list[Any], prompts: list[tuple[int, ...]], drawing: GenerationSet
) -> Response:
    return await _response(service, body, inputs, prompts, drawing.served, await drawing.all())


async def _response(
    service: Service,
    body: CompletionBody,
    inputs: list[Any],
    prompts: list[tuple[int, ...]],
    served: ServedWeights,
    drawn: list[CompletionTokens],
) -> Response:
    echoes = await _echoes(service, body, inputs, prompts, served)
    choices = []
    for index, completion in enumerate(drawn):
        position = index // (body.n or 1)
        text = _writer(service, body).add(completion.token_ids, completion.stop_reason, last=True)
        choices.append(
            await _choice(
                service, body, served, index, prompts[position], completion, completion, text, echoes[position]
            )
        )
    counts = usage(sum(map(len, prompts)), sum(len(completion.token_ids) for completion in drawn))
    top = head("text_completion", new_id("cmpl"), served.name)
    return JSONResponse(top | {"choices": choices, "usage": counts})


async def _chunks(
    service: Service, body: CompletionBody, inputs: list[Any], prompts: list[tuple[int, ...]], drawing: GenerationSet
) -> AsyncIterator[dict[str, Any]]:
    top = head("text_completion", new_id("cmpl"), drawing.served.name)
    writers = [_writer(service, body) for _ in drawing.generations]
    drawn = [CompletionTokens() for _ in drawing.generations]
    offsets = [0] * len(drawn)
    echoes = await _echoes(service, body, inputs, prompts, drawing.served)
    async for number, piece in drawing.iter_pieces():
        position, completion, last = number // (body.n or 1), drawn[number], piece.finish_reason is not None
        first = not completion.token_ids
        completion.add(piece)
        text = writers[number].add(piece.token_ids, piece.stop_reason, last)
        echo = echoes[position] if first else None
        choice = await _choice(
            service,
            body,
            drawing.served,
            number,
            prompts[position],
            completion,
            piece,
            text,
            echo,
            offsets[number],
            first,
        )
        offsets[number] += sum(map(len, (choice["logprobs"] or {}).get("tokens", ())))
        yield top | {"choices": [choice]}
    if body.stream_options is not None and body.stream_options.include_usage:
        counts = usage(sum(map(len, prompts)), sum(len(completion.token_ids) for completion in drawn))
        yield top | {"choices": [], "usage": counts}


async def _echoes(
    service: Service, body: CompletionBody, inputs: list[Any], prompts: list[tuple[int, ...]], served: ServedWeights
) -> list[Echo | None]:
    echoes: list[Echo | None] = []
    for source, prompt_ids in zip(inputs, prompts, strict=True):
        if not body.echo:
            echoes.append(None)
            continue
        text = source if isinstance(source, str) else service.tokenizer.decode(list(prompt_ids))
        logprobs: list[float | None] = [None]
        tops: list[Tops | None] = [None]
        if body.logprobs is not None and len(prompt_ids) > 1:
            own, best = await service.score(served, prompt_ids, 1, None, body.logprobs)
            logprobs += own
            tops += best or [()] * len(own)
        echoes.append(Echo(text, prompt_ids, logprobs, tops))
    return echoes


def _writer(service: Service, body: CompletionBody) -> Writer:
    return Writer(service.base.text, body.stops, bool(body.include_stop_str_in_output))


async def _choice(
    service: Service,
    body: CompletionBody,
    served: ServedWeights,
    index: int,
    prompt_ids: tuple[int, ...],
    drawn: CompletionTokens,
    piece: Piece | CompletionTokens,
    text: str,
    echo: Echo | None,
    offset: int = 0,
    first: bool = True,
) -> dict[str, Any]:
    """Return a choice, or the streamed part ``piece`` of it; ``drawn`` holds everything sampled so far."""
    logprobs = None
    if body.logprobs is not None:
        token_ids, sampled = list(piece.token_ids), list[float | None](piece.logprobs)
        tops: list[Tops | None] = [()] * len(sampled)
        if body.logprobs and sampled:
            read_ids = (*prompt_ids, *drawn.token_ids)
            how = service.sampling(body, body.max_tokens or 16)
            _, best = await service.score(served, read_ids, len(read_ids) - len(sampled), how, body.logprobs)
            tops = list(best)
        if echo is not None:
            token_ids, sampled, tops = [*echo.token_ids, *token_ids], [*echo.logprobs, *sampled], [*echo.tops, *tops]
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = completion_logprobs(service.tokenizer, token_ids, sampled, tops, as_ids, offset)
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
