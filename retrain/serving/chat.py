"""Handle ``/v1/chat/completions``: conversations through the model's chat template, with tool calls."""

import inspect
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrain.config.tasks import Data
from retrain.data.prompts import Renderer
from retrain.environments.tools.calls import read_calls
from retrain.errors import RetrainError
from retrain.serving.answers import ChoicesResponse, JsonObject, finite
from retrain.serving.batching import GenerationState, Piece
from retrain.serving.schema import ChatBody, MessageBody, ServingError, Tools
from retrain.serving.service import Service
from retrain.types import Problem


async def answer(service: Service, body: ChatBody) -> ChoicesResponse[ChatBody]:
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
