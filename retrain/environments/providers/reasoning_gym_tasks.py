"""Generate reasoning-gym's problems, and check its tasks in a worker process before training.

Some tasks draw from global generators or iterate over sets, so that a seed gives other problems in another process.
Here the generators are seeded for each problem, and worker processes, which run both checks and environments, have a
fixed hash seed, so that all tasks are reproducible. The check of a task that hangs ends at its time limit.
"""

from __future__ import annotations

import ast
import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from retrain.environments.arguments import imported
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import printable
from retrain.plugins import described
from retrain.rewards.workers import WorkerLimits, WorkerPool

INSTANCES = 8  # Problems of each task that a check generates, in both orders
FULL = 1 - 1e-6  # Minimum score that a task must give to its reference answer
LOW = 0.5  # Score that a nonsense answer must stay below
NONSENSE = ("zzz", "", "zzz " * 2000)


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
            gym = imported("reasoning_gym", "an environment of reasoning-gym")
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
    imported("reasoning_gym", "an environment of reasoning-gym")
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
