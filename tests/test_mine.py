"""`retrain mine`: strategic grams of a run's completions, as a file that [planning] grams reads."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sampled_cases import record
from typer.testing import CliRunner

from retrain.algorithms.detectors import load_detector
from retrain.algorithms.grams import read_grams
from retrain.campaign.planning.changes import version_changes
from retrain.campaign.planning.plan import Plan
from retrain.campaign.running.controller import launch
from retrain.cli import app
from retrain.config import load, parse_dict
from retrain.errors import CheckpointError, DataError, ModelError, UsageError
from retrain.files import read_jsonl, write_json
from retrain.mining.corpus import GENERATIONS, completions_of
from retrain.mining.embedding import embedder_of
from retrain.mining.mine import Wanted
from retrain.mining.mine import mine as mined
from retrain.models import bundled_model_path
from retrain.models.tokenizer import light_tokenizer
from retrain.record.environment import module_hashes
from retrain.record.observer import NullObserver

FACTS = {"run_id": "grpo+none_s1", "model": {"model": "tiny-reasoner"}, "backend": {"backend": "local"}}
CHECK = ("let me check this", "let me verify this", "double check this step")
CLAIM = ("surely it is so", "everybody knows that by now", "of course we know it")


def answer(number: int, right: bool) -> str:
    """Right answers check by one of three phrases; one in eight of them, and every wrong one, claims something."""
    said = CHECK[number % 3] if right else CLAIM[number % 3]
    more = f" {CLAIM[number % 3]}." if right and number % 8 == 0 else ""
    return f"3+{number}=9.{more} {said}: {number}"


def run_of(folder: Path, completions: list[tuple[str, bool]] | None = None, **facts) -> Path:
    """A run's directory with these completions, two a step."""
    made = [(answer(i, i % 2 == 0), i % 2 == 0) for i in range(96)] if completions is None else completions
    rows = [{"step": i // 2, "completion": text, "correct": right} for i, (text, right) in enumerate(made)]
    path = folder / GENERATIONS
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "config.json", FACTS | facts)
    return folder


def command(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def grams_in(path: Path) -> list[list[str]]:
    return [cluster["grams"] for cluster in tomllib.loads(path.read_text())["cluster"]]


def about(path: Path) -> dict:
    return tomllib.loads(path.read_text())["mined"]


# -- what is found ---------------------------------------------------------------------------------------------------


def by_meaning(texts):
    return np.array([[float(any(text in each for each in CHECK)), 1.0] for text in texts]) * [[2, 1]]


def test_planted_phrases_of_one_meaning_are_one_group_above_the_rest(tmp_path):
    found = mined(completions_of(run_of(tmp_path / "run")), by_meaning, Wanted(clusters=2, top=0.5))
    (group,) = found.clusters
    assert sorted(group.grams) == sorted(CHECK)
    assert group.documents == found.completions == 48
    assert (found.groups, found.cut) == (2, 0)
    every = mined(completions_of(tmp_path / "run"), by_meaning, Wanted(clusters=2, top=1.0))
    assert sorted(every.clusters[1].grams) == sorted(CLAIM)
    assert every.clusters[1].documents == 12


def test_wrong_answers_count_only_when_asked_for(tmp_path):
    run = run_of(tmp_path / "run")
    right = mined(completions_of(run), by_meaning, Wanted(clusters=2, top=0.5))
    every = mined(completions_of(run, correct=False), by_meaning, Wanted(clusters=2, top=0.5))
    assert set(right.clusters[0].grams) == set(CHECK)
    assert set(every.clusters[0].grams) == set(CLAIM)
    assert every.completions == 96


def test_the_command_writes_a_file_that_planning_reads_the_same_every_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run")
    code, output = command("mine", "run", "--out", "grams.toml")
    assert code == 0
    first = Path("grams.toml").read_bytes()
    facts = about(Path("grams.toml"))
    assert (facts["run"], facts["completions"], facts["correct_only"]) == ("grpo+none_s1", 48, True)
    assert facts["embedder"] == "input embeddings of tiny-reasoner"
    assert facts["command"] == "retrain mine run --out grams.toml --embedder base --top 0.2 --least 0.01"
    assert "48 right answers of grpo+none_s1" in output
    assert command("mine", "run", "--out", "grams.toml")[0] == 0  # what it wrote itself it may write again
    assert Path("grams.toml").read_bytes() == first
    grams = read_grams(Path("grams.toml"))
    assert grams == tuple(gram for own in grams_in(Path("grams.toml")) for gram in own)
    Path("f.toml").write_text('[planning]\ngrams = "grams.toml"\n')
    config = load("f.toml").config
    assert config.planning.grams == str(tmp_path / "grams.toml")
    assert load_detector(config).phrases == grams


def test_more_completions_or_other_choices_are_another_file(tmp_path):
    run = run_of(tmp_path / "run")
    out = tmp_path / "grams.toml"
    texts = []
    for options in ((), ("--all",), ("--top", "1"), ("--clusters", "1"), ("--least", "0.3")):
        assert command("mine", run, "--out", out, *options)[0] == 0
        texts.append(grams_in(out))
    assert len({json.dumps(each) for each in texts}) == 5
    assert len(texts[3]) == 1
    before = about(out)["inputs"]
    with open(run / GENERATIONS, "a") as file:
        file.write(json.dumps({"step": 99, "completion": "so", "correct": True}) + "\n")
    assert command("mine", run, "--out", out)[0] == 0
    assert about(out)["inputs"] != before


def test_json_has_all_that_the_file_has(tmp_path):
    run, out = run_of(tmp_path / "run"), tmp_path / "grams.toml"
    code, output = command("mine", run, "--out", out, "--json")
    assert code == 0
    report = json.loads(output)
    assert [each["grams"] for each in report["cluster"]] == grams_in(out)
    assert report["inputs"] == about(out)["inputs"]


# -- what is read ----------------------------------------------------------------------------------------------------


def test_whole_texts_are_read_where_a_step_recorded_its_tokens(tmp_path):
    run = record(tmp_path / "run", texts=("let me check " * 3, "so it is five " * 9), steps=3)
    write_json(run / "config.json", FACTS)
    whole = {int(path.stem[7:]) for path in run.glob("tokens_0*.safetensors")}
    assert whole
    assert whole < {0, 1, 2}  # else there is nothing to compare
    completions = completions_of(run, correct=False)
    documents = list(completions)
    rows = read_jsonl(run / GENERATIONS)
    assert len(documents) == len(rows) == completions.count()[0]
    of_rows = [[row["completion"]] for row in rows if row["step"] not in whole]
    assert documents[-len(of_rows) :] == of_rows
    assert any("let me check" in text for texts in documents[: -len(of_rows)] for text in texts)
    assert not any("let me check" in text for texts in of_rows for text in texts)  # the row's text is another
    right = sum(row["correct"] for row in rows)
    assert len(list(completions_of(run))) == right < len(rows)


def test_completions_without_their_ends_are_told(tmp_path):
    run = run_of(tmp_path / "run", [(("let me check it. " * 40)[:500], True), ("let me check it", True)])
    code, output = command("mine", run, "--out", tmp_path / "g.toml")
    assert code == 0
    assert "1 of 2 completions were recorded without their ends" in output
    assert about(tmp_path / "g.toml")["without_their_ends"] == 1


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_told(tmp_path):
    run = run_of(tmp_path / "run", [("let me check", True)] * 3)
    path = run / GENERATIONS
    path.write_text(path.read_text() + '{"step": 7, "compl')
    assert len(list(completions_of(run))) == 3
    for line in ("{", '{"step": 1}', '{"step": "1", "completion": "x", "correct": true}'):
        path.write_text(f"{line}\n" + path.read_text())
        with pytest.raises(CheckpointError, match=r"generations\.jsonl:1 is"):
            completions_of(run)
        path.write_text(path.read_text().partition("\n")[2])


# -- what embeds -----------------------------------------------------------------------------------------------------


def test_input_embeddings_are_the_means_of_rows_about_their_mean(tmp_path):
    model = bundled_model_path("tiny-reasoner")
    assert model is not None
    name, embed = embedder_of("base", FACTS)
    assert name == "input embeddings of tiny-reasoner"
    texts = ["let me check", "double check that", "so"]
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    tokenizer = light_tokenizer("tiny-reasoner")
    rows = np.stack(
        [table[tokenizer(f" {text}", add_special_tokens=False)["input_ids"]].mean(axis=0) for text in texts]
    )
    np.testing.assert_allclose(embed(texts), rows - rows.mean(axis=0), rtol=0, atol=1e-12)
    shutil.copytree(model, tmp_path / "shards")
    tensors = load_file(tmp_path / "shards/model.safetensors")
    (tmp_path / "shards/model.safetensors").unlink()
    save_file({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "shards/two.safetensors")
    index = {"weight_map": {"a.b": "one.safetensors", "model.embed_tokens.weight": "two.safetensors"}}
    (tmp_path / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    sharded = embedder_of("base", FACTS | {"model": {"model": str(tmp_path / "shards")}})[1]
    np.testing.assert_array_equal(sharded(texts), embed(texts))


def test_a_base_whose_embeddings_cannot_be_had_is_told_with_what_to_type(tmp_path):
    with pytest.raises(UsageError, match=r"backend of its own.*--embedder"):
        embedder_of("base", FACTS | {"backend": {"backend": "mine:Backend"}})
    with pytest.raises(ModelError, match=r"not on this machine.*--embedder"):
        embedder_of("base", FACTS | {"model": {"model": str(tmp_path)}})
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no input embeddings of a known name"):
        embedder_of("base", FACTS | {"model": {"model": str(tmp_path)}})
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"no json, 16 byte")
    with pytest.raises(ModelError, match="cannot be read"):
        embedder_of("base", FACTS | {"model": {"model": str(tmp_path)}})


# -- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_no_run_with_completions_is_told(tmp_path):
    out = tmp_path / "g.toml"
    campaign = tmp_path / "campaign"
    run_of(campaign / "runs" / "grpo+none_s1")
    nothing = run_of(tmp_path / "nothing", [])
    wrong = run_of(tmp_path / "wrong", [("let me check", False)])
    alone = run_of(tmp_path / "alone", [("let me check", True), ("so it goes", True)])
    (tmp_path / "empty").mkdir()
    for directory, words in (
        (tmp_path / "gone", "is not a directory: name a run directory"),
        (campaign, f"name one of its runs, such as {campaign / 'runs' / 'grpo+none_s1'}"),
        (tmp_path / "empty", "has no config.json of a run"),
        (nothing, "has no completions"),
        (wrong, "has no right answer among its completions: --all"),
        (alone, "no 3 words in a row stand in 0.01 of 2 completions"),
    ):
        code, output = command("mine", directory, "--out", out)
        assert code == 2
        assert words in output
        assert output.count("\n") == 1
    assert not out.exists()
    assert command("mine", wrong, "--out", out, "--all")[1].startswith("no 3 words")


def test_only_its_own_file_is_written_over(tmp_path):
    run, out = run_of(tmp_path / "run"), tmp_path / "grams.toml"
    out.write_text("[training]\nlr = 1e-4\n")
    code, output = command("mine", run, "--out", out)
    assert code == 2
    assert "was not written by retrain mine: give another file with --out" in output
    assert out.read_text() == "[training]\nlr = 1e-4\n"
    out.unlink()
    assert command("mine", run, "--out", out)[0] == 0
    edited = out.read_text().replace('    "', '    "well ', 1)
    out.write_text(edited)
    code, output = command("mine", run, "--out", out)
    assert code == 2
    assert "was edited since" in output
    assert out.read_text() == edited
    assert read_grams(out)[0].startswith("well ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[cluster", "is not TOML"),
        ("[mined]\n", "it has no [[cluster]]"),
        ("cluster = 3\n", "it has no [[cluster]]"),
        ("[[cluster]]\nid = 1\n", "it has no [[cluster]]"),
        ("[[cluster]]\ngrams = [3]\n", "has the gram 3: grams are strings"),
        ("[[cluster]]\ngrams = []\n", "has no grams to match"),
        ('[[cluster]]\ngrams = [" "]\n', "a planning phrase is empty"),
        (None, "no such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_grams_is_one_line_with_its_place(text, words, tmp_path):
    if text is not None:
        (tmp_path / "grams.toml").write_text(text)
    file = tmp_path / "f.toml"
    file.write_text('[training]\nmax_steps = 2\n[planning]\ngrams = "grams.toml"\n')
    code, output = command("check", file)
    assert code == 2
    assert output.startswith('f.toml:4  planning.grams  is "')
    assert words in output
    assert output.count("\n") == 1
    with pytest.raises(DataError):
        load_detector(load(file).config, tmp_path)


def test_other_grams_in_the_file_are_another_run(tmp_path):
    grams, file = tmp_path / "grams.toml", tmp_path / "f.toml"
    grams.write_text('[[cluster]]\ngrams = ["let me check"]\n')
    file.write_text('[planning]\ngrams = "grams.toml"\n')
    (spec,) = Plan.of(load(file)).specs
    before = module_hashes(spec.config, tmp_path)
    assert list(before) == [str(grams)]
    (tmp_path / "config.json").write_text(json.dumps({"modules": before}))
    assert not any("planning phrases" in line for line in version_changes(tmp_path, spec, tmp_path))
    grams.write_text('[[cluster]]\ngrams = ["let me verify"]\n')
    (line,) = [line for line in version_changes(tmp_path, spec, tmp_path) if "planning phrases" in line]
    assert line.startswith(f"planning phrases in {grams}: {before[str(grams)][:12]} → ")
    named = parse_dict({"planning": {"grams": "grams.toml"}})  # as a condition names it: beside the file
    assert list(module_hashes(named, tmp_path)) == ["grams.toml"]
    assert load_detector(named, tmp_path).phrases == ("let me verify",)


# -- a real run ------------------------------------------------------------------------------------------------------

RUN = """
[model]
model = "tiny-reasoner"
lora_rank = 4
[data]
source = "arithmetic"
[training]
max_steps = 2
batch_size = 6
group_size = 8
max_tokens = 40
[evaluation]
problems = 0
[logging]
rollouts_every = 1
[algorithm]
transform_mode = "gtpo_hicra"
"""


def test_the_phrases_of_a_real_run_mark_tokens_of_the_next(tmp_path):
    file = tmp_path / "first.toml"
    file.write_text(RUN)
    assert launch(load(file), tmp_path / "first", NullObserver()).exit_status == 0
    code, output = command("mine", tmp_path / "first", "--out", tmp_path / "grams.toml", "--all", "--top", "1")
    assert code == 0, output
    grams = read_grams(tmp_path / "grams.toml")
    assert any("let me" in gram or "the key" in gram for gram in grams)
    file = tmp_path / "second.toml"
    file.write_text(RUN + '[planning]\ngrams = "grams.toml"\n')
    assert launch(load(file), tmp_path / "second", NullObserver()).exit_status == 0
    first, second = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("first", "second"))
    # Before the first update both runs sample alike, so the share that plans is that of the phrases.
    assert first[0]["mean_reward"] == second[0]["mean_reward"]
    marked = [row[0]["planning_fraction"] for row in (first, second)]
    assert marked[1] != marked[0]
    assert marked[1] > 0
