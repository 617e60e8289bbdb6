import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.environments.tools import calls
from retrain.environments.tools.calls import Call, ParsedMessage, parse

ADD = Call("add", {"a": 1, "b": 2})
NOW = Call("now", {})
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
NOW_JSON = '{"name": "now", "arguments": {}}'

POSITIVES = {
    "Hermes, arguments as text": (
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
        [ADD],
    ),
    "Hermes, no arguments": ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
    "Hermes, a closing tag in a text": (
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>',
        [Call("say", {"text": "</tool_call>"})],
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        [Call("add", {"a": "1", "b": "2"})],
    ),
    "Qwen3-Coder, lines": (
        "<tool_call><function=run><parameter=code>\nif x < 3:\n    print('<b>')\n\n</parameter></function></tool_call>",
        [Call("run", {"code": "if x < 3:\n    print('<b>')\n"})],
    ),
    "Qwen3-Coder, its tag taken out": ("<function=now>\n</function>", [NOW]),
    "Llama 3.1's own form": ('<function=add>{"a": 1, "b": 2}</function>', [ADD]),
    "two of Llama with the token": (f"<|python_tag|>{ADD_LLAMA};{ADD_LLAMA}<|eot_id|>", [ADD, ADD]),
    "as the OpenAI interface has it": ('{"type": "function", "function": ' + ADD_JSON + "}", [ADD]),
    "Hermes, its tags taken out": (f"\n{ADD_JSON}\n\n{NOW_JSON}\n", [ADD, NOW]),
    "two of Mistral v11": ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}</s>', [ADD, NOW]),
    "Mistral v11 with an id": (
        '[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{"a": 1, "b": 2}',
        [Call("add", {"a": 1, "b": 2}, "abcdef123")],
    ),
    "Mistral v11, its tokens taken out": ('add{"a": 1, "b": 2}now{}', [ADD, NOW]),
    "a block, other literals": (
        "```tool\nf(a=-1.5, b=[1, 'x'], c={'k': None}, d=True, e='''two\nlines''', g=(1, 2))\n```",
        [Call("f", {"a": -1.5, "b": [1, "x"], "c": {"k": None}, "d": True, "e": "two\nlines", "g": [1, 2]})],
    ),
}


def test_a_call_is_read():
    found = {name: list(parse(text).items) for name, (text, _) in POSITIVES.items()}
    assert found == {name: expected for name, (_, expected) in POSITIVES.items()}


ANSWERS = [
    "", 'The object {"name": "add", "arguments": {"a": 1}} is a call in JSON.', f"Here it is:\n{ADD_JSON}",
    '{"name": "Ada", "age": 36}', '{"name": "ResNet", "parameters": {"layers": 50}, "year": 2015}', "[1, 2, 3]",
    "```json\n" + ADD_JSON + "\n```", "```python\nadd(a=1, b=2)\n```", "add(a=1, b=2)", "Use the ```tool fence``` well",
    '{"name": ["x"], "arguments": {}}',
]  # fmt: skip
THOUGHTS = [
    f"<think><tool_call>{ADD_JSON}</tool_call></think>The answer is 3.",
    f"I might write <tool_call>{ADD_JSON}</tool_call> here</think>The answer is 3.",
    f"The answer is 3.<think><tool_call>{ADD_JSON}</tool_call>",
    f"[THINK]<tool_call>{ADD_JSON}</tool_call>[/THINK]The answer is 3.",
    f"<think>\n{ADD_JSON}\n</think>\n\nThe answer is 3.",
]


def test_ordinary_answers_and_thoughts_are_no_calls():
    assert [parse(text) for text in ANSWERS] == [ParsedMessage((), text.strip()) for text in ANSWERS]
    assert [parse(text) for text in THOUGHTS] == [ParsedMessage((), "The answer is 3.")] * len(THOUGHTS)
    for call in (f"<tool_call>{ADD_JSON}</tool_call>", ADD_LLAMA, f"[{ADD_JSON}]"):
        assert parse(f"<think>{{so}}</think>\n\n{call}").calls == (ADD,)
        assert parse(f"so [ it is\n</think>\n\n{call}").calls == (ADD,)
    around = parse(f"<think>I <tool_call> think</think>First.\n<tool_call>{ADD_JSON}</tool_call>\nLast.")
    assert around == ParsedMessage((ADD,), "First.\n\nLast.")


FAULTS = [
    ('<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "broken at", calls.HERMES),
    (f"<tool_call>{ADD_JSON}}}</tool_call>", "</tool_call> is expected, not '}", calls.HERMES),
    (f"<tool_call>{ADD_JSON}", "not closed with </tool_call>", calls.HERMES),
    ('<tool_call>{"arguments": {"a": 1}}</tool_call>', 'no "name"', calls.HERMES),
    ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON", calls.HERMES),
    ("<tool_call>" + '{"a":' * 100_000 + "</tool_call>", "nested too deeply", calls.HERMES),
    ('<tool_call>{"name": ' + "9" * 5000 + "}</tool_call>", "number is too long", calls.HERMES),
    ("<tool_call><function=f>\n<parameter=x>1\n<parameter=y>2</parameter></function></tool_call>",
     "<parameter=x> is not closed", calls.XML),
    ('{"name": "add", "parameters": {"a": 1', "broken at the end of the message", calls.LLAMA),
    ('[TOOL_CALLS] [{"name": "add"', "broken at", calls.MISTRAL),
    ("[TOOL_CALLS]?", "no list of calls and no name", calls.MISTRAL_NAMED),
    ("```tool\nadd(a=1, b=2)\n", "not closed with ```", calls.FENCED),
    ("```tool\nadd(1, 2)\n```", "need their names", calls.FENCED),
    ("```tool\nf(a=open('x'))\n```", "the value of a in f(…)", calls.FENCED),
    ("```tool\nf(a='\0')\n```", "neither JSON nor a call", calls.FENCED),
    ("```tool\nf(a='" + "x" * 20_000 + "')\n```", "write it as JSON", calls.FENCED),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason", "form"), FAULTS, ids=[reason for _, reason, _ in FAULTS])
def test_a_malformed_call_says_what_is_wrong_and_shows_the_form(text, reason, form):
    (fault,) = parse(text).items
    assert reason in fault
    assert fault.endswith(form)
    assert len(fault) < 500
    assert parse(form).items == (Call("tool_name", {"argument": "value"}),)


def test_calls_and_faults_keep_their_order():
    broken = "<tool_call>{</tool_call>"
    texts = {
        f"<tool_call>{ADD_JSON}</tool_call>{broken}<tool_call>{NOW_JSON}</tool_call>": [Call, str, Call],
        f"<tool_call>{ADD_JSON}\n<tool_call>{NOW_JSON}</tool_call>": [str, Call],
        f'[TOOL_CALLS] [{ADD_JSON}, 3, {{"name": ""}}]': [Call, str, str],
    }
    assert {text: [type(item) for item in parse(text).items] for text in texts} == texts


def test_calls_and_characters_of_one_message_are_bounded():
    texts = [
        f"<tool_call>{NOW_JSON}</tool_call>" * 40, "[" + ", ".join([NOW_JSON] * 40) + "]", ";".join([NOW_JSON] * 40),
        "now{}" * 40, "[TOOL_CALLS]" + "[" + ", ".join([NOW_JSON] * 40) + "]",
        "<tool_call>" + "<function=now></function>" * 40 + "</tool_call>", "```tool\n" + "now()\n" * 40 + "```",
    ]  # fmt: skip
    for text in texts:
        found = parse(text).items
        assert 0 < len(found) <= calls.MAX_CALLS + 1
        assert len([item for item in found if isinstance(item, str)]) == 1
    (fault,) = parse(f"<tool_call>{NOW_JSON}</tool_call>" + " " * calls.MAX_CHARACTERS).items
    assert "1,000,000 characters" in fault


PARTS = [
    *("<tool_call>", "<tool_call></tool_call>", "<tool_call><function=", "<parameter=a>x</parameter>", "<think>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]", "<|python_tag|>", "```tool\n", "```tool\n```\n", " ", "\t```", "{", "["),
    *('{"a":', '{"name": "', "a{}", '"', "\\", "</s>", "[{},"),
]


@pytest.mark.parametrize("before", ["", "<tool_call>", "<function=f>", "[TOOL_CALLS]", '{"name": "f", "arguments": {'])
def test_the_work_is_linear(before):
    """Quadratic work over 300,000 characters would take a minute."""
    for part in PARTS:
        text = (before + part * (300_000 // len(part) + 1))[:300_000]
        begun = time.process_time()
        parsed = parse(text)
        assert time.process_time() - begun < 3, part
        assert len(parsed.items) <= calls.MAX_CALLS + 1


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
        *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool\n", "```", "<think>", "</think>", ADD_JSON, ADD_LLAMA),
        *("{", "}", "[", "]", ";", ",", '"', "\\", "\n", '"name":', '"arguments":', "\ud800", "\0", "add(a=1)"),
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=4), max_size=30).map("".join))
def test_any_text_is_answered(text):
    parsed = parse(text)
    assert parsed == parse(text)
    for each in parsed.items:
        assert isinstance(each, str) or (each.name and json.dumps(each.arguments))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)
WRITTEN = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(WRITTEN, st.booleans())
def test_what_templates_write_is_read_back(written, ascii_only):
    expected = tuple(Call(name, arguments) for name, arguments in written)

    def dumps(value):
        return json.dumps(value, ensure_ascii=ascii_only)

    objects = [dumps({"name": name, "arguments": arguments}) for name, arguments in written]
    llama = [dumps({"name": name, "parameters": arguments}) for name, arguments in written]
    texts = [
        "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects), "; ".join(llama),
        f"[TOOL_CALLS] [{', '.join(objects)}]", f"[{', '.join(objects)}]",
        "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in written),
        "".join(f"<function={name}>{dumps(arguments)}</function>" for name, arguments in written),
    ]  # fmt: skip
    for text in texts:
        assert parse(text).items == expected
