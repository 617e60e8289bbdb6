"""``/v1/completions``: texts or token ids in, texts and token ids out."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.serving.answers import completion_logprobs, head, new_id, usage
from retrain.serving.schema import CompletionBody, read
from retrain.serving.service import Drawn, Service
from retrain.serving.text import whole


async def answer(service: Service, request: Request) -> Response:
    """The answer to one request. Raises Refusal."""
    body = read(CompletionBody, await request.body())
    body.check()
    model = service.names.find(body.model).name
    prompts = [
        await service.tokenised(given, body.add_special_tokens is not False) if isinstance(given, str) else tuple(given)
        for given in body.prompts()
    ]
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    for prompt_ids in prompts:
        service.check_prompt(prompt_ids, max_tokens)
    how = service.sampling(body, max_tokens)
    drawn = await service.draw(model, prompts, [how] * len(prompts), body)
    n = body.n or 1
    choices = [_choice(service, body, index, prompts[index // n], each) for index, each in enumerate(drawn)]
    counts = usage(sum(map(len, prompts)), sum(len(each.token_ids) for each in drawn))
    return JSONResponse(head("text_completion", new_id("cmpl"), model) | {"choices": choices, "usage": counts})


def _choice(
    service: Service, body: CompletionBody, index: int, prompt_ids: tuple[int, ...], drawn: Drawn
) -> dict[str, Any]:
    text = whole(
        service.base.text, drawn.token_ids, body.stops, drawn.stop_reason, bool(body.include_stop_str_in_output)
    )
    logprobs = None
    if body.logprobs is not None:
        as_ids = bool(body.return_tokens_as_token_ids)
        logprobs = completion_logprobs(service.tokenizer, drawn.token_ids, drawn.logprobs, None, as_ids)
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": drawn.finish_reason,
        "stop_reason": drawn.stop_reason,
        "token_ids": drawn.token_ids if body.return_token_ids else None,
        "prompt_token_ids": list(prompt_ids) if body.return_token_ids else None,
    }
