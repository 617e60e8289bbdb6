"""Run facts and status, read from files alone."""

from __future__ import annotations

import json

import pytest

from retrain.config import parse_dict
from retrain.errors import CheckpointError
from retrain.ownership import claim
from retrain.record.environment import environment_facts, package_versions, run_facts
from retrain.record.status import last_row, read_status


@pytest.mark.parametrize("text", ["nonsense\n", "[1]\n"])
def test_damaged_rows_are_named_in_one_line(tmp_path, text):
    claim(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl is damaged \(") as raised:
        read_status(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_last_row_of_a_long_file_with_a_torn_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) == {}
    for text, step_number in (
        ('{"step": 0', None),
        ('{"step": 0}\n', 0),
        ("".join(json.dumps({"step": n, "pad": "x" * 50_000}) + "\n" for n in range(9)) + '{"step": 9, "to', 8),
        (json.dumps({"step": 1, "pad": "x" * 400_000}) + "\n", 1),
    ):
        path.write_text(text)
        assert last_row(path).get("step") == step_number


def test_facts_hold_types_and_versions_and_no_environment_variables(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    facts = run_facts(parse_dict({"training": {"lr": 1e-4, "seed": 1}}), run_id="a_s1")
    types = {"training.lr": "float", "training.seed": "int", "training.clip_eps_high": "null", "lora.anneal": "list"}
    assert types.items() <= facts["types"].items()
    assert (facts["run_id"], facts["training"]["lr"]) == ("a_s1", 1e-4)
    assert facts["packages"]["numpy"] == package_versions()["numpy"]
    assert environment_facts()["cpu_count"] >= 1
    assert "sk-very-secret" not in json.dumps([facts, environment_facts()])
