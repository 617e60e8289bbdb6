"""The interface of rewards, checks of their results, the text rewards ``match`` and ``format``, and the penalty for
long answers.

A reward never ends a run: its errors, wrong results and timeouts become a record with ``total_reward=None`` and the
reason in ``error``. Mistakes of the configuration (a missing module, key or package) are raised when the
grader is built, before anything is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import SupportsFloat

from retrain.errors import printable
from retrain.plugins import described
from retrain.types import Group, Problem, RewardResult, Rollout
from retrain.util.answers import answer_text, has_answer, same_text

Item = tuple[Problem, str]  # A problem and the text of one completion
OVERLONG_PENALTY = "overlong_penalty"  # Sample metric


class CompletionText(str):
    """Text of a completion with the ids of the tokens that it was decoded from."""

    token_ids: Sequence[int]

    def __new__(cls, text: str, token_ids: Sequence[int] = ()) -> CompletionText:
        made = super().__new__(cls, text)
        made.token_ids = token_ids
        return made


def marked_answer(problem: Problem, completion: str, strict: bool = True) -> str | None:
    return answer_text(completion, problem.answer, str(problem.metadata.get("solution", "")), strict)


def prompt_text(problem: Problem) -> str:
    """Return the problem as text: the prompt itself, or the contents of its messages joined by blank lines."""
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt)


# Larger rewards count as errors: up to here, a square fits in a float64 and an advantage in a float32
LARGEST_REWARD = 1e30


class Reward:
    """Base of all rewards: override ``grade``, or ``grade_all`` if grading many completions at once is cheaper."""

    name: str = "reward"
    names: tuple[str, ...] = ()  # Components that every result has; () if ``name`` is the only component
    # Ranges for charts, ``{"min", "max", "invert"}`` by name: ``reward`` (the total), a component or a sample metric
    ranges: Mapping[str, Mapping[str, float | bool]] = {}
    columns: tuple[str, ...] = ()  # Columns that the data must have

    def grade(self, problem: Problem, completion: str) -> float | RewardResult:
        """Return the reward of one completion. If this raises, the completion's reward is null."""
        raise TypeError(f"{type(self).__name__} defines neither grade nor grade_all")

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        results = []
        for problem, completion in items:
            try:
                results.append(checked(self.grade(problem, completion)))
            except Exception as error:  # a reward's fault costs one completion, never the run
                results.append(failed(described(error)))
        return results

    def close(self) -> None:
        """Release processes and connections; grading again opens new ones."""


def failed(error: str) -> RewardResult:
    return RewardResult(total_reward=None, error=printable(error))


def checked(value: object) -> RewardResult:
    """Return the result of a reward as a RewardResult with a finite total.

    Numbers are anything with ``__float__`` that is not text (also bool, numpy and torch scalars). NaN, infinities,
    numbers beyond ±1e30, None and other types give ``total_reward=None`` with the reason in ``error``. A sample metric
    or component may be None.
    """
    result = value if isinstance(value, RewardResult) else RewardResult(value)  # type: ignore[arg-type]
    if fault := _faulty_numbers(result):
        return failed(fault)
    result.tags, result.audit_error = tuple(str(tag) for tag in result.tags), None
    result.logs = {str(name): str(text) for name, text in dict(result.logs).items()}
    result.correct, result.format_ok = (None if f is None else bool(f) for f in (result.correct, result.format_ok))
    if result.total_reward is None and result is value:
        result.error = printable(result.error or "the reward returned no total_reward")
        return result
    total = _number(result.total_reward)
    if total is None:
        return failed(f"the reward returned {type(result.total_reward).__name__}, not a number or a RewardResult")
    result.total_reward = total
    if not abs(total) <= LARGEST_REWARD:
        result.total_reward, result.error = None, f"the reward returned {total:g}, not a number within ±1e30"
    return result


def _faulty_numbers(result: RewardResult) -> str:
    """Convert sample metrics and components to floats or None in place; return the first fault, or ""."""
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
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond float's range
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return None


def weighted_sum(parts: Sequence[tuple[str, float, float, RewardResult]]) -> RewardResult:
    """Return Σ weight · (value + offset) over ``parts``, (name, weight, offset, result); each becomes a component.

    A part with neither total nor error does not apply to this completion. There is no total if a part has failed, or if
    no part applies.
    """
    results = [part for *_, part in parts]
    total = _total(parts)
    total.components = {name: part.total_reward for name, _, _, part in parts}
    # Correctness and format are each taken from the first part that grades them.
    total.correct = next((part.correct for part in results if part.correct is not None), None)
    total.format_ok = next((part.format_ok for part in results if part.format_ok is not None), None)
    for name, _, _, part in parts:
        _add_numbers(total, name, part)
    total.tags = tuple(dict.fromkeys(tag for part in results for tag in part.tags))
    total.logs = {name: text for part in results for name, text in part.logs.items()}
    return total


def _total(parts: Sequence[tuple[str, float, float, RewardResult]]) -> RewardResult:
    errors = [f"{name}: {part.error}" for name, _, _, part in parts if part.total_reward is None and part.error]
    if errors:
        return failed("; ".join(errors))
    values = [w * (part.total_reward + offset) for _, w, offset, part in parts if part.total_reward is not None]
    return checked(sum(values)) if values else RewardResult(None)


def _add_numbers(total: RewardResult, name: str, part: RewardResult) -> None:
    inner = {key: value for key, value in part.components.items() if key != name}
    for numbers, into in ((inner, total.components), (part.sample_metrics, total.sample_metrics)):
        for key, value in numbers.items():
            is_taken = key in total.sample_metrics or key in total.components
            into[f"{name}/{key}" if is_taken else key] = value


@dataclass(eq=False)
class MatchReward(Reward):
    """Grades 1 if the answer's text equals the reference after normalisation (42.0 = 42, $1,450 = 1450), else 0.

    ``strict``: only a marked answer counts (``answer_text``).
    """

    name = "match"
    strict: bool = True

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        answer = marked_answer(problem, completion, self.strict)
        correct = same_text(answer, problem.answer)
        return RewardResult(float(correct), correct=correct, format_ok=has_answer(answer))


class FormatReward(Reward):
    r"""Grades 1 if the completion marks a non-empty answer by a closed ``\boxed{…}`` (or the data set's ``####``), else
    0.

    It does not grade correctness (``correct`` stays None) and is meant as a component of a weighted reward.
    """

    name = "format"

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        ok = has_answer(marked_answer(problem, completion))
        return RewardResult(float(ok), format_ok=ok)


def overlong_penalty(tokens: int, longest: int, soft: int) -> float:
    """Return DAPO's penalty of an answer near the length limit (arXiv 2503.14476): 0 up to ``longest`` − ``soft``
    tokens, then −1 / ``soft`` per further token. It is never below −1; published code has no such bound."""
    return max(-1.0, min(0.0, (longest - soft - tokens) / soft))


def punish_overlong(groups: Sequence[Group], longest: int, soft: int) -> list[Group]:
    """Return the groups with the penalty added to every reward and recorded as a sample metric. Missing rewards stay
    missing, and correctness is decided on the reward without the penalty."""

    def punished(rollout: Rollout) -> Rollout:
        reward = rollout.reward
        if reward.total_reward is None:
            return rollout
        penalty = overlong_penalty(len(rollout), longest, soft)
        total, metrics = reward.total_reward + penalty, {**reward.sample_metrics, OVERLONG_PENALTY: penalty}
        reward = replace(reward, total_reward=total, correct=reward.is_correct, sample_metrics=metrics)
        return replace(rollout, reward=reward)

    return [replace(group, rollouts=tuple(map(punished, group.rollouts))) for group in groups]
