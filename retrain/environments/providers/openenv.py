"""Environments behind an OpenEnv server, https://github.com/meta-pytorch/OpenEnv, over its own client.

A problem is a seed that the server is reset with; an episode is one session. The reward of a rollout is the sum of
what the server gives for its steps. In an MCP environment the policy calls tools: each call is a step, and a message
without a call ends the episode.
"""

from __future__ import annotations

import contextlib
import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.arguments import (
    count,
    ends,
    imported,
    named_arguments,
    refuse_unknown,
    table,
    text_or_none,
)
from retrain.environments.providers.openenv_chat import Actions, messages_of
from retrain.environments.providers.openenv_server import Server
from retrain.environments.providers.openenv_tools import call_of, listed_tools, may_have_tools, result_of
from retrain.environments.tools.calls import Call, parse
from retrain.errors import PluginError, UsageError
from retrain.rewards.base import printable
from retrain.types import Action, Message, Problem, RewardResult

OWNER = "environment openenv"
POLICYS_FAULTS = ("VALIDATION_ERROR",)
"""Errors of a server that say that the action was none, not that the environment is broken."""


class OpenEnv:
    """The environment at ``url``, or of a server that each process starts with ``command``, a list of arguments in
    which ``{port}`` stands for its port.

    Seeds 0 to ``heldout`` − 1 are held out and the ``size`` next ones train, all of them plus ``seed`` × 1,000,000.
    ``message_field``, ``action_field`` and ``action``: see ``messages_of`` and ``Actions``. ``reset``: further
    arguments of the reset. ``metrics``: fields of observations that are numbers to record. ``exact = true`` vouches
    that the server's answers depend on seed and actions only. ``start_seconds`` and ``step_seconds``: how long the
    server may take to start, and to answer. Raises UsageError for arguments that cannot be.
    """

    def __init__(
        self,
        id: Any = None,
        url: str | None = None,
        command: Sequence[str] | None = None,
        size: int = 1000,
        heldout: int = 200,
        seed: int = 0,
        message_field: str | None = None,
        action_field: str | None = None,
        action: Mapping[str, Any] | None = None,
        reset: Mapping[str, Any] | None = None,
        metrics: Sequence[str] = (),
        exact: bool = False,
        reward_range: Sequence[float] | None = None,
        start_seconds: float = 60.0,
        step_seconds: float = 60.0,
        **unknown: Any,
    ):
        refuse_unknown(unknown, named_arguments(OpenEnv), OWNER)
        self.url, self.command = _address(id if url is None else url, command)
        self.size, self.heldout = count(size, "size", OWNER, 1), count(heldout, "heldout", OWNER)
        self.first = count(seed, "seed", OWNER) * 1_000_000
        self.message_field = text_or_none(message_field, "message_field", OWNER)
        self.action_field = text_or_none(action_field, "action_field", OWNER)
        self.action, self.reset = table(action or {}, "action", OWNER), table(reset or {}, "reset", OWNER)
        if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
            raise UsageError(f"{OWNER}: metrics is {metrics!r}, not a list of fields")
        self.metrics = tuple(metrics)
        if type(exact) is not bool:
            raise UsageError(f"{OWNER}: exact is {exact!r}, neither true nor false")
        self.exact = exact
        self.reward_range = ends(reward_range, "reward_range", OWNER)
        self.metrics_ranges: Mapping[str, Range] = {"invalid_actions": {"min": 0, "invert": True}}
        self.start_seconds = _seconds(start_seconds, "start_seconds")
        self.step_seconds = _seconds(step_seconds, "step_seconds")
        self._client = imported("openenv.core.generic_client", OWNER).GenericEnvClient
        self._server: Server | None = None
        self._actions: Actions | None = None
        self._tools: list[dict[str, Any]] = []

    def problems(self, split: str) -> Sequence[Problem]:
        """Seeds: those of ``train``, or for any other name the held-out ones."""
        begin, number = (self.first + self.heldout, self.size) if split == "train" else (self.first, self.heldout)
        return [
            Problem(f"seed/{seed}", f"seed {seed}", "", (), {"seed": seed}) for seed in range(begin, begin + number)
        ]

    def start(self, problem: Problem, seed: int) -> OpenEnvEpisode:
        """A session, reset with the problem's seed. Raises PluginError when the server does not take it."""
        url = self._reachable()
        actions = self._known_actions(url)
        return OpenEnvEpisode(self, url, actions, int(problem.metadata["seed"]))

    def close(self) -> None:
        """End the server that this process has started."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _reachable(self) -> str:
        """The server's address; one of our own is started where none runs, also after it has died."""
        if self.url is not None:
            return self.url
        if self._server is None or not self._server.alive:
            self.close()
            assert self.command is not None
            self._server = Server(self.command, self.start_seconds, OWNER)
        return self._server.url

    def _known_actions(self, url: str) -> Actions:
        if self._actions is None:
            schema = self._schema(url)
            try:
                self._actions = Actions(schema, self.action_field, self.action)
            except KeyError as error:
                raise UsageError(f"{OWNER}: {error.args[0]}") from None
            if self.action_field is None and not self.action and may_have_tools(schema):
                self._tools = self._listed_tools(url)
                if not self._tools and "tool_name" in schema.get("properties", {}):
                    raise UsageError(f"{OWNER}: the actions of {url} are calls of tools, and {url}/mcp lists no tool")
        return self._actions

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools that the policy may call, as JSON schemas of functions; none where its actions are texts or JSON."""
        return self._tools

    def _listed_tools(self, url: str) -> list[dict[str, Any]]:
        try:
            return listed_tools(url, self.step_seconds, _trusts_proxy(url))
        except (httpx.HTTPError, ValueError) as error:
            raise PluginError(f"{OWNER}: {url}/mcp does not list its tools: {printable(str(error))}") from error

    def _schema(self, url: str) -> Mapping[str, Any]:
        """The JSON schema of the server's actions; empty where it has none to show and ``action_field`` is given."""
        try:
            answer = httpx.get(f"{url}/schema", timeout=self.step_seconds, trust_env=_trusts_proxy(url))
        except httpx.HTTPError as error:
            raise PluginError(f"{OWNER}: there is no server at {url}: {printable(str(error))}") from error
        try:
            return dict(answer.raise_for_status().json()["action"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            if self.action_field is not None:
                return {}
            raise UsageError(f"{OWNER}: {url}/schema does not tell what an action is: set action_field") from None


class OpenEnvEpisode:
    """One session with the server."""

    def __init__(self, environment: OpenEnv, url: str, actions: Actions, seed: int):
        self.environment, self.url, self.actions = environment, url, actions
        limit = environment.step_seconds
        # An action is over when the server has answered it, so the client's own limit is that of a step.
        self._client = environment._client(url, connect_timeout_s=limit, message_timeout_s=limit).sync()
        self.rewards: list[float] = []
        self.invalid = 0
        self.called = False
        self.numbers: dict[str, float] = {}
        arguments = {"seed": seed, "episode_id": uuid.uuid4().hex} | environment.reset
        try:
            self._call(self._client.connect)
            begun = self._call(lambda: self._client.reset(**arguments))
            self.first = self._said(begun.observation)
            if begun.done:
                raise PluginError(f"{OWNER}: {url} was done with seed {seed} before the first action")
        except BaseException:
            self.close()
            raise

    def observe(self) -> Observation:
        """What the server said when it was reset, and which form actions have."""
        messages = list(self.first)
        if self.environment.tools:
            return Observation(tuple(messages), tuple(self.environment.tools))
        if instruction := self.actions.instruction:
            last = messages[-1]
            messages[-1] = {"role": last["role"], "content": f"{last['content']}\n\n{instruction}"}
        return Observation(tuple(messages))

    def step(self, action: Action) -> Step:
        """Send the action. A text that is none is answered by what is wrong with it, and worth 0."""
        if self.environment.tools:
            return self._call_tools(action)
        try:
            sent = self.actions.read(action.text)
        except ValueError as error:
            return self._refused(str(error))
        answer = self._call(lambda: self._client.step(sent), refused=True)
        if isinstance(answer, str):
            return self._refused(answer)
        reward, metrics = self._reward(answer), self._numbers(answer.observation)
        if answer.done:
            self.close()
            return Step(done=True, reward=reward, metrics=metrics)
        messages = self._said(answer.observation)
        if len(messages) > len(self.first) and messages[: len(self.first)] == self.first:  # all that was said, again
            return Step(done=False, reward=reward, metrics=metrics, conversation=self._with_form(messages))
        return Step(messages, done=False, reward=reward, metrics=metrics)

    def _call_tools(self, action: Action) -> Step:
        """Take each call of a message as a step, in order, up to the one that ends the episode. A message without a
        call ends it too."""
        found = parse(action.text).found
        messages, rewards, metrics, failures, done = [], list[float](), {}, 0, not found
        for each in found:
            if isinstance(each, str):
                failures += 1
                messages.append(_answer("tool_call", f"Error: {each}"))
                continue
            sent = call_of(each.name, each.arguments)
            answer = self._call(lambda sent=sent: self._client.step(sent), refused=True)
            if isinstance(answer, str):
                failures += 1
                messages.append(_answer(each.name, f"Error: {answer}", each))
                continue
            self.called = True
            text, failed = result_of(answer.observation)
            failures += failed
            messages.append(_answer(each.name, text, each))
            if (reward := self._reward(answer)) is not None:
                rewards.append(reward)
            metrics |= self._numbers(answer.observation)
            if answer.done:
                done = True
                break
        self.invalid += failures
        if failures:
            metrics["invalid_actions"] = float(failures)
        if done:
            self.close()
        total = math.fsum(rewards) if rewards or failures else None
        return Step(messages, done=done, reward=total, metrics=metrics)

    def _reward(self, answer: Any) -> float | None:
        """Return the reward of a step, which counts for the episode's. Raises PluginError for one that is no number."""
        if answer.reward is None:
            return None
        reward = float(answer.reward)
        if not math.isfinite(reward):
            raise PluginError(f"{OWNER}: {self.url} gave a reward of {reward}")
        self.rewards.append(reward)
        return reward

    def result(self) -> RewardResult:
        """The sum of the rewards of its steps; 0 where the policy called no tool."""
        metrics: dict[str, float | None] = {"invalid_actions": float(self.invalid), **self.numbers}
        if not self.rewards and not self.invalid and (self.called or not self.environment.tools):
            return RewardResult(None, metrics, error=f"{self.url} gave no reward")
        return RewardResult(math.fsum(self.rewards), metrics)

    def close(self) -> None:
        """End the session; idempotent."""
        with contextlib.suppress(Exception):  # a session that is gone already
            self._client.close()

    def _refused(self, reason: str) -> Step:
        self.invalid += 1
        message = {"role": "user", "content": f"{reason} {self.actions.instruction}".strip()}
        return Step([message], done=False, reward=0.0, metrics={"invalid_actions": 1.0}, logs={"invalid": reason})

    def _with_form(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the server repeats it, begun as ``observe`` began it."""
        begun = list(self.observe().messages)
        return [*begun, *messages[len(begun) :]]

    def _said(self, observation: Any) -> list[Message]:
        try:
            return messages_of(observation, self.environment.message_field)
        except KeyError as error:
            raise UsageError(f"{OWNER}: {error.args[0]}") from None

    def _numbers(self, observation: Any) -> dict[str, float]:
        found = observation if isinstance(observation, Mapping) else {}
        numbers = {name: found[name] for name in self.environment.metrics if isinstance(found.get(name), int | float)}
        self.numbers.update({name: float(value) for name, value in numbers.items()})
        return {name: float(value) for name, value in numbers.items()}

    def _call(self, call: Callable[[], Any], refused: bool = False) -> Any:
        """What the client returns; with ``refused``, the reason as text where the server says the action is none.

        Raises PluginError, with the server's address, for all else that goes wrong between us and the server.
        """
        try:
            return call()
        except TimeoutError as error:
            limit = self.environment.step_seconds
            raise PluginError(f"{OWNER}: {self.url} did not answer within {limit:g} s (step_seconds)") from error
        except Exception as error:  # the client raises whatever its sockets do
            text = printable(str(error)) or type(error).__name__
            code = re.search(r"\(code: (\w+)\)$", text)
            full = ": it may be full, let it take more sessions (max_concurrent_envs)"
            if code is None:  # a full server says so and closes; whether we read it before is a race
                hint = full if "received 1000" in text else ""
                raise PluginError(f"{OWNER}: the connection to {self.url} is lost{hint}: {text}") from error
            if refused and code[1] in POLICYS_FAULTS:
                return "That is not a valid action."
            hint = full if code[1] == "CAPACITY_REACHED" else ""
            raise PluginError(f"{OWNER}: {self.url} answered with an error{hint}: {text}") from error


def _answer(name: str, text: str, call: Call | None = None) -> Message:
    """Return a tool's answer as a message; without halves of surrogate pairs, which no tokenizer takes."""
    plain = {"role": "tool", "name": printable(name[:64]), "content": text.encode("utf-8", "replace").decode()}
    return plain | ({"tool_call_id": printable(call.id[:64])} if call is not None and call.id else {})


def _trusts_proxy(url: str) -> bool:
    """Return whether proxies of the environment's variables are used: not for addresses of this machine."""
    return urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")


def _address(url: Any, command: Any) -> tuple[str | None, list[str] | None]:
    """The server's address, or the command that starts one. Raises UsageError unless one of them is given."""
    if (url is None) == (command is None):
        raise UsageError(f'{OWNER} takes either url = "http://…" or command = ["python", "server.py", "{{port}}"]')
    if command is not None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) and word for word in command):
            raise UsageError(f"{OWNER}: command is {command!r}, not a list of arguments")
        return None, list(command)
    if not isinstance(url, str) or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UsageError(f'{OWNER}: {url!r} is no address of a server, such as "http://127.0.0.1:8000"')
    return url.rstrip("/"), None


def _seconds(value: Any, name: Literal["start_seconds", "step_seconds"]) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{OWNER}: {name} is {value!r}, not a number of seconds above 0")
    return float(value)
