"""Environments of ``verifiers.v1``: a taskset of tasks that grade themselves, and the agents that work on them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrain.environments.providers.endpoint import Channel
from retrain.environments.providers.inversion import Inversion, Lead, Outcome
from retrain.errors import UsageError
from retrain.types import RewardResult

if TYPE_CHECKING:
    from retrain.environments.providers.verifiers import Row

FIRST_WITH = "0.4"
"""The first version of verifiers whose tasksets are run here."""
UNSET_KEY = "RETRAIN_VERIFIERS_NO_KEY"
"""An environment variable that nobody sets: our endpoint wants no key, and the user's are not for it."""
CHAT_LOOP = "retrain-chat"
"""What the harness ``chat_loop`` is called."""


def is_taskset(id: str) -> bool:
    """Whether a module of this name exports a taskset. Raises what importing it raises."""
    loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        loaders.taskset_class(id)
    except ModuleNotFoundError as error:
        absent = getattr(error.__cause__, "name", None) or error.name or ""
        if absent.rpartition(".")[2] == _module(id):
            return False
        raise (error.__cause__ or error) from None  # the module is there, and what it imports is not
    except (AttributeError, TypeError):  # no __all__, or no taskset in it
        return False
    return True


class Tasksets:
    """One environment over one taskset, whose shared tool servers run until the process ends."""

    def __init__(
        self, id: str, args: Mapping[str, Any], env: Mapping[str, Any], inversion: Inversion, train: int | None
    ):
        if importlib.util.find_spec("verifiers.v1.harnesses.utils") is None:
            raise UsageError(
                f"taskset {id} needs verifiers {FIRST_WITH} or newer: pip install 'verifiers>={FIRST_WITH}'"
            )
        vf: Any = importlib.import_module("verifiers.v1")
        sys.modules.setdefault(
            CHAT_LOOP.replace("-", "_"), importlib.import_module("retrain.environments.providers.chat_loop")
        )
        self._id, self._inversion, self._train = id, inversion, train
        _let_servers_import(vf.import_taskset(id))
        config = {"taskset": {"id": id, **args}, **env}
        self._seat(vf, config)
        self.environment: Any = vf.load_environment(vf.resolve_env_config(config))
        client = vf.EvalClientConfig(base_url=inversion.endpoint.session_url, api_key_var=UNSET_KEY)
        self._context = vf.ModelContext(model="policy", client=client)
        self._tasks: list[Any] | None = None
        inversion.hold(self.environment.serving())

    def rows(self, part: str) -> Sequence[Row]:
        """See ``Library``; a taskset holds nothing out."""
        from retrain.environments.providers.verifiers import Row, digest

        if part != "train":
            return []
        rows = []
        for task in self._loaded():
            data = task.data
            prompt = data.prompt
            opening = [("system", data.system_prompt)] if data.system_prompt else []
            if isinstance(prompt, str):
                opening.append(("user", prompt))
            else:
                opening += [(message.role, _text(message.content)) for message in prompt or ()]
            if prompt is None:  # the environment opens the conversation
                opening.append(("user", data.description or data.name or f"{self._id}, task {len(rows)}"))
            answer = getattr(data, "answer", None)
            rows.append(
                Row(
                    tuple({"role": role, "content": content} for role, content in opening),
                    "" if answer is None else str(answer),
                    (),
                    digest(data.model_dump(mode="json", exclude={"idx"})),
                )
            )
        return rows

    def lead(self, part: str, index: int) -> Lead:
        """See ``Library``."""
        task = self._loaded()[index]

        async def lead(channel: Channel) -> Outcome:
            channels, names = self._inversion.endpoint.channels, []

            def begun(trace: Any) -> None:
                names.append(trace.id)
                channels[trace.id] = channel

            try:
                episode = await self.environment.run_episode(task, self._context, on_trace=begun)
            finally:
                for name in names:
                    channels.pop(name, None)
            return _outcome(episode)

        return lead

    def _loaded(self) -> list[Any]:
        if self._tasks is None:
            taskset = self.environment.taskset
            if not taskset.bounded and self._train is None:
                raise UsageError(f"taskset {self._id} is endless: say in train how many of its problems to use")
            self._tasks = list(taskset if taskset.bounded else itertools.islice(taskset, self._train))
        return self._tasks

    def _seat(self, vf: Any, config: dict[str, Any]) -> None:
        """Give the policy its seat among the environment's agents, and programs that run in this process where nobody
        has chosen others."""
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
                "trained: give each other one a client, env.<agent>.client = { base_url = … }"
            )


def _let_servers_import(module: ModuleType) -> None:
    """Tool servers are processes of their own, which import the taskset's module; one that is not installed is found
    by PYTHONPATH there."""
    file = Path(module.__file__ or ".").resolve()
    root = file.parents[module.__name__.count(".") + hasattr(module, "__path__")]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "site-packages" not in root.parts and str(root) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *known])


def _module(id: str) -> str:
    return id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _text(content: Any) -> str:
    """For display: what is asked in the rollout is what the environment then sends."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(getattr(part, "text", None) or f"[{part.type}]" for part in content)


def _outcome(episode: Any) -> Outcome:
    traces = episode.traces
    errors = [*episode.errors, *(error for trace in traces if not trace.ok for error in trace.errors[-1:])]
    metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
    rewards = [reward for trace in traces for reward in trace.rewards.items()]
    components = {name: None if reward is None else float(reward.score) for name, reward in rewards}
    stop = str(traces[-1].stop_condition or "") if traces else "error"
    reason = "; ".join(f"{error.type}: {error.message}" for error in errors)
    if not reason and not episode.ok:
        reason = "it failed without a word"
    if not reason and len(traces) != 1:
        reason = f"its agent ran {len(traces)} times in one episode, which is not supported: one run is one rollout"
    if not reason and not any(reward is not None for _, reward in rewards):
        reason = "nothing has graded it"
    total = None if reason else float(traces[0].reward)
    return Outcome(RewardResult(total, metrics, components=components, error=reason or None), stop)
