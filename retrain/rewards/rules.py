r"""``match`` and ``format``: rewards by text alone, in the trainer's own process.

They grade the answer that a completion marks as such: its last ``\boxed{…}``, and where the data set's own solutions
end in a line ``#### …`` (as GSM8K's do) also such a line. The functions of ``extract`` are linear in the text, so that
neither a worker nor a time limit is needed.
"""

from retrain.rewards.base import Reward
from retrain.rewards.extract import final_line, has_box, last_boxed, last_line, last_number, normalise, plain_number
from retrain.types import Problem, RewardResult


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


def has_answer_format(completion: str, problem: Problem, strict: bool = True) -> bool:
    r"""Return whether the completion has an answer that is not blank: a closed ``\boxed{…}``, or the data set's
    ``####``; not ``strict``: anything that ``answer_text`` takes for one."""
    return bool((answer_text(completion, problem, strict) or "").strip())


class MatchReward(Reward):
    """1 when the answer's text equals the reference after normalisation (42.0 = 42, $1,450 = 1450), else 0.

    ``strict`` as in ``answer_text``: only an answer that is marked as one counts.
    """

    name = "match"

    def __init__(self, strict: bool = True):
        self.strict = strict

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        correct = same_text(answer_text(completion, problem, self.strict), problem.answer)
        format_ok = has_answer_format(completion, problem, self.strict)
        return RewardResult(float(correct), correct=correct, format_ok=format_ok)


class FormatReward(Reward):
    r"""1 when the completion marks its answer by a closed ``\boxed{…}`` (or the data set's ``####``) with something in
    it, else 0.

    It does not grade correctness (``correct`` stays None) and is meant as one of several components.
    """

    name = "format"

    def grade(self, problem: Problem, completion: str) -> RewardResult:
        ok = has_answer_format(completion, problem)
        return RewardResult(float(ok), format_ok=ok)
