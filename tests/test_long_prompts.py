"""Prompts that cannot be asked: too long for the model or the file, or refused by the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from toycampaign import REWARDS, toy_world
from toymodels import campaign_head, word_tokenizer
from typer.testing import CliRunner

from retrain.campaign.assemble import longest_completion
from retrain.campaign.launch import launch
from retrain.campaign.plan import plan
from retrain.cli import app
from retrain.config import load
from retrain.config.tasks import Data
from retrain.environments import Dataset, content_hash, load_data
from retrain.environments.prompts import fitting, render
from retrain.errors import DataError
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver
from retrain.run import DataCursor
from retrain.types import Problem

TRAIN = """
[model]
model = "{model}"
lora_rank = 4
[training]
batch_size = 2
group_size = 3
max_tokens = 8
lr = 0.01
save_every = 1
[evaluation]
problems = {heldout}
[reward]
type = "custom"
custom_module = "{module}"
workers = 1
[squeeze]
enabled = false
[data]
source = "problems.jsonl"
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_world(tmp_path_factory.mktemp("long"))


def campaign(folder: Path, model: Path, rows: list[dict[str, Any]], extra: str = "", heldout: int = 3,
             **head: Any) -> Path:  # fmt: skip
    """A file of one or more runs on these problems."""
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "toyrewards.py").write_text(REWARDS)
    text = TRAIN.format(model=model, module=folder / "toyrewards.py", heldout=heldout) + extra
    keys = {"seeds": [1], "max_steps": 2, **head}
    path = folder / "long.toml"
    path.write_text(campaign_head(("grpo", "none"), **keys) + text)
    return path


def rows(count: int, long: dict[int, int] | None = None) -> list[dict[str, Any]]:
    """Sums; those in ``long`` with so many words."""
    return [{"prompt": f"{i}+1=?" + " word" * (long or {}).get(i, 0), "answer": str(i + 1)} for i in range(count)]


# -- measuring --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(["12+34=? a word and another word"])


@pytest.mark.parametrize(
    "template",
    ["{prompt}", "Think hard about the following before you answer. {prompt} Now.", "{prompt} or {prompt}"],
)
@pytest.mark.parametrize("limit", [8, 20, 41, 60, 200])
def test_exactly_the_prompts_above_the_limit_are_left_out(tokenizer, limit: int, template: str) -> None:
    """Against rendering every prompt; texts of many bytes and few tokens, and the other way round."""
    texts = ["word" * n for n in range(60)] + ["é€😀" * n for n in range(25)] + ["1+1=?", " word" * 30, "x" * 190]
    problems = [Problem(str(i), text or "?", "1") for i, text in enumerate(texts)]
    few = (*problems[-3:], Problem("chat", ({"role": "user", "content": "a"},) * 9, "1"))
    section = Data(long_prompts="skip", prompt_template=template)
    data = Dataset("x", problems, list(few), content_hash(problems, list(few)))

    def short(problem: Problem) -> bool:
        return len(render(problem, tokenizer, section).token_ids) <= limit

    kept = [problem for problem in problems if short(problem)]
    if not kept:
        with pytest.raises(DataError, match="every prompt to train on is longer"):
            fitting(data, tokenizer, section, limit, "why")
        return
    fitted = fitting(data, tokenizer, section, limit, "why")
    assert fitted.train == kept
    assert fitted.heldout == [problem for problem in few if short(problem)]
    assert fitted.skipped == len(problems) + len(few) - len(fitted.train) - len(fitted.heldout)
    assert (fitted.content_hash == data.content_hash) == (fitted.skipped == 0)
    assert fitting(data, tokenizer, section, None, "") is data


def test_a_too_long_prompt_is_named_with_its_length_and_what_to_type(tokenizer) -> None:
    problems = [
        Problem("p.jsonl:1", "1?", "1"),
        Problem("p.jsonl:2", "1" * 50, "1"),
        Problem("p.jsonl:3", "1" * 60, ""),
    ]
    data = Dataset("p.jsonl", problems[:1], problems[1:], "")  # held-out problems count as well
    length = len(render(problems[1], tokenizer, Data()).token_ids)
    with pytest.raises(DataError) as caught:
        fitting(data, tokenizer, Data(), 20, "the reason")
    assert str(caught.value) == (
        f"p.jsonl:2  the prompt has {length} tokens, more than 20 (the reason); 1 more are too long: shorten it, or "
        'leave such problems out with [data] long_prompts = "skip"'
    )


# -- training ---------------------------------------------------------------------------------------------------


def without_weights(model: Path, folder: Path) -> Path:
    """The model's directory without its weights: what needs them fails."""
    shutil.copytree(model, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder / "bare"


@pytest.mark.parametrize(
    ("extra", "long", "words"),
    [
        ("", {5: 3000}, "tokens, more than 2040 ("),
        ("max_prompt_tokens = 30\n", {5: 40}, "more than 30 ([data] max_prompt_tokens = 30)"),
        ("max_prompt_tokens = 100000\n", {5: 3000}, "more than 2040 ("),  # a wish for more than the model holds
    ],
)
def test_train_finds_a_long_prompt_before_the_weights(world, tmp_path, extra, long, words) -> None:
    file = campaign(tmp_path, without_weights(world, tmp_path), rows(12, long), extra)
    result = CliRunner().invoke(app, ["train", str(file), "--out", str(tmp_path / "out"), "--plain"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    assert line.startswith("problems.jsonl:6  the prompt has ")
    assert words in line
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))


def test_a_template_that_raises_is_found_before_the_weights(world, tmp_path) -> None:
    model = without_weights(world, tmp_path)
    template(model, "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}")
    file = campaign(tmp_path, model, rows(12), 'system_prompt = "Be brief."\n')
    result = CliRunner().invoke(app, ["train", str(file), "--out", str(tmp_path / "out"), "--plain"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    assert "refuses problem problems.jsonl:" in line
    assert line.endswith("no system role: leave [data] system_prompt out")


class Listening(NullObserver):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def message(self, text: str, level: str = "info") -> None:
        self.heard.append(text)


def test_skipped_problems_are_counted_logged_and_in_the_row(world, tmp_path) -> None:
    long = dict.fromkeys(range(0, 12, 3), 40)
    file = campaign(tmp_path, world, rows(12, long), 'max_prompt_tokens = 30\nlong_prompts = "skip"\n', heldout=6)
    file.write_text(file.read_text() + "eval_fraction = 0.5\n")
    observer = Listening()
    outcome = launch(load(file), tmp_path / "out", observer)
    assert outcome.exit_status == 0
    (note,) = [text for text in observer.heard if "left out for prompts of more than 30 tokens" in text]
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert note in (run / "run.log").read_text()
    made = read_jsonl(run / "metrics.jsonl")
    assert [row["skipped_prompts"] for row in made] == [4, 4]
    sizes = read_json(run / "config.json")["data_sizes"]
    assert sizes["train"] + sizes["heldout"] == 8
    asked = load_data(load(file).config.data, 6, base_dir=tmp_path)
    assert f"{6 - sizes['train']} of 6 training problems, {6 - sizes['heldout']} of 6 held-out ones" in note
    assert {p.id for p in asked.train} > {row["problem_id"] for row in read_jsonl(run / "emergence/generations.jsonl")}
    evaluated = {row["problem_id"] for row in read_jsonl(run / "emergence/evaluations.jsonl")}
    assert len(evaluated) == sizes["heldout"]
    assert evaluated.isdisjoint({f"problems.jsonl:{i + 1}" for i in long})


def test_all_runs_of_a_plan_are_asked_the_same_whatever_their_max_tokens(world, tmp_path) -> None:
    file = campaign(tmp_path, world, rows(12))
    head = campaign_head(("grpo", "none"), ("grpo", "none"), seeds=[1], max_steps=2)
    _, _, rest = file.read_text().partition("\n[model]")
    file.write_text(f'{head}"training.max_tokens" = 40\n[model]{rest}')
    specs = plan(load(file))
    assert len({spec.config.training.max_tokens for spec in specs}) == 2
    launch(load(file), tmp_path / "out", NullObserver())
    for spec in specs:  # also of a cohort that has only one of them
        assert longest_completion(tmp_path / "out", [spec]) == 40


def test_explain_says_how_long_a_prompt_may_be(world, tmp_path) -> None:
    file = campaign(tmp_path, world, rows(12))
    told = CliRunner().invoke(app, ["explain", str(file)]).stdout
    assert "prompts       at most 2040 tokens (the model's 2048 without max_tokens); longer ones end the start" in told
    file.write_text(file.read_text() + 'max_prompt_tokens = 30\nlong_prompts = "skip"\n')
    told = CliRunner().invoke(app, ["explain", str(file)]).stdout
    assert "prompts       at most 30 tokens ([data] max_prompt_tokens); longer ones are left out" in told


def template(model: Path, addition: str) -> None:
    """Put ``addition`` before the model's chat template."""
    for path in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if path.suffix == ".jinja" and path.is_file():
            path.write_text(addition + path.read_text())
            return
        content = json.loads(path.read_text())
        if "chat_template" in content:
            path.write_text(json.dumps(content | {"chat_template": addition + content["chat_template"]}))


def test_a_prompt_that_cannot_be_rendered_costs_its_own_run(world, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(world, model)
    template(model, "{% if 'odd' in messages[0]['content'] %}{{ raise_exception('not this one') }}{% endif %}")
    problems = [*rows(15), {"prompt": "odd", "answer": "1"}, *rows(31)[16:]]

    def meets(seed: int) -> int:
        """The step at which this seed's order comes to the problem."""
        found = load_data(Data(source=str(tmp_path / "problems.jsonl")), 0).train
        cursor = DataCursor(found, (0, seed))
        return next(i for i in range(40) if any(p.prompt == "odd" for p in cursor.take(2)))

    campaign(tmp_path, model, problems)
    meeting = {seed: meets(seed) for seed in range(1, 60)}
    late = [seed for seed, at in meeting.items() if at > 4][:2]
    (early, *_) = [seed for seed, at in meeting.items() if at == 1]
    file = campaign(tmp_path, model, problems, seeds=[late[0], early, late[1]], max_steps=3, heldout=0)
    launch(load(file), tmp_path / "out", NullObserver())
    runs = {int(run["run_id"].rpartition("_s")[2]): run for run in read_json(tmp_path / "out/manifest.json")["runs"]}
    assert {seed: run["state"] for seed, run in runs.items()} == {late[0]: "done", early: "failed", late[1]: "done"}
    assert "not this one" in runs[early]["reason"]
    assert "problems.jsonl:16" in runs[early]["reason"]
    for seed, run in runs.items():
        assert len(read_jsonl(tmp_path / "out" / run["path"] / "metrics.jsonl")) == (1 if seed == early else 3)


def test_a_model_without_a_chat_template_is_noted(world, tmp_path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(world, plain, ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = json.loads((plain / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    heard = {}
    for model in (world, plain):
        observer, out = Listening(), tmp_path / f"out-{model.name}"
        launch(load(campaign(tmp_path, model, rows(12), heldout=0, max_steps=1)), out, observer)
        heard[model.name] = [text for text in observer.heard if "has no chat template" in text]
    assert [len(heard[model.name]) for model in (world, plain)] == [0, 1]
