import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import eventually
from helpers.records import wandb_records
from programs.wandb_server import wandb_server

RECORD = """
import json, os, signal, sys
from pathlib import Path
from helpers.records import config, context, evaluation, group, step
from retrain.records.recorder import RunRecorder

def play(recorder, first, last):
    for number in range(first, last):
        if number == 0:
            recorder.record_eval(evaluation([group([1.0, 0.0], [4, 4])], 0))
        if number % 2:
            recorder.record_eval(evaluation([group([1.0, 1.0], [4, 4])], number + 1))
        recorder.record_step(step([group([1.0, 0.0], [4, 4])], number, {"loss": number / 8}))
    recorder.flush()

def settings(tracker, **logging):
    return context(config=config(logging={"report_to": [tracker], **logging}), max_steps=8)
"""
KILLED = f"""{RECORD}
folder = Path(sys.argv[1])
recorder = RunRecorder(folder, settings(sys.argv[2]))
play(recorder, 0, 5)
(folder / "state.json").write_text(json.dumps(recorder.state()))
play(recorder, 5, 6)
if sys.argv[3:]:
    input()
os.kill(os.getpid(), signal.SIGKILL)
"""
RESUMED = f"""{RECORD}
folder = Path(sys.argv[1])
recorder = RunRecorder(folder, settings(sys.argv[2]))
recorder.restore(json.loads((folder / "state.json").read_text()))
recorder.truncate(5)
play(recorder, 5, 8)
assert recorder.close()
"""
NAMESAKE = f"""{RECORD}
recorder = RunRecorder(Path(sys.argv[1]), settings("trackio", wandb_project=sys.argv[2]))
play(recorder, 0, 2)
assert recorder.close()
"""
CURVES = """
import json
from trackio.sqlite_storage import SQLiteStorage
for run in SQLiteStorage.get_run_records("mine"):
    rows = SQLiteStorage.get_logs("mine", run["name"], run_id=run["id"])
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    print(json.dumps([run["name"], losses, [row["step"] for row in rows if "eval/heldout/step" in row]]))
"""


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start a process that runs this code, with a wandb service of its own."""
    folders = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[1], Path(__file__).parents[2]))
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, env=inherited | {"PYTHONPATH": folders} | environment, text=True, **pipes)


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    wrote, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    return wrote


def test_a_killed_wandb_run_has_no_gap_offline(tmp_path):
    """Every step is in the files of both processes together, and what is there twice is the same."""
    output(python(KILLED, tmp_path, "wandb"), -signal.SIGKILL)
    output(python(RESUMED, tmp_path, "wandb"))
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name  # the same run of wandb
    known: dict[int, dict[str, Any]] = {}
    for path in (first, second):
        for record in wandb_records(path):
            if record["type"] == "history":
                row = {key: value for key, value in record["history"]["item"].items()
                       if key not in ("_runtime", "_timestamp")}  # fmt: skip
                assert known.setdefault(row["_step"], row) == row
            # wandb sync shifts the steps of a run that says it resumes
            assert record["type"] != "run" or path == first or not record["run"].get("resume")
    assert list(known) == list(range(9))
    assert [known[step].get("train/loss") for step in range(8)] == [step / 8 for step in range(8)]
    evaluations = {step: row["eval/heldout/step"] for step, row in known.items() if "eval/heldout/step" in row}
    assert evaluations == {0: 0, 2: 2, 4: 4, 6: 6, 8: 8}
    uploaded = [record for record in wandb_records(second) if record["type"] == "history"]
    assert len(uploaded) == 9  # wandb sync replaces what an earlier upload under this id has left


def test_a_killed_wandb_run_has_no_gap_on_the_server(tmp_path):
    with wandb_server() as server:
        online = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        killed = python(KILLED, tmp_path, "wandb", "wait", **online)
        eventually(lambda: any(run["lines"] for run in server.runs.values()))
        killed.communicate("\n", timeout=60)
        output(python(RESUMED, tmp_path, "wandb", **online))
        (run_id,) = server.runs
        history = server.history(run_id)
    assert [row["_step"] for row in history] == list(range(9))
    assert [row.get("train/loss") for row in history[:8]] == [step / 8 for step in range(8)]
    assert [row["_step"] for row in history if "eval/heldout/step" in row] == [0, 2, 4, 6, 8]


def test_a_killed_trackio_run_is_continued_whatever_has_its_name(tmp_path):
    pytest.importorskip("trackio")
    home, run = {"TRACKIO_DIR": str(tmp_path / "trackio")}, tmp_path / "mine"
    output(python(KILLED, run, "trackio", **home), -signal.SIGKILL)
    assert output(python(NAMESAKE, tmp_path / "other", "mine", **home)) == ""  # its hints would spoil a live view
    assert output(python(RESUMED, run, "trackio", **home)) == ""
    names, losses, evaluations = zip(*map(json.loads, output(python(CURVES, **home)).splitlines()), strict=True)
    assert names == ("grpo+none", "grpo+none")
    assert sorted(losses) == [[[n, n / 8] for n in range(last)] for last in (2, 8)]
    assert sorted(evaluations) == [[0, 2], [0, 2, 4, 6, 8]]
