"""Tool calls in what a model writes, in the formats that open models are trained on.

- Hermes, Qwen2.5 and Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``
- Qwen3-Coder, Qwen3.5: ``<tool_call><function=name><parameter=x>value</parameter></function></tool_call>``; also
  without the outer tags, and with a JSON object in place of the parameters, as Llama 3.1 writes it
- Llama 3.x: ``{"name": …, "parameters": {…}}`` as the whole message, several separated by ``;``, with or without
  ``<|python_tag|>``
- Mistral: ``[TOOL_CALLS] [{"name": …, "arguments": {…}, "id": …}]``, and since its tokenizer v11
  ``[TOOL_CALLS]name[ARGS]{…}`` (``[CALL_ID]`` and ``[ARGS]`` may be missing)
- a block fenced with ```` ```tool ````, with such JSON or with calls like ``name(x=1, other="text")``

Special tokens may have been taken out of the text, so that a message which as a whole is JSON of calls counts without
``<|python_tag|>`` and ``[TOOL_CALLS]``. An answer that only has JSON in it, or JSON that is no call, does not. Nor does
what stands in ``<think>…</think>`` (where the prompt has opened it, all before the first ``</think>``, unless that
begins with a call).
All work is linear in the length of the text, times ``MAX_CALLS``.

A reader gets the text and where its opener ends; it returns the calls and where they end, or raises _Malformed.
"""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from retrain.types import Message

MAX_CHARACTERS = 1_000_000
MAX_CALLS = 32
MAX_PYTHON = 20_000  # Characters of a block with Python calls: the parser's stack is not ours to bound

NO_TOOL = "tool_call"  # Name in the answer to a call that has no tool name
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
    """A call as it was written. ``arguments`` are JSON values (all of them texts in the XML format), unchecked."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Parsed:
    """``found`` are the calls and, for each that could not be read, a sentence to the model; in the order of the
    message. ``text`` is the rest of it, without thoughts."""

    found: tuple[Call | str, ...]
    text: str

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(each for each in self.found if isinstance(each, Call))


def answer(call: Call | str, text: str) -> Message:
    """Return the tool message that answers a call; ``call`` is a text if the call could not be parsed.

    Lone surrogates, which no tokenizer accepts, are replaced.
    """
    name, id = (call.name, call.id) if isinstance(call, Call) else (NO_TOOL, None)
    message = {"role": "tool", "name": name[:64], "content": text} | ({"tool_call_id": id[:64]} if id else {})
    return {key: value.encode("utf-8", "replace").decode() for key, value in message.items()}


def as_text(result: Any) -> str:
    """Return a tool's result as text: unchanged if it is text, else as JSON, or ``str`` if it has no JSON form."""
    if isinstance(result, str):
        return result
    return "(no result)" if result is None else json.dumps(result, ensure_ascii=False, default=str)


class _Malformed(Exception):
    """Something begins as a call and is none; the text says why."""


def parse(text: str) -> Parsed:
    if len(text) > MAX_CHARACTERS:
        return Parsed((f"The message has more than {MAX_CHARACTERS:,} characters; no tool was called.",), "")
    if calls := _bare(text):
        return Parsed(_bounded(calls), "")
    text = _after_thought(text)
    found: list[Call | str] = []
    rest: list[str] = []
    at = 0
    while len(found) <= MAX_CALLS and (marker := _MARKER.search(text, at)):
        rest.append(text[at : marker.start()])
        opener, at = marker[0].strip(), marker.end()
        if opener in _THOUGHTS:
            close = text.find(_THOUGHTS[opener], at)
            at = len(text) if close < 0 else close + len(_THOUGHTS[opener])
            continue
        opener = "```" if opener.startswith("```") else opener
        try:
            calls, at = _READERS[opener](text, at)
            found += calls
        except _Malformed as error:
            found.append(_fault(str(error), _form(opener, text, at)))
            at = _beyond_fault(opener, text, at)
    remainder = "".join([*rest, text[at:]]).strip()
    if not found and (found := _bare(remainder) or _nearly(remainder)):
        remainder = ""
    return Parsed(_bounded(found), remainder)


def read_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[Call]]:
    """Return the text beside the calls, with the thought before them, and the calls with arguments of the types that
    ``tools`` want. A text without a call that can be read is all text."""
    parsed = parse(text)
    if not parsed.calls:
        return text, []
    thought, end, _ = text.partition("</think>")
    functions = {tool.get("function", {}).get("name"): tool.get("function", {}) for tool in tools}
    read = [Call(call.name, _typed(call.arguments, functions.get(call.name, {}))) for call in parsed.calls]
    return "\n\n".join(part for part in (thought + end if end else "", parsed.text) if part), read


def _typed(arguments: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    """Parse arguments that were written as texts, as some formats write all of them, where the tool wants no texts."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    typed = dict(arguments)
    for name, value in arguments.items():
        wanted = properties.get(name) or {}
        kinds = {str(each.get("type", "string")) for each in wanted.get("anyOf") or [wanted]}
        if isinstance(value, str) and "string" not in kinds:
            with contextlib.suppress(ValueError, RecursionError):
                typed[name] = json.loads(value)
    return typed


def _bounded(found: list[Call | str]) -> tuple[Call | str, ...]:
    if len(found) <= MAX_CALLS:
        return tuple(found)
    return (*found[:MAX_CALLS], f"Only the first {MAX_CALLS} tool calls of a message are read; write fewer.")


def _fault(reason: str, form: str) -> str:
    return f"A tool call could not be read: {reason}. The right form is:\n{form}"


def _form(opener: str, text: str, at: int) -> str:
    begin = _skip(text, at)
    if opener == "[TOOL_CALLS]":
        return MISTRAL if text.startswith(("[", "{"), begin) else MISTRAL_NAMED
    if opener == "<function=" or text.startswith("<function=", begin):
        return XML
    return {"<tool_call>": HERMES, "<|python_tag|>": LLAMA, "```": FENCED}[opener]


def _beyond_fault(opener: str, text: str, at: int) -> int:
    """Return where to continue after a malformed call: behind its closer, or at the next opener."""
    if opener == "```":
        fence = _FENCE_END.search(text, at)
        return fence.end() if fence else len(text)
    if opener == "<|python_tag|>":
        return len(text)
    before, found, _ = text[at:].partition(opener)
    again = at + len(before) if found else len(text)
    closer = {"<tool_call>": "</tool_call>", "<function=": "</function>"}.get(opener, "")
    close = text.find(closer, at, again) if closer else -1
    return again if close < 0 else close + len(closer)


def _after_thought(text: str) -> str:
    """Return the text without a thought that the prompt has opened; one that begins with a call is no thought."""
    if _MARKER.match(text, _skip(text, 0)):
        return text
    for opener, closer in _THOUGHTS.items():
        end, begin = text.find(closer), text.find(opener)
        if end >= 0 and (begin < 0 or end < begin):
            return text[end + len(closer) :]
    return text


def _tagged(text: str, at: int) -> tuple[list[Call | str], int]:
    """Read ``<tool_call>``: JSON or XML."""
    if text.find("</tool_call>", at) < 0:
        raise _Malformed("<tool_call> is not closed with </tool_call>")
    calls: list[Call | str] = []
    at = _skip(text, at)
    if text.startswith("<function=", at):
        while text.startswith("<function=", at) and len(calls) <= MAX_CALLS:
            call, at = _function(text, at + len("<function="))
            calls, at = [*calls, call], _skip(text, at)
    else:
        value, at = _json(text, at)
        calls, at = _calls(value, HERMES), _skip(text, at)
    if not text.startswith("</tool_call>", at):
        raise _Malformed(f"after the call </tool_call> is expected, not {_glimpse(text, at)}")
    return calls, at + len("</tool_call>")


def _bare_function(text: str, at: int) -> tuple[list[Call | str], int]:
    call, at = _function(text, at)
    return [call], at


def _function(text: str, at: int) -> tuple[Call, int]:
    name = _KEY.match(text, at)
    if name is None:
        raise _Malformed("<function= is not followed by the name of a tool and >")
    arguments: dict[str, Any] = {}
    at = _skip(text, name.end())
    if text.startswith("{", at):
        value, at = _json(text, at)
        arguments, at = value, _skip(text, at)
    while text.startswith("<parameter=", at):
        key = _KEY.match(text, at + len("<parameter="))
        if key is None:
            raise _Malformed("<parameter= is not followed by the name of an argument and >")
        end = text.find("</parameter>", key.end())
        if end < 0 or text.find("\n<parameter=", key.end(), end) >= 0:
            raise _Malformed(f"<parameter={key[1]}> is not closed with </parameter>")
        arguments[key[1].strip()] = text[key.end() : end].removeprefix("\n").removesuffix("\n")
        at = _skip(text, end + len("</parameter>"))
    if not text.startswith("</function>", at):
        raise _Malformed(f"<parameter=…> or </function> is expected, not {_glimpse(text, at)}")
    return Call(name[1].strip(), arguments), at + len("</function>")


def _mistral(text: str, at: int) -> tuple[list[Call | str], int]:
    """Read ``[TOOL_CALLS]``: a list, or name and arguments."""
    at = _skip(text, at)
    if text.startswith(("[", "{"), at):
        value, at = _json(text, at)
        return _calls(value, MISTRAL), at
    name = _NAMED.match(text, at)
    if name is None:
        raise _Malformed(f"[TOOL_CALLS] is followed by {_glimpse(text, at)}, which is no list of calls and no name")
    value, at = _json(text, name.end())
    return [Call(name[1], _arguments(value), name[2])], at


def _python_tag(text: str, at: int) -> tuple[list[Call | str], int]:
    """Read ``<|python_tag|>``: JSON up to the end of the message."""
    end = _without_end_tokens(text, at)
    return [call for value in _sequence(text[at:end]) for call in _calls(value, LLAMA)], len(text)


def _fenced(text: str, at: int) -> tuple[list[Call | str], int]:
    """Read a block ```` ```tool ````: JSON, or calls as in Python."""
    end = _FENCE_END.search(text, at)
    if end is None:
        raise _Malformed("the block ```tool is not closed with ```")
    body = text[at : end.start()].strip()
    if body.startswith(("{", "[")):
        return [call for value in _sequence(body) for call in _calls(value, FENCED)], end.end()
    return _python(body), end.end()


def _python(body: str) -> list[Call | str]:
    """Read calls ``name(x=1, other="text")`` with literal values; nothing is evaluated."""
    if len(body) > MAX_PYTHON:
        raise _Malformed(f"the block ```tool has more than {MAX_PYTHON:,} characters; write it as JSON")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            statements = ast.parse(body).body
        calls: list[Call | str] = [_python_call(statement) for statement in statements]
    except SyntaxError as error:
        raise _Malformed(f"it is neither JSON nor a call ({error.msg})") from None
    except (ValueError, MemoryError, RecursionError):
        raise _Malformed("it is neither JSON nor a call that can be read") from None
    if not calls:
        raise _Malformed("the block ```tool is empty")
    return calls


def _python_call(statement: ast.stmt) -> Call:
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[], keywords=keywords)):
            arguments = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
            if len(arguments) == len(keywords):
                return Call(name, {argument: _literal(name, argument, node) for argument, node in arguments.items()})
        case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[_, *_])):
            raise _Malformed(f"the arguments of {name} need their names, as in {name}(argument='value')")
    raise _Malformed("a line of the block is no call like tool_name(argument='value')")


def _literal(name: str, argument: str, node: ast.expr) -> Any:
    try:
        return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        reason = f"the value of {argument} in {name}(…) is no plain text, number, list or dictionary"
        raise _Malformed(reason) from None


_READERS: dict[str, Callable[[str, int], tuple[list[Call | str], int]]] = {
    "<tool_call>": _tagged,
    "<function=": _bare_function,
    "[TOOL_CALLS]": _mistral,
    "<|python_tag|>": _python_tag,
    "```": _fenced,
}


def _bare(text: str) -> list[Call | str]:
    """Return the calls of a text that as a whole is calls without an opener; none for any other text."""
    begin = _skip(text, 0)
    text = text[begin : _without_end_tokens(text, begin)]
    try:
        if not text.startswith(("{", "[")):
            return _named_sequence(text)
        values = _sequence(text)
    except _Malformed:
        return []
    items = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not all(isinstance(item, dict) for item in items) or not any(map(_looks_like_a_call, items)):
        return []
    return [call for item in items for call in _calls(item, LLAMA)]


def _named_sequence(text: str) -> list[Call | str]:
    """Read ``name{…}name{…}``: Mistral's newer form without its tokens."""
    calls: list[Call | str] = []
    at = 0
    while at < len(text) and len(calls) <= MAX_CALLS:
        name = _BARE_NAMED.match(text, at)
        if name is None:
            raise _Malformed("no call")
        value, at = _json(text, name.end())
        calls.append(Call(name[1], value))
        at = _skip(text, at)
    return calls


def _nearly(text: str) -> list[Call | str]:
    """Return a fault for a message that begins as a call and is not JSON."""
    try:
        if _NEARLY.match(text):
            _sequence(text[: _without_end_tokens(text, 0)])
    except _Malformed as error:
        return [_fault(str(error), LLAMA if '"parameters"' in text[:500] else JSON_FORM)]
    return []


def _looks_like_a_call(item: dict[str, Any]) -> bool:
    """Return whether an object can be meant as a call: data with a name may well have other keys beside it."""
    if item.get("type") == "function" and isinstance(item.get("function"), dict):
        item = item["function"]
    given = [item[key] for key in ("arguments", "parameters") if key in item]
    known = set(item) <= {"name", "arguments", "parameters", "id", "type"}
    return known and isinstance(item.get("name"), str) and len(given) == 1 and isinstance(given[0], dict | str | list)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant)
"""``strict=False``: line breaks inside a text, which models write in code, are taken as they stand."""


def _json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins here, and where it ends."""
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _Malformed(f"its JSON is broken at {_glimpse(text, error.pos)} ({error.msg})") from None
    except RecursionError:
        raise _Malformed("its JSON is nested too deeply") from None
    except ValueError as error:
        reason = str(error) if "JSON" in str(error) else "a number is too long"
        raise _Malformed(f"its JSON is broken: {reason}") from None


def _sequence(text: str) -> list[Any]:
    """Return JSON values one after the other, up to the end of the text."""
    values = []
    at = _skip(text, 0)
    while at < len(text) and len(values) <= MAX_CALLS:
        value, at = _json(text, at)
        values.append(value)
        match = _SEPARATOR.match(text, at)
        at = match.end() if match else at
    if not values:
        raise _Malformed("there is no JSON object with the call")
    return values


def _calls(value: Any, form: str) -> list[Call | str]:
    """Parse one call or a list of calls; other values give a fault that shows ``form``."""
    calls: list[Call | str] = []
    for item in value[: MAX_CALLS + 1] if isinstance(value, list) else [value]:
        try:
            calls.append(_call(item))
        except _Malformed as error:
            calls.append(_fault(str(error), form))
    if not calls:
        raise _Malformed("the list of calls is empty")
    return calls


def _call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise _Malformed(f"it is {_kind(value)}, not a JSON object")
    id, function = value.get("id"), value.get("function")
    value = function if isinstance(function, dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Malformed('it has no "name"')
    arguments = value.get("arguments", value.get("parameters"))
    return Call(name.strip(), _arguments(arguments), id if isinstance(id, str) else None)


def _arguments(value: Any) -> dict[str, Any]:
    """Return arguments from an object, from a text that is the JSON of one, or from nothing."""
    if isinstance(value, str) and value.strip():
        text = value
        value, end = _json(text, _skip(text, 0))
        if text[end:].strip():
            raise _Malformed(f'after the JSON of "arguments" there is {_glimpse(text, end)}')
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise _Malformed(f'"arguments" is {_kind(value)}, not a JSON object')
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _without_end_tokens(text: str, begin: int) -> int:
    """Return the end of the text before trailing white space and end tokens left by an engine."""
    end = begin + len(text[begin:].rstrip())
    for _ in range(4):
        token = next((token for token in _END_TOKENS if text.endswith(token, begin, end)), "")
        if not token:
            break
        end = begin + len(text[begin : end - len(token)].rstrip())
    return end


def _glimpse(text: str, at: int) -> str:
    return repr(text[at : at + 30]) if at < len(text) else "the end of the message"
