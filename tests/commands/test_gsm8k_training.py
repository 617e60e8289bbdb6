"""campaigns/gsm8k.toml on the real problems, with a small local model in place of Qwen3-8B."""

from __future__ import annotations

from pathlib import Path

import pytest
from toymodels import qwen3_directory

from retrain.campaign.running.controller import launch
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the GSM8K files are not beside the clone")
def test_two_steps_run_on_the_real_prompts(tmp_path):
    """The shipped lines stay but for the model, the data's place and the sizes."""
    model = qwen3_directory(tmp_path / "model", [row["question"] for row in read_jsonl(REAL / "train.jsonl")[:500]])
    sets = [f'model.model="{model}"', "model.lora_rank=8", f'data.source="{REAL / "train.jsonl"}"',
            f'data.eval_source="{REAL / "test.jsonl"}"', 'data.prompt_column="question"', "training.max_steps=2",
            "training.batch_size=6", "training.group_size=4", "training.max_tokens=32", "evaluation.problems=6",
            'backend.devices="cpu"']  # fmt: skip
    out = tmp_path / "out"
    assert launch(load(ROOT / "campaigns" / "gsm8k.toml", sets), out, NullObserver()).exit_status == 0
    rows = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        # correct + 0.1·(format − 1) of a model that knows nothing: −0.1, and both parts by their names
        assert row["mean_reward"] == pytest.approx(row["rewards/correct/mean"] + 0.1 * (row["rewards/format/mean"] - 1))
        assert row["mean_reward"] == pytest.approx(-0.1, abs=0.05)
    generations = read_jsonl(out / "emergence" / "generations.jsonl")
    assert len(generations) == 2 * 6 * 4
    assert all(row["prompt"] and "<|" not in row["prompt"] for row in generations)  # asked, without chat markup
    assert all(row["reference"].lstrip("-").replace(".", "").isdigit() for row in generations)
    assert read_json(out / "config.json")["data_sizes"] == {"train": 7473, "heldout": 6}
