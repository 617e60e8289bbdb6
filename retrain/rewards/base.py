"""The interface of a reward, the grader that the trainer calls, and checks of what rewards return.

A reward never ends a run: whatever it raises, returns or waits for becomes a record with ``total_reward=None``
and the reason in ``error``. Mistakes of the configuration (a missing module, key or package) are raised when the
grader is built, before anything is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsFloat

from retrain.plugins import described
from retrain.types import CORRECT_ABOVE, Problem, RewardResult, with_correctness

Item = tuple[Problem, str]  # A problem and the text of one completion
AUDIT = "audit"  # Name of the audit's score among the sample metrics, and prefix of its other metrics


class CompletionText(str):
    """Text of a completion that knows the tokens it was decoded from."""

    token_ids: Sequence[int]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> CompletionText:
        made = super().__new__(cls, text)
        made.token_ids = token_ids
        return made


def prompt_text(problem: Problem) -> str:
    """Return the problem as text: the prompt itself, or the contents of its messages joined by blank lines."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt)


LARGEST_REWARD = 1e30
"""A reward beyond this is a mistake; up to here its square fits in a float64, its advantage in a float32."""


class Reward:
    """Base of all rewards: override ``grade``, or ``grade_all`` where a batch is cheaper than its parts."""

    name: str = "reward"
    names: tuple[str, ...] = ()  # Components that every result has; empty where ``name`` is the only one
    ranges: Mapping[str, Mapping[str, float | bool]] = {}
    """For charts: ``{"min", "max", "invert"}`` of the total (as ``reward``), of components and of sample metrics."""
    columns: tuple[str, ...] = ()  # Columns that the data must have

    def grade(self, problem: Problem, completion: str) -> float | RewardResult:
        """Return the reward of one completion, as a number or a RewardResult. May raise: the completion gets null."""
        raise TypeError(f"{type(self).__name__} defines neither grade nor grade_all")

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return one checked result for each item, in order."""
        return [self._guarded(*item) for item in items]

    def _guarded(self, problem: Problem, completion: str) -> RewardResult:
        try:
            return checked(self.grade(problem, completion))
        except Exception as error:  # a reward's fault costs one completion, never the run
            return failed(described(error))

    def close(self) -> None:
        """Release processes and connections; grading again opens new ones."""


class Grader:
    """Grades the completions of a step with one reward; a context manager.

    ``names`` are the components that every result has, in the order in which they are configured. ``correct_above`` is
    the threshold of ``with_correctness``.
    """

    def __init__(self, reward: Reward, correct_above: float = CORRECT_ABOVE):
        self.reward, self.correct_above = reward, correct_above
        self.names = reward.names or (reward.name,)
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


def checked(value: object) -> RewardResult:
    """Return what a reward returned as a RewardResult with a finite total.

    Numbers are anything with ``__float__`` that is not text (bool, numpy and torch scalars too). NaN, infinities,
    numbers beyond ±1e30, None and other types give ``total_reward=None`` with the reason. A sample metric or component
    may be None.
    """
    result = value if isinstance(value, RewardResult) else RewardResult(value)  # type: ignore[arg-type]
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
    for key, label in (("sample_metrics", "sample metric"), ("components", "component")):
        values = getattr(result, key)
        if not isinstance(values, Mapping):
            return f"{key} is {type(values).__name__}, not a dict of numbers"
        numbers = {name: _number(value) for name, value in values.items()}
        if wrong := [name for name, number in numbers.items() if number is None and values[name] is not None]:
            return f"{label} {wrong[0]!r} is {type(values[wrong[0]]).__name__}, not a number"
        setattr(result, key, {str(name): value for name, value in numbers.items()})
    return ""


def _number(value: object) -> float | None:
    """Return ``value`` as a float, None if it is no number."""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return None


WeightedPart = tuple[str, float, float, RewardResult]  # Name, weight, offset and result of one reward


def weighted_sum(parts: Sequence[WeightedPart]) -> RewardResult:
    """Return Σ weight · (value + offset) of parts, each a component.

    A part without a total and without an error does not apply to this completion and is left out. One that failed
    leaves no total, nor do parts of which none applies.
    """
    results = [part for *_, part in parts]
    total = _total(parts)
    total.components = {name: part.total_reward for name, _, _, part in parts}
    # The first part that grades correctness decides it, and the first that grades the format decides that.
    total.correct = _first(part.correct for part in results)
    total.format_ok = _first(part.format_ok for part in results)
    for name, _, _, part in parts:
        inner = {key: value for key, value in part.components.items() if key != name}
        _add_numbers(total, total.components, name, inner)
        _add_numbers(total, total.sample_metrics, name, part.sample_metrics)
    total.tags = tuple(dict.fromkeys(tag for part in results for tag in part.tags))
    return total


def _total(parts: Sequence[WeightedPart]) -> RewardResult:
    errors = [f"{name}: {part.error}" for name, _, _, part in parts if part.total_reward is None and part.error]
    if errors:
        return failed("; ".join(errors))
    values = [w * (part.total_reward + offset) for _, w, offset, part in parts if part.total_reward is not None]
    return checked(RewardResult(sum(values))) if values else RewardResult(None)


def _first(verdicts: Iterable[bool | None]) -> bool | None:
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _add_numbers(
    total: RewardResult, into: dict[str, float | None], part: str, numbers: Mapping[str, float | None]
) -> None:
    """Add the numbers of a part; one whose name is taken gets the name of the part in front."""
    for name, value in numbers.items():
        is_taken = name in total.sample_metrics or name in total.components
        into[f"{part}/{name}" if is_taken else name] = value
