"""Use environments behind an OpenEnv server, https://github.com/meta-pytorch/OpenEnv, through OpenEnv's own client.

A problem is a seed for the server's reset; an episode is one session. If a server that this process started takes no
further session, another one is started: most published environments take one. The reward of a rollout is the sum of the
rewards of its steps. In an MCP environment the policy calls tools: every call is a step, and a message without a call
ends the episode.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Annotated, Any, ClassVar, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httpx
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from retrain.environments.arguments import imported, validated
from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.openenv_forms import (
    OWNER,
    Actions,
    ActionSchema,
    messages_of,
    result_of,
    tool_schema,
)
from retrain.environments.tools import ToolSchema
from retrain.environments.tools.calls import answer, parse
from retrain.errors import PluginError, UsageError, printable
from retrain.types import Action, Problem, RewardResult

T = TypeVar("T")
Text = Annotated[str, Field(min_length=1)]
MOST_SERVERS = 32  # Servers that a process starts if each takes few sessions
CLOSING_SECONDS = 5.0  # Time limit for a server to forget a session that has ended
# A server's error codes for an action that does not fit the schema, and for an exception of the environment's step
INVALID_ACTION, STEP_RAISED = "VALIDATION_ERROR", "EXECUTION_ERROR"
HOST = "127.0.0.1"
# On Linux the kernel kills the server when its parent ends, also by SIGKILL. PR_SET_PDEATHSIG is 1.
_GUARD = (
    "import ctypes, os, sys\n"
    "if sys.platform == 'linux':\n"
    "    ctypes.CDLL(None).prctl(1, 9)\n"
    "    if os.getppid() != int(sys.argv[1]): sys.exit('the process that started this one is gone')\n"
    "os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class Arguments(BaseModel):
    """Arguments of the environment at ``url``, or of a server that each process starts with ``command``, a
    list of arguments in which ``{port}`` is replaced by the port.

    Problems are consecutive seeds from ``seed`` × 1,000,000 on: the first ``heldout`` are held out, the next ``size``
    are for training.
    ``message_field``, ``action_field`` and ``action``: see ``messages_of`` and ``Actions``. ``reset``: further
    arguments of the reset. ``metrics``: numeric fields of observations to record. ``exact``: the server's answers
    depend on seed and actions only. ``invalid_on_error``: an action on which the environment raises is invalid, as in
    games that raise for illegal moves; by default the episode then fails. ``start_seconds`` and ``step_seconds``: time
    limits of the server's start and of an answer.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    url: str | None = None
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    size: PositiveInt = 1000
    heldout: NonNegativeInt = 200
    seed: NonNegativeInt = 0
    message_field: Text | None = None
    action_field: Text | None = None
    action: dict[str, JsonValue] = {}
    reset: dict[str, JsonValue] = {}
    metrics: list[str] = []
    exact: bool = False
    invalid_on_error: bool = False
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    start_seconds: PositiveFloat = 60.0
    step_seconds: PositiveFloat = 60.0

    @property
    def address(self) -> str | None:
        return self.url and self.url.rstrip("/")

    @model_validator(mode="after")
    def _check(self) -> Arguments:
        url = self.address
        if (url is None) == (self.command is None):
            raise ValueError('it takes either url = "http://…" or command = ["python", "server.py", "{port}"]')
        if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
            raise ValueError(f'{url!r} is no address of a server, such as "http://127.0.0.1:8000"')
        if self.reward_range is not None and self.reward_range[0] >= self.reward_range[1]:
            raise ValueError(f"reward_range is {self.reward_range}, whose first number is not below its second")
        return self


class OpenEnvServer:
    """Process of ``command``, in which ``{port}`` and ``{host}`` are replaced; PORT and HOST are also in its
    environment. It listens on a free loopback port and ends with the process that started it. Waits up to ``seconds``
    until ``/health`` answers. Raises PluginError if there is no such program, the process ends or it does not answer.
    Programs beside this Python come before those in PATH, so that an environment need not be activated. ``sessions``:
    open episodes, of which it takes at most ``most_sessions``."""

    def __init__(self, command: Sequence[str], seconds: float):
        with socket.create_server((HOST, 0)) as probe:
            port = int(probe.getsockname()[1])
        self.url = f"http://{HOST}:{port}"
        self.sessions, self.most_sessions = 0, math.inf
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        program = shutil.which(command[0], path=path)
        if program is None:
            raise PluginError(f"{OWNER}: there is no program {command[0]!r} to start the server with")
        arguments = [word.replace("{port}", str(port)).replace("{host}", HOST) for word in command[1:]]
        # A file, not a pipe: a pipe that is not read fills up and blocks the server.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(os.getpid()), program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PORT": str(port), "HOST": HOST},
        )
        self.close = weakref.finalize(self, _end, self.process, self._output)
        self._wait(seconds, " ".join(command))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def _wait(self, seconds: float, command: str) -> None:
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.05)
        status = self.process.poll()
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - 400))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        last = f": {printable(lines[-1])}" if lines else ""
        self.close()
        if status is not None:
            raise PluginError(f"{OWNER}: the server {command!r} ended with status {status}{last}")
        raise PluginError(f"{OWNER}: {self.url}/health of {command!r} did not answer within {seconds:g} s{last}")


def _end(process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    process.kill()
    process.wait()
    output.close()


class ServerFull(PluginError):
    pass


class OpenEnv:
    """Environment behind a server; ``id`` is another name for ``url``. Raises UsageError for invalid ``Arguments``."""

    metrics_ranges: ClassVar[Mapping[str, Range]] = {"invalid_actions": {"min": 0, "invert": True}}

    def __init__(self, id: object = None, **arguments: object):
        self.arguments = validated(Arguments, arguments if id is None else {"url": id, **arguments}, OWNER)
        self.url, self.exact = self.arguments.address, self.arguments.exact
        self.reward_range = self.arguments.reward_range
        self.tools: Sequence[ToolSchema] = ()  # Tools that the policy may call; empty if actions are text or JSON
        self._client = imported("openenv.core.generic_client", OWNER).GenericEnvClient
        self._servers: list[OpenEnvServer] = []
        self._actions: Actions | None = None

    def problems(self, split: str) -> Sequence[Problem]:
        """Return the seeds of ``train``; every other split has the held-out seeds."""
        first, heldout = self.arguments.seed * 1_000_000, self.arguments.heldout
        seeds = range(first, first + heldout)
        if split == "train":
            seeds = range(first + heldout, first + heldout + self.arguments.size)
        return [Problem(f"seed/{seed}", f"seed {seed}", "", (), {"seed": seed}) for seed in seeds]

    def start(self, problem: Problem, seed: int) -> OpenEnvEpisode:
        """Reset a session with the problem's seed. Raises PluginError if the server refuses it."""
        deadline = time.monotonic() + CLOSING_SECONDS
        while True:
            server = None if self.url is not None else self._server_with_room()
            url = self.url or (server.url if server is not None else "")
            if self._actions is None:
                self._actions = self._read_schema(url)
            try:
                return OpenEnvEpisode(self, url, self._actions, int(problem.metadata["seed"]), server)
            except ServerFull:
                if server is None or time.monotonic() > deadline:
                    raise
                server.most_sessions = server.sessions or server.most_sessions
                time.sleep(0.05)  # an ended session may still be closing

    def close(self) -> None:
        while self._servers:
            self._servers.pop().close()

    def _server_with_room(self) -> OpenEnvServer:
        for server in [each for each in self._servers if not each.alive]:
            server.close()
            self._servers.remove(server)
        for server in self._servers:
            if server.sessions < server.most_sessions:
                return server
        if len(self._servers) == MOST_SERVERS:
            raise PluginError(
                f"{OWNER}: {MOST_SERVERS} servers of one process are full: let each take more sessions "
                "(max_concurrent_envs), or lower batch_size or group_size"
            )
        assert self.arguments.command is not None
        self._servers.append(OpenEnvServer(self.arguments.command, self.arguments.start_seconds))
        return self._servers[-1]

    def _read_schema(self, url: str) -> Actions:
        field = self.arguments.action_field
        try:
            reply = self._request("GET", f"{url}/schema")
        except httpx.HTTPError as error:
            raise PluginError(f"{OWNER}: there is no server at {url}: {printable(str(error))}") from error
        try:
            schema: ActionSchema = cast("ActionSchema", dict(reply.raise_for_status().json()["action"]))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            if field is None:
                raise UsageError(f"{OWNER}: {url}/schema does not tell what an action is: set action_field") from None
            schema = {}
        actions = Actions(schema, field, self.arguments.action)
        if field is None and not self.arguments.action and actions.may_be_calls:
            self.tools = self._list_tools(url)
            if not self.tools and "tool_name" in schema.get("properties", {}):
                raise UsageError(f"{OWNER}: the actions of {url} are calls of tools, and {url}/mcp lists no tool")
        return actions

    def _list_tools(self, url: str) -> list[ToolSchema]:
        """Return the tools of an MCP environment; [] for other environments.

        Sends MCP's ``tools/list`` outside of a session, because an HTTP session would stay open on the server if this
        process is killed.
        """
        try:
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            content = self._request("POST", f"{url}/mcp", json=request).raise_for_status().json()
            tools = content["result"]["tools"] if isinstance(content, Mapping) and "result" in content else []
            return [tool_schema(tool) for tool in tools]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise PluginError(f"{OWNER}: {url}/mcp does not list its tools: {printable(str(error))}") from error

    def _request(self, method: str, url: str, **options: Any) -> httpx.Response:
        # HTTP_PROXY and similar variables do not apply to addresses of this machine.
        trust_env = urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")
        return httpx.request(method, url, timeout=self.arguments.step_seconds, trust_env=trust_env, **options)


class ServerReply(Protocol):
    observation: object
    reward: float | None
    done: bool


class OpenEnvEpisode:
    def __init__(self, environment: OpenEnv, url: str, actions: Actions, seed: int, server: OpenEnvServer | None):
        self.environment, self.url, self.actions, self.server = environment, url, actions, server
        limit = environment.arguments.step_seconds
        # Every message waits for the server's answer to one action, so the client's time limit is that of a step.
        self._client = environment._client(url, connect_timeout_s=limit, message_timeout_s=limit).sync()
        self.rewards: list[float] = []
        self.numbers: dict[str, float] = {}
        self.invalid, self.called = 0, False
        arguments = {"seed": seed, "episode_id": uuid.uuid4().hex} | environment.arguments.reset
        if server is not None:
            server.sessions += 1
        try:
            self._call(self._client.connect)
            begun = self._call(lambda: self._client.reset(**arguments))
            self.first = messages_of(begun.observation, environment.arguments.message_field)
            if begun.done:
                raise PluginError(f"{OWNER}: {url} was done with seed {seed} before the first action")
        except BaseException:
            self.close()
            raise

    def observe(self) -> Observation:
        messages = list(self.first)
        instruction = self.actions.instruction
        if instruction and not self.environment.tools:
            last = messages[-1]
            messages[-1] = {"role": last["role"], "content": f"{last['content']}\n\n{instruction}"}
        return Observation(tuple(messages), tuple(self.environment.tools))

    def step(self, action: Action) -> Step:
        """Send the action to the server. If the text is not a valid action, the reply says why, and the reward is 0."""
        if self.environment.tools:
            return self._call_tools(action)
        try:
            reply = self._send(self.actions.read(action.text))
        except ValueError as error:
            self.invalid += 1
            text = {"role": "user", "content": f"{error} {self.actions.instruction}".strip()}
            return Step([text], done=False, reward=0.0, metrics={"invalid_actions": 1.0}, logs={"invalid": str(error)})
        reward, metrics = self._reward(reply), self._metrics(reply.observation)
        if reply.done:
            self.close()
            return Step(done=True, reward=reward, metrics=metrics)
        messages = messages_of(reply.observation, self.environment.arguments.message_field)
        if len(messages) > len(self.first) and messages[: len(self.first)] == self.first:  # the conversation again
            begun = list(self.observe().messages)
            messages = [*begun, *messages[len(begun) :]]
            return Step(done=False, reward=reward, metrics=metrics, conversation=messages)
        return Step(messages, done=False, reward=reward, metrics=metrics)

    def _call_tools(self, action: Action) -> Step:
        """Run the calls of a message in order, each as a step, until a step ends the episode. A message without a call
        ends it too."""
        found = parse(action.text).items
        messages, rewards, metrics, failures, done = [], list[float](), {}, 0, not found
        for call in found:
            try:
                if isinstance(call, str):
                    raise ValueError(call)
                reply = self._send({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
            except ValueError as error:
                failures += 1
                messages.append(answer(call, f"Error: {error}"))
                continue
            self.called = True
            text, failed = result_of(reply.observation)
            failures += failed
            messages.append(answer(call, text))
            if (reward := self._reward(reply)) is not None:
                rewards.append(reward)
            metrics |= self._metrics(reply.observation)
            if reply.done:
                done = True
                break
        self.invalid += failures
        if failures:
            metrics["invalid_actions"] = float(failures)
        if done:
            self.close()
        reward = math.fsum(rewards) if rewards or failures else None
        return Step(messages, done=done, reward=reward, metrics=metrics)

    def result(self) -> RewardResult:
        """Return the sum of the steps' rewards. It is 0 if the environment has tools and the policy called none; it is
        an error if the server gave no reward for the steps."""
        metrics: dict[str, float | None] = {"invalid_actions": float(self.invalid), **self.numbers}
        if not self.rewards and not self.invalid and (self.called or not self.environment.tools):
            return RewardResult(None, metrics, error=f"{self.url} gave no reward")
        return RewardResult(math.fsum(self.rewards), metrics)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the session has already ended
            self._client.close()
        if self.server is not None:
            self.server.sessions -= 1
            self.server = None

    def _reward(self, reply: ServerReply) -> float | None:
        """Return the reward of a step, if any, and add it to the episode. Raises PluginError if it is not finite."""
        if reply.reward is None:
            return None
        reward = float(reply.reward)
        if not math.isfinite(reward):
            raise PluginError(f"{OWNER}: {self.url} gave a reward of {reward}")
        self.rewards.append(reward)
        return reward

    def _metrics(self, observation: object) -> dict[str, float]:
        fields = observation if isinstance(observation, Mapping) else {}
        values = {name: fields.get(name) for name in self.environment.arguments.metrics}
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.numbers.update(numbers)
        return numbers

    def _send(self, action: Mapping[str, object]) -> ServerReply:
        """Send an action. Raises ValueError, with a message for the policy, if the server says that it is invalid."""
        return self._call(lambda: self._client.step(action), rejection="That is not a valid action.")

    def _call(self, call: Callable[[], T], rejection: str = "") -> T:
        """Call the client. ``rejection``: text of the ValueError that is raised if the server says that the action is
        invalid. Raises PluginError, with the server's address, for every other error."""
        try:
            return call()
        except TimeoutError as error:
            limit = self.environment.arguments.step_seconds
            raise PluginError(f"{OWNER}: {self.url} did not answer within {limit:g} s (step_seconds)") from error
        except Exception as error:  # the client passes on exceptions of its sockets
            text = printable(str(error)) or type(error).__name__
            code = "".join(re.findall(r"\(code: (\w+)\)$", text))
            if rejection and code == INVALID_ACTION:
                raise ValueError(rejection) from error
            raised = rejection and code == STEP_RAISED
            if raised and self.environment.arguments.invalid_on_error:
                raise ValueError(f"{rejection} {text[: text.rindex(' (code:')]}.") from error
            # A full server sends CAPACITY_REACHED and closes; it is a race whether the client reads that before.
            is_full = code == "CAPACITY_REACHED" or (not code and "received 1000" in text)
            fault = f"{self.url} answered with an error" if code else f"the connection to {self.url} is lost"
            hint = ": it may be full, let it take more sessions (max_concurrent_envs)" if is_full else ""
            advice = "; args.invalid_on_error = true counts such an action as invalid" if raised else ""
            raise (ServerFull if is_full else PluginError)(f"{OWNER}: {fault}{hint}: {text}{advice}") from error
