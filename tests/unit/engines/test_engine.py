"""The in-process engine against fresh forward passes of the same model, and against itself in other batches."""

from __future__ import annotations

import dataclasses
import math
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from lane_cases import adamw, decoded, fresh_logprobs, lane_of, publish, ref, requests, rollout, sample, trained, update
from torch.utils._python_dispatch import TorchDispatchMode
from toymodels import qwen3_directory, toy_base

from retrain.config import load
from retrain.engines import dense, slots
from retrain.engines.dense import DenseDecoder
from retrain.engines.draw import cumulated, draw
from retrain.engines.graphs import StepGraphs
from retrain.engines.local import LEAST_PIECE_ROWS, LocalEngine
from retrain.engines.protocol import PolicyRef, SampleRequest
from retrain.engines.rows import LaneRequest, Row
from retrain.engines.slots import SlotBatch
from retrain.engines.step import compiled_decode_steps, decode_steps
from retrain.errors import ModelError, RunFailed
from retrain.files import read_json, write_json
from retrain.policy.base import BaseModel, load_base
from retrain.policy.local import LocalSnapshot
from retrain.policy.lora import Lanes
from retrain.policy.threads import Workers
from retrain.record.observer import NullObserver


@pytest.mark.parametrize("dense_path", [True, False], ids=["dense", "plain"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_and_entropy_equal_a_fresh_forward(base, lanes, temperature, dense_path):
    engine, adapters = LocalEngine(base, lanes, dense=dense_path), [trained(lanes, 0), trained(lanes, 1, rank=2)]
    asked = requests(0, temperature=temperature) + requests(1, temperature=temperature, samples=3)
    for request, group in zip(asked, sample(engine, asked, adapters), strict=True):
        assert len(group) == request.samples
        for completion in group:
            expected, entropy = fresh_logprobs(
                base, lanes, adapters[lane_of(request)], request.prompt_ids, completion.token_ids, temperature
            )
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
            np.testing.assert_allclose(completion.entropy_T, entropy, atol=1e-4)


def test_logprobs_stay_right_after_the_weights_change(base, lanes):
    """The fault of engines that keep prefix caches over updates."""
    engine, adapter = LocalEngine(base, lanes), trained(lanes, 0)
    asked = requests()
    sample(engine, asked, [adapter])
    with torch.no_grad():
        adapter.flat.mul_(1.7)
    for request, group in zip(asked, sample(engine, asked, [adapter]), strict=True):
        for completion in group:
            expected, _ = fresh_logprobs(base, lanes, adapter, request.prompt_ids, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


def test_what_is_published_is_sampled_with_whatever_becomes_of_the_weights(base, lanes):
    """Rollouts name the version that drew them: weights that train on must not be in them."""
    engine, adapter, asked = LocalEngine(base, lanes), trained(lanes, 0), requests()
    publish(engine, [adapter])
    first = engine.sample(asked)
    with torch.no_grad():
        adapter.flat.mul_(1.7)
    again = engine.sample(asked)
    assert [[(c.token_ids, c.logprobs_T.tolist()) for c in group] for group in first] == [
        [(c.token_ids, c.logprobs_T.tolist()) for c in group] for group in again
    ]
    newer = PolicyRef(ref(0).run_id, 1)
    engine.publish(newer, LocalSnapshot(adapter.frozen(), {}))
    moved = engine.sample([dataclasses.replace(request, policy=newer) for request in asked])
    for request, group, before in zip(asked, moved, first, strict=True):
        assert {c.policy_version for c in before} == {0}
        assert {c.policy_version for c in group} == {1}
        for completion in group:
            expected, _ = fresh_logprobs(base, lanes, adapter, request.prompt_ids, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
    assert [[c.token_ids for c in group] for group in moved] != [[c.token_ids for c in group] for group in first]


def test_weights_that_were_not_published_are_named(base, lanes):
    """An older version, one that is yet to come, another run's: none is sampled with instead of another."""
    engine, adapter = LocalEngine(base, lanes), trained(lanes, 0)
    engine.publish(PolicyRef("a", 3), LocalSnapshot(adapter.frozen(), {}))
    for asked, there in ((PolicyRef("a", 2), 3), (PolicyRef("a", 4), 3), (PolicyRef("b", 3), None)):
        with pytest.raises(
            RunFailed, match=f"no weights were published as version {asked.version} of {asked.run_id}; there is {there}"
        ):
            engine.sample([dataclasses.replace(requests()[0], policy=asked)])
    engine.publish(PolicyRef("a", 4), LocalSnapshot(adapter.frozen(), {}))
    engine.sample([dataclasses.replace(requests()[0], policy=PolicyRef("a", 3))])  # two versions of a run at a time
    engine.retire(PolicyRef("a", 3))
    engine.retire(PolicyRef("a", 2))  # nobody knows it
    with pytest.raises(RunFailed, match="version 3 of a; there is 4"):
        engine.sample([dataclasses.replace(requests()[0], policy=PolicyRef("a", 3))])
    engine.forget()
    with pytest.raises(RunFailed, match="there is None"):
        engine.sample([dataclasses.replace(requests()[0], policy=PolicyRef("a", 4))])
    with pytest.raises(TypeError, match="LoRA adapters, not with int"):
        engine.publish(PolicyRef("a", 5), 1)  # pyright: ignore[reportArgumentType]


def test_batching_does_not_change_what_is_sampled(base, lanes):
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [request for lane in range(3) for request in requests(lane, prompts=2 + lane, samples=2 + lane)]
    together = sample(LocalEngine(base, lanes), asked, adapters)
    waves = sample(LocalEngine(base, lanes), asked, adapters, max_rows=7)
    alone = [
        sample(LocalEngine(base, lanes), [dataclasses.replace(r, policy=ref(0))], [adapters[lane_of(r)]])[0]
        for r in asked
    ]
    plain = sample(LocalEngine(base, lanes, dense=False), asked, adapters)
    ids = [[c.token_ids for c in group] for group in together]
    assert ids == [[c.token_ids for c in group] for group in waves]
    assert ids == [[c.token_ids for c in group] for group in plain]
    assert ids == [[c.token_ids for c in group] for group in alone]
    for one, other in zip(together, alone, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=1e-4)


def test_samples_of_a_group_differ_and_repeat(base, lanes):
    engine, adapter = LocalEngine(base, lanes), trained(lanes, 0)
    first = sample(engine, requests(samples=8, prompts=1), [adapter])[0]
    again = sample(engine, requests(samples=8, prompts=1), [adapter])[0]
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) > 1


def test_every_end_token_stops_and_is_counted(base, lanes):
    adapter = trained(lanes, 0)
    ends = base.eos_ids
    try:
        base.eos_ids = tuple(sorted({*ends, *range(20, 120)}))
        completions = [
            c
            for g in sample(LocalEngine(base, lanes), requests(prompts=4, samples=8, max_tokens=30), [adapter])
            for c in g
        ]
        stopped = [c for c in completions if c.stop_reason == "stop"]
        assert len(stopped) > len(completions) // 2
        for completion in completions:
            inside = [t for t in completion.token_ids[:-1] if t in base.eos_ids]
            assert inside == []
            assert (completion.token_ids[-1] in base.eos_ids) == (completion.stop_reason == "stop")
            assert completion.stop_reason == "stop" or len(completion) == 30
    finally:
        base.eos_ids = ends


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


def test_temperature_zero_is_greedy(base, lanes):
    adapter = trained(lanes, 0)
    request = requests(prompts=1, samples=2, temperature=0.0)[0]
    one, two = sample(LocalEngine(base, lanes), [request], [adapter])[0]
    assert one.token_ids == two.token_ids
    ids = list(request.prompt_ids)
    with torch.no_grad(), lanes.single(adapter):
        for token in one.token_ids:
            assert int(base.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


def test_lanes_may_differ_in_length_and_temperature(base, lanes):
    adapters = [trained(lanes, 0), trained(lanes, 1)]
    asked = requests(0, max_tokens=4, temperature=0.5) + requests(1, max_tokens=9, temperature=1.3)
    for request, group in zip(asked, sample(LocalEngine(base, lanes), asked, adapters), strict=True):
        for completion in group:
            assert len(completion) <= request.max_tokens
            expected, _ = fresh_logprobs(
                base, lanes, adapters[lane_of(request)], request.prompt_ids, completion.token_ids, request.temperature
            )
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


def test_context_overflow_is_told(base, lanes):
    with pytest.raises(ModelError, match="max_tokens"):
        sample(LocalEngine(base, lanes), requests(max_tokens=5000), [trained(lanes, 0)])


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
DENSE = {
    "llama": {"attention_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
}
"""Driven by ``engines.dense``."""
FAMILIES = {
    **DENSE,
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_neox": {},
    "windowed mistral": {"sliding_window": 6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_of_other_families_sample_right(family):
    """Whatever the attention, windows or experts: what the engine reports is what a fresh forward pass says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[-1], **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    class Words:
        def decode(self, ids, skip_special_tokens=True):
            return " ".join(map(str, ids))

    base = BaseModel("toy", model, Words(), torch.device("cpu"), torch.float32, (1,), 0, "")
    lanes = Lanes(base)
    adapters = [trained(lanes, seed, size=0.05) for seed in (3, 4)]
    asked = [SampleRequest(ref(lane), tuple(range(2, 2 + n)), 3, 14, 1.0, ("w", n)) for lane in (0, 1) for n in (4, 11)]
    engine = LocalEngine(base, lanes)
    assert engine.fast == (family in DENSE)
    for request, group in zip(asked, sample(engine, asked, adapters), strict=True):
        for completion in group:
            adapter = adapters[lane_of(request)]
            expected, _ = fresh_logprobs(base, lanes, adapter, request.prompt_ids, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


def test_slots_of_finished_sequences_go_to_waiting_ones(base, lanes, monkeypatch):
    """Few rows, sequences of very different lengths, one lane with much more to do: the same tokens in fewer steps
    than waves would take, and every request is reported as soon as it is complete."""
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    ends, base.eos_ids = base.eos_ids, tuple(sorted({*base.eos_ids, *range(20, 60)}))
    try:
        asked = [
            request
            for lane, prompts in enumerate((1, 2, 9))
            for request in requests(lane, prompts=prompts, samples=3, max_tokens=6 + 9 * lane)
        ]
        free = sample(LocalEngine(base, lanes), asked, adapters)
        steps, reported, decode_steps = [], [], DenseDecoder.decode_steps

        def noted_steps(self, blocks, rows, *rest):
            made = decode_steps(self, blocks, rows, *rest)
            steps.extend([len(rows.token_R)] * made)
            return made

        monkeypatch.setattr(DenseDecoder, "decode_steps", noted_steps)
        tight = sample(
            LocalEngine(base, lanes),
            asked,
            adapters,
            max_rows=8,
            finished=lambda request, actions: reported.append((request, len(steps), len(actions))),
        )
        assert [[c.token_ids for c in group] for group in tight] == [[c.token_ids for c in group] for group in free]
        for one, other in zip(tight, free, strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.stop_reason == b.stop_reason
                np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=1e-4)
        assert max(steps) <= 8
        assert sum(steps) < 1.6 * sum(len(c) for group in free for c in group)  # few rows ever stood idle
        assert sorted(request for request, _, _ in reported) == list(range(len(asked)))
        assert all(count == 3 for _, _, count in reported)
        assert reported[0][1] < len(steps) / 2  # the first was reported long before the last had ended
    finally:
        base.eos_ids = ends


def test_steps_stay_in_place_so_that_they_can_be_replayed(base, lanes, monkeypatch):
    """What a CUDA graph needs, on any device: a step captured once does the work of the later ones. Here the capture
    keeps the step's closure and the addresses of its buffers, and a replay checks that none has moved."""
    adapters = [trained(lanes, i) for i in range(2)]
    asked = [
        request for lane in range(2) for request in requests(lane, prompts=3, max_tokens=9 + 20 * lane, temperature=0.9)
    ]
    free = sample(LocalEngine(base, lanes), asked, adapters)
    replays = []

    def capture(step):
        batch = next(c.cell_contents for c in step.__closure__ if isinstance(c.cell_contents, SlotBatch))

        def buffers():
            held = [*batch.rows, *batch.sampled, *batch.kv_cache.keys, *batch.kv_cache.values]
            return [None if tensor is None else tensor.data_ptr() for tensor in held]

        places = buffers()

        def replay():
            assert buffers() == places
            replays.append(step)
            step()

        return replay

    monkeypatch.setattr(slots, "COLUMNS", {"cpu": 128})
    for rows in (None, 5):
        engine = LocalEngine(base, lanes)
        engine.graphs = StepGraphs(lambda: capture, engine.tell)
        again = sample(engine, asked, adapters, max_rows=rows)
        assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in free]
    assert len(replays) > 20


def test_a_step_that_cannot_be_captured_goes_on_eagerly_and_says_so_once(base, lanes, monkeypatch):
    monkeypatch.setattr(slots, "COLUMNS", {"cpu": 128})
    tried = []

    def capture(step):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    told, adapter, asked = [], trained(lanes, 0), requests(max_tokens=12)
    engine = LocalEngine(base, lanes, tell=told.append)
    free = sample(engine, asked, [adapter])
    engine.graphs = StepGraphs(lambda: capture, told.append)
    for _ in range(2):
        again = sample(engine, asked, [adapter])
        assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in free]
    assert told == ["decode steps run without CUDA graphs: operation not permitted when stream is capturing"]
    assert len(tried) == 1


def test_graphs_of_moved_buffers_are_dropped_with_their_memory():
    """Every place of the buffers has captures of its own, which a shape shares with the next one."""
    log = []

    def new_capture():
        pool = len(log)
        log.append([])
        return lambda step: lambda: log[pool].append(step())

    graphs = StepGraphs(new_capture, print)
    for place in range(2):
        for key in ("a", "b"):
            for _ in range(6):
                graphs.run(key, lambda place=place, key=key: f"{place}{key}")
        graphs.forget()
    assert log == [["0a"] * 3 + ["0b"] * 3, ["1a"] * 3 + ["1b"] * 3]


def test_the_device_is_asked_every_few_tokens_only_and_what_is_sampled_stays(base, lanes, monkeypatch):
    """As on a GPU: sequences that ended a few tokens ago are still in the batch, up to the end of the cache."""
    adapters = [trained(lanes, i) for i in range(2)]
    asked = [request for lane in range(2) for request in requests(lane, max_tokens=9 + 4 * lane)]
    free = sample(LocalEngine(base, lanes), asked, adapters)
    monkeypatch.setattr(slots, "CHECK", {"cpu": 8})
    monkeypatch.setattr(slots, "COLUMNS", {"cpu": 16})
    again = sample(LocalEngine(base, lanes), asked, adapters)
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in free]


@pytest.mark.parametrize("in_any_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_probability(dtype, in_any_order):
    """u = 0, and the largest u below 1, which in fp32 times the total is the total: neither gives the impossible
    tokens that stand first and last."""
    logits_RV = torch.tensor([[-math.inf, -math.inf, 0.3, 1.0, 0.7, -math.inf]], dtype=dtype).expand(2, -1)
    uniforms_R = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    token_R, logprob_R, _, _ = draw(logits_RV, uniforms_R, in_any_order=in_any_order)
    assert token_R.tolist() == [2, 4]
    torch.testing.assert_close(logprob_R, torch.log_softmax(logits_RV, -1)[0, [2, 4]])


def test_masses_in_any_order_are_those_in_order():
    mass = torch.softmax(8 * torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)), -1)
    exact = mass.double().cumsum(-1)
    torch.testing.assert_close(cumulated(mass.double(), in_any_order=True), exact, rtol=0, atol=5000 * 2.0**-40)
    assert bool((cumulated(mass, in_any_order=True).diff(dim=-1) >= 0).all())


def test_workers_share_every_lane_evenly(base, lanes):
    """With as many prompts in every lane no row of a piece is idle, and all sequences are there once."""
    engine = LocalEngine(base, lanes, workers=Workers(2))
    asked = [
        LaneRequest(**vars(request), lane=lane) for lane in range(5) for request in requests(lane, prompts=4, samples=2)
    ]
    work = [Row(i, sample) for i in range(len(asked)) for sample in range(2)]
    pieces = engine._pieces(asked, work, most=9)
    assert sorted((row for piece in pieces for row in piece), key=work.index) == work
    assert [[sum(asked[row.request].lane == lane for row in piece) for lane in range(5)] for piece in pieces] == [
        [4] * 5,
        [4] * 5,
    ]
    engine.workers.close()


def test_more_lanes_than_rows_still_sample(base, lanes):
    adapters = [trained(lanes, i) for i in range(4)]
    asked = [request for lane in range(4) for request in requests(lane, prompts=1 + lane, samples=2, max_tokens=5)]
    free = sample(LocalEngine(base, lanes), asked, adapters)
    tight = sample(LocalEngine(base, lanes), asked, adapters, max_rows=1)
    assert [[c.token_ids for c in group] for group in tight] == [[c.token_ids for c in group] for group in free]


def test_a_model_that_the_fast_path_does_not_reproduce_takes_the_other(tmp_path):
    """Same class and config, but a layer that computes something else: the probe notices."""
    base = toy_base(tmp_path / "toy")
    base.model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.1)
    lanes = Lanes(base)
    engine, adapter = LocalEngine(base, lanes), trained(lanes, 0)
    assert not engine.fast
    asked = requests(prompts=1)
    for completion in sample(engine, asked, [adapter])[0]:
        expected, _ = fresh_logprobs(base, lanes, adapter, asked[0].prompt_ids, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions(tmp_path, dtype):
    """float64 differs by the norms and angles that transformers computes in float32; bfloat16 adds the adapters
    unmerged and stays near the forward pass."""
    base = toy_base(tmp_path / "toy", dtype)
    lanes = Lanes(base)
    engine, adapters = LocalEngine(base, lanes), [trained(lanes, i, size=0.1) for i in range(2)]
    assert engine.fast
    for used in (adapters[:1], adapters):
        asked = [request for lane in range(len(used)) for request in requests(lane)]
        for request, group in zip(asked, sample(engine, asked, used), strict=True):
            for completion in group:
                expected, _ = fresh_logprobs(
                    base, lanes, used[lane_of(request)], request.prompt_ids, completion.token_ids, 1.0
                )
                np.testing.assert_allclose(
                    completion.logprobs_T, expected.astype(float), atol=1e-5 if dtype == "float64" else 0.5
                )


def test_sampling_with_logits_that_are_not_numbers_does_not_crash(base, lanes):
    """A lane whose weights have blown up is found by its update; the sampling of the others must go on."""
    good, bad = trained(lanes, 0), trained(lanes, 1)
    asked = [request for lane in range(2) for request in requests(lane)]
    alone = sample(LocalEngine(base, lanes), requests(0), [good])
    with torch.no_grad():
        bad.flat.fill_(float("nan"))
    groups = sample(LocalEngine(base, lanes), asked, [good, bad])
    assert [[c.token_ids for c in g] for g in groups[:3]] == [[c.token_ids for c in g] for g in alone]
    assert all(np.isnan(c.logprobs_T).any() for g in groups[3:] for c in g)


@pytest.mark.parametrize("max_rows", [4, 8])
def test_a_run_that_has_diverged_leaves_those_alone_that_take_over_its_rows(base, lanes, monkeypatch, max_rows):
    """NaN in the cached keys and values of a run that has ended must not reach sequences that get its rows."""
    monkeypatch.setattr(base, "eos_ids", tuple(sorted({*base.eos_ids, *range(20, 60)})))
    good, bad = trained(lanes, 0), trained(lanes, 1)
    with torch.no_grad():
        bad.flat.fill_(float("nan"))
    short, long = requests(0, prompts=1, max_tokens=8), requests(1, prompts=6, max_tokens=14)
    alone = sample(LocalEngine(base, lanes), [dataclasses.replace(r, policy=ref(0)) for r in long], [good])
    together = sample(LocalEngine(base, lanes), [*short, *long], [bad, good], max_rows=max_rows)[len(short) :]
    assert [[c.token_ids for c in g] for g in together] == [[c.token_ids for c in g] for g in alone]
    assert all(np.isfinite(c.logprobs_T).all() for g in together for c in g)


def test_workers_side_by_side_sample_the_same(base, lanes):
    """Pieces of the batch in several threads, each with its own lanes: the same tokens, and no mixed-up modes."""
    adapters = [trained(lanes, i, rank=2 + i) for i in range(3)]
    asked = [request for lane in range(3) for request in requests(lane, prompts=2 + lane, samples=3)]
    alone = sample(LocalEngine(base, lanes), asked, adapters)
    for count in (2, 3, 20):
        workers = Workers(count)
        together = sample(LocalEngine(base, lanes, workers=workers), asked, adapters)
        workers.close()
        assert [[c.token_ids for c in group] for group in together] == [[c.token_ids for c in g] for g in alone]
        for one, other in zip(together, alone, strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=1e-4)


def test_a_failure_in_a_worker_is_raised(base, lanes):
    def work(item):
        if item == 2:
            raise ValueError("piece 2")
        return item

    workers = Workers(2)
    with pytest.raises(ValueError, match="piece 2"):
        workers.map(work, range(4))
    assert workers.map(work, [5, 6, 7]) == [5, 6, 7]
    workers.close()


def test_a_worker_has_no_others_to_share_its_piece_with(base, lanes):
    """Pieces of pieces would wait for threads that wait for them, and cut a batch otherwise than it is alone."""
    workers = Workers(2)

    def piece(item: int) -> tuple[int, list[str]]:
        inner = workers.map(lambda _: threading.current_thread().name, range(3))
        assert set(inner) == {threading.current_thread().name}
        return workers.count, inner

    for _ in range(2):  # and so it stays
        found = workers.map(piece, range(8))
        assert {count for count, _ in found} == {1}
        assert threading.current_thread().name not in {name for _, names in found for name in names}
        assert workers.count == 2
    other = Workers(2)  # of another pool a worker is none
    assert other.map(lambda _: workers.count, range(4)) == [2] * 4
    assert Workers(1).map(lambda item: item + 1, range(3)) == [1, 2, 3]
    for each in (workers, other):
        each.close()


def test_a_small_batch_stays_in_one_piece(base, lanes):
    workers = Workers(2)
    engine = LocalEngine(base, lanes, workers=workers)
    seen = []
    engine._dense = lambda requests, work, *rest: seen.append(len(work))
    adapter = lanes.new_adapter(4, 8.0).initialise("pieces")
    for prompts in (LEAST_PIECE_ROWS // 8, LEAST_PIECE_ROWS // 4):
        sample(engine, [SampleRequest(ref(0), (5, 6, 7), 8, 4, 1.0, ("pieces", i)) for i in range(prompts)], [adapter])
    workers.close()
    assert sorted(seen) == [LEAST_PIECE_ROWS, LEAST_PIECE_ROWS, LEAST_PIECE_ROWS]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_compiled_step_is_the_python_step(base, lanes, monkeypatch, runs):
    """A GPU runs the functions of a step as Python, a CPU compiled; bit by bit the same."""
    adapters = [trained(lanes, i, rank=2 + i) for i in range(runs)]
    asked = [r for lane in range(runs) for r in requests(lane, prompts=2, max_tokens=12 + lane, temperature=0.7)]
    asked.append(dataclasses.replace(asked[0], temperature=0.0, stream=("greedy",)))
    assert compiled_decode_steps() is not decode_steps
    compiled = decoded(base, lanes, adapters, asked)
    monkeypatch.setattr(dense, "compiled_decode_steps", lambda: decode_steps)
    assert decoded(base, lanes, adapters, asked) == compiled


@pytest.mark.parametrize("error", [RuntimeError("not supported"), AttributeError("no script"), OSError("no source")])
def test_a_torch_without_torchscript_decodes_as_python(base, lanes, monkeypatch, error):
    def script(function):
        raise error

    monkeypatch.setattr(torch.jit, "script", script)
    assert compiled_decode_steps.__wrapped__() is decode_steps


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
    for step in range(4):
        reference.load(adapter.tensors())
        for request, group in zip(asked, sample(engine, asked, [adapter]), strict=True):
            for completion in group:
                expected, _ = fresh_logprobs(
                    plain, reference_lanes, reference, request.prompt_ids, completion.token_ids, 1.0
                )
                np.testing.assert_allclose(completion.logprobs_T, expected, atol=1e-4)
        samples, before, dropout = rollout(dropping, lanes, adapter), adapter.flat.detach().clone(), 0.5 * (step % 2)
        metrics = update(
            lanes, adapter, samples, optimizer=optimizer, lr=0.05, step=step, dropout=dropout, grad_clip_norm=1.0
        )
        assert float((adapter.flat.detach() - before).abs().max()) > 0.01
        if not dropout:
            assert abs(metrics["val/ratio"] - 1) < 1e-5


@contextmanager
def decodes():
    """(rows, tokens) of every pass that the dense decoder makes while inside."""
    seen, prefill, decode_steps = [], DenseDecoder.prefill, DenseDecoder.decode_steps

    def noted_prefill(self, ids_RT, *rest):
        seen.append(tuple(ids_RT.shape))
        return prefill(self, ids_RT, *rest)

    def noted_steps(self, blocks, rows, *rest):
        steps = decode_steps(self, blocks, rows, *rest)
        seen.extend([(len(rows.token_R), 1)] * steps)
        return steps

    DenseDecoder.prefill, DenseDecoder.decode_steps = noted_prefill, noted_steps
    try:
        yield seen
    finally:
        DenseDecoder.prefill, DenseDecoder.decode_steps = prefill, decode_steps


def test_all_prompts_decode_together_and_finished_rows_leave(fresh_base):
    """One prompt at a time; prompts prefilled once per sample; finished rows still decoded."""
    lanes = Lanes(fresh_base)
    fresh_base.eos_ids = tuple(range(20, 120))
    asked = requests(prompts=4, samples=8, max_tokens=40)
    engine = LocalEngine(fresh_base, lanes)
    with decodes() as seen:
        sampled = [c for group in sample(engine, asked, [trained(lanes, 0)]) for c in group]
    lengths = [len(c) for c in sampled]
    (rows, width), decoded = seen[0], seen[1:]
    assert (rows, width) == (4, max(len(request.prompt_ids) for request in asked))
    assert len(decoded) == max(lengths) - 1
    assert all(tokens == 1 for _, tokens in decoded)
    computed = sum(rows for rows, _ in decoded)
    assert computed <= sum(lengths) / 0.75
    assert computed < 0.6 * len(sampled) * len(decoded)


class VocabularySorts(TorchDispatchMode):
    """Notes sorts and top-k selections over the whole vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.found, self.operations = vocabulary, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.name().split("::")[1].split(".")[0]
        if name in ("sort", "argsort", "topk", "msort", "kthvalue") and args[0].shape[-1] == self.vocabulary:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_no_token_costs_a_sort_of_the_vocabulary(fresh_base):
    """A full sort of the vocabulary per token."""
    lanes = Lanes(fresh_base)
    adapter = trained(lanes, 0)
    with VocabularySorts(fresh_base.vocab_size) as watch:
        torch.randn(2, fresh_base.vocab_size).sort(-1)
        assert watch.found == ["sort"]  # the watch sees one
        sample(LocalEngine(fresh_base, lanes), requests(temperature=0.7), [adapter])
    assert watch.operations > 100
    assert watch.found == ["sort"]


def test_runs_share_one_base_and_decode_together(fresh_base, mixed_campaign, tmp_path):
    """Every run loads its own copy of the frozen base and decodes alone."""
    from contextlib import ExitStack

    from retrain.campaign.planning.plan import Plan
    from retrain.campaign.running.assemble import assemble
    from retrain.campaign.running.protocol import CohortJob

    plan = Plan.of(load(mixed_campaign / "mixed.toml"), tmp_path / "out")
    with ExitStack() as stack:
        cohort = assemble(CohortJob.of(plan, plan.specs), NullObserver(), lambda: False, stack)
        assert len(cohort.runs) == 4
        shared, their_lanes = cohort.engine.base, cohort.engine.lanes
        assert all(run.policy.base is shared and run.policy.lanes is their_lanes for run in cohort.runs)
        assert len({id(run.policy.adapter) for run in cohort.runs}) == 4
        assert not any(parameter.requires_grad for parameter in shared.model.parameters())
        for run in cohort.runs:
            run.recorder.close()
    lanes = Lanes(fresh_base)
    adapters = [trained(lanes, seed) for seed in range(3)]
    asked = [request for lane in range(3) for request in requests(lane)]
    engine = LocalEngine(fresh_base, lanes)
    with decodes() as together:
        sample(engine, asked, adapters)
    assert len(together) <= 12  # a prefill and a pass per further token, for three runs as for one
    assert together[0][0] == 9
