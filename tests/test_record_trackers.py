"""Trackers for real: wandb offline, read back record by record; tensorboard and trackio through their own readers."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from record_cases import config, context, group, step

from retrain.errors import MissingExtra, RetrainError
from retrain.record import RunRecorder
from retrain.record.trackers import log_squeeze_analysis, make_trackers, run_identity

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


def wandb_records(path: Path) -> list[Any]:
    """Every protobuf record of a ``.wandb`` file: LevelDB's log format behind a header of seven bytes."""
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, parts, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # a block's tail too short for a header is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def values(items: Any) -> dict[str, Any]:
    return {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


def wandb_run(run_dir: Path) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """(run record, history rows, last summary values) of the only run below ``run_dir``."""
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    records, deadline = wandb_records(path), time.monotonic() + 30
    while not any(r.WhichOneof("record_type") == "exit" for r in records):  # its service writes a moment after finish
        assert time.monotonic() < deadline, "wandb never finished its file"
        time.sleep(0.05)
        records = wandb_records(path)
    run = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    history = [
        values(r.history.item) | {"_step": r.history.step.num}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    summary: dict[str, Any] = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary.update(values(record.summary.update))
    return run, history, summary


@pytest.fixture
def wandb_context():
    pytest.importorskip("wandb")
    cfg = config(
        logging={"wandb_project": "house", "wandb_mode": "offline"},
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
    run, history, _ = wandb_run(tmp_path)
    assert [row["_step"] for row in history] == [0, 1, 2]
    assert {key: history[0].get(key) for key in EXPECTED} == EXPECTED
    assert "kl" not in history[0]
    assert (run.display_name, run.run_group, run.project) == ("maxrl+gtpo_sepa_s3", "maxrl+gtpo_sepa", "house")
    assert list(run.tags) == ["maxrl+gtpo_sepa", "seed3"]
    assert run.run_id == state["trackers"]["wandb"]["run_id"]
    settings = values(run.config.update)
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
    assert before[0].run_id == after[0].run_id
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
    assert run.display_name == "squeeze-analysis"
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


def test_names_outside_a_campaign():
    plain = run_identity(context(config=config(logging={"wandb_run_name": "mine", "wandb_tags": ["a", "b"]})))
    assert plain == {"name": "mine", "group": None, "tags": ["a", "b"]}
    assert run_identity(context())["name"] == "grpo+none"


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


def test_nothing_is_imported_unless_asked_for(tmp_path):
    assert make_trackers(context(), tmp_path) == []
    names = [t.name for t in make_trackers(context(config=config(logging={"wandb_project": "x"})), tmp_path)]
    assert names == ["wandb"]


def test_unknown_and_missing_trackers_stop_the_run(tmp_path, monkeypatch):
    with pytest.raises(RetrainError, match="unknown tracker 'mlfow'"):
        make_trackers(context(config=config(logging={"report_to": ["mlfow"]})), tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    recorder = RunRecorder(tmp_path, context(config=config(logging={"report_to": ["trackio"]})))
    with pytest.raises(MissingExtra, match=r"pip install 'retrain\[trackio\]'"):
        recorder.start()
