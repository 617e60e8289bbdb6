"""Between OpenEnv's dictionaries and a chat: observations as messages, the policy's text as an action."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.types import Message

ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = (
    "messages",
    "prompt",
    "message",
    "text",
    "content",
    "question",
    "output",
    "result",
    "response",
    "echoed_message",
)
"""Fields of an observation that are read as what it says, the first that is there and not empty."""
READERS = {"string": str, "integer": int, "number": float}
"""Types of a field that a whole text can be, with what makes the value of it."""


def messages_of(observation: Any, field: str | None) -> list[Message]:
    """What an observation says, as chat messages; text and other values are the user's.

    ``field``: which part, with dots into inner tables; None takes the first of ``MESSAGE_FIELDS``, and all of it as
    JSON where there is none. Raises KeyError, with the fields there are, where ``field`` is not.
    """
    if field is None:
        return _said(next(filter(None, _candidates(observation)), _without_metadata(observation)))
    value = observation
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise KeyError(f"message_field {field!r} is not in the observation, which has {there}")
        value = value[part]
    return _said(value)


def _without_metadata(observation: Any) -> Any:
    """The observation without its ``metadata`` where these are empty: every one has the field."""
    if isinstance(observation, Mapping) and not observation.get("metadata", True):
        return {name: value for name, value in observation.items() if name != "metadata"}
    return observation


def _candidates(observation: Any) -> list[Any]:
    return [observation.get(name) for name in MESSAGE_FIELDS] if isinstance(observation, Mapping) else []


def _said(value: Any) -> list[Message]:
    """Chat messages as they are; a list of tables with other roles as their contents; the rest as text."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        if all(_is_message(item) for item in value):
            return [{"role": item["role"], "content": item["content"]} for item in value]
        if all(isinstance(item, Mapping) and isinstance(item.get("content"), str) for item in value):
            return [{"role": "user", "content": "\n".join(item["content"] for item in value)}]
        if all(isinstance(item, str) for item in value):
            return [{"role": "user", "content": "\n".join(value)}]
    return [{"role": "user", "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}]


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("role") in ROLES and isinstance(item.get("content"), str)


class Actions:
    """Makes actions of texts, for a server whose actions have this JSON schema.

    ``field``: the part that is the whole text, as the schema's type; by default the only field that is required, or
    the only one, where a text can be it. Else the text is a JSON object, within a code fence or not. ``constants``
    are added to each action. Raises KeyError for a field that the schema has not.
    """

    def __init__(self, schema: Mapping[str, Any], field: str | None, constants: Mapping[str, Any]):
        self.schema, self.constants = schema, dict(constants)
        fields = {name: spec for name, spec in schema.get("properties", {}).items() if name != "metadata"}
        self._types = {name: spec.get("type") for name, spec in fields.items() if isinstance(spec, Mapping)}
        if field is not None and fields and field not in fields:
            raise KeyError(f"action_field {field!r} is not in the server's actions, which have {', '.join(fields)}")
        self.field = field if field is not None else self._only_field(list(fields), schema.get("required", []))

    def _only_field(self, fields: Sequence[str], required: Sequence[str]) -> str | None:
        for names in (required, fields):
            left = [name for name in names if name not in self.constants]
            if len(left) == 1 and self._types.get(left[0]) in READERS:
                return left[0]
        return None

    @property
    def instruction(self) -> str:
        """What the policy must be told of the form of its actions; "" where any text is one. The schema is told whole,
        with the definitions that it refers to; only ``metadata``, which is the client's, is left out."""
        if self.field is not None:
            return ""
        fields = {name: spec for name, spec in self.schema.get("properties", {}).items() if name != "metadata"}
        shown = {**self.schema, "properties": fields}
        return "Answer with exactly one JSON object of this schema:\n" + json.dumps(shown, ensure_ascii=False)

    def read(self, text: str) -> dict[str, Any]:
        """The action that a text is. Raises ValueError, in words for the policy, for a text that is none."""
        cleaned = text.strip()
        if self.field is None:
            fenced = re.fullmatch(r"```\w*\n(.*)\n```", cleaned, re.DOTALL)
            try:
                action = json.loads(fenced[1] if fenced else cleaned)
            except (ValueError, RecursionError):
                action = None
            if not isinstance(action, dict):
                raise ValueError("That is not one JSON object.")
            return action | self.constants
        reader = READERS.get(str(self._types.get(self.field)), str)
        if reader is str:
            return {self.field: cleaned} | self.constants
        found = re.findall(r"-?\d+" if reader is int else r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", cleaned)
        if not found or len(found[-1]) > 18:
            raise ValueError("There is no number in that.")
        return {self.field: reader(found[-1])} | self.constants
