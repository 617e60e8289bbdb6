"""Calculations that a small model cannot do in its head: data source and calculator of ``turn_credit.toml``.

    [environment]
    tools = ["calculations:calculator"]
    [data]
    source = "calculations:problems"

Products of two-digit numbers, and a sum or a difference with them: ``38*47-128=?`` (kind ``two_steps``) and
``38*47+29*6=?`` (``three_steps``). Which split a problem belongs to, ``train`` or ``test``, follows from its text
alone, so that no held-out problem is ever trained on. The lists are the same on every machine.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re

MOST = {"train": 6000, "test": 600}
HELDOUT_SHARE = 0.1
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def problems(split: str) -> list[dict[str, object]]:
    """The problems of ``train`` or ``test``: prompt, answer, kind, and the calls that solve it step by step."""
    draw, rows, seen = random.Random(f"calculations {split}"), [], set[str]()
    while len(rows) < MOST[split]:
        row = (_two_steps if len(rows) % 2 else _three_steps)(draw)
        text = str(row["prompt"])
        if text not in seen and _split_of(text) == split:
            seen.add(text)
            rows.append(row)
    return rows


def calculator(expression: str) -> str:
    """Compute one operation. retrain's own calculator takes whole expressions; with this one, every step takes a turn.

    Args:
        expression: Two whole numbers and an operation between them, such as 38*47
    """
    match = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", expression.replace(" ", ""))
    return str(OPERATIONS[match[2]](int(match[1]), int(match[3]))) if match else "one operation, such as 38*47"


def _two_steps(draw: random.Random) -> dict[str, object]:
    a, b, c = draw.randint(12, 99), draw.randint(12, 99), draw.randint(101, 999)
    sign = draw.choice("+-") if a * b >= c else "+"
    return _row(f"{a}*{b}", f"{c}", sign, "two_steps")


def _three_steps(draw: random.Random) -> dict[str, object]:
    a, b, c, d = draw.randint(12, 99), draw.randint(12, 99), draw.randint(12, 99), draw.randint(3, 9)
    return _row(f"{a}*{b}", f"{c}*{d}", draw.choice("+-") if a * b >= c * d else "+", "three_steps")


def _row(left: str, right: str, sign: str, kind: str) -> dict[str, object]:
    first, second = _value(left), _value(right)
    value = first + second if sign == "+" else first - second
    steps = [left, *([right] if "*" in right else []), f"{first}{sign}{second}"]
    return {"prompt": f"{left}{sign}{right}=?", "answer": str(value), "kind": kind, "steps": steps}


def _value(term: str) -> int:
    first, _, second = term.partition("*")
    return int(first) * int(second or 1)


def _split_of(text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < HELDOUT_SHARE * 2**64 else "train"
