import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.campaigns import StopAfter, continue_training, run_cli, toy_toml, train
from helpers.models import campaign_head
from helpers.records import config
from safetensors.torch import load_file

from retrain.adapters.squeeze import compress_adapter
from retrain.adapters.verify import sufficient_rank, verdict, verify_ranks
from retrain.campaign.planning.manifest import read_plan
from retrain.campaign.running.rank_evaluation import evaluate_ranks
from retrain.config import load
from retrain.environments.build import longest_completions
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json, read_jsonl, write_json
from retrain.policy.adapter_io import read_adapter
from retrain.training.bases import Bases
from retrain.verdicts.report import write_report


def written(folder: Path, model: Path, head: str = "", training: dict[str, Any] | None = None, **sections: Any) -> Path:
    path, training = folder / "run.toml", {"batch_size": 2, "max_tokens": 8, "lr": 0.05} | (training or {})
    path.write_text(head + toy_toml(model, **{"training": training, "squeeze": {"enabled": None}} | sections))
    return path


def annealed(folder: Path, model: Path, stages: list[list[int]]) -> Path:
    return written(folder, model, lora={"anneal": stages}, training={"max_steps": 4, "save_every": 1})


squeeze = partial(run_cli, "squeeze")


def test_an_annealed_run_ends_at_its_last_rank_and_resumes_exactly(model, tmp_path):
    path = annealed(tmp_path, model, [[1, 3], [2, 1]])
    run, stopped = tmp_path / "uninterrupted", tmp_path / "stopped"
    train(path, run)
    train(path, stopped, observer=StopAfter(2), status=130)  # between the stages
    continue_training(stopped)
    one, other = (load_file(folder / "final/adapter_model.safetensors") for folder in (run, stopped))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert read_json(run / "final/adapter_config.json")["r"] == 1
    final, last = read_adapter(run / "final"), read_adapter(run / "checkpoints/step_000003")
    assert set(final.scales.values()) == {8.0}  # alpha 32 / rank 4, as it was trained
    assert {a.shape[0] for a, _ in last.tensors.values()} == {1}
    assert any(b.any() for _, b in final.tensors.values())
    rows = read_jsonl(run / "metrics.jsonl")
    assert all(row["kl_sample_train_v2"] < 1e-9 for row in rows)  # what is sampled from is what trains
    assert [row["off_policy_steps_max"] for row in rows] == [0] * 4
    log = (run / "run.log").read_text()
    assert "step 1: the adapter goes on with rank 3 of 4" in log
    assert "step 2: the adapter goes on with rank 1 of 3" in log


def test_impossible_stages_are_refused(model, tmp_path):
    for stages, message in (([[2, 4]], "ranks to fall"), ([[2, 3], [2, 1]], "steps have to grow")):
        with pytest.raises(ConfigError, match=message):
            load(annealed(tmp_path, model, stages))


@pytest.fixture(scope="module")
def home(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("squeezed")
    head = campaign_head(("grpo", "none"), ("maxrl", "none"), seeds=[1], max_steps=2)
    squeeze = {"enabled": True, "runs": "one per condition", "compress_to": 1}
    path = written(folder, model, head, evaluation={"problems": 6, "samples": 3}, squeeze=squeeze)
    train(path, folder / "out")
    return folder / "out"


@pytest.fixture(scope="module")
def run(home) -> Path:
    return home / "runs/grpo+none_s1"


def test_every_condition_has_an_analysis_of_its_own(home):
    manifest = read_json(home / "manifest.json")
    first, others = manifest["squeeze"], manifest["squeezes"]
    assert (first["run_id"], list(others)) == ("grpo+none_s1", ["maxrl+none"])
    assert others["maxrl+none"]["run_id"] == "maxrl+none_s1"
    for folder, report in (("squeeze", first), ("squeeze/maxrl+none", others["maxrl+none"])):
        assert read_json(home / folder / "analysis.json") == report
        assert read_json(home / folder / "verification.json") == report["verified"]
        assert not [path for path in (home / folder).iterdir() if path.name.startswith("tmp")]
        assert report["verified"]["ranks"][-1]["rank"] == 1
        assert (home / folder / "rank_1" / "adapter_model.safetensors").is_file()
    html = write_report(home).read_text()
    assert "<h3>grpo+none_s1</h3>" in html
    assert "<h3>maxrl+none_s1</h3>" in html
    with pytest.raises(UsageError, match="room for one adapter"):
        config(squeeze={"runs": "one per condition", "output_path": "small"})


def test_what_a_killed_process_left_out_is_made_up_for(home, tmp_path):
    """What it verified is not sampled again, and a finished analysis is not repeated."""
    out = shutil.copytree(home, tmp_path / "out")
    before = read_json(out / "manifest.json")
    rows = before.pop("squeezes")["maxrl+none"]["rows"]
    verification = read_json(out / "squeeze/maxrl+none/verification.json")
    old = before["squeeze"] | {"mark": 1}
    write_json(out / "manifest.json", before | {"squeeze": old})
    shutil.rmtree(out / "squeeze/maxrl+none")
    verification["sentence"] = "read, not sampled again"
    write_json(out / "squeeze/maxrl+none/verification.json", verification)
    continue_training(out)
    after = read_json(out / "manifest.json")
    assert after["squeeze"] == old  # not made again
    assert {label: report["rows"] for label, report in after["squeezes"].items()} == {"maxrl+none": rows}
    assert after["squeezes"]["maxrl+none"]["verified"] == verification


def verified(home: Path, run: Path, out: Path, **evaluation):
    """Verify the whole adapter as if it were compressed, with this evaluation, over a base of its own."""
    plan = read_plan(home)
    spec = plan.specs[0]
    changed = spec.config.evaluation.model_copy(update=evaluation)
    spec = replace(spec, config=spec.config.model_copy(update={"evaluation": changed}))
    same = compress_adapter(run / "final", 4, out / "whole")
    with Bases() as bases:
        longest = longest_completions([spec.config])
        evaluate = partial(evaluate_ranks, spec, plan.folder, longest, bases, out)
        return verify_ranks(spec, run / "final", [same], out / "again.json", evaluate)


def test_every_rank_of_the_table_is_verified(home, run):
    report = read_json(home / "manifest.json")["squeeze"]
    found = report["verified"]
    candidates = {row["rank"] for row in report["rows"]} | {report["recommended_rank"]}
    assert [row["rank"] for row in found["ranks"]] == sorted(candidates - {4}, reverse=True)
    assert (found["full"]["rank"], found["problems"], found["samples"]) == (4, 6, 3)
    for row in found["ranks"]:
        assert row["difference"]["mean"] == pytest.approx(row["accuracy"] - found["full"]["accuracy"])
    final = read_jsonl(run / "evals.jsonl")[-1]
    assert found["full"]["accuracy"] == final["eval/heldout/correct_rate"]
    assert found["full"]["sampled_anew"] is False
    assert "On 6 held-out problems with 3 samples each, " in found["sentence"]
    assert "sampled again" not in found["sentence"]


def test_an_evaluation_made_otherwise_is_sampled_anew_and_that_is_said(home, run, tmp_path):
    other = shutil.copytree(run, tmp_path / "run")
    write_json(other / "config.json", read_json(other / "config.json") | {"heldout_hashes": {"heldout": "of others"}})
    for folder, evaluation in ((run, {"samples": 2}), (other, {})):
        found = verified(home, folder, tmp_path / str(len(evaluation)), **evaluation)
        assert (found["full"]["sampled_anew"], ", sampled again" in found["sentence"]) == (True, True)
    again = read_jsonl(run / "evals.jsonl")[-1]["eval/heldout/correct_rate"]
    assert found["full"]["accuracy"] == again  # the same streams: asked as the run asked


def test_squeeze_reads_the_verification_of_this_adapter_alone(home, run, tmp_path):
    verification = read_json(home / "squeeze/verification.json")
    for directory in (home, run, run / "final"):
        assert json.loads(squeeze(directory, "--json").output)["verified"] == verification
    assert verification["sentence"] in squeeze(home).output
    other = shutil.copytree(home, tmp_path / "other")
    compress_adapter(run / "final", 2, tmp_path / "smaller")
    shutil.copytree(tmp_path / "smaller", other / "runs/grpo+none_s1/final", dirs_exist_ok=True)
    assert "verified" not in json.loads(squeeze(other, "--json").output)


def test_the_verdict_follows_from_the_interval_and_ranks_are_judged_from_the_largest_down():
    assert [verdict(-0.019, 0.01), verdict(0.01, 0.05), verdict(-0.01, -0.001)] == ["kept"] * 3
    assert verdict(-0.10, -0.01) == "lost"
    assert verdict(-0.10, 0.05) == verdict(None, None) == "unclear"

    def rows(*verdicts: str):
        return [{"rank": rank, "verdict": each} for rank, each in zip((8, 4, 2, 1), verdicts, strict=False)]

    assert sufficient_rank(rows("kept", "kept", "unclear", "kept")) == 4
    assert sufficient_rank(rows("unclear", "kept")) is None


def test_a_compressed_adapter_trains_on_at_its_new_rank(home, tmp_path):
    out = shutil.copytree(home, tmp_path / "out")
    for _ in range(2):  # the second time there is nothing left to do
        result = squeeze(out, "--to", "2", "--continue", "3")
        assert result.exit_code == 0, result.output
    squeezed = out / "runs/grpo+none_s1/squeeze"
    run, start = squeezed / "continue_2", squeezed / "continue_2_from"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    assert read_json(run / "final/adapter_config.json")["r"] == 2
    assert f"starts at step 0 with the weights of {start.absolute()}" in (run / "run.log").read_text()


def test_ranks_by_module_keep_the_energy_of_a_uniform_rank_with_fewer(home, run, model, tmp_path):
    """peft computes from the patterns the truncated products."""
    import peft
    from transformers import AutoModelForCausalLM

    source = read_adapter(run / "final")
    result = squeeze(home, "--to", "2", "--pattern", "--out", tmp_path / "small")
    assert result.exit_code == 0, result.output
    small = read_adapter(tmp_path / "small")
    ranks = {name: a.shape[0] for name, (a, _) in small.tensors.items()}
    assert len(set(ranks.values())) > 1
    assert sum(ranks.values()) <= 2 * len(ranks)
    kept = uniform = 0.0
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "small")
    for name, (a, b) in source.tensors.items():
        u, s, vh = torch.linalg.svd((source.scales[name] * b @ a).double())
        k = ranks[name]
        uniform += float((s[:2] ** 2).sum())
        kept += float((s[:k] ** 2).sum())
        computed = loaded.get_submodule(f"base_model.model.{name}").get_delta_weight("default").double()
        torch.testing.assert_close(computed, u[:, :k] * s[:k] @ vh[:k], atol=1e-5, rtol=0)
    assert kept >= uniform * (1 - 1e-6)
    assert squeeze(home, "--pattern").exit_code == 2
