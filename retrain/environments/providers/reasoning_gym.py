"""Use reasoning-gym's generated problems, https://github.com/open-thought/reasoning-gym: question, answer, scorer.

The scored text is the completion's last ``<answer>…</answer>``, as in the library's ``extract_answer`` and its own
evaluation; a completion without these tags is scored whole, trimmed. The prompt is the question alone: ``[data]`` may
add a system prompt that asks for the tags.

Some tasks draw from global generators or iterate over sets, so that a seed gives other problems in another process.
Here the generators are seeded for each problem, and worker processes, which run both checks and environments, have a
fixed hash seed, so that all tasks are reproducible. Tasks are checked in a worker process before training.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import random
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from retrain.environments.arguments import did_you_mean, imported, refuse_unknown, validated
from retrain.environments.protocol import Observation, Range, Step
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import DataError, UsageError, printable
from retrain.plugins import described
from retrain.rewards.base import failed
from retrain.rewards.workers import WorkerLimits, WorkerPool
from retrain.types import Action, Problem, RewardResult

OWNER = "environment reasoning-gym"
OURS = ("seed", "size")  # Keys of a data set's config that the environment sets
CHECK_SECONDS = 120.0  # Time limit for the check of one task before training
INSTANCES = 8  # Problems of each task that a check generates, in both orders
FULL = 1 - 1e-6  # Minimum score that a task must give to its reference answer
LOW = 0.5  # Score that a nonsense answer must stay below
NONSENSE = ("zzz", "", "zzz " * 2000)


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


def check() -> list[DataSetCheck]:
    """Check all data sets with their default config. Raises MissingExtra without reasoning-gym."""
    return check_tasks([Task(name, 0, 100, {}) for name in data_sets()], 60.0)


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


class DataSet(Protocol):
    def __getitem__(self, index: int) -> object: ...

    def score_answer(self, answer: str, entry: Mapping[str, object]) -> float: ...


@dataclass(frozen=True)
class Task:
    name: str
    seed: int
    size: int
    config: Mapping[str, object]

    def dataset(self) -> DataSet:
        with OwnRandomness(f"{self.name}/{self.seed}"):
            gym = imported("reasoning_gym", OWNER)
            return gym.create_dataset(self.name, seed=self.seed, size=self.size, **self.config)

    def entry(self, dataset: DataSet, index: int) -> dict[str, object]:
        with OwnRandomness(f"{self.name}/{self.seed}/{index}"):
            return _plain(dataset[index])


def carried(entry: Mapping[str, object]) -> str:
    """Return the entry as text that preserves tuples, sets and numeric keys, which JSON does not. Raises ValueError if
    it contains other objects."""
    text = repr(entry)
    with contextlib.suppress(ValueError, SyntaxError):
        if entry_of(text) == entry:
            return text
    raise ValueError("it holds values that are not plain numbers, texts and tables of them")


def entry_of(text: str) -> dict[str, object]:
    """Return the entry that ``carried`` wrote. Raises ValueError or SyntaxError for other texts."""
    return ast.literal_eval(text)


def score(dataset: DataSet, answer: str, entry: Mapping[str, object]) -> float:
    """Return the task's score of an answer. Raises the scorer's exceptions, and ValueError outside [0, 1]."""
    with OwnRandomness("score"):
        value = float(dataset.score_answer(answer, entry))
    if not 0 <= value <= 1:  # NaN too
        raise ValueError(f"the scorer gave {value:g}, not a score within [0, 1]")
    return value


def fault_of(task: Task) -> str:
    """Return the reason why the task must not be trained on, or "". Generating its first problems must not raise and
    must give the same problems in any order; their reference answers must score 1, nonsense answers below ``LOW``."""
    try:
        dataset, again = task.dataset(), task.dataset()
        numbers = range(min(INSTANCES, task.size))
        entries = [task.entry(dataset, number) for number in numbers]
        backwards = [task.entry(again, number) for number in reversed(numbers)]
    except Exception as error:
        return f"its problems cannot be made: {described(error)}"
    answers: list[str] = []
    for entry in entries:
        question, answer = entry.get("question"), entry.get("answer")
        if not isinstance(question, str) or not question.strip():
            return "a problem of it has no question"
        if not isinstance(answer, str):
            return "it has no reference answer to check its scorer with"
        answers.append(answer)
    if entries != backwards[::-1]:
        return "the same seed gives other problems"
    faults = (_scoring_fault(dataset, entry, answer) for entry, answer in zip(entries, answers, strict=True))
    return next(filter(None, faults), "")


def _scoring_fault(dataset: DataSet, entry: Mapping[str, object], own_answer: str) -> str:
    try:
        held = entry_of(carried(entry))
    except ValueError as error:
        return f"a problem of it cannot be kept: {error}"
    for answer in (own_answer, *NONSENSE):
        right = answer == own_answer
        description = (
            "its own answer" if right else repr(answer) if len(answer) < 9 else f"a text of {len(answer):,} letters"
        )
        try:
            value = score(dataset, answer, held)
        except Exception as error:
            return f"scoring {description} raises {described(error)}"
        if right and value < FULL:
            return f"its own answer scores {value:.3g}"
        if not right and value >= LOW:
            return f"{description} scores {value:.3g}"
    return ""


def _plain(value: Any) -> Any:
    """Replace numpy's numbers, fractions, enums and subclasses of built-in types by built-in types in nested data."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return (set if kind is frozenset else kind)(_plain(item) for item in value)
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Fraction | Decimal):
        return float(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return next((kind(value) for kind in (str, float) if isinstance(value, kind)), value)


def serve() -> Callable[[Task], str]:
    imported("reasoning_gym", OWNER)
    return lambda task: printable(fault_of(task))


class DataSetCheck(NamedTuple):
    """Result of checking a data set. ``reason``: why it must not be trained on, or ""; ``seconds``: duration."""

    name: str
    reason: str
    seconds: float


def check_tasks(tasks: Iterable[Task], seconds: float) -> list[DataSetCheck]:
    """Check tasks in a worker process. A task that takes longer than ``seconds`` or ends the process fails the
    check."""
    limits = WorkerLimits(seconds, resource.getrlimit(resource.RLIMIT_DATA)[0])
    checks = []
    with contextlib.closing(
        WorkerPool(f"{__name__}:serve", {}, workers=1, limits=limits, subject="the data set")
    ) as pool:
        for task in tasks:
            begin = time.monotonic()
            (reply,) = pool.map([task])
            late = f"it takes longer than {seconds:g} s" if reply.kind == "timeout" else None
            checks.append(DataSetCheck(task.name, late or reply.error or reply.value, time.monotonic() - begin))
    return checks
