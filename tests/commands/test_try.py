import json
import re
from pathlib import Path

import pytest
from helpers.campaigns import run_cli, train_quietly
from helpers.models import TINY_RUN, TWO_CONDITIONS, qwen3_directory
from helpers.records import HOSTILE

from retrain.campaign.planning.plan import Plan
from retrain.cli.output import print_record
from retrain.cli.probe import print_trial
from retrain.config import load
from retrain.files import read_jsonl
from retrain.probe.trial import others

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "campaigns" / "quickstart.toml"
REWARDS = """
import time

from retrain import RewardResult


def score(completion, answer):
    return RewardResult(len(completion) % 5 / 4, sample_metrics={"characters": len(completion)}, tags=("seen",))


def broken(completion, answer):
    raise RuntimeError("no such \\x1b[31mcolumn")


def hangs(completion, answer):
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("try")
    qwen3_directory(path / "model", ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"])
    (path / "rewards.py").write_text(REWARDS)
    return path


def file(home: Path, function: str = "score", name: str = "run", head: str = "", more: str = "") -> Path:
    path = home / f"{name}.toml"
    reward = f'[reward]\ntype = "custom"\ncustom_module = "rewards.py"\ncustom_function = "{function}"\ntimeout_s = 1\n'
    path.write_text(head + TINY_RUN.format(model=home / "model") + "max_tokens = 8\n" + reward + more)
    return path


def test_a_warm_up_is_left_out_and_said_so(home, tmp_path):
    example = '{"prompt": "1+1=?", "completion": "2"}\n'
    (home / "examples.jsonl").write_text(example)
    warmup = '[warmup]\nsource = "examples.jsonl"\nsteps = 1000000\n'
    plain, warmed = (
        run_cli("try", file(home, name=name, more=more), "--problems", "2", "--json")
        for name, more in (("plain", ""), ("warmed", warmup))
    )
    assert "[warmup] is left out: these are answers of the base" in warmed.stderr
    sampled = [
        [(prompt["rendered"], [sample["text"] for sample in prompt["samples"]]) for prompt in found["prompts"]]
        for found in (json.loads(plain.stdout), json.loads(warmed.stdout))
    ]
    assert sampled[0] == sampled[1]


def test_it_is_the_first_step_of_training(home, tmp_path, monkeypatch):
    """Prompts, answers and rewards are those that training records at step 0; nothing is written."""
    monkeypatch.chdir(tmp_path)
    more = '[data]\nprompt_template = "Say {prompt} now"\n[logging]\nreport_to = ["tensorboard"]\n'
    path = file(home, more=more)
    before = {path.name for path in home.iterdir()}
    result = run_cli("try", path, "--problems", "2", "--json")
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    assert {path.name for path in home.iterdir()} - before <= {"__pycache__"}
    found = json.loads(result.stdout)
    (tmp_path / "rewards.py").write_text(REWARDS)
    train_quietly(tmp_path, path.read_text())
    trained = [row for row in read_jsonl(tmp_path / "out/emergence/generations.jsonl") if row["step"] == 0]
    samples = [sample for prompt in found["prompts"] for sample in prompt["samples"]]
    expected = [(row["completion"], row["reward"]) for row in trained]
    assert [(sample["text"], sample["reward"]) for sample in samples] == expected
    for sample in samples:
        assert sample["sample_metrics"] == {"characters": len(sample["text"])}
        assert sample["tags"] == ["seen"]
    assert found["verdict"]["mean_reward"] == pytest.approx(sum(row["reward"] for row in trained) / 8)
    assert all(re.fullmatch("<turn>Say .* now<turn>", prompt["rendered"], re.DOTALL) for prompt in found["prompts"])
    assert found["sampling"]["step_answers"] == found["grading"]["step_answers"] == 8


def test_the_bundled_model_in_lines():
    result = run_cli("try", QUICKSTART, "--problems", "2", "--samples", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    kinds = ["run", *["prompt", "answer", "answer", "answer"] * 2, "sampling", "grading", "verdict"]
    assert [line.split()[0] for line in lines] == kinds
    assert 'text="<|user|>' in lines[1]
    assert "components=" in lines[2]


@pytest.mark.parametrize(("function", "reason"), [("broken", "RuntimeError: no such"), ("hangs", "longer than 1 s")])
def test_a_reward_that_always_fails_is_found(home, function, reason, monkeypatch):
    """Exit status 1 with the reason once and how often; one that hangs is not waited for answer by answer."""
    monkeypatch.setattr("retrain.adapters.talk.PATIENCE_S", 1.5)
    result = run_cli("try", file(home, function), "--problems", "2")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("the reward graded none of 8 answers: ")
    assert reason in result.stderr
    assert "\x1b" not in result.output
    verdict = next(line for line in result.stdout.splitlines() if line.startswith("verdict "))
    assert "all_failed=true" in verdict
    tried = 2 if function == "hangs" else 8
    assert f"graded={tried} failed=8" in result.stdout
    assert ("not tried: no grade in" in result.stdout) == (function == "hangs")


def test_conditions_are_chosen_by_label(home):
    head = TWO_CONDITIONS + '"training.temperature" = 0.5\n"training.max_tokens" = 3\n'
    path = file(home, name="campaign", head=head)
    (other,) = others(Plan.of(load(path)), None)
    second = run_cli("try", path, "--problems", "1", "--json", "--condition", other)
    assert json.loads(second.stdout)["run"] == f"{other}_s1"
    assert json.loads(second.stdout)["verdict"]["max_tokens"] == 3
    wrong = run_cli("try", path, "--condition", "none")
    assert (wrong.exit_code, other in wrong.stderr) == (2, True)


def poisoned(value, text: str, name: str = ""):
    """Return the data with this text in place of every text that is not ours, and of names of metrics and errors."""
    if name in ("components", "sample_metrics", "reasons"):
        return {text: 1}
    if isinstance(value, dict):
        return {key: poisoned(inner, text, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner, text) for inner in value]
    return text if isinstance(value, str) and name not in ("run", "stop") else value


@pytest.fixture(scope="module")
def found(home) -> list[dict]:
    outputs = [run_cli("try", file(home, name), "--problems", "1", "--json").stdout for name in ("score", "broken")]
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_text_never_reaches_a_terminal(name, found, capsys):
    """As prompt, answer, problem id, metric and error: escaped, and no line of it passes for one of ours."""
    text = HOSTILE[name]
    for trial in found:
        print_trial(poisoned(trial, text))
    out = capsys.readouterr().out
    shown = {"\u00ad", "\ufffe", "\uffff", "\U0010ffff"}
    assert all(c.isprintable() or c == "\n" or c in shown for c in out), ascii(out)
    starts = ("problem", "  answer", "  │ ", "    │ ", "run ", "sampling ", "grading ", "failed ", "rewards ",
              "careful ")  # fmt: skip
    assert all(line.startswith(starts) or not line for line in out.split("\n"))
    print_record("answer", text=text, reason=text)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert not {*out} & {*map(chr, (*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2028))}
    shown_text = "".join("?" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert json.loads(out.partition("text=")[2].rpartition(" reason=")[0]) == shown_text
