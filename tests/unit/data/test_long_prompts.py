import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import REWARDS, Heard, run_cli, toy_toml, train
from helpers.models import campaign_head, word_tokenizer

from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import Data
from retrain.data import Dataset, content_hash
from retrain.data.dataset import PromptLimit, without_long_prompts
from retrain.data.prompts import render
from retrain.errors import DataError
from retrain.training import bases as models
from retrain.types import Problem


def campaign(folder: Path, model: Path, rows: list[Any], extra: str = "", heldout: int = 3, **head: Any) -> Path:
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "toyrewards.py").write_text(REWARDS)
    training = {"batch_size": 2, "group_size": 3, "max_tokens": 8, "save_every": 1}
    sections = {"evaluation": {"problems": heldout}, "data": {"source": "problems.jsonl"}}
    text = toy_toml(model, reward={"custom_module": f"{folder}/toyrewards.py"}, training=training, **sections) + extra
    path = folder / "long.toml"
    path.write_text(campaign_head(("grpo", "none"), **{"seeds": [1], "max_steps": 2, **head}) + text)
    return path


def rows(count: int, long: dict[int, int] | None = None) -> list[dict[str, Any]]:
    """Sums; those in ``long`` with so many words."""
    return [{"prompt": f"{i}+1=?" + " word" * (long or {}).get(i, 0), "answer": str(i + 1)} for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(["12+34=? a word and another word"])


@pytest.mark.parametrize("template", ["{prompt}", "Think hard about this before you answer. {prompt} or {prompt}"])
@pytest.mark.parametrize("limit", [8, 41, 200])
def test_exactly_the_prompts_above_the_limit_are_left_out(tokenizer, limit: int, template: str):
    """Against rendering every prompt; texts of many bytes and few tokens, and the other way round."""
    texts = ["?", *("word" * n for n in range(1, 60)), *("é€😀" * n for n in range(1, 25))]
    texts += ["1+1=?", " word" * 30, "x" * 190]
    problems = [Problem(str(i), text, "1") for i, text in enumerate(texts)]
    few = [*problems[-3:], Problem("chat", ({"role": "user", "content": "a"},) * 9, "1")]
    section = Data(long_prompts="skip", prompt_template=template)
    data = Dataset("x", problems, {HELDOUT: few}, content_hash(problems, few))
    room = PromptLimit(section, limit, "why")
    train, heldout = (
        [problem for problem in part if len(render(problem, tokenizer, section).token_ids) <= limit]
        for part in (problems, few)
    )
    if not train or not heldout:
        part = "that is held out" if train else "to train on"
        with pytest.raises(DataError, match=f"every prompt {part} is longer than {limit} tokens"):
            without_long_prompts(data, tokenizer, room, {HELDOUT: room})
        return
    fitted = without_long_prompts(data, tokenizer, room, {HELDOUT: room})
    assert (fitted.train, fitted.heldout) == (train, heldout)
    assert fitted.skipped == len(problems) + len(few) - len(train) - len(heldout)
    assert (fitted.content_hash == data.content_hash) == (fitted.skipped == 0)
    anything = PromptLimit(section, None, "")
    assert without_long_prompts(data, tokenizer, anything, {HELDOUT: anything}) is data


SETS = """
[evaluation]
problems = 4
[[evaluation.sets]]
name = "same"
[[evaluation.sets]]
name = "long_answers"
max_tokens = 900
[[evaluation.sets]]
name = "other"
source = "other.jsonl"
system_prompt = "one two three four five six seven eight nine ten"
"""


@pytest.mark.usefixtures("weightless")
def test_train_check_and_explain_look_at_every_held_out_set(model, tmp_path):
    file = campaign(tmp_path, model, rows(12))
    text = file.read_text().replace("\n[evaluation]\nproblems = 3\n", SETS)
    file.write_text(text)
    other = tmp_path / "other.jsonl"

    def run(*command: str) -> tuple[int, str]:
        result = run_cli(command[0], file, *command[1:])
        return result.exit_code, result.stdout + result.stderr

    other.write_text('{"prompt": "5 6 7 8?", "answer": "9"}\n{"prompt": "6 7 8?"}\n')
    status, output = run("check")
    assert status == 2
    line = text.splitlines().index('source = "other.jsonl"') + 1
    assert f"long.toml:{line}  evaluation.sets[3].source  " in output
    assert 'other.jsonl:2  has no column "answer"' in output
    other.write_text('{"prompt": "5 6 7 8?", "answer": "9"}\n' + json.dumps(rows(1, {0: 1100})[0]) + "\n")
    line = text.splitlines().index("[data]") + 1
    for command in (["check"], ["train", "--out", str(tmp_path / "out"), "--plain"]):
        status, output = run(*command)
        assert status == 2
        where = f'long.toml:{line}  data.long_prompts  is "error": other.jsonl:2  the prompt in the set other has '
        assert output.splitlines()[-1].startswith(where)
        assert "more than 2040 (" in output.splitlines()[-1]
    _, output = run("explain")
    assert "at most 1148 tokens in the set long_answers (" in output
    assert "training would end at once: other.jsonl:2  the prompt in the set other has " in output
    file.write_text(text + 'long_prompts = "skip"\n')
    _, output = run("explain")
    assert "1 of 2 in the set other; the first is other.jsonl:2 with " in output
    assert "training would end" not in output
    assert run("check")[0] == 0
    file.write_text(text + 'long_prompts = "skip"\nmax_prompt_tokens = 3\n')
    assert "every prompt to train on is longer than 3 tokens ([data] max_prompt_tokens = 3); the " in run("check")[1]


@pytest.mark.parametrize(("setting", "message"), [
    ("training.max_tokens=2048", "training.max_tokens  is 2048, and {} has a context of 2048 tokens"),
    ("evaluation.max_tokens=3000", "evaluation.max_tokens  is 3000, and {} has a context of 2048 tokens"),
    ("training.max_tokens=2044", 'data.long_prompts  is "error": problems.jsonl:1  the prompt has '),
    ("data.max_prompt_tokens=30", "more than 30 ([data] max_prompt_tokens = 30)"),
    ("data.max_prompt_tokens=100000", "more than 2040 ("),  # a wish for more than the model holds
])  # fmt: skip
@pytest.mark.usefixtures("weightless")
def test_check_and_train_refuse_completions_that_leave_no_room(model, tmp_path, setting, message):
    long = "more than" in message
    file = campaign(tmp_path, model, rows(12, {5: 3000} if long else None))
    for command in (["check"], ["train", "--plain", "--out", str(tmp_path / "out")]):
        result = run_cli(*command, file, "--set", setting)
        assert result.exit_code == 2
        (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
        assert message.format(model) in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def weightless(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "load_weights", lambda *_: pytest.fail("weights are loaded"))


@pytest.mark.usefixtures("weightless")
def test_a_template_that_raises_is_an_error_before_the_weights_are_loaded(model, tmp_path):
    template = shutil.copytree(model, tmp_path / "model") / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    file = campaign(tmp_path, template.parent, rows(12), 'system_prompt = "Be brief."\n')
    result = run_cli("train", file, "--out", tmp_path / "out", "--plain")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()[-1:]
    assert "refuses problem problems.jsonl:" in line
    assert line.endswith("no system role: leave [data] system_prompt out")


def test_a_model_without_a_chat_template_is_noted(model, tmp_path):
    plain = shutil.copytree(model, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template.jinja"))
    observer = Heard()
    train(campaign(tmp_path, plain, rows(12), heldout=0, max_steps=1), tmp_path / "out", observer=observer)
    assert len([text for text in observer.messages if "has no chat template" in text]) == 1
