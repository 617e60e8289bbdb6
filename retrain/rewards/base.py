"""What a reward is, and the grader that the trainer talks to.

A reward never ends a run: whatever it raises, returns or waits for becomes a record with ``total_reward=None``
and the reason in ``error``. Mistakes of the configuration (a missing module, key or package) are raised when the
grader is built, before anything is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrain.plugins import described
from retrain.types import CORRECT_ABOVE, Problem, RewardResult, with_correctness

Item = tuple[Problem, str]  # A problem and the text of one completion


class CompletionText(str):
    """Text of a completion that knows the tokens it was decoded from."""

    token_ids: Sequence[int]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> CompletionText:
        made = super().__new__(cls, text)
        made.token_ids = token_ids
        return made


LARGEST_REWARD = 1e30
"""A reward beyond this is a mistake; up to here its square fits in a float64, its advantage in a float32."""


class Reward:
    """Base of all rewards: override ``grade``, or ``grade_all`` where a batch is cheaper than its parts."""

    name: str = "reward"
    ranges: Mapping[str, Mapping[str, Any]] = {}
    """For charts: ``{"min", "max", "invert"}`` of the total (as ``reward``), of components and of sample metrics."""
    columns: tuple[str, ...] = ()  # Columns that the data must have

    def grade(self, problem: Problem, completion: str) -> float | RewardResult:
        """Return the reward of one completion, as a number or a RewardResult. May raise: the completion gets null."""
        raise TypeError(f"{type(self).__name__} defines neither grade nor grade_all")

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return one checked result for each item, in order."""
        return [guarded(self.grade, problem, completion) for problem, completion in items]

    def close(self) -> None:
        """Release processes and connections; grading again opens new ones."""


class Grader:
    """Grades the completions of a step with one reward; a context manager.

    ``names`` are the components that every result has, in the order in which they are configured. ``correct_above`` is
    the threshold of ``with_correctness``.
    """

    def __init__(self, reward: Reward, correct_above: float = CORRECT_ABOVE):
        self.reward, self.correct_above = reward, correct_above
        self.names: tuple[str, ...] = tuple(getattr(reward, "names", (reward.name,)))
        self.ranges = dict(reward.ranges)
        if len(self.names) == 1 and "reward" in self.ranges:  # the only component is the total
            self.ranges.setdefault(self.names[0], self.ranges["reward"])

    def grade(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order; a completion that cannot be graded has ``total_reward=None``."""
        results = self.reward.grade_all(list(items))
        for result in results:
            if not result.components:
                result.components = {self.reward.name: result.total_reward}
            if result.total_reward is None and not result.error:
                result.error = "no reward applies to this completion"
        return [with_correctness(result, self.correct_above) for result in results]

    def close(self) -> None:
        """Stop worker processes; idempotent."""
        self.reward.close()

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def failed(error: str) -> RewardResult:
    """Return the record of a completion that could not be graded, with the reason in words."""
    return RewardResult(total_reward=None, error=printable(error))


def printable(text: str) -> str:
    """Return ``text`` on one line without control characters, at most 300 characters: safe for a terminal and a log."""
    line = "".join(c if c.isprintable() else " " for c in text[:1200]).strip()
    return line if len(line) <= 300 else line[:299] + "…"


def guarded(grade: Callable[..., Any], *arguments: Any) -> RewardResult:
    """Return ``checked(grade(*arguments))``; what it raises becomes the record of a failed grading."""
    try:
        return checked(grade(*arguments))
    except Exception as error:  # a reward's fault costs one completion, never the run
        return failed(described(error))


def checked(value: Any) -> RewardResult:
    """Return what a reward returned as a RewardResult with a finite total.

    Numbers are anything with ``__float__`` that is not text (bool, numpy and torch scalars too). NaN, infinities,
    numbers beyond ±1e30, None and other types give ``total_reward=None`` with the reason. A sample metric or component
    may be None.
    """
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    if fault := _faulty_numbers(result):
        return failed(fault)
    result.tags = tuple(str(tag) for tag in result.tags)
    if result.total_reward is None and result is value:
        result.error = printable(result.error or "the reward returned no total_reward")
        return result
    total = _number(result.total_reward)
    if total is None:
        return failed(f"the reward returned {type(result.total_reward).__name__}, not a number or a RewardResult")
    if not abs(total) <= LARGEST_REWARD:
        result.total_reward, result.error = None, f"the reward returned {total:g}, not a number within ±1e30"
        return result
    result.total_reward = total
    return result


def _faulty_numbers(result: RewardResult) -> str:
    """Make sample metrics and components floats or None, and return what is wrong with one that is neither, or ""."""
    for key, words in (("sample_metrics", "sample metric"), ("components", "component")):
        given = getattr(result, key)
        if not isinstance(given, Mapping):
            return f"{key} is {type(given).__name__}, not a dict of numbers"
        numbers = {name: _number(value) for name, value in given.items()}
        if wrong := [name for name, value in numbers.items() if value is None and given[name] is not None]:
            return f"{words} {wrong[0]!r} is {type(given[wrong[0]]).__name__}, not a number"
        setattr(result, key, {str(name): value for name, value in numbers.items()})
    return ""


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, None if it is no number."""
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return None
