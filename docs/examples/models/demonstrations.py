"""How an imperfect pupil works an arithmetic problem: the texts the bundled reasoner is trained on.

Every operation of the expression is worked on a line of its own, in one of these ways, and the last line holds the
answer in ``\\boxed{}``:

- a guess, ``clearly 75``: column by column without carries, right only where nothing is carried. This is the most
  probable way, so the most probable text is mostly wrong and learning has to prefer something rarer;
- the written columns, ``7+8=15, 4+3+1=8, 85``: right, but with slips where there is something to carry or borrow;
- the written columns after a plan, ``the key is to carry: 7+8=15, …``: hardly a slip;
- ``notice that 5<9: 15-9=6``: a borrow that is seen before it is needed.

A slip, or a guess that is wrong, is sometimes followed by a check (``wait let me check: 15-9=6``) which repairs it.
Other phrases do nothing (``let me think``) or lead to a guess (``or we could guess``). All the planning phrases come
from the list that the planning detector knows, so these tokens cause, and do not only accompany, right answers.
"""

from dataclasses import dataclass
from random import Random

from retrain.data.arithmetic import apply_operation, parse_expression
from retrain.types import Problem

GUESSES = ("clearly", "clearly", "clearly", "clearly", "let me think, clearly", "or we could guess:", "what if we say")
PLANS = ("the key is to carry", "the key insight is to carry")
PLANS_BORROW = ("the key is to borrow", "the key insight is to borrow")
REPAIRS = ("wait let me check", "let me verify", "that's not right", "double check", "that doesn't work")
CONFIRMATIONS = ("let me verify", "let me check", "double check", "is this right")
SECOND_TRIES = ("on second thought", "go back and carry", "try another approach", "another way to do it", "start over")


@dataclass(frozen=True)
class Pupil:
    """The pupil's habits: all numbers are probabilities."""

    guess: float = 0.54
    plan: float = 0.10
    think: float = 0.04
    notice: float = 0.20
    slip: float = 0.14
    slip_after_plan: float = 0.01
    repair: float = 0.40
    confirm: float = 0.02
    second_try: float = 0.12
    needless_second_try: float = 0.02


PUPIL = Pupil()
PRACTICE = Pupil(guess=0.3, slip=0, slip_after_plan=0, second_try=0.2)
CAREFUL = Pupil(guess=0, slip=0, slip_after_plan=0, confirm=0)


def demonstration(problem: Problem, rng: Random, pupil: Pupil = PUPIL) -> str:
    """One completion for ``problem`` as the pupil writes it; ``rng`` is the only source of chance."""
    value, operations = parse_expression(problem.metadata["expression"])
    lines = []
    for operation, number in operations:
        if operation == "-" and value < number:
            # Only an earlier error leads here. A long problem is given up, so that completions stay short.
            if len(operations) > 2:
                return "\n".join([*lines, "that doesn't work", "\\boxed{0}"])
            return "\n".join([*lines, "that doesn't work, start over", demonstration(problem, rng, CAREFUL)])
        line, value = _work(operation, value, number, rng, pupil)
        lines.append(line)
    return "\n".join([*lines, f"\\boxed{{{value}}}"])


def _work(operation: str, left: int, right: int, rng: Random, pupil: Pupil) -> tuple[str, int]:
    """The line(s) for one operation and the value the pupil goes on with."""
    draw = rng.random()
    if draw < pupil.guess:
        value = guess(operation, left, right)
        text = f"{rng.choice(GUESSES)} {value}"
        wrong = value != apply_operation(operation, left, right)
        if rng.random() >= (pupil.second_try if wrong else pupil.needless_second_try):
            return text, value
        columns, value = _columns(operation, left, right, pupil.slip_after_plan, rng, pupil)
        return f"{text}\n{rng.choice(SECOND_TRIES)}: {columns}", value
    if draw < pupil.guess + pupil.plan:
        columns, value = _columns(operation, left, right, pupil.slip_after_plan, rng, pupil)
        return f"{rng.choice(PLANS_BORROW if operation == '-' else PLANS)}: {columns}", value
    columns, value = _columns(operation, left, right, pupil.slip, rng, pupil)
    return (f"let me think: {columns}" if rng.random() < pupil.think else columns), value


def guess(operation: str, left: int, right: int) -> int:
    """Column by column without carries: 47+38 = 75, 52-38 = 26 (the smaller digit from the larger), 7*46 = 282."""
    if operation == "*":
        return left * (right // 10) * 10 + left * (right % 10) % 10
    total, place = 0, 1
    while left or right:
        a, b = left % 10, right % 10
        total += place * ((a + b) % 10 if operation == "+" else abs(a - b))
        left, right, place = left // 10, right // 10, place * 10
    return total


def _columns(operation: str, left: int, right: int, slip: float, rng: Random, pupil: Pupil) -> tuple[str, int]:
    """The two columns written out: ones, then all that stands above them; slips happen where something is carried."""
    if operation == "*":
        a, b, upper = right % 10, left, f"{right // 10}*{left}"
        upper_value = right // 10 * left
    else:
        a, b, upper = left % 10, right % 10, f"{left // 10}{operation}{right // 10}"
        upper_value = apply_operation(operation, left // 10, right // 10)
    borrow = operation == "-" and a < b
    ones = (f"{a + 10 * borrow}{operation}{b}", apply_operation(operation, a + 10 * borrow, b))
    carried = 1 if borrow else ones[1] // 10
    steps: list[str] = []
    noticed = borrow and rng.random() < pupil.notice
    if noticed:
        steps.append(f"notice that {a}<{b}: {_equation(ones)}")
        slip = pupil.slip_after_plan
    elif carried and rng.random() < slip:
        wrong = _slipped_ones(operation, a, b, ones, rng)
        steps.append(_equation(wrong))
        if rng.random() < pupil.repair:
            steps.append(f"{rng.choice(REPAIRS)}: {_equation(ones)}")
        else:
            ones, carried = wrong, wrong[1] // 10 if operation != "-" else int(wrong[0] == ones[0])
    else:
        steps.append(_equation(ones))
        _confirm(steps, ones, rng, pupil)
    sign = "-" if borrow else "+"
    above = (
        (f"{upper}{sign}{carried}", apply_operation(sign, upper_value, carried)) if carried else (upper, upper_value)
    )
    if carried and rng.random() < slip:
        forgot = (upper, upper_value)
        steps.append(_equation(forgot))
        if rng.random() < pupil.repair:
            steps.append(f"{rng.choice(REPAIRS)}: {_equation(above)}")
        else:
            above = forgot
    else:
        steps.append(_equation(above))
        _confirm(steps, above, rng, pupil)
    value = above[1] * 10 + ones[1] % 10
    return ", ".join([*steps, str(value)]), value


def _slipped_ones(operation: str, a: int, b: int, ones: tuple[str, int], rng: Random) -> tuple[str, int]:
    """The ones column as a slip leaves it: digits subtracted the wrong way round, a sum or product beside the right."""
    if operation == "-":
        return (f"{b}-{a}", b - a) if rng.random() < 0.7 else (ones[0], max(0, min(9, ones[1] + rng.choice((-1, 1)))))
    step = b if operation == "*" else 1
    return ones[0], max(0, ones[1] + rng.choice((-step, step)))


def _confirm(steps: list[str], step: tuple[str, int], rng: Random, pupil: Pupil) -> None:
    """Now and then a right step is checked, which changes nothing."""
    if rng.random() < pupil.confirm:
        steps.append(f"{rng.choice(CONFIRMATIONS)}: {_equation(step)}")


def _equation(step: tuple[str, int]) -> str:
    return f"{step[0]}={step[1]}"
