"""A compressed adapter is really evaluated beside the full one, and the words follow from the interval."""

from __future__ import annotations

from pathlib import Path

import pytest
from toymodels import qwen3_directory

from retrain.campaign.launch import launch
from retrain.campaign.manifest import read_plan
from retrain.campaign.squeeze import compress_adapter
from retrain.campaign.verify import sentence, verdict, verify_compression
from retrain.config import load
from retrain.errors import UsageError
from retrain.files import read_json
from retrain.record.observer import NullObserver

REWARD = "def score(completion, answer):\n    return float(len(completion) % 3 == 0)\n"
RUN = """
[model]
model = "{folder}/model"
lora_rank = 4
[training]
max_steps = 2
batch_size = 2
group_size = 4
max_tokens = 8
lr = 0.05
[evaluation]
problems = {problems}
samples = 3
[reward]
type = "custom"
custom_module = "{folder}/threerewards.py"
custom_function = "score"
workers = 1
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    (folder / "threerewards.py").write_text(REWARD)
    qwen3_directory(folder / "model", ["12+34=? the answer is \\boxed{46}"])
    (folder / "run.toml").write_text(RUN.format(folder=folder, problems=6))
    outcome = launch(load(folder / "run.toml"), folder / "out", NullObserver())
    assert outcome.exit_status == 0, outcome.summary
    return folder / "out"


def test_the_analysis_after_a_run_holds_the_verification(trained):
    report = read_json(trained / "manifest.json")["squeeze"]
    found = report["verified"]
    assert found == read_json(trained / "squeeze/verification.json") | {"p": found["p"]}
    assert (found["rank"], found["problems"], found["samples"]) == (report["recommended_rank"], 6, 3)
    assert found["difference"]["mean"] == pytest.approx(found["compressed"]["accuracy"] - found["full"]["accuracy"])
    assert f"Verified at rank {found['rank']}" in found["sentence"]
    assert "6 problems × 3" in found["sentence"]


def test_the_same_adapter_gives_the_same_answers_and_the_untrained_one_others(trained):
    specs, folder = read_plan(trained)
    same = compress_adapter(trained / "final", 4, trained / "whole")
    found = verify_compression(specs[0], folder, trained / "final", same, trained / "again.json")
    assert found["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}  # common random numbers: answer by answer
    assert (found["verdict"], found["p"]) == ("kept", 1.0)


def test_without_held_out_problems_nothing_is_claimed(trained, tmp_path):
    path = tmp_path / "none.toml"
    path.write_text(RUN.format(folder=trained.parent, problems=0))
    from retrain.campaign.plan import plan

    (spec,) = plan(load(path))
    with pytest.raises(UsageError, match="held-out problems"):
        verify_compression(spec, tmp_path, trained / "final", trained / "final", tmp_path / "v.json")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.019, 0.01, "kept"),
        (0.01, 0.05, "kept"),
        (-0.10, -0.01, "lost"),
        (-0.10, 0.05, "unclear"),
        (-0.01, -0.001, "kept"),
        (None, None, "unclear"),
    ],
)
def test_the_verdict_follows_from_the_interval(low, high, expected):
    assert verdict(low, high) == expected
    found = {
        "rank": 2, "problems": 90, "samples": 2, "p": 0.03, "verdict": expected, "full": {"accuracy": 0.8},
        "compressed": {"accuracy": 0.75}, "difference": {"mean": -0.05, "low": low or -0.1, "high": high or 0.1},
    }  # fmt: skip
    assert "75.0% against 80.0% with the full adapter, −5.0 points" in sentence(found)
