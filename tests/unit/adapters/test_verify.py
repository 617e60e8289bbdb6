from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from toymodels import qwen3_directory
from typer.testing import CliRunner

from retrain.campaign.adapters.squeeze import compress_adapter
from retrain.campaign.adapters.verify import enough, sentence, verdict, verify_ranks
from retrain.campaign.planning.asked import longest_completions
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.running.controller import launch, resume
from retrain.campaign.running.models import Bases
from retrain.cli import app
from retrain.config import load
from retrain.files import read_json, read_jsonl, write_json
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
problems = 6
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
    (folder / "run.toml").write_text(RUN.format(folder=folder))
    outcome = launch(load(folder / "run.toml"), folder / "out", NullObserver())
    assert outcome.exit_status == 0, outcome.summary
    return folder / "out"


def verified(spec, *where):
    """``verify_ranks`` of a run that is a plan by itself, over a base of its own."""
    with Bases() as bases:
        return verify_ranks(spec, *where, longest_completions([spec.config]), bases)


def test_every_rank_of_the_table_is_verified(trained):
    report = read_json(trained / "manifest.json")["squeeze"]
    found = report["verified"]
    assert found == read_json(trained / "squeeze/verification.json")
    candidates = {row["rank"] for row in report["rows"]} | {report["recommended_rank"]}
    assert [row["rank"] for row in found["ranks"]] == sorted(candidates - {4}, reverse=True)
    assert (found["full"]["rank"], found["problems"], found["samples"]) == (4, 6, 3)
    for row in found["ranks"]:
        assert row["difference"]["mean"] == pytest.approx(row["accuracy"] - found["full"]["accuracy"])
    final = read_jsonl(trained / "evals.jsonl")[-1]
    assert found["full"]["accuracy"] == final["eval/heldout/correct_rate"]
    assert found["full"]["sampled_anew"] is False
    assert "On 6 held-out problems with 3 samples each, " in found["sentence"]
    assert "sampled again" not in found["sentence"]
    assert not [path for path in (trained / "squeeze").iterdir() if path.name.startswith("tmp")]


def test_the_same_adapter_gives_the_same_answers_which_proves_little(trained, tmp_path):
    (spec,), folder = read_plan(trained).specs, read_plan(trained).folder
    same = compress_adapter(trained / "final", 4, tmp_path / "whole")
    found = verified(spec, folder, trained / "final", [same], tmp_path / "again.json")
    (row,) = found["ranks"]
    assert row["difference"]["mean"] == 0.0  # common random numbers: answer by answer
    assert row["difference"]["low"] == -row["difference"]["high"] < -0.02  # of six problems
    assert (row["verdict"], found["enough"]) == ("unclear", None)


@pytest.mark.parametrize("change", ["samples", "problems"])
def test_an_evaluation_made_otherwise_is_sampled_anew_and_that_is_said(trained, tmp_path, change):
    run = shutil.copytree(trained, tmp_path / "run")
    (spec,), folder = read_plan(trained).specs, read_plan(trained).folder
    if change == "samples":
        evaluation = spec.config.evaluation.model_copy(update={"samples": 2})
        spec = replace(spec, config=spec.config.model_copy(update={"evaluation": evaluation}))
    else:
        facts = read_json(run / "config.json")
        write_json(run / "config.json", facts | {"heldout_hashes": {"heldout": "of other problems"}})
    same = compress_adapter(run / "final", 4, tmp_path / "whole")
    found = verified(spec, folder, run / "final", [same], tmp_path / "again.json")
    assert found["full"]["sampled_anew"] is True
    assert ", sampled again" in found["sentence"]
    if change != "samples":  # the same streams: asked as the run asked
        assert found["full"]["accuracy"] == read_jsonl(trained / "evals.jsonl")[-1]["eval/heldout/correct_rate"]


def test_squeeze_reads_the_verification_of_this_adapter_alone(trained, tmp_path):
    verified = read_json(trained / "squeeze/verification.json")
    for directory in (trained, trained / "final"):
        told = CliRunner().invoke(app, ["squeeze", "--json", str(directory)])
        assert json.loads(told.output)["verified"] == verified
    assert verified["sentence"] in CliRunner().invoke(app, ["squeeze", str(trained)]).output
    other = shutil.copytree(trained, tmp_path / "run")
    compress_adapter(trained / "final", 2, tmp_path / "smaller")
    shutil.copytree(tmp_path / "smaller", other / "final", dirs_exist_ok=True)
    assert "verified" not in json.loads(CliRunner().invoke(app, ["squeeze", "--json", str(other)]).output)


def test_a_process_that_died_after_the_verification_does_not_repeat_it(trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "run")
    manifest = read_json(out / "manifest.json")
    write_json(out / "manifest.json", manifest | {"squeeze": None})
    verification = read_json(out / "squeeze/verification.json") | {"sentence": "read, not sampled again"}
    write_json(out / "squeeze/verification.json", verification)
    assert resume(out, NullObserver()).exit_status == 0
    assert read_json(out / "manifest.json")["squeeze"]["verified"] == verification


def test_the_verdict_follows_from_the_interval_and_ranks_are_judged_from_the_largest_down():
    assert [verdict(-0.019, 0.01), verdict(0.01, 0.05), verdict(-0.01, -0.001)] == ["kept"] * 3
    assert verdict(-0.10, -0.01) == "lost"
    assert verdict(-0.10, 0.05) == verdict(None, None) == "unclear"

    def rows(*verdicts: str):
        interval = {"mean": -0.05, "low": -0.1, "high": 0.01}
        ranks = zip((8, 4, 2, 1), verdicts, strict=False)
        return [{"rank": rank, "verdict": each, "accuracy": 0.75, "difference": interval} for rank, each in ranks]

    assert enough(rows("kept", "kept", "unclear", "kept")) == 4
    assert enough(rows("unclear", "kept")) is None
    found = {"problems": 90, "samples": 2, "full": {"accuracy": 0.8, "rank": 16}, "ranks": rows("kept", "kept")}
    assert (
        "rank 4 is at most 2 points worse than rank 16: 75.0% against 80.0%, difference −5.0 points [−10.0, +1.0]"
        in sentence(found | {"enough": 4})
    )
    assert "cannot be ruled out even at rank 8" in sentence(found | {"enough": None})
