"""Trackers for real: wandb offline, read back record by record; tensorboard and trackio through their own readers."""

from __future__ import annotations

import json
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

from retrain.config import parse_dict
from retrain.config.upkeep import trackers
from retrain.errors import MissingExtra, RetrainError
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


def wandb_run(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """(run record, history rows, last summary values) of the only run below ``run_dir``, by wandb's own reader."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while True:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
        if "No such command" in done.stderr:
            pytest.skip("this release of wandb has no reader of its files")
        records = [json.loads(line) for line in done.stdout.splitlines()]
        if any(record["type"] == "exit" for record in records):  # its service writes a moment after finish
            break
        assert time.monotonic() < deadline, f"wandb never finished its file: {done.stderr}"
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
    log_squeeze_analysis(wandb_context, tmp_path, report)
    run, history, summary = wandb_run(tmp_path)
    assert run["display_name"] == "squeeze-analysis"
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


TRACKIO = """
import sys
from pathlib import Path
from record_cases import config, context, group, step
from retrain.record.recorder import RunRecorder
folder = Path(sys.argv[1])
cfg = config(logging={"report_to": ["trackio"], "wandb_project": "house"})
runs = [RunRecorder(folder / str(s), context(config=cfg, seed=s, is_campaign=True)) for s in (1, 2)]
for number in range(3):  # two runs of a cohort, side by side
    for run in runs:
        run.record_step(step([group([1.0, 0.0], [4, 4])], number, {"loss": 0.25}))
states = [run.state() for run in runs]
for run in runs:
    run.close()
resumed = RunRecorder(folder / "1", context(config=cfg, seed=1, is_campaign=True))
resumed.restore(states[0])
resumed.record_step(step([group([1.0, 0.0], [4, 4])], 2, {"loss": 0.25}))  # made anew after a kill
resumed.record_step(step([group([1.0, 0.0], [4, 4])], 3, {"loss": 0.5}))
resumed.close()
import json
from trackio.sqlite_storage import SQLiteStorage
logs = {name: SQLiteStorage.get_logs("house", name) for name in SQLiteStorage.get_runs("house")}
print(json.dumps({name: [(row["step"], row["train/loss"]) for row in rows] for name, rows in logs.items()}))
"""


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    import os

    folders = os.pathsep.join(str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1]))
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": folders}
    wrote = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert wrote.returncode == 0, wrote.stderr
    curves = json.loads(wrote.stdout)  # and nothing else: its hints would spoil a live view
    assert curves["grpo+none_s1"] == [[0, 0.25], [1, 0.25], [2, 0.25], [3, 0.5]]
    assert curves["grpo+none_s2"] == [[0, 0.25], [1, 0.25], [2, 0.25]]


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
