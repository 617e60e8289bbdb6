"""Tools: their schemas, the check of arguments, the calculator, and episodes that answer calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fractions import Fraction
from typing import Any, ClassVar, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from retrain.environments.tool_use import ToolEpisode, ToolUse
from retrain.environments.tools import ToolError
from retrain.environments.tools.calculator import calculator
from retrain.environments.tools.schema import tool_of
from retrain.errors import PluginError
from retrain.types import Action, Problem

PROBLEM = Problem("1", "What is 12 + 34?", "46")

# Written for this test in the manner of the ChatML templates with tools (Qwen2.5 and what follows it).
TEMPLATE = """\
{% if tools %}
<|im_start|>system
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
Write a call as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}
{% for m in messages %}
{% if m.role == "tool" %}
{% if loop.previtem is not defined or loop.previtem.role != "tool" %}
<|im_start|>user
{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{% if loop.last or loop.nextitem.role != "tool" %}
<|im_end|>
{% endif %}
{% else %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""


def rendered(messages, tools) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template(
        [list(messages)], tools=list(tools), chat_template=TEMPLATE, add_generation_prompt=True
    )
    return texts[0]


def act(text: str) -> Action:
    return Action([], text, np.zeros(0), None, "stop")


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# Tools of this test.


class Point(BaseModel):
    x: int
    y: int = 0


def search_flights(city: str, seats: int, direct: bool = False, days: list[str] | None = None) -> dict[str, Any]:
    """Find flights.

    The cheapest come first.

    Args:
        city: Where to: a city
        seats: How many seats,
            at least one
        direct: Without a stop?
        days: Which days

    Returns:
        The flights
    """
    return {"city": city, "seats": seats, "direct": direct, "days": days}


def kinds(a: int, b: float, c: str, d: bool, e: list[int], f: dict[str, float], g: Literal["x", "y"], h: Any) -> str:
    """All kinds.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H
    """
    return repr((a, b, c, d, e, f, g, h))


def move(to: Point, copy: int = 1) -> str:
    """Move to a point."""
    return f"{type(to).__name__} {to.x} {to.y} {copy}"


def fails(how: str) -> str:
    """Fail."""
    match how:
        case "value":
            raise ValueError("no such thing")
        case "tool":
            raise ToolError("say it otherwise")
        case "exit":
            sys.exit(3)
        case "quit":
            raise SystemExit
        case "deep":
            return fails("deep")
        case "memory":
            raise MemoryError
        case "mute":
            raise Mute
    raise KeyError(how)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def gives(what: Literal["none", "list", "number", "surrogate", "long", "object", "text"]) -> Any:
    """Give something."""
    given = {"none": None, "list": [1, "é"], "number": 2.5, "surrogate": "\ud800!", "long": "x" * 5000}
    return {**given, "object": {"at": Point(x=1)}, "text": "plain"}[what]


class WordCount:
    """Counts words.

    Args:
        start: What to begin with
    """

    exact = False
    closed: ClassVar[list[int]] = []

    def __init__(self, start: int = 0, *, log: bool = False):
        self.count = start

    def __call__(self, text: str) -> int:
        self.count += len(text.split())
        return self.count

    def close(self) -> None:
        self.closed.append(self.count)


class HTTPGet2:
    """Not this."""

    def __call__(self, url: str) -> str:
        """Fetch a page.

        Args:
            url: Its address
        """
        return url


class Breaks:
    """Cannot be made."""

    def __init__(self, how: str = "value"):
        if how == "exit":
            sys.exit(1)
        raise ValueError("no key")

    def __call__(self) -> str:
        return ""


def episode(*tools: Any, **options: Any) -> ToolEpisode:
    """An episode with functions and classes of this file, or with tools by name."""
    entries = [f"{__name__}:{each.__name__}" if callable(each) else each for each in tools]
    return ToolUse(entries, **options).start(PROBLEM, 0)


# Schemas.


def test_a_schema_is_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    for function in (kinds, calculator):
        theirs = get_json_schema(function)
        theirs["function"].pop("return", None)
        assert tool_of(function).schema == theirs


def test_a_schema_by_hand() -> None:
    schema = tool_of(search_flights).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "search_flights",
            "description": "Find flights.\n\nThe cheapest come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where to: a city"},
                    "seats": {"type": "integer", "description": "How many seats, at least one"},
                    "direct": {"type": "boolean", "description": "Without a stop?"},
                    "days": {"type": "array", "items": {"type": "string"}, "description": "Which days"},
                },
                "required": ["city", "seats"],
            },
        },
    }
    assert next(iter(schema["function"]["parameters"]["properties"]["days"])) == "type"


def test_a_schema_of_a_model_refers_to_what_it_has() -> None:
    parameters = tool_of(move).schema["function"]["parameters"]
    jsonschema.validate({"to": {"x": 1}}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"to": {"y": 1}}, parameters)
    assert tool_of(move).checked({"to": {"x": "1"}, "copy": 2}) == {"to": Point(x=1), "copy": 2}


def test_a_class_is_described_by_its_call() -> None:
    assert tool_of(HTTPGet2).schema["function"] == {
        "name": "http_get2",
        "description": "Fetch a page.",
        "parameters": {
            "type": "object",
            "properties": {"url": {"type": "string", "description": "Its address"}},
            "required": ["url"],
        },
    }
    words = tool_of(WordCount, {"start": 2})
    assert (words.name, words.schema["function"]["description"], words.exact) == ("word_count", "Counts words.", False)
    assert tool_of(HTTPGet2).exact


def no_docstring(a: int) -> int:
    return a


def no_type(a) -> int:
    """Do."""
    return a


def no_such_type(a: Missing) -> int:  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    """Do."""
    return a


def no_json(a: np.ndarray) -> int:
    """Do."""
    return 0


def no_names(*a: int) -> int:
    """Do."""
    return 0


def any_names(**a: int) -> int:
    """Do."""
    return 0


def positions(a: int, /) -> int:
    """Do."""
    return 0


def stray(a: int) -> int:
    """Do.

    Args:
        b: no such argument
    """
    return a


async def later(a: int) -> int:
    """Do."""
    return a


class NoCall:
    """Do."""


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (no_docstring, "no docstring"),
        (no_type, "'a' of no_type has no type; write a: str"),
        (no_such_type, "cannot be resolved: NameError"),
        (no_json, "a type that JSON has no form for"),
        (no_names, "takes *a"),
        (any_names, "takes **a"),
        (positions, "the arguments of a tool have names"),
        (stray, "describes 'b', which is no argument"),
        (later, "asynchronous"),
        (NoCall, "no method __call__"),
        (lambda a: a, "no name for a tool"),
    ],
)
def test_what_cannot_be_a_tool(target, says) -> None:
    with pytest.raises(PluginError) as raised:
        tool_of(target, what="tool 'mine:it'")
    assert str(raised.value).startswith("tool 'mine:it': ")
    assert says in str(raised.value)


def test_settings_are_those_of_the_constructor() -> None:
    with pytest.raises(PluginError, match=r"unexpected keyword argument 'begin'.*those of WordCount are: start, log"):
        tool_of(WordCount, {"begin": 2})
    with pytest.raises(PluginError, match="a function has no settings, such as 'digits'"):
        tool_of(calculator, {"digits": 2})


# Arguments.


def odd_names(schema: int, model_config: str, copy: int = 7, json: str = "", _hidden: bool = False) -> str:
    """Names that a pydantic model has for itself."""
    return f"{schema} {model_config} {copy} {json} {_hidden}"


def test_arguments_may_have_any_name() -> None:
    tool = tool_of(odd_names)
    assert list(tool.schema["function"]["parameters"]["properties"]) == [
        *("schema", "model_config", "copy", "json", "_hidden")
    ]
    assert tool.schema["function"]["parameters"]["properties"]["copy"] == {"type": "integer"}
    given = tool.checked({"schema": "1", "model_config": "x", "_hidden": True})
    assert odd_names(**given) == "1 x 7  True"
    with pytest.raises(ToolError, match="no argument 'argument_0'"):
        tool.checked({"argument_0": 1, "model_config": "x"})


def test_arguments_are_taken_as_models_write_them() -> None:
    given = {"a": "3", "b": 2, "c": 5, "d": "true", "e": "[1, 2]", "f": '{"k": 1}', "g": "x", "h": "1"}
    expected = {"a": 3, "b": 2.0, "c": "5", "d": True, "e": [1, 2], "f": {"k": 1.0}, "g": "x", "h": "1"}
    checked = tool_of(kinds).checked(given)
    assert checked == expected
    assert {name: type(value) for name, value in checked.items()} == {k: type(v) for k, v in expected.items()}
    assert tool_of(search_flights).checked({"city": "[1]", "seats": 2.0}) == {"city": "[1]", "seats": 2}
    assert tool_of(search_flights).checked({"city": "Rome", "seats": 2, "days": None})["days"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, ["the argument 'city' is missing", "the argument 'seats' is missing"]),
        ({"city": "Rome", "seats": 2, "seat": 3}, ["there is no argument 'seat' (did you mean 'seats'?)"]),
        ({"city": "Rome", "seats": "two"}, ["seats: Input should be a valid integer"]),
        ({"city": "Rome", "seats": 2.5}, ["seats: Input should be a valid integer"]),
        ({"city": ["Rome"], "seats": 2}, ["city: Input should be a valid string"]),
        ({"city": None, "seats": 2}, ["city: Input should be a valid string"]),
        ({"city": "Rome", "seats": 2, "days": "[1, {}]"}, ["days.1: Input should be a valid string"]),
        ({"city": "Rome", "seats": 2, "days": "[" * 100_000}, ["days: Input should be a valid list"]),
    ],
)
def test_wrong_arguments_are_named(arguments, says) -> None:
    with pytest.raises(ToolError) as raised:
        tool_of(search_flights).checked(arguments)
    for each in says:
        assert each in str(raised.value)
    assert "It takes city (string), seats (integer), direct (boolean, optional), days (array, optional)" in str(
        raised.value
    )


def test_arguments_of_any_kind_are_checked_or_refused() -> None:
    tool = tool_of(kinds)
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=4,
    )

    @settings(max_examples=200, deadline=None)
    @given(st.dictionaries(st.sampled_from("abcdefghi"), values))
    def check(arguments) -> None:
        try:
            checked = tool.checked(arguments)
        except ToolError:
            return
        assert set(checked) == set("abcdefgh")
        assert type(checked["a"]) is int
        assert type(checked["b"]) is float
        assert checked["g"] in ("x", "y")

    check()


# The calculator.


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 34", "46"),
        ("0.1 + 0.2", "0.3"),
        ("(3 + 4.5) * 2", "15"),
        ("-2 ** 2", "-4"),
        ("+-+3", "-3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** -2", "0.25"),
        ("2 ** 100", str(2**100)),
        ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3 ≈ 0.333333333333333"),
        ("-2 / 3", "-2/3 ≈ -0.666666666666667"),
        ("1 / 3 * 3", "1"),
        ("10 ** 20 / 3", "100000000000000000000/3 ≈ 3.33333333333333E+19"),
        ("1 / 7 ** 60", "≈ 1.96841923011760E-51"),
        ("1e3 + 1.5e-2", "1000.015"),
        (".5 + 5.", "5.5"),
        ("3 × 4 ÷ 2 − 1", "5"),
        ("1,234,567.5 × 2", "2469135"),
        ("  1\n+\t1 ", "2"),
        ("1_000", "1000"),
        ("(-1) ** (10 ** 500 + 1)", "-1"),
        ("0 ** (10 ** 500)", "0"),
        ("1 ** -(10 ** 500)", "1"),
        ("0 ** 0", "1"),
        ("1" + " + 1" * 300, "301"),
    ],
)
def test_the_calculator(expression, value) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("1 / 0", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("0 ** -2", "division by zero"),
        ("2 ^ 3", "write ** for a power"),
        ("2 + 2 =", "without an equals sign"),
        ("1,5 + 1", "decimals with a point"),
        ("1,2345", "decimals with a point"),
        ("12,34,567", "decimals with a point"),
        ("2(3 + 4)", "write * between factors"),
        ("sqrt(2)", "'s' is not part of arithmetic"),
        ("__import__('os')", "is not part of arithmetic"),
        ("0x10", "'x' is not part of arithmetic"),
        ("1j", "'j' is not part of arithmetic"),
        ("٣ + 1", "is not part of arithmetic"),
        ("e + 1", "cannot be read"),
        ("1e", "cannot be read"),
        ("...", "cannot be read"),
        ("1 2", "cannot be read"),
        ("50%", "cannot be read"),
        ("(1", "cannot be read"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("2 ** 0.5", "not a whole number"),
        ("10 ** 1000", "more than 1000 digits"),
        ("9 ** 9 ** 9 ** 9", "more than 1000 digits"),
        ("2 ** -(10 ** 9)", "more than 1000 digits"),
        ("1e999999999", "more than 1000 digits"),
        ("1e-999999999", "more than 1000 digits"),
        ("9" * 1500, "more than 1000 digits"),
        ("1." + "1" * 1500, "more than 1000 digits"),
        ("10 ** 999 * 10", "more than 1000 digits"),
        ("1" * 2001, "more than 2000 characters"),
        ("-" * 1900 + "1", "too many parts"),
        ("1" + "+1" * 990, "too many parts"),
        ("(" * 500 + "1" + ")" * 500, "cannot be read"),
        ("1" + "\0", "is not part of arithmetic"),
    ],
)
def test_the_calculator_says_what_is_wrong(expression, says) -> None:
    with pytest.raises(ToolError) as raised:
        calculator(expression)
    assert says in str(raised.value)
    assert len(str(raised.value)) < 400


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(lambda value: f"{value:f}")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_is_exact(expression) -> None:
    """Against Python's own fractions."""
    try:
        fractions = expression.replace("(", "Fraction(")  # the // of two fractions is an int, whose / would be a float
        expected = eval(re.sub(r"[\d.]+", r"Fraction('\g<0>')", fractions))
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculator(expression)
        return
    exact, _, rounded = calculator(expression).partition("≈")
    if exact:
        assert Fraction(exact.strip()) == expected
    if rounded:
        assert abs(Fraction(rounded.strip()) - expected) <= abs(expected) / 10**14


# Episodes.


def test_an_episode_answers_calls_and_ends_without_one() -> None:
    environment = ToolUse(["calculator"])
    own = environment.start(PROBLEM, 0)
    observation = own.observe()
    assert observation.messages == ()
    assert observation.tools == environment.schemas == (tool_of(calculator).schema,)
    step = own.step(act(call("calculator", expression="12 + 34") + call("calculator", expression="2 ^ 3")))
    assert not step.done
    assert step.messages == (
        {"role": "tool", "name": "calculator", "content": "46"},
        {
            "role": "tool",
            "name": "calculator",
            "content": "Error: '^' is not part of arithmetic; write ** for a power",
        },
    )
    assert step.metrics == {"tools/calls": 2.0, "tools/errors": 1.0}
    assert step.logs == {}
    last = own.step(act("The answer is 46."))
    assert last.done
    assert last.messages == ()
    result = own.result()
    assert result.total_reward is None
    assert result.sample_metrics.pop("tools/tool_time") > 0
    assert result.sample_metrics == {
        "tools/total_tool_calls": 2.0,
        "tools/tool_success_rate": 0.5,
        "tools/tool_errors": 1.0,
        "tools/calls/calculator": 2.0,
    }
    own.close()
    own.close()


def test_the_numbers_of_an_episode_by_hand() -> None:
    own = episode(kinds, fails, "calculator")
    turns = [
        call("calculator", expression="1") + "<tool_call>{</tool_call>",  # 2, 1 error
        call("kinds", a=1),  # 1, 1 error: arguments
        call("nothing", x=1) + call("fails", how="value"),  # 2, 2 errors
        call("calculator", expression="2"),  # 1
        "Done.",
    ]
    for turn in turns:
        own.step(act(turn))
    metrics = own.result().sample_metrics
    metrics.pop("tools/tool_time")
    assert metrics == {
        "tools/total_tool_calls": 6.0,
        "tools/tool_success_rate": 2 / 6,
        "tools/tool_errors": 4.0,
        "tools/calls/kinds": 1.0,
        "tools/calls/fails": 1.0,
        "tools/calls/calculator": 2.0,
    }
    idle = episode("calculator")
    assert idle.step(act("46")).done
    assert idle.result().sample_metrics == {
        "tools/total_tool_calls": 0.0,
        "tools/tool_success_rate": None,
        "tools/tool_errors": 0.0,
        "tools/tool_time": 0.0,
        "tools/calls/calculator": 0.0,
    }


def test_every_number_has_a_range() -> None:
    from retrain.plugins import why_no_range

    environment = ToolUse(["calculator", f"{__name__}:WordCount"])
    assert set(environment.metrics_ranges) == set(environment.start(PROBLEM, 0).result().sample_metrics)
    assert {why_no_range(limits) for limits in environment.metrics_ranges.values()} == {""}
    assert environment.metrics_ranges["tools/tool_success_rate"] == {"min": 0, "max": 1}
    assert environment.metrics_ranges["tools/tool_errors"]["invert"] is True


@pytest.mark.parametrize(
    ("how", "content"),
    [
        ("value", "Error: ValueError: no such thing"),
        ("tool", "Error: say it otherwise"),
        ("exit", "Error: SystemExit: the tool tried to exit"),
        ("quit", "Error: SystemExit: the tool tried to exit"),
        ("memory", "Error: MemoryError: "),
        ("mute", "Error: Mute"),
        ("deep", "Error: RecursionError: maximum recursion depth exceeded"),
        ("other", "Error: KeyError: 'other'"),
    ],
)
def test_whatever_a_tool_raises_is_an_answer(how, content) -> None:
    own = episode(fails)
    (message,) = own.step(act(call("fails", how=how))).messages
    assert message["content"].startswith(content)
    assert own.errors == 1


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("none", "(no result)"),
        ("list", '[1, "é"]'),
        ("number", "2.5"),
        ("surrogate", "?!"),
        ("text", "plain"),
        ("object", '{"at": "x=1 y=0"}'),
        ("long", "x" * 4000 + "\n[cut: 1,000 more characters]"),
    ],
)
def test_results_are_texts(what, content) -> None:
    (message,) = episode(gives).step(act(call("gives", what=what))).messages
    assert message == {"role": "tool", "name": "gives", "content": content}


def test_results_are_cut_where_the_configuration_says() -> None:
    (message,) = episode(gives, result_characters=3).step(act(call("gives", what="text"))).messages
    assert message["content"] == "pla\n[cut: 2 more characters]"
    (fault,) = episode(gives, result_characters=10).step(act("<tool_call>")).messages
    assert fault["content"].startswith("Error: A t\n[cut: ")


def test_an_unknown_tool_is_named_with_the_known_ones() -> None:
    own = episode("calculator", move)
    unknown = own.step(act(call("calculater", expression="1") + call("\ud800" + "x" * 500))).messages
    assert unknown[0] == {
        "role": "tool",
        "name": "calculater",
        "content": "Error: there is no tool 'calculater' (did you mean 'calculator'?). The tools are: calculator, move",
    }
    assert unknown[1]["name"] == "?" + "x" * 63
    assert json.dumps(unknown).isascii()
    assert all(message["content"].encode() for message in unknown)
    assert len(unknown[1]["content"]) < 200


def test_a_fault_is_an_error_and_the_episode_goes_on() -> None:
    own = episode("calculator")
    step = own.step(act('<tool_call>{"name": "calculator"'))
    assert not step.done
    assert step.messages[0]["role"] == "tool"
    assert step.messages[0]["content"].startswith("Error: A tool call could not be read: <tool_call> is not closed")
    assert step.metrics == {"tools/calls": 1.0, "tools/errors": 1.0}


def test_an_id_that_the_model_gave_comes_back() -> None:
    text = '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "1"}, "id": "abcdef123"}]'
    (message,) = episode("calculator").step(act(text)).messages
    assert message == {"role": "tool", "name": "calculator", "content": "1", "tool_call_id": "abcdef123"}


def test_a_class_is_made_anew_for_each_episode_and_closed_with_it() -> None:
    name = f"{__name__}:WordCount"
    environment = ToolUse([{"tool": name, "start": 10}])
    assert not environment.exact
    assert ToolUse(["calculator"]).exact
    kept = sys.modules[__name__].WordCount.closed
    kept.clear()
    first, second = environment.start(PROBLEM, 0), environment.start(PROBLEM, 0)

    def counted(own: ToolEpisode) -> list[str]:
        return [message["content"] for message in own.step(act(call("word_count", text="a b"))).messages]

    assert [counted(first), counted(first), counted(second)] == [["12"], ["14"], ["12"]]
    first.close()
    assert kept == [14]
    first.close()
    second.close()
    assert kept == [14, 12]


@pytest.mark.parametrize("how", ["value", "exit"])
def test_a_class_that_cannot_be_made_is_the_users_to_mend(how) -> None:
    kept = sys.modules[__name__].WordCount.closed
    kept.clear()
    environment = ToolUse([f"{__name__}:WordCount", {"tool": f"{__name__}:Breaks", "how": how}])
    with pytest.raises(PluginError, match=r"tool 'breaks' cannot be made: (ValueError: no key|SystemExit: 1)"):
        environment.start(PROBLEM, 0)
    assert kept == [0]  # what had been made before it is closed


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            "calculater",
            "tool 'calculater' is none of calculator, python, search (did you mean 'calculator'?); one of your own",
        ),
        ("nothing:here", "tool 'nothing:here': no module 'nothing'"),
        ("json:nothing", "has no function 'nothing'"),
        ({"start": 1}, 'write tool = "calculator" in its table'),
        ({"tool": "calculator", "digits": 3}, "tool 'calculator': a function has no settings, such as 'digits'"),
        ("json:dumps", "tool 'json:dumps': "),
    ],
)
def test_tools_that_cannot_be_loaded(entry, says) -> None:
    with pytest.raises(PluginError) as raised:
        ToolUse([entry])
    assert says in str(raised.value)


def test_two_tools_of_one_name() -> None:
    with pytest.raises(PluginError, match="two tools are named 'calculator'"):
        ToolUse(["calculator", "retrain.environments.tools.calculator:calculator"])


def test_tools_are_looked_up_in_the_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        source = f'def tool_{number}(n: int) -> int:\n    """Add {number}."""\n    return n + {number}\n'
        (tmp_path / folder / f"tools_of_{folder}.py").write_text(source)
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    own = ToolUse(["tools_of_one:tool_0", "tools_of_two:tool_1"], folders).start(PROBLEM, 0)
    answers = own.step(act(call("tool_0", n=1) + call("tool_1", n=1))).messages
    assert [message["content"] for message in answers] == ["1", "2"]
    for name in ("tools_of_one", "tools_of_two"):
        sys.modules.pop(name)


def test_schemas_and_answers_go_through_a_chat_template() -> None:
    own = episode("calculator", search_flights)
    tools = own.observe().tools
    question = {"role": "user", "content": "What is 12 + 34?"}
    prompt = rendered([question], tools)
    listed = prompt.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == list(tools)
    said = "I work it out.\n" + call("calculator", expression="12 + 34") + "\n" + call("calculator", expression="^")
    step = own.step(act(said))
    conversation = [question, {"role": "assistant", "content": said}, *step.messages]
    text = rendered(conversation, tools)
    assert text.startswith(prompt + said)
    assert text[len(prompt + said) :] == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n46\n</tool_response>\n<tool_response>\n"
        "Error: '^' is not part of arithmetic; write ** for a power\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_load_without_torch_and_transformers() -> None:
    code = (
        "import sys; from retrain.environments.tool_use import ToolUse; ToolUse(['calculator']).start(None, 0); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
