"""Generated tasks for small instruct models: write a Python function of one to three lines.

    [data]
    source = "small_functions:problems"
    tags_column = "level"           # easy, medium or hard

    [reward]
    type = "unit_tests"

The prompt is a function's head and docstring, as in HumanEval, and the tests are assertions. Which split a problem
belongs to, ``train`` or ``test``, follows from its docstring alone, so that no held-out problem is ever trained on. The
lists are the same on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MOST = {"train": 960, "test": 180}
"""Limit of the number of problems of a split."""
TRIES = 2000
HELDOUT_SHARE = 0.15
TESTS = 4
WORDS = ("apple", "banana", "letter", "window", "garden", "rabbit", "pepper", "coffee", "mississippi", "tomorrow")


@dataclass(frozen=True)
class Task:
    """A function to write. ``arguments`` draws the arguments of one call, and ``call`` is the reference solution."""

    head: str
    docstring: str
    arguments: Callable[[random.Random], tuple[object, ...]]
    call: Callable[..., object]


def _number(draw: random.Random) -> tuple[object, ...]:
    return (draw.randint(-20, 60),)


def _numbers(draw: random.Random) -> tuple[object, ...]:
    return ([draw.randint(-50, 150) for _ in range(draw.randint(3, 8))],)


def _word(draw: random.Random) -> tuple[object, ...]:
    return (draw.choice(WORDS),)


def _plus(draw: random.Random) -> Task:
    k = draw.randint(2, 150)
    return Task(f"add_{k}(x)", f"Return x plus {k}.", _number, lambda x: x + k)


def _scale(draw: random.Random) -> Task:
    k = draw.randint(2, 150)
    text = f"Return a list of the numbers, each multiplied by {k}."
    return Task("scale(numbers)", text, _numbers, lambda values: [value * k for value in values])


def _linear(draw: random.Random) -> Task:
    a, b = draw.randint(2, 20), draw.randint(2, 30)
    return Task("compute(x)", f"Multiply x by {a}, then add {b}, and return the result.", _number, lambda x: a * x + b)


def _power(draw: random.Random) -> Task:
    k, b = draw.randint(2, 4), draw.randint(2, 60)
    return Task("compute(x)", f"Return x to the power of {k}, plus {b}.", _number, lambda x: x**k + b)


def _count_above(draw: random.Random) -> Task:
    k = draw.randint(1, 120)
    text = f"Return how many of the numbers are greater than {k}."
    return Task("count_greater(numbers)", text, _numbers, lambda values: sum(value > k for value in values))


def _keep_below(draw: random.Random) -> Task:
    k = draw.randint(1, 120)
    text = f"Return a list of the numbers that are less than {k}."
    return Task("keep_smaller(numbers)", text, _numbers, lambda values: [value for value in values if value < k])


def _letters(draw: random.Random) -> Task:
    first, second = sorted(draw.sample("abcdegilmnoprstuw", 2))
    text = f"Return how many letters of the word are {first!r} or {second!r}."
    return Task("count_letters(word)", text, _word, lambda word: word.count(first) + word.count(second))


def _square_sum(draw: random.Random) -> Task:
    k = draw.randint(1, 120)
    text = f"Return the sum of the squares of the numbers that are greater than {k}."
    return Task("sum_squares(numbers)", text, _numbers, lambda values: sum(v * v for v in values if v > k))


def _spread(draw: random.Random) -> Task:
    k = draw.randint(2, 150)
    text = f"Return the largest of the numbers minus the smallest, times {k}."
    return Task("spread(numbers)", text, _numbers, lambda values: (max(values) - min(values)) * k)


def _between(draw: random.Random) -> Task:
    low = draw.randint(-20, 60)
    high = low + draw.randint(20, 80)
    text = f"Return a sorted list of the numbers that are at least {low} and at most {high}."
    return Task("between(numbers)", text, _numbers, lambda values: sorted(v for v in values if low <= v <= high))


def _clamp(draw: random.Random) -> Task:
    low = draw.randint(-10, 10)
    high = low + draw.randint(5, 40)
    text = f"Return x, but at least {low} and at most {high}."
    return Task("clamp(x)", text, _number, lambda x: min(high, max(low, x)))


def _swap(draw: random.Random) -> Task:
    old, new = draw.sample("aeioprstnlm", 2)
    text = f"Return the word reversed, with every {old!r} replaced by {new!r}."
    return Task("reverse_and_replace(word)", text, _word, lambda word: word[::-1].replace(old, new))


KINDS: dict[str, tuple[Callable[[random.Random], Task], ...]] = {
    "easy": (_plus, _scale),
    "medium": (_linear, _power, _count_above, _keep_below, _letters),
    "hard": (_square_sum, _spread, _between, _clamp, _swap),
}


def problems(split: str) -> list[dict[str, object]]:
    """Return the problems of a split, ordered so that kinds alternate."""
    kinds = [(level, make) for level, makes in KINDS.items() for make in makes]
    rounds = itertools.zip_longest(*(_different(split, level, make) for level, make in kinds))
    return [row for turn in rounds for row in turn if row is not None][: MOST[split]]


def _different(split: str, level: str, make: Callable[[random.Random], Task]) -> Iterator[dict[str, object]]:
    draw, seen = random.Random(f"small functions: {make.__name__}"), set[str]()
    for _ in range(TRIES):
        task = make(draw)
        if task.docstring not in seen and split == _split_of(task.docstring):
            yield _row(task, level)
        seen.add(task.docstring)


def _row(task: Task, level: str) -> dict[str, object]:
    name, draw = task.head.partition("(")[0], random.Random(task.docstring)
    calls = dict[str, object]()
    while len(calls) < TESTS or len(set(map(repr, calls.values()))) < 2:  # no constant may pass
        arguments = task.arguments(draw)
        calls[", ".join(map(repr, arguments))] = task.call(*arguments)
    return {
        "prompt": f'def {task.head}:\n    """{task.docstring}"""\n',
        "tests": [f"assert {name}({arguments}) == {value!r}" for arguments, value in calls.items()],
        "entry_point": name,
        "level": level,
    }


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") < HELDOUT_SHARE * 2**64 else "train"
