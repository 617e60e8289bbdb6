"""The bundled model learns: the shipped quickstart campaign, shortened, and the loop in one file."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from snippets import blocks
from typer.testing import CliRunner

from retrain.campaign.running.controller import launch
from retrain.cli import app
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.models import bundled_model_path
from retrain.record.observer import NullObserver

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "out"
    loaded = load(ROOT / "campaigns" / "quickstart.toml", ["campaign.max_steps=18", "evaluation.problems=120"])
    assert launch(loaded, out, NullObserver()).exit_status == 0
    assert len(read_json(out / "manifest.json")["runs"]) == 4
    return out


def test_every_run_is_on_policy_and_gains_fifteen_points_on_held_out_problems(quickstart):
    for run in read_json(quickstart / "manifest.json")["runs"]:
        before, middle, after = read_jsonl(quickstart / run["path"] / "evals.jsonl")
        assert (before["step"], middle["step"], after["step"]) == (0, 10, 18)
        assert after["eval/heldout/correct_rate"] - before["eval/heldout/correct_rate"] >= 0.15
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
    assert {(row["sepa_lambda"], row["sepa_gate_open"], row["bp_action"]) for row in plain} == {(0.0, False, "off")}


def snippet(mark: str) -> str:
    """The Python block of docs/outputs.md in which this stands."""
    here = [block.values[0] for block in blocks("python") if block.id.startswith("outputs.md")]
    (found,) = [text for text in here if mark in text]
    return found


def test_the_documented_readers_of_a_run(quickstart, monkeypatch):
    """Run every reader of docs/outputs.md in a run's directory, where people start their scripts."""
    import matplotlib

    monkeypatch.chdir(quickstart / "runs" / "grpo+none_s1")
    monkeypatch.setenv("MPLCONFIGDIR", tempfile.gettempdir())
    matplotlib.use("Agg")
    names: dict[str, Any] = {}
    exec(snippet("find_conversations"), names)
    assert [t["iteration"] for t in names["trajectories"]] == [10] * 64
    assert len(names["conversations"]) == 4 * 8
    question, answer = names["conversations"][0]["messages"][-2:]
    assert (question["role"], answer["role"]) == ("user", "assistant")
    assert "=?" in question["content"]
    exec(snippet("df.plot"), {})
    (line,) = matplotlib.pyplot.gca().lines
    assert list(line.get_xdata()) == list(range(18))
    matplotlib.pyplot.close("all")
    base = str(bundled_model_path("tiny-reasoner"))
    text = snippet("PeftModel").replace('"Qwen/Qwen3-8B"', repr(base)).replace('"logs/gsm8k/final"', '"final"')
    exec(text, names)
    assert names["model"].peft_config["default"].r == 16


def test_a_first_try_of_two_steps_trains_and_says_what_it_is_worth(tmp_path):
    path, sets = ROOT / "campaigns" / "quickstart.toml", ["campaign.max_steps=2"]
    checked = CliRunner().invoke(app, ["check", str(path), "--set", *sets])
    assert checked.exit_code == 0
    assert "λ is 0 for the whole run, which makes gtpo_sepa plain gtpo" in checked.stderr
    sets += ["evaluation.problems=8", "training.batch_size=2", "training.max_tokens=16", "squeeze.enabled=false"]
    outcome = launch(load(path, sets), tmp_path / "out", NullObserver())
    assert outcome.exit_status == 0
    assert any("maxrl+gtpo_sepa trains with λ = 0" in text for text in outcome.summary["comparison"]["warnings"])
    assert "maxrl+gtpo_sepa trains with λ = 0" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    notes = [note["text"] for note in read_jsonl(tmp_path / "out/runs/maxrl+gtpo_sepa_s1/notes.jsonl")]
    assert any("SEPA's λ was 0 in every one of the 2 steps" in text for text in notes)


def test_the_minimal_loop_learns(capsys, tmp_path):
    path = ROOT / "examples" / "minimal_loop.py"
    main = runpy.run_path(str(path))["main"]
    history = main(14, str(tmp_path / "loop"))
    assert sum(history[-4:]) / 4 > sum(history[:3]) / 3 + 0.15
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    rows = read_jsonl(tmp_path / "loop" / "metrics.jsonl")
    assert [row["progress/batch"] for row in rows] == list(range(14))
    assert [row["reward/total"] for row in rows] == history
    assert all(row["loss"] is not None and row["time/total"] > 0 for row in rows)
    before = (tmp_path / "loop" / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="is there already: give another directory"):
        main(14, str(tmp_path / "loop"))
    assert (tmp_path / "loop" / "metrics.jsonl").read_bytes() == before
    assert all("ratio 1.0000" in line or "ratio 0.9999" in line for line in lines)
