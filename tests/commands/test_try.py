"""``try``: the first step's prompts and answers, what the reward says of them, and rewards that cannot work."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import HOSTILE
from toymodels import TINY_RUN, TWO_CONDITIONS, qwen3_directory, train_quietly
from typer.testing import CliRunner

from retrain.campaign.planning.plan import Plan
from retrain.campaign.running import trial as trying
from retrain.cli import app
from retrain.commands.output import print_record, print_text
from retrain.commands.trial import advice_of, print_trial, sample_words, seconds_words
from retrain.config import load
from retrain.environments.hosted import Hosted
from retrain.files import read_jsonl

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


def sometimes(completion, answer):
    if len(completion) % 2:
        raise ValueError("odd")
    return 1.0


def slow(completion, answer):
    time.sleep(0.05)
    return 0.0
"""


def run(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


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


def test_it_is_the_first_step_of_training(home, tmp_path):
    """Prompts, answers, rewards, components and sample metrics are those that training records at step 0."""
    path = file(home, more='[data]\nprompt_template = "Say {prompt} now"\n')
    result = run("try", path, "--problems", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (tmp_path / "rewards.py").write_text(REWARDS)
    train_quietly(tmp_path, path.read_text())
    trained = [row for row in read_jsonl(tmp_path / "out/emergence/generations.jsonl") if row["step"] == 0]
    samples = [sample for prompt in found["prompts"] for sample in prompt["samples"]]
    assert len(samples) == len(trained) == 8
    for sample, row in zip(samples, trained, strict=True):
        assert sample["text"] == row["completion"]
        assert sample["reward"] == row["reward"]
        assert sample["sample_metrics"] == {"characters": len(sample["text"])}
        assert sample["tags"] == ["seen"]
    assert found["verdict"]["mean_reward"] == pytest.approx(sum(row["reward"] for row in trained) / 8)
    for prompt in found["prompts"]:
        assert prompt["rendered"].startswith("<turn>Say ")
        assert prompt["rendered"].endswith(" now<turn>")
    assert found["sampling"]["step_answers"] == found["grading"]["step_answers"] == 8


def test_an_environment_that_cannot_grade_is_told_in_one_line(home, monkeypatch):
    shutil.copy(Path(__file__).parents[1] / "toy_environments.py", home)
    path = home / "episodes.toml"
    path.write_text(
        TINY_RUN.format(model=home / "model") + 'max_tokens = 8\n[environment]\nprovider = "toy_environments:Echo"\n'
    )

    def results(self, episodes):
        raise ValueError("the grader is away")

    monkeypatch.setattr(Hosted, "results", results)
    result = run("try", path, "--problems", "1")
    assert result.exit_code == 1
    assert "rollouts failed: ValueError: the grader is away (test_try.py:" in result.output
    assert isinstance(result.exception, SystemExit)  # no traceback


def test_nothing_is_written_and_nobody_told(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    more = '[logging]\nreport_to = ["tensorboard"]\nwandb_project = "mine"\n[backend]\nadapter_path = "adapters"\n'
    before = sorted(home.iterdir())
    result = run("try", file(home, more=more), "--problems", "1", "--samples", "2", "--json")
    assert result.exit_code == 0, result.output
    assert [len(prompt["samples"]) for prompt in json.loads(result.stdout)["prompts"]] == [2]
    left = [path for path in tmp_path.rglob("*") if path.name != "tmp"]
    assert left == []
    assert {path.name for path in home.iterdir()} - {path.name for path in before} <= {"__pycache__", "run.toml"}


def test_more_problems_than_a_batch(home):
    found = json.loads(run("try", file(home), "--problems", "5", "--samples", "1", "--json").stdout)
    assert len({prompt["id"] for prompt in found["prompts"]}) == 5


def test_the_bundled_model_in_lines(tmp_path):
    result = run("try", QUICKSTART, "--problems", "2", "--samples", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "run", *["prompt", "answer", "answer", "answer"] * 2, "sampling", "grading", "verdict"
    ]  # fmt: skip
    assert 'text="<|user|>' in lines[1]
    assert "components=" in lines[2]


@pytest.mark.parametrize(("function", "reason"), [("broken", "RuntimeError: no such"), ("hangs", "longer than 1 s")])
def test_a_reward_that_always_fails_is_found(home, function, reason, monkeypatch):
    """Exit status 1 with the reason once and how often; one that hangs is not waited for answer by answer."""
    monkeypatch.setattr(trying, "PATIENCE_S", 1.5)
    result = run("try", file(home, function), "--problems", "2")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("the reward graded none of 8 answers: ")
    assert reason in result.stderr
    assert "\x1b" not in result.output
    verdict = next(line for line in result.stdout.splitlines() if line.startswith("verdict "))
    assert "all_failed=true" in verdict
    tried = 2 if function == "hangs" else 8
    assert f"graded={tried} failed=8" in result.stdout
    assert ("not tried: no grade in" in result.stdout) == (function == "hangs")


def test_a_reward_that_fails_now_and_then_is_told(home):
    result = run("try", file(home, "sometimes"), "--problems", "4")
    assert result.exit_code == 0
    failed = [line for line in result.stdout.splitlines() if line.startswith("failed ")]
    assert len(failed) == 1
    assert "ValueError: odd" in failed[0]
    assert "correct=true" in result.stdout


def test_a_step_of_grading_counts_workers(home):
    """Eight answers of 0.05 s: half a second with one worker, a quarter of that with four."""
    slow = file(home, "slow")
    seconds = {}
    for workers in (1, 4):
        result = run("try", slow, "--problems", "1", "--json", "--set", f"reward.workers={workers}")
        grading = json.loads(result.stdout)["grading"]
        assert 0.05 <= grading["mean_seconds"] < 0.5
        assert grading["workers"] == workers
        seconds[workers] = grading["step_seconds"] / grading["mean_seconds"]
    assert seconds == {1: pytest.approx(8), 4: pytest.approx(2)}


def test_a_grader_that_raises_is_a_reason(home, monkeypatch):
    """Where training would end the run."""
    monkeypatch.setattr("retrain.rewards.base.Grader.grade", lambda self, items: 1 / 0)
    result = run("try", QUICKSTART, "--problems", "1", "--samples", "1")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr


def test_conditions_are_chosen_by_label(home):
    head = TWO_CONDITIONS + '"training.temperature" = 0.5\n"training.max_tokens" = 3\n'
    path = file(home, name="campaign", head=head)
    first = run("try", path, "--problems", "1", "--json")
    told = [line for line in first.stderr.splitlines() if "another reward or sampling" in line]
    assert len(told) == 1
    label = told[0].rpartition("--condition ")[2].strip("'")
    second = run("try", path, "--problems", "1", "--json", "--condition", label)
    assert json.loads(second.stdout)["run"] == f"{label}_s1"
    assert json.loads(second.stdout)["verdict"]["max_tokens"] == 3
    wrong = run("try", path, "--condition", "none")
    assert (wrong.exit_code, label in wrong.stderr) == (2, True)


@pytest.mark.parametrize(("key", "value", "differs"), [
    ("top_p", 0.9, True), ("top_k", 5, True), ("min_p", 0.1, True), ("top_k", -1, False), ("lr", 1e-5, False),
])  # fmt: skip
def test_conditions_that_sample_otherwise_are_named(home, key, value, differs):
    path = file(home, name="cut", head=f'{TWO_CONDITIONS}"training.{key}" = {value}\n')
    told = trying.others(Plan.of(load(path)), None)
    assert len(told) == differs


@pytest.mark.parametrize("mistake", ["training.max_tokens=100000", "data.source='nowhere.jsonl'", "reward.workers=0"])
def test_mistakes_are_one_line(home, mistake):
    result = run("try", file(home), "--set", mistake)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len([line for line in result.stderr.splitlines() if not line.startswith("note: ")]) == 1


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_text_never_reaches_a_terminal(name, capsys):
    """As prompt, answer, problem id, metric and error: escaped, and no line of it passes for one of ours."""
    text = HOSTILE[name]
    sample = {
        "text": text, "tokens": 1, "stop": "stop", "reward": 1.0, "components": {text: 0.5}, "sample_metrics": {},
        "tags": [text], "correct": True, "format_ok": None, "error": None, "seconds": 0.1,
    }  # fmt: skip
    failed = sample | {"reward": None, "error": text, "components": {}, "correct": None}
    found = {
        "run": "a_s1", "seed": 1, "model": text,
        "prompts": [{"id": text, "rendered": text, "tokens": 1, "answer": text, "samples": [sample, failed]}],
        "sampling": {"answers": 2, "tokens": 2, "seconds": 1.0, "step_answers": 4, "step_seconds": [1.0, 2.0]},
        "grading": {"mean_seconds": 0.1, "slowest_seconds": 0.2, "timeout_s": 10.0, "step_answers": 4, "workers": 2,
                    "step_seconds": 0.2},
        "verdict": {"answers": 2, "mean_reward": 1.0, "correct": 1, "groups": 1, "mixed_groups": 0, "truncated": 0,
                    "max_tokens": 8, "all_failed": False, "reasons": {text: 1}},
    }  # fmt: skip
    print_trial(found)
    out = capsys.readouterr().out
    shown = {"\u00ad", "\ufffe", "\uffff", "\U0010ffff"}
    assert all(c.isprintable() or c == "\n" or c in shown for c in out), ascii(out)
    starts = (
        "problem",
        "  answer",
        "  │ ",
        "    │ ",
        "run ",
        "sampling ",
        "grading ",
        "failed ",
        "rewards ",
        "careful ",
    )
    assert all(line.startswith(starts) or not line for line in out.split("\n"))
    print_record("answer", text=text, reason=text)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert not {*out} & {*map(chr, (*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2028))}
    assert json.loads(out.partition("text=")[2].rpartition(" reason=")[0]) == "".join(
        "?" if "\ud800" <= c <= "\udfff" else c for c in text
    )


def test_long_texts_lose_their_middle(capsys):
    print_text("a" * 1000 + "b" * 100_000 + "c" * 1000, 0)
    out = capsys.readouterr().out
    assert len(out) < 2000
    assert "100,500 characters" in out
    assert out.startswith("│ aaa")
    assert out.endswith("ccc\n")


def test_words():
    sample = {
        "reward": 0.5, "components": {"right": 1.0, "short": 0.0}, "sample_metrics": {"steps": None}, "correct": False,
        "tags": [], "tokens": 8, "stop": "length", "seconds": 2.0, "error": None,
    }  # fmt: skip
    assert sample_words(sample) == "reward 0.5, wrong, right 1, short 0, steps none; 8 tokens (cut off), 2.0 s"
    assert [seconds_words(s) for s in (0.00002, 0.5, 200.0, float("nan"), None)] == [
        "0.02 ms", "500 ms", "3 min", "not tried", "not tried"
    ]  # fmt: skip
    sampling, grading = {"step_seconds": [1.0, 2.0]}, {"step_seconds": 60.0}
    verdict = {"all_failed": False, "mixed_groups": 0, "groups": 4, "answers": 16, "truncated": 12}
    prompts = [{"samples": [{"audit_error": "no audit today"}, {}]}]
    advice = advice_of({"sampling": sampling, "grading": grading, "verdict": verdict, "prompts": prompts})
    assert advice.pop() == f"1 of {verdict['answers']} answers could not be audited: no audit today"
    assert [words in line for words, line in zip(("teach nothing", "max_tokens", "workers"), advice, strict=True)]


def test_on_a_terminal_it_is_for_people(home):
    """In a real terminal: prompts and answers behind a rule, times in words, no line for scripts."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "retrain", "try", str(file(home)), "--problems", "1", "--samples", "2"]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            parts.append(part)
        errors = process.communicate()[1]
    os.close(ours)
    out = b"".join(parts).decode()
    assert process.returncode == 0, errors
    assert "problem 1" in out
    assert "  │ <turn>" in out
    assert "grading   " in out
    assert "answer prompt=" not in out
