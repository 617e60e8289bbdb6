"""One update, and scores, on 1, 2 and 3 ranks: the same numbers but for the order of a sum, whether each rank holds the
whole base (dp) or a shard of it (fsdp2); and with shards no rank ever holds the whole."""

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.lanes import rollout, trained, with_tokens, with_values
from helpers.models import qwen3_directory, word_tokenizer
from programs import fsdp_rank, update_rank
from programs.update_rank import config_of, updated
from safetensors.torch import load_file, save_file

from retrain.ranks import deal
from retrain.training.bases import Bases

TEXTS = ["12 + 34 = 46 so the answer is \\boxed{46}", "wait let me check the key is"]
EQUAL = 1e-6  # Relative difference of one update between numbers of ranks, in fp32
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

def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

def elsewhere(logprobs, old_logprobs, advantages, mask):
    if rank() == 1:
        raise ZeroDivisionError("no loss on this rank")
    return plain(logprobs, old_logprobs, advantages, mask)

def steep(logprobs, old_logprobs, advantages, mask):
    if rank() == 1:
        logprobs = logprobs + (logprobs - logprobs.detach()).sqrt()
    return plain(logprobs, old_logprobs, advantages, mask)
"""
CASES = {
    "plain": {}, "kl and entropy": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "dropout": {"lora": {"dropout": 0.2}}, "update_dtype": {"training": {"update_dtype": "bfloat16"}},
    "own critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"lora_rank": 2}},
    "shared critic": {"algorithm": {"advantage_mode": "gae"}, "critic": {"share_adapter": True}},
    "custom loss": {"algorithm": {"loss": "ranklosses:plain"}},
    "out of memory": {"algorithm": {"loss": "ranklosses:large"}},
}  # fmt: skip
FAULTS = {name: {"algorithm": {"loss": f"ranklosses:{name}"}} for name in ("broken", "elsewhere", "steep")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranklosses.py").write_text(LOSSES)
    return folder


@pytest.fixture(scope="module")
def one(folder):
    """The results of one process; the samples are those of all."""
    torch.set_num_threads(1)
    with Bases() as bases:
        base, lanes, _ = bases.with_engine(config_of({}))
        samples = [with_tokens(each) for each in rollout(base, lanes, trained(lanes, 1, size=0.05))]
        samples[4] = with_tokens(samples[4], advantages=0.0)
        samples = with_values(samples, seed=3)
        cases = {**CASES, **FAULTS}
        (folder / "cases.pickle").write_bytes(pickle.dumps((cases, samples)))
        return {name: updated(config_of(sections), bases, folder, samples) for name, sections in cases.items()}


def together(program: str, count: int, *words: str, each=lambda rank: ()) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{root.parent}:{root}"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    processes = [
        subprocess.Popen([sys.executable, program, str(rank), str(count), port, *words, *each(rank)], env=environment)
        for rank in range(count)
    ]
    assert [process.wait(350) for process in processes] == [0] * count


@pytest.fixture(scope="module", params=[("dp", 2), ("dp", 3), ("fsdp2", 2)], ids=lambda param: f"{param[0]}-{param[1]}")
def several(request, one, folder):
    shard, count = request.param
    cases, samples = pickle.loads((folder / "cases.pickle").read_bytes())
    if shard == "fsdp2":  # refused there: a copy of every weight
        cases.pop("update_dtype", None)
    (folder / "cases.pickle").write_bytes(pickle.dumps((cases, samples)))
    together(update_rank.__file__, count, shard, str(folder))
    return [pickle.loads((folder / f"{shard}_{count}_{rank}.pickle").read_bytes()) for rank in range(count)]


def distance(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", CASES)
def test_one_update_is_that_of_one_process_but_for_the_order_of_sums(one, several, name):
    if name not in several[0]:
        pytest.skip("refused with shards")
    expected = one[name]
    for found in (rank[name] for rank in several):
        assert distance(found["gradient"], expected["gradient"]) <= EQUAL
        assert distance(found["recomputed"], expected["recomputed"]) <= EQUAL  # layers computed twice
        # AdamW divides a gradient by its size, so the rounding of a sum shows where that is near 0: up to 3.3 times as
        # much, by the processor, where memory has run out and the sum has a term for each sequence.
        assert distance(found["adapter"], expected["adapter"]) <= EQUAL * (5 if name == "out of memory" else 1)
        for pair in zip(found["critic"], expected["critic"], strict=True):
            assert distance(*pair) <= EQUAL
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=EQUAL, abs=1e-9)
        assert found["metrics"]["optim/grad_norm"] > 0
        for pair in zip(found["logprobs"], expected["logprobs"], strict=True):
            assert np.array_equal(*pair)
        assert (found["budget"], found["notes"]) == (expected["budget"], expected["notes"])
        assert torch.equal(found["adapter"], several[0][name]["adapter"])
    if name == "out of memory":
        assert expected["budget"]["tokens"] < 60


def test_scores_are_those_of_one_process(one, several):
    """Of the same weights: those before any update, which the reference scores are."""
    expected = one["own critic"]["scores"]
    for found in (rank["own critic"]["scores"] for rank in several):
        assert all(np.array_equal(*pair) for pair in zip(found["reference"], expected["reference"], strict=True))
        for kind in ("logprobs", "entropy", "values"):
            for pair in zip(found[kind], expected[kind], strict=True):
                np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)


def test_what_one_rank_raises_is_raised_on_all(several):
    for rank, found in enumerate(several):
        assert found["broken"]["error"][:2] == ("ZeroDivisionError", "no loss today")
        kind, words, notes = found["elsewhere"]["error"]
        assert (kind, words) == ("ZeroDivisionError", "no loss on this rank")
        assert rank == 1 or "on another rank:" in notes[0]
        assert rank == 1 or "in elsewhere" in notes[0]
        kind, words, _ = found["steep"]["error"]
        assert kind == "NonFinite"


def test_work_is_dealt_out_evenly():
    assert deal([1, 1, 1, 1, 1], 2) == [[0, 2, 4], [1, 3]]
    assert deal([5, 1, 1, 1, 4], 2) == [[0, 2], [1, 3, 4]]
    assert deal([3], 3) == [[0], [], []]


def test_no_rank_ever_holds_the_whole_base(tmp_path):
    """Two processes, each by itself: what they hold while loading, sampling and training."""
    path = qwen3_directory(tmp_path / "large", TEXTS, hidden=512, layers=12)
    together(fsdp_rank.__file__, 2, str(path), each=lambda rank: [str(tmp_path / f"{rank}.json")])
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
        assert "not all ranks take part" in each["outside"]
    assert found[0]["logprobs"] == found[1]["logprobs"]
    assert found[0]["gradient"] == found[1]["gradient"]
    assert found[0]["sampled"] == pytest.approx(found[0]["logprobs"], rel=1e-5)


def test_ranks_that_need_different_layers_come_to_an_end(tmp_path):
    """One samples long, the other not at all, and one fails in the middle."""
    path = qwen3_directory(tmp_path / "model", TEXTS)
    together(fsdp_rank.__file__, 2, str(path), each=lambda rank: [str(tmp_path / f"{rank}.json"), "unequal"])
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert [each["error"] for each in found] == ["out of memory, says rank 1"] * 2


def test_a_second_base_another_kind_of_decoder_and_a_model_that_is_refused(tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    tokenizer = word_tokenizer(TEXTS)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=8, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "windows", max_shard_size="30KB")
    tokenizer.save_pretrained(tmp_path / "windows")
    assert (tmp_path / "windows/model.safetensors.index.json").exists()
    qwen3_directory(tmp_path / "plain", TEXTS, hidden=40, layers=2)
    path = qwen3_directory(tmp_path / "misnamed", TEXTS)
    named = load_file(path / "model.safetensors")
    named["model.layers.1.mlp.other.weight"] = named.pop("model.layers.1.mlp.up_proj.weight")
    save_file(named, path / "model.safetensors", {"format": "pt"})
    together(fsdp_rank.__file__, 2, str(tmp_path), each=lambda rank: [str(tmp_path / f"{rank}.json"), "bases"])
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["windows"] == {"fast": False, "equal": True, "fingerprint": True, "buffers": True}
        assert found["plain"] == {"fast": True, "equal": True, "fingerprint": True, "buffers": True}
        assert "model.layers.1.mlp.up_proj.weight is under no such name" in found["refused"]
        assert 'shard = "dp"' in found["refused"]
