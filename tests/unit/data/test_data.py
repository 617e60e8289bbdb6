"""Data sources, the held-out split, and prompts as tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mixed_cases import BASE, completions_of, launch_file, rows_of, runs_of, toy_file

from retrain.config.tasks import Data
from retrain.data import Dataset, content_hash, load_data
from retrain.data.prompts import conversation, render
from retrain.errors import DataError, ModelError, PluginError
from retrain.files import append_jsonl, read_json
from retrain.policy.adapter_io import read_adapter
from retrain.types import Problem


def section(source: str, **keys: Any) -> Data:
    """[data] as it is where nothing has looked at the source yet."""
    columns = {"prompt_column": "prompt", "answer_column": "answer"}
    return Data().model_copy(update={"source": source, "size": 500, **columns, **keys})


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=?", "answer": i + 1, "subject": f"s{i // 10}"} for i in range(start, start + count)]


def load(path: Path, heldout: int = 0, max_examples: int | None = None, seed: int = 0, **keys: Any) -> Dataset:
    return load_data(section(path.name, **keys), heldout, max_examples, seed, base_dir=path.parent)


def prompts(problems) -> list[str]:
    return [problem.prompt for problem in problems]


def test_a_jsonl_file_becomes_problems(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "1+1=?", "answer": "2", "tag": "easy", "source": "book"}\n'
        b"\n"
        b'{"prompt": [{"role": "user", "content": "2+2=?"}], "answer": 4, "tag": ["easy", "even"]}\r\n'
        b'{"prompt": "1/2 in decimals?", "answer": 0.5, "tag": null}'
    )
    data = load(path, tags_column="tag")
    first, second, third = data.train
    row = {"prompt": "1+1=?", "answer": "2", "tag": "easy", "source": "book"}
    assert first == Problem("sums.jsonl:1", "1+1=?", "2", ("easy",), row)
    assert second.id == "sums.jsonl:3"
    assert second.prompt == ({"role": "user", "content": "2+2=?"},)
    assert (second.answer, second.tags) == ("4", ("easy", "even"))
    assert (third.answer, third.tags) == ("0.5", ())
    assert data.heldout == []
    assert data.notes == ()


def test_a_parquet_file_becomes_problems(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {
            "prompt": ["1+1=?", "2+2=?"],
            "answer": [2, 4],
            "tags": [["a", "b"], []],
            "when": pyarrow.array([0, 1], pyarrow.timestamp("s")),
        }
    )
    parquet.write_table(table, tmp_path / "sums.parquet")
    one, two = load(tmp_path / "sums.parquet", tags_column="tags").train
    assert (one.id, one.prompt, one.answer, one.tags) == ("sums.parquet:1", "1+1=?", "2", ("a", "b"))
    assert two.tags == ()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "broken.parquet")


def test_a_csv_file_becomes_problems_with_values_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_bytes(
        b'\xef\xbb\xbfprompt,answer,tag\r\n"1+1, as a digit?",2,easy\r\n\r\n'
        b'"two\nlines ""quoted""",007,\r\nlast?,"1,450",x\r\n'
    )
    first, second, third = load(path, tags_column="tag").train
    assert first == Problem(
        "sums.csv:2", "1+1, as a digit?", "2", ("easy",), {"prompt": "1+1, as a digit?", "answer": "2", "tag": "easy"}
    )
    assert (second.id, second.prompt, second.answer) == ("sums.csv:4", 'two\nlines "quoted"', "007")
    assert (third.id, third.answer) == ("sums.csv:6", "1,450")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"prompt,answer\n1?\n", r"sums.csv:2  has 1 values, and the first line names 2 columns"),
        (b'prompt,answer\n1?,1\n"2?,2\n', "sums.csv:3  is not CSV: unexpected end of data"),
        (b"prompt,answer\n1?,1\n\xff,2\n", "sums.csv:3  is not UTF-8"),
        (b"prompt,prompt\n1?,1\n", 'names the column "prompt" twice'),
        (b"prompt,result\n1?,1\n", 'sums.csv:2  has no column "answer"'),
        (b"", "holds no problems"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_told_with_its_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "sums.csv").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load(tmp_path / "sums.csv")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not JSON: "),
        (b"[1]", "is not an object"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b"[" * 200_000, "nested too deeply|is not JSON"),
        (b'{"question": "1?", "answer": "1"}', r'no column "prompt": set \[data\] prompt_column .*question, answer'),
        (b'{"prompt": "1?", "solution": "1"}', r'no column "answer": set \[data\] answer_column'),
        (b'{"prompt": "", "answer": "1"}', 'column "prompt" is empty'),
        (b'{"prompt": 3, "answer": "1"}', 'column "prompt" is .*not a text or a list of chat messages'),
        (b'{"prompt": [{"role": "user"}], "answer": "1"}', "a message is not"),
        (b'{"prompt": [{"role": "assistant", "content": "1"}], "answer": "1"}', "nothing is left to answer"),
        (b'{"prompt": "1?", "answer": true}', "True.*not a text or a number"),
        (b'{"prompt": "1?", "answer": NaN}', "nan.*not a text or a number"),
        (b'{"prompt": "1?", "answer": ["1"]}', "not a text or a number"),
        (b'{"prompt": "1?", "answer": ""}', 'column "answer" is empty: no completion could ever be right'),
        (b'{"prompt": "1?\\ud800", "answer": "1"}', "surrogate"),
        (b'{"prompt": "1?", "answer": "1", "tag": {"a": 1}}', "not a tag or a list of tags"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(b'{"prompt": "0?", "answer": "0"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=reason) as caught:
        load(path, tags_column="tag")
    assert str(caught.value).startswith("sums.jsonl:3 ")
    assert len(str(caught.value)) < 400


def test_a_tags_column_that_no_row_has_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", [{"prompt": f"{i}?", "answer": f"{i}", "level": 1} for i in range(9)])
    with pytest.raises(DataError, match=r'no column "subject": set \[data\] tags_column .*prompt, answer, level'):
        load(path, tags_column="subject")


def test_no_answers_at_all_is_a_data_set_for_a_judge(tmp_path: Path) -> None:
    path = write(tmp_path / "poems.jsonl", [{"prompt": "A poem.", "answer": ""}, {"prompt": "An ode.", "answer": None}])
    assert [problem.answer for problem in load(path).train] == ["", ""]


def test_a_missing_file_is_an_error_with_the_places_tried(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file") as caught:
        load(tmp_path / "absent.jsonl")
    assert str(tmp_path) in str(caught.value)
    assert str(Path.cwd()) in str(caught.value)


def test_the_held_out_split_depends_on_the_prompts_alone(tmp_path: Path) -> None:
    forward = load(write(tmp_path / "a.jsonl", rows(1000)), heldout=50)
    backward = load(write(tmp_path / "b.jsonl", rows(1000)[::-1]), heldout=50, seed=9)
    assert prompts(forward.heldout) == prompts(backward.heldout)
    assert len(forward.heldout) == 50
    assert set(prompts(forward.train)).isdisjoint(prompts(forward.heldout))
    assert 850 < len(forward.train) < 950  # a tenth is held out, whether or not it is all evaluated
    fewer = load(tmp_path / "a.jsonl", heldout=10)
    assert prompts(fewer.heldout) == prompts(forward.heldout)[:10]
    assert prompts(fewer.train) == prompts(forward.train)
    grown = load(write(tmp_path / "c.jsonl", rows(1200)), heldout=50)
    assert set(prompts(grown.train)).isdisjoint(prompts(forward.heldout))
    subjects = {problem.metadata["subject"] for problem in forward.heldout}
    assert len(subjects) > 20  # not the first subject of a sorted file


def test_equal_prompts_land_on_the_same_side(tmp_path: Path) -> None:
    spaced = [row["prompt"].replace("+", "  + ") for row in rows(200)]
    twice = [{"prompt": prompt, "answer": "1"} for text in spaced for prompt in (text, f" {text}  ")]
    data = load(write(tmp_path / "twice.jsonl", twice), heldout=1000, eval_fraction=0.5)
    train, heldout = ([" ".join(prompt.split()) for prompt in prompts(part)] for part in (data.train, data.heldout))
    assert set(train).isdisjoint(heldout)
    assert len(set(heldout)) == len(heldout)  # each counts once in an evaluation
    assert any("asks for more" in note for note in data.notes)


def test_tiny_files_still_hold_something_out_and_train_on_something(tmp_path: Path) -> None:
    for count in range(2, 12):
        for fraction in (0.01, 0.5, 0.99):
            data = load(write(tmp_path / "tiny.jsonl", rows(count)), heldout=5, eval_fraction=fraction)
            assert data.train
            assert data.heldout
    one = write(tmp_path / "one.jsonl", rows(1))
    assert len(load(one).train) == 1
    with pytest.raises(DataError, match=r"\[evaluation\] problems = 0"):
        load(one, heldout=5)


def test_an_evaluation_file_is_held_out_and_its_problems_are_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", rows(30))
    write(tmp_path / "test.jsonl", rows(10, start=25))
    data = load(path, heldout=3, eval_source="test.jsonl")
    assert len(data.train) == 25
    assert len(data.heldout) == 3
    assert data.notes == ("5 of 30 training problems left out: they are held out",)
    assert data.heldout[0].id.startswith("test.jsonl:")
    with pytest.raises(DataError, match="nothing is left"):
        load(path, heldout=3, eval_source="train.jsonl")


def test_max_examples_samples_the_whole_file_unless_it_is_not_shuffled(tmp_path: Path) -> None:
    path = write(tmp_path / "sorted.jsonl", rows(500))
    sample = prompts(load(path, max_examples=50).train)
    assert len(sample) == 50
    assert sample == sorted(sample, key=lambda prompt: int(prompt.split("+")[0]))
    assert len({int(prompt.split("+")[0]) // 100 for prompt in sample}) == 5
    assert sample == prompts(load(path, max_examples=50).train)
    assert sample != prompts(load(path, max_examples=50, seed=1).train)
    assert prompts(load(path, max_examples=50, shuffle=False).train) == prompts(load(path).train)[:50]
    assert len(load(path, max_examples=1000).train) == 500


def test_the_content_hash_is_of_prompts_answers_and_tags(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(20))
    same = write(tmp_path / "b.jsonl", [{**row, "extra": 1} for row in rows(20)])
    assert load(path).content_hash == load(same).content_hash == load(path, seed=3).content_hash
    assert len(load(path).content_hash) == 64
    base = Problem("1", "p", "a", ("t",))
    variants = [
        ([base], []),
        ([], [base]),
        ([base, base], []),
        ([base], [base]),
        ([Problem("1", "q", "a", ("t",))], []),
        ([Problem("1", "p", "b", ("t",))], []),
        ([Problem("1", "p", "a", ())], []),
        ([Problem("1", ({"role": "user", "content": "p"},), "a", ("t",))], []),
    ]
    assert len({content_hash(train, heldout) for train, heldout in variants}) == len(variants)
    assert content_hash([Problem("2", "p", "a", ("t",), {"m": 1})], []) == content_hash([base], [])


PLUGIN = """
from retrain.types import Problem

def with_split(split):
    return [{"prompt": f"{split} {i}", "answer": str(i)} for i in range(6 if split == "train" else 3)]

def one_list():
    return (Problem(str(i), f"q{i}", str(i)) for i in range(50))

def wrong_type(): return "abc"
def wrong_item(): return [1, 2]
def bad_row(): return [{"prompt": "x"}]
def empty(): return []
def raises(): raise KeyError("my own bug")
def silent(): return [Problem("a", "", "1")]
value = 3
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_problems.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_problems", raising=False)
    return tmp_path


def test_a_function_can_be_a_source(plugin: Path) -> None:
    data = load_data(section("my_problems:with_split"), 10, base_dir=plugin)
    assert prompts(data.train) == [f"train {i}" for i in range(6)]
    assert sorted(prompts(data.heldout)) == [f"test {i}" for i in range(3)]
    data = load_data(section("my_problems:one_list", eval_fraction=0.3), 10, base_dir=plugin)
    assert len(data.heldout) == 10
    assert set(prompts(data.train)).isdisjoint(prompts(data.heldout))


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        ("my_problems:wrong_type", PluginError, "returned str, not a list of problems"),
        ("my_problems:wrong_item", PluginError, "returned int as item 1"),
        ("my_problems:bad_row", DataError, 'my_problems:bad_row:train:1  has no column "answer"'),
        ("my_problems:empty", DataError, "returned no problems"),
        ("my_problems:raises", KeyError, "my own bug"),
        ("my_problems:silent", DataError, "my_problems:silent:train:1 .* is empty"),
        ("my_problems:absent", PluginError, "has no function 'absent'"),
        ("my_problems:value", PluginError, "has no function 'value'"),
        ("no_such_module_here:f", PluginError, "no module 'no_such_module_here'"),
    ],
)
def test_a_function_that_is_no_source_is_named(plugin: Path, function: str, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        load_data(section(function), 0, base_dir=plugin)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders named like the hub's repositories in the current directory: ``datasets`` reads those first."""
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    return tmp_path


def publish(folder: Path, files: dict[str, list[dict[str, str]]]) -> None:
    """A repository with one configuration for each prefix of ``<configuration>-<split>.jsonl``."""
    folder.mkdir(parents=True)
    names = sorted({name.partition("-")[0] for name in files})
    header = ["---", "configs:"]
    for name in names:
        header += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            write(folder / f"{name}-{split}.jsonl", files[f"{name}-{split}"])
            header += [f"  - split: {split}", f"    path: {name}-{split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*header, "---", ""]), encoding="utf-8")


def test_gsm8k_through_datasets(hub: Path) -> None:
    publish(
        hub / "openai" / "gsm8k",
        {
            "main-train": [{"question": f"train {i}?", "answer": f"So.\n#### {i},000"} for i in range(1, 6)],
            "main-test": [{"question": f"test {i}?", "answer": f"So.\n#### {i}"} for i in range(3)]
            + [{"question": "train 1?", "answer": "#### 1"}],
        },
    )
    data = load_data(section("gsm8k"), 10)
    assert prompts(data.train) == [f"train {i}?" for i in range(2, 6)]
    assert (data.train[0].id, data.train[0].answer) == ("gsm8k/train:2", "2000")
    assert len(data.heldout) == 4
    assert len(data.notes) == 2


def test_math_through_datasets(hub: Path) -> None:
    from retrain.data.sources import HUB

    files = {}
    for name in HUB["math"].configurations:
        for split in ("train", "test"):
            row = {"problem": f"{name} {split}?", "solution": r"It is $\boxed 5$.", "type": name, "level": "Level 1"}
            files[f"{name}-{split}"] = [row]
    publish(hub / "EleutherAI" / "hendrycks_math", files)
    data = load_data(section("math"), 3)
    assert len(data.train) == 7
    assert {problem.answer for problem in data.train} == {"5"}
    assert data.train[0].tags == ("algebra", "Level 1")
    assert len(data.heldout) == 3


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and strict %}{{ raise_exception('no system role') }}"
    "{% endif %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A real fast tokenizer that knows a few words and adds a beginning token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "[system]", "[user]", "[assistant]", "1+1=?", "Be", "brief.", "boxed"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", bos_token="<s>")


def test_a_problem_goes_through_the_chat_template(tokenizer) -> None:
    tokenizer.chat_template = TEMPLATE
    data = section("x", system_prompt="Be brief.", prompt_template=r"{prompt} \boxed{}")
    prompt = render(Problem("p", "1+1=?", "2"), tokenizer, data)
    assert prompt.text == r"[system] Be brief. [user] 1+1=? \boxed{} [assistant]"
    assert prompt.token_ids == (2, 6, 7, 3, 5, 0, 4)  # no second beginning token: the template has the say
    shots = (
        {"role": "user", "content": "0+0=?"},
        {"role": "assistant", "content": "0"},
        {"role": "user", "content": "1+1=?"},
    )
    messages = conversation(Problem("p", shots, "2"), section("x", prompt_template="Solve: {prompt}"))
    assert [message["content"] for message in messages] == ["0+0=?", "0", "Solve: 1+1=?"]
    assert shots[-1]["content"] == "1+1=?"
    tokenizer.chat_template = None  # the text is plain and begins as the tokenizer wants
    prompt = render(Problem("p", "1+1=?", "2"), tokenizer, section("x", system_prompt="Be brief."))
    assert (prompt.text, prompt.token_ids) == ("Be brief.\n\n1+1=?", (1, 6, 7, 5))


def test_a_template_that_refuses_the_system_prompt_or_renders_nothing_is_an_error(tokenizer) -> None:
    tokenizer.chat_template = "{% set strict = true %}" + TEMPLATE
    with pytest.raises(ModelError, match=r"no system role: leave \[data\] system_prompt out"):
        render(Problem("p", "1+1=?", "2"), tokenizer, section("x", system_prompt="Be brief."))
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match="has no tokens"):
        render(Problem("p", "1+1=?", "2"), tokenizer, section("x"))


def test_problems_are_shuffled_by_default_and_by_seed(mixed_campaign, silent_campaign):
    """Data never shuffled: the first batches are all of one subject."""
    assert read_json(mixed_campaign / "out/config.json")["data"]["shuffle"]
    orders = {}
    for seed in (1, 2):
        rows = completions_of(runs_of(mixed_campaign / "out")[BASE, seed])
        orders[seed] = [row["prompt"] for row in rows if row["sample"] == 0]
        assert len(orders[seed]) == len(set(orders[seed])) == 9  # no problem twice within an epoch
        assert {prompt.split()[0] for prompt in orders[seed]} == {"algebra", "counting"}
    assert orders[1] != orders[2]
    in_order = completions_of(runs_of(silent_campaign / "out")[0, 1])
    assert [row["prompt"].split(":")[0] for row in in_order if row["sample"] == 0] == [f"algebra {i}" for i in range(9)]


def test_two_problems_fill_a_batch_of_five(toy_home, tmp_path):
    """Prompts that are fewer than a batch train zero steps and report success."""
    append_jsonl(tmp_path / "two.jsonl", [{"prompt": f"{i} + 2 = ?", "answer": "x"} for i in range(2)])
    path = toy_file(toy_home, tmp_path / "two.toml", reward="even")
    outcome = launch_file(path, tmp_path / "out", f'data.source="{tmp_path}/two.jsonl"', "training.batch_size=5")
    assert outcome.exit_status == 0
    rows = rows_of(tmp_path / "out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 and row["num_datums"] > 0 for row in rows)
    assert len(completions_of(tmp_path / "out")) == 3 * 5 * 4
    assert any(bool(b.any()) for _, b in read_adapter(tmp_path / "out/final").tensors.values())
