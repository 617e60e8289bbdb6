"""Data sets as people have them: directories, hub names, GSM8K and MATH as they are, and what is wrong with them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retrain.cli import app
from retrain.config.tasks import Data
from retrain.data import Dataset, load_data
from retrain.errors import DataError

GSM8K = [
    {"question": "Janet sells 9 eggs for $2 each?", "answer": "9 * 2 = $<<9*2=18>>18.\n#### 18"},
    {"question": "A robe takes 2 bolts and half that?", "answer": "2/2=<<2/2=1>>1\n2+1=<<2+1=3>>3\n#### 3"},
    {"question": "How much profit?", "answer": "So it was 1,000 * 70 = <<70*1000=70000>>70,000\n#### 70,000"},
]
MATH = [
    {"problem": "What is $1/2+1/4$?", "level": "Level 1", "type": "Algebra", "solution": r"We get $\boxed{\frac34}$."},
    {"problem": "How many?", "level": "Level 2", "type": "Algebra", "solution": r"So $n = \boxed{12}$."},
]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(count: int, word: str = "") -> list[dict[str, str]]:
    return [{"prompt": f"{word}{i}+1=?", "answer": str(i + 1)} for i in range(count)]


def load(source: str, heldout: int = 0, folder: Path | None = None, **keys: Any) -> Dataset:
    return load_data(Data(source=source, **keys), heldout, base_dir=folder)


def prompts(problems) -> list[str]:
    return [problem.prompt for problem in problems]


# -- what is there ----------------------------------------------------------------------------------------------


def test_files_of_gsm8k_and_math_are_read_as_they_are(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", GSM8K)
    data = load("train.jsonl", folder=tmp_path)
    assert [problem.answer for problem in data.train] == ["18", "3", "70000"]
    assert data.train[0].prompt == GSM8K[0]["question"]
    assert data.train[0].metadata["solution"].endswith("#### 18")
    lines(tmp_path / "math.jsonl", MATH)
    data = load("math.jsonl", folder=tmp_path, tags_column="level")
    assert [(problem.answer, problem.tags) for problem in data.train] == [
        (r"\frac34", ("Level 1",)),
        ("12", ("Level 2",)),
    ]
    lines(tmp_path / "math500.jsonl", [{**MATH[0], "answer": r"\frac{3}{4}"}])
    assert load("math500.jsonl", folder=tmp_path).train[0].answer == r"\frac{3}{4}"


def test_the_first_row_decides_which_columns_are_meant(tmp_path: Path) -> None:
    lines(tmp_path / "mixed.jsonl", [*GSM8K, {"prompt": "1?", "answer": "1"}])
    with pytest.raises(DataError, match=r'mixed.jsonl:4  has no column "question"'):
        load("mixed.jsonl", folder=tmp_path)
    lines(tmp_path / "other.jsonl", [{"text": "1?", "answer": "1"}])
    with pytest.raises(DataError, match=r"other.jsonl:1  has no column prompt or question or problem: set "):
        load("other.jsonl", folder=tmp_path)


def test_the_held_out_fraction_is_exact(tmp_path: Path) -> None:
    for fraction, count in itertools.product((0.01, 0.25, 0.99), (2, 10, 31)):
        lines(tmp_path / "sums.jsonl", [*rows(count), *rows(count)])  # each problem twice counts once
        data = load("sums.jsonl", 1000, tmp_path, eval_fraction=fraction)
        expected = min(max(1, int(fraction * count + 0.5)), count - 1)
        assert len(data.heldout) == expected
        assert len(set(prompts(data.train))) == count - expected
        again = load("sums.jsonl", 1000, tmp_path, eval_fraction=fraction)
        assert (data.heldout, data.train) == (again.heldout, again.train)


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return library


def test_a_directory_in_the_hubs_layout_is_a_source(tmp_path: Path, datasets: Any) -> None:
    lines(tmp_path / "flat" / "train.jsonl", rows(5, "train "))
    lines(tmp_path / "flat" / "test.jsonl", rows(3, "test "))
    data = load("./flat", 3, tmp_path)
    assert prompts(data.train) == [f"train {i}+1=?" for i in range(5)]
    assert sorted(prompts(data.heldout)) == [f"test {i}+1=?" for i in range(3)]
    assert data.train[4].id == "flat/train:5"
    assert data.notes == ()
    parts = tmp_path / "parts" / "data"
    parts.mkdir(parents=True)
    for i in range(2):
        table = datasets.Dataset.from_list(rows(2, f"part {i} "))
        table.to_parquet(parts / f"train-0000{i}-of-00002.parquet")
    assert prompts(load(str(tmp_path / "parts")).train) == [f"part {i} {j}+1=?" for i in range(2) for j in range(2)]


def test_a_directory_of_one_file_for_each_problem_is_a_source(tmp_path: Path, datasets: Any) -> None:
    for split in ("train", "test"):
        for number, row in enumerate(MATH):
            path = tmp_path / "MATH" / split / "algebra" / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**row, "problem": f"{split}: {row['problem']}"}, indent=1))
    data = load("./MATH", 2, tmp_path)
    assert [problem.answer for problem in data.train] == [r"\frac34", "12"]
    assert len(data.heldout) == 2


@pytest.mark.parametrize("with_splits", [True, False])
def test_a_directory_that_datasets_has_saved_is_a_source(tmp_path: Path, datasets: Any, with_splits: bool) -> None:
    table = datasets.Dataset.from_list(rows(20))
    saved = datasets.DatasetDict(train=table, test=datasets.Dataset.from_list(rows(4, "t "))) if with_splits else table
    saved.save_to_disk(str(tmp_path / "saved"))
    data = load("./saved", 4, tmp_path)
    assert len(data.train) == (20 if with_splits else 18)
    assert len(data.heldout) == (4 if with_splits else 2)
    if with_splits:
        with pytest.raises(DataError, match=r"has no split \"dev\".*'train', 'test'"):
            load("./saved", 4, tmp_path, eval_split="dev")


def test_splits_that_are_not_there_and_directories_that_are_no_data_set(tmp_path: Path, datasets: Any) -> None:
    lines(tmp_path / "flat" / "train.jsonl", rows(20))
    data = load("./flat", 5, tmp_path)
    assert (len(data.train), len(data.heldout)) == (18, 2)
    assert "has no split 'test': 10% of 'train' is held out" in data.notes[0]
    for split in ("eval_split", "split"):
        with pytest.raises(DataError, match='has no split "validation"'):
            load("./flat", 5, tmp_path, **{split: "validation"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read as a data set"):
        load("./empty", folder=tmp_path)
    with pytest.raises(DataError, match="no such directory"):
        load("./absent", folder=tmp_path)
    lines(tmp_path / "bad" / "train.jsonl", [{"prompt": "1?", "answer": "1"}, {"prompt": "", "answer": "1"}])
    with pytest.raises(DataError, match=r'^bad/train:2  column "prompt" is empty'):
        load("./bad", folder=tmp_path)


def test_a_data_set_with_several_configurations_asks_for_one(tmp_path: Path, datasets: Any) -> None:
    header = ["---", "configs:"]
    for name in ("main", "socratic"):
        lines(tmp_path / "set" / name / "train.jsonl", rows(4, f"{name} "))
        header += [f"- config_name: {name}", "  data_files:", "  - split: train", f"    path: {name}/train.jsonl"]
    (tmp_path / "set" / "README.md").write_text("\n".join([*header, "---", ""]))
    for subset in (None, "typo"):
        with pytest.raises(DataError, match=r"set \[data\] subset to one of \['main', 'socratic'\]"):
            load("./set", folder=tmp_path, subset=subset)
    assert prompts(load("./set", folder=tmp_path, subset="socratic").train)[0] == "socratic 0+1=?"


def test_without_a_network_a_hub_name_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        load("someone/problems", folder=tmp_path)
    assert "someone/problems" in str(caught.value)
    assert 'use a copy as a file:  [data] source = "path/train.jsonl"' in str(caught.value)
    assert "\n" not in str(caught.value)


# -- what check and train say of it -----------------------------------------------------------------------------

GOOD = b'{"prompt": "1+1=?", "answer": "2"}\n{"prompt": "1+2=?", "answer": "3"}\n'
WRONG = {
    "no such file": None,
    'bad.jsonl:3  has no column "answer"': GOOD + b'{"prompt": "1?"}\n',
    "bad.jsonl:1  cannot be read: ": "/proc/self/mem",
    "holds a single problem": GOOD.splitlines(keepends=True)[0],
}


@pytest.mark.parametrize(("message", "content"), WRONG.items())
def test_check_and_train_find_what_is_wrong_with_a_file(message: str, content: Any, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / "bad.jsonl").write_bytes(content)
    elif content is not None:
        (tmp_path / "bad.jsonl").symlink_to(content)
    file = tmp_path / "own.toml"
    file.write_text('[data]\nshuffle = true\nsource = "bad.jsonl"\n')
    for command in (["check", str(file)], ["train", str(file), "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("own.toml:3  data.source  ")
        assert message in line
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, ["explain", str(file)])
    assert result.exit_code == 0
    assert [
        line for line in result.stderr.splitlines() if line.startswith("note: own.toml:3  data.s") and message in line
    ]


def test_check_names_the_file_of_held_out_problems_and_reads_it_beside_a_source_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "bad.jsonl").write_bytes(b"{\n")
    (tmp_path / "mine.py").write_text("def problems(split): raise RuntimeError('not at check')\n")
    file = tmp_path / "own.toml"
    for source in ("good.jsonl", "mine:problems"):
        file.write_text(f'[data]\nsource = "{source}"\neval_source = "bad.jsonl"\n')
        result = CliRunner().invoke(app, ["check", str(file)])
        assert result.exit_code == 2
        assert result.stderr.startswith("own.toml:3  data.eval_source  ")
        assert "bad.jsonl:1  is not JSON" in result.stderr
    file.write_text('[data]\nsource = "mine:problems"\neval_source = "good.jsonl"\n')
    assert CliRunner().invoke(app, ["check", str(file)]).exit_code == 0
