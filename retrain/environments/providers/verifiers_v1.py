"""Use environments of ``verifiers.v1``: a taskset of self-grading tasks, and the agents that solve them."""

import asyncio
import contextvars
import functools
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from retrain.environments.providers.endpoint import Channel
from retrain.environments.providers.inversion import UNSET_KEY, HarnessResult, Inversion, Lead, TaskRow, digest
from retrain.environments.providers.messages import chat_messages
from retrain.errors import UsageError
from retrain.plugins import described
from retrain.types import RewardResult

FIRST_WITH = "0.4"  # First version of verifiers whose tasksets are supported
CHAT_LOOP = "retrain-chat"  # Name of the harness in `chat_loop`
TASKSETS = "verifiers.v1.tasksets"  # The package of the library's own tasksets
LONGEST_S, MOST_RUNS = 10.0, 16  # Limits of ``runs_of_an_episode``: seconds, and runs of agents
# "name: exception" of each metric that raised in this rollout
_failed: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("failed", default=None)


Hook = Callable[..., Awaitable[object]]  # A metric or reward of a task


class Trace(Protocol):
    """Record of a run; only its id is read while the run continues."""

    id: str


def is_taskset(id: str) -> bool:
    """Return whether the module named by ``id`` exports a taskset. Exceptions of its import pass through."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    name = _module(id)
    if "." in name:
        # The library first imports <TASKSETS>.<name>, which would raise for a name with a dot. So the module is
        # registered under that name.
        try:
            sys.modules.setdefault(f"{TASKSETS}.{name}", importlib.import_module(name))
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                return False
            raise
    try:
        loaders.taskset_class(id)
    except ModuleNotFoundError as error:
        absent = getattr(error.__cause__, "name", None) or error.name or ""
        if absent.rpartition(".")[2] == _module(id):
            return False
        raise (error.__cause__ or error) from None  # the module exists, but one of its imports does not
    except (AttributeError, TypeError):  # no __all__, or no taskset in it
        return False
    return True


class Tasksets:
    """Environment of one taskset; the tool servers that tasks share run until the process ends."""

    def __init__(
        self, id: str, args: Mapping[str, object], env: Mapping[str, object], inversion: Inversion, train: int | None
    ):
        if importlib.util.find_spec("verifiers.v1.harnesses.utils") is None:
            raise UsageError(
                f"taskset {id} needs verifiers {FIRST_WITH} or newer: pip install 'verifiers>={FIRST_WITH}'"
            )
        vf = importlib.import_module("verifiers.v1")
        sys.modules.setdefault(
            CHAT_LOOP.replace("-", "_"), importlib.import_module("retrain.environments.providers.chat_loop")
        )
        self._id, self._inversion, self._train = id, inversion, train
        _let_servers_import(vf.import_taskset(id))
        config = {"taskset": {"id": id, **args}, **env}
        self._seat(vf, config)
        self.environment = vf.load_environment(vf.resolve_env_config(config))
        self._check_runs(vf)
        client = vf.EvalClientConfig(base_url=f"{inversion.endpoint.url}/session/v1", api_key_var=UNSET_KEY)
        self._context = vf.ModelContext(model="policy", client=client)
        inversion.hold(self.environment.serving())

    def rows(self, part: str) -> Sequence[TaskRow]:
        if part == "eval":
            return []
        rows = []
        for task in self._tasks:
            data = task.data
            prompt = data.prompt
            if prompt is None:  # the environment opens the conversation
                prompt = data.description or data.name or f"{self._id}, task {len(rows)}"
            opening = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            if isinstance(prompt, str):
                opening.append({"role": "user", "content": prompt})
            else:
                opening += [message.model_dump() for message in prompt]
            messages = tuple(chat_messages(opening, placeholders=True))
            answer = getattr(data, "answer", None)
            hashed = digest(data.model_dump(mode="json", exclude={"idx"}))
            rows.append(TaskRow(messages, "" if answer is None else str(answer), (), hashed))
        return rows

    def lead(self, part: str, index: int) -> Lead:
        task = self._tasks[index]

        async def lead(channel: Channel) -> HarnessResult:
            channels, current, failed = self._inversion.endpoint.channels, list[str](), list[str]()
            _failed.set(failed)

            def begun(trace: Trace) -> None:
                current.append(trace.id)
                if len(current) > 1:  # not a retry: the library discards a failed run before it begins the next
                    raise RuntimeError(self._several_runs("a second time"))
                channels[trace.id] = channel

            def discarded(trace: Trace) -> None:
                current.remove(trace.id)
                channels.pop(trace.id, None)

            try:
                episode = await self.environment.run_episode(task, self._context, on_trace=begun, on_discard=discarded)
            finally:
                for name in current:
                    channels.pop(name, None)
            return _outcome(episode, failed)

        return lead

    @functools.cached_property
    def _tasks(self) -> list[Any]:
        taskset = self.environment.taskset
        if not taskset.bounded and self._train is None:
            raise UsageError(f"taskset {self._id} is endless: say in train how many of its problems to use")
        tasks = list(taskset if taskset.bounded else itertools.islice(taskset, self._train))
        for task in tasks:
            task.hooks = functools.partial(_tolerant_hooks, task.hooks)
        return tasks

    def _check_runs(self, vf: ModuleType) -> None:
        if type(self.environment).run is vf.SingleAgentEnv.run:
            return
        task = next(iter(self.environment.taskset), None)
        runs = 0 if task is None else self._inversion.run(runs_of_an_episode(vf, self.environment, task))
        if runs > 1:
            most = " or more" if runs == MOST_RUNS else ""
            raise UsageError(self._several_runs(f"{runs} times{most}"))

    def _several_runs(self, how_often: str) -> str:
        kind = type(self.environment).__name__
        return (
            f"environment {self._id}: {kind} runs its agents {how_often} in one episode, which is not supported: one "
            "run is one rollout. Choose an environment that runs one agent once (env.id), or leave env out"
        )

    def _seat(self, vf: ModuleType, config: dict[str, Any]) -> None:
        """Assign the policy to an agent of the environment, and give agents without a runtime or harness local ones."""
        kind = vf.env_config_type(self._id, config.get("id", ""))
        seats = {
            name: field.default
            for name, field in kind.model_fields.items()
            if isinstance(field.default, vf.AgentConfig)
        }
        bundled = vf.default_harness_id(self._id) == self._id
        ours = []
        for name, default in seats.items():
            seat = config[name] = dict(config.get(name) or {})
            if seat.get("client") or default.client is not None:
                continue
            ours.append(name)
            if "runtime" not in default.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            if default.harness is None and not bundled:
                seat.setdefault("harness", {"id": CHAT_LOOP})
        if len(ours) != 1:
            raise UsageError(
                f"environment {self._id} has the agents {', '.join(ours) or 'of others only'}, and one of them is "
                'trained: give each other one a client, env.<agent>.client = { type = "eval", base_url = … }'
            )


def _let_servers_import(module: ModuleType) -> None:
    """Extend PYTHONPATH for tool servers, which import the taskset's module in their own processes."""
    file = Path(module.__file__ or ".").resolve()
    root = file.parents[module.__name__.count(".") + hasattr(module, "__path__")]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "site-packages" not in root.parts and str(root) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *known])


def _module(id: str) -> str:
    return id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _tolerant_hooks(hooks: Callable[[str], list[Hook]], kind: str) -> list[Hook]:
    """Return a task's hooks of a kind. Hooks that cannot change the reward, which are metrics and rewards of weight 0,
    are wrapped: one that raises is left out."""

    def decides(hook: Hook) -> bool:
        return kind != "metric" and (kind != "reward" or bool(getattr(hook, "_vf_weight", 1.0)))

    return [hook if decides(hook) else _tolerant(hook) for hook in hooks(kind)]


def _tolerant(hook: Hook) -> Hook:
    @functools.wraps(hook)
    async def tolerant(*arguments: object, **named: object) -> object:
        try:
            return await hook(*arguments, **named)
        except Exception as error:
            if (failed := _failed.get()) is not None:
                failed.append(f"{hook.__name__}: {described(error)}")
            return {}  # an empty mapping of scores by name

    return tolerant


def _without_frames(message: str) -> str:
    """Shorten an error message that quotes a tool server's traceback to the last line of the traceback."""
    before, traceback, frames = message.partition("Traceback (most recent call last):")
    return f"{before}{frames.strip().splitlines()[-1]}" if traceback and frames.strip() else message


def _failure(episode: Any) -> str:
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces if not trace.ok for error in trace.errors[-1:])]
    if errors:
        return "; ".join(f"{error.type}: {_without_frames(error.message)}" for error in errors)
    if not episode.ok:
        return "it failed without an error message"
    if len(traces) != 1:
        return f"its agent ran {len(traces)} times in one episode, which is not supported: one run is one rollout"
    return ""


def _outcome(episode: Any, failed_metrics: Sequence[str] = ()) -> HarnessResult:
    traces = episode.traces
    metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
    rewards = [reward for trace in traces for reward in trace.rewards.items()]
    components = {name: None if reward is None else float(reward.score) for name, reward in rewards}
    stop = str(traces[-1].stop_condition or "") if traces else "error"
    reason = _failure(episode)
    if not reason and not any(reward is not None for _, reward in rewards):
        reason = "nothing has graded it"
    total = None if reason else float(traces[0].reward)
    logs = {"failed_metrics": "; ".join(failed_metrics)} if failed_metrics else {}
    return HarnessResult(RewardResult(total, metrics, components=components, error=reason or None), stop, logs)


# ``runs_of_an_episode`` counts, without a model, how often the agents of an environment run in one episode. One run of
# an agent is one rollout here, so environments with several runs per episode are rejected. Their ``run`` is arbitrary
# code, so it is executed with agents that answer nothing.


class _SilentAgent:
    trainable = True

    def __init__(self, vf: ModuleType, config: object, counted: list[object]):
        self._vf, self.config, self._counted = vf, config, counted

    async def run(self, task: Any, **options: object) -> object:
        await asyncio.sleep(0)  # lets the rehearsal end here even if the environment keeps asking
        if len(self._counted) == MOST_RUNS:
            raise RuntimeError("enough has been seen")
        self._counted.append(task)
        about = self._vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        info = importlib.import_module("verifiers.v1.trace").AgentInfo(config=self.config)
        return self._vf.Trace(task=about, agent=info, is_completed=True, ok=True)

    @asynccontextmanager
    async def interaction(self, task: object, **options: object) -> AsyncIterator[SimpleNamespace]:
        async def turn(*message: object) -> object:
            return self._vf.Segment(messages=[], terminated=True)

        yield SimpleNamespace(trace=await self.run(task), turn=turn, send=turn, steer=turn)


async def runs_of_an_episode(vf: ModuleType, environment: Any, task: object) -> int:
    """Return how often agents run in one episode of ``task`` if they answer nothing. If the environment raises or the
    time limit is reached, return the number of runs before that."""
    counted: list[object] = []
    agents = vf.Agents(environment.config, lambda name, config: _SilentAgent(vf, config, counted))
    with suppress(Exception):
        async with asyncio.timeout(LONGEST_S):
            await environment.run(task, agents)
    return len(counted)
