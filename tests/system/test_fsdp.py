"""Ranks that hold parts of the base compute what one process computes, and none of them holds the whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lane_cases import requests, totals, trained
from programs import fsdp_rank
from safetensors.torch import load_file, save_file
from toymodels import qwen3_directory, word_tokenizer

from retrain.campaign.planning.plan import RunSpec
from retrain.campaign.running.models import Bases
from retrain.campaign.running.team import Team
from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import PolicyRef
from retrain.errors import ModelError, RunFailed
from retrain.policy.base import load_base
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.objective import objective_of
from retrain.policy.protocol import TrainBatch, Want
from retrain.policy.threads import Workers
from tests.system.rank_updates import CASES, check_equal, config_of, facts_of, samples_of, scores_of, updated

TEXTS = ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"]
SHARED_CASES = {name: sections for name, sections in CASES.items() if name != "update_dtype"}


@pytest.fixture(scope="module")
def whole():
    """Base, lanes and engine of one process."""
    with Bases() as bases:
        yield bases.take(config_of({}))


@pytest.fixture(scope="module")
def shared():
    """Rank 0's bases, of which two other ranks hold parts."""
    team = Team(parse_dict({"backend": {"shard": "fsdp2", "ranks": 3, "devices": "cpu"}}))
    try:
        with Bases(ranks=team.ranks()) as bases:
            yield bases
    finally:
        team.close()


def taken(bases: Bases, config, folder: Path):
    """Base, lanes and engine of this configuration, once all ranks have them."""
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    found, prints = bases.with_ranks([spec], folder, lambda: bases.take(config))
    assert prints == [found[0].fingerprint] * 2
    return found


@pytest.mark.parametrize("sections", SHARED_CASES.values(), ids=SHARED_CASES)
def test_an_update_has_the_bits_of_one_process(whole, shared, folder, sections):
    config = config_of(sections)
    base, lanes, _ = taken(shared, config, folder)
    assert base.fingerprint == whole[0].fingerprint
    alone = updated(*whole[:2], config, folder, None)
    together = updated(base, lanes, config, folder, shared.ranks, whole[:2])
    check_equal(together, alone)
    if "large" in config.algorithm.loss:
        assert together[0].budget.tokens < 60


def test_layers_computed_twice_find_their_weights(whole, shared, folder):
    config, found = config_of({}), []
    for base, lanes, ranks in ((*whole[:2], None), (*taken(shared, config, folder)[:2], shared.ranks)):
        policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
        policy.budget.checkpointing = True
        samples = samples_of(*whole[:2], False)
        policy.update(TrainBatch(samples, totals(samples), 0, (0, 0)), objective_of(config, "ppo"), 0.01)
        found.append(policy.adapter.flat)
    assert torch.equal(*found)


def test_scores_are_those_of_one_process(whole, shared, folder):
    config = config_of({"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}})
    samples, scores = samples_of(*whole[:2], True)[:5], []
    for base, lanes, ranks in ((*whole[:2], None), (*taken(shared, config, folder)[:2], shared.ranks)):
        policy, found = scores_of(base, lanes, config, ranks, samples)
        few = policy.score(samples[:1], frozenset({Want.LOGPROBS})).logprobs  # two ranks have nothing to do
        np.testing.assert_allclose(few[0], found["logprobs"][0], rtol=1e-5)
        scores.append(found)
    for mine, theirs in zip(*(found.values() for found in scores), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(mine or (), theirs or (), strict=True))


@pytest.mark.parametrize(("lanes_there", "prompts"), [(1, 6), (2, 6), (1, 1)])
def test_ranks_sample_what_one_process_samples(whole, shared, folder, lanes_there, prompts):
    """Also so few sequences that a rank has nothing to do but to gather weights."""
    sizes = {"prompts": prompts, "samples": 8 if prompts > 1 else 2, "max_tokens": 6}
    asked = [each for lane in range(lanes_there) for each in requests(lane, **sizes)]
    found = []
    for _, lanes, engine in (
        (*whole[:2], LocalEngine(*whole[:2], Workers(3))),
        taken(shared, config_of({}), folder),
    ):
        for lane in range(lanes_there):
            adapter = trained(lanes, lane, size=0.05)
            engine.publish(PolicyRef(str(lane), 0), LocalSnapshot(adapter.frozen(), {}))
        found.append([facts_of(each) for own in engine.sample(asked) for each in own])
        assert engine.fast
        engine.forget()
    assert found[0] == found[1]


def test_what_one_rank_raises_is_raised_here_and_the_others_are_in_step(whole, shared, folder):
    def failure(name):
        config = config_of({"algorithm": {"loss": f"ranklosses:{name}"}})
        base, lanes, _ = taken(shared, config, folder)
        with pytest.raises(ZeroDivisionError) as raised:
            updated(base, lanes, config, folder, shared.ranks, whole[:2])
        return str(raised.value)

    assert failure("broken") == "no loss today"
    assert failure("elsewhere") == "no loss on this rank"
    base, lanes, _ = taken(shared, config_of({}), folder)
    assert updated(base, lanes, config_of({}), folder, shared.ranks, whole[:2])[1]


def test_between_requests_no_rank_holds_a_matrix_and_rank_0_cannot_use_one_alone(whole, shared, folder):
    base, _, _ = taken(shared, config_of({}), folder)
    small = sum(weight.nbytes for weight in base.model.parameters() if weight.dim() < 2)
    rows = [weight for weight in base.model.parameters() if weight.dim() >= 2]
    assert fsdp_rank.storages(base) <= small + sum(4 * -(-len(each) // 3) * each.shape[1] for each in rows)
    assert base.presence.own_bytes < 0.4 * base.weight_bytes
    assert base.weight_bytes == whole[0].weight_bytes
    assert not base.copies
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(RunFailed, match="outside of what the ranks do together"):
        base.model(input_ids=ids)
    with base.presence.alone(), torch.no_grad():
        found = base.model(input_ids=ids).logits
    assert torch.equal(found, whole[0].model(input_ids=ids).logits)


def test_a_second_base_and_another_kind_of_decoder(shared, folder, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer, ids = word_tokenizer(TEXTS), torch.tensor([[3, 4, 5]])
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "windows", max_shard_size="30KB")
    tokenizer.save_pretrained(tmp_path / "windows")
    assert (tmp_path / "windows/model.safetensors.index.json").exists()
    qwen3_directory(tmp_path / "plain", TEXTS, hidden=40, layers=2)
    for name, fast in (("windows", False), ("plain", True)):
        section = {"model": {"model": str(tmp_path / name), "lora_rank": 4}, "inference": {"dtype": "bfloat16"}}
        own = load_base(str(tmp_path / name), devices="cpu", dtype="bfloat16")
        base, lanes, engine = taken(shared, parse_dict(section), folder)
        assert (engine.fast, base.fingerprint) == (fast, own.fingerprint)
        buffers = [{key: each.dtype for key, each in model.named_buffers()} for model in (base.model, own.model)]
        assert buffers[0] == buffers[1]
        adapter = trained(lanes, 1, size=0.05)
        engine.publish(PolicyRef("0", 0), LocalSnapshot(adapter.frozen(), {}))
        groups = engine.sample(requests(prompts=3, samples=4, max_tokens=5))
        assert [len(group) for group in groups] == [4, 4, 4]
        with base.presence.alone(), torch.no_grad():
            assert torch.equal(base.model(input_ids=ids).logits, own.model(input_ids=ids).logits)
    taken(shared, config_of({}), folder)  # the first one again


def test_a_model_that_cannot_be_read_in_parts_is_refused_by_all(shared, folder, tmp_path):
    path = qwen3_directory(tmp_path / "model", TEXTS)
    tensors = path / "model.safetensors"
    named = load_file(tensors)
    named["model.layers.1.mlp.other.weight"] = named.pop("model.layers.1.mlp.up_proj.weight")
    save_file(named, tensors, {"format": "pt"})
    config = parse_dict({"model": {"model": str(path)}})
    words = r'cannot load model .*: model\.layers\.1\.mlp\.up_proj\.weight is under no such name .* shard = "dp"'
    with pytest.raises(ModelError, match=words):
        taken(shared, config, folder)
    taken(shared, config_of({}), folder)


def test_no_rank_ever_holds_the_whole_base(tmp_path):
    """Two processes, each by itself: what they hold while loading, sampling and training."""
    path = qwen3_directory(tmp_path / "large", TEXTS, hidden=512, layers=12)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        words = [str(rank), "2", str(port), str(path), str(tmp_path / f"{rank}.json")]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(subprocess.Popen([sys.executable, fsdp_rank.__file__, *words], env=environment))
    assert [process.wait(300) for process in processes] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for each in found:
        whole, layer = each["whole"], each["layer"]
        assert each["fast"]
        assert 0.49 * whole < each["between"] < 0.52 * whole
        assert each["after"] == each["between"]
        assert each["own"] + layer < each["held"] < 0.8 * whole
        slack = 20 * 2**20
        assert each["loading"] < each["own"] + 2 * layer + slack < 0.85 * whole
        assert each["working"] < each["held"] - each["own"] + 2 * layer + slack
    assert found[0]["logprobs"] == found[1]["logprobs"]
    assert found[0]["gradient"] == found[1]["gradient"]
    assert found[0]["sampled"] == pytest.approx(found[0]["logprobs"], rel=1e-5)
