"""Turn harnesses that drive a rollout themselves into episodes that can be observed and stepped.

Such a harness is a coroutine that requests completions from an OpenAI client and ends with a grade. Its request is the
observation, the policy's action is the answer. The harness's event loop runs only inside ``observe``, ``step``,
``result`` and ``close``, until the rollout requests its next completion or ends. There are no threads: signals, child
processes that must die with their parent, and pseudo-random numbers behave as in any single-threaded program, and
episodes of one process may be stepped in any order.

Concurrent requests of one rollout (sub-agents) are answered one at a time, in order. A request that does not continue
the last one is a separate conversation (``Step.conversation``).
"""

import asyncio
import atexit
import contextlib
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from retrain.environments.protocol import Observation, Step
from retrain.environments.providers.endpoint import Channel, ChatCompletion, ChatMessage, Endpoint, Request
from retrain.environments.providers.messages import chat_messages, text_of
from retrain.environments.providers.randomness import OwnRandomness
from retrain.environments.tools import ToolSchema
from retrain.environments.tools.calls import read_calls
from retrain.errors import PluginError
from retrain.plugins import described
from retrain.types import Action, Message, RewardResult

T = TypeVar("T")
MessageKey = tuple[str, str, str | tuple[tuple[str, str], ...]]
KEYS = ("name", "tool_call_id", "tool_calls")  # Fields of a message that chat templates read, besides role and text
# Environment variable that is never set: the local endpoint needs no key, and must not receive the user's
UNSET_KEY = "RETRAIN_VERIFIERS_NO_KEY"
MAX_REFUSALS = 16  # Refused requests after which a harness is stopped


class HarnessResult(NamedTuple):
    reward: RewardResult
    stop: str = ""
    logs: Mapping[str, str] = MappingProxyType({})


# A harness: a function that drives one rollout through the channel (and ``Endpoint``) and returns its grade
Lead = Callable[[Channel], Coroutine[Any, Any, HarnessResult]]


class TaskRow(NamedTuple):
    """A task. ``digest`` is a hash of its content, which must be the same at the row's index in every process."""

    prompt: tuple[Message, ...]
    answer: str
    tags: tuple[str, ...]
    digest: str


def digest(task: object) -> str:
    return hashlib.sha256(json.dumps(task, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Inversion:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.endpoint = Endpoint()
        self._closing = asyncio.Event()
        self._held: list[asyncio.Task[None]] = []
        self.run(self.endpoint.start())
        atexit.register(self.close)

    def run(self, awaitable: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(awaitable)

    def hold(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter an async context in a task that exits it when the process ends; return the context's value."""
        entered: asyncio.Future[T] = self.loop.create_future()

        async def holder() -> None:
            async with context as value:
                entered.set_result(value)
                await self._closing.wait()

        task = self.loop.create_task(holder())
        self.run(_first_of(task, entered))
        if not entered.done():
            task.result()
        self._held.append(task)
        return entered.result()

    def close(self) -> None:
        if self.loop.is_closed():
            return
        atexit.unregister(self.close)
        self._closing.set()
        self.run(_ended(self._held))
        self.run(_ended([task for task in asyncio.all_tasks(self.loop) if task.cancel()]))
        self.run(self.endpoint.close())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _first_of(*awaited: asyncio.Future[Any]) -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


async def _ended(tasks: Sequence[Awaitable[object]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class InvertedEpisode:
    """Rollout of a harness as an ``Episode``. The constructor raises PluginError if the harness ends before its first
    request. ``seed`` seeds the random numbers of Python and numpy inside this episode only."""

    def __init__(self, inversion: Inversion, lead: Lead, seed: int):
        self._inversion = inversion
        self._channel = Channel(secrets.token_urlsafe(16))
        self._randomness = OwnRandomness(str(seed))
        self._request: Request | None = None
        self._tools: list[ToolSchema] | None = None
        self._messages: list[Message] = []  # Messages of the current request
        self._seen: list[MessageKey] = []  # Keys of the messages that the policy has read or written
        self._before: list[MessageKey] = []  # ``_seen`` before the current request
        self._failure: str | None = None
        self._texts: dict[MessageKey, str] = {}  # Texts of actions, by the key of the message that the harness received
        self._actions = self._calls = 0
        inversion.endpoint.channels[self._channel.name] = self._channel
        self._task = inversion.loop.create_task(lead(self._channel))
        self._advance()
        if self._request is None:
            reason = self._outcome().reward.error or "it ended before it asked the model for an answer"
            self.close()
            raise PluginError(reason)

    def observe(self) -> Observation:
        return Observation(tuple(self._messages), tuple(self._tools or ()))

    def step(self, action: Action) -> Step:
        if self._request is not None:
            self._answer(self._request, action)
            self._advance()
        if self._request is not None:
            return self._next()
        outcome = self._outcome()
        return Step(done=True, logs={**({"stop": outcome.stop} if outcome.stop else {}), **outcome.logs})

    def result(self) -> RewardResult:
        if self._request is not None:
            self._channel.refuse(self._request)
            self._advance()
        return self._outcome().reward

    def close(self) -> None:
        self._request, self._failure = None, self._failure or "closed before it had ended"
        self._inversion.endpoint.channels.pop(self._channel.name, None)
        if not self._task.done() and not self._inversion.loop.is_closed():
            self._task.cancel()
            self._inversion.run(_ended([self._task]))

    def _advance(self) -> None:
        with self._randomness:
            self._inversion.run(self._until_asked())
        waiting = self._channel.waiting
        self._request = waiting.popleft() if waiting else None
        try:
            if self._request is not None:
                self._read(self._request)
        except PluginError as error:
            self.close()
            self._failure = str(error)

    def _read(self, request: Request) -> None:
        if self._tools is not None and request.tools != self._tools:
            raise PluginError("it offers other tools than at the beginning of the episode, which is not supported")
        self._tools, self._messages = request.tools, chat_messages(request.messages, KEYS)
        self._before, self._seen = self._seen, [message_key(message) for message in request.messages]

    async def _until_asked(self) -> None:
        task, channel = self._task, self._channel
        while not task.done() and not channel.waiting:
            if channel.refused > MAX_REFUSALS:
                self._failure = "it went on asking after the rollout was over"
                task.cancel()
                await _ended([task])
                return
            channel.arrived.clear()
            arrival = asyncio.ensure_future(channel.arrived.wait())
            await _first_of(task, arrival)
            arrival.cancel()

    def _answer(self, request: Request, action: Action) -> None:
        content, found = read_calls(action.text, request.tools) if request.tools else (action.text, [])
        # Servers never send an empty message, and some harnesses take one for a server failure.
        message: ChatMessage = {"role": "assistant", "content": content if content or found else " "}
        if found:
            message["tool_calls"] = [
                {
                    "id": f"call{number:05d}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for number, call in enumerate(found, self._calls)
            ]
        answer = ChatCompletion(message, action, self._actions)
        self._calls += len(found)
        self._actions += 1
        key = message_key(message)
        self._texts[key] = action.text
        self._seen.append(key)
        if not request.completion.done():  # the harness has cancelled it meanwhile
            request.completion.set_result(answer)

    def _next(self) -> Step:
        messages, before = self._messages, self._before
        if self._seen[: len(before)] == before:
            return Step(tuple(messages[len(before) :]), done=False)
        rewritten = [
            {"role": "assistant", "content": self._texts[key]} if key in self._texts else message
            for key, message in zip(self._seen, messages, strict=True)
        ]
        return Step(conversation=rewritten, done=False)

    def _outcome(self) -> HarnessResult:
        task = self._task
        if self._failure is None and task.done():
            error = asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()
            if error is None:
                return task.result()
            self._failure = described(error)
        return HarnessResult(RewardResult(None, error=self._failure or "it has not ended"), "error")


def message_key(message: ChatMessage) -> MessageKey:
    """Return the key by which two messages are compared: role, text, and the tool calls or the id of the call that the
    message answers. Ignores thinking that a harness stores separately. Raises PluginError for a message that is not
    text."""
    role, text = str(message.get("role", "")), text_of(message.get("content"))
    if role != "assistant":
        return role, text, str(message.get("tool_call_id") or "")
    functions = [call["function"] for call in message.get("tool_calls") or [] if call.get("function")]
    calls = tuple((str(function.get("name")), _canonical(function.get("arguments"))) for function in functions)
    return role, text.strip(), calls


def _canonical(arguments: str | None) -> str:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return json.dumps(json.loads(arguments or ""), sort_keys=True)
    return str(arguments)
