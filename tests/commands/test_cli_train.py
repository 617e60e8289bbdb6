import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.campaigns import run_cli
from helpers.models import TINY_RUN, TWO_CONDITIONS, qwen3_directory

from retrain.files import read_json, read_jsonl, write_json

ROOT = Path(__file__).parents[2]

CAMPAIGN = (
    TWO_CONDITIONS
    + TINY_RUN
    + """\
max_tokens = 8
[reward]
type = "custom"
custom_module = "length_reward.py"
[evaluation]
problems = 4
"""
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A directory with a model, a reward that differs between samples, and a campaign file."""
    path = tmp_path_factory.mktemp("home")
    qwen3_directory(path / "model", ["What is 3 + 4? 7", "Compute 12 * 3."])
    (path / "length_reward.py").write_text("def score(completion, answer):\n    return len(completion) % 5 / 4\n")
    text = CAMPAIGN.format(model=path / "model")
    (path / "camp.toml").write_text(text)
    (path / "single.toml").write_text(text[text.index("[model]") :])
    return path


@pytest.fixture(scope="module")
def trained(home) -> tuple[str, Path]:
    result = run_cli("train", home / "camp.toml", "--out", home / "out")
    assert result.exit_code == 0, result.output
    return result.output, home / "out"


@pytest.fixture(scope="module")
def single(home) -> tuple[str, Path]:
    result = run_cli("train", home / "single.toml", "--out", home / "single", "--verbose")
    assert result.exit_code == 0, result.output
    return result.output, home / "single"


def test_training_ends_with_comparison_rank_and_paths(trained):
    output, directory = trained
    end = output.partition("Held-out")[2]
    rows = [line.split()[0] for line in end.splitlines() if " → " in line]
    assert rows == ["condition", "grpo", "maxrl+gtpo"]
    assert re.search(r"^recommended rank: \d of 4, which keeps at least 95% .*\. On 4 held-out problems, ", end, re.M)
    assert f"retrain squeeze {directory}/runs/grpo+none_s1/final (--to RANK" in end
    for path in re.findall(r"^(?:directory|manifest|adapter|metrics) +(\S+)$", end, re.MULTILINE):
        assert Path(path).exists()
    assert f"look at it  retrain ui {directory.parent}\n" in end
    # Four runs of two steps are lines of progress; only --verbose prints a line for each step.
    kinds = [line.partition(" ")[0] for line in output.splitlines()]
    assert (kinds.count("step"), kinds.count("start"), kinds.count("end")) == (0, 4, 4)
    assert re.findall(r"^progress done=(\d)/8 ", output, re.MULTILINE) == ["1", "2", "3", "4", "5", "6", "7", "8"]
    for name in ("grpo", "grpo+none"):  # as tables show it, and as files have it
        assert "maxrl+gtpo − grpo: " in run_cli("compare", directory, "--baseline", name).output


def test_a_single_run_ends_with_its_accuracy_and_verbose_prints_every_step(single):
    output, directory = single
    lines = output.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == len(read_jsonl(directory / "metrics.jsonl"))
    assert not any(line.startswith("progress ") for line in lines)
    first, *_, last = read_jsonl(directory / "evals.jsonl")
    rates = [f"{100 * row['eval/heldout/correct_rate']:.1f}%" for row in (first, last)]
    low, high = (100 * last[f"eval/heldout/ci_{end}"] for end in ("low", "high"))
    assert f"Held-out accuracy: {rates[0]} → {rates[1]}, 95 % interval over problems {low:.0f} to {high:.0f}%" in lines


@pytest.mark.parametrize("name", ["camp", "single"])
def test_explain_names_every_file_that_is_written_and_no_other(name, home, request):
    _, directory = request.getfixturevalue("trained" if name == "camp" else "single")
    listing = run_cli("explain", home / f"{name}.toml", "--files").output.partition("what it holds")[2]
    entries = re.findall(r"^( +)(\S.*?)  +\S", listing, re.MULTILINE)
    named = {("runs/<run>/" if len(indent) > 2 else "") + file for indent, file in entries} - {"runs/<run>/"}
    written = set()
    for path in directory.rglob("*"):
        file = re.sub(r"^runs/[^/]+/", "runs/<run>/", str(path.relative_to(directory)))
        file = re.sub(r"evaluation_\w+", "evaluation_<how>", file)
        file = re.sub(r"step_\d+/.*", "step_<n>/", re.sub(r"rank_\d+/.*", "rank_<r>/", file))
        file = re.sub(r"train_iteration_\d+(\.html|_logtree\.json)", "train_iteration_<n>.html, _logtree.json", file)
        file = re.sub(r"train_iteration_\d+_rollout", "train_iteration_<n>_rollout", file)
        file = re.sub(r"eval_\w+_iteration_\d+\S+", "eval_<name>_iteration_<n>…", file)
        file = re.sub(r"tokens_(eval_\w+_)?\d+", "tokens_<n>", file)
        if path.is_file() and path.name != ".lock":
            written.add(re.sub(r"final/.*", "final/", file))
    written |= {"../registry.jsonl"} if name == "camp" and (directory.parent / "registry.jsonl").is_file() else set()
    rare = {file for file in named if file.endswith("notes.jsonl")}  # only where a number was odd
    rare |= {file for file in named if file.endswith("metrics.f32")}  # from 64 steps on
    assert len(rare) == 2
    assert named - rare == written - rare


def test_training_again_and_resume_repeat_nothing(trained, home):
    _, directory = trained
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("metrics.jsonl")}
    assert len(before) == 4
    for arguments in (["train", home / "camp.toml", "--out", directory], ["resume", directory]):
        assert run_cli(*arguments).exit_code == 0
        assert {path: path.stat().st_mtime_ns for path in before} == before
    of_campaign = run_cli("resume", directory / "runs" / "grpo+none_s1")
    assert of_campaign.exit_code == 2
    assert of_campaign.stderr.strip().endswith(f"retrain resume {directory}")
    (report,) = json.loads(run_cli("status", directory, "--json").stdout)
    assert {(row["state"], row["step"]) for row in report["runs"]} == {("done", 2)}


def test_resume_names_no_adapter_that_was_removed(single, tmp_path):
    directory = shutil.copytree(single[1], tmp_path / "single")
    kept = run_cli("resume", directory).output
    assert f"\nadapter     {directory}/final\n" in kept
    assert f"retrain squeeze {single[1]}/final (--to RANK" in kept
    for each in (directory, single[1]):
        (each / "final").rename(each / "removed")
    try:
        result = run_cli("resume", directory)
    finally:
        (single[1] / "removed").rename(single[1] / "final")
    assert result.exit_code == 0, result.output
    assert "recommended rank" in result.output
    assert "/final" not in result.output


@pytest.mark.parametrize("name", ["camp.toml", "camp.toml/below"])
def test_a_directory_that_cannot_be_written_is_one_line(trained, home, name):
    _, directory = trained
    for command in (["train", home / "camp.toml"], ["squeeze", directory, "--to", "2"]):
        result = run_cli(*command, "--out", home / name)
        assert result.exit_code == 2
        assert str(home / "camp.toml") in result.stderr.splitlines()[-1]
        assert "Traceback" not in result.output


def test_damaged_records_of_one_run_stop_that_run_alone(trained, tmp_path):
    out = Path(shutil.copytree(trained[1], tmp_path / "out"))
    manifest = read_json(out / "manifest.json")
    write_json(out / "manifest.json", manifest | {"runs": [run | {"state": "running"} for run in manifest["runs"]]})
    broken = out / "runs" / "maxrl+gtpo_s1"
    with open(broken / "metrics.jsonl", "a") as file:
        file.write("{torn\n")
    assert run_cli("resume", out).exit_code == 1
    (entry,) = [entry for entry in read_json(out / "manifest.json")["runs"] if entry["state"] != "done"]
    assert entry["run_id"] == broken.name
    assert f"{broken / 'metrics.jsonl'}:3 is damaged" in entry["reason"]
    (broken / "metrics.jsonl").write_text((broken / "metrics.jsonl").read_text().replace("{torn\n", ""))
    resumed = run_cli("resume", out, "--retry-failed")
    assert (resumed.exit_code, resumed.output.splitlines()[0]) == (0, "plan runs=1 conditions=maxrl+gtpo seeds=1")


def test_ctrl_c_saves_exits_130_and_resume_finishes(home, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "retrain", "train", str(home / "single.toml"), "--out", str(out)]
    command += ["--set", "training.max_steps=6", "--verbose"]
    options = {"cwd": home, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("step "):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert f"retrain resume {out}" in output
    (entry,) = read_json(out / "manifest.json")["runs"]
    assert (entry["state"], 1 <= entry["step"] < 6) == ("interrupted", True)
    assert run_cli("resume", out).exit_code == 0
    assert [row["step"] for row in read_jsonl(out / "metrics.jsonl")] == list(range(6))


ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "retrain", *sys.argv[1:]])
"""
"""Makes standard input the terminal that hangs up on this process, as a window does."""


def test_a_closing_terminal_ends_after_the_step_and_everything_is_saved(home, tmp_path):
    out, metrics = tmp_path / "out", tmp_path / "out" / "metrics.jsonl"
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", ON_A_TERMINAL, "train", str(home / "single.toml"), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--set", "training.max_steps=2000"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    while not metrics.is_file() or not metrics.read_text():
        assert process.poll() is None
        if select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 1 << 16)
    os.close(ours)
    assert process.wait(120) == 129
    (entry,) = read_json(out / "manifest.json")["runs"]
    assert (entry["state"], 1 <= entry["step"] < 2000) == ("interrupted", True)
    assert (out / "checkpoints" / f"step_{entry['step']:06d}").is_dir()
    assert [row["step"] for row in read_jsonl(metrics)] == list(range(entry["step"]))
