"""What the policy reads in a conversation of several turns, over chat templates with the habits of well-known ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from chat_templates import TEMPLATES
from toymodels import word_tokenizer

from retrain.config.tasks import Data
from retrain.data.conversation import Conversation
from retrain.data.prompts import Renderer, tools_text
from retrain.errors import ModelError
from retrain.types import Action, Problem

ASKED = [{"role": "user", "content": "12+34=?"}]
AGAIN = [{"role": "user", "content": "let me check"}]
TOOL = [{"role": "tool", "name": "add", "content": '{"sum": "46"}'}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
PROBLEM = Problem("p", "12+34=?", "46")
MARKUP = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>"]
MARKUP += ["<|assistant|>", "<|end|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


def tokenizer(template: str, end: str):
    """A byte-level tokenizer with the markup as tokens of their own."""
    made = word_tokenizer(["12+34=46 let me check"])
    made.add_special_tokens({"additional_special_tokens": MARKUP})
    made.eos_token = end
    made.chat_template = template
    return made


def action(made, text: str, ends: bool = True) -> Action:
    ids = made(text, add_special_tokens=False)["input_ids"] + ([made.eos_token_id] if ends else [])
    return Action(ids, text, np.zeros(len(ids)), None, "stop" if ends else "length")


def begun(made, tools=(), **settings) -> tuple[Conversation, list[int]]:
    renderer = Renderer(made, Data(**settings), tools_prompt="")
    prompt = renderer.prompt(PROBLEM, ASKED, tools)
    return Conversation(renderer, prompt, tools), list(prompt.token_ids)


def whole(made, conversation: Conversation, **settings) -> str:
    tools = {"tools": [ADD]} if conversation.tools else {}
    messages = [dict(message) for message in conversation.messages]
    return made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **tools, **settings)


def read_whole(made, turns, tools=(), **settings) -> tuple[list[int], list[bool], Conversation]:
    """All tokens of a conversation as the policy read and sampled them, and which observations were the whole."""
    conversation, ids = begun(made, tools, **settings)
    fresh = []
    for text, messages in turns:
        said = action(made, text)
        read = conversation.reply(said, messages)
        ids = [*read.token_ids] if read.fresh else [*ids, *said.token_ids, *read.token_ids]
        fresh.append(read.fresh)
    return ids, fresh, conversation


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "bundled"])
@pytest.mark.parametrize("tools", [(), (ADD,)], ids=["plain", "tools"])
def test_what_is_read_is_what_the_template_writes_of_the_whole_conversation(name, tools):
    """Prompt, actions and answers, each made once, one after the other: users, tools, two tools in a row."""
    made = tokenizer(*TEMPLATES[name])
    turns = [("46", AGAIN), (CALL, TOOL), ("let me", [*TOOL, *TOOL]), ("check", AGAIN)]
    ids, fresh, conversation = read_whole(made, turns, tools)
    assert fresh == [False] * 4
    assert made.decode(ids) == whole(made, conversation)
    assert ids == made(whole(made, conversation), add_special_tokens=False)["input_ids"]


def test_a_template_that_wants_calls_before_their_answers():
    """Mistral's: a second answer of a tool is refused behind plain text, so the action is shown as a call."""
    made = tokenizer(*TEMPLATES["mistral"])
    ids, fresh, _ = read_whole(made, [("46", TOOL), ("47", [*TOOL, *TOOL]), ("48", AGAIN)], ())
    assert fresh == [False] * 3
    result = '[TOOL_RESULTS] {"content": "{\\"sum\\": \\"46\\"}", "call_id": "call00000"}[/TOOL_RESULTS]'
    asked = "<s>[INST] 12+34=?[/INST]"
    assert made.decode(ids) == f"{asked}46</s>{result}47</s>{result}{result}48</s>[INST] let me check[/INST]"
    ids, fresh, _ = read_whole(made, [("46", TOOL), ("47", TOOL)], (ADD,))
    assert fresh == [False] * 2
    assert made.decode(ids).count("[AVAILABLE_TOOLS]") == 1
    # With tools, a new question moves the list of them: the policy reads all of it anew ...
    ids, fresh, conversation = read_whole(made, [("46", AGAIN), ("47", [{"role": "user", "content": "check"}])], (ADD,))
    assert fresh == [True, True]
    assert made.decode(ids) == whole(made, conversation)
    # ... which this template refuses of a call that it did not write.
    with pytest.raises(ModelError, match="roles must alternate"):
        read_whole(made, [("46", TOOL), ("47", AGAIN)], (ADD,))


def test_thinking_that_is_dropped_makes_a_new_sequence():
    made = tokenizer(*TEMPLATES["qwen3"])
    thought = "<think>\nlet me\n</think>\n\n46"
    ids, fresh, conversation = read_whole(made, [(thought, TOOL), (thought, TOOL)])
    assert fresh == [False, False]  # thinking stays while tools answer
    assert made.decode(ids).count("let me") == 2
    ids, fresh, conversation = read_whole(made, [(thought, TOOL), (thought, AGAIN), ("check", AGAIN)])
    assert fresh == [False, True, False]
    assert "<think>" not in made.decode(ids)
    assert ids == made(whole(made, conversation), add_special_tokens=False)["input_ids"]
    # The template begins with an empty thought and writes the history without it: each turn is a sequence.
    plain = {"enable_thinking": False}
    ids, fresh, conversation = read_whole(made, [("46", AGAIN), ("47", TOOL)], chat_template_kwargs=plain)
    assert fresh == [True, True]
    assert made.decode(ids) == whole(made, conversation, **plain)
    assert made.decode(ids).count("<think>") == 1


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_end_tokens_are_read_once_and_the_text_of_an_action_changes_nothing(name):
    """Not even markup, or what looks like it."""
    template, end = TEMPLATES[name]
    made = tokenizer(template, end)
    for ends in (True, False):
        read = begun(made)[0].reply(action(made, "46", ends), AGAIN)
        assert made.decode(read.token_ids).startswith(end) == (not ends)
    expected = begun(made)[0].reply(Action([9], "46", np.zeros(1), None, "stop"), AGAIN)
    for text in ("", "  46\n\n", end, f"{end}<|im_start|>user\n", "[INST] x[/INST]", "{{ 7 }}", "@said0x", '"', "</s>"):
        assert begun(made)[0].reply(Action([9], text, np.zeros(1), None, "stop"), AGAIN) == expected


@pytest.mark.parametrize(
    "template",
    [
        # The last message alone; the last answer twice; the system prompt before the last question, wherever that is.
        "<turn>{{ messages[-1]['content'] }}<turn>",
        "{% for m in messages %}<turn>{{ m['content'] }}{{ m['content'] }}{% endfor %}<turn>",
        "{% for m in messages[1:] %}<turn>{% if loop.last %}{{ messages[0]['content'] }}{% endif %}"
        "{{ m['content'] }}{% endfor %}<turn>",
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_read_anew(template):
    made = word_tokenizer(["12+34=46 let me check"])
    made.chat_template = template
    renderer, asked = Renderer(made, Data()), [{"role": "system", "content": "you add"}, *ASKED]
    conversation = Conversation(renderer, renderer.prompt(PROBLEM, asked))
    read = conversation.reply(action(made, "46"), AGAIN)
    assert read.fresh
    assert made.decode(read.token_ids) == whole(made, conversation)


def test_an_environment_may_rewrite_the_conversation():
    made = tokenizer(*TEMPLATES["qwen2.5"])
    conversation, _ = begun(made)
    conversation.reply(action(made, "46"), AGAIN)
    read = conversation.replace([*AGAIN])
    assert read.fresh
    assert made.decode(read.token_ids) == whole(made, conversation)
    assert conversation.messages == AGAIN
    assert not conversation.reply(action(made, "46"), TOOL).fresh


def test_without_a_template_and_with_one_that_refuses():
    made = word_tokenizer(["12+34=46 let me check"])
    made.chat_template = None
    conversation, ids = begun(made)
    assert made.decode(ids) == "12+34=?"
    read = conversation.reply(action(made, "46"), [*AGAIN, *AGAIN])
    assert made.decode(read.token_ids) == "\n\nlet me check\n\nlet me check\n\n"
    made = tokenizer("{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}<turn>", "<end>")
    with pytest.raises(ModelError, match="one at a time") as caught:
        begun(made)[0].reply(action(made, "46"), AGAIN)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bundled", "qwen2.5"])
def test_tools_are_described_whole_also_where_the_template_cannot_show_them(name):
    made = tokenizer(*TEMPLATES[name])
    place = {"type": "object", "properties": {"row": {"type": "integer"}}, "required": ["row"]}
    parameters = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    tool = {"type": "function", "function": {"name": "put", "description": "Put it.", "parameters": parameters}}
    assert json.dumps(parameters) in Renderer(made, Data()).prompt(PROBLEM, ASKED, [tool]).text
    prompt = Renderer(made, Data()).prompt(PROBLEM, ASKED, [ADD])
    assert "Add two numbers." in prompt.text
    assert (tools_text([ADD]) in prompt.text) == (name == "bundled")
    plain = made.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert Renderer(made, Data(), "").prompt(PROBLEM, ASKED).text == plain
    if name == "bundled":
        asked = [{"role": "system", "content": "Be brief."}, *ASKED]
        messages = Renderer(made, Data(), "Call add.").prompt(PROBLEM, asked, [ADD]).messages
        assert messages[0]["content"] == "Be brief.\n\nCall add."


TRL = importlib.util.find_spec("trl")


@pytest.mark.skipif(TRL is None, reason="trl's copies of the original templates are not installed")
@pytest.mark.parametrize("file", ["qwen3", "qwen2_5", "llama3_1", "llama3_2", "qwen3_instruct_2507"])
def test_the_original_templates(file):
    folder = Path(str(TRL.origin)).parent / "chat_templates"
    template = (folder / f"{file}.jinja").read_text(encoding="utf-8")
    made = tokenizer(template, "<|eot_id|>" if "llama" in file else "<|im_end|>")
    for tools in ((), (ADD,)):
        ids, fresh, conversation = read_whole(made, [("46", AGAIN), (CALL, TOOL), ("let me", AGAIN)], tools)
        assert fresh == [False] * 3
        assert ids == made(whole(made, conversation), add_special_tokens=False)["input_ids"]
