"""campaigns/gsm8k.toml on the real problems, with a small local model in place of Qwen3-8B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toymodels import qwen3_directory

from retrain.campaign.running.controller import launch
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.record.observer import NullObserver

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data" / "gsm8k"

pytestmark = pytest.mark.skipif(not (REAL / "train.jsonl").is_file(), reason="the GSM8K files are not beside the clone")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Two steps of the shipped campaign; its lines stay but for the model, the data's place and the sizes."""
    folder = tmp_path_factory.mktemp("gsm8k")
    with open(REAL / "train.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["question"] for line, _ in zip(file, range(500), strict=False)]
    model = qwen3_directory(folder / "model", texts)
    sets = [
        f'model.model="{model}"',
        "model.lora_rank=8",
        f'data.source="{REAL / "train.jsonl"}"',
        f'data.eval_source="{REAL / "test.jsonl"}"',
        'data.prompt_column="question"',
        "training.max_steps=2",
        "training.batch_size=6",
        "training.group_size=4",
        "training.max_tokens=32",
        "evaluation.problems=6",
        'backend.devices="cpu"',
    ]
    result = launch(load(ROOT / "campaigns" / "gsm8k.toml", sets), folder / "out", NullObserver())
    assert result.exit_status == 0
    return folder / "out"


def test_two_steps_run_on_the_real_prompts(outcome):
    rows = read_jsonl(outcome / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["completions/mean_length"] > 0
    for row in rows:
        # correct + 0.1·(format − 1) of a model that knows nothing: −0.1, and both parts by their names
        assert row["mean_reward"] == pytest.approx(row["rewards/correct/mean"] + 0.1 * (row["rewards/format/mean"] - 1))
        assert row["mean_reward"] == pytest.approx(-0.1, abs=0.05)
    generations = read_jsonl(outcome / "emergence" / "generations.jsonl")
    assert len(generations) == 2 * 6 * 4
    assert all(row["prompt"] and "<|" not in row["prompt"] for row in generations)  # asked, without chat markup
    assert all(row["reference"].lstrip("-").replace(".", "").isdigit() for row in generations)
    facts = read_json(outcome / "config.json")
    assert facts["data_sizes"] == {"train": 7473, "heldout": 6}
    assert [row["step"] for row in read_jsonl(outcome / "evals.jsonl")] == [0, 2]
