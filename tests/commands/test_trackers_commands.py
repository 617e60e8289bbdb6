import glob
import os
import re
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import wandb
from helpers.campaigns import campaign, run_cli
from helpers.records import wandb_run
from programs.wandb_server import wandb_server

from retrain.files import read_json, read_jsonl

WANDB = '[logging]\nreport_to = "wandb"\nwandb_group = "ablation"\nrollouts_every = 0\n[squeeze]\nverify = "off"\n'


def files(folder: Path, model: Path) -> tuple[Path, Path]:
    many = campaign(folder, model, "many", steps=2)
    text = many.read_text().replace("seeds = [1, 2]", "seeds = [1]") + WANDB
    many.write_text(text)
    one = folder / "one.toml"
    one.write_text(text[text.index("[model]") :].replace("[training]", "[training]\nmax_steps = 2"))
    return many, one


def run(*arguments: object) -> tuple[int, list[str]]:
    """Status of a command in this process, and the lines of its output, or of its errors."""
    result = run_cli(*arguments, "--plain")
    return result.exit_code, (result.stderr if result.exit_code else result.stdout).splitlines()


def uploaded_by(lines: list[str]) -> list[Path]:
    """The directories that the last line names, as a shell expands it."""
    match = re.fullmatch(r"W&B records are offline; to upload them, type: wandb sync (.*)", lines[-1])
    assert match, lines[-1]
    return [Path(path) for pattern in shlex.split(match[1]) for path in sorted(glob.glob(pattern))]


@pytest.mark.parametrize("kind", ["many", "one"])
def test_runs_with_offline_wandb_directories_are_resumed(tmp_path, model, kind):
    file = files(tmp_path, model)[kind == "one"]
    out = tmp_path / kind
    status, lines = run("train", file, "--out", out)
    assert status == 0, lines
    runs = [out / entry["path"] for entry in read_json(out / "manifest.json")["runs"]]
    named = uploaded_by(lines)
    assert {path.parents[1] for path in named} == {out, *runs}  # the analysis of the rank is the campaign's
    assert all(list(path.glob("run-*.wandb")) for path in named)
    assert any(path.is_symlink() for path in out.rglob("wandb/*/logs/*"))
    if kind == "many":
        status, lines = run("resume", out, "--set", "training.max_steps=3")
        assert status == 0, lines
        assert len(read_jsonl(runs[0] / "metrics.jsonl")) == 3


def test_training_goes_on_offline_where_wandb_does_not_answer(tmp_path, model):
    """One warning within 10 s, whether nobody answers or nobody listens, and no step is lost."""
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment |= {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "PYTHONPATH": str(Path(__file__).parents[2])}
    # Without these its service and its telemetry wait 20 s for answers, also after the end of training.
    environment |= {"WANDB_HTTP_TIMEOUT": "1", "WANDB_ERROR_REPORTING": "false"}
    _, file = files(tmp_path, model)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = {"silent": silent.getsockname()[1], "gone": gone.getsockname()[1]}
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        gone.close()
        commands = {}
        for name, url in urls.items():
            with open(tmp_path / f"{name}.txt", "w") as printed:  # no pipe, which wandb's service holds until it ends
                commands[name] = subprocess.Popen(
                    [sys.executable, "-m", "retrain", "train", file, "--out", tmp_path / name, "--plain"],
                    env=environment | {"WANDB_BASE_URL": url}, stdout=printed, stderr=printed,
                )  # fmt: skip
        statuses = {name: command.wait() for name, command in commands.items()}
    for name, url in urls.items():
        lines = (tmp_path / f"{name}.txt").read_text().splitlines()
        assert statuses[name] == 0, lines
        (warning,) = [line for line in lines if "has not answered" in line]
        assert f"W&B at {url} has not answered for 5 s; recording offline" in warning
        uploaded = uploaded_by(lines)
        assert {path.parents[1] for path in uploaded} == {tmp_path / name}
        log = (tmp_path / name / "run.log").read_text().splitlines()
        begun, warned = [line for line in log if " start " in line or "has not answered" in line][:2]
        seconds = [datetime.fromisoformat(" ".join(line.split()[:2])) for line in (begun, warned)]
        assert (seconds[1] - seconds[0]).total_seconds() <= 10
        steps = []
        for path in uploaded:  # the run's directory and that of the analysis of its rank
            run, history, _ = wandb_run(next(path.glob("run-*.wandb")))
            steps += [row["_step"] for row in history] if run["display_name"] != "squeeze-analysis" else []
        assert steps == [0, 1, 2]  # two steps and the evaluation after them


def test_a_refused_login_stops_the_command(tmp_path, model, monkeypatch):
    _, file = files(tmp_path, model)
    with wandb_server(refuses=True) as server:
        for name, value in {"MODE": "online", "BASE_URL": server.url, "API_KEY": "a" * 40}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        monkeypatch.delenv("WANDB_SERVICE", raising=False)
        wandb.teardown()  # it reads the environment once
        try:
            status, lines = run("train", file, "--out", tmp_path / "out")
            monkeypatch.setenv("WANDB_API_KEY", "short")
            wandb.teardown()
            malformed = run("train", file, "--out", tmp_path / "out")
        finally:
            monkeypatch.undo()
            wandb.teardown()
    assert status == malformed[0] == 2
    assert re.fullmatch(
        r"wandb could not start: .*401.*\. Type wandb login, or set \[logging\] wandb_mode .*", lines[-1]
    )
    assert "WANDB_API_KEY invalid" in malformed[1][-1]
    assert read_json(tmp_path / "out/manifest.json")["runs"][0]["state"] == "pending"
