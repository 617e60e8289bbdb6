import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import BASE, completions_of, rows_of, run_cli, runs_of, toy_file, train

from campaigns import grade_school
from retrain.config.evaluation import HeldOut
from retrain.config.tasks import Data, RewardSection
from retrain.config.training import Sampling
from retrain.data import Dataset, content_hash, load_data
from retrain.data.prompts import conversation, render
from retrain.data.sources import HUB
from retrain.errors import DataError, ModelError, PluginError
from retrain.files import append_jsonl, read_json
from retrain.policy.adapter_io import read_adapter
from retrain.rewards import build_grader
from retrain.types import Problem

GSM8K = [
    {"question": "Janet sells 9 eggs for $2 each?", "answer": "9 * 2 = $<<9*2=18>>18.\n#### 18"},
    {"question": "A robe takes 2 bolts and half that?", "answer": "2/2=<<2/2=1>>1\n2+1=<<2+1=3>>3\n#### 3"},
    {"question": "How much profit?", "answer": "So it was 1,000 * 70 = <<70*1000=70000>>70,000\n#### 70,000"},
]
MATH = [
    {"problem": "What is $1/2+1/4$?", "level": "Level 1", "type": "Algebra", "solution": r"We get $\boxed{\frac34}$."},
    {"problem": "How many?", "level": "Level 2", "type": "Algebra", "solution": r"So $n = \boxed{12}$."},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(count: int, start: int = 0, word: str = "") -> list[dict[str, Any]]:
    return [{"prompt": f"{word}{i}+1=?", "answer": i + 1} for i in range(start, start + count)]


def load(source: Path | str, heldout: int = 0, max_examples: int | None = None, seed: int = 0, **keys: Any) -> Dataset:
    data = Data(source=str(source), **keys)
    return load_data(data, [held_out(heldout, data)], max_examples, seed)


def held_out(problems: int, data: Data) -> HeldOut:
    return HeldOut("heldout", problems, 1, Sampling(1, 0.0), data)


def prompts(problems) -> list[str]:
    return [problem.prompt for problem in problems]


def test_a_jsonl_file_becomes_problems(tmp_path):
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
    assert (data.heldout, data.notes) == ([], ())


def test_a_parquet_file_becomes_problems(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    when = pyarrow.array([0, 1], pyarrow.timestamp("s"))
    columns = {"prompt": ["1+1=?", "2+2=?"], "answer": [2, 4], "tags": [["a", "b"], []], "when": when}
    parquet.write_table(pyarrow.table(columns), tmp_path / "sums.parquet")
    one, two = load(tmp_path / "sums.parquet", tags_column="tags").train
    assert (one.id, one.prompt, one.answer, one.tags) == ("sums.parquet:1", "1+1=?", "2", ("a", "b"))
    assert two.tags == ()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        load(tmp_path / "broken.parquet")


def test_a_csv_file_becomes_problems_with_values_as_they_are_written(tmp_path):
    path = tmp_path / "sums.csv"
    path.write_bytes(
        b'\xef\xbb\xbfprompt,answer,tag\r\n"1+1, as a digit?",2,easy\r\n\r\n'
        b'"two\nlines ""quoted""",007,\r\nlast?,"1,450",x\r\n'
    )
    first, second, third = load(path, tags_column="tag").train
    row = {"prompt": "1+1, as a digit?", "answer": "2", "tag": "easy"}
    assert first == Problem("sums.csv:2", "1+1, as a digit?", "2", ("easy",), row)
    assert (second.id, second.prompt, second.answer) == ("sums.csv:4", 'two\nlines "quoted"', "007")
    assert (third.id, third.answer) == ("sums.csv:6", "1,450")


def test_files_of_gsm8k_and_math_are_read_as_they_are(tmp_path):
    data = load(write(tmp_path / "train.jsonl", GSM8K))
    assert [problem.answer for problem in data.train] == ["18", "3", "70000"]
    assert data.train[0].prompt == GSM8K[0]["question"]
    assert data.train[0].metadata["solution"].endswith("#### 18")
    data = load(write(tmp_path / "math.jsonl", MATH), tags_column="level")
    found = [(problem.answer, problem.tags) for problem in data.train]
    assert found == [(r"\frac34", ("Level 1",)), ("12", ("Level 2",))]
    math500 = write(tmp_path / "math500.jsonl", [{**MATH[0], "answer": r"\frac{3}{4}"}])
    assert load(math500).train[0].answer == r"\frac{3}{4}"


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("a.csv", b"prompt,answer\n1?\n", r"a.csv:2  has 1 values, and the first line names 2 columns"),
    ("a.csv", b'prompt,answer\n1?,1\n"2?,2\n', "a.csv:3  is not CSV: unexpected end of data"),
    ("a.csv", b"prompt,answer\n1?,1\n\xff,2\n", "a.csv:3  is not UTF-8"),
    ("a.csv", b"prompt,prompt\n1?,1\n", 'names the column "prompt" twice'),
    ("a.csv", b"", "holds no problems"),
    ("a.jsonl", b"{", "a.jsonl:1  is not JSON: "),
    ("a.jsonl", b"[1]", "is not an object"),
    ("a.jsonl", b'{"prompt": "\xff"}', "is not UTF-8"),
    ("a.jsonl", b'{"text": "1?", "answer": "1"}', "has no column prompt or question or problem: set "),
    ("a.jsonl", b'{"question": "1?", "answer": "1"}\n{"prompt": "1?"}', 'a.jsonl:2  has no column "question"'),
    ("a.jsonl", b'{"prompt": "", "answer": "1"}', 'column "prompt" is empty'),
    ("a.jsonl", b'{"prompt": [{"role": "assistant", "content": "1"}], "answer": "1"}', "nothing is left to answer"),
    ("a.jsonl", b'{"prompt": [{"role": "user", "content": " "}], "answer": "1"}', 'column "prompt" is empty'),
    ("a.jsonl", b'{"prompt": "1?", "answer": true}', "True.*not a text or a number"),
    ("a.jsonl", b'{"prompt": "1?", "answer": 1e999}', "inf.*not a text or a number"),
    ("a.jsonl", b'{"prompt": "1?", "answer": ' + b"1" * 5000 + b"}", "a.jsonl:1  holds an integer of more digits"),
    ("a.jsonl", b'{"prompt": "1?", "answer": "1"}\n{"prompt": "2?", "answer": ""}', "no completion could ever be"),
    ("a.jsonl", b'{"prompt": "1?", "answer": "1", "tag": {"a": 1}}', "not a tag or a list of tags"),
    ("a.jsonl", b'{"prompt": "1?", "answer": "1", "level": 1}', r'"tag": set \[data\] tags_column .*answer, level'),
])  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        load(tmp_path / name, tags_column=None if name == "a.csv" else "tag")
    assert len(str(caught.value)) < 400


def test_no_answers_at_all_is_a_data_set_for_a_judge(tmp_path):
    path = write(tmp_path / "poems.jsonl", [{"prompt": "A poem.", "answer": ""}, {"prompt": "An ode.", "answer": None}])
    assert [problem.answer for problem in load(path).train] == ["", ""]
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = "poems.jsonl"\n')
    result = run_cli("check", file)
    assert result.exit_code == 2
    assert 'type = "match" compares with reference answers, and problem poems.jsonl:' in result.output
    assert run_cli("check", file, "--set", "reward.type=format").exit_code == 0


def test_answers_may_be_huge_integers_and_empty_tags_are_none(tmp_path):
    row = {"prompt": "10^400", "answer": 10**400, "tag": ["", "big"]}
    (problem,) = load(write(tmp_path / "a.jsonl", [row]), tags_column="tag").train
    assert (problem.answer, problem.tags) == (str(10**400), ("big",))


def test_the_held_out_split_depends_on_the_prompts_alone(tmp_path):
    forward = load(write(tmp_path / "a.jsonl", sums(1000)), heldout=50)
    backward = load(write(tmp_path / "b.jsonl", sums(1000)[::-1]), heldout=50, seed=9)
    assert prompts(forward.heldout) == prompts(backward.heldout)
    assert len(forward.heldout) == 50
    assert set(prompts(forward.train)).isdisjoint(prompts(forward.heldout))
    assert 850 < len(forward.train) < 950  # a tenth is held out, whether or not it is all evaluated
    fewer = load(tmp_path / "a.jsonl", heldout=10)
    assert prompts(fewer.heldout) == prompts(forward.heldout)[:10]
    assert prompts(fewer.train) == prompts(forward.train)
    grown = load(write(tmp_path / "c.jsonl", sums(1200)), heldout=50)
    assert set(prompts(grown.train)).isdisjoint(prompts(forward.heldout))
    assert len({prompt[:2] for prompt in prompts(forward.heldout)}) > 20  # not the first part of a sorted file


def test_equal_prompts_land_on_the_same_side(tmp_path):
    spaced = [row["prompt"].replace("+", "  + ") for row in sums(200)]
    twice = [{"prompt": prompt, "answer": "1"} for text in spaced for prompt in (text, f" {text}  ")]
    data = load(write(tmp_path / "twice.jsonl", twice), heldout=1000, eval_fraction=0.5)
    train, heldout = ([" ".join(prompt.split()) for prompt in prompts(part)] for part in (data.train, data.heldout))
    assert set(train).isdisjoint(heldout)
    assert len(set(heldout)) == len(heldout)  # each counts once in an evaluation
    assert any("asks for more" in note for note in data.notes)


@pytest.mark.parametrize(("fraction", "count"), list(itertools.product((0.01, 0.25, 0.99), (2, 10, 31))))
def test_the_held_out_fraction_is_exact(tmp_path, fraction, count):
    path = write(tmp_path / "sums.jsonl", [*sums(count), *sums(count)])  # each problem twice counts once
    data = load(path, 1000, eval_fraction=fraction)
    expected = min(max(1, int(fraction * count + 0.5)), count - 1)
    assert len(data.heldout) == expected
    assert len(set(prompts(data.train))) == count - expected


def test_an_evaluation_file_is_held_out_and_its_problems_are_not_trained_on(tmp_path):
    path = write(tmp_path / "train.jsonl", sums(30))
    test = write(tmp_path / "test.jsonl", sums(10, start=25))
    data = load(path, heldout=3, eval_source=str(test))
    assert (len(data.train), len(data.heldout)) == (25, 3)
    assert data.notes == ("5 of 30 training problems left out: they are held out",)
    assert data.heldout[0].id.startswith("test.jsonl:")
    with pytest.raises(DataError, match="nothing is left"):
        load(path, heldout=3, eval_source=str(path))


def test_max_examples_samples_the_whole_file_unless_it_is_not_shuffled(tmp_path):
    path = write(tmp_path / "sorted.jsonl", sums(500))
    sample = prompts(load(path, max_examples=50).train)
    numbers = [int(prompt.split("+")[0]) for prompt in sample]
    assert len(sample) == 50
    assert numbers == sorted(numbers)
    assert len({number // 100 for number in numbers}) == 5
    assert sample == prompts(load(path, max_examples=50).train)
    assert sample != prompts(load(path, max_examples=50, seed=1).train)
    assert prompts(load(path, max_examples=50, shuffle=False).train) == prompts(load(path).train)[:50]
    assert len(load(path, max_examples=1000).train) == 500


def test_the_content_hash_is_of_prompts_answers_and_tags(tmp_path):
    path = write(tmp_path / "a.jsonl", sums(20))
    same = write(tmp_path / "b.jsonl", [{**row, "extra": 1} for row in sums(20)])
    assert load(path).content_hash == load(same).content_hash == load(path, seed=3).content_hash
    base = Problem("1", "p", "a", ("t",))
    others = [
        Problem("1", "q", "a", ("t",)), Problem("1", "p", "b", ("t",)), Problem("1", "p", "a", ()),
        Problem("1", ({"role": "user", "content": "p"},), "a", ("t",)),
    ]  # fmt: skip
    variants = [([base], []), ([], [base]), ([base, base], []), ([base], [base]), *(([other], []) for other in others)]
    assert len({content_hash(train, heldout) for train, heldout in variants}) == len(variants)
    assert content_hash([Problem("2", "p", "a", ("t",), {"m": 1})], []) == content_hash([base], [])


PLUGIN = """
from retrain.types import Problem

def with_split(split):
    return [{"prompt": f"{split} {i}", "answer": str(i)} for i in range(6 if split == "train" else 3)]

def one_list():
    return (Problem(str(i), f"q{i}", str(i)) for i in range(50))

def wrong_type(): return "abc"
def bad_row(): return [{"prompt": "x"}]
def empty(): return []
def raises(): raise KeyError("my own bug")
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch, import_path):
    (tmp_path / "my_problems.py").write_text(PLUGIN, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "my_problems", raising=False)

    def loaded(function: str, **keys: Any) -> Dataset:
        data = Data(source=function, **keys)
        return load_data(data, [held_out(10, data)], base_dir=tmp_path)

    return loaded


def test_a_function_can_be_a_source(plugin):
    data = plugin("my_problems:with_split")
    assert prompts(data.train) == [f"train {i}" for i in range(6)]
    assert sorted(prompts(data.heldout)) == [f"test {i}" for i in range(3)]
    data = plugin("my_problems:one_list", eval_fraction=0.3)
    assert len(data.heldout) == 10
    assert set(prompts(data.train)).isdisjoint(prompts(data.heldout))


@pytest.mark.parametrize(("function", "error", "reason"), [
    ("my_problems:wrong_type", PluginError, "returned str, not a list of problems"),
    ("my_problems:bad_row", DataError, "my_problems:bad_row:train:1  has no column answer or solution"),
    ("my_problems:empty", DataError, "returned no problems"),
    ("my_problems:raises", KeyError, "my own bug"),
    ("my_problems:absent", PluginError, "has no function 'absent'"),
    ("no_such_module_here:f", PluginError, "no module 'no_such_module_here'"),
])  # fmt: skip
def test_a_function_that_is_no_source_is_named(plugin, function, error, reason):
    with pytest.raises(error, match=reason):
        plugin(function)


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library in an empty directory: folders named like the hub's repositories are read first."""
    library = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.chdir(tmp_path)
    library.disable_progress_bars()
    return library


def publish(folder: Path, files: dict[str, list[dict[str, str]]]) -> None:
    """A repository with one configuration for each prefix of ``<configuration>-<split>``."""
    header = ["---", "configs:"]
    for name in sorted({name.partition("-")[0] for name in files}):
        header += [f"- config_name: {name}", "  data_files:"]
        for file in files:
            if file.startswith(f"{name}-"):
                write(folder / f"{file}.jsonl", files[file])
                header += [f"  - split: {file.partition('-')[2]}", f"    path: {file}.jsonl"]
    (folder / "README.md").write_text("\n".join([*header, "---", ""]), encoding="utf-8")


def test_gsm8k_and_math_by_their_names(datasets):
    train = [{"question": f"train {i}?", "answer": f"So.\n#### {i},000"} for i in range(1, 6)]
    test = [{"question": f"test {i}?", "answer": f"So.\n#### {i}"} for i in range(3)]
    test.append({"question": "train 1?", "answer": "#### 1"})
    publish(Path("openai/gsm8k"), {"main-train": train, "main-test": test})
    data = load("gsm8k", 10)
    assert prompts(data.train) == [f"train {i}?" for i in range(2, 6)]
    assert (data.train[0].id, data.train[0].answer) == ("gsm8k/train:2", "2000")
    assert (len(data.heldout), len(data.notes)) == (4, 2)
    files = {
        f"{name}-{split}": [{**MATH[0], "problem": f"{name} {split}?", "type": name}]
        for name in HUB["math"].configurations
        for split in ("train", "test")
    }
    publish(Path("EleutherAI/hendrycks_math"), files)
    data = load("math", 3)
    assert (len(data.train), len(data.heldout)) == (7, 3)
    assert {problem.answer for problem in data.train} == {r"\frac34"}
    assert data.train[0].tags == ("algebra", "Level 1")


def test_directories_that_are_data_sets(tmp_path, datasets):
    write(tmp_path / "flat/train.jsonl", sums(5, word="train "))
    write(tmp_path / "flat/test.jsonl", sums(3, word="test "))
    data = load("./flat", 3)
    assert prompts(data.train) == [f"train {i}+1=?" for i in range(5)]
    assert sorted(prompts(data.heldout)) == [f"test {i}+1=?" for i in range(3)]
    assert data.train[4].id == "flat/train:5"
    assert data.notes == ()
    (tmp_path / "parts/data").mkdir(parents=True)
    for i in range(2):
        table = datasets.Dataset.from_list(sums(2, word=f"part {i} "))
        table.to_parquet(tmp_path / f"parts/data/train-0000{i}-of-00002.parquet")
    assert prompts(load("./parts").train) == [f"part {i} {j}+1=?" for i in range(2) for j in range(2)]
    for split, (number, row) in itertools.product(("train", "test"), enumerate(MATH)):
        write(tmp_path / f"MATH/{split}/algebra/{number}.json", [{**row, "problem": f"{split}: {row['problem']}"}])
    data = load("./MATH", 2)
    assert [problem.answer for problem in data.train] == [r"\frac34", "12"]
    assert len(data.heldout) == 2


@pytest.mark.parametrize("with_splits", [True, False])
def test_a_directory_that_datasets_has_saved_is_a_source(tmp_path, datasets, with_splits):
    table = datasets.Dataset.from_list(sums(20))
    splits = datasets.DatasetDict(train=table, test=datasets.Dataset.from_list(sums(4, word="t ")))
    (splits if with_splits else table).save_to_disk(str(tmp_path / "saved"))
    data = load("./saved", 4)
    assert (len(data.train), len(data.heldout)) == ((20, 4) if with_splits else (18, 2))
    if with_splits:
        with pytest.raises(DataError, match=r"has no split \"dev\".*'train', 'test'"):
            load("./saved", 4, eval_split="dev")


def test_what_is_missing_in_a_directory_is_named(tmp_path, datasets):
    write(tmp_path / "flat/train.jsonl", sums(20))
    data = load("./flat", 5)
    assert (len(data.train), len(data.heldout)) == (18, 2)
    assert "has no split 'test': 10% of 'train' is held out" in data.notes[0]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "bad/train.jsonl", [{"prompt": "1?", "answer": "1"}, {"prompt": "", "answer": "1"}])
    publish(tmp_path / "set", {f"{name}-train": sums(4, word=f"{name} ") for name in ("main", "socratic")})
    for source, keys, reason in (
        ("./flat", {"eval_split": "validation"}, 'has no split "validation"'),
        ("./flat", {"split": "validation"}, 'has no split "validation"'),
        ("./empty", {}, "cannot be read as a data set"),
        ("./absent", {}, "no such directory"),
        ("./bad", {}, r'^bad/train:2  column "prompt" is empty'),
        ("./set", {}, r"set \[data\] subset to one of \['main', 'socratic'\]"),
        ("./set", {"subset": "typo"}, r"set \[data\] subset to one of \['main', 'socratic'\]"),
    ):
        with pytest.raises(DataError, match=reason):
            load(source, 5, **keys)
    assert prompts(load("./set", subset="socratic").train)[0] == "socratic 0+1=?"


def test_without_a_network_a_hub_name_is_one_clear_line(datasets):
    with pytest.raises(DataError) as caught:
        load("someone/problems")
    assert "someone/problems" in str(caught.value)
    assert 'use a copy as a file:  [data] source = "path/train.jsonl"' in str(caught.value)
    assert "\n" not in str(caught.value)


GOOD = b'{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?", "answer": "3"}\n'
WRONG = {
    "no such file": None,
    'bad.jsonl:3  has no column "answer"': GOOD + b'{"prompt": "1?"}\n',
    "holds a single problem": GOOD.splitlines(keepends=True)[0],
}


@pytest.mark.parametrize(("message", "content"), WRONG.items())
def test_check_and_train_find_what_is_wrong_with_a_file(message, content, tmp_path):
    if content is not None:
        (tmp_path / "bad.jsonl").write_bytes(content)
    file = tmp_path / "own.toml"
    file.write_text('[data]\nshuffle = true\nsource = "bad.jsonl"\n')
    for command in (["check", str(file)], ["train", str(file), "--out", str(tmp_path / "out")]):
        result = run_cli(*command)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("own.toml:3  data.source  ")
        assert message in line
    assert not (tmp_path / "out").exists()
    result = run_cli("explain", file)
    assert result.exit_code == 0
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: own.toml:3  data.s")]
    assert any(message in note for note in notes)


def test_check_names_the_file_of_held_out_problems_and_reads_it_beside_a_source_it_cannot_read(tmp_path):
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "bad.jsonl").write_bytes(b"{\n")
    (tmp_path / "mine.py").write_text("def problems(split): raise RuntimeError('not at check')\n")
    file = tmp_path / "own.toml"
    for source in ("good.jsonl", "mine:problems"):
        file.write_text(f'[data]\nsource = "{source}"\neval_source = "bad.jsonl"\n')
        result = run_cli("check", file)
        assert result.exit_code == 2
        assert result.stderr.startswith("own.toml:3  data.eval_source  ")
        assert "bad.jsonl:1  is not JSON" in result.stderr
    file.write_text('[data]\nsource = "mine:problems"\neval_source = "good.jsonl"\n')
    assert run_cli("check", file).exit_code == 0


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


def test_a_problem_goes_through_the_chat_template(tokenizer):
    tokenizer.chat_template = TEMPLATE
    problem, brief = Problem("p", "1+1=?", "2"), Data(system_prompt="Be brief.")
    prompt = render(problem, tokenizer, Data(system_prompt="Be brief.", prompt_template=r"{prompt} \boxed{}"))
    assert prompt.text == r"[system] Be brief. [user] 1+1=? \boxed{} [assistant]"
    assert prompt.token_ids == (2, 6, 7, 3, 5, 0, 4)  # no second beginning token: the template has the say
    said = [("user", "0+0=?"), ("assistant", "0"), ("user", "1+1=?")]
    shots = tuple({"role": role, "content": content} for role, content in said)
    messages = conversation(Problem("p", shots, "2"), Data(prompt_template="Solve: {prompt}"))
    assert [message["content"] for message in messages] == ["0+0=?", "0", "Solve: 1+1=?"]
    assert shots[-1]["content"] == "1+1=?"
    tokenizer.chat_template = None  # the text is plain and begins as the tokenizer wants
    prompt = render(problem, tokenizer, brief)
    assert (prompt.text, prompt.token_ids) == ("Be brief.\n\n1+1=?", (1, 6, 7, 5))
    tokenizer.chat_template = "{% set strict = true %}" + TEMPLATE
    with pytest.raises(ModelError, match=r"no system role: leave \[data\] system_prompt out"):
        render(problem, tokenizer, brief)
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(DataError, match="has no tokens"):
        render(problem, tokenizer, Data())


def test_problems_are_shuffled_by_default_and_by_seed(mixed_campaign, silent_campaign):
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
    append_jsonl(tmp_path / "two.jsonl", [{"prompt": f"{i} + 2 = ?", "answer": "x"} for i in range(2)])
    path = toy_file(toy_home, tmp_path / "two.toml", reward="even")
    outcome = train(path, tmp_path / "out", f'data.source="{tmp_path}/two.jsonl"', "training.batch_size=5")
    assert outcome.exit_status == 0
    rows = rows_of(tmp_path / "out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["optim/grad_norm"] > 0 and row["num_datums"] > 0 for row in rows)
    assert len(completions_of(tmp_path / "out")) == 3 * 5 * 4
    assert any(bool(b.any()) for _, b in read_adapter(tmp_path / "out/final").tensors.values())


FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def gsm8k() -> Dataset:
    if not (FOLDER / "test.jsonl").is_file():
        pytest.skip("the GSM8K files are not beside the repository (shared/data/gsm8k)")
    return load(FOLDER / "train.jsonl", 1319, eval_source=str(FOLDER / "test.jsonl"))


@pytest.mark.parametrize("kind", ["match", "math"])
def test_gold_answers_score_one_and_their_neighbours_zero(gsm8k, kind):
    if kind == "math":
        pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    with build_grader(RewardSection.model_validate({"type": kind})) as grader:
        for spelling in (r"\boxed{%s}", r"\boxed{ %s.00 }", r"so $\boxed{\$%s}$."):
            right = grader.grade([(problem, spelling % problem.answer) for problem in gsm8k.heldout])
            assert [result.total_reward for result in right] == [1.0] * 1319
        for by in (1, -1):
            wrong = grader.grade([(p, rf"\boxed{{{int(p.answer) + by}}}") for p in gsm8k.heldout])
            assert [result.total_reward for result in wrong] == [0.0] * 1319


def test_gsm8k_of_a_folder_has_answers_to_grade_and_solutions_without_calculations(tmp_path, monkeypatch):
    append_jsonl(tmp_path / "train.jsonl", GSM8K[:1])
    append_jsonl(tmp_path / "test.jsonl", GSM8K[2:])
    monkeypatch.setenv("GSM8K", str(tmp_path))
    settings = Data(source="grade_school:problems")
    data = load_data(settings, [held_out(1, settings)], base_dir=Path(grade_school.__file__).parent)
    assert [(problem.prompt, problem.answer) for problem in data.train] == [("Janet sells 9 eggs for $2 each?", "18")]
    assert [problem.answer for problem in data.heldout] == ["70000"]
    assert grade_school.solutions("train") == [
        {"prompt": "Janet sells 9 eggs for $2 each?", "completion": "9 * 2 = $18.\n#### 18"}
    ]
