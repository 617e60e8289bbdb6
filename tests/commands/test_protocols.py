"""The protocols hold: toys that stand behind each of them train through the unchanged loop, from a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_remote_engine import RemoteEngine
from toy_second_head import Baseline, TwoHeads
from toy_two_turns import GuessTwice
from toycampaign import campaign

from retrain.campaign.running import assemble
from retrain.campaign.running.controller import launch, resume
from retrain.config import load
from retrain.environments.protocol import Limits
from retrain.files import read_jsonl
from retrain.record.observer import NullObserver

QUIET = ("squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0")


def trained(path: Path, out: Path, *sets: str) -> dict[str, list[dict]]:
    """The rows of every run."""
    outcome = launch(load(path, [*QUIET, *sets]), out, NullObserver())
    assert outcome.exit_status == 0, outcome.summary
    return {place.name: read_jsonl(place / "metrics.jsonl") for place in sorted((out / "runs").iterdir())}


def numbers(row: dict) -> dict:
    """The row without what a clock says."""
    clocks = ("time", "timing", "perf/", "eps", "tokens_per_second")
    return {key: value for key, value in row.items() if not any(word in key for word in clocks)}


def test_an_environment_of_two_turns_trains_every_token_as_it_was_sampled(tmp_path, model, monkeypatch):
    monkeypatch.setattr(assemble, "environments_of", lambda config, data, *_: {"train": GuessTwice(data.train)})
    monkeypatch.setattr(Limits, "of", lambda config, context: Limits(2))
    rows = trained(campaign(tmp_path, model), tmp_path / "out")
    for run, own in rows.items():
        assert len(own) == 4
        for row in own:
            assert row["env/all/turns_per_episode"] == 2.0
            assert row["kl_sample_train_v2"] < 1e-6  # the trainer says of both turns what the sampler said
            assert row["val/ratio"] == pytest.approx(1.0, abs=1e-4)
            assert 0 < row["rewards/first/mean"] < 1
        summaries = read_jsonl(tmp_path / "out" / "runs" / run / "train_iteration_000000_rollout_summaries.jsonl")
        assert {len(line["steps"]) for line in summaries} == {2}
        assert all(line["steps"][1]["ob_len"] > 0 for line in summaries)


def test_an_engine_behind_a_wire_samples_with_what_was_published(tmp_path, model, monkeypatch):
    made = assemble.model_of

    def remote(*parts):
        local = made(*parts)
        end = local.engine.base.eos_ids[0]
        local.engine = RemoteEngine(str(model), local.tokenizer, end, tmp_path / "wire")
        return local

    path = campaign(tmp_path, model, steps=3)
    near = trained(path, tmp_path / "near")
    monkeypatch.setattr(assemble, "model_of", remote)
    far = trained(path, tmp_path / "far")
    for run, rows in far.items():
        assert [row["val/ratio"] for row in rows] == pytest.approx([1.0] * 3, abs=1e-4)
        assert all(row["entropy"] is None for row in rows)  # this engine has none
        # The same seeds and weights: what a server says is what our own engine says.
        assert [row["mean_reward"] for row in rows] == [row["mean_reward"] for row in near[run]]
    assert len(list((tmp_path / "wire").iterdir())) > len(far)  # every version under a name of its own


def test_a_policy_with_a_second_head_trains_and_resumes(tmp_path, model, monkeypatch):
    made = assemble.model_of

    def two_heads(*parts):
        local = made(*parts)
        local.policy = lambda spec, directory: TwoHeads(
            local.engine.base, local.engine.lanes, spec.config, (0, spec.seed), local.workers
        )
        return local

    monkeypatch.setattr(assemble, "model_of", two_heads)
    monkeypatch.setattr(assemble, "algorithm_of", lambda *parts: Baseline())
    path = campaign(tmp_path, model)
    whole = trained(path, tmp_path / "whole")
    for rows in whole.values():
        known = [row["values/known"] for row in rows]
        assert 0 < known[0] < known[-1]  # tokens whose value was learnt
    launch(load(path, [*QUIET, "campaign.max_steps=2"]), tmp_path / "parts", NullObserver())
    assert resume(tmp_path / "parts", NullObserver(), sets=["training.max_steps=4"]).exit_status == 0
    for run, rows in whole.items():
        again = read_jsonl(tmp_path / "parts" / "runs" / run / "metrics.jsonl")
        same = [key for key in numbers(rows[-1]) if key not in ("progress/done_frac",)]
        assert {key: again[-1][key] for key in same} == {key: rows[-1][key] for key in same}
