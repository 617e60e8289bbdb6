r"""``match`` and ``format``: rewards by text alone, in the trainer's own process.

They look at the last ``\boxed{…}`` with the functions of ``extract``, which are linear in the text, so that they
need neither a worker nor a time limit.
"""

from __future__ import annotations

from retrain.rewards.base import Reward
from retrain.rewards.extract import has_box, last_boxed, last_line, last_number, normalise, plain_number
from retrain.types import Problem, RewardResult


def answer_text(completion: str, reference: str) -> str | None:
    r"""What a completion answers: its last ``\boxed{…}``, else its last number or line.

    Without any box, the last number counts when the reference is a number, the last line when it is not. A box
    that is never closed is no answer (None), nor is an empty one ("").
    """
    if has_box(completion):
        return last_boxed(completion)
    if plain_number(normalise(reference)) is not None:
        return last_number(completion)
    return last_line(completion)


def same_text(answer: str | None, reference: str) -> bool:
    """Equality after ``normalise``; nothing equals an empty reference, and an empty answer equals nothing."""
    if answer is None or len(answer) > 4 * len(reference) + 1000:  # what goes in normalising is never that long
        return False
    given = normalise(answer)
    return bool(given) and given == normalise(reference)


def has_answer_format(completion: str) -> bool:
    r"""Whether the last ``\boxed{…}`` is closed and not blank."""
    return bool((last_boxed(completion) or "").strip())


class MatchReward(Reward):
    """1 when the answer's text equals the reference after normalisation (42.0 = 42, $1,450 = 1450), else 0."""

    name = "match"

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        """Total 0 or 1, ``correct`` and ``format_ok`` set; linear in the completion's length."""
        correct = same_text(answer_text(completion, problem.answer), problem.answer)
        return RewardResult(float(correct), correct=correct, format_ok=has_answer_format(completion))


class FormatReward(Reward):
    r"""1 when the completion ends its answer in a closed ``\boxed{…}`` with something in it, else 0.

    It says nothing of correctness (``correct`` stays None) and is meant as one of several components.
    """

    name = "format"

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        """Total 0 or 1 and ``format_ok``; linear in the completion's length."""
        ok = has_answer_format(completion)
        return RewardResult(float(ok), format_ok=ok)
