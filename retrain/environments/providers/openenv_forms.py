"""Convert OpenEnv's observations to chat messages, and completions and tool calls to actions."""

import json
import re
from collections.abc import Mapping
from typing import NotRequired, TypedDict

from pydantic import JsonValue

from retrain.environments.tools import FunctionSchema, ParametersSchema, PropertySchema, ToolSchema
from retrain.environments.tools.calls import as_text
from retrain.errors import UsageError
from retrain.types import Message

OWNER = "environment openenv"
ROLES = ("system", "user", "assistant", "tool")
# Fields of an observation that may hold its text; the first non-empty field is used
MESSAGE_FIELDS = (
    *("messages", "prompt", "message", "text", "content"),
    *("question", "output", "result", "response", "echoed_message"),
)
CALL_FIELDS = {"type", "tool_name", "arguments"}  # Fields of an action that calls a tool (`CallToolAction`)
READERS = {"string": str, "integer": int, "number": float}


def messages_of(observation: object, field: str | None) -> list[Message]:
    """Convert an observation to chat messages; text and other values become a user message.

    ``field``: the part to convert, with dots into inner tables. None takes the first of ``MESSAGE_FIELDS``, or the
    whole observation as JSON. Raises UsageError, which lists the existing fields, if ``field`` is missing.
    """
    if field is None:
        if not isinstance(observation, Mapping):
            return _as_messages(observation)
        text = next(filter(None, (observation.get(name) for name in MESSAGE_FIELDS)), None)
        # Every observation has the field ``metadata``, which is usually empty.
        fields = {name: value for name, value in observation.items() if name != "metadata" or value}
        return _as_messages(text or fields)
    value = observation
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise UsageError(f"{OWNER}: message_field {field!r} is not in the observation, which has {there}")
        value = value[part]
    return _as_messages(value)


def _as_messages(value: object) -> list[Message]:
    if isinstance(value, list) and value:
        if all(isinstance(item, Mapping) and isinstance(item.get("content"), str) for item in value):
            if all(item.get("role") in ROLES for item in value):
                return [{"role": item["role"], "content": item["content"]} for item in value]
            value = [item["content"] for item in value]
        if all(isinstance(item, str) for item in value):
            value = "\n".join(value)
    return [{"role": "user", "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}]


class ActionSchema(TypedDict, total=False):
    properties: dict[str, PropertySchema]
    required: list[str]


class Actions:
    """Converter of completions to actions for a server whose actions have the JSON schema ``schema``.

    The action's field ``field`` gets the whole text, converted to the field's type. By default it is the only required
    field, or else the only field, if its type is text or number. Without such a field, the text must be a JSON object,
    with or without a code fence. ``constants`` are added to each action. Raises UsageError if the schema lacks
    ``field``.
    """

    def __init__(self, schema: ActionSchema, field: str | None, constants: Mapping[str, JsonValue]):
        fields = {name: spec for name, spec in schema.get("properties", {}).items() if name != "metadata"}
        self.schema: ActionSchema = {**schema, "properties": fields}
        self.constants = dict(constants)
        self._types = {name: spec.get("type") for name, spec in fields.items() if isinstance(spec, Mapping)}
        if field is not None and fields and field not in fields:
            there = ", ".join(fields)
            raise UsageError(f"{OWNER}: action_field {field!r} is not in the server's actions, which have {there}")
        self.may_be_calls = fields.keys() <= CALL_FIELDS
        self.field = field
        for names in (schema.get("required", []), fields) if field is None else ():
            unset = [name for name in names if name not in self.constants]
            if len(unset) == 1 and self._types.get(unset[0]) in READERS:
                self.field = unset[0]
                break

    @property
    def instruction(self) -> str:
        if self.field is not None:
            return ""
        return "Answer with exactly one JSON object of this schema:\n" + json.dumps(self.schema, ensure_ascii=False)

    def read(self, text: str) -> dict[str, JsonValue]:
        """Return the action in a completion. Raises ValueError, with a message for the policy, if there is none."""
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
        numbers = re.findall(r"-?\d+" if reader is int else r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", cleaned)
        if not numbers or len(numbers[-1]) > 18:
            raise ValueError("There is no number in that.")
        return {self.field: reader(numbers[-1])} | self.constants


class McpTool(TypedDict):
    """Description of a tool in the reply to ``tools/list``; servers spell the key of the schema in two ways."""

    name: str
    description: NotRequired[str]
    inputSchema: NotRequired[ParametersSchema]
    input_schema: NotRequired[ParametersSchema]


def tool_schema(tool: McpTool) -> ToolSchema:
    parameters = tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}}
    function: FunctionSchema = {
        "name": tool["name"], "description": tool.get("description") or "", "parameters": parameters,
    }  # fmt: skip
    return {"type": "function", "function": function}


def result_of(observation: object) -> tuple[str, bool]:
    if not isinstance(observation, Mapping):
        return as_text(observation), False
    if error := observation.get("error"):
        return f"Error: {error.get('message') if isinstance(error, Mapping) else error}", True
    result = observation.get("result")
    if not isinstance(result, Mapping):
        return as_text(result), False
    parts = result.get("content")
    parts = parts if isinstance(parts, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    text = "\n".join(texts) if texts else as_text(result.get("data", result))
    failed = bool(result.get("is_error") or result.get("isError"))
    return (f"Error: {text}" if failed else text), failed
