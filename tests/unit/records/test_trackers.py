"""Trackers in this process: wandb offline, read back record by record, tensorboard, and those of a user.

``tests/system/test_tracker_kills.py`` kills and resumes runs that report to them.
"""

import json
import sys
import tomllib
from contextlib import closing
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.campaigns import blocks
from helpers.records import config, context, group, step, wandb_run

from retrain.adapters.squeeze import log_squeeze_analysis
from retrain.config import parse_dict
from retrain.config.evaluation import trackers
from retrain.errors import MissingExtra, RetrainError
from retrain.ownership import claim
from retrain.records.recorder import RunRecorder
from retrain.records.reporter import make_trackers
from retrain.records.trackers import TrackedRun

STATE = {
    "sepa_lambda": 0.25, "sepa_gate_open": True, "exec_surprisal_mean": 1.5, "bp_regime": "warmup", "bp_warmup": True,
}  # fmt: skip
UPDATE = {
    "loss": 0.5, "reported_loss": 0.5, "loss_is_placeholder": False, "backend_reports_sync_loss": True,
    "backend_preserves_token_advantages": True,
}  # fmt: skip
EXPECTED = {
    "train/loss": 0.5, "train/reported_loss": 0.5, "train/loss_is_placeholder": 0, "train/rewards/mean_reward": 0.5,
    "train/rewards/correct_rate": 0.5, "train/rewards/running_correct_rate": 0.5, "train/sepa_lambda": 0.25,
    "train/sepa_gate_open": 1, "train/max_token_hit_rate": 0.0, "train/num_datums": 2, "train/step_time_s": 4.0,
    "train/batch_size": 1, "train/group_size": 2, "train/backend/reports_sync_loss": 1,
    "train/backend/preserves_token_advantages": 1, "train/surprisal/exec_mean": 1.5, "train/entropy/exec_mean": 1.5,
    "train/backpressure/action": "off", "train/backpressure/regime": "warmup", "train/backpressure/warmup": 1,
    "env/all/reward/total": 0.5,
}  # fmt: skip


@pytest.fixture
def wandb_context():
    pytest.importorskip("wandb")
    cfg = config(
        logging={"wandb_project": "house", "wandb_mode": "offline"}, algorithm={"transform_mode": "gtpo_sepa"},
        gtpo={"beta": 0.1}, hicra={"alpha": 0.2}, sepa={"steps": 50, "delay_steps": 5, "correct_rate_gate": 0.1},
        backend={"backend": "local"},
    )  # fmt: skip
    return context(config=cfg, condition="maxrl+gtpo_sepa", run_id="maxrl+gtpo_sepa_s3", seed=3, is_campaign=True)


def test_wandb_has_the_names_that_dashboards_read(tmp_path, wandb_context):
    recorder = RunRecorder(tmp_path, wandb_context)
    for number in range(2):
        recorder.record_step(step([group([1.0, 0.0], [4, 4])], number, dict(UPDATE), **STATE))
    assert recorder.close()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    run, history, summary = wandb_run(path)
    assert [row["_step"] for row in history] == [0, 1]
    assert {key: history[0].get(key) for key in EXPECTED} == EXPECTED
    assert "kl" not in history[0]
    assert (run["display_name"], run["run_group"], run["project"]) == ("maxrl+gtpo_sepa_s3", "maxrl+gtpo_sepa", "house")
    assert run["tags"] == ["maxrl+gtpo_sepa", "seed3"]
    assert run["run_id"] == recorder.state()["trackers"]["wandb"]["run_id"]
    assert {key: summary.get(key) for key in EXPECTED} == EXPECTED
    settings = run["config"]["update"]
    assert (settings["condition"], settings["seed"], settings["max_steps"]) == ("maxrl+gtpo_sepa", 3, 10)
    assert (settings["gtpo_beta"], settings["sepa_delay_steps"], settings["lora_rank"]) == (0.1, 5, 8)
    assert {"advantage_mode", "model", "lr", "batch_size", "backend", "hicra_alpha", "sepa_steps"} <= set(settings)


def test_the_squeeze_analysis_is_a_run_that_a_repetition_continues(tmp_path, wandb_context):
    rows = [
        {"rank": 2, "mean_variance": 0.8, "min_variance": 0.7, "max_variance": 0.9, "relative_error": 0.44},
        {"rank": 4, "mean_variance": 0.97, "min_variance": 0.95, "max_variance": 0.99, "relative_error": 0.17},
    ]
    report = {"run": "a_s1", "source_rank": 8, "recommended_rank": 4, "min_variance_retention": 0.95, "num_layers": 6,
              "rows": rows, "message": ""}  # fmt: skip
    claim(tmp_path)
    for _ in range(2):
        log_squeeze_analysis(wandb_context, tmp_path, report)
    paths = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run, history, summary = wandb_run(paths[0])
    assert [path.name for path in paths] == [f"run-{run['run_id']}.wandb"] * 2
    assert (run["display_name"], run["run_group"]) == ("squeeze-analysis", "maxrl+gtpo_sepa")
    assert (summary["squeeze/recommended_rank"], summary["squeeze/source_rank"]) == (4, 8)
    assert [row["squeeze/mean_variance"] for row in history if "squeeze/rank" in row] == [0.8, 0.97]


def test_names_outside_a_campaign_and_in_one():
    def named(is_campaign: bool, **logging: Any) -> tuple[str, str | None, list[str]]:
        run = TrackedRun.of(context(is_campaign=is_campaign, config=config(logging=logging)))
        return run.name, run.group, run.tags

    assert named(False) == ("grpo+none", None, [])
    assert named(False, wandb_run_name="mine", wandb_tags=["a", "b"]) == ("mine", None, ["a", "b"])
    assert named(True) == ("grpo+none_s1", "grpo+none", ["grpo+none", "seed1"])


@pytest.mark.parametrize(("asked", "names"), [
    ('report_to = "tensorboard, mine:make"', ["tensorboard", "mine:make"]),
    ('report_to = ["tensorboard"]\nwandb_project = "p"', ["tensorboard", "wandb"]),
    ('report_to = "all"', ["wandb", "tensorboard"]),
    ('report_to = "none"\nwandb_project = "p"', []),
    ("", []),
])  # fmt: skip
def test_the_trackers_that_are_asked_for(monkeypatch, asked, names):
    monkeypatch.setitem(sys.modules, "trackio", None)
    logging = parse_dict(tomllib.loads(f"[logging]\n{asked}")).logging
    assert trackers(logging.report_to, logging.wandb_project) == names
    assert logging.wandb is ("wandb" in names)


def test_a_tracker_that_is_not_installed_stops_the_run(tmp_path, monkeypatch):
    assert make_trackers(context(), tmp_path) == {}
    for name, logging in (("wandb", {"wandb_project": "p"}), ("trackio", {"report_to": ["trackio"]})):
        monkeypatch.setitem(sys.modules, name, None)
        settings = context(config=config(logging=logging))
        with pytest.raises(MissingExtra, match=rf"needs the package {name}.*pip install '\.\[{name}\]'"):
            RunRecorder(tmp_path / name, settings).start()


@pytest.mark.parametrize(("function", "message"), [
    ("    class Closed:\n        def start(self, run, state):\n            raise ConnectionError('no route')\n"
     "        def log(self, step, values):\n            pass\n    return Closed()",
     "mine:make could not start: ConnectionError: no route"),
    ("    return object()", "returned object, which has no method start"),
    ("    raise OSError('disk')", "raised OSError: disk"),
])  # fmt: skip
def test_a_plug_in_that_cannot_start_stops_the_run(tmp_path, monkeypatch, import_path, function, message):
    (tmp_path / "mine.py").write_text(f"def make(folder):\n{function}\n")
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    settings = context(config=config(logging={"report_to": ["mine:make"]}), folder=tmp_path)
    with pytest.raises(RetrainError, match=message):
        RunRecorder(tmp_path, settings).start()


def test_the_documented_tracker_reports_and_is_continued(tmp_path, monkeypatch):
    """The class in docs/outputs.md, run against a client that records its calls."""
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
    first = RunRecorder(tmp_path / "run", settings)
    first.record_step(step([group([1.0, 0.0], [3, 4])]))
    first.close(failed=True)
    state = json.loads(json.dumps(first.state()))
    assert state["trackers"] == {"mytracker:make": {"id": "r1"}}
    assert calls[0] == ("run", "experiment of retrain", "grpo+none")
    assert ("param", "r1", "lr", 1e-4) in calls
    assert ("metric", "r1", "train/rewards/mean_reward", 0.5, 0) in calls
    assert calls[-1] == ("end", "r1", "FAILED")
    with closing(RunRecorder(tmp_path / "run", settings)) as second:
        second.restore(state)
        second.record_step(step([group([1.0, 1.0], [3, 4])], 1))
    assert sum(call[0] == "run" for call in calls) == 1
    assert ("metric", "r1", "train/rewards/mean_reward", 1.0, 1) in calls
    assert calls[-1] == ("end", "r1", "FINISHED")
