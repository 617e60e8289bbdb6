r"""The interface of a reward, checks of what rewards return, and the rewards by text alone, ``match`` and ``format``.

A reward never ends a run: whatever it raises, returns or waits for becomes a record with ``total_reward=None``
and the reason in ``error``. Mistakes of the configuration (a missing module, key or package) are raised when the
grader is built, before anything is sampled.

The answer of a completion is the one that it marks: its last ``\boxed{…}``, and where the data set's own solutions end
in a line ``#### …`` (as GSM8K's do) also such a line. Every function of the text is linear in its length, so that
neither a worker nor a time limit is needed. A completion comes from a model under optimisation: 1 MB of braces or of
``\boxed`` must cost milliseconds, so nothing here backtracks, recurses or turns digits into numbers.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

from retrain.plugins import described
from retrain.types import Problem, RewardResult

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
    result.tags, result.audit_error = tuple(str(tag) for tag in result.tags), None
    result.correct, result.format_ok = _flag(result.correct), _flag(result.format_ok)
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


def _flag(value: object) -> bool | None:
    return None if value is None else bool(value)


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


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace (as in \{1,2\}) does not nest
_NUMBER = re.compile(r"(?:(?<![0-9.)\]}])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_PLAIN_NUMBER = re.compile(r"([-+]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?)(?:\.([0-9]*))?")
_SPACING = re.compile(r"\s+|\\[,;:!> ]|~|\\q?quad(?![A-Za-z])")
_FINAL_LINE = re.compile(r"^####[ \t]*(.*)$", re.MULTILINE)
_MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{…}`` (or ``\fbox{…}``), braces balanced; "" for an empty box.

    The last box decides alone: None when there is none or when it is never closed (a truncated completion has
    no answer, even if it had boxed an earlier one). ``\boxed 5``, as some reference solutions write, gives "5".
    """
    boxes = deque(_BOX.finditer(text), maxlen=1)
    if not boxes:
        return None
    start = boxes[0].end()
    while start < len(text) and text[start].isspace():
        start += 1
    if start >= len(text):
        return None
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0].rstrip(".,")
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            depth += 1
        elif brace.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : brace.start()]
    return None


def final_line(text: str) -> str | None:
    """Return what the last line ``#### …`` holds, GSM8K's way of marking an answer; None without such a line."""
    lines = deque(_FINAL_LINE.finditer(text), maxlen=1)
    return lines[0].group(1).strip() if lines else None


def last_number(text: str) -> str | None:
    """Return the last number written in digits, with its sign, thousands commas and decimals; None without one."""
    numbers = deque(_NUMBER.finditer(text), maxlen=1)
    return numbers[0].group() if numbers else None


def last_line(text: str) -> str:
    """Return the last line that is not blank, stripped; "" without one."""
    return text.rstrip().rpartition("\n")[2].strip()


def reference_answer(text: str) -> str:
    r"""Return the answer that a data set's answer column holds.

    GSM8K writes a solution that ends in a line ``#### 1,234`` (→ "1234": commas between digits go), MATH one
    that contains ``\boxed{…}`` (→ its contents); anything else is the answer itself, stripped.
    """
    answer = final_line(text)
    if answer is not None:
        return answer.replace(",", "") if plain_number(answer) is not None else answer
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed.strip()


def plain_number(text: str) -> str | None:
    """Return the canonical spelling of a decimal number, or None: "+1,234.50" → "1234.5", "-0" → "0", ".5" → "0.5"."""
    number = _PLAIN_NUMBER.fullmatch(text.strip().translate(_MINUS_SIGNS))
    if number is None:
        return None
    sign, whole, fraction = number[1], number[2], number[3] or ""
    if not whole and not fraction:
        return None
    whole = whole.replace(",", "").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    digits = f"{whole}.{fraction}" if fraction else whole
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def normalise(answer: str) -> str:
    r"""Return one spelling for answers that differ only in notation.

    Removed: spaces and LaTeX spacing, ``$`` and ``\$``, one final period, ``\left``/``\right``; ``\dfrac`` becomes
    ``\frac``, a number its ``plain_number``. Letter case, units and commas between elements stay.
    """
    text = answer.translate(_MINUS_SIGNS)
    text = _SPACING.sub("", text.replace("\\$", "").replace("$", "").replace("{,}", ","))
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = text.removesuffix(".")
    number = plain_number(text)
    return text if number is None else number


def answer_text(completion: str, problem: Problem, strict: bool = True) -> str | None:
    r"""Return what a completion answers: its last ``\boxed{…}``, else its last line ``#### …`` where the problem's own
    solution has one; None without either.

    A box that is never closed is no answer (None), nor is an empty one (""). Not ``strict``: where nothing is marked,
    the last number counts if the reference is a number, the last line if it is not.
    """
    if _BOX.search(completion):
        return last_boxed(completion)
    by_final_line = final_line(str(problem.metadata.get("solution", ""))) is not None
    marked = final_line(completion) if by_final_line else None
    if strict or marked is not None:
        return marked
    if plain_number(normalise(problem.answer)) is not None:
        return last_number(completion)
    return last_line(completion)


def same_text(answer: str | None, reference: str) -> bool:
    """Return whether both are equal after ``normalise``; an empty text equals nothing."""
    if answer is None or len(answer) > 4 * len(reference) + 1000:  # normalising removes less than that
        return False
    given = normalise(answer)
    return bool(given) and given == normalise(reference)


def has_answer(answer: str | None) -> bool:
    """Return whether an ``answer_text`` is there and not blank."""
    return bool((answer or "").strip())


@dataclass(eq=False)
class MatchReward(Reward):
    """1 when the answer's text equals the reference after normalisation (42.0 = 42, $1,450 = 1450), else 0.

    ``strict`` as in ``answer_text``: only an answer that is marked as one counts.
    """

    name = "match"
    strict: bool = True

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        answer = answer_text(completion, problem, self.strict)
        correct = same_text(answer, problem.answer)
        return RewardResult(float(correct), correct=correct, format_ok=has_answer(answer))


class FormatReward(Reward):
    r"""1 when the completion marks its answer by a closed ``\boxed{…}`` (or the data set's ``####``) with something in
    it, else 0.

    It does not grade correctness (``correct`` stays None) and is meant as one of several components.
    """

    name = "format"

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        ok = has_answer(answer_text(completion, problem))
        return RewardResult(float(ok), format_ok=ok)
