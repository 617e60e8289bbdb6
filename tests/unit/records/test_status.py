"""Run facts and status, read from files alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from record_cases import context, evaluation, group, step
from rich.console import Console

from retrain.config import parse_dict
from retrain.errors import CheckpointError, UsageError
from retrain.files import write_json
from retrain.ownership import claim
from retrain.record.console import status_view
from retrain.record.environment import environment_facts, package_versions, run_facts
from retrain.record.recorder import RunRecorder
from retrain.record.status import last_row, read_status


def make_run(directory: Path, steps: int) -> None:
    with RunRecorder(directory, context(run_id=directory.name)) as recorder:
        recorder.record_eval(evaluation([group([1.0, 0.0], [2, 2])]))
        for n in range(steps):
            recorder.record_step(step([group([1.0, 0.0], [2, 2])], n))


def test_a_campaign_from_its_files(tmp_path):
    make_run(tmp_path / "runs" / "a_s1", 3)
    runs = [
        {"run_id": "a_s1", "label": "a", "seed": 1, "state": "running", "reason": None, "step": 0, "max_steps": 10,
         "path": "runs/a_s1"},
        {"run_id": "a_s2", "label": "a", "seed": 2, "state": "failed", "reason": "RunFailed: no reward", "step": 0,
         "max_steps": 10, "path": "runs/a_s2"},
        {"run_id": "a_s3", "label": "a", "seed": 3, "state": "pending", "reason": None, "step": 0, "max_steps": 10,
         "path": "runs/a_s3"},
    ]  # fmt: skip
    write_json(tmp_path / "manifest.json", {"runs": runs, "squeeze": {"recommended_rank": 4}})
    status = read_status(tmp_path)
    assert status["kind"] == "campaign"
    assert status["recommended_rank"] == 4
    assert [run["step"] for run in status["runs"]] == [3, 0, 0]
    assert status["runs"][0]["row"]["mean_reward"] == 0.5
    assert status["runs"][0]["heldout_before"] == 0.5
    json.dumps(status, allow_nan=False)
    stream = io.StringIO()
    Console(file=stream, width=80).print(status_view(status))
    text = stream.getvalue()
    assert "3/10" in text
    assert "a_s2: RunFailed: no reward" in text
    assert "1 waiting" in text
    assert "recommended rank 4" in text


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("manifest.json", '{"format": 1, "runs": [', UsageError),
        ("manifest.json", '{"format": 1, "runs": [{"run_id": 3}]}', UsageError),
        ("metrics.jsonl", "nonsense\n", CheckpointError),
        ("metrics.jsonl", "[1]\n", CheckpointError),
    ],
)
def test_damaged_files_are_named_in_one_line(tmp_path, name, text, error):
    claim(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=rf"{name} is damaged \(") as told:
        read_status(tmp_path)
    assert "\n" not in str(told.value)


def test_a_single_run_without_a_manifest(tmp_path):
    make_run(tmp_path / "run", 2)
    status = read_status(tmp_path / "run")
    assert status["kind"] == "run"
    (run,) = status["runs"]
    assert (run["step"], run["max_steps"], run["state"]) == (2, 10, "interrupted")
    with pytest.raises(UsageError, match="holds no runs"):
        read_status(tmp_path)


def test_the_last_row_of_a_long_file_with_a_torn_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == {}
    path.write_text('{"step": 0')
    assert last_row(path) == {}
    path.write_text('{"step": 0}\n')
    assert last_row(path) == {"step": 0}
    path.write_text("".join(json.dumps({"step": n, "pad": "x" * 50_000}) + "\n" for n in range(9)) + '{"step": 9, "to')
    assert last_row(path)["step"] == 8
    path.write_text(json.dumps({"step": 1, "pad": "x" * 400_000}) + "\n")
    assert last_row(path)["step"] == 1


def test_facts_hold_types_and_versions_and_no_environment_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    facts = run_facts(parse_dict({"training": {"lr": 1e-4, "seed": 1}}), run_id="a_s1")
    assert facts["training"]["lr"] == 1e-4
    types = {"training.lr": "float", "training.seed": "int", "training.clip_eps_high": "null", "lora.anneal": "list"}
    assert types.items() <= facts["types"].items()
    assert facts["run_id"] == "a_s1"
    assert facts["packages"]["numpy"] == package_versions()["numpy"]
    everything = environment_facts()
    assert everything["packages"]["rich"]
    assert everything["cpu_count"] >= 1
    assert "sk-very-secret" not in json.dumps([facts, everything])
