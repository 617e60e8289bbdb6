"""Calls of tools in what a model wrote: ``<tool_call>{…}</tool_call>``, or that JSON in a block fenced as ``tool``."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)|```tool(?:_call)?\s*\n(.*?)```", re.DOTALL)


class Call(NamedTuple):
    """A function and its arguments as JSON text, as OpenAI's protocol has them."""

    name: str
    arguments: str


def parse(text: str) -> tuple[str, list[Call]]:
    """What is left of the text without the calls, and the calls in order. What is no JSON object with a ``name`` is no
    call and stays."""
    calls: list[Call] = []

    def take(match: re.Match[str]) -> str:
        call = _call(match[1] or match[2] or "")
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    left = _BLOCK.sub(take, text)
    return (left.strip() if calls else text), calls


def _call(block: str) -> Call | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
