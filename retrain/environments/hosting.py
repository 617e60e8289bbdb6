"""Code of the worker processes that host environments: it runs the jobs of ``environments.hosted``.

It imports neither torch nor anything else that environments do not need, because another Python may run it.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from retrain.environments.protocol import Observation, Step
from retrain.environments.providers.styles import adapt
from retrain.errors import PluginError
from retrain.plugins import declared_ranges, load_function
from retrain.rewards.base import checked
from retrain.types import MAX_PROBLEMS, Action, Message, Problem, RewardResult

MESSAGE_CHARACTERS = 1_000_000  # Most characters in all messages of one step; models can read only a fraction of them
LOST = "lost"  # Reply for an episode that began before this process was started


class MessagesTooLong(Exception):
    pass


def serve(target: str, arguments: Mapping[str, object], folder: str | None) -> Callable[[tuple[object, ...]], object]:
    """Create the environment ``module:Class`` and return a function that runs jobs in it. Raises PluginError."""
    return Host(load_function(target, None if folder is None else Path(folder), "provider ="), arguments)


class Host:
    """Holder of an environment and its episodes, by number. Methods of both may be async; all run on one event loop."""

    def __init__(self, written: Callable[..., object], arguments: Mapping[str, object]):
        self._runner = asyncio.Runner()
        self.environment = environment = adapt(written, arguments, self._settled)
        self.episodes: dict[int, Any] = {}
        self.made: dict[str, list[Problem]] = {}
        ends = zip(("min", "max"), getattr(environment, "reward_range", None) or (), strict=False)
        known = {name: float(end) for name, end in ends if end is not None}
        ranges = declared_ranges(environment) | ({"reward": known} if known else {})
        self.facts = {"exact": bool(getattr(environment, "exact", True)), "ranges": ranges}

    def __call__(self, job: tuple[object, ...]) -> object:
        """Run a job: ("problems", split, begin, count), ("start", number, problem, seed), ("step", number, action),
        ("result", number) or ("close", number)."""
        kind, *arguments = job
        return getattr(self, str(kind))(*arguments)

    def _settled(self, value: object) -> Any:
        async def awaited(awaitable: Awaitable[object]) -> object:
            return await awaitable

        return self._runner.run(awaited(value)) if inspect.isawaitable(value) else value

    def problems(self, split: str, begin: int, count: int) -> list[dict[str, object]]:
        if split not in self.made:
            problems = list(islice(self._settled(self.environment.problems(split)), MAX_PROBLEMS + 1))
            if len(problems) > MAX_PROBLEMS:
                raise PluginError(
                    f"problems({split!r}) makes more than {MAX_PROBLEMS:,} problems: a generator must end; at most so "
                    "many are read"
                )
            self.made[split] = problems
        page = self.made[split][begin : begin + count]
        if wrong := next((problem for problem in page if not isinstance(problem, Problem)), None):
            raise PluginError(f"problems({split!r}) gave {type(wrong).__name__}, not retrain.types.Problem")
        return [
            {
                "id": str(problem.id),
                "prompt": problem.prompt if isinstance(problem.prompt, str) else _plain(problem.prompt),
                "answer": str(problem.answer),
                "tags": [str(tag) for tag in problem.tags],
                "metadata": problem.metadata,
            }
            for problem in page
        ]

    def start(self, number: int, problem: Problem, seed: int) -> dict[str, object]:
        self.close(number)
        episode = self._settled(self.environment.start(problem, seed))
        self.episodes[number] = episode
        observed = self._settled(episode.observe())
        if not isinstance(observed, Observation):
            raise PluginError(f"observe() gave {type(observed).__name__}, not an Observation")
        return {"messages": _plain(observed.messages), "tools": [dict(tool) for tool in observed.tools]}

    def step(self, number: int, action: Action) -> object:
        if number not in self.episodes:
            return LOST
        step = self._settled(self.episodes[number].step(action))
        if not isinstance(step, Step):
            raise PluginError(f"step() gave {type(step).__name__}, not a Step")
        return {
            "messages": _plain(step.messages),
            "done": bool(step.done),
            "reward": None if step.reward is None else float(step.reward),
            "metrics": {str(name): float(value) for name, value in step.metrics.items()},
            "logs": {str(name): str(text)[:2000] for name, text in step.logs.items()},
            "conversation": None if step.conversation is None else _plain(step.conversation),
        }

    def result(self, number: int) -> object:
        if number not in self.episodes:
            return LOST
        try:
            returned = self._settled(self.episodes[number].result())
        finally:
            self.close(number)
        is_ungraded = isinstance(returned, RewardResult) and returned.total_reward is None and returned.error is None
        result = checked(returned)
        if is_ungraded and result is returned:
            result.error = None  # an episode with tools: [reward] grades it later
        return vars(result)

    def close(self, number: int) -> None:
        episode = self.episodes.pop(number, None)
        if (close := getattr(episode, "close", None)) is not None:
            self._settled(close())


def _plain(messages: Sequence[object]) -> list[Message]:
    """Return messages as JSON values. Raises PluginError for other types, MessagesTooLong if they are too long."""
    made = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PluginError(f"a message is {type(message).__name__}, not {{'role': …, 'content': …}}")
        content = message.get("content")
        if not isinstance(content, str):
            raise PluginError(f"the content of a message is {type(content).__name__}, not text")
        made.append({str(key): value for key, value in message.items()})
    size = sum(len(message["content"]) for message in made)
    if size > MESSAGE_CHARACTERS:
        raise MessagesTooLong(f"messages of {size:,} characters")
    return made
