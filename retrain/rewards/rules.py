r"""Rewards by text alone, ``match`` and ``format``, and how answers are found in a text and compared.

The answer of a completion is the one that it marks: its last ``\boxed{…}``, and where the data set's own solutions end
in a line ``#### …`` (as GSM8K's do) also such a line.

Every function is linear in the text's length, so that neither a worker nor a time limit is needed. A completion comes
from a model under optimisation: 1 MB of braces or of ``\boxed`` must cost milliseconds, so nothing here backtracks,
recurses or turns digits into numbers.
"""

import re
from collections import deque
from dataclasses import dataclass

from retrain.rewards.base import Reward
from retrain.types import Problem, RewardResult

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace (as in \{1,2\}) does not nest
_NUMBER = re.compile(r"(?:(?<![0-9.)\]}])[-+])?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
_PLAIN_NUMBER = re.compile(r"([-+]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?)(?:\.([0-9]*))?")
_SPACING = re.compile(r"\s+|\\[,;:!> ]|~|\\q?quad(?![A-Za-z])")
_FINAL_LINE = re.compile(r"^####[ \t]*(.*)$", re.MULTILINE)
_MINUS_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-"})


def has_box(text: str) -> bool:
    r"""Return whether ``\boxed`` occurs anywhere in ``text``, closed or not."""
    return _BOX.search(text) is not None


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
    if has_box(completion):
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
