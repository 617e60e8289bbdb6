import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.campaigns import run_cli
from helpers.models import word_tokenizer
from transformers import AutoTokenizer

from retrain.config import parse_dict
from retrain.data.examples import Dialogue, ExampleRenderer, load_examples
from retrain.data.prompts import render
from retrain.errors import DataError
from retrain.tokenizer import LightTokenizer, light_tokenizer
from retrain.types import Problem

CHATML = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] | trim }}<end>{% endgeneration %}{% else %}{{ m['content'] | trim }}<end>{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# Like Qwen3's: only the last answer has thinking, an empty one if it has none; a prompt may begin with it.
THINKING = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{% if loop.last %}<think>{{ parts[0].split('<think>')[-1] if parts | length > 1 else '' }}</think>{% endif %}"
    "{{ parts[-1] }}{% else %}{{ m['content'] }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
WITHOUT_END = (
    "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)
TALK = [
    {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "four"},
]  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """A function that writes rows, reads them as examples, and returns the examples with their tokenizer as ``decode``:
    texts of tokens, the trained ones in brackets."""

    def read(rows: list[Any], template: str | None = CHATML, light: bool = True, context: int = 0, **sections: Any):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = word_tokenizer(["What is 1+1? two four the answer is 12", "system user assistant think"])
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "model")
        name = str(tmp_path / "model")
        tokenizer = light_tokenizer(name) if light else AutoTokenizer.from_pretrained(name)
        warmup = {"source": "rows.jsonl", **sections.pop("warmup", {})}
        config = parse_dict({"model": {"model": name}, "warmup": warmup, **sections})
        loaded = load_examples(config, tmp_path, tokenizer, context)

        def shown(example) -> str:
            text, trained = "", False
            for token, is_trained in zip(example.tokens, example.loss_mask, strict=True):
                text += ("[" if is_trained else "]") * (is_trained != trained) + tokenizer.decode([token])
                trained = is_trained
            return text + "]" * trained

        texts = [shown(example) for example in loaded.train]
        return SimpleNamespace(loaded=loaded, texts=texts, tokenizer=tokenizer, config=config)

    return read


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, WITHOUT_END, None])
@pytest.mark.parametrize("data", [
    {},
    {"system_prompt": "Be brief."},
    {"prompt_template": "Solve: {prompt} Answer:"},
    {"chat_template_kwargs": {"enable_thinking": False}},
])  # fmt: skip
def test_a_prompt_has_the_tokens_that_training_asks_with(source, template, data):
    read = source(
        [{"prompt": "1+1=?", "completion": " two "}, {"prompt": TALK[:3], "completion": "four"}], template, data=data
    )
    for example, prompt in zip(read.loaded.train, ["1+1=?", tuple(TALK[:3])], strict=True):
        asked = render(Problem("x", prompt, ""), read.tokenizer, read.config.data).token_ids
        assert example.tokens[: len(asked)] == asked
        assert not any(example.loss_mask[: len(asked)])
        trained = [token for token, mask in zip(example.tokens, example.loss_mask, strict=True) if mask]
        assert example.loss_mask[len(asked)]
        assert read.tokenizer.decode([trained[-1]]) == "<end>"


@pytest.mark.parametrize(("rows", "template", "texts"), [
    ([{"prompt": "1+1=?", "completion": " two "}], CHATML,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\n[two<end>]\n"]),
    ([{"prompt": "1+1=?", "completion": " two"}], None, ["1+1=?[ two<end>]"]),
    ([{"messages": TALK}], CHATML,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\n[two<end>]\n<turn>user\n2+2=?<end>\n<turn>assistant\n[four<end>]\n"]),
    ([{"messages": TALK}], MARKED,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\n[two<end>]\n<turn>user\n2+2=?<end>\n<turn>assistant\n[four<end>]\n"]),
    ([{"messages": TALK}], None, ["1+1=?[two<end>]\n\n2+2=?\n\n[four<end>]"]),
    # The prompt's own answers are not trained on.
    ([{"prompt": TALK[:3], "completion": TALK[3:]}], CHATML,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\ntwo<end>\n<turn>user\n2+2=?<end>\n<turn>assistant\n[four<end>]\n"]),
    # An answer that the template renders otherwise when more follows: two sequences.
    ([{"messages": TALK}], THINKING,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\n[<think></think>two<end>]\n",
      "<turn>user\n1+1=?<end>\n<turn>assistant\ntwo<end>\n<turn>user\n2+2=?<end>\n<turn>assistant\n"
      "[<think></think>four<end>]\n"]),
    ([{"prompt": "1+1=?", "completion": "<think>1, 2</think>two"}], THINKING,
     ["<turn>user\n1+1=?<end>\n<turn>assistant\n[<think>1, 2</think>two<end>]\n"]),
    # A template without an end token: the policy would never stop.
    ([{"messages": TALK}], WITHOUT_END,
     ["<turn>1+1=?<turn>[two<end>]", "<turn>1+1=?<turn>two<turn>2+2=?<turn>[four<end>]"]),
])  # fmt: skip
@pytest.mark.parametrize("light", [True, False])
def test_answers_are_trained_on_up_to_their_end_token(source, rows, template, texts, light):
    assert source(rows, template, light).texts == texts


def test_only_the_last_answer_or_without_thinking_in_the_prompt(source):
    last = source([{"messages": TALK}], warmup={"train_on": "last"})
    assert last.texts == [
        "<turn>user\n1+1=?<end>\n<turn>assistant\ntwo<end>\n<turn>user\n2+2=?<end>\n<turn>assistant\n[four<end>]\n"
    ]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert source([{"messages": TALK[:2]}], THINKING, data=off).texts == [
        "<turn>user\n1+1=?<end>\n<turn>assistant\n<think></think>[two<end>]\n"
    ]
    system = source([{"messages": TALK[:2]}], data={"system_prompt": "Be brief.", "prompt_template": "Solve {prompt}"})
    assert system.texts == ["<turn>system\nBe brief.<end>\n<turn>user\n1+1=?<end>\n<turn>assistant\n[two<end>]\n"]


def test_the_generation_block_of_a_template_says_what_is_trained(source):
    template = MARKED.replace("{% generation %}", "<think></think>{% generation %}")
    assert source([{"messages": TALK[:2]}], template).texts == [
        "<turn>user\n1+1=?<end>\n<turn>assistant\n<think></think>[two<end>]\n"
    ]


USER, ANSWER = TALK[:2]
FAULTY = [
    ({"prompt": "1+1=?"}, 'has no "completion", only "prompt": write {"prompt": "…", "completion": "…"} or'),
    ({"completion": "two"}, 'has no "prompt", only "completion"'),
    ({"text": "two", "prompt": None}, 'has no "prompt", only "text"'),
    ({}, 'has no "prompt", only nothing'),
    ({"messages": TALK, "completion": "two"}, 'has "messages" and "completion": keep one of the two forms'),
    ({"prompt": "1+1=?", "completion": " "}, '"completion" is empty: write its text, or remove the row'),
    ({"prompt": "", "completion": "two"}, '"prompt" is empty'),
    ({"prompt": "1+1=?", "completion": 2}, "\"completion\" is '2' (int), not a text or a list of messages"),
    ({"prompt": [], "completion": "2"}, "\"prompt\" is '[]' (list), not a text or a list of messages"),
    ({"prompt": [USER, ANSWER], "completion": "2"}, '"prompt" ends with an assistant message: move it to "completion"'),
    ({"prompt": [USER], "completion": [USER, ANSWER]}, '"completion" begins with a user message: move it to "prompt"'),
    ({"prompt": [USER], "completion": [ANSWER, USER]}, '"completion" ends with a user message'),
    ({"messages": "Hello"}, "\"messages\" is 'Hello' (str), not a list of messages"),
    ({"messages": ["Hello"]}, "\"messages\", message 1 is 'Hello' (str), not a message: write"),
    ({"messages": [USER]}, '"messages" ends with a user message: end with the assistant\'s, which is trained on'),
    ({"messages": [ANSWER]}, '"messages" begins with an assistant message: begin with what it answers'),
    ({"messages": [USER, {"role": "bot", "content": "2"}]}, "message 2 has the role 'bot' (str): write one of system,"),
    ({"messages": [{"content": "2"}, ANSWER]}, "message 1 has the role null: write one of"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2 is null, not a text"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2 is empty"),
    ({"messages": [USER, {"role": "assistant", "content": [{"text": "2"}]}]}, "not a text: write a text"),
    ({"messages": [USER, {"role": "tool", "content": "2"}, ANSWER]}, "message 2 is a call or an answer of a tool"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "message 2 is a call or an answer of a tool"),
    ({"prompt": "1+1=?", "completion": "\ud800"}, '"completion" holds an unpaired surrogate'),
]


@pytest.mark.parametrize(("row", "message"), FAULTY)
def test_a_faulty_row_is_named_with_its_line_key_and_fix(source, row, message):
    with pytest.raises(DataError) as caught:
        source([{"messages": TALK}, row])
    assert str(caught.value).startswith("rows.jsonl:2  ")
    assert message in str(caught.value)


@pytest.mark.parametrize(("template", "message"), [
    (CHATML.replace("<turn>assistant\n", "<turn>assistant\n<think>"),
     "ends the prompt with '<think>' and begins the answer with 'two<end>\\n'"),
    (CHATML.replace("m['content'] | trim", "m['text']"), "leaves out the text of the answer, and shows '<end>"),
    ("{{ raise_exception('only one role') }}", "refuses the conversation: only one role: remove the row"),
])  # fmt: skip
def test_a_template_that_does_not_fit_is_an_error_of_the_row(source, template, message):
    with pytest.raises(DataError) as caught:
        source([{"prompt": "1+1=?", "completion": "two"}], template)
    assert str(caught.value).startswith("rows.jsonl:1  the ")
    assert message in str(caught.value)


def test_over_long_rows_are_an_error_or_left_out(source):
    rows = [{"prompt": "1+1=?", "completion": "two"}, {"prompt": "1+1=?", "completion": "two " * 40}]
    lengths = [len(example.tokens) for example in source(rows).loaded.train]
    short = {"max_tokens": lengths[0]}
    with pytest.raises(DataError, match=f"^rows.jsonl:2  the example has {lengths[1]} tokens, more than {lengths[0]} "):
        source(rows, warmup=short)
    with pytest.raises(DataError, match=f"has a context of {lengths[0]} tokens"):
        source(rows, context=lengths[0])
    skipped = source(rows, warmup=short, data={"long_prompts": "skip"})
    assert skipped.texts == source(rows).texts[:1]
    assert skipped.loaded.notes[0].startswith(f"1 of 2 warm-up examples left out for more than {lengths[0]} tokens")
    with pytest.raises(DataError, match=r"2 of 2 warm-up examples left out .*; nothing is left"):
        source(rows, warmup={"max_tokens": 3}, data={"long_prompts": "skip"})


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING, None])
def test_a_check_finds_the_faults_of_reading_and_tokenises_long_rows_only(tmp_path, template):
    tokenizer = word_tokenizer(["What is 1+1? two four the answer is 12", "system user assistant think"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    texts, dialogues = [], [Dialogue(f"rows.jsonl:{i}", TALK[:2] if i else TALK * 2, 0) for i in range(3)]

    class Counting(LightTokenizer):
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            texts.append(text)
            return super().__call__(text, add_special_tokens)

    light = light_tokenizer(str(tmp_path))
    counting = Counting(light.tokenizer, light.chat_template, light.special_tokens_map)

    def fault(limit: int, mode: str, read: Callable[[ExampleRenderer], object]) -> str:
        settings = {"source": "rows.jsonl", "max_tokens": limit}
        config = parse_dict({"model": {"model": str(tmp_path)}, "warmup": settings, "data": {"long_prompts": mode}})
        renderer = ExampleRenderer(config, counting, 0)
        texts.clear()
        try:
            read(renderer)
        except DataError as error:
            return str(error)
        return ""

    for limit, mode in itertools.product((*range(1, 60), 1000), ("error", "skip")):
        expected = fault(limit, mode, lambda renderer: renderer.examples("rows.jsonl", dialogues, []))
        assert fault(limit, mode, lambda renderer: renderer.check("rows.jsonl", dialogues)) == expected
    assert not texts
    assert fault(1, "error", lambda renderer: renderer.check("rows.jsonl", dialogues)).startswith("rows.jsonl:0  the ")


def test_what_is_held_out_is_not_trained_on(source, tmp_path):
    rows = [{"prompt": f"{i}+1=?", "completion": "two"} for i in range(4)]
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[1]) + "\n")
    first, second, *others = source(rows).loaded.train
    loaded = source(rows, warmup={"eval_source": "held.jsonl"}).loaded
    assert (loaded.train, loaded.held_out) == ([first, *others], [second])
    assert loaded.notes == ("1 of 4 warm-up examples left out: they are held out",)
    with pytest.raises(DataError, match="every example is also held out"):
        source(rows[1:2], warmup={"eval_source": "held.jsonl"})


def test_other_sources_give_the_same_examples(source, tmp_path, import_path):
    rows = [{"prompt": "1+1=?", "completion": "two"}, {"prompt": "2+2=?", "completion": "four, or so"}]
    expected = source(rows).texts
    (tmp_path / "rows.csv").write_text('prompt,completion\n1+1=?,two\n2+2=?,"four, or so"\n')
    import_path.insert(0, str(tmp_path))
    (tmp_path / "my_examples.py").write_text(f"def make(split):\n    return {rows} if split == 'train' else []\n")
    assert source(rows, warmup={"source": "rows.csv"}).texts == expected
    assert source(rows, warmup={"source": "my_examples:make"}).texts == expected
    with pytest.raises(DataError, match="data source 'my_examples:make' holds no examples"):
        source(rows, warmup={"source": "my_examples:make", "split": "test"})
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    talks = [{"messages": None, **row} for row in rows]  # a table has every column in every row
    parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "rows.parquet")
    assert source(rows, warmup={"source": "rows.parquet"}).texts == expected
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n")
    assert source(rows, warmup={"source": "./hub"}).texts == source([{"messages": [USER, ANSWER]}]).texts
    with pytest.raises(DataError, match=r"has no split \"dev\": set \[warmup\] split and eval_split to some of"):
        source(rows, warmup={"source": "./hub", "split": "dev"})


GOOD = '{"prompt": "1+1=?", "completion": "2"}'
CHECKED = [
    ('{"prompt": "1+1=?", "answer": "2"}', "", 'w.toml:4  warmup.source  rows.jsonl:2  has no "completion"'),
    ('{"prompt": "1+1=?", "completion": "2"', "", "w.toml:4  warmup.source  rows.jsonl:2  is not JSON"),
    (GOOD, "max_tokens = 5\n", "rows.jsonl:1  the example has 9 tokens, more than 5"),
    (GOOD, 'eval_source = "gone.jsonl"\n',
     'w.toml:5  warmup.eval_source  is "gone.jsonl": no such file'),
]  # fmt: skip


@pytest.mark.parametrize(("line", "keys", "message"), CHECKED)
def test_check_finds_faulty_rows(tmp_path: Path, line: str, keys: str, message: str):
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{line}\n")
    text = '[model]\nmodel = "tiny-reasoner"\n[warmup]\nsource = "rows.jsonl"\n' + keys
    (tmp_path / "w.toml").write_text(text)
    result = run_cli("check", str(tmp_path / "w.toml"))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
