"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.serving.chat import rendered
from retrain.serving.refusal import Refusal
from retrain.serving.schema import DetokenizeBody, TokenizeBody, read
from retrain.serving.service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """The tokens of a text, or of a conversation as a chat reads it. Raises Refusal."""
    body = read(TokenizeBody, await request.body())
    service.names.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Refusal(400, "give either prompt or messages", "prompt")
    if body.messages is not None:
        token_ids = rendered(service.tokenizer, body.messages, body.tools or [], {})
    else:
        token_ids = await service.tokenised(body.prompt or "", body.add_special_tokens is not False)
    told = {"count": len(token_ids), "max_model_len": service.base.context_length, "tokens": list(token_ids)}
    if body.return_token_strs:
        told["token_strs"] = service.tokenizer.convert_ids_to_tokens(list(token_ids))
    return JSONResponse(told)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of tokens. Raises Refusal."""
    body = read(DetokenizeBody, await request.body())
    service.names.find(body.model)
    if any(token >= service.base.vocab_size for token in body.tokens):
        raise Refusal(400, "a token is out of vocabulary", "tokens")
    return JSONResponse({"prompt": service.tokenizer.decode(body.tokens)})
