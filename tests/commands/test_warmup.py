"""The supervised warm-up from the command line: shared by a campaign, resumed, with workers, and without steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.campaigns import run_cli, timeless, toy_toml, toy_world
from helpers.models import campaign_head

from retrain.data.arithmetic import arithmetic_problems
from retrain.files import read_json, read_jsonl

TIMED = ("sft/step_time_s", "sft/tokens_per_s")
CONDITIONS = (("grpo", "none"), ("maxrl", "gtpo"))
ANSWER = "2 4 6 8"  # The toy reward is the share of even digits


def home_of(folder: Path) -> Path:
    """A model of random weights, examples of answers that the reward likes, a campaign and a single run of no steps."""
    model = toy_world(folder)
    for name, split, count in (("train", "train", 40), ("held", "heldout", 9)):
        problems = arithmetic_problems(split, count, None, 5)
        rows = [{"prompt": p.prompt, "completion": ANSWER} for p in problems]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warmup = {"source": "train.jsonl", "eval_source": "held.jsonl", "steps": 30, "batch_size": 8, "lr": 0.02}
    sections = {"warmup": warmup, "evaluation": {"problems": 8, "temperature": 0.0}, "algorithm": {"kl_coef": 0.05}}
    text = toy_toml(model, training={"save_every": 4}, **sections)
    (folder / "camp.toml").write_text(campaign_head(*CONDITIONS, seeds=[1, 2], max_steps=2, lanes=2) + text)
    single = text.replace("save_every = 4", "save_every = 4\nmax_steps = 0")
    (folder / "single.toml").write_text(single.replace("temperature = 0.0", "temperature = 1.0"))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return home_of(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def trained(home) -> tuple[str, Path]:
    result = run_cli("train", home / "camp.toml", "--out", home / "out")
    assert result.exit_code == 0, result.output
    return result.output, home / "out"


def warm_up_of(directory: Path) -> Path:
    [path] = (directory / "warmup").iterdir()
    return path


def rows_of(directory: Path) -> list[dict]:
    rows = read_jsonl(warm_up_of(directory) / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def adapter_of(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


def start(home: Path, *arguments: object, until: int, number: int) -> None:
    """Run a command, and send the signal ``number`` once the warm-up has ``until`` rows."""
    command = [sys.executable, "-m", "retrain", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        out = Path(arguments[-1])
        while process.poll() is None:
            paths = [*out.glob("warmup/*/metrics.jsonl")]
            if paths and paths[0].read_text().count("\n") >= until:
                os.kill(process.pid, number)
                break
            time.sleep(0.01)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == (130 if number == signal.SIGINT else -number), output
    if number == signal.SIGINT:
        assert f"retrain resume {out}" in output


def test_a_campaign_has_one_warm_up_that_every_run_starts_from(trained):
    output, out = trained
    path, facts = warm_up_of(out), read_json(warm_up_of(out) / "warmup.json")
    assert output.count(f"warm-up {path.name}: 40 examples, 30 steps of 8, in {path}") == 1
    assert f"warm-up {path.name} step=30/30 loss=" in output
    assert len([line for line in output.splitlines() if line.startswith(f"warm-up {path.name} step=")]) == 10
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(31))
    assert rows[0]["sft/loss"] is None
    measured = {row["step"]: row["sft/heldout_loss"] for row in rows if row["sft/heldout_loss"] is not None}
    assert list(measured) == list(range(0, 31, 3))
    assert (facts["heldout_loss_before"], facts["heldout_loss_after"]) == (measured[0], measured[30])
    assert measured[30] < 0.5 * measured[0]
    assert rows[30]["sft/token_accuracy"] > 0.5
    assert not (path / "checkpoint").exists()
    runs = sorted((out / "runs").iterdir())
    assert len(runs) == 4
    for run in runs:
        config = read_json(run / "config.json")
        assert (config["warmup_hash"], config["initial_adapter"]) == (path.name, facts["fingerprint"])
        assert f"starts from warmup/{path.name}, which is also the reference policy" in (run / "run.log").read_text()
        first, second = read_jsonl(run / "metrics.jsonl")
        assert abs(first["kl"]) < 1e-6 < second["kl"] < 1.0  # to the weights after the warm-up
        assert adapter_of(run / "final") != adapter_of(path / "adapter")


def test_the_evaluation_before_training_is_that_after_the_warm_up_and_the_base_stands_beside_it(trained):
    output, out = trained
    base, after = read_jsonl(warm_up_of(out) / "evals.jsonl")
    assert (base["step"], after["step"]) == (0, 30)
    assert after["eval/heldout/reward_mean"] > base["eval/heldout/reward_mean"] + 0.2
    for run in (out / "runs").iterdir():
        first = read_jsonl(run / "evals.jsonl")[0]
        assert first["step"] == 0
        assert first["eval/heldout/reward_mean"] == after["eval/heldout/reward_mean"]
    said = f"warm-up {warm_up_of(out).name}: "
    [line] = [line for line in output.splitlines() if line.startswith(f"{said}accuracy on heldout ")]
    assert "(base) → " in line
    assert f"<span>{line.removeprefix(said)}</span>" in (out / "report.html").read_text()


def test_a_compressed_adapter_has_the_base_without_the_warm_up_as_reference(home, trained):
    [run, *_] = sorted((trained[1] / "runs").iterdir())
    result = run_cli("squeeze", run, "--to", "2", "--continue", "1", "--out", home / "small")
    assert result.exit_code == 0, result.output
    assert "note: the reference policy of the continued run is the base without its [warmup]" in result.stderr
    [row] = read_jsonl(home / "small" / "metrics.jsonl")
    assert row["kl"] > 0.1


def test_a_killed_or_stopped_warm_up_continues_to_the_same_bytes(home, trained):
    out, reference = home / "killed", trained[1]
    start(home, "train", home / "camp.toml", "--out", out, until=7, number=signal.SIGKILL)
    assert len(rows_of(out)) < 31
    start(home, "resume", out, until=15, number=signal.SIGINT)
    assert (warm_up_of(out) / "checkpoint").is_dir()
    result = run_cli("resume", out)
    assert result.exit_code == 0, result.output
    assert "continues at step" in result.output
    assert rows_of(out) == rows_of(reference)
    assert adapter_of(warm_up_of(out) / "adapter") == adapter_of(warm_up_of(reference) / "adapter")
    for run in (reference / "runs").iterdir():
        assert adapter_of(out / "runs" / run.name / "final") == adapter_of(run / "final")


def test_two_workers_share_one_warm_up(home, trained):
    out = home / "workers"
    sets = [word for key in ('executor="processes"', "workers=2") for word in ("--set", f"campaign.{key}")]
    result = run_cli("train", home / "camp.toml", *sets, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.output.count("40 examples, 30 steps of 8") == 1
    assert warm_up_of(out).name == warm_up_of(trained[1]).name
    assert len(rows_of(out)) == 31
    fingerprint = read_json(warm_up_of(out) / "warmup.json")["fingerprint"]
    configs = [read_json(run / "config.json") for run in (out / "runs").iterdir()]
    assert [config["initial_adapter"] for config in configs] == [fingerprint] * 4


def test_a_run_without_steps_evaluates_its_warm_up(home):
    out = home / "single"
    result = run_cli("train", home / "single.toml", "--out", out)
    assert result.exit_code == 0, result.output
    assert "after the warm-up, with no step of reinforcement learning" in result.output
    assert [row["step"] for row in read_jsonl(out / "evals.jsonl")] == [0]
    assert adapter_of(out / "final") == adapter_of(warm_up_of(out) / "adapter")
    again = run_cli("train", home / "single.toml", "--out", out)
    assert again.exit_code == 0, again.output
    evaluated = run_cli("eval", out, "--out", home / "evaluated")
    assert evaluated.exit_code == 0, evaluated.output
    [path] = home.glob("evaluated/runs/*/evals.jsonl")
    assert timeless(path) == timeless(out / "evals.jsonl")


def test_other_examples_need_another_directory(home, trained):
    changed, out = home / "camp.toml", trained[1]
    rows = (home / "train.jsonl").read_text()
    (home / "train.jsonl").write_text(rows.replace("2 4 6 8", "2 4 6"))
    try:
        result = run_cli("train", changed, "--set", "campaign.max_steps=3", "--out", out)
    finally:
        (home / "train.jsonl").write_text(rows)
    assert result.exit_code == 2
    assert f"warm-up: {warm_up_of(out).name} → " in result.output


def test_explain_says_what_the_warm_up_trains_on(home):
    shared = "trained once, before the first step, for all conditions and seeds with equal model, LoRA and optimizer"
    texts = run_cli("explain", home / "camp.toml").stdout.splitlines()
    [at] = [i for i, line in enumerate(texts) if line.startswith("warm-up ")]
    assert texts[at][14:] == "train.jsonl: 40 examples; 30 steps of 8 examples of at most 1,024 tokens, lr 0.02"
    assert texts[at + 1][14:].startswith(shared)
    (home / "epochs.toml").write_text((home / "single.toml").read_text().replace("steps = 30", "epochs = 2"))
    assert "40 examples; 2 epochs = at most 10 steps of 8 " in run_cli("explain", home / "epochs.toml").stdout
    missing = run_cli("explain", home / "epochs.toml", "--set", "warmup.source=nowhere.jsonl").stdout
    assert "nowhere.jsonl: not read: " in missing


@pytest.mark.parametrize(
    ("file", "change", "fault"),
    [
        ("camp.toml", "campaign.max_steps=0", "seeds of a campaign share their warm-up"),
        ("single.toml", "warmup={}", "only with a [warmup] is there something to train"),
        ("camp.toml", "resume.from=logs/other", "whose weights would replace those of the warm-up"),
    ],
)
def test_settings_that_cannot_be_combined_are_named(home, file, change, fault):
    if change == "warmup={}":
        text = (home / file).read_text()
        (home / "none.toml").write_text(text[: text.index("[warmup]")] + text[text.index("[algorithm]") :])
        result = run_cli("check", home / "none.toml")
    else:
        result = run_cli("check", home / file, "--set", change)
    assert result.exit_code == 2
    assert fault in " ".join(result.output.split())
