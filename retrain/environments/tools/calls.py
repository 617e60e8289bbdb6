"""Parse tool calls in a model's text, in the formats that open models are trained on.

- Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``
- Qwen3-Coder, Qwen3.5: ``<tool_call><function=name><parameter=x>value</parameter></function></tool_call>``; also
  without the outer tags, and with a JSON object in place of the parameters, as Llama 3.1 writes it
- Llama 3.x: ``{"name": …, "parameters": {…}}`` as the whole message, several separated by ``;``, with or without
  ``<|python_tag|>``
- Mistral: ``[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}]``, and since its tokenizer v11
  ``[TOOL_CALLS]name[ARGS]{…}`` (``[CALL_ID]`` and ``[ARGS]`` may be missing)
- a block fenced with ```` ```tool ````, with such JSON or with calls like ``name(x=1, other="text")``

Special tokens may be missing in the text. A message that consists only of JSON calls is therefore read as calls also
without ``<|python_tag|>`` and ``[TOOL_CALLS]``; JSON within an answer and JSON that is no call are not. Calls inside
``<think>…</think>`` are ignored. If the prompt opened the thought, everything before the first ``</think>`` is thought,
unless the message begins with a call. The time is linear in the length of the text, times ``MAX_CALLS``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import JsonValue

from retrain.environments.tools import PropertySchema
from retrain.types import Message

MAX_CHARACTERS = 1_000_000
MAX_CALLS = 32
MAX_PYTHON = 20_000  # Characters of a block with Python calls: deep nesting could overflow Python's parser

NO_TOOL = "tool_call"  # Tool name in the answer to a call that could not be parsed
JSON_FORM = '{"name": "tool_name", "arguments": {"argument": "value"}}'
HERMES = f"<tool_call>\n{JSON_FORM}\n</tool_call>"
XML = "<tool_call>\n<function=tool_name>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n</tool_call>"
LLAMA = JSON_FORM.replace("arguments", "parameters")
MISTRAL = f"[TOOL_CALLS] [{JSON_FORM}]"
MISTRAL_NAMED = '[TOOL_CALLS]tool_name[ARGS]{"argument": "value"}'
FENCED = f"```tool\n{JSON_FORM}\n```"

_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "</s>", "</tool_call>")
_THOUGHTS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_MARKER = re.compile(
    r"<think>|\[THINK\]|<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|^[ \t]*```tool(?:_calls?)?[ \t]*\r?$",
    re.MULTILINE,
)
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[\s;,]*")
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*\r?$", re.MULTILINE)
_KEY = re.compile(r"([^<>\n]{1,200})>")
_NAMED = re.compile(r"([\w.-]{1,200})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(\[ARGS\])?\s*")
_BARE_NAMED = re.compile(r"([A-Za-z_][\w.-]{0,199})(?=\{)")
_NEARLY = re.compile(
    r'\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"\n]{1,200}"\s*,\s*"(?:arguments|parameters)"\s*:'
    r'\s*["{\[]'
)


@dataclass(frozen=True)
class Call:
    """A tool call as written. ``arguments`` are unchecked JSON values; in the XML format they are all texts."""

    name: str
    arguments: dict[str, JsonValue]
    id: str | None = None


@dataclass(frozen=True)
class ParsedMessage:
    """Calls in a message. ``items`` has the calls in order; in place of a call that could not be parsed, it has a
    sentence that tells the model why. ``text`` is the message without calls and thoughts."""

    items: tuple[Call | str, ...]
    text: str

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(each for each in self.items if isinstance(each, Call))


def answer(call: Call | str, text: str) -> Message:
    """Return the tool message that answers ``call``, which is a text if it could not be parsed. Replaces lone
    surrogates, which tokenizers reject."""
    name, id = (call.name, call.id) if isinstance(call, Call) else (NO_TOOL, None)
    message = {"role": "tool", "name": name[:64], "content": text} | ({"tool_call_id": id[:64]} if id else {})
    return {key: value.encode("utf-8", "replace").decode() for key, value in message.items()}


def as_text(result: object) -> str:
    """Return a tool's result as text: text unchanged, "(no result)" for None, else JSON, with ``str`` where needed."""
    if isinstance(result, str):
        return result
    return "(no result)" if result is None else json.dumps(result, ensure_ascii=False, default=str)


class _MalformedCall(Exception):
    pass


def parse(text: str) -> ParsedMessage:
    if len(text) > MAX_CHARACTERS:
        return ParsedMessage((f"The message has more than {MAX_CHARACTERS:,} characters; no tool was called.",), "")
    if bare := _bare(text):
        return ParsedMessage(_bounded(bare), "")
    cursor = _Cursor(_after_thought(text))
    calls: list[Call | str] = []
    rest: list[str] = []
    while len(calls) <= MAX_CALLS and (marker := _MARKER.search(cursor.text, cursor.at)):
        rest.append(cursor.text[cursor.at : marker.start()])
        opener = marker[0].strip()
        opener = "```" if opener.startswith("```") else opener
        begin = cursor.at = marker.end()
        if opener in _THOUGHTS:
            close = cursor.text.find(_THOUGHTS[opener], begin)
            cursor.at = len(cursor.text) if close < 0 else close + len(_THOUGHTS[opener])
            continue
        try:
            calls += _READERS[opener](cursor)
        except _MalformedCall as error:
            calls.append(_fault(str(error), _form(opener, _Cursor(cursor.text, begin).skip())))
            cursor.at = _beyond_fault(opener, cursor.text, begin)
    remainder = "".join([*rest, cursor.text[cursor.at :]]).strip()
    if not calls and (calls := _bare(remainder, reports=True)):
        remainder = ""
    return ParsedMessage(_bounded(calls), remainder)


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """Return (text, calls): the text with its thoughts but without calls, and the calls with arguments converted to the
    types in the schemas ``tools``. If no call can be parsed, return the whole text and []."""
    parsed = parse(text)
    if not parsed.calls:
        return text, []
    thought, end, _ = text.partition("</think>")
    functions = [tool.get("function") or {} for tool in tools]
    schemas = {each.get("name"): (each.get("parameters") or {}).get("properties") or {} for each in functions}
    read = [Call(call.name, _typed(call.arguments, schemas.get(call.name, {}))) for call in parsed.calls]
    return "\n\n".join(part for part in (thought + end if end else "", parsed.text) if part), read


def _typed(arguments: Mapping[str, JsonValue], properties: Mapping[str, PropertySchema]) -> dict[str, JsonValue]:
    typed = dict(arguments)
    for name, value in arguments.items():
        wanted = properties.get(name) or {}
        kinds = {str(each.get("type", "string")) for each in wanted.get("anyOf") or [wanted]}
        if isinstance(value, str) and "string" not in kinds:
            with contextlib.suppress(ValueError, RecursionError):
                typed[name] = json.loads(value)
    return typed


def _bounded(calls: list[Call | str]) -> tuple[Call | str, ...]:
    if len(calls) <= MAX_CALLS:
        return tuple(calls)
    return (*calls[:MAX_CALLS], f"Only the first {MAX_CALLS} tool calls of a message are read; write fewer.")


def _fault(reason: str, form: str) -> str:
    return f"A tool call could not be read: {reason}. The right form is:\n{form}"


def _form(opener: str, after: _Cursor) -> str:
    if opener == "[TOOL_CALLS]":
        return MISTRAL if after.sees("[", "{") else MISTRAL_NAMED
    if opener == "<function=" or after.sees("<function="):
        return XML
    return {"<tool_call>": HERMES, "<|python_tag|>": LLAMA, "```": FENCED}[opener]


def _beyond_fault(opener: str, text: str, at: int) -> int:
    """Return the position after a malformed call: after its closing tag, or at the next opening tag."""
    if opener == "```":
        fence = _FENCE_END.search(text, at)
        return fence.end() if fence else len(text)
    again = -1 if opener == "<|python_tag|>" else text.find(opener, at)
    again = len(text) if again < 0 else again
    closer = {"<tool_call>": "</tool_call>", "<function=": "</function>"}.get(opener, "")
    close = text.find(closer, at, again) if closer else -1
    return again if close < 0 else close + len(closer)


def _after_thought(text: str) -> str:
    """Return the text after a thought that the prompt opened; the whole text if there is none or a call comes first."""
    if _MARKER.match(text, _Cursor(text).skip().at):
        return text
    for opener, closer in _THOUGHTS.items():
        end, begin = text.find(closer), text.find(opener)
        if end >= 0 and (begin < 0 or end < begin):
            return text[end + len(closer) :]
    return text


class _Cursor:
    """A text and the position up to which it is parsed. ``expect`` and ``json`` raise _MalformedCall."""

    def __init__(self, text: str, at: int = 0):
        self.text, self.at = text, at

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> _Cursor:
        self.match(pattern)
        return self

    def sees(self, *texts: str) -> bool:
        return self.text.startswith(texts, self.at)

    def take(self, text: str) -> bool:
        is_next = self.sees(text)
        self.at += len(text) * is_next
        return is_next

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def expect(self, closer: str, message: str) -> None:
        if not self.skip().take(closer):
            raise _MalformedCall(f"{message} is expected, not {self.glimpse()}")

    def json(self) -> JsonValue:
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            self.at = error.pos
            raise _MalformedCall(f"its JSON is broken at {self.glimpse()} ({error.msg})") from None
        except RecursionError:
            raise _MalformedCall("its JSON is nested too deeply") from None
        except ValueError as error:
            reason = str(error) if "JSON" in str(error) else "a number is too long"
            raise _MalformedCall(f"its JSON is broken: {reason}") from None
        return value

    def glimpse(self) -> str:
        return repr(self.text[self.at : self.at + 30]) if self.at < len(self.text) else "the end of the message"


def _tagged(cursor: _Cursor) -> list[Call | str]:
    if cursor.text.find("</tool_call>", cursor.at) < 0:
        raise _MalformedCall("<tool_call> is not closed with </tool_call>")
    calls: list[Call | str] = []
    while cursor.skip().take("<function="):
        calls += _function(cursor)
    calls = calls or _calls(cursor.json(), HERMES)
    cursor.expect("</tool_call>", "after the call </tool_call>")
    return calls


def _function(cursor: _Cursor) -> list[Call | str]:
    name = cursor.match(_KEY)
    if name is None:
        raise _MalformedCall("<function= is not followed by the name of a tool and >")
    arguments = _arguments(cursor.json()) if cursor.skip().sees("{") else {}
    while cursor.skip().take("<parameter="):
        key = cursor.match(_KEY)
        if key is None:
            raise _MalformedCall("<parameter= is not followed by the name of an argument and >")
        end = cursor.text.find("</parameter>", cursor.at)
        if end < 0 or cursor.text.find("\n<parameter=", cursor.at, end) >= 0:
            raise _MalformedCall(f"<parameter={key[1]}> is not closed with </parameter>")
        arguments[key[1].strip()] = cursor.text[cursor.at : end].removeprefix("\n").removesuffix("\n")
        cursor.at = end + len("</parameter>")
    cursor.expect("</function>", "<parameter=…> or </function>")
    return [Call(name[1].strip(), arguments)]


def _mistral(cursor: _Cursor) -> list[Call | str]:
    if cursor.skip().sees("[", "{"):
        return _calls(cursor.json(), MISTRAL)
    name = cursor.match(_NAMED)
    if name is None:
        raise _MalformedCall(f"[TOOL_CALLS] is followed by {cursor.glimpse()}, which is no list of calls and no name")
    return [Call(name[1], _arguments(cursor.json()), name[2])]


def _python_tag(cursor: _Cursor) -> list[Call | str]:
    body, cursor.at = cursor.text[cursor.at :], len(cursor.text)
    return [call for value in _sequence(_without_end_tokens(body)) for call in _calls(value, LLAMA)]


def _fenced(cursor: _Cursor) -> list[Call | str]:
    end = _FENCE_END.search(cursor.text, cursor.at)
    if end is None:
        raise _MalformedCall("the block ```tool is not closed with ```")
    body, cursor.at = cursor.text[cursor.at : end.start()].strip(), end.end()
    if body.startswith(("{", "[")):
        return [call for value in _sequence(body) for call in _calls(value, FENCED)]
    return _python(body)


def _python(body: str) -> list[Call | str]:
    if len(body) > MAX_PYTHON:
        raise _MalformedCall(f"the block ```tool has more than {MAX_PYTHON:,} characters; write it as JSON")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            statements = ast.parse(body).body
        calls: list[Call | str] = [_python_call(statement) for statement in statements]
    except SyntaxError as error:
        raise _MalformedCall(f"it is neither JSON nor a call ({error.msg})") from None
    except (ValueError, MemoryError, RecursionError):
        raise _MalformedCall("it is neither JSON nor a call that can be read") from None
    if not calls:
        raise _MalformedCall("the block ```tool is empty")
    return calls


def _python_call(statement: ast.stmt) -> Call:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[], keywords=keywords)):
            arguments = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
            if len(arguments) == len(keywords):
                return Call(name, {argument: _literal(name, argument, node) for argument, node in arguments.items()})
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[_, *_])):
            raise _MalformedCall(f"the arguments of {name} need their names, as in {name}(argument='value')")
    raise _MalformedCall("a line of the block is no call like tool_name(argument='value')")


def _literal(name: str, argument: str, node: ast.expr) -> JsonValue:
    try:
        return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        reason = f"the value of {argument} in {name}(…) is no plain text, number, list or dictionary"
        raise _MalformedCall(reason) from None


_READERS: dict[str, Callable[[_Cursor], list[Call | str]]] = {
    "<tool_call>": _tagged,
    "<function=": _function,
    "[TOOL_CALLS]": _mistral,
    "<|python_tag|>": _python_tag,
    "```": _fenced,
}


def _bare(text: str, reports: bool = False) -> list[Call | str]:
    """Return the calls of a text that consists only of calls, without an opening tag; [] for any other text. With
    ``reports``, return a message about the fault if a text begins like a call but is not JSON."""
    text = _without_end_tokens(text.lstrip())
    try:
        if not text.startswith(("{", "[")):
            return _named_sequence(_Cursor(text))
        values = _sequence(text)
    except _MalformedCall as error:
        form = LLAMA if '"parameters"' in text[:500] else JSON_FORM
        return [_fault(str(error), form)] if reports and _NEARLY.match(text) else []
    items = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    objects = [item for item in items if isinstance(item, dict)]
    if len(objects) < len(items) or not any(map(_looks_like_a_call, objects)):
        return []
    return [call for item in items for call in _calls(item, LLAMA)]


def _named_sequence(cursor: _Cursor) -> list[Call | str]:
    calls: list[Call | str] = []
    while cursor.at < len(cursor.text):
        name = cursor.match(_BARE_NAMED)
        if name is None:
            raise _MalformedCall("no call")
        calls.append(Call(name[1], _arguments(cursor.json())))
        cursor.skip()
    return calls


def _looks_like_a_call(item: dict[str, JsonValue]) -> bool:
    function = item.get("function")
    if item.get("type") == "function" and isinstance(function, dict):
        item = function
    given = [item[key] for key in ("arguments", "parameters") if key in item]
    known = set(item) <= {"name", "arguments", "parameters", "id", "type"}
    return known and isinstance(item.get("name"), str) and len(given) == 1 and isinstance(given[0], dict | str | list)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# strict=False accepts line breaks inside a string, which models write in code
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)


def _sequence(text: str) -> list[JsonValue]:
    values = []
    cursor = _Cursor(text).skip()
    while cursor.at < len(text):
        values.append(cursor.json())
        cursor.skip(_SEPARATOR)
    if not values:
        raise _MalformedCall("there is no JSON object with the call")
    return values


def _calls(value: JsonValue, form: str) -> list[Call | str]:
    calls: list[Call | str] = []
    for item in value if isinstance(value, list) else [value]:
        try:
            calls.append(_call(item))
        except _MalformedCall as error:
            calls.append(_fault(str(error), form))
    if not calls:
        raise _MalformedCall("the list of calls is empty")
    return calls


def _call(value: JsonValue) -> Call:
    if not isinstance(value, dict):
        raise _MalformedCall(f"it is {_kind(value)}, not a JSON object")
    id, function = value.get("id"), value.get("function")
    value = function if isinstance(function, dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _MalformedCall('it has no "name"')
    arguments = value.get("arguments", value.get("parameters"))
    return Call(name.strip(), _arguments(arguments), id if isinstance(id, str) else None)


def _arguments(value: JsonValue) -> dict[str, JsonValue]:
    """Return arguments from an object, from text that contains a JSON object, or from None. Raises _MalformedCall."""
    if isinstance(value, str) and value.strip():
        cursor = _Cursor(value).skip()
        value = cursor.json()
        if cursor.skip().at < len(cursor.text):
            raise _MalformedCall(f'after the JSON of "arguments" there is {cursor.glimpse()}')
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise _MalformedCall(f'"arguments" is {_kind(value)}, not a JSON object')
    return value


def _kind(value: JsonValue) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _without_end_tokens(text: str) -> str:
    for _ in range(4):
        text = text.rstrip()
        text = text.removesuffix(next(filter(text.endswith, _END_TOKENS), ""))
    return text.rstrip()
