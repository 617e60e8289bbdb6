"""The policy reads several turns under the templates of well-known models and trains on what it sampled."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lanes import TwoTurns, fresh_logprobs, trained
from helpers.models import word_tokenizer

from retrain.algorithms.algorithm import samples_of, samples_of_rollout, scores_by_rollout
from retrain.config import parse_dict
from retrain.config.tasks import Data
from retrain.config.training import Sampling
from retrain.data.prompts import Conversation, Renderer, tools_text
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError
from retrain.policy.local import LocalPolicy
from retrain.rollouts.collect import RolloutRequest, collect
from retrain.threads import Workers
from retrain.types import Action, PolicyRef, Problem, Want

_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
_ANSWERS = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_SYSTEM = "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + _TOOLS
_OTHERS = (
    "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
)

QWEN_2_5 = _SYSTEM + "<|im_end|>\n{% for m in messages %}" + _ANSWERS + _OTHERS + "{% endfor %}" + _BEGIN
"""Everything stays as it was said; answers of tools in a row share one user turn."""

QWEN_3 = (
    _SYSTEM
    + "<|im_end|>\n{% set ns = namespace(last=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}"
    + _ANSWERS
    + "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    + "<|im_start|>assistant\n"
    + "{% if '</think>' in m.content and loop.index0 > ns.last %}"
    + "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    + "{{ said }}<|im_end|>\n"
    + _OTHERS
    + "{% endfor %}"
    + _BEGIN
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
"""Drops what was thought before the last question, and the empty thought of a model that shall not think."""

LLAMA_3 = (
    "{% set ns = namespace(tools=tools) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'user' and ns.tools %}{% for t in ns.tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}"
    "{% set ns.tools = none %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Trims what was said; shows the tools in the first question."""

MISTRAL = (
    "<s>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(i=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('whose call?') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
    "{% endfor %}"
)
"""Wants roles to alternate, calls before their answers, with ids; shows the tools before the last question."""

BUNDLED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""That of the model that ships with the package."""

TEMPLATES = {
    "qwen2.5": (QWEN_2_5, "<|im_end|>"), "qwen3": (QWEN_3, "<|im_end|>"), "llama3": (LLAMA_3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"), "bundled": (BUNDLED, "<|end|>"),
}  # fmt: skip
"""With the text of the token that ends an answer."""

ASKED = [{"role": "user", "content": "12+34=?"}]
AGAIN = [{"role": "user", "content": "let me check"}]
TOOL = [{"role": "tool", "name": "add", "content": '{"sum": "46"}'}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.",
                 "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
}  # fmt: skip
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


@pytest.mark.parametrize("template", [
    # The last message alone; the system prompt before the last question, wherever that is.
    "<turn>{{ messages[-1]['content'] }}<turn>",
    "{% for m in messages[1:] %}<turn>{% if loop.last %}{{ messages[0]['content'] }}{% endif %}"
    "{{ m['content'] }}{% endfor %}<turn>",
])  # fmt: skip
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


REF = PolicyRef("run", 5)


def asking(environment: TwoTurns, base) -> list[RolloutRequest]:
    renderer, sampling = Renderer(base.tokenizer, Data()), Sampling(7, 1.0)
    problems = [Problem(f"p{i}", f"{i}2+34=?", "46") for i in range(3)]
    return [RolloutRequest(environment, renderer, problem, REF, 4, sampling, ("turns", i))
            for i, problem in enumerate(problems)]  # fmt: skip


@pytest.fixture
def policy(base, lanes) -> LocalPolicy:
    """A policy that has moved away from its base."""
    policy = LocalPolicy(base, lanes, parse_dict({"model": {"lora_rank": 4}}), ("turns",), Workers())
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 3, rank=4).flat)
    return policy


@pytest.fixture
def engine(base, lanes, policy) -> LocalEngine:
    engine = LocalEngine(base, lanes)
    engine.publish(REF, policy.snapshot())
    return engine


def test_turns_are_sampled_from_streams_of_their_own(base, engine):
    """The same rollouts whatever else is asked for beside them."""
    environment = TwoTurns()
    together = collect(engine, asking(environment, base)).groups
    assert [environment.seeds.count(seed) for seed in dict.fromkeys(environment.seeds)] == [4, 4, 4]  # one per group
    for index, request in enumerate(asking(TwoTurns(), base)):
        (alone,) = collect(engine, [request], max_rows=2).groups
        for mine, theirs in zip(alone.rollouts, together[index].rollouts, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert [turn.observation_ids for turn in mine.turns] == [turn.observation_ids for turn in theirs.turns]
    texts = {rollout.turns[1].action.text for group in together for rollout in group.rollouts}
    assert len(texts) > 6


@pytest.mark.parametrize("name", [*TEMPLATES, "qwen3 without thinking"])
def test_trainer_and_engine_agree_turn_by_turn_under_every_template(name, base, lanes, policy, engine):
    """What the template rewrites, the policy reads anew: then each turn is a sample of its own, as it was seen."""
    rewrites = name not in TEMPLATES
    template, end = TEMPLATES["qwen3" if rewrites else name]
    tokenizer = copy.copy(base.tokenizer)
    tokenizer.chat_template = template
    settings = Data(chat_template_kwargs={"enable_thinking": False}) if rewrites else Data()
    renderer = Renderer(tokenizer, settings)
    requests = [replace(request, renderer=renderer) for request in asking(TwoTurns(), base)]
    groups = collect(engine, requests).groups
    assert len(groups) == 3
    for rollout in (one for group in groups for one in group.rollouts):
        first, second = rollout.turns
        assert second.fresh == rewrites
        samples = samples_of_rollout(rollout)
        assert len(samples) == 1 + rewrites
        for sample in samples:
            assert (sample.versions == np.where(sample.action_mask, 5, -1)).all()
            assert not sample.logprobs[~sample.action_mask].any()
        drawn_T = np.concatenate([sample.logprobs[sample.action_mask] for sample in samples])
        assert drawn_T.tolist() == rollout.logprobs_T.tolist()
        before = [] if rewrites else [*first.observation_ids, *first.action.token_ids]
        for turn, history in ((first, []), (second, before)):
            read = [*history, *turn.observation_ids]
            expected, entropy = fresh_logprobs(base, lanes, policy.adapter, read, turn.action.token_ids, 1.0)
            assert turn.action.logprobs_T == pytest.approx(expected, abs=5e-5)
            assert turn.action.entropy_T == pytest.approx(entropy, abs=2e-4)
        said = [{"role": "assistant", "content": first.action.text}, {"role": "user", "content": "more?"}]
        conversation = [*rollout.prompt.messages, *said]
        assert list(second.messages) == (conversation if rewrites else conversation[-1:])
        written = renderer.text(conversation)
        seen = base.tokenizer.decode([*before, *second.observation_ids], skip_special_tokens=True)
        # The toy's tokenizer has another end token; llama3 and mistral trim what was said, or set it in spaces.
        plain = [text.replace(end, "") for text in (seen, written)]
        if name in ("llama3", "mistral"):
            plain = ["".join(text.split()) for text in plain]
        assert plain[0] == plain[1]
    scores = scores_by_rollout(policy.score(samples_of(groups), frozenset({Want.LOGPROBS})), groups).logprobs
    for rollout, own_T in zip((one for group in groups for one in group.rollouts), scores, strict=True):
        assert own_T == pytest.approx(rollout.logprobs_T, abs=5e-5)
