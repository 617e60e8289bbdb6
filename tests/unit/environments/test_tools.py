import json
import re
import sys
from fractions import Fraction
from typing import Any, ClassVar, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from retrain.environments.tool_use import ToolUse
from retrain.environments.tools import ToolError
from retrain.environments.tools.calculator import calculator
from retrain.environments.tools.schema import tool_of
from retrain.errors import PluginError, RetrainError
from retrain.types import Action, Problem


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def send(episode, text):
    return episode.step(Action([], text, np.zeros(0), None, "stop"))


def begun(*tools, **options):
    """An episode with functions and classes of this file, or with tools by name."""
    entries = [f"{__name__}:{tool.__name__}" if callable(tool) else tool for tool in tools]
    return ToolUse(entries, **options).start(Problem("1", "What is 12 + 34?", "46"), 0)


def answers(episode, text):
    return [message["content"] for message in send(episode, text).messages]


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

    Returns:
        The flights
    """
    return {"city": city, "seats": seats, "direct": direct, "days": days}


def kinds(a: int, b: float, c: str, d: bool, e: list[int], f: dict[str, float], g: Literal["x", "y"], h: Any) -> str:
    """All kinds."""
    return repr((a, b, c, d, e, f, g, h))


def move(to: Point, copy: int = 1) -> str:
    """Move to a point."""
    return f"{type(to).__name__} {to.x} {to.y} {copy}"


def odd_names(schema: int, model_config: str, copy: int = 7, json: str = "", _hidden: bool = False) -> str:
    """Names that a pydantic model has for itself."""
    return f"{schema} {model_config} {copy} {json} {_hidden}"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fails(how: str) -> str:
    """Fail."""
    match how:
        case "exit":
            sys.exit(3)
        case "deep":
            return fails("deep")
    raise {"value": ValueError("no such thing"), "tool": ToolError("say it otherwise"), "mute": Mute()}[how]


def gives(what: Literal["none", "list", "surrogate", "long", "object"]) -> Any:
    """Give something."""
    given = {"none": None, "list": [1, "é"], "surrogate": "\ud800!", "long": "x" * 5000}
    return {**given, "object": {"at": Point(x=1)}}[what]


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


def test_a_schema_is_that_of_transformers():
    from transformers.utils import get_json_schema

    theirs = get_json_schema(calculator)
    theirs["function"].pop("return", None)
    assert tool_of(calculator).schema == theirs
    function = tool_of(search_flights).schema["function"]
    assert function["description"] == "Find flights.\n\nThe cheapest come first."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to: a city"}, "direct": {"type": "boolean"},
            "seats": {"type": "integer", "description": "How many seats, at least one"},
            "days": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city", "seats"],
    }  # fmt: skip
    parameters = tool_of(kinds).schema["function"]["parameters"]["properties"]
    assert parameters["f"] == {"type": "object", "additionalProperties": {"type": "number"}}
    assert parameters["g"] == {"type": "string", "enum": ["x", "y"]}
    parameters = tool_of(move).schema["function"]["parameters"]
    jsonschema.validate({"to": {"x": 1}}, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"to": {"y": 1}}, parameters)


@pytest.mark.parametrize(("source", "fault"), [
    ("def f(a: int): return a", "no docstring"),
    ("def f(a): 'Do.'", "'a' of f has no type; write a: str"),
    ("def f(a: 'Missing'): 'Do.'", "cannot be resolved: NameError"),
    ("def f(a: range): 'Do.'", "a type that JSON has no form for"),
    ("def f(a: int):\n  '''Do.\n\n  Args:\n    b: nothing\n  '''", "describes 'b', which is no argument"),
    ("async def f(a: int): 'Do.'", "asynchronous"),
    ("class f: 'Do.'", "no method __call__"),
])  # fmt: skip
def test_what_cannot_be_a_tool(source, fault):
    made: dict[str, Any] = {}
    exec(source, made)
    with pytest.raises(PluginError) as raised:
        tool_of(made["f"], label="tool 'mine:it'")
    assert str(raised.value).startswith("tool 'mine:it': ")
    assert fault in str(raised.value)


def test_a_class_is_described_by_its_call_and_made_anew_for_each_episode():
    words = tool_of(WordCount, {"start": 2})
    assert (words.name, words.schema["function"]["description"], words.exact) == ("word_count", "Counts words.", False)
    with pytest.raises(PluginError, match=r"unexpected keyword argument 'begin'.*those of WordCount are: start, log"):
        tool_of(WordCount, {"begin": 2})
    assert (ToolUse([f"{__name__}:WordCount"]).exact, ToolUse(["calculator"]).exact) == (False, True)
    closed = sys.modules[__name__].WordCount.closed
    closed.clear()
    table = {"tool": f"{__name__}:WordCount", "start": 10}
    first, second = begun(table), begun(table)
    counted = [answers(episode, call("word_count", text="a b")) for episode in (first, first, second)]
    assert counted == [["12"], ["14"], ["12"]]
    for episode in (first, first, second):
        episode.close()
    assert closed == [10, 10, 14, 12]  # each environment opens its tools once, to check their settings


def test_arguments_are_taken_as_models_write_them():
    given = {"a": "3", "b": 2, "c": 5, "d": "true", "e": "[1, 2]", "f": '{"k": 1}', "g": "x", "h": "1"}
    expected = {"a": 3, "b": 2.0, "c": "5", "d": True, "e": [1, 2], "f": {"k": 1.0}, "g": "x", "h": "1"}
    checked = tool_of(kinds).checked(given)
    assert checked == expected
    assert {name: type(value) for name, value in checked.items()} == {k: type(v) for k, v in expected.items()}
    assert tool_of(search_flights).checked({"city": "[1]", "seats": 2.0}) == {"city": "[1]", "seats": 2}
    assert tool_of(search_flights).checked({"city": "Rome", "seats": 2, "days": None})["days"] is None
    assert tool_of(move).checked({"to": {"x": "1"}, "copy": 2}) == {"to": Point(x=1), "copy": 2}
    odd = tool_of(odd_names)
    names = ["schema", "model_config", "copy", "json", "_hidden"]
    assert list(odd.schema["function"]["parameters"]["properties"]) == names
    assert odd_names(**odd.checked({"schema": "1", "model_config": "x", "_hidden": True})) == "1 x 7  True"


@pytest.mark.parametrize(("arguments", "fault"), [
    ({}, "the argument 'city' is missing; the argument 'seats' is missing"),
    ({"seat": 3}, "there is no argument 'seat' (did you mean 'seats'?)"),
    ({"seats": "two"}, "seats: Input should be a valid integer"),
    ({"city": ["Rome"]}, "city: Input should be a valid string"),
    ({"days": "[" * 100_000}, "days: Input should be a valid list"),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, fault):
    given = {"city": "Rome", "seats": 2} | arguments if arguments else {}
    with pytest.raises(ToolError) as raised:
        tool_of(search_flights).checked(given)
    takes = "It takes city (string), seats (integer), direct (boolean, optional), days (array, optional)"
    assert fault in str(raised.value)
    assert takes in str(raised.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
KINDS = tool_of(kinds)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefghi"), VALUES))
def test_arguments_of_any_kind_are_checked_or_refused(arguments):
    try:
        checked = KINDS.checked(arguments)
    except ToolError:
        return
    assert set(checked) == set("abcdefgh")
    assert (type(checked["a"]), type(checked["b"])) == (int, float)
    assert checked["g"] in ("x", "y")


RESULTS = {
    "0.1 + 0.2": "0.3", "-2 ** 2": "-4", "2 ** -2": "0.25", "-2 / 3": "-2/3 ≈ -0.666666666666667",
    "10 ** 20 / 3": "100000000000000000000/3 ≈ 3.33333333333333E+19", "1 / 7 ** 60": "≈ 1.96841923011760E-51",
    "3 × 4 ÷ 2 − 1": "5", "1,234,567.5 × 2": "2469135", "(-1) ** (10 ** 500 + 1)": "-1", "1" + " + 1" * 300: "301",
}  # fmt: skip
FAULTS = {
    "1 % 0": "division by zero", "2 ^ 3": "write ** for a power", "2 + 2 =": "without an equals sign",
    "__import__('os')": "is not part of arithmetic", "٣ + 1": "is not part of arithmetic", " \n": "is empty",
    "2 ** 0.5": "not a whole number", "9 ** 9 ** 9 ** 9": "more than 1000 digits",
    "1." + "1" * 1500: "more than 1000 digits", "1" * 2001: "more than 2000 characters",
    "(" * 500 + "1" + ")" * 500: "cannot be read",
}  # fmt: skip


def test_the_calculator():
    assert {expression: calculator(expression) for expression in RESULTS} == RESULTS
    for expression, fault in FAULTS.items():
        with pytest.raises(ToolError) as raised:
            calculator(expression)
        assert fault in str(raised.value)
        assert len(str(raised.value)) < 400


NUMBERS = st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=3).map(lambda value: f"{value:f}")
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS)
def test_the_calculator_is_exact(expression):
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


def test_the_numbers_of_an_episode_by_hand():
    episode = begun(kinds, fails, "calculator")
    assert episode.observe().messages == ()
    assert [tool["function"]["name"] for tool in episode.observe().tools] == ["kinds", "fails", "calculator"]
    step = send(episode, call("calculator", expression="12 + 34") + '<tool_call>{"name": "calculator"')
    assert (step.done, step.metrics) == (False, {"tools/calls": 2.0, "tools/errors": 1.0})
    answer, fault = step.messages
    assert answer == {"role": "tool", "name": "calculator", "content": "46"}
    assert fault["content"].startswith("Error: A tool call could not be read: <tool_call> is not closed")
    send(episode, call("kinds", a=1))  # 1 call, 1 error: arguments
    send(episode, call("nothing", x=1) + call("fails", how="value"))  # 2 calls, 2 errors
    send(episode, call("calculator", expression="2"))
    last = send(episode, "Done.")
    assert (last.done, last.messages) == (True, ())
    result = episode.result()
    assert result.total_reward is None
    assert set(result.sample_metrics) == set(episode.environment.metrics_ranges)
    assert (result.sample_metrics.pop("tools/tool_time") or 0) > 0
    assert result.sample_metrics == {
        "tools/total_tool_calls": 6.0, "tools/tool_success_rate": 2 / 6, "tools/tool_errors": 4.0,
        "tools/calls/kinds": 1.0, "tools/calls/fails": 1.0, "tools/calls/calculator": 2.0,
    }  # fmt: skip
    idle = begun("calculator")
    assert send(idle, "46").done
    assert idle.result().sample_metrics["tools/tool_success_rate"] is None


def test_whatever_a_tool_does_is_an_answer():
    faults = {
        "value": "Error: ValueError: no such thing", "tool": "Error: say it otherwise",
        "exit": "Error: SystemExit: the tool tried to exit", "mute": "Error: Mute",
        "deep": "Error: RecursionError: maximum recursion depth exceeded",
    }  # fmt: skip
    episode = begun(fails)
    for how, fault in faults.items():
        assert answers(episode, call("fails", how=how))[0].startswith(fault)
    assert episode.errors == len(faults)
    results = {
        "none": "(no result)", "list": '[1, "é"]', "surrogate": "?!", "object": '{"at": "x=1 y=0"}',
        "long": "x" * 4000 + "\n[cut: 1,000 more characters]",
    }  # fmt: skip
    episode = begun(gives)
    assert {what: answers(episode, call("gives", what=what))[0] for what in results} == results
    assert answers(begun(gives, result_characters=10), "<tool_call>")[0].startswith("Error: A t\n[cut: ")
    episode = begun("calculator", move)
    unknown = send(episode, call("calculater", expression="1") + call("\ud800" + "x" * 500)).messages
    assert unknown[0]["content"] == (
        "Error: there is no tool 'calculater' (did you mean 'calculator'?). The tools are: calculator, move"
    )
    assert unknown[1]["name"] == "?" + "x" * 63
    assert len(unknown[1]["content"]) < 200
    text = '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "1"}, "id": "abcdef123"}]'
    assert send(episode, text).messages[0]["tool_call_id"] == "abcdef123"


@pytest.mark.parametrize(("entry", "fault"), [
    ("calculater", "tool 'calculater' is none of calculator, python, search (did you mean 'calculator'?)"),
    ("nothing:here", "tool 'nothing:here': no module 'nothing'"),
    ("json:nothing", "has no function 'nothing'"),
    ({"start": 1}, 'write tool = "calculator" in its table'),
    ({"tool": "calculator", "digits": 3}, "tool 'calculator': a function has no settings, such as 'digits'"),
    ("retrain.environments.tools.calculator:calculator", "two tools are named 'calculator'"),
    ({"tool": "search", "corpus": "missing.jsonl"}, "corpus missing.jsonl does not exist"),
    ({"tool": "search", "corpus": 3}, "tool 'search' cannot be made: TypeError"),
    ({"tool": "python", "timeout_s": -1}, "timeout_s is -1"),
])  # fmt: skip
def test_tools_that_cannot_be_loaded(entry, fault):
    with pytest.raises(RetrainError) as raised:
        ToolUse(["calculator", entry])
    assert fault in str(raised.value)


def test_tools_are_looked_up_in_the_folders(tmp_path, import_path):
    (tmp_path / "tools_beside.py").write_text('def more(n: int) -> int:\n    """Add one."""\n    return n + 1\n')
    episode = begun("tools_beside:more", folder=str(tmp_path))
    assert answers(episode, call("more", n=1)) == ["2"]
    sys.modules.pop("tools_beside")
    (tmp_path / "notes.jsonl").write_text('{"text": "Rome is old."}\n')
    episode = begun({"tool": "search", "corpus": "notes.jsonl"}, folder=str(tmp_path))
    assert "Rome is old." in answers(episode, call("search", query="rome"))[0]
