"""Run environments in worker processes, so that an episode that raises, hangs, crashes or answers without end fails
alone and the run continues.

Episodes are assigned to processes by number. If a process dies, a new one replaces it. If the environment is exact,
which means that the same seed and actions give the same episode, the other episodes of that process are started again
and their actions are repeated; otherwise they fail too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from retrain.config.tasks import EnvironmentSection
from retrain.environments.hosting import LOST
from retrain.environments.protocol import EpisodeFailed, Observation, Range, Step
from retrain.environments.providers import PROVIDERS
from retrain.errors import DataError, PluginError, PluginMissing
from retrain.files import existing_file, search_folders
from retrain.rewards.base import failed
from retrain.rewards.workers import Reply, WorkerLimits, WorkerPool
from retrain.types import Action, Problem, RewardResult

START_SECONDS = 180.0  # Time limit for loading an environment, which may import much
PROBLEMS_SECONDS = 600.0  # Time limit for generating problems
BEGINNING = 4  # Factor on `timeout_s` for the start of an episode, which may start a server
PAGE = 1000  # Problems per request
RANGE_SLACK = 1e-6  # Rounding tolerance for declared reward ranges
NOTHING = Action([], "", np.zeros(0), None, "stop")  # Empty action
TOOLS = "retrain.environments.tool_use:ToolUse"


class HostedEnvironment:
    """The environment or tools of ``[environment]``, hosted by ``workers`` processes. The constructor raises
    PluginMissing if they cannot start."""

    def __init__(self, section: EnvironmentSection, folder: Path | None):
        self.section = section
        # A string, because ``python`` may be another version of Python, which cannot unpickle the paths of Python 3.13
        base_dir = None if folder is None else str(folder.resolve())
        target, arguments = _target(section, base_dir)
        self.name = section.provider or "tools"
        python = section.python
        if python is not None:
            python = str(existing_file(python, folder, "[environment] python =", PluginMissing))
        self.pools = [
            WorkerPool(
                "retrain.environments.hosting:serve",
                {"target": target, "arguments": arguments, "folder": base_dir},
                workers=1,
                limits=WorkerLimits(section.timeout_s, int(section.memory_gb * 2**30), START_SECONDS),
                subject="the environment" if section.provider else "the tool",
                python=python,
                folders=[str(each) for each in search_folders(folder)],
            )
            for _ in range(section.workers)
        ]
        self._numbers = count()
        self._problems: dict[str, list[Problem]] = {}
        try:
            self.pools[0].start()
        except PluginError as error:
            self.close()
            raise PluginMissing(str(error)) from None
        facts = self.pools[0].facts
        self.exact = bool(facts["exact"])
        self.ranges: Mapping[str, Range] = facts["ranges"]

    @property
    def parallel(self) -> int:
        return len(self.pools)

    def problems(self, split: str) -> Sequence[Problem]:
        if split not in self._problems:
            problems: list[Problem] = []
            while len(problems) % PAGE == 0:
                reply = self.call(0, ("problems", split, len(problems), PAGE), PROBLEMS_SECONDS)
                if reply.error is not None:
                    raise DataError(f"[environment] provider = {self.name!r}: {reply.error}")
                if not reply.value:
                    break
                for row in reply.value:
                    prompt = row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"])
                    problems.append(Problem(**{**row, "prompt": prompt, "tags": tuple(row["tags"])}))
            self._problems[split] = problems
        if not self._problems[split]:
            raise DataError(f"[environment] provider = {self.name!r} has no problems in {split!r}")
        return self._problems[split]

    def start(self, problem: Problem, seed: int) -> HostedEpisode:
        return HostedEpisode(self, next(self._numbers), problem, seed)

    def results(self, episodes: Sequence[HostedEpisode]) -> list[RewardResult]:
        with ThreadPoolExecutor(self.parallel) as side_by_side:
            return list(side_by_side.map(self._result, episodes))

    def _result(self, episode: HostedEpisode) -> RewardResult:
        try:
            result = episode.result()
        except EpisodeFailed as error:
            return failed(str(error))
        fault = self._outside(result)
        return failed(fault) if fault else result

    def examine(self, problem: Problem) -> None:
        """Check the environment by an episode with empty actions. Raises DataError if the episode cannot begin, its
        reward is outside the declared range, or ``correct_metric`` is missing. Later failures of the episode are
        ignored, because the empty actions may cause them."""
        owner = f"[environment] provider = {self.name!r}"
        try:
            episode = self.start(problem, 0)
            if self.section.provider == "openenv" and "command" not in self.section.args:
                self.start(problem, 0).close()  # the server must take several sessions
        except EpisodeFailed as error:
            raise DataError(f"{owner}: an episode of {problem.id} cannot begin: {error}") from None
        try:
            for _ in range(self.section.turns):
                if episode.step(NOTHING).done:
                    break
            result = episode.result()
        except EpisodeFailed:
            episode.close()
            return
        if fault := self._outside(result) or self._lacks_metric(result):
            raise DataError(f"{owner}: {fault} for an episode of {problem.id}")

    def _lacks_metric(self, result: RewardResult) -> str:
        name, metrics = self.section.correct_metric, {**result.components, **result.sample_metrics}
        if name is None or name in metrics or result.total_reward is None or self.section.provider == "openenv":
            return ""
        return f"there is no metric {name!r} (correct_metric) among {', '.join(metrics) or 'none'}"

    def _outside(self, result: RewardResult) -> str:
        ends = self.ranges.get("reward", {})
        if not {"min", "max"} <= set(ends) or result.total_reward is None:
            return ""
        low, high = ends["min"], ends["max"]
        slack = RANGE_SLACK * max(1.0, high - low)
        if low - slack <= result.total_reward <= high + slack:
            return ""
        return f"the reward is {result.total_reward:g}, outside the declared range [{low:g}, {high:g}]"

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    def call(self, number: int, job: tuple[object, ...], timeout_s: float | None = None) -> Reply:
        (reply,) = self.pools[number % len(self.pools)].map([job], timeout_s)
        return reply


class HostedEpisode:
    """Episode in a worker process. ``first`` is the first observation. ``actions`` are kept to repeat them if the
    process dies. The constructor and all methods but ``close`` raise EpisodeFailed."""

    def __init__(self, environment: HostedEnvironment, number: int, problem: Problem, seed: int):
        self.environment, self.number, self.problem, self.seed = environment, number, problem, seed
        self.actions: list[Action] = []
        begun = self._start()
        self.first = Observation(tuple(begun["messages"]), tuple(begun["tools"]))

    def step(self, action: Action) -> Step:
        value = self._repeatable("step", self.number, action)
        self.actions.append(action)
        return Step(**{**value, "messages": tuple(value["messages"])})

    def result(self) -> RewardResult:
        """Return the reward and close the episode."""
        value = self._repeatable("result", self.number)
        return RewardResult(**{**value, "tags": tuple(value["tags"])})

    def close(self) -> None:
        self.environment.call(self.number, ("close", self.number))

    def _start(self) -> Any:
        limit = BEGINNING * self.environment.section.timeout_s
        return self._value(("start", self.number, self.problem, self.seed), limit)

    def _repeatable(self, *job: object) -> Any:
        """Run a job in the episode. If the episode was lost with its process, start it again and repeat its actions
        first, or raise EpisodeFailed if the environment is not exact."""
        value = self._value(job)
        if value != LOST:
            return value
        if not self.environment.exact:
            raise EpisodeFailed("died", "the episode's process ended with another episode of its")
        self._start()
        for action in self.actions:
            self._value(("step", self.number, action))
        return self._value(job)

    def _value(self, job: tuple[object, ...], timeout_s: float | None = None) -> Any:
        reply = self.environment.call(self.number, job, timeout_s)
        if reply.error is not None:
            kind = "flooded" if reply.error.startswith("MessagesTooLong:") else reply.kind or "died"
            raise EpisodeFailed(kind, reply.error)
        return reply.value


def _target(section: EnvironmentSection, folder: str | None) -> tuple[str, dict[str, object]]:
    if section.provider is None:
        return TOOLS, {"tools": section.tools, "folder": folder}
    if section.provider in PROVIDERS:
        arguments = {"id": section.id, **section.args}
        if section.provider == "openenv":  # records the fields of observations that the configuration names
            wanted = arguments.get("metrics", [])
            if isinstance(wanted, list):
                arguments["metrics"] = [*wanted, section.correct_metric or "correct"]
        return PROVIDERS[section.provider], arguments
    return section.provider, {**({} if section.id is None else {"id": section.id}), **section.args}
