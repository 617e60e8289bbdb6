"""Harnesses that lead a rollout themselves, turned round into episodes that are observed and stepped.

Such a harness is a coroutine that asks an OpenAI client for completions and ends with a grade. Here it runs in an event
loop which stands still except inside ``observe``, ``step``, ``result`` and ``close``: there it runs on until the
rollout asks for its next completion, or has ended. What it asks is the observation; the action is the answer. Nothing
has a thread of its own, so signals, child processes that shall die with their parent, and pseudo-random numbers behave
as in any single-threaded program, and episodes of one process may be stepped in any order.

Requests of one rollout that are under way together (sub-agents) are answered one at a time, in the order in which they
came; each that does not go on from the last is a conversation of its own (``Step.conversation``).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from retrain.environments.protocol import Observation, Step
from retrain.environments.providers.endpoint import Asked, Channel, Endpoint, completion
from retrain.environments.providers.randomness import OwnRandomness
from retrain.environments.tools.calls import Call, parse
from retrain.errors import PluginError
from retrain.plugins import described
from retrain.types import Action, Message, RewardResult

T = TypeVar("T")
THOUGHT_END = "</think>"
MAX_REFUSALS = 16
"""A harness that asks on after so many refusals is stopped."""


class Outcome(NamedTuple):
    """How a rollout ended: its grade, in a word why it was over, and further texts about its end."""

    reward: RewardResult
    stop: str = ""
    logs: Mapping[str, str] = MappingProxyType({})


Lead = Callable[[Channel], Coroutine[Any, Any, Outcome]]
"""A harness: it leads one rollout, asking the channel (through ``Endpoint``), and grades it."""


class Inversion:
    """The event loop and the endpoint of a process's harnesses."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.endpoint = Endpoint()
        self._closing = asyncio.Event()
        self._held: list[asyncio.Task[None]] = []
        self.run(self.endpoint.start())
        atexit.register(self.close)

    def run(self, awaitable: Coroutine[Any, Any, T]) -> T:
        """Run the loop until this is done."""
        return self.loop.run_until_complete(awaitable)

    def hold(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context that is left when the process ends, in the task that entered it. Raises what entering
        raises."""
        entered: asyncio.Future[T] = self.loop.create_future()

        async def holder() -> None:
            async with context as value:
                entered.set_result(value)
                await self._closing.wait()

        task = self.loop.create_task(holder())
        self.run(_either(task, entered))
        if not entered.done():
            task.result()
        self._held.append(task)
        return entered.result()

    def close(self) -> None:
        """Leave what is held, drop what still runs."""
        if self.loop.is_closed():
            return
        atexit.unregister(self.close)
        self._closing.set()
        self.run(_ended(self._held))
        self.run(_ended([task for task in asyncio.all_tasks(self.loop) if task.cancel()]))
        self.run(self.endpoint.close())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _either(*awaited: asyncio.Future[Any]) -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class InvertedEpisode:
    """One rollout that a harness leads, as an ``Episode``.

    ``opening`` is shown where the harness ended before it asked for anything; its error is then the episode's.
    ``seed`` seeds the random numbers of Python and numpy that are drawn inside this episode, and in no other.
    """

    def __init__(self, inversion: Inversion, lead: Lead, opening: Sequence[Message], seed: int):
        self._inversion, self._lead, self._opening = inversion, lead, opening
        self._channel = Channel(secrets.token_urlsafe(16))
        self._randomness = OwnRandomness(str(seed))
        self._task: asyncio.Task[Outcome] | None = None
        self._asked: Asked | None = None
        self._failure: str | None = None
        self._tools: str | None = None
        self._read: list[Said] = []
        self._texts: dict[Said, str] = {}
        """What the policy wrote, by what the harness has of it."""
        self._actions = self._calls = 0

    def observe(self) -> Observation:
        """What the harness asks first."""
        self._begin()
        if self._asked is None:
            return Observation(tuple(self._opening) or ({"role": "user", "content": ""},))
        messages, tools = self._asked.messages, self._asked.tools
        return Observation(tuple(message_of(message) for message in messages), tuple(tools))

    def step(self, action: Action) -> Step:
        """Answer the harness, and let it run on."""
        self._begin()
        if self._asked is not None:
            self._answer(self._asked, action)
            self._go_on()
        if self._asked is None:
            return self._over()
        return self._next(self._asked)

    def result(self) -> RewardResult:
        """The harness's grade. A rollout that has not ended gets no more answers, as from a full context."""
        self._begin()
        if self._asked is not None:
            self._channel.refuse(self._asked)
            self._asked = None
            self._go_on()
        return self._outcome().reward

    def close(self) -> None:
        """Stop the rollout where it still runs."""
        task, self._task = self._task, None
        self._asked, self._failure = None, self._failure or "closed before it had ended"
        self._inversion.endpoint.channels.pop(self._channel.name, None)
        if task is not None and not task.done() and not self._inversion.loop.is_closed():
            task.cancel()
            self._inversion.run(_ended([task]))

    def _begin(self) -> None:
        """Let the harness run up to its first request, once."""
        if self._task is not None or self._failure is not None:
            return
        self._inversion.endpoint.channels[self._channel.name] = self._channel
        self._task = self._inversion.loop.create_task(self._lead(self._channel))
        self._go_on()
        if self._asked is not None:
            with self._failing():
                self._tools = json.dumps(self._asked.tools, sort_keys=True)
                self._read = [said(message) for message in self._asked.messages]

    def _go_on(self) -> None:
        """Run the harness up to its next request, or to its end; ``_asked`` is the request."""
        with self._randomness:
            self._inversion.run(self._until_asked())
        waiting = self._channel.waiting
        self._asked = waiting.popleft() if waiting else None

    async def _until_asked(self) -> None:
        task, channel = self._task, self._channel
        while task is not None and not task.done() and not channel.waiting:
            if channel.refused > MAX_REFUSALS:
                self._failure = "it went on asking after the rollout was over"
                task.cancel()
                await _ended([task])
                return
            channel.arrived.clear()
            arrival = asyncio.ensure_future(channel.arrived.wait())
            await _either(task, arrival)
            arrival.cancel()

    def _answer(self, asked: Asked, action: Action) -> None:
        content, found = read_calls(action.text, asked.tools) if asked.tools else (action.text, [])
        named = [(f"call{self._calls + index:05d}", call) for index, call in enumerate(found)]
        self._calls += len(named)
        # A server never sends an empty message, and some harnesses take one for a failure of the server.
        answer = completion(action, self._actions, content if content or named else " ", named)
        self._actions += 1
        message = said(answer["choices"][0]["message"])
        self._texts[message] = action.text
        self._read.append(message)
        if not asked.completion.done():  # the harness has given it up meanwhile
            asked.completion.set_result(answer)

    def _next(self, asked: Asked) -> Step:
        """What the policy reads next."""
        with self._failing():
            if json.dumps(asked.tools, sort_keys=True) != self._tools:
                raise PluginError("it offers other tools than at the beginning of the episode, which is not supported")
            before, now = self._read, [said(message) for message in asked.messages]
            self._read = now
            if now[: len(before)] == before:
                return Step(tuple(message_of(message) for message in asked.messages[len(before) :]), done=False)
            texts = [self._texts.get(message) for message in now]
            rewritten = [
                message_of(message) if text is None else {"role": "assistant", "content": text}
                for message, text in zip(asked.messages, texts, strict=True)
            ]
            return Step(conversation=rewritten, done=False)
        return self._over()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What cannot be shown to the policy ends the episode without a reward."""
        try:
            yield
        except PluginError as error:
            failure = str(error)
            self.close()
            self._failure = failure

    def _over(self) -> Step:
        outcome = self._outcome()
        return Step(done=True, logs={**({"stop": outcome.stop} if outcome.stop else {}), **outcome.logs})

    def _outcome(self) -> Outcome:
        task = self._task
        if self._failure is None and task is not None and task.done():
            error = asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()
            if error is None:
                return task.result()
            self._failure = described(error)
        return Outcome(RewardResult(None, error=self._failure or "it has not ended"), "error")


class Said(NamedTuple):
    """What a message says, by which two are compared: role, text, calls (name and arguments), and which call it
    answers. The thinking that a harness keeps apart is not looked at."""

    role: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    call_id: str = ""


def said(message: Mapping[str, Any]) -> Said:
    """The message as it is compared with others. Raises PluginError for one that is not text."""
    role, text = str(message.get("role", "")), text_of(message.get("content"))
    if role != "assistant":
        return Said(role, text, call_id=str(message.get("tool_call_id") or ""))
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    called = tuple((str(function.get("name")), _canonical(function.get("arguments"))) for function in functions)
    return Said(role, text.strip(), called)


def message_of(message: Mapping[str, Any]) -> Message:
    """An OpenAI message as chat templates take it. Raises PluginError for one that is not text."""
    kept: dict[str, Any] = {"role": message.get("role", "user"), "content": text_of(message.get("content"))}
    kept |= {key: message[key] for key in ("name", "tool_call_id", "tool_calls") if message.get(key)}
    return cast("Message", kept)


def text_of(content: Any) -> str:
    """The text of a message's content, its parts one a line. Raises PluginError for images, audio and files."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list(content)
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PluginError(f'it shows the model something of type "{kind}"; only text is supported')
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in parts)


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """The text beside the calls, with the thought before them, and the calls. A text without a call that can be read
    is all text."""
    parsed = parse(text)
    if not parsed.calls:
        return text, []
    thought, end, _ = text.partition(THOUGHT_END)
    functions = {tool.get("function", {}).get("name"): tool.get("function", {}) for tool in tools}
    read = [Call(call.name, _typed(call.arguments, functions.get(call.name, {}))) for call in parsed.calls]
    return "\n\n".join(part for part in (thought + end if end else "", parsed.text) if part), read


def _typed(arguments: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were written as texts, as some formats write all of them, where the tool wants no texts."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    typed = dict(arguments)
    for name, value in arguments.items():
        wanted = properties.get(name) or {}
        kinds = {str(each.get("type", "string")) for each in wanted.get("anyOf") or [wanted]}
        if isinstance(value, str) and "string" not in kinds:
            with contextlib.suppress(ValueError, RecursionError):
                typed[name] = json.loads(value)
    return typed


def _canonical(arguments: Any) -> str:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return json.dumps(json.loads(arguments), sort_keys=True)
    return str(arguments)
