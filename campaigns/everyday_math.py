"""Generated sums and short stories for small instruct models: the data source of the SmolLM2 campaigns.

    [data]
    source = "everyday_math:problems"     # sums, differences, products, and stories of one step
    source = "everyday_math:two_steps"    # two of them at once, which a small model rarely gets right

The column ``kind`` is a tag. Which split a problem belongs to, ``train`` or ``test``, follows from its text alone, so
that no held-out problem is ever trained on. The lists are the same on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator

MOST = {"train": 6000, "test": 600}
"""Problems of a split; kinds that have fewer different ones end earlier."""
TRIES = 20_000
HELDOUT_SHARE = 0.1

NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kira", "Leo", "Mia", "Noah")
THINGS = (
    "apples",
    "books",
    "cards",
    "coins",
    "cookies",
    "eggs",
    "flowers",
    "marbles",
    "pencils",
    "shells",
    "stamps",
    "stickers",
)

Made = tuple[str, int]
"""A question and its answer."""


def _sum(draw: random.Random) -> Made:
    a, b = draw.randint(2, 40), draw.randint(2, 40)
    return f"What is {a} + {b}?", a + b


def _difference(draw: random.Random) -> Made:
    a, b = sorted((draw.randint(2, 40), draw.randint(2, 40)), reverse=True)
    return f"What is {a} - {b}?", a - b


def _product(draw: random.Random) -> Made:
    a, b = draw.randint(2, 12), draw.randint(2, 12)
    return f"What is {a} * {b}?", a * b


def _gain(draw: random.Random) -> Made:
    (who, giver), what, a, b = draw.sample(NAMES, 2), draw.choice(THINGS), draw.randint(3, 20), draw.randint(2, 20)
    return f"{who} has {a} {what}. {giver} gives {who} {b} more {what}. How many {what} does {who} have now?", a + b


def _loss(draw: random.Random) -> Made:
    who, what, b = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 15)
    a = b + draw.randint(2, 20)
    return f"{who} had {a} {what} and lost {b} of them. How many {what} are left?", a - b


def _boxes(draw: random.Random) -> Made:
    who, what, a, b = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 6), draw.randint(2, 10)
    return f"{who} fills {a} boxes with {b} {what} each. How many {what} is that?", a * b


def _change(draw: random.Random) -> Made:
    who, what, a, b = draw.choice(NAMES), draw.choice(THINGS), draw.randint(3, 15), draw.randint(2, 10)
    away = draw.randint(2, 5)
    return (
        f"{who} has {a} {what}, gets {b} more and gives away {away}. How many {what} does {who} have now?",
        a + b - away,
    )


def _bags(draw: random.Random) -> Made:
    who, what, a, b = draw.choice(NAMES), draw.choice(THINGS), draw.randint(2, 5), draw.randint(2, 6)
    more = draw.randint(2, 9)
    return f"{who} buys {a} bags of {b} {what} and finds {more} more. How many {what} does {who} have?", a * b + more


def _formula(draw: random.Random) -> Made:
    a, b, c = draw.randint(2, 6), draw.randint(2, 9), draw.randint(2, 12)
    return f"What is {a} * {b} + {c}?", a * b + c


KINDS: dict[str, Callable[[random.Random], Made]] = {
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "gain": _gain,
    "loss": _loss,
    "boxes": _boxes,
}
TWO_STEPS: dict[str, Callable[[random.Random], Made]] = {"change": _change, "bags": _bags, "formula": _formula}


def problems(split: str) -> list[dict[str, str]]:
    """Questions of all kinds of one step, the kinds taking turns."""
    return _listed(split, KINDS)


def two_steps(split: str) -> list[dict[str, str]]:
    """Questions of two steps, the kinds taking turns."""
    return _listed(split, TWO_STEPS)


def _listed(split: str, kinds: dict[str, Callable[[random.Random], Made]]) -> list[dict[str, str]]:
    rounds = itertools.zip_longest(*(_different(split, kind, make) for kind, make in kinds.items()))
    return [row for turn in rounds for row in turn if row is not None][: MOST[split]]


def _different(split: str, kind: str, make: Callable[[random.Random], Made]) -> Iterator[dict[str, str]]:
    draw, seen = random.Random(f"everyday math: {kind}"), set()
    for _ in range(TRIES):
        question, answer = make(draw)
        if question not in seen and split == _split_of(question):
            yield {"question": question, "answer": str(answer), "kind": kind}
        seen.add(question)


def _split_of(question: str) -> str:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "little") < HELDOUT_SHARE * 2**64 else "train"
