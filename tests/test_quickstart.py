"""The bundled model learns: the shipped quickstart campaign, shortened, and the loop in one file."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from retrain.campaign.launch import launch
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "out"
    loaded = load(ROOT / "campaigns" / "quickstart.toml", ["campaign.max_steps=18", "evaluation.problems=120"])
    assert launch(loaded, out, NullObserver()).exit_status == 0
    return out


def test_every_run_gains_fifteen_points_on_held_out_problems(quickstart):
    for run in read_json(quickstart / "manifest.json")["runs"]:
        before, middle, after = read_jsonl(quickstart / run["path"] / "evals.jsonl")
        assert (before["step"], middle["step"], after["step"]) == (0, 10, 18)
        assert after["eval/heldout/correct_rate"] - before["eval/heldout/correct_rate"] >= 0.15


def test_the_bundled_model_is_on_policy(quickstart):
    for run in read_json(quickstart / "manifest.json")["runs"]:
        for row in read_jsonl(quickstart / run["path"] / "metrics.jsonl"):
            assert row["val/ratio"] == pytest.approx(1, abs=1e-5)
            assert row["kl_sample_train_v2"] < 1e-6
            assert row["planning_fraction"] is not None


def test_sepa_ramps_and_leaves_planning_tokens_alone(quickstart):
    rows = read_jsonl(quickstart / "runs" / "maxrl+gtpo_sepa_s1" / "metrics.jsonl")
    ramp = [row["sepa_lambda"] for row in rows]
    assert ramp[0] == 0
    assert ramp[-1] > 0.2
    assert ramp == sorted(ramp)
    assert rows[-1]["exec_surprisal_mean"] is not None
    plain = read_jsonl(quickstart / "runs" / "grpo+none_s1" / "metrics.jsonl")
    assert {row["sepa_lambda"] for row in plain} == {None}


def test_peft_loads_the_final_adapter(quickstart):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from retrain.models import bundled_model_path

    base = AutoModelForCausalLM.from_pretrained(bundled_model_path("tiny-reasoner"))
    model = PeftModel.from_pretrained(base, str(quickstart / "runs" / "grpo+none_s1" / "final"))
    assert model.peft_config["default"].r == 16


def test_the_minimal_loop_fits_a_screen_and_learns(capsys):
    path = ROOT / "examples" / "minimal_loop.py"
    assert len(path.read_text().splitlines()) <= 120
    history = runpy.run_path(str(path))["main"](14)
    assert sum(history[-4:]) / 4 > sum(history[:3]) / 3 + 0.15
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert all("ratio 1.0000" in line or "ratio 0.9999" in line for line in lines)
