"""What ranks compute of an update, of scores and of a decode batch is what one process computes, to the last bit,
whether each holds the whole base (dp) or a part of it (fsdp2); and with parts no rank ever holds the whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.lanes import drawn, requests, rollout, totals, trained, with_tokens
from helpers.models import qwen3_directory, word_tokenizer
from programs import fsdp_rank
from safetensors.torch import load_file, save_file

from retrain.algorithms import load_modes, objective_of
from retrain.campaign.running.assemble import load_on_all_ranks
from retrain.campaign.running.following import Desk
from retrain.campaign.running.team import Team
from retrain.config import parse_dict
from retrain.config.runs import RunSpec
from retrain.engines.local import LocalEngine
from retrain.engines.shared import DecodeTask, SharedEngine
from retrain.engines.slots import LaneRequest, SampleIndex
from retrain.errors import ModelError, NonFinite, RunFailed
from retrain.policy import shares
from retrain.policy.base import load_base
from retrain.policy.local import LocalPolicy, LocalSnapshot
from retrain.policy.ranks import Answers, Ranks
from retrain.threads import Workers
from retrain.training.bases import Bases
from retrain.types import PolicyRef, TrainBatch, Want

TEXTS = ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"]
LOSSES = """
import torch

def plain(logprobs, old_logprobs, advantages, mask):
    return -(logprobs - old_logprobs).exp() * advantages

def broken(logprobs, old_logprobs, advantages, mask):
    raise ZeroDivisionError("no loss today")

def large(logprobs, old_logprobs, advantages, mask):
    if len(logprobs) > 1:
        raise RuntimeError("out of memory, says the allocator")
    return plain(logprobs, old_logprobs, advantages, mask)

def elsewhere(logprobs, old_logprobs, advantages, mask):
    if torch.distributed.get_rank() == 2:
        raise ZeroDivisionError("no loss on this rank")
    return plain(logprobs, old_logprobs, advantages, mask)

def steep(logprobs, old_logprobs, advantages, mask):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        logprobs = logprobs + (logprobs - logprobs.detach()).sqrt()
    return plain(logprobs, old_logprobs, advantages, mask)
"""
CASES = {
    "plain": {},
    "kl and entropy": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "dropout": {"lora": {"dropout": 0.2}},
    "update_dtype": {"training": {"update_dtype": "bfloat16"}},
    "own critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}},
    "shared critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"share_adapter": True}},
    "custom loss": {"algorithm": {"loss": "ranklosses:plain"}},
    "out of memory": {"algorithm": {"loss": "ranklosses:large"}},
}


def config_of(sections):
    sections = {name: dict(keys) for name, keys in sections.items()}
    sections["model"] = {"lora_rank": 4}
    sections["training"] = {"micro_batch_tokens": 60, "lr": 0.01} | sections.get("training", {})
    return parse_dict(sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    (folder / "ranklosses.py").write_text(LOSSES)
    return folder


@pytest.fixture(scope="module")
def whole():
    """Base, lanes and engine of one process."""
    with Bases() as bases:
        yield bases.take(config_of({}))


@pytest.fixture(scope="module", params=["dp", "fsdp2"])
def shared(request):
    """The bases of rank 0, beside two other ranks."""
    team = Team(parse_dict({"backend": {"shard": request.param, "ranks": 3, "devices": "cpu"}}))
    try:
        with Bases(ranks=team.ranks()) as bases:
            yield bases
    finally:
        team.close()


only_dp, only_fsdp2 = (pytest.mark.parametrize("shared", [shard], indirect=True) for shard in ("dp", "fsdp2"))


def taken(bases: Bases, config, folder: Path):
    """Base, lanes and engine of this configuration, once all ranks have them."""
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    found, prints = bases.with_ranks([spec], folder, lambda: bases.take(config))
    assert prints == [found[0].fingerprint] * 2
    return found


def samples_of(base, lanes, critic: bool):
    noise = np.random.default_rng(3)
    samples = [with_tokens(each) for each in rollout(base, lanes, trained(lanes, 1, size=0.05))]
    samples[4] = with_tokens(samples[4], advantages=0.0)

    def table(sample):
        values = np.zeros(len(sample))
        values[sample.action_mask] = noise.normal(size=len(drawn(sample)))
        return values

    return [replace(each, value_targets=table(each), values=table(each)) if critic else each for each in samples]


def updated(base, lanes, config, folder, ranks: Ranks | None, sampler=None):
    """The policy after two updates, their numbers, and the samples' log-probabilities; ``sampler``: base and lanes
    that these were drawn with, where it is not the same."""
    policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
    objective = objective_of(config, load_modes(config.algorithm, folder).loss)
    rows, logprobs = [], []
    for step in range(2):
        samples = samples_of(*(sampler or (base, lanes)), config.algorithm.critic)
        counts = totals(samples)
        counts = type(counts)(counts.tokens, counts.sequences, action_tokens=counts.tokens)
        batch = TrainBatch(samples, counts, step, (0, 0), keep_logprobs=True)
        result = policy.update(batch, objective, 0.01)
        rows.append({key: value for key, value in result.metrics.items() if not key.startswith("timing_")})
        logprobs.append(result.trainer_logprobs)
    return policy, rows, logprobs


def facts_of(action):
    return action.token_ids, action.logprobs_T.tolist(), action.entropy_T.tolist(), action.policy_version


@pytest.mark.parametrize("sections", CASES.values(), ids=CASES)
def test_an_update_has_the_bits_of_one_process(whole, shared, folder, sections):
    config = config_of(sections)
    if config.training.update_dtype == "bfloat16" and shared.company is not None:
        pytest.skip("a copy of every weight is refused")
    base, lanes, _ = taken(shared, config, folder)
    policy_alone, rows_alone, logprobs_alone = updated(*whole[:2], config, folder, None)
    policy, rows, logprobs = updated(base, lanes, config, folder, shared.ranks, whole[:2])
    assert rows == rows_alone
    assert rows[0]["optim/grad_norm"] > 0
    assert torch.equal(policy.adapter.flat, policy_alone.adapter.flat)
    for pair in zip(logprobs, logprobs_alone, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(*pair, strict=True))
    if policy_alone.critic is not None:
        assert all(torch.equal(*pair) for pair in zip(policy.critic.weights, policy_alone.critic.weights, strict=True))
    assert policy.budget.state() == policy_alone.budget.state()
    if "large" in config.algorithm.loss:
        assert policy.budget.tokens < 60
        assert policy.notes() == policy_alone.notes()


def test_scores_are_those_of_one_process(whole, shared, folder):
    config = config_of({"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}})
    samples, scores, want = samples_of(*whole[:2], True), [], frozenset(Want) - {Want.TEACHER}
    for base, lanes, ranks in ((*whole[:2], None), (*taken(shared, config, folder)[:2], shared.ranks)):
        policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
        with torch.no_grad():
            policy.adapter.flat += 0.01
            policy.critic.head.flat += 0.1
        scores.append(vars(policy.score(samples, want)))
        few = policy.score(samples[:1], frozenset({Want.LOGPROBS})).logprobs  # two ranks have nothing to do
        np.testing.assert_allclose(few[0], scores[-1]["logprobs"][0], rtol=1e-5)
    for kind in want:
        assert [len(row) for row in scores[0][kind]] == [len(drawn(sample)) for sample in samples]
        assert all(np.array_equal(*pair) for pair in zip(*(each[kind] for each in scores), strict=True))


def published(engine, lanes, count: int = 1):
    for lane in range(count):
        adapter = trained(lanes, lane, size=0.05)
        engine.publish(PolicyRef(str(lane), 0), LocalSnapshot(adapter.frozen()))
    return engine


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_sample_what_as_many_workers_sample(whole, shared, folder, count):
    asked = [each for lane in range(count) for each in requests(lane, prompts=6, samples=8, max_tokens=6)]
    _, lanes, engine = taken(shared, config_of({}), folder)
    sampled = []
    for each, own in ((LocalEngine(*whole[:2], Workers(3)), whole[1]), (engine, lanes)):
        heard = []
        note = lambda index, group, heard=heard: heard.append((index, len(group)))  # noqa: E731
        groups = published(each, own, count).sample(asked, finished=note)
        assert sorted(heard) == [(index, 8) for index in range(len(asked))]
        sampled.append([[facts_of(action) for action in group] for group in groups])
        assert each.fast
    assert sampled[0] == sampled[1]
    few = requests(prompts=2, samples=3, max_tokens=8)  # with parts of the base, ranks with nothing to do gather it
    tokens = [
        [[action.token_ids for action in group] for group in each.sample(few)]
        for each in (engine, published(LocalEngine(*whole[:2]), whole[1]))
    ]
    assert tokens[0] == tokens[1]
    engine.forget()
    if shared.company is None:
        one_row = DecodeTask(
            [LaneRequest(**vars(asked[0]), lane=0)], [[SampleIndex(0, 0)]], [PolicyRef("0", 0)], [0], 1
        )
        with pytest.raises(RunFailed, match="no weights were published"):
            shared.ranks.ask("decode", [(one_row,), None], lambda: None).whole()


def test_what_a_loss_raises_on_another_rank_is_raised_here_and_all_are_in_step(whole, shared, folder):
    def failure(name, kind):
        config = config_of({"algorithm": {"loss": f"ranklosses:{name}"}})
        base, lanes, _ = taken(shared, config, folder)
        with pytest.raises(kind) as raised:
            updated(base, lanes, config, folder, shared.ranks, whole[:2])
        return raised.value

    assert str(failure("broken", ZeroDivisionError)) == "no loss today"
    other = failure("elsewhere", ZeroDivisionError)
    assert str(other) == "no loss on this rank"
    assert "on another rank:" in other.__notes__[0]
    assert "in elsewhere" in other.__notes__[0]
    assert "the update was not applied" in str(failure("steep", NonFinite))
    config = config_of({})
    base, lanes, _ = taken(shared, config, folder)
    assert updated(base, lanes, config, folder, shared.ranks, whole[:2])[1]


@only_dp
def test_sums_of_shares_differ_by_rounding_alone(whole, shared, folder, monkeypatch):
    monkeypatch.setattr(shares, "APART_BYTES", 0)
    config = config_of({})
    alone, mine, _ = updated(*whole[:2], config, folder, None)
    base, lanes, _ = taken(shared, config, folder)
    together, theirs, _ = updated(base, lanes, config, folder, shared.ranks, whole[:2])
    assert theirs[0] == pytest.approx(mine[0], rel=2e-7)
    change = (alone.adapter.flat - LocalPolicy(*whole[:2], config, (0, 0)).adapter.flat).norm()
    assert (together.adapter.flat - alone.adapter.flat).norm() < 1e-4 * change  # AdamW: rounding near 0 shows


# -- ranks with the whole base ----------------------------------------------------------------------------------------


class Beside:
    """A second rank that lives in this process: its engine does what it is asked."""

    count, places = 2, ("cpu",)

    def __init__(self, base, lanes):
        self.engine = LocalEngine(base, lanes)

    def tell(self, name, *args):
        if name == "publish":
            self.engine.publish(args[0], LocalSnapshot(args[1].frozen(self.engine.lanes)))

    def ask(self, name, args, own):
        result = own()
        return Answers(result, [each and each[0].done(self.engine) for each in args])


def test_what_one_rank_has_sampled_is_kept_when_another_runs_out_of_memory(whole):
    base, lanes, _ = whole
    beside = Beside(base, lanes)
    engine = published(SharedEngine(base, lanes, beside), lanes)
    asked, heard, ask = requests(prompts=6, samples=16, max_tokens=4), [], beside.ask

    def short(name, args, own):
        beside.ask = ask
        answers = ask(name, args, lambda: None)
        return Answers(None, answers.others, RuntimeError("not enough memory"))

    beside.ask = short
    groups = engine.sample(asked, finished=lambda index, actions: heard.append(index))
    assert sorted(heard) == list(range(6))
    assert heard[0] == 3  # the other rank's first
    expected = published(LocalEngine(base, lanes), lanes).sample(asked)
    assert [[a.token_ids for a in group] for group in groups] == [[a.token_ids for a in group] for group in expected]
    assert engine.state()["fitting"] == 48


# -- ranks with parts of the base -------------------------------------------------------------------------------------


@only_fsdp2
def test_layers_computed_twice_find_their_weights(whole, shared, folder):
    config, found = config_of({}), []
    for base, lanes, ranks in ((*whole[:2], None), (*taken(shared, config, folder)[:2], shared.ranks)):
        policy = LocalPolicy(base, lanes, config, (0, 0), Workers(), ranks=ranks)
        policy.budget.checkpointing = True
        samples = samples_of(*whole[:2], False)
        policy.update(TrainBatch(samples, totals(samples), 0, (0, 0)), objective_of(config, "ppo"), 0.01)
        found.append(policy.adapter.flat)
    assert torch.equal(*found)


@only_fsdp2
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


@only_fsdp2
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
        engine.publish(PolicyRef("0", 0), LocalSnapshot(adapter.frozen()))
        groups = engine.sample(requests(prompts=3, samples=4, max_tokens=5))
        assert [len(group) for group in groups] == [4, 4, 4]
        with base.presence.alone(), torch.no_grad():
            assert torch.equal(base.model(input_ids=ids).logits, own.model(input_ids=ids).logits)
    taken(shared, config_of({}), folder)  # the first one again


@only_fsdp2
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


def test_a_rank_with_another_base_is_refused(whole, folder):
    config = config_of({})
    spec = RunSpec("run", "label", 1, 0, {}, False, config)
    base = whole[0]
    assert Desk(Bases()).load([spec.to_json()], str(folder), "cpu") == base.fingerprint

    class Other(Ranks):
        def ask(self, name, args, own):
            assert [name, *(place for _, _, place in args)] == ["load", "gpu:1", "gpu:2"]
            return Answers(own(), [base.fingerprint, "another"])

    model = SimpleNamespace(identity=base.fingerprint, name=base.name)
    with pytest.raises(ModelError, match=f"rank 2 has other weights of {base.name} than rank 0"):
        load_on_all_ranks([spec], folder, Bases(ranks=Other(["gpu:1", "gpu:2"])), lambda: model)
    assert load_on_all_ranks([spec], folder, Bases(), lambda: model) is model
