"""Handle ``/v1/chat/completions``: conversations through the model's chat template, with tool calls."""

import inspect
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.config.tasks import Data
from retrain.data.prompts import Renderer
from retrain.environments.tools.calls import read_calls
from retrain.errors import RetrainError
from retrain.serving.adapters import ServedWeights
from retrain.serving.answers import chat_logprobs, head, new_id, usage
from retrain.serving.refusal import ServingError
from retrain.serving.schema import ChatBody, plain_text, read
from retrain.serving.service import CompletionTokens, GenerationSet, Service
from retrain.serving.streams import Events, cancel_on_disconnect
from retrain.types import Problem

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def answer(service: Service, request: Request) -> Response:
    body = read(ChatBody, await request.body())
    body.check()
    service.find(body.model)
    prompt_ids = await service.with_tokenizer(
        lambda tokenizer: rendered(tokenizer, body.messages, body.offered, body.chat_template_kwargs or {})
    )
    asked = body.max_completion_tokens or body.max_tokens
    service.check_prompt(prompt_ids, asked or 1)
    sampling = service.sampling(body, asked or service.base.context_length - len(prompt_ids))
    generation_set = service.begin(body.model, [prompt_ids], sampling, body)
    if body.stream:
        return Events(generation_set, _chunks(service, body, prompt_ids, generation_set))
    return await cancel_on_disconnect(request, _full_response(service, body, prompt_ids, generation_set))


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
) -> tuple[int, ...]:
    """Return the token ids of a conversation up to the start of the answer. ``more`` are variables of the template.
    Raises ServingError for malformed messages or tools, and for what the template rejects."""
    plain = [_message(message, f"messages.{place}") for place, message in enumerate(messages)]
    for place, tool in enumerate(tools):
        _check_tool(tool, f"tools.{place}")
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := sorted(own & set(more)):
        raise ServingError(400, f"chat_template_kwargs cannot hold {taken[0]}", "chat_template_kwargs")
    data = Data().model_copy(update={"chat_template_kwargs": dict(more)})
    renderer = Renderer(tokenizer, data, tools_prompt="")
    try:
        return renderer.prompt(Problem("of the request", "", ""), plain, tools).token_ids
    except (RetrainError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ServingError(400, f"the conversation cannot be rendered: {error}"[:1000], "messages") from error


def _message(message: Mapping[str, Any], where: str) -> Any:
    """Return the message as templates expect it: text content, arguments of calls as JSON values."""
    role = message.get("role")
    if role not in ROLES:
        raise ServingError(400, f"{where}.role must be one of {', '.join(ROLES)}", "messages")
    plain: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise ServingError(400, f"{where}.{key} must be a text", "messages")
            plain[key] = plain_text(message[key], f"{where}.{key}")
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise ServingError(400, f"{where}.tool_calls must be a list, of an assistant's message", "messages")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls.{place}") for place, call in enumerate(calls)]
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        parts = []
        for place, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ServingError(400, f"{where}.{place} is no text: only text is supported", "messages")
            parts.append(part["text"])
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise ServingError(400, f"{where} must be a text", "messages")
    return plain_text(content, where)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ServingError(400, f"{where} must have a function with a name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ServingError(400, f"{where}.function.arguments are no JSON", "messages") from error
    if not isinstance(arguments, dict | None):
        raise ServingError(400, f"{where}.function.arguments must be an object", "messages")
    return {"id": str(call.get("id", "")), "type": "function", "function": {**function, "arguments": arguments or {}}}


def _check_tool(tool: Mapping[str, Any], where: str) -> None:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ServingError(400, f"{where} must have a function with a name", "tools")
    parameters = function.get("parameters") or {}
    properties = (parameters.get("properties") or {}) if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(about, dict) for about in properties.values()):
        raise ServingError(400, f"{where}.function.parameters must be the JSON schema of an object", "tools")


async def _full_response(
    service: Service, body: ChatBody, prompt_ids: tuple[int, ...], generation_set: GenerationSet
) -> Response:
    drawn, choices = await generation_set.all(), []
    for index, completion in enumerate(drawn):
        text = service.writer(body).add(completion.token_ids, completion.stop_reason, last=True)
        message, called = message_of(text, body.offered)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "refusal": None} | message,
            "logprobs": await _logprobs(
                service, body, generation_set.served, prompt_ids, completion, len(completion.token_ids)
            ),
            "finish_reason": "tool_calls"
            if called and completion.finish_reason == "stop"
            else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        choices.append(choice)
    counts = usage(len(prompt_ids), sum(len(completion.token_ids) for completion in drawn))
    top = head("chat.completion", new_id("chatcmpl"), generation_set.served.name)
    more = {"prompt_token_ids": list(prompt_ids)} if body.return_token_ids else {}
    return JSONResponse(top | {"choices": choices, "usage": counts} | more)


async def _chunks(
    service: Service, body: ChatBody, prompt_ids: tuple[int, ...], generation_set: GenerationSet
) -> AsyncIterator[dict[str, Any]]:
    top = head("chat.completion.chunk", new_id("chatcmpl"), generation_set.served.name)
    writers = [service.writer(body) for _ in generation_set.generations]
    drawn = [CompletionTokens() for _ in generation_set.generations]
    held = [""] * len(drawn)
    more = {"prompt_token_ids": list(prompt_ids)} if body.return_token_ids else {}
    for index in range(len(drawn)):
        delta = {"role": "assistant", "content": ""}
        yield top | {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]} | more
    async for number, piece in generation_set.iter_pieces():
        completion, last = drawn[number], piece.finish_reason is not None
        completion.add(piece)
        text = writers[number].add(piece.token_ids, piece.stop_reason, last)
        reason, message = piece.finish_reason, {"content": text}
        if body.offered:  # calls can only be recognised at the end
            held[number] += text
            message = {}
            if last:
                message, called = message_of(held[number], body.offered)
                calls = message.get("tool_calls", ())
                if called:
                    message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
                    reason = "tool_calls" if reason == "stop" else reason
        choice = {
            "index": number,
            "delta": message,
            "logprobs": await _logprobs(
                service, body, generation_set.served, prompt_ids, completion, len(piece.token_ids)
            ),
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        yield top | {"choices": [choice]}
    if body.stream_options is not None and body.stream_options.include_usage:
        counts = usage(len(prompt_ids), sum(len(completion.token_ids) for completion in drawn))
        yield top | {"choices": [], "usage": counts}


def message_of(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return the content and calls of a message, and whether there are calls; without tools all of it is content."""
    content, calls = read_calls(text, tools) if tools else (text, [])
    if not calls:
        return {"content": text}, False
    made = [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]
    return {"content": content or None, "tool_calls": made}, True


async def _logprobs(
    service: Service,
    body: ChatBody,
    served: ServedWeights,
    prompt_ids: tuple[int, ...],
    drawn: CompletionTokens,
    count: int,
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    begin, tops = len(drawn.token_ids) - count, None
    if body.top_logprobs and count:
        read_ids = (*prompt_ids, *drawn.token_ids)
        _, tops = await service.score(
            served, read_ids, len(read_ids) - count, service.sampling(body, 1), body.top_logprobs
        )
    as_ids = bool(body.return_tokens_as_token_ids)
    return chat_logprobs(service.tokenizer, drawn.token_ids[begin:], drawn.logprobs[begin:], tops, as_ids)
