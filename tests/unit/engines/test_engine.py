import dataclasses
import threading

import numpy as np
import pytest
import torch
from helpers.lanes import (
    AS_ON_A_GPU,
    adamw,
    assert_fresh,
    assert_same,
    decoded,
    lane_of,
    publish,
    ref,
    requests,
    rollout,
    sample,
    tokens,
    trained,
    update,
)
from helpers.models import qwen3_directory, toy_base

from retrain.engines.local import LocalEngine
from retrain.engines.step import CPU_DECODING, compiled_decode_steps, decode_steps
from retrain.errors import ModelError, RunFailed
from retrain.files import read_json, write_json
from retrain.policy.base import load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.threads import Workers
from retrain.types import PolicyRef, SampleRequest


@pytest.mark.parametrize("dense_path", [True, False], ids=["dense", "plain"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_and_entropy_equal_a_fresh_forward(base, lanes, temperature, dense_path):
    engine, adapters = LocalEngine(base, lanes, dense=dense_path), [trained(lanes, 0), trained(lanes, 1, rank=2)]
    asked = requests(0, max_tokens=4, temperature=temperature / 2) + requests(1, temperature=temperature, samples=3)
    groups = sample(engine, asked, adapters)
    assert_fresh(base, lanes, adapters, asked, groups)
    assert max(len(c) for group in groups[:3] for c in group) <= 4 < max(len(c) for c in groups[3]) <= 12


def test_what_is_published_is_sampled_with_whatever_becomes_of_the_weights(base, lanes):
    """Rollouts name the version that sampled them: weights that train on must not be in them."""
    engine, adapter, asked = LocalEngine(base, lanes), trained(lanes, 0), requests()
    publish(engine, [adapter])
    first = engine.sample(asked)
    with torch.no_grad():
        adapter.flat.mul_(1.7)
    again = engine.sample(asked)
    assert tokens(again) == tokens(first)
    newer = PolicyRef(ref(0).run_id, 1)
    engine.publish(newer, LocalSnapshot(adapter.frozen()))
    moved = engine.sample([dataclasses.replace(request, policy=newer) for request in asked])
    assert_fresh(base, lanes, [adapter], asked, moved)
    assert tokens(moved) != tokens(first)
    assert {c.policy_version for group in again for c in group} == {0}
    assert {c.policy_version for group in moved for c in group} == {1}


def test_weights_that_were_not_published_are_named(base, lanes):
    """An older version, a later one, another run's: the engine never samples with other weights instead."""
    engine, weights = LocalEngine(base, lanes), LocalSnapshot(trained(lanes, 0).frozen())

    def sample_as(run: str, version: int):
        engine.sample([dataclasses.replace(requests()[0], policy=PolicyRef(run, version))])

    engine.publish(PolicyRef("a", 3), weights)
    for run, version, latest in (("a", 2, 3), ("a", 4, 3), ("b", 3, None)):
        with pytest.raises(RunFailed, match=f"published as version {version} of {run}; there is {latest}"):
            sample_as(run, version)
    engine.publish(PolicyRef("a", 4), weights)
    sample_as("a", 3)  # two versions of a run at a time
    engine.retire(PolicyRef("a", 3))
    engine.retire(PolicyRef("a", 2))  # unknown
    with pytest.raises(RunFailed, match="version 3 of a; there is 4"):
        sample_as("a", 3)
    engine.forget()
    with pytest.raises(RunFailed, match="there is None"):
        sample_as("a", 4)
    with pytest.raises(TypeError, match="LoRA adapters, not with int"):
        engine.publish(PolicyRef("a", 5), 1)


def test_batching_does_not_change_what_is_sampled(base, lanes):
    """In one batch, in few rows, by the other decoder, in several threads, and each request alone."""
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [request for lane in range(3) for request in requests(lane, prompts=2 + lane, samples=2 + lane)]
    expected = sample(LocalEngine(base, lanes), asked, adapters)
    found = [sample(LocalEngine(base, lanes), asked, adapters, max_rows=rows) for rows in (7, 1)]
    found.append(sample(LocalEngine(base, lanes, dense=False), asked, adapters))
    engine = LocalEngine(base, lanes)
    found.append([sample(engine, [dataclasses.replace(r, policy=ref(0))], [adapters[lane_of(r)]])[0] for r in asked])
    for count in (2, 20):
        workers = Workers(count)
        found.append(sample(LocalEngine(base, lanes, workers=workers), asked, adapters))
        workers.close()
    assert len({tuple(c.token_ids) for c in expected[0]}) > 1  # the samples of a group differ
    for groups in found:
        assert_same(groups, expected)


def test_frequencies_follow_the_distribution(base, lanes):
    """Inverse-CDF draws over independent streams: the first token's counts pass a chi-square test."""
    from scipy.stats import chisquare

    adapter = trained(lanes, 0)
    request = SampleRequest(ref(0), (5, 9, 17), 3000, 1, 0.8, ("frequency",))
    drawn = [c.token_ids[0] for c in sample(LocalEngine(base, lanes), [request], [adapter])[0]]
    with torch.no_grad(), lanes.single(adapter):
        logits = base.model(input_ids=torch.tensor([[5, 9, 17]])).logits[0, -1]
    p = torch.softmax(logits.double() / 0.8, -1).numpy()
    common = p > 5 / 3000
    observed = np.bincount(drawn, minlength=len(p))
    counts = np.append(observed[common], observed[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * 3000
    assert chisquare(counts, expected).pvalue > 1e-3


def test_context_overflow_is_told(base, lanes):
    with pytest.raises(ModelError, match="max_tokens"):
        sample(LocalEngine(base, lanes), requests(max_tokens=5000), [trained(lanes, 0)])


def with_many_ends(base):
    return dataclasses.replace(base, eos_ids=tuple(sorted({*base.eos_ids, *range(20, 60)})))


def test_slots_of_finished_sequences_go_to_waiting_ones(base, lanes):
    """With few rows, very different lengths and one lane with much more to do, the tokens are the same."""
    base, adapters = with_many_ends(base), [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [
        request
        for lane, prompts in enumerate((1, 2, 9))
        for request in requests(lane, prompts=prompts, samples=3, max_tokens=6 + 9 * lane)
    ]
    free = sample(LocalEngine(base, lanes), asked, adapters)
    reported = {}
    tight = sample(LocalEngine(base, lanes), asked, adapters, max_rows=8, finished=reported.__setitem__)
    assert_same(tight, free)
    assert reported == dict(enumerate(tight))


def test_the_device_is_asked_every_few_tokens_only_and_what_is_sampled_stays(base, lanes):
    """As on a GPU: sequences that ended a few tokens ago are still in the batch."""
    adapters = [trained(lanes, i) for i in range(2)]
    asked = [request for lane in range(2) for request in requests(lane, max_tokens=9 + 4 * lane)]
    free = sample(LocalEngine(base, lanes), asked, adapters)
    again = sample(LocalEngine(base, lanes, settings=AS_ON_A_GPU), asked, adapters)
    assert tokens(again) == tokens(free)


def test_a_model_that_the_fast_path_does_not_reproduce_takes_the_other(tmp_path):
    """Same class and config, but a layer that computes something else: the probe notices."""
    base = toy_base(tmp_path / "toy")
    base.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.1)
    lanes = Lanes(base)
    engine, adapter = LocalEngine(base, lanes), trained(lanes, 0)
    assert not engine.fast
    asked = requests(prompts=1)
    assert_fresh(base, lanes, [adapter], asked, sample(engine, asked, [adapter]))


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8}], ids=["whole", "top_p"])
def test_a_lane_whose_logits_are_not_numbers_leaves_the_others_alone(base, lanes, cut):
    """It is found by its update; the sampling of the others must go on."""
    good, bad = trained(lanes, 0), trained(lanes, 1)
    asked = [dataclasses.replace(request, **cut) for lane in range(2) for request in requests(lane)]
    alone = sample(LocalEngine(base, lanes), asked[:3], [good])
    with torch.no_grad():
        bad.flat.fill_(float("nan"))
    groups = sample(LocalEngine(base, lanes), asked, [good, bad])
    assert tokens(groups[:3]) == tokens(alone)
    assert all(np.isnan(c.logprobs_T).any() for g in groups[3:] for c in g)


@pytest.mark.parametrize("max_rows", [4, 8])
def test_a_run_that_has_diverged_leaves_those_alone_that_take_over_its_rows(base, lanes, max_rows):
    """NaN in the cached keys and values of a run that has ended must not reach sequences that get its rows."""
    base, good, bad = with_many_ends(base), trained(lanes, 0), trained(lanes, 1)
    with torch.no_grad():
        bad.flat.fill_(float("nan"))
    short, long = requests(0, prompts=1, max_tokens=8), requests(1, prompts=6, max_tokens=14)
    alone = sample(LocalEngine(base, lanes), [dataclasses.replace(r, policy=ref(0)) for r in long], [good])
    together = sample(LocalEngine(base, lanes), [*short, *long], [bad, good], max_rows=max_rows)[len(short) :]
    assert tokens(together) == tokens(alone)
    assert all(np.isfinite(c.logprobs_T).all() for g in together for c in g)


def test_a_worker_has_no_others_to_share_its_piece_with():
    """Pieces of pieces would wait for threads that wait for them."""
    workers = Workers(2)

    def piece(item: int) -> set[str]:
        if item < 0:
            raise ValueError("piece 2")
        assert workers.count == 1
        return set(workers.map(lambda _: threading.current_thread().name, range(3))) - {threading.current_thread().name}

    for _ in range(2):
        assert workers.map(piece, range(8)) == 8 * [set()]
        with pytest.raises(ValueError, match="piece 2"):
            workers.map(piece, [1, -1, 2])
    workers.close()


@pytest.mark.parametrize("runs", [1, 3])
def test_a_compiled_step_is_the_python_step(base, lanes, runs):
    """A GPU runs the functions of a step as Python, a CPU compiled; bit by bit the same."""
    adapters = [trained(lanes, i, rank=2 + i) for i in range(runs)]
    asked = [r for lane in range(runs) for r in requests(lane, prompts=2, max_tokens=12 + lane, temperature=0.7)]
    asked.append(dataclasses.replace(asked[0], temperature=0.0, stream=("greedy",)))
    assert compiled_decode_steps() is not decode_steps
    compiled = decoded(base, lanes, adapters, asked)
    assert decoded(base, lanes, adapters, asked, settings=CPU_DECODING._replace(compiled=False)) == compiled


def test_logprobs_are_fresh_after_every_update_and_free_of_dropout(tmp_path):
    """Prefix caches that outlive an update; rollouts sampled with dropout active, the base's or LoRA's."""
    directory = tmp_path / "dropping"
    qwen3_directory(directory, ["12+34=? the answer is \\boxed{46}"])
    config = read_json(directory / "config.json")
    write_json(directory / "config.json", config | {"attention_dropout": 0.5})
    dropping = load_base(str(directory), devices="cpu", dtype="float32")
    assert dropping.model.config.attention_dropout == 0.5
    write_json(directory / "config.json", config | {"attention_dropout": 0.0})
    plain = load_base(str(directory), devices="cpu", dtype="float32")
    lanes, reference_lanes = Lanes(dropping), Lanes(plain)
    adapter, engine = trained(lanes, 0), LocalEngine(dropping, lanes)
    optimizer, asked = adamw(adapter, 0.05), requests(samples=4)
    reference = reference_lanes.new_adapter(4, 8.0)
    for step in range(3):
        reference.load(adapter.tensors())
        assert_fresh(plain, reference_lanes, [reference], asked, sample(engine, asked, [adapter]))
        samples, before, dropout = rollout(dropping, lanes, adapter), adapter.flat.detach().clone(), 0.5 * (step % 2)
        keys = {"optimizer": optimizer, "lr": 0.05, "grad_clip_norm": 1.0}
        metrics = update(lanes, adapter, samples, step=step, dropout=dropout, **keys)
        assert float((adapter.flat.detach() - before).abs().max()) > 0.01
        if not dropout:
            assert abs(metrics["val/ratio"] - 1) < 1e-5
