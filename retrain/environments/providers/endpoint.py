"""Serve an OpenAI chat endpoint on the loopback interface, through which harnesses get the policy's answers.

Every rollout has a ``Channel``, in which its requests wait for answers. A request names its channel in the path
(``/<name>/v1/chat/completions``) or, at ``/session/v1/…``, in the header ``X-Session-ID``. Names are unguessable,
because other processes can reach the port.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

from retrain.environments.tools import ToolSchema
from retrain.types import Action

if TYPE_CHECKING:
    from aiohttp import web  # pyright: ignore[reportMissingImports]

MAX_REQUEST_BYTES = 64 << 20
LOOPBACK = "127.0.0.1"
# Harnesses recognise this text; most of them then end the rollout and grade it
OUT_OF_CONTEXT = "This model's maximum context length is reached: the rollout gets no further answer."
LEAST_LOGPROB = -9999.0  # In place of −∞ and NaN, which JSON does not have


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: CalledFunction


class ChatMessage(TypedDict):
    role: str
    content: object
    tool_call_id: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


@dataclass(eq=False)
class ChatCompletion:
    """The policy's answer to a request: its message and what was sampled, in the format of OpenAI's chat completions.

    ``number``: the number of the action in its rollout. Token ids and log-probabilities are in vLLM's format. Prompts
    are tokenised elsewhere, so ``usage`` counts the sampled tokens only.
    """

    message: ChatMessage
    action: Action
    number: int

    def __post_init__(self) -> None:
        self.head: dict[str, object] = {"id": f"chatcmpl-{self.number}", "created": 0, "model": "policy"}
        sampled = len(self.action)
        self.usage = {"prompt_tokens": 0, "completion_tokens": sampled, "total_tokens": sampled}
        stopped = "tool_calls" if self.message.get("tool_calls") else "stop"
        self.finish_reason = stopped if self.action.stop_reason == "stop" else "length"
        least = LEAST_LOGPROB
        finite = np.nan_to_num(self.action.logprobs_T, nan=least, posinf=least, neginf=least).tolist()
        tokens = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(self.action.token_ids, finite, strict=False)
        ]
        self.logprobs = {"content": tokens, "refusal": None}

    def body(self) -> dict[str, object]:
        sampled = {"token_ids": list(self.action.token_ids), "logprobs": self.logprobs}
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, **sampled}
        return self.head | {"object": "chat.completion", "choices": [choice], "usage": self.usage}

    def events(self) -> bytes:
        """Return the answer as server-sent events: the message, its end, and the usage."""
        delta: dict[str, object] = {**self.message}
        if calls := self.message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        content = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": self.logprobs}
        ended = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        chunks = [{"choices": [content]}, {"choices": [ended]}, {"choices": [], "usage": self.usage}]
        lines = [json.dumps(self.head | {"object": "chat.completion.chunk"} | chunk) for chunk in chunks]
        return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


@dataclass(eq=False)
class Request:
    messages: list[ChatMessage]
    tools: list[ToolSchema]
    completion: asyncio.Future[ChatCompletion]


class ChannelClosed(Exception):
    pass


@dataclass(eq=False)
class Channel:
    name: str
    waiting: deque[Request] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: bool = False
    refused: int = 0

    async def ask(self, messages: list[ChatMessage], tools: list[ToolSchema]) -> ChatCompletion:
        if self.refuses:
            self.refused += 1
            self.arrived.set()
            raise ChannelClosed(OUT_OF_CONTEXT)
        request = Request(messages, tools, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self.arrived.set()
        return await request.completion

    def refuse(self, current: Request) -> None:
        """Reject the current, all waiting and all later requests, as if the context were full."""
        self.refuses = True
        for request in (current, *self.waiting):
            if not request.completion.done():
                self.refused += 1
                request.completion.set_exception(ChannelClosed(OUT_OF_CONTEXT))
        self.waiting.clear()


class Endpoint:
    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self.url = ""
        self.close: Callable[[], Coroutine[object, object, None]]  # set by start()

    async def start(self) -> None:
        from aiohttp import web  # pyright: ignore[reportMissingImports]

        spared = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
        if LOOPBACK not in spared.split(","):  # clients of a harness must not use a proxy for this machine
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = f"{spared},{LOOPBACK}".lstrip(",")
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{channel}/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url, self.close = f"http://{host}:{port}", runner.cleanup

    def url_of(self, channel: Channel) -> str:
        return f"{self.url}/{channel.name}/v1"

    async def _chat(self, request: web.Request) -> web.Response:
        from aiohttp import web  # pyright: ignore[reportMissingImports]

        name = request.match_info["channel"]
        channel = self.channels.get(request.headers.get("X-Session-ID", "") if name == "session" else name)
        if channel is None:
            return web.json_response(_error("no such rollout", "not_found"), status=404)
        try:
            body = await request.json()
            completion = await channel.ask(list(body.get("messages") or []), list(body.get("tools") or []))
        except ChannelClosed as refused:
            return web.json_response(_error(str(refused), "context_length_exceeded"), status=400)
        except (ValueError, TypeError, AttributeError) as error:
            return web.json_response(_error(f"not a request for a chat completion: {error}", "invalid"), status=400)
        if body.get("stream"):
            return web.Response(body=completion.events(), content_type="text/event-stream")
        return web.json_response(completion.body())


def _error(message: str, code: str) -> dict[str, dict[str, str | None]]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
