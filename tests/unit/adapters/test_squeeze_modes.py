"""LoRA-Squeeze while training: annealed ranks, and training on at the rank an adapter was compressed to."""

from __future__ import annotations

import json

import pytest
import torch
from lane_cases import adamw, update
from safetensors.torch import load_file
from toycampaign import campaign
from toymodels import toy_base
from typer.testing import CliRunner

from retrain.campaign.running.controller import launch, resume
from retrain.cli import app
from retrain.config import load
from retrain.errors import ConfigError
from retrain.files import read_json, read_jsonl
from retrain.policy.adapter_io import read_adapter
from retrain.policy.lora import Lanes
from retrain.record.observer import NullObserver
from retrain.rng import generator
from retrain.types import Sample

ANNEAL = "[lora]\nanneal = [[1, 3], [3, 1]]\n[training]"


def delta(adapter, name):
    return adapter.scale * (adapter.B[name] @ adapter.A[name]).detach()


def test_a_lowered_adapter_is_the_best_approximation_and_keeps_its_rank_while_it_trains(tmp_path):
    base = toy_base(tmp_path / "toy")
    lanes = Lanes(base)
    adapter = lanes.new_adapter(4, 8.0).initialise("lower")
    noise = generator("lower", 1)
    with torch.no_grad():
        for b in adapter.B.values():
            b.copy_(torch.from_numpy(noise.normal(0, 0.1, b.shape)))
    before = {name: delta(adapter, name) for name in adapter.A}
    adapter.lower(2)
    for name, whole in before.items():
        u, s, vh = torch.linalg.svd(whole.double())
        best = u[:, :2] * s[:2] @ vh[:2]
        torch.testing.assert_close(delta(adapter, name).double(), best, atol=1e-5, rtol=0)
    optimizer = adamw(adapter, 0.05, weight_decay=0.01)
    ids = [int(t) for t in noise.integers(3, 200, 9)]
    ones = torch.ones(9).numpy()
    sample = Sample.single_turn((5, 6, 7), ids, -3 * ones, ones)
    moved = {name: delta(adapter, name).clone() for name in adapter.A}
    for _ in range(3):
        update(lanes, adapter, [sample], optimizer=optimizer, lr=0.05, grad_clip_norm=1.0)
    for name in adapter.A:
        assert not adapter.A[name][2:].any()
        assert not adapter.B[name][:, 2:].any()
        assert not torch.equal(delta(adapter, name), moved[name])
    assert {tuple(a.shape[:1] + b.shape[1:]) for a, b in adapter.tensors().values()} == {(2, 2)}


def test_an_annealed_run_ends_at_its_last_rank_and_resumes_exactly(model, tmp_path):
    path = campaign(tmp_path, model, steps=5)
    path.write_text(path.read_text().replace("[training]", ANNEAL).replace("save_every = 2", "save_every = 1"))
    path.write_text(path.read_text().replace("problems = 5", "problems = 0").replace("eval_every = 2\n", ""))
    assert launch(load(path), tmp_path / "whole", NullObserver()).exit_status == 0

    class Stops(NullObserver):
        def step(self, spec, row):
            if row["step"] == self.at:
                raise KeyboardInterrupt

    for stop in (0, 3):  # before the step of a stage, and after it
        out = tmp_path / f"stopped{stop}"
        observer = Stops()
        observer.at = stop
        assert launch(load(path), out, observer).exit_status == 130
        assert resume(out, NullObserver()).exit_status == 0
        for run in (tmp_path / "whole/runs").iterdir():
            one, other = (load_file(d / "final/adapter_model.safetensors") for d in (run, out / "runs" / run.name))
            assert all(torch.equal(one[name], other[name]) for name in one)
    run = tmp_path / "whole/runs/grpo+none_s1"
    assert read_json(run / "final/adapter_config.json")["r"] == 1
    final, start = read_adapter(run / "final"), read_adapter(run / "checkpoints/step_000004")
    assert {scale for scale in final.scales.values()} == {8.0}  # alpha 32 / rank 4, as it was trained
    assert {a.shape[0] for a, _ in start.tensors.values()} == {1}
    rows = read_jsonl(run / "metrics.jsonl")
    assert all(row["kl_sample_train_v2"] < 1e-9 for row in rows)  # of a stage, too, the weights that train have drawn
    assert [row["off_policy_steps_max"] for row in rows] == [0] * 5
    log = (run / "run.log").read_text()
    assert "step 1: the adapter goes on with rank 3 of 4" in log
    assert "step 3: the adapter goes on with rank 1 of 3" in log
    assert any(b.any() for _, b in final.tensors.values())


def test_stages_that_cannot_be_are_refused(model, tmp_path):
    path = campaign(tmp_path, model)
    text = path.read_text()
    for stages, words in (("[[2, 4]]", "ranks to fall"), ("[[2, 3], [2, 1]]", "steps have to grow"),
                          ("[[9, 2]]", "it has no effect"), ("[[2]]", "list of a list of integers")):  # fmt: skip
        path.write_text(text.replace("[training]", f"[lora]\nanneal = {stages}\n[training]"))
        with pytest.raises(ConfigError, match=words):
            load(path)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert launch(load(campaign(folder, model)), folder / "out", NullObserver()).exit_status == 0
    return folder / "out"


def test_a_compressed_adapter_trains_on_at_its_new_rank(finished):
    out = finished
    command = ["squeeze", str(out), "--to", "2", "--continue", "3"]
    for _ in range(2):  # the second time there is nothing left to do
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    first = out / "runs/grpo+none_s1"
    run = first / "squeeze/continue_2"
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    config = json.loads((run / "final/adapter_config.json").read_text())
    assert config["r"] == 2
    started = read_adapter(first / "squeeze/continue_2_from").tensors
    ended = read_adapter(run / "final").tensors
    assert any(not torch.equal(started[name][1], ended[name][1]) for name in started)
    assert (
        f"starts at step 0 with the weights of {(first / 'squeeze/continue_2_from').absolute()}"
        in (run / "run.log").read_text()
    )
    wrong = CliRunner().invoke(app, ["squeeze", str(out), "--continue", "3"])
    assert wrong.exit_code == 2
    assert "--to RANK" in wrong.output


def test_ranks_by_module_keep_the_energy_of_a_uniform_rank_with_fewer(finished, model, tmp_path):
    """PEFT computes with the patterns what the truncated factors say."""
    import peft
    from transformers import AutoModelForCausalLM

    out = finished
    source = read_adapter(out / "runs/grpo+none_s1/final")
    result = CliRunner().invoke(app, ["squeeze", str(out), "--to", "2", "--pattern", "--out", str(tmp_path / "small")])
    assert result.exit_code == 0, result.output
    small = read_adapter(tmp_path / "small")
    ranks = {name: a.shape[0] for name, (a, _) in small.tensors.items()}
    assert len(set(ranks.values())) > 1
    assert sum(ranks.values()) <= 2 * len(ranks)
    kept = uniform = 0.0
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "small")
    for name, (a, b) in source.tensors.items():
        u, s, vh = torch.linalg.svd((source.scales[name] * b @ a).double())
        uniform += float((s[:2] ** 2).sum())
        k = ranks[name]
        kept += float((s[:k] ** 2).sum())
        layer = loaded.get_submodule(f"base_model.model.{name}")
        torch.testing.assert_close(
            layer.get_delta_weight("default").double(), u[:, :k] * s[:k] @ vh[:k], atol=1e-5, rtol=0
        )
    assert kept >= uniform * (1 - 1e-6)
    assert CliRunner().invoke(app, ["squeeze", str(out), "--pattern"]).exit_code == 2
