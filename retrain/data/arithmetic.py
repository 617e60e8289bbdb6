"""Generated arithmetic problems of four difficulties, the data source named ``arithmetic``.

A problem is an expression such as ``47+38-19``, evaluated from left to right; a product can only come first, so that
this is also the order of precedence. Its tag is its level:

- ``easy``: one addition or subtraction (``147-38``)
- ``medium``: an addition and a subtraction of two-digit numbers (``47+38-19``)
- ``hard``: a one-digit times a two-digit number, then an addition and a subtraction (``7*46-58+23``)
- ``long``: three additions and subtractions in turn (``47+38-19+52``), not a default level, because tiny-reasoner
  was not trained on it

No intermediate result is negative. Whether a problem is held out depends only on its expression: no seed, count or
choice of levels can bring a held-out problem into training.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from retrain.errors import DataError
from retrain.rng import generator
from retrain.types import Problem

Split = Literal["train", "heldout"]
Operation = tuple[str, int]

DEFAULT_LEVELS = ("easy", "medium", "hard")
ARITHMETIC_LEVELS = (*DEFAULT_LEVELS, "long")
HELDOUT_EXPRESSIONS = 1 / 8
# Maximum number of problems of a level per call; slightly fewer than exist
LARGEST_COUNTS = {
    "train": {"easy": 24_000, "medium": 400_000, "hard": 400_000, "long": 400_000},
    "heldout": {"easy": 3_200, "medium": 50_000, "hard": 50_000, "long": 50_000},
}

_SIDE_KEY = b"retrain arithmetic: train or held-out"
_BLOCK = 4096
_TERM = re.compile(r"([-+*]?)(\d+)")


def split_of_expression(expression: str) -> Split:
    """Return ``heldout`` for one expression in eight, else ``train``: decided by a keyed hash of the text."""
    digest = hashlib.blake2b(expression.encode(), digest_size=8, key=_SIDE_KEY).digest()
    return "heldout" if int.from_bytes(digest, "little") < HELDOUT_EXPRESSIONS * 2**64 else "train"


def parse_expression(expression: str) -> tuple[int, list[Operation]]:
    """Return first number and operations of an expression, as ``(7, [("*", 46), ("-", 58)])`` for ``"7*46-58"``."""
    terms = _TERM.findall(expression)
    if not terms or "".join(op + number for op, number in terms) != expression or terms[0][0]:
        raise DataError(f"{expression!r} is not an arithmetic expression of this source, such as 47+38-19")
    return int(terms[0][1]), [(op, int(number)) for op, number in terms[1:]]


def apply_operation(operation: str, first: int, second: int) -> int:
    if operation == "+":
        return first + second
    return first - second if operation == "-" else first * second


def evaluate_expression(expression: str) -> int:
    value, operations = parse_expression(expression)
    for operation, number in operations:
        value = apply_operation(operation, value, number)
    return value


def arithmetic_problems(split: Split, count: int, levels: Sequence[str] | None = None, seed: int = 0) -> list[Problem]:
    """Return ``count`` different problems of one split, alternating between levels.

    A longer list with the same seed begins with the shorter one. ``levels`` None means ``DEFAULT_LEVELS``. Raises
    DataError for an unknown split or level, and when a level has too few problems.
    """
    chosen = tuple(DEFAULT_LEVELS if levels is None else dict.fromkeys(levels))
    unknown = [level for level in chosen if level not in ARITHMETIC_LEVELS]
    if unknown or not chosen:
        raise DataError(
            f"arithmetic has no level {', '.join(map(repr, unknown)) or '(empty list)'}: use {ARITHMETIC_LEVELS}"
        )
    if split not in LARGEST_COUNTS:
        raise DataError(f"arithmetic has no split {split!r}: use 'train' or 'heldout'")
    share = -(-count // len(chosen))
    for level in chosen:
        if share > LARGEST_COUNTS[split][level]:
            raise DataError(
                f"arithmetic has at most {LARGEST_COUNTS[split][level]} {split} problems of level {level!r}, "
                f"{share} were asked for: ask for fewer or add levels"
            )
    streams = [_arithmetic_stream(split, level, seed) for level in chosen]
    return [next(streams[i % len(streams)]) for i in range(count)]


def _arithmetic_stream(split: Split, level: str, seed: int) -> Iterator[Problem]:
    numbers = generator("arithmetic", split, level, seed)
    seen: set[str] = set()
    while True:
        for expression in _expressions(level, numbers):
            if expression not in seen:
                seen.add(expression)
                if split_of_expression(expression) == split:
                    name, answer = f"arithmetic/{expression}", str(evaluate_expression(expression))
                    yield Problem(name, f"{expression}=?", answer, (level,), {"expression": expression})


def _expressions(level: str, numbers: np.random.Generator) -> list[str]:
    signs = numbers.integers(0, 2, _BLOCK).tolist()
    if level == "easy":
        columns = (numbers.integers(10, 200, _BLOCK), numbers.integers(10, 100, _BLOCK))
        rows = zip(signs, *(column.tolist() for column in columns), strict=True)
        return [f"{a}-{b}" if sign else f"{a}+{b}" for sign, a, b in rows if not sign or a >= b]
    smallest = {"medium": (10, 10, 10), "hard": (12, 10, 10), "long": (10, 10, 10, 10)}[level]
    columns = [numbers.integers(least, 100, _BLOCK).tolist() for least in smallest]
    factors = numbers.integers(2, 10, _BLOCK).tolist() if level == "hard" else [1] * _BLOCK
    rows = zip(signs, factors, *columns, strict=True)
    return [expression for row in rows if (expression := _chain(*row))]


def _chain(sign: int, factor: int, first: int, *others: int) -> str:
    """Return ``factor*first-b+c`` if ``sign``, else ``factor*first+b-c``, without a factor of 1; "" if a sum is
    negative."""
    expression, value = (str(first), first) if factor == 1 else (f"{factor}*{first}", factor * first)
    for number in others:
        expression, value = f"{expression}{'-' if sign else '+'}{number}", value - number if sign else value + number
        if value < 0:
            return ""
        sign = not sign
    return expression
