"""Use reasoning-gym's generated problems, https://github.com/open-thought/reasoning-gym: question, answer, scorer.

The scored text is the completion's last ``<answer>…</answer>``, as in the library's ``extract_answer`` and its own
evaluation; a completion without these tags is scored whole, trimmed. The prompt is the question alone: ``[data]`` may
add a system prompt that asks for the tags.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from retrain.environments.arguments import did_you_mean, imported, refuse_unknown, validated
from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.reasoning_gym_tasks import (
    FULL,
    DataSet,
    DataSetCheck,
    Task,
    carried,
    check_tasks,
    entry_of,
    score,
)
from retrain.errors import DataError, UsageError
from retrain.plugins import described
from retrain.rewards.base import failed
from retrain.types import Action, Problem, RewardResult

OWNER = "environment reasoning-gym"
OURS = ("seed", "size")  # Keys of a data set's config that the environment sets
CHECK_SECONDS = 120.0  # Time limit for the check of one task before training


class Numbers(BaseModel):
    model_config = ConfigDict(strict=True)

    size: PositiveInt = 1000
    heldout: NonNegativeInt = 200
    seed: NonNegativeInt = 0


class MixturePart(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    name: str
    weight: PositiveFloat = 1.0
    config: dict[str, object] = {}


class ReasoningGym:
    """Environment with the problems of one data set (``id = "chain_sum"``, its config as arguments), or of several:
    ``id`` is then a list of names or of ``{name, weight, config}``, and problems are drawn by weight.

    The first ``heldout`` problems are held out, the same for every held-out set. Then ``size`` problems are drawn for
    training; those with held-out questions are left out. Everything follows from ``seed``. Raises UsageError for an
    unknown data set or invalid config. ``problems`` checks each data set first and raises a DataError with the names of
    those that fail.
    """

    exact = True
    reward_range = (0.0, 1.0)
    metrics_ranges: ClassVar[Mapping[str, Range]] = {"answer_tags": {"min": 0, "max": 1}}

    def __init__(self, id: object, **arguments: object):
        numbers = {name: arguments.pop(name) for name in Numbers.model_fields if name in arguments}
        known = validated(Numbers, numbers, OWNER)
        self.size, self.heldout, self.seed = known.size, known.heldout, known.seed
        self.parts = _parts(id, arguments)
        total = self.size + self.heldout
        self._tasks = {part.name: Task(part.name, self.seed, total, part.config) for part in self.parts}
        self._datasets: dict[str, DataSet] = {}
        for name, task in self._tasks.items():
            try:
                self._datasets[name] = task.dataset()
            except Exception as error:
                reason = str(error) or type(error).__name__
                raise UsageError(f"{OWNER}: {name} does not take this config: {reason}") from error

    def problems(self, split: str) -> Sequence[Problem]:
        held = self._drawn[: self.heldout]
        if split != "train":
            return held
        asked = {problem.prompt for problem in held}
        training = [problem for problem in self._drawn[self.heldout :] if problem.prompt not in asked]
        if not training:
            raise DataError(
                f"{OWNER}: every training problem of {', '.join(self._tasks)} is held out; they have too few different "
                f"questions for heldout = {self.heldout}"
            )
        return training

    def start(self, problem: Problem, seed: int) -> ReasoningGymEpisode:
        return ReasoningGymEpisode(self, problem)

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        """Return the task's score of an answer; a result with ``error`` if the scorer raises or returns no score."""
        answer = imported("reasoning_gym.utils", OWNER).extract_answer(completion)
        try:
            dataset, entry = self._datasets[problem.metadata["task"]], entry_of(problem.metadata["entry"])
            value = score(dataset, completion.strip() if answer is None else answer, entry)
        except Exception as error:
            return failed(f"{problem.metadata['task']}: {described(error)}")
        return RewardResult(
            value, correct=value >= FULL, tags=problem.tags, sample_metrics={"answer_tags": float(answer is not None)}
        )

    @cached_property
    def _drawn(self) -> list[Problem]:
        names, weights = [part.name for part in self.parts], [part.weight for part in self.parts]
        drawn = random.Random(self.seed).choices(names, weights, k=self.size + self.heldout)
        checks = check_tasks(self._tasks.values(), CHECK_SECONDS)
        if refused := [f"{name} ({reason})" for name, reason, _ in checks if reason]:
            raise DataError(f"{OWNER}: nothing can be learned from {'; '.join(refused)}: take other data sets")
        problems, numbers = [], {name: count() for name in self._tasks}
        datasets = {name: task.dataset() for name, task in self._tasks.items()}
        for name in drawn:
            index = next(numbers[name])
            try:
                entry = self._tasks[name].entry(datasets[name], index)
                facts = {"task": name, "index": index, "entry": carried(entry)}
                question, answer = str(entry["question"]), str(entry["answer"])
            except Exception as error:
                raise DataError(f"{OWNER}: problems of {name} cannot be made: {described(error)}") from None
            problems.append(Problem(f"{name}/{self.seed}/{index}", question, answer, (name,), facts))
        return problems


@dataclass
class ReasoningGymEpisode:
    environment: ReasoningGym
    problem: Problem
    answer: str = ""

    def observe(self) -> Observation:
        return Observation(({"role": "user", "content": str(self.problem.prompt)},))

    def step(self, action: Action) -> Step:
        self.answer = action.text
        return Step()

    def result(self) -> RewardResult:
        return self.environment.grade(self.problem, self.answer)


def check(names: Sequence[str] | None = None, seconds: float = 60.0) -> list[DataSetCheck]:
    """Check the named data sets, or all, with their default config, for at most ``seconds`` each. Raises UsageError for
    an unknown name, MissingExtra without reasoning-gym."""
    for name in names or ():
        _require_known(name)
    return check_tasks([Task(name, 0, 100, {}) for name in (data_sets() if names is None else names)], seconds)


def data_sets() -> list[str]:
    """Return the names of reasoning-gym's data sets, without ``composite``, which a list of names replaces."""
    imported("reasoning_gym", OWNER)
    return sorted(name for name in imported("reasoning_gym.factory", OWNER).DATASETS if name != "composite")


def _require_known(name: str) -> None:
    if name not in (known := data_sets()):
        raise UsageError(f"{OWNER} has no data set {name!r}{did_you_mean(name, known)}")


def _parts(id: object, config: Mapping[str, object]) -> list[MixturePart]:
    if isinstance(id, str):
        listed: list[object] = [{"name": id, "config": config}]
    else:
        refuse_unknown(config, Numbers.model_fields, f"{OWNER} with several data sets")
        listed = list(id) if isinstance(id, list | tuple) else [id]
    items = [{"name": item} if isinstance(item, str) else item for item in listed]
    if not items or not all(isinstance(item, Mapping) for item in items):
        raise UsageError(f'{OWNER}: id is {id!r}: type the name of a data set, such as id = "chain_sum", or a list')
    parts = [_part(item) for item in items if isinstance(item, Mapping)]
    if twice := [part.name for part in parts if sum(part.name == other.name for other in parts) > 1]:
        raise UsageError(f"{OWNER}: id names {twice[0]} more than once")
    return parts


def _part(item: Mapping[str, object]) -> MixturePart:
    part = validated(MixturePart, item, f"{OWNER}: an item of id")
    _require_known(part.name)
    fields = dataclasses.fields(imported("reasoning_gym.factory", OWNER).DATASETS[part.name][1])
    refuse_unknown(part.config, [field.name for field in fields if field.name not in OURS], f"{OWNER}: {part.name}")
    return part
