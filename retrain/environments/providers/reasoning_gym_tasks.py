"""A child process that makes reasoning-gym's problems, and checks its tasks before anything trains on them.

Some tasks walk over sets or draw from global generators, so that the same seed gives other problems in another
process. Here Python's hash seed is 0 and the global generators are seeded for each problem, which repeats all of them;
and a task that hangs costs no more than its time limit.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any

from retrain.environments.arguments import imported
from retrain.environments.providers.randomness import OwnRandomness
from retrain.plugins import described
from retrain.rewards.base import printable

INSTANCES = 8
"""Problems of each task that a check makes, twice."""
FULL = 1 - 1e-6
"""The least that a task's own answer must score."""
LOW = 0.5
"""What nonsense must score less than."""
NONSENSE = ("zzz", "", "zzz " * 2000)
START_SECONDS = 60.0
"""How long importing reasoning-gym may take on a busy machine."""


@dataclass(frozen=True)
class Task:
    """One of reasoning-gym's data sets as it is asked for: ``size`` problems can be drawn of it with ``seed``."""

    name: str
    seed: int
    size: int
    config: Mapping[str, Any]

    def dataset(self) -> Any:
        """The library's object. Raises what it raises for a config that it does not take."""
        with OwnRandomness(f"{self.name}/{self.seed}"):
            gym = imported("reasoning_gym", "an environment of reasoning-gym")
            return gym.create_dataset(self.name, seed=self.seed, size=self.size, **self.config)

    def entry(self, dataset: Any, index: int) -> dict[str, Any]:
        """Problem number ``index``, of built-in types only."""
        with OwnRandomness(f"{self.name}/{self.seed}/{index}"):
            return _plain(dataset[index])


def carried(entry: Mapping[str, Any]) -> str:
    """The entry as text, exactly: tuples, sets and keys that are numbers survive, which JSON does not grant. Raises
    ValueError for one that holds other objects."""
    text = repr(entry)
    try:
        same = entry_of(text) == entry
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError("it holds values that are not plain numbers, texts and tables of them")
    return text


def entry_of(text: str) -> dict[str, Any]:
    """The entry that ``carried`` wrote. Raises ValueError or SyntaxError for what is none."""
    return ast.literal_eval(text)


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """The task's own score of an answer. Raises what its scorer raises, ValueError for what is not within [0, 1]."""
    with OwnRandomness("score"):
        value = float(dataset.score_answer(answer, entry))
    if not 0 <= value <= 1:  # NaN too
        raise ValueError(f"the scorer gave {value:g}, not a score within [0, 1]")
    return value


def fault_of(task: Task) -> str:
    """Why nothing should train on this task, "" when its first problems are sound: its own answer scores 1, nonsense
    scores low, nothing raises, and the same seed gives the same problems in any order."""
    try:
        dataset, again = task.dataset(), task.dataset()
        numbers = range(min(INSTANCES, task.size))
        entries = [task.entry(dataset, number) for number in numbers]
        backwards = [task.entry(again, number) for number in reversed(numbers)]
    except Exception as error:
        return f"its problems cannot be made: {described(error)}"
    for entry in entries:
        if not isinstance(entry.get("question"), str) or not entry["question"].strip():
            return "a problem of it has no question"
        if not isinstance(entry.get("answer"), str):
            return "it has no reference answer to check its scorer with"
    if entries != backwards[::-1]:
        return "the same seed gives other problems"
    return next(filter(None, (_scoring_fault(dataset, entry) for entry in entries)), "")


def _scoring_fault(dataset: Any, entry: Mapping[str, Any]) -> str:
    """What is wrong with the scores of one problem, as it is carried."""
    try:
        held = entry_of(carried(entry))
    except ValueError as error:
        return f"a problem of it cannot be kept: {error}"
    for answer in (entry["answer"], *NONSENSE):
        right = answer == entry["answer"]
        what = "its own answer" if right else repr(answer) if len(answer) < 9 else f"a text of {len(answer):,} letters"
        try:
            value = score(dataset, answer, held)
        except Exception as error:
            return f"scoring {what} raises {described(error)}"
        if right and value < FULL:
            return f"its own answer scores {value:.3g}"
        if not right and value >= LOW:
            return f"{what} scores {value:.3g}"
    return ""


def _plain(value: Any) -> Any:
    """Built-in types in place of their subclasses, fractions and numpy's numbers; other objects as they are."""
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


def serve(jobs: Connection) -> None:
    """Answer jobs: a task alone is checked, with indices its problems are made. What tasks print goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    imported("reasoning_gym", "an environment of reasoning-gym")
    jobs.send(None)
    while True:
        try:
            task, indices = jobs.recv()
        except EOFError:  # whoever asks has ended
            return
        try:
            jobs.send((_reply(task, indices), ""))
        except Exception as error:
            jobs.send((None, printable(described(error))))


def _reply(task: Task, indices: Sequence[int] | None) -> Any:
    if indices is None:
        return printable(fault_of(task))
    dataset = task.dataset()
    entries = [task.entry(dataset, index) for index in indices]
    return [(entry["question"], entry["answer"], carried(entry)) for entry in entries]


class Child:
    """The process; a context manager. One that fails or is late is killed, and the next job starts another."""

    def __init__(self) -> None:
        self._process: Any = None

    def check(self, task: Task, seconds: float) -> str:
        """Return ``fault_of`` the task; also a fault: it took longer than ``seconds``, or ended the process."""
        try:
            return self._ask(task, None, seconds)
        except (TimeoutError, EOFError, ValueError) as error:
            return str(error)

    def entries(self, task: Task, indices: Sequence[int]) -> list[tuple[str, str, str]]:
        """Return question, answer and ``carried`` entry of these problems. Raises ValueError or EOFError."""
        return self._ask(task, indices, None)

    def _ask(self, task: Task, indices: Sequence[int] | None, seconds: float | None) -> Any:
        if self._process is None:
            self._start()
        self._jobs.send((task, indices))
        value, error = self._received(seconds)
        if error:
            raise ValueError(error)
        return value

    def _start(self) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._jobs, theirs = spawning.Pipe()
        self._process = spawning.Process(target=serve, args=(theirs,), daemon=True)
        seed = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = "0"  # read by an interpreter as it starts
        try:
            self._process.start()
        finally:
            del os.environ["PYTHONHASHSEED"]
            os.environ.update({} if seed is None else {"PYTHONHASHSEED": seed})
        theirs.close()
        self._received(START_SECONDS)

    def _received(self, seconds: float | None) -> Any:
        """Return the next reply. Raises TimeoutError after ``seconds``, EOFError when the process has ended."""
        if not self._jobs.poll(seconds):
            self.close()
            raise TimeoutError(f"it takes longer than {seconds:g} s")
        try:
            return self._jobs.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            self.close()
            raise EOFError(f"its process ends (status {status})") from None

    def close(self) -> None:
        """Kill the process; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._jobs.close()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
