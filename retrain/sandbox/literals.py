"""Values as tagged JSON: the arguments and results that a tested program and its tests exchange as lines.

Lists, texts, booleans, None and ordinary numbers are themselves. Everything else is an object with one tag, such as
``{"tuple": [1, 2]}`` or ``{"float": "nan"}``. Subclasses become their base type. Runs inside sandboxes, so it must
import the standard library only.
"""

import math
import os
from collections.abc import Callable
from typing import Any

REQUESTS, ANSWERS = 100, 101  # descriptors of lines, as in ``inside``
DEEPEST = 200  # nested containers
PLAIN_INT = 10**15  # larger integers are written in hexadecimal, which takes linear time to read


class NotLiteral(Exception):
    """A value has no literal. The message is a noun phrase: the type X."""


def send_line(text: str) -> None:
    data = memoryview(f"{text}\n".encode())
    while data:
        data = data[os.write(ANSWERS, data) :]


def encode(value: object, depth: int = 0) -> object:
    """Return ``value`` as tagged JSON. Raises NotLiteral for types without a literal and values nested too deeply."""
    if depth > DEEPEST:
        raise NotLiteral(f"more than {DEEPEST} nested containers")
    if value is None or isinstance(value, bool):
        return value
    for kind, encoder in ENCODERS.items():
        if isinstance(value, kind):
            return encoder(value, depth + 1)
    raise NotLiteral(f"the type {type(value).__name__}")


def decode(data: Any) -> Any:
    """Return the value of tagged JSON. Raises ValueError or TypeError for anything that ``encode`` does not return."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("not one tag")
    ((tag, content),) = data.items()
    if tag not in DECODERS:
        raise ValueError(f"unknown tag {tag!r}")
    return DECODERS[tag](content)


ENCODERS: dict[type, Callable[[Any, int], object]] = {
    int: lambda value, _: int(value) if -PLAIN_INT < value < PLAIN_INT else {"int": hex(value)},
    float: lambda value, _: float(value) if math.isfinite(value) else {"float": repr(float(value))},
    str: lambda value, _: str(value),
    complex: lambda value, depth: {"complex": [encode(value.real, depth), encode(value.imag, depth)]},
    bytes: lambda value, _: {"bytes": value.hex()},
    bytearray: lambda value, _: {"bytearray": value.hex()},
    list: lambda value, depth: [encode(item, depth) for item in value],
    tuple: lambda value, depth: {"tuple": [encode(item, depth) for item in value]},
    set: lambda value, depth: {"set": [encode(item, depth) for item in value]},
    frozenset: lambda value, depth: {"frozenset": [encode(item, depth) for item in value]},
    dict: lambda value, depth: {"dict": [[encode(key, depth), encode(item, depth)] for key, item in value.items()]},
}
DECODERS: dict[str, Callable[[Any], object]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: float(str(text)),
    "complex": lambda parts: complex(*map(decode, parts)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": lambda items: {decode(key): decode(item) for key, item in items},
}
