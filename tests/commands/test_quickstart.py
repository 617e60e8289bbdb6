import runpy
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import blocks, train

from retrain.files import read_jsonl
from retrain.models.directory import bundled_model_path

ROOT = Path(__file__).parents[2]

STEPS = 18


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The shipped campaign with one seed and fewer steps."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    sets = ["campaign.seeds=[1]", f"campaign.max_steps={STEPS}", "evaluation.problems=120", "training.eval_every=0"]
    train(ROOT / "campaigns" / "quickstart.toml", out, *sets)
    return out


def test_every_run_is_on_policy_and_learns(quickstart):
    for run in ("grpo+none_s1", "maxrl+gtpo_sepa_s1"):
        before, after = read_jsonl(quickstart / "runs" / run / "evals.jsonl")
        assert after["eval/heldout/correct_rate"] - before["eval/heldout/correct_rate"] >= 0.15
        rows = read_jsonl(quickstart / "runs" / run / "metrics.jsonl")
        for row in rows:
            assert row["val/ratio"] == pytest.approx(1, abs=1e-5)
            assert row["kl_sample_train_v2"] < 1e-6
            assert row["planning_fraction"] is not None
        ramp = [row["sepa_lambda"] for row in rows]
        assert ramp == sorted(ramp)
        assert ramp[0] == 0
        assert (ramp[-1] > 0.1) == ("sepa" in run)


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
    exec(snippet("df.plot"), {})
    (line,) = matplotlib.pyplot.gca().lines
    assert list(line.get_xdata()) == list(range(STEPS))
    matplotlib.pyplot.close("all")
    base = str(bundled_model_path("tiny-reasoner"))
    text = snippet("PeftModel").replace('"Qwen/Qwen3-8B"', repr(base)).replace('"logs/gsm8k/final"', '"final"')
    exec(text, names)
    assert names["model"].peft_config["default"].r == 16


def test_the_minimal_loop_learns(capsys, tmp_path):
    main = runpy.run_path(str(ROOT / "docs" / "examples" / "minimal_loop.py"))["main"]
    history = main(14, str(tmp_path))
    assert sum(history[-4:]) / 4 > sum(history[:3]) / 3 + 0.15
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert all("ratio 1.0000" in line or "ratio 0.9999" in line for line in lines)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["reward/total"] for row in rows] == history
    assert all(row["loss"] is not None and row["time/total"] > 0 for row in rows)
    with pytest.raises(SystemExit, match="is there already: give another directory"):
        main(14, str(tmp_path))
    assert read_jsonl(tmp_path / "metrics.jsonl") == rows
