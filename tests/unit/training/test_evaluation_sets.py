import json
from pathlib import Path

import pytest
from helpers.campaigns import Heard, campaign, continue_training, run_cli, timeless, toy_world, train

from retrain.config import load
from retrain.data.dataset import load_data
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json, read_jsonl
from retrain.verdicts.pooling import compare_directories
from retrain.verdicts.report import write_report

SETS = """
[[evaluation.sets]]
name = "heldout"
[[evaluation.sets]]
name = "own.file"
source = "{file}"
problems = 4
samples = 2
temperature = 0.5
max_tokens = 6
tags_column = "kind"
"""


def sets_file(folder: Path, model: Path, name: str, sets: str = SETS, **keys) -> Path:
    """A toy campaign with held-out sets; the file of the second has one problem that is trained on."""
    path = campaign(folder, model, name, condition='reward = {custom_function = "opposite"}', **keys)
    config = load(path).config
    twice = load_data(config.data, max_examples=config.training.max_examples).train[3].prompt
    rows = [{"prompt": p, "answer": "1", "kind": "seen" if p == twice else "new"} for p in (twice, "a?", "b?", "c?")]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(path.read_text().replace("[reward]", sets.format(file=folder / "own.jsonl") + "[reward]"))
    return path


OPPOSITE = """
def opposite(completion, answer):
    return 1.0 - score(completion, answer)
"""
DECLARED = ["campaign.primary_metric=eval/own.file/pass@2", "campaign.lanes=2", "squeeze.enabled=false"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    model = toy_world(tmp_path_factory.mktemp("home"))
    with (model.parent / "toyrewards.py").open("a") as module:
        module.write(OPPOSITE)
    return model


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory) -> tuple[Path, Heard]:
    folder, observer = tmp_path_factory.mktemp("sets"), Heard()
    path = sets_file(folder, model, "sets", steps=3)
    train(path, folder / "out", *DECLARED, observer=observer)
    return folder / "out", observer


def test_every_set_has_its_files_and_rows(trained):
    out, observer = trained
    run = out / "runs/grpo+none_s1"
    rows = read_jsonl(run / "evals.jsonl")
    evaluated = [(name, step) for step in (0, 2, 3) for name in ("heldout", "own.file")]
    assert [(row["name"], row["step"]) for row in rows] == evaluated
    assert all((run / f"eval_{name}_iteration_{step:06d}_logtree.json").is_file() for name, step in evaluated)
    own = rows[1]
    assert (own["temperature"], own["samples"], own["max_tokens"], own["eval/own.file/problems"]) == (0.5, 2, 6, 4)
    assert (rows[0]["samples"], rows[0]["max_tokens"], rows[0]["eval/heldout/problems"]) == (1, 10, 5)
    assert {"eval/own.file/pass@2", "eval/own.file/new/correct_rate"} < own.keys()
    assert not [key for key in own if key.startswith("eval/heldout")]
    steps = read_jsonl(run / "metrics.jsonl")
    assert {key for key in steps[0] if key.startswith("eval/")} == {
        key for row in rows for key in row if key.startswith("eval/")
    }
    assert [row["eval/own.file/step"] for row in steps] == [0, 2, 3]
    assert {row["name"] for row in read_jsonl(run / "emergence/evaluations.jsonl")} == {"heldout", "own.file"}
    held_out = "1 of 500 training problems left out: they are held out in the set own.file"
    assert any(held_out in line for line in observer.messages)
    facts = read_json(run / "config.json")
    assert set(facts["heldout_hashes"]) == {"heldout", "own.file"}
    assert facts["data_sizes"] == {"train": 499, "heldout": 9}


def test_the_base_is_scored_once_for_every_way_to_grade(trained):
    """One condition rewards what the other punishes; the later cohort samples no base again."""
    out, _ = trained
    (one, other), (one_again, other_again) = (
        [read_jsonl(run / "evals.jsonl") for run in sorted((out / "runs").glob(f"*_s{seed}"))] for seed in (1, 2)
    )
    assert (one[:2], other[:2]) == (one_again[:2], other_again[:2])  # the seconds too
    assert one[2:] != one_again[2:]
    assert one[0]["eval/heldout/reward_mean"] + other[0]["eval/heldout/reward_mean"] == pytest.approx(1)
    assert one[0]["eval/heldout/reward_mean"] != other[0]["eval/heldout/reward_mean"]
    assert len(list((out / "base").glob("*.npz"))) == 4  # of two sets
    answers = [read_jsonl(run / "emergence/evaluations.jsonl") for run in (out / "runs").iterdir()]
    asked = [[(row["step"], row["name"], row["problem_id"]) for row in rows] for rows in answers]
    assert all(rows == asked[0] for rows in asked)


def test_a_set_changes_no_number_of_another(trained, model, tmp_path):
    """The default set of a campaign without named sets is sampled as the first of several."""
    train(campaign(tmp_path, model, "plain", steps=1), tmp_path / "out", "campaign.seeds=[1]", "squeeze.enabled=false")
    name = "runs/grpo+none_s1/evals.jsonl"  # of the untrained model: training itself lacks one problem
    assert timeless(tmp_path / "out" / name)[0] == timeless(trained[0] / name)[0]


def test_the_declared_set_decides_and_all_sets_are_shown(trained):
    out, _ = trained
    comparison = read_json(out / "comparison.json")
    assert (comparison["metric"], comparison["summary"]) == ("eval/own.file/pass@2", "final")
    shown = {(each["summary"], each["metric"]) for each in comparison["secondary"]}
    assert {(how, f"eval/{name}/correct_rate") for how in ("final", "auc") for name in ("heldout", "own.file")} <= shown
    assert ("final", "eval/own.file/new/correct_rate") in shown
    short = compare_directories([out], metric="correct_rate")
    assert short["metric"] == "eval/heldout/correct_rate"  # short names are those of the first set
    with pytest.raises(UsageError, match=r"own\.file/correct_rate"):
        compare_directories([out], metric="eval/own.fil/correct_rate")
    assert "Held-out accuracy on own.file" in write_report(out, None).read_text()
    output = run_cli("status", "--plain", out).output
    assert "own.file before" in output.splitlines()[0]


def test_killed_between_two_sets_all_rows_are_those_of_a_whole_run(trained, model, tmp_path):
    path, out = sets_file(tmp_path, model, "sets", steps=3), tmp_path / "out"
    train(path, out, *DECLARED, "campaign.seeds=[1]", observer=Heard(stop=("heldout", 2)), status=130)
    continue_training(out)
    runs = sorted((trained[0] / "runs").glob("*_s1"))
    assert len(runs) == 2
    for run in runs:
        again = out / "runs" / run.name
        assert timeless(run / "evals.jsonl") == timeless(again / "evals.jsonl")
        for name in ("emergence/evaluations.jsonl", "emergence/generations.jsonl"):
            text = (run / name).read_text().replace(str(trained[0].parent), str(tmp_path))
            assert text == (again / name).read_text()


def test_sets_are_parts_of_one_file_or_files_of_their_own(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "q{i}", "answer": "{i}"}}\n' for i in range(60)))
    (tmp_path / "t.jsonl").write_text('{"q": "q1", "a": "x"}\n{"q": "other", "a": "y"}\n')
    (tmp_path / "f.toml").write_text(
        '[data]\nsource = "p.jsonl"\neval_fraction = 0.2\n[[evaluation.sets]]\nname = "part"\n[[evaluation.sets]]\n'
        'name = "less"\nproblems = 3\n[[evaluation.sets]]\nname = "t"\nsource = "t.jsonl"\nprompt_column = "q"\n'
        'answer_column = "a"\nprompt_template = "Say {prompt}"\n'
    )
    config = load(tmp_path / "f.toml").config
    data = load_data(config.data, config.held_out, base_dir=tmp_path)
    assert data.sets["less"] == data.sets["part"][:3]
    assert [problem.prompt for problem in data.sets["t"]] in (["q1", "other"], ["other", "q1"])
    held_out = {problem.prompt for problem in data.heldout}
    assert held_out.isdisjoint(problem.prompt for problem in data.train)
    assert len(data.train) + len(held_out - {"other"}) == 60
    assert config.held_out[2].data.prompt_template == "Say {prompt}"
    assert config.held_out[0].data == config.data
    assert load_data(config.data, config.held_out[:1], base_dir=tmp_path).heldout == data.sets["part"]


HEAD = '[campaign]\nmax_steps = 60\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\n'


@pytest.mark.parametrize(("toml", "line", "parts"), [
    ('name = "my test/set"', 3, ['evaluation.sets[1].name  is "my test/set"', 'name = "my_test_set"']),
    ('name = "train"', 3, ['is "train", which is what', 'name = "train_part"']),
    ('name = ".."', 3, ['must be at most 64 letters, digits, . _ and -', 'name = "test"']),
    ('problems = 3', 2, ["evaluation.sets[1].name  is missing"]),
    ('name = "a"\n[[evaluation.sets]]\nname = "A"', 5, ["like set 1", 'name = "A_2"']),
    ('name = "a"\nsplit = "test"', 4, ['split  has no effect with source = "arithmetic"']),
    ('name = "a"\nprompt_column = "q"', 4, ["has no effect without a source of the set's own"]),
    ('name = "a"\nsamples = 2\ntemperature = 0', 4, ["is 2 at temperature 0"]),
])  # fmt: skip
def test_mistakes_in_sets_name_their_line(tmp_path, toml, line, parts):
    path = tmp_path / "f.toml"
    path.write_text(f"[evaluation]\n[[evaluation.sets]]\n{toml}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    (mistake,) = str(caught.value).splitlines()
    assert mistake.startswith(f"f.toml:{line}  ")
    assert all(part in mistake for part in parts), mistake


@pytest.mark.parametrize(("keys", "message"), [
    ("campaign.primary_metric='eval/tset/correct_rate'", 'primary_metric = "eval/test/correct_rate"'),
    ("campaign.primary_metric='auc:eval/test/correct_rate'", "eval_every ="),
    ("campaign.primary_metric='eval/test/pass@8'", "needs 8 samples of each held-out problem and has 4"),
    ("evaluation.problems=0", "which switches evaluation off, beside 2 [[evaluation.sets]]"),
])  # fmt: skip
def test_the_declared_set_exists_and_has_the_samples(tmp_path, keys, message):
    path = tmp_path / "f.toml"
    path.write_text(HEAD + '[[evaluation.sets]]\nname = "first"\n[[evaluation.sets]]\nname = "test"\nsamples = 4\n')
    assert load(path, ["campaign.primary_metric='eval/test/pass@4'"]).config.decisive.name == "test"
    assert load(path).config.decisive.name == "first"
    with pytest.raises(ConfigError) as caught:
        load(path, [keys])
    assert message in str(caught.value)


def test_conditions_share_the_sets_and_a_missing_function_is_named_with_its_line(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text(HEAD + '"evaluation.sets" = [{ name = "mine" }]\n')
    with pytest.raises(ConfigError, match="cannot differ between conditions"):
        load(path)
    path.write_text('[[evaluation.sets]]\nname = "a"\nsource = "nosuchmodule:problems"\n')
    result = run_cli("check", path)
    assert result.exit_code == 2
    assert "f.toml:3  evaluation.sets[1].source" in result.output + result.stderr
