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
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from retrain.environments.arguments import imported, validated
from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.openenv_forms import Actions, listed_tools, may_have_tools, messages_of, result_of
from retrain.environments.providers.openenv_server import Server
from retrain.environments.tools.calls import Call, answer, parse
from retrain.errors import PluginError, UsageError
from retrain.rewards.base import printable
from retrain.types import Action, Message, Problem, RewardResult

Text = Annotated[str, Field(min_length=1)]
OWNER = "environment openenv"
POLICYS_FAULTS = ("VALIDATION_ERROR",)
"""Error codes of a server for an invalid action; all others mean that the environment is broken."""


class Arguments(BaseModel):
    """Arguments of the environment at ``url`` (or ``id``), or of a server that each process starts with ``command``, a
    list of arguments in which ``{port}`` stands for its port.

    Seeds 0 to ``heldout`` − 1 are held out and the ``size`` next ones train, all of them plus ``seed`` × 1,000,000.
    ``message_field``, ``action_field`` and ``action``: see ``messages_of`` and ``Actions``. ``reset``: further
    arguments of the reset. ``metrics``: fields of observations that are numbers to record. ``exact``: whether the
    server's answers depend on seed and actions only. ``start_seconds`` and ``step_seconds``: how long the server may
    take to start, and to answer.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str | None = None
    url: str | None = None
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    size: PositiveInt = 1000
    heldout: NonNegativeInt = 200
    seed: NonNegativeInt = 0
    message_field: Text | None = None
    action_field: Text | None = None
    action: dict[str, Any] = {}
    reset: dict[str, Any] = {}
    metrics: list[str] = []
    exact: bool = False
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    start_seconds: PositiveFloat = 60.0
    step_seconds: PositiveFloat = 60.0

    @property
    def address(self) -> str | None:
        """Return the server's address, or None if each process starts a server. Raises UsageError unless one is set."""
        url = self.id if self.url is None else self.url
        if (url is None) == (self.command is None):
            raise UsageError(f'{OWNER} takes either url = "http://…" or command = ["python", "server.py", "{{port}}"]')
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise UsageError(f'{OWNER}: {url!r} is no address of a server, such as "http://127.0.0.1:8000"')
        return url and url.rstrip("/")


class OpenEnv:
    """Environment behind a server. Raises UsageError for invalid ``Arguments``."""

    metrics_ranges: ClassVar[Mapping[str, Range]] = {"invalid_actions": {"min": 0, "invert": True}}

    def __init__(self, **arguments: Any):
        self.arguments = validated(Arguments, arguments, OWNER)
        self.url, self.exact = self.arguments.address, self.arguments.exact
        self.reward_range = self.arguments.reward_range
        if self.reward_range is not None and self.reward_range[0] >= self.reward_range[1]:
            raise UsageError(
                f"{OWNER}: reward_range is {self.reward_range}, whose first number is not below its second"
            )
        self.tools: Sequence[Mapping[str, Any]] = ()
        """Tools that the policy may call, as JSON schemas of functions; empty if actions are text or JSON."""
        self._client = imported("openenv.core.generic_client", OWNER).GenericEnvClient
        self._server: Server | None = None
        self._actions: Actions | None = None

    def problems(self, split: str) -> Sequence[Problem]:
        """Return the seeds of ``train``; every other split has the held-out seeds."""
        first = self.arguments.seed * 1_000_000
        begin, number = first, self.arguments.heldout
        if split == "train":
            begin, number = first + self.arguments.heldout, self.arguments.size
        return [
            Problem(f"seed/{seed}", f"seed {seed}", "", (), {"seed": seed}) for seed in range(begin, begin + number)
        ]

    def start(self, problem: Problem, seed: int) -> OpenEnvEpisode:
        """Reset a session with the problem's seed. Raises PluginError if the server refuses it."""
        url = self._reachable()
        actions = self._known_actions(url)
        return OpenEnvEpisode(self, url, actions, int(problem.metadata["seed"]))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _reachable(self) -> str:
        """Return the server's address; start the server first if this process has none or it has exited."""
        if self.url is not None:
            return self.url
        if self._server is None or not self._server.alive:
            self.close()
            assert self.arguments.command is not None
            self._server = Server(self.arguments.command, self.arguments.start_seconds, OWNER)
        return self._server.url

    def _known_actions(self, url: str) -> Actions:
        if self._actions is None:
            schema, field, constants = self._schema(url), self.arguments.action_field, self.arguments.action
            try:
                self._actions = Actions(schema, field, constants)
            except KeyError as error:
                raise UsageError(f"{OWNER}: {error.args[0]}") from None
            if field is None and not constants and may_have_tools(schema):
                try:
                    self.tools = listed_tools(url, self.arguments.step_seconds, _trusts_proxy(url))
                except (httpx.HTTPError, ValueError) as error:
                    reason = printable(str(error))
                    raise PluginError(f"{OWNER}: {url}/mcp does not list its tools: {reason}") from error
                if not self.tools and "tool_name" in schema.get("properties", {}):
                    raise UsageError(f"{OWNER}: the actions of {url} are calls of tools, and {url}/mcp lists no tool")
        return self._actions

    def _schema(self, url: str) -> Mapping[str, Any]:
        """Return the JSON schema of actions; empty if the server has no schema and ``action_field`` is set."""
        try:
            answer = httpx.get(f"{url}/schema", timeout=self.arguments.step_seconds, trust_env=_trusts_proxy(url))
        except httpx.HTTPError as error:
            raise PluginError(f"{OWNER}: there is no server at {url}: {printable(str(error))}") from error
        try:
            return dict(answer.raise_for_status().json()["action"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            if self.arguments.action_field is not None:
                return {}
            raise UsageError(f"{OWNER}: {url}/schema does not tell what an action is: set action_field") from None


class OpenEnvEpisode:
    """One session with the server."""

    def __init__(self, environment: OpenEnv, url: str, actions: Actions, seed: int):
        self.environment, self.url, self.actions = environment, url, actions
        limit = environment.arguments.step_seconds
        # An action is over when the server has answered it, so the client's own limit is that of a step.
        self._client = environment._client(url, connect_timeout_s=limit, message_timeout_s=limit).sync()
        self.rewards: list[float] = []
        self.invalid = 0
        self.called = False
        self.numbers: dict[str, float] = {}
        arguments = {"seed": seed, "episode_id": uuid.uuid4().hex} | environment.arguments.reset
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
        messages = list(self.first)
        if self.environment.tools:
            return Observation(tuple(messages), tuple(self.environment.tools))
        if instruction := self.actions.instruction:
            last = messages[-1]
            messages[-1] = {"role": last["role"], "content": f"{last['content']}\n\n{instruction}"}
        return Observation(tuple(messages))

    def step(self, action: Action) -> Step:
        """Send the action. A text that is not a valid action gets the reason as its reply and a reward of 0."""
        if self.environment.tools:
            return self._call_tools(action)
        try:
            sent = self.actions.read(action.text)
        except ValueError as error:
            return self._refused(str(error))
        reply = self._call(lambda: self._client.step(sent), refused=True)
        if isinstance(reply, str):
            return self._refused(reply)
        reward, metrics = self._reward(reply), self._numbers(reply.observation)
        if reply.done:
            self.close()
            return Step(done=True, reward=reward, metrics=metrics)
        messages = self._said(reply.observation)
        if len(messages) > len(self.first) and messages[: len(self.first)] == self.first:  # all that was said, again
            begun = list(self.observe().messages)
            messages = [*begun, *messages[len(begun) :]]
            return Step(done=False, reward=reward, metrics=metrics, conversation=messages)
        return Step(messages, done=False, reward=reward, metrics=metrics)

    def _call_tools(self, action: Action) -> Step:
        """Take each call of a message as a step, in order, up to the one that ends the episode. A message without a
        call ends it too."""
        found = parse(action.text).found
        messages, rewards, metrics, failures, done = [], list[float](), {}, 0, not found
        for each in found:
            reply: Any = each
            if isinstance(each, Call):
                sent = {"type": "call_tool", "tool_name": each.name, "arguments": each.arguments}
                reply = self._call(lambda sent=sent: self._client.step(sent), refused=True)
            if isinstance(reply, str):
                failures += 1
                messages.append(answer(each, f"Error: {reply}"))
                continue
            self.called = True
            text, failed = result_of(reply.observation)
            failures += failed
            messages.append(answer(each, text))
            if (reward := self._reward(reply)) is not None:
                rewards.append(reward)
            metrics |= self._numbers(reply.observation)
            if reply.done:
                done = True
                break
        self.invalid += failures
        if failures:
            metrics["invalid_actions"] = float(failures)
        if done:
            self.close()
        total = math.fsum(rewards) if rewards or failures else None
        return Step(messages, done=done, reward=total, metrics=metrics)

    def _reward(self, reply: Any) -> float | None:
        """Return the reward of a step and add it to the episode. Raises PluginError if it is not a number."""
        if reply.reward is None:
            return None
        reward = float(reply.reward)
        if not math.isfinite(reward):
            raise PluginError(f"{OWNER}: {self.url} gave a reward of {reward}")
        self.rewards.append(reward)
        return reward

    def result(self) -> RewardResult:
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

    def _said(self, observation: Any) -> list[Message]:
        try:
            return messages_of(observation, self.environment.arguments.message_field)
        except KeyError as error:
            raise UsageError(f"{OWNER}: {error.args[0]}") from None

    def _numbers(self, observation: Any) -> dict[str, float]:
        found = observation if isinstance(observation, Mapping) else {}
        numbers = {
            name: found[name] for name in self.environment.arguments.metrics if isinstance(found.get(name), int | float)
        }
        self.numbers.update({name: float(value) for name, value in numbers.items()})
        return {name: float(value) for name, value in numbers.items()}

    def _call(self, call: Callable[[], Any], refused: bool = False) -> Any:
        """Call the client and return its result; with ``refused``, the server's reason if it rejects the action.

        Raises PluginError, with the server's address, for every other error.
        """
        try:
            return call()
        except TimeoutError as error:
            limit = self.environment.arguments.step_seconds
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


def _trusts_proxy(url: str) -> bool:
    """Return whether HTTP_PROXY and similar variables apply: not for addresses of this machine."""
    return urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")
