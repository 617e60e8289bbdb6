"""A child process that makes reasoning-gym's problems, and checks its tasks before anything trains on them.

Some tasks walk over sets or draw from global generators, so that the same seed gives other problems in another
process. Here Python's hash seed is 0 and the global generators are seeded for each problem, which repeats all of them;
and a task that hangs costs no more than its time limit.
"""

from __future__ import annotations

import ast
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

from retrain.environments.providers.arguments import imported
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
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from retrain.environments.providers.reasoning_gym_tasks import serve; serve()"
)


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


def serve() -> None:
    """The child: a job a line on stdin, the reply a line on what was stdout; what tasks print goes nowhere."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    imported("reasoning_gym", "an environment of reasoning-gym")
    replies.write("{}\n")
    replies.flush()
    for line in sys.stdin:
        try:
            reply = _reply(json.loads(line))
        except Exception as error:
            reply = {"error": printable(described(error))}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _reply(job: Mapping[str, Any]) -> dict[str, Any]:
    task = Task(job["name"], job["seed"], job["size"], job["config"])
    if job["indices"] is None:
        return {"fault": printable(fault_of(task))}
    dataset = task.dataset()
    entries = [task.entry(dataset, index) for index in job["indices"]]
    return {"entries": [[entry["question"], entry["answer"], carried(entry)] for entry in entries]}


class Child:
    """The process; a context manager. One that fails or is late is killed, and the next job starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, task: Task, seconds: float) -> str:
        """``fault_of`` the task; also a fault: it took longer than ``seconds``, or ended the process."""
        try:
            return str(self._ask(task, None, seconds)["fault"])
        except (TimeoutError, EOFError, ValueError) as error:
            return str(error)

    def entries(self, task: Task, indices: Sequence[int]) -> list[tuple[str, str, str]]:
        """Question, answer and ``carried`` entry of these problems. Raises ValueError or EOFError with the reason."""
        return [tuple(entry) for entry in self._ask(task, indices, None)["entries"]]

    def _ask(self, task: Task, indices: Sequence[int] | None, seconds: float | None) -> dict[str, Any]:
        if self._process is None:
            self._process = self._started()
        job = {"name": task.name, "seed": task.seed, "size": task.size, "config": dict(task.config)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job | {"indices": indices and list(indices)}).encode() + b"\n")
        self._process.stdin.flush()
        reply = self._line(self._process, seconds)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": "0"},
        )
        self._process = process
        self._line(process, START_SECONDS)
        return process

    def _line(self, process: subprocess.Popen[bytes], seconds: float | None) -> dict[str, Any]:
        """The next reply. Raises TimeoutError after ``seconds``, EOFError when the process has ended."""
        assert process.stdout is not None
        deadline = None if seconds is None else time.monotonic() + seconds
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                left = None if deadline is None else deadline - time.monotonic()
                if (left is not None and left <= 0) or not selector.select(left):
                    self.close()
                    raise TimeoutError(f"it takes longer than {seconds:g} s")
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    process.wait()
                    self.close()
                    raise EOFError(f"its process ends (status {process.returncode})")
                received += part
        return json.loads(received)

    def close(self) -> None:
        """Kill the process; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
