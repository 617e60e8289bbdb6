"""Handle ``/tokenize`` and ``/detokenize``."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.serving.chat import rendered
from retrain.serving.refusal import ServingError
from retrain.serving.schema import DetokenizeBody, TokenizeBody, read
from retrain.serving.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    body = read(TokenizeBody, await request.body())
    service.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ServingError(400, "give either prompt or messages", "prompt")
    context = service.base.context_length
    return await service.with_tokenizer(lambda tokenizer: _tokens(tokenizer, body, context))


def _tokens(tokenizer: Any, body: TokenizeBody, context: int) -> Response:
    if body.messages is not None:
        token_ids = rendered(tokenizer, body.messages, body.tools or [], {})
    else:
        token_ids = encoded(tokenizer, body.prompt or "", body.add_special_tokens is not False)
    content = {"count": len(token_ids), "max_model_len": context, "tokens": list(token_ids)}
    if body.return_token_strs:
        content["token_strs"] = tokenizer.convert_ids_to_tokens(list(token_ids))
    return JSONResponse(content)


def encoded(tokenizer: Any, text: str, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


async def detokenize(service: Service, request: Request) -> Response:
    body = read(DetokenizeBody, await request.body())
    service.find(body.model)
    if any(token >= service.base.vocab_size for token in body.tokens):
        raise ServingError(400, "a token is out of vocabulary", "tokens")
    return JSONResponse({"prompt": await service.with_tokenizer(lambda tokenizer: tokenizer.decode(body.tokens))})
