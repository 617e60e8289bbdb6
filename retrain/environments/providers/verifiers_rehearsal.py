"""Count, without a model, how often the agents of a ``verifiers.v1`` environment run in one episode.

One run of an agent is one rollout here, so environments with several runs per episode are rejected. Their ``run`` is
arbitrary code, so it is executed with agents that answer nothing.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

LONGEST_S, MOST_RUNS = 10.0, 16  # Seconds and runs after which a rehearsal ends; runs before that count


class _Silence:
    """An interaction in which the agent ends its run instead of answering."""

    def __init__(self, vf: Any, trace: Any):
        self.trace, self._end = trace, vf.Segment(messages=[], terminated=True)

    async def turn(self, *message: Any) -> Any:
        return self._end

    send = steer = turn


class _SilentAgent:
    """Replaces an agent of the environment: every run ends as it begins."""

    trainable = True

    def __init__(self, vf: Any, config: Any, counted: list[Any]):
        self._vf, self.config, self._counted = vf, config, counted

    async def _trace(self, task: Any) -> Any:
        await asyncio.sleep(0)  # lets the rehearsal end here even if the environment keeps asking
        if len(self._counted) == MOST_RUNS:
            raise RuntimeError("enough has been seen")
        self._counted.append(task)
        about = self._vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        info = importlib.import_module("verifiers.v1.trace").AgentInfo(config=self.config)
        return self._vf.Trace(task=about, agent=info, is_completed=True, ok=True)

    async def run(self, task: Any, **options: Any) -> Any:
        return await self._trace(task)

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[_Silence]:
        yield _Silence(self._vf, await self._trace(task))


async def runs_of_an_episode(vf: Any, environment: Any, task: Any) -> int:
    """Return how often agents run in one episode of ``task`` whose agents answer nothing. Exceptions of the environment
    about such answers, and the time limit, end the rehearsal; runs before that count."""
    counted: list[Any] = []
    agents = vf.Agents(environment.config, lambda name, config: _SilentAgent(vf, config, counted))
    with suppress(Exception):
        async with asyncio.timeout(LONGEST_S):
            await environment.run(task, agents)
    return len(counted)
