"""Handle ``/v1/chat/completions``: conversations through the model's chat template, with tool calls."""

import inspect
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from retrain.config.tasks import Data
from retrain.data.prompts import Renderer
from retrain.environments.tools.calls import read_calls
from retrain.errors import RetrainError
from retrain.serving.batching import Piece
from retrain.serving.choices import ChoiceBuilder, JsonObject, finite
from retrain.serving.refusal import ServingError
from retrain.serving.schema import ChatBody, ChatMessage, Tools, read
from retrain.serving.service import Service
from retrain.types import Problem


async def answer(service: Service, request: Request) -> Response:
    body = read(ChatBody, await request.body())
    service.find(body.model)
    prompt_ids = await service.with_tokenizer(
        lambda tokenizer: rendered(tokenizer, body.messages, body.offered, body.chat_template_kwargs or {})
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    service.check_prompt(prompt_ids, max_tokens or 1)
    sampling = service.sampling(body, max_tokens or service.base.context_length - len(prompt_ids))
    generation_set = service.begin(body.model, [prompt_ids], sampling, body)
    return await ChatChoices(service, body, [prompt_ids], generation_set).answer(request)


def rendered(tokenizer: Any, messages: Sequence[ChatMessage], tools: Tools, more: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a conversation up to the start of the answer. ``more`` are variables of the template.
    Raises ServingError for what the template rejects."""
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := sorted(reserved & set(more)):
        raise ServingError(400, f"chat_template_kwargs cannot hold {taken[0]}", "chat_template_kwargs")
    data = Data().model_copy(update={"chat_template_kwargs": dict(more)})
    renderer = Renderer(tokenizer, data, tools_prompt="")
    plain: Any = [message.model_dump(exclude_none=True) for message in messages]
    try:
        return renderer.prompt(Problem("of the request", "", ""), plain, tools).token_ids
    except (RetrainError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ServingError(400, f"the conversation cannot be rendered: {error}"[:1000], "messages") from error


class ChatChoices(ChoiceBuilder[ChatBody]):
    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.held = [""] * len(self.drawn)  # Text of each choice; calls can only be recognised at its end

    def opening(self) -> Iterable[JsonObject]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self.drawn))
        ]

    def prompt_ids(self) -> JsonObject:
        return {"prompt_token_ids": list(self.prompts[0])} if self.body.return_token_ids else {}

    async def content(self, index: int, piece: Piece, text: str, is_first: bool) -> JsonObject:
        message: JsonObject = {"content": text}
        reason = piece.finish_reason
        if self.body.offered:
            self.held[index] += text
            message = message_of(self.held[index], self.body.offered) if reason else {}
            reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
        if not self.body.stream:
            message = {"role": "assistant", "refusal": None} | message
        elif "tool_calls" in message:
            message["tool_calls"] = [{"index": place} | call for place, call in enumerate(message["tool_calls"])]
        content = {"delta" if self.body.stream else "message": message, "finish_reason": reason}
        if not self.body.logprobs:
            return content
        tops = await self.tops(index, piece, self.body.top_logprobs or 0)
        tokens = [
            self._token(token_id, logprob) | {"top_logprobs": [self._token(*likely) for likely in top]}
            for token_id, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True)
        ]
        return content | {"logprobs": {"content": tokens, "refusal": None}}

    def _token(self, token_id: int, logprob: float) -> JsonObject:
        text = self.service.tokenizer.decode([token_id], skip_special_tokens=False)
        data = list(text.encode(errors="replace"))
        return {"token": self.token_text(token_id), "logprob": finite(logprob), "bytes": data}


def message_of(text: str, tools: Tools) -> JsonObject:
    """Return the content and the calls of a message; all of it is content if there are none."""
    content, calls = read_calls(text, tools)
    if not calls:
        return {"content": text}
    made = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
    return {"content": content or None, "tool_calls": made}
