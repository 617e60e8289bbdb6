"""Trackers for real: wandb offline, read back record by record; tensorboard and trackio through their own readers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from mixed_cases import runs_of
from record_cases import config, context, group, step
from snippets import blocks
from wandb_server import wandb_server

from retrain.config import parse_dict
from retrain.config.upkeep import trackers
from retrain.errors import MissingExtra, RetrainError
from retrain.files import read_jsonl
from retrain.ownership import claim
from retrain.record.recorder import RunRecorder
from retrain.record.trackers import TrackedRun, log_squeeze_analysis, make_trackers

STATE = {
    "sepa_lambda": 0.25,
    "sepa_gate_open": True,
    "exec_surprisal_mean": 1.5,
    "bp_regime": "warmup",
    "bp_warmup": True,
}
UPDATE = {
    "loss": 0.5,
    "reported_loss": 0.5,
    "loss_is_placeholder": False,
    "backend_reports_sync_loss": True,
    "backend_preserves_token_advantages": True,
}
EXPECTED = {
    "train/loss": 0.5,
    "train/reported_loss": 0.5,
    "train/loss_is_placeholder": 0,
    "train/rewards/mean_reward": 0.5,
    "train/rewards/correct_rate": 0.5,
    "train/rewards/running_correct_rate": 0.5,
    "train/sepa_lambda": 0.25,
    "train/sepa_gate_open": 1,
    "train/max_token_hit_rate": 0.0,
    "train/num_datums": 2,
    "train/step_time_s": 4.0,
    "train/batch_size": 1,
    "train/group_size": 2,
    "train/backend/reports_sync_loss": 1,
    "train/backend/preserves_token_advantages": 1,
    "train/surprisal/exec_mean": 1.5,
    "train/entropy/exec_mean": 1.5,
    "train/backpressure/regime": "warmup",
    "train/backpressure/warmup": 1,
    "env/all/reward/total": 0.5,
}


CLOCKS = ("_runtime", "_timestamp")


def wandb_records(path: Path, finished: bool = True) -> list[dict[str, Any]]:
    """The records of a wandb file, by wandb's own reader; ``finished``: once the run has ended."""
    deadline = time.monotonic() + 30
    while True:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        if "No such command" in done.stderr:
            pytest.skip("this release of wandb has no reader of its files")
        records = [json.loads(line) for line in done.stdout.splitlines()]
        if not finished or any(record["type"] == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"wandb never finished its file: {done.stderr}"  # a moment after finish


def wandb_run(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(run record, history rows, last summary values) of the only run below ``run_dir``."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    records = wandb_records(path)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    summary: dict[str, Any] = {}
    for record in records:
        summary.update(record["summary"].get("update", {}) if record["type"] == "summary" else {})
    return run, history, summary


@pytest.fixture
def wandb_context():
    pytest.importorskip("wandb")
    cfg = config(
        logging={"wandb_project": "house", "wandb_mode": "offline"},
        algorithm={"transform_mode": "gtpo_sepa"},
        gtpo={"beta": 0.1},
        hicra={"alpha": 0.2},
        sepa={"steps": 50, "delay_steps": 5, "correct_rate_gate": 0.1},
        backend={"backend": "local"},
    )
    return context(config=cfg, condition="maxrl+gtpo_sepa", run_id="maxrl+gtpo_sepa_s3", seed=3, is_campaign=True)


def test_wandb_has_the_names_that_dashboards_read(tmp_path, wandb_context):
    with RunRecorder(tmp_path, wandb_context) as recorder:
        for number in range(3):
            recorder.record_step(step([group([1.0, 0.0], [4, 4])], number, dict(UPDATE), **STATE))
        state = recorder.state()
    run, history, summary = wandb_run(tmp_path)
    assert [row["_step"] for row in history] == [0, 1, 2]
    assert {key: history[0].get(key) for key in EXPECTED} == EXPECTED
    assert "kl" not in history[0]
    assert (run["display_name"], run["run_group"], run["project"]) == ("maxrl+gtpo_sepa_s3", "maxrl+gtpo_sepa", "house")
    assert run["tags"] == ["maxrl+gtpo_sepa", "seed3"]
    assert run["run_id"] == state["trackers"]["wandb"]["run_id"]
    assert {key: summary.get(key) for key in EXPECTED} == EXPECTED
    assert summary["_step"] == 2
    settings = run["config"]["update"]
    assert settings["condition"] == "maxrl+gtpo_sepa"
    assert (settings["seed"], settings["max_steps"], settings["backend"]) == (3, 10, "local")
    assert (settings["gtpo_beta"], settings["sepa_delay_steps"], settings["lora_rank"]) == (0.1, 5, 8)
    others = "advantage_mode transform_mode uncertainty_kind model lr batch_size group_size max_tokens temperature"
    assert {*others.split(), "hicra_alpha", "sepa_steps", "sepa_correct_rate_gate"} <= set(settings)


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, wandb_context):
    with RunRecorder(tmp_path / "first", wandb_context) as first:
        first.record_step(step([group([1.0, 0.0], [4, 4])], 0))
        state = json.loads(json.dumps(first.state()))
    second = RunRecorder(tmp_path / "second", wandb_context)
    second.restore(state)
    with second:
        second.record_step(step([group([1.0, 0.0], [4, 4])], 1))
    before, after = wandb_run(tmp_path / "first"), wandb_run(tmp_path / "second")
    assert before[0]["run_id"] == after[0]["run_id"]
    assert [row["_step"] for row in before[1] + after[1]] == [0, 1]


def test_the_squeeze_analysis_is_a_run_of_its_own(tmp_path, wandb_context):
    report = {
        "run": "a_s1",
        "source_rank": 8,
        "recommended_rank": 4,
        "min_variance_retention": 0.95,
        "num_layers": 6,
        "rows": [
            {"rank": 2, "mean_variance": 0.8, "min_variance": 0.7, "max_variance": 0.9, "relative_error": 0.44},
            {"rank": 4, "mean_variance": 0.97, "min_variance": 0.95, "max_variance": 0.99, "relative_error": 0.17},
        ],
        "message": "",
    }
    claim(tmp_path)
    log_squeeze_analysis(wandb_context, tmp_path, report)
    run, history, summary = wandb_run(tmp_path)
    assert run["display_name"] == "squeeze-analysis"
    assert run["run_group"] == "maxrl+gtpo_sepa"
    assert run["config"]["update"]["run_id"] == "maxrl+gtpo_sepa_s3"
    assert run["config"]["update"]["source_rank"] == 8
    assert summary["squeeze/recommended_rank"] == 4
    assert summary["squeeze/source_rank"] == 8
    assert summary["squeeze/min_variance_retention"] == 0.95
    assert summary["squeeze/num_layers"] == 6
    assert any(key.startswith("squeeze/variance_table") for row in history for key in row)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/squeeze/*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["rank", "mean_variance", "min_variance", "max_variance", "recommended"],
        "data": [[2, 0.8, 0.7, 0.9, False], [4, 0.97, 0.95, 0.99, True]],
    }
    assert [row["squeeze/mean_variance"] for row in history if "squeeze/rank" in row] == [0.8, 0.97]
    log_squeeze_analysis(wandb_context, tmp_path, report)  # again after a kill: the same run of wandb
    log_squeeze_analysis(wandb_context, tmp_path, {**report, "recommended_rank": 2})
    ids = [path.stem.removeprefix("run-") for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb")]
    assert (len(ids), len(set(ids)), run["run_id"] in ids) == (3, 2, True)


def named(**changes: Any) -> tuple[str, str | None, list[str]]:
    run = TrackedRun.of(context(**changes))
    return run.name, run.group, run.tags


def test_names_outside_a_campaign():
    mine = config(logging={"wandb_run_name": "mine", "wandb_tags": ["a", "b"]})
    assert named(config=mine) == ("mine", None, ["a", "b"])
    assert named() == ("grpo+none", None, [])


def test_names_in_a_campaign_may_have_a_prefix():
    """As the plan of a campaign with wandb_run_name = "paper" has them."""
    paper = config(logging={"wandb_run_name": "paper_grpo+none_s1", "wandb_group": "grpo+none", "wandb_tags": ["a"]})
    assert named(config=paper, is_campaign=True) == ("paper_grpo+none_s1", "grpo+none", ["a", "grpo+none", "seed1"])
    mine = config(logging={"wandb_group": "ablation"})
    assert named(config=mine, is_campaign=True) == ("grpo+none_s1", "ablation", ["grpo+none", "seed1"])
    assert named(is_campaign=True)[0] == "grpo+none_s1"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ('report_to = "wandb"', ["wandb"]),
        ('report_to = "tensorboard, mine:make"', ["tensorboard", "mine:make"]),
        ('report_to = ["tensorboard"]\nwandb_project = "p"', ["tensorboard", "wandb"]),
        ('report_to = "all"', ["wandb", "tensorboard"]),
        ('report_to = ["all"]\nwandb_project = "p"', ["wandb", "tensorboard"]),
        ('report_to = "none"\nwandb_project = "p"', []),
        ('wandb_project = "p"', ["wandb"]),
        ("", []),
    ],
)
def test_the_trackers_that_are_asked_for(monkeypatch, asked, names):
    monkeypatch.setattr("retrain.config.upkeep.find_spec", lambda name: None if name == "trackio" else name)
    logging = parse_dict(tomllib.loads(f"[logging]\n{asked}")).logging
    assert trackers(logging.report_to, logging.wandb_project) == names
    assert logging.wandb is ("wandb" in names)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    cfg = config(logging={"report_to": ["tensorboard"]})
    with RunRecorder(tmp_path, context(config=cfg)) as recorder:
        for number in range(2):
            recorder.record_step(step([group([1.0, 0.0], [4, 4])], number, {"loss": 0.25}))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.25), (1, 0.25)]
    assert "train/rewards/mean_reward" in events.Tags()["scalars"]


@pytest.mark.parametrize("is_campaign", [True, False])
def test_tensorboard_in_a_directory_of_ones_own(tmp_path, is_campaign):
    pytest.importorskip("tensorboard")
    cfg = config(logging={"report_to": ["tensorboard"], "logging_dir": str(tmp_path / "tb")})
    with RunRecorder(tmp_path / "run", context(config=cfg, is_campaign=is_campaign)) as recorder:
        recorder.record_step(step([group([1.0, 0.0], [4, 4])], 0, {"loss": 0.25}))
    assert not (tmp_path / "run" / "tensorboard").exists()
    (file,) = (tmp_path / "tb" / "grpo+none_s1" if is_campaign else tmp_path / "tb").glob("events.*")
    assert file.stat().st_size > 0


def test_tensorboard_after_a_resume_has_one_curve(tmp_path):
    pytest.importorskip("tensorboard")
    cfg = config(logging={"report_to": ["tensorboard"]})
    for first, last in ((0, 3), (2, 4)):  # killed after step 2, whose checkpoint was that of step 2
        with RunRecorder(tmp_path, context(config=cfg)) as recorder:
            recorder.truncate(first)
            for number in range(first, last):
                recorder.record_step(step([group([1.0, 0.0], [4, 4])], number, {"loss": 0.25}))
        time.sleep(1.1)  # event files are named by the second
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [0, 1, 2, 3]


RECORD = """
import json, os, signal, sys
from pathlib import Path
from record_cases import config, context, evaluation, group, step
from retrain.record.recorder import RunRecorder

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


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A process that runs this code, with the tests and the code beside them on its path and a wandb service of its
    own."""
    folders = os.pathsep.join(str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[3]))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return subprocess.Popen(
        command, env=inherited | {"PYTHONPATH": folders} | environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    wrote, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    return wrote


def test_a_killed_wandb_run_has_no_gap_offline(tmp_path):
    """The steps of both processes: each is there, and what is there twice is the same."""
    output(python(KILLED, tmp_path, "wandb"), -signal.SIGKILL)
    output(python(RESUMED, tmp_path, "wandb"))
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    known: dict[int, dict[str, Any]] = {}
    for path in (first, second):
        for record in wandb_records(path, finished=path == second):
            if record["type"] == "history":
                row = {key: value for key, value in record["history"]["item"].items() if key not in CLOCKS}
                assert known.setdefault(row["_step"], row) == row
            if record["type"] == "run":
                assert record["run"]["run_id"] in path.name
                assert not (path == second and record["run"].get("resume"))  # wandb sync shifts the steps of such a run
    assert list(known) == list(range(9))
    assert [known[step].get("train/loss") for step in range(8)] == [step / 8 for step in range(8)]
    assert {step: row["eval/heldout/step"] for step, row in known.items() if "eval/heldout/step" in row} == {
        0: 0, 2: 2, 4: 4, 6: 6, 8: 8,
    }  # fmt: skip
    uploaded = [record for record in wandb_records(second) if record["type"] == "history"]
    assert len(uploaded) == 9  # wandb sync replaces what an earlier upload under this id has left


def test_a_killed_wandb_run_has_no_gap_on_the_server(tmp_path):
    with wandb_server() as server:
        online = {"WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        killed = python(KILLED, tmp_path, "wandb", "wait", **online)
        deadline = time.monotonic() + 60
        while not any(run["lines"] for run in server.runs.values()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        killed.communicate("\n", timeout=60)
        output(python(RESUMED, tmp_path, "wandb", **online))
        (run_id,) = server.runs
        history = server.history(run_id)
    assert [row["_step"] for row in history] == list(range(9))
    assert [row.get("train/loss") for row in history[:8]] == [step / 8 for step in range(8)]
    assert [row["_step"] for row in history if "eval/heldout/step" in row] == [0, 2, 4, 6, 8]


def test_a_resumed_tensorboard_has_no_gap_and_evaluations_at_their_steps(tmp_path):
    pytest.importorskip("tensorboard")
    output(python(KILLED, tmp_path, "tensorboard"), -signal.SIGKILL)
    time.sleep(1.1)  # event files are named by the second
    output(python(RESUMED, tmp_path, "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(n, n / 8) for n in range(8)]
    rates = [(line["step"], line["eval/heldout/correct_rate"]) for line in read_jsonl(tmp_path / "evals.jsonl")]
    assert [(event.step, event.value) for event in events.Scalars("eval/heldout/correct_rate")] == rates
    assert [step for step, _ in rates] == [0, 2, 4, 6, 8]


NAMESAKE = f"""{RECORD}
with RunRecorder(Path(sys.argv[1]), settings("trackio", wandb_project=sys.argv[2])) as recorder:
    play(recorder, 0, 2)
"""
CURVES = """
import json
from trackio.sqlite_storage import SQLiteStorage
for run in SQLiteStorage.get_run_records("mine"):
    rows = SQLiteStorage.get_logs("mine", run["name"], run_id=run["id"])
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    print(json.dumps([run["name"], losses, [row["step"] for row in rows if "eval/heldout/step" in row]]))
"""


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


COHORT = f"""{RECORD}
runs = [RunRecorder(Path(sys.argv[1]) / str(s), settings("trackio", wandb_project="mine")) for s in (1, 2)]
for number in range(3):  # two runs of a cohort, side by side
    for run in runs:
        play(run, number, number + 1)
for run in runs:
    run.close()
"""


def test_trackio_keeps_the_runs_of_a_cohort_apart(tmp_path):
    pytest.importorskip("trackio")
    home = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    assert output(python(COHORT, tmp_path, **home)) == ""
    curves = [json.loads(line)[1:] for line in output(python(CURVES, **home)).splitlines()]
    assert curves == [[[[0, 0.0], [1, 0.125], [2, 0.25]], [0, 2]]] * 2


@pytest.mark.parametrize(
    ("named", "project"),
    [({}, "sweep"), ({"campaign": {"name": "paper"}}, "paper"), ({"logging": {"wandb_project": "house"}}, "house")],
)
def test_the_project_of_trackio(tmp_path, monkeypatch, named, project):
    """Its name needs no wandb_project, which would start wandb as well."""
    asked: dict[str, Any] = {}
    module, run = ModuleType("trackio"), SimpleNamespace(id="r1")
    module.init = lambda **arguments: asked.update(arguments) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    sections = {**named, "logging": {"report_to": ["trackio"], **named.get("logging", {})}}
    if "campaign" in named:
        sections["campaign"] |= {"seeds": [1], "conditions": [{"advantage_mode": "grpo", "transform_mode": "none"}]}
    cfg = config(**sections)
    directory = tmp_path / "sweep" / "runs" / "grpo+none_s1"
    (tracker,) = [make_trackers(context(config=cfg, is_campaign=True), directory)["trackio"]]
    tracker.start(TrackedRun.of(context(config=cfg, is_campaign=True)), None)
    assert (asked["project"], asked["name"], asked["group"]) == (project, "grpo+none_s1", "grpo+none")


PLUGIN = """
import json

class Diary:
    def __init__(self, folder):
        self.folder = folder

    def start(self, run, state):
        if run.project == "closed":
            raise ConnectionError("no route to host")
        self.id = state["id"] if state else "first"
        (self.folder / f"{self.id}.json").write_text(json.dumps([run.name, run.group, run.tags, run.config["lr"]]))
        return {"id": self.id}

    def log(self, step, values):
        with open(self.folder / f"{self.id}.txt", "a") as file:
            file.write(f"{step} {values['train/loss']} {'kl' in values}\\n")

    def finish(self, failed):
        with open(self.folder / f"{self.id}.txt", "a") as file:
            file.write(f"failed={failed}\\n")

def diary(folder):
    return Diary(folder)

def nothing(folder):
    return object()

def broken(folder):
    raise OSError("disk")
"""


@pytest.fixture
def plugin_context(tmp_path, monkeypatch):
    (tmp_path / "diaries.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(name: str = "diary", **logging: Any) -> Any:
        cfg = config(logging={"report_to": [f"diaries:{name}"], **logging})
        return context(config=cfg, is_campaign=True, folder=tmp_path)

    yield make
    sys.modules.pop("diaries", None)


def test_a_tracker_of_the_users_own(tmp_path, plugin_context):
    first = RunRecorder(tmp_path, plugin_context())
    first.record_step(step([group([1.0, 0.0], [4, 4])], 0, {"loss": 0.25}))
    state = json.loads(json.dumps(first.state()))
    first.close(failed=True)
    assert state["trackers"] == {"diaries:diary": {"id": "first"}}
    second = RunRecorder(tmp_path, plugin_context())
    second.restore(state)
    with second:
        second.record_step(step([group([1.0, 0.0], [4, 4])], 1, {"loss": 0.5}))
    assert (tmp_path / "first.txt").read_text() == "0 0.25 False\nfailed=True\n1 0.5 False\nfailed=False\n"
    assert json.loads((tmp_path / "first.json").read_text()) == [
        "grpo+none_s1", "grpo+none", ["grpo+none", "seed1"], 1e-4,
    ]  # fmt: skip


def test_a_plug_in_that_cannot_start_stops_the_run(tmp_path, plugin_context):
    recorder = RunRecorder(tmp_path, plugin_context(wandb_project="closed"))
    with pytest.raises(RetrainError, match="diaries:diary could not start: ConnectionError: no route to host"):
        recorder.start()
    for name, message in (
        ("nothing", "returned object, which has no method start"),
        ("broken", "raised OSError: disk"),
        ("missing", "has no function 'missing'"),
    ):
        with pytest.raises(RetrainError, match=message):
            RunRecorder(tmp_path, plugin_context(name))


def test_trackers_get_the_ranges_of_the_metrics():
    ranges = {"reward": {"min": 0.0, "max": 2.0}}
    assert TrackedRun.of(context(ranges=ranges)).config["metrics_ranges"] == ranges
    assert "metrics_ranges" not in TrackedRun.of(context()).config


def test_nothing_is_imported_unless_asked_for(tmp_path):
    assert make_trackers(context(), tmp_path) == {}
    assert list(make_trackers(context(config=config(logging={"wandb_project": "x"})), tmp_path)) == ["wandb"]


def test_missing_trackers_stop_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    recorder = RunRecorder(tmp_path, context(config=config(logging={"report_to": ["trackio"]})))
    with pytest.raises(MissingExtra, match=r"pip install '\.\[trackio\]'"):
        recorder.start()


def test_a_tracker_that_did_not_start_is_not_finished_and_nothing_is_said_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    heard: list[str] = []
    settings = context(config=config(logging={"wandb_project": "p"}))
    with (
        pytest.raises(MissingExtra, match="needs the package wandb"),
        RunRecorder(tmp_path, settings, warn=heard.append) as recorder,
    ):
        recorder.start()
    assert heard == []


def test_the_documented_tracker_reports_and_is_continued(tmp_path, monkeypatch):
    """The class in docs/outputs.md, word for word, against a client that keeps what it is told."""
    calls: list[tuple[Any, ...]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: f"experiment of {name}",
        create_run=lambda experiment, run_name: (
            calls.append(("run", experiment, run_name)) or SimpleNamespace(info=SimpleNamespace(run_id="r1"))
        ),
        log_param=lambda *arguments: calls.append(("param", *arguments)),
        log_metric=lambda run, name, value, step: calls.append(("metric", run, name, value, step)),
        set_terminated=lambda run, status: calls.append(("end", run, status)),
    )
    module = ModuleType("mlflow")
    module.MlflowClient = lambda: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    (text,) = [block.values[0] for block in blocks("python") if "class Mlflow" in block.values[0]]
    (tmp_path / "mytracker.py").write_text(text)
    settings = context(config=config(logging={"report_to": ["mytracker:make"]}), folder=tmp_path)
    with RunRecorder(tmp_path / "run", settings) as recorder:
        recorder.record_step(step([group([1.0, 0.0], [3, 4])]))
        state = recorder.state()
    assert calls[0] == ("run", "experiment of retrain", "grpo+none")
    assert ("param", "r1", "lr", 1e-4) in calls
    assert ("metric", "r1", "train/rewards/mean_reward", 0.5, 0) in calls
    assert calls[-1] == ("end", "r1", "FINISHED")
    with RunRecorder(tmp_path / "run", settings) as again:
        again.restore(state)
        again.record_step(step([group([1.0, 1.0], [3, 4])], 1))
    assert sum(call[0] == "run" for call in calls) == 1
    assert ("metric", "r1", "train/rewards/mean_reward", 1.0, 1) in calls


def test_a_tracker_has_our_steps(mixed_campaign):
    """A tracker's step counter running to 53 for 3 optimizer steps."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for run in runs_of(mixed_campaign / "out").values():
        (file,) = (run / "tensorboard").iterdir()
        events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
        assert [event.step for event in events] == [0, 1, 2]
        tracked = [{v.tag: v for v in event.summary.value} for event in events]
        assert all(tracked)
