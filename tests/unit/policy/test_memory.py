from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers.masking_utils
from helpers.campaigns import Heard, campaign, train
from helpers.lanes import assert_same, local_policy, objective, requests, rollout, sample, totals, trained
from helpers.models import toy_base
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from retrain.engines.dense import DenseDecoder, KVCache
from retrain.engines.local import LocalEngine
from retrain.engines.slots import SlotBatch
from retrain.engines.step import CPU_DECODING, Rows, SampledTokens, StepPlan, decode_steps
from retrain.files import read_json, read_jsonl
from retrain.policy import backbone
from retrain.policy import base as bases
from retrain.policy import update as accumulating
from retrain.policy.base import BaseModel, MemoryPlan, kept_bytes
from retrain.policy.head import Head
from retrain.policy.local import LocalPolicy
from retrain.policy.lora import Lanes, apply_gradient
from retrain.policy.packing import NAME, Budget, register_attention
from retrain.records.observer import NullObserver
from retrain.rng import generator
from retrain.types import Sample, StepBatch, Want

EIGHT_B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN = partial(Qwen3Config, **EIGHT_B, intermediate_size=12288, tie_word_embeddings=False)
LLAMA = partial(LlamaConfig, **EIGHT_B, intermediate_size=14336)


def on_meta(config: Callable[..., Any], dtype: torch.dtype, layers: int, vocab_size: int = 512) -> BaseModel:
    """A base of this shape without its numbers."""
    shape = config(num_hidden_layers=layers, vocab_size=vocab_size)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    return BaseModel("meta", model.eval().requires_grad_(False), None, torch.device("meta"), dtype, (1,), 0, "")


@pytest.fixture
def trainable(monkeypatch):
    """Makes a base of the meta device ready for the update: no numbers are there that its probes could compare, and
    attention is the kernel of GPUs or, in fp32, that of CPUs, both of which keep no matrix of queries times keys."""

    def packs(base, decoder, config):
        register_attention()
        base.model.set_attn_implementation(NAME)
        return True

    def attention(q, k, v, is_causal, scale, enable_gqa):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        if q.dtype == torch.float32:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, is_causal, scale=scale)[0]

    monkeypatch.setattr(backbone, "_try_packing", packs)
    monkeypatch.setattr(backbone, "split_head", lambda model: (model.model, Head(model.lm_head.weight)))
    monkeypatch.setattr(backbone, "_same_norm", lambda one, other: True)
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", lambda positions: None)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for name in ("equal", "allclose"):
        monkeypatch.setattr(torch, name, lambda *args, **options: True)


def kept(base: BaseModel, twice: bool = False) -> tuple[int, int]:
    """(tokens, bytes that autograd keeps of them besides weights) of the forward pass of a micro-batch."""
    lanes, zeros = Lanes(base), np.zeros(120)
    adapter = lanes.new_adapter(16, 32.0)
    samples = [Sample.single_turn([3 + prompt] * 8, [7] * 120, zeros, zeros) for prompt in range(3) for _ in range(4)]
    trained_on = backbone.backbone_of(base)
    layout = trained_on.layout(samples, base).to(base.device)
    given = [*base.model.parameters(), *base.model.buffers(), *adapter.A.values(), *adapter.B.values()]
    given += [tensor for tensor in vars(layout).values() if isinstance(tensor, torch.Tensor)]
    seen = {tensor.untyped_storage()._cdata for tensor in given}
    storages = []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            storages.append(storage)
        return tensor

    layers = backbone.checkpointed(nullcontext) if twice else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), lanes.single(adapter), layers:
        hidden = trained_on.hidden(layout)
        trained_on.head.logprobs(hidden, torch.zeros(len(hidden), dtype=torch.long, device="meta"))
    return layout.ids_BL.numel(), sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3-8b", "llama-8b"])
def test_what_an_update_keeps_is_what_was_predicted(config, dtype, trainable):
    """Within 15 %, and layer by layer within 3 %; layers that are computed twice keep their input alone."""
    one, two = (on_meta(config, dtype, layers) for layers in (1, 2))
    (tokens, less), (_, found) = kept(one), kept(two)
    assert tokens * kept_bytes(two) == pytest.approx(found, rel=0.15)
    assert tokens * kept_bytes(one) == pytest.approx(found - less, rel=0.03)
    assert kept(two, twice=True)[1] - kept(one, twice=True)[1] == tokens * 4096 * dtype.itemsize


@torch.no_grad()
def test_decoding_stays_on_the_device_of_the_base():
    """Prefill, decode steps of two lanes and compaction: operations on tensors of two devices raise."""
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device="meta") + torch.ones(2)
    base, rows, columns = on_meta(QWEN, torch.bfloat16, 2), 4, 128
    decoder, device = DenseDecoder(base, CPU_DECODING), base.device
    blocks = decoder.blocks([Lanes(base).new_adapter(8, 16.0).frozen() for _ in range(2)])
    cache = KVCache(decoder, rows, columns)
    places, prompts = (torch.zeros(size, dtype=torch.long, device=device) for size in (rows, (rows, 7)))
    assert decoder.prefill(prompts, places, blocks, cache, places, places).device == device
    batch = Rows(places, places, places, places.bool(), places, places, None, None, None)
    uniforms = torch.zeros(rows + 1, 9, dtype=torch.float64, device=device)
    sampled = SampledTokens(places[:1], uniforms, uniforms.long(), uniforms.float(), uniforms.float(), None)
    for exact_sums in (False, True):
        frame = decoder.frame_of(columns)
        plan = StepPlan(columns, True, 1)
        decode_steps(frame, blocks, batch, sampled, cache.keys, cache.values, plan, exact_sums)
    cache.select(places[:2])
    assert {tensor.device for tensor in (*cache.keys, *cache.values)} == {device}


def test_rows_of_an_8b_cohort_on_80_gib_are_those_counted_by_hand(host_memory, trainable):
    """Five lanes, prompt and completion of 2,048 tokens: 33 slots each, where a cache that is there twice had 15."""
    host_memory.total = 80 << 30
    base = on_meta(QWEN, torch.bfloat16, 36, 151_936)
    assert kept_bytes(base) == 36 * 71 * 2048  # per token
    plan = MemoryPlan.of(base, lanes := 5 * 43_646_976 * (4 + 4 + 8 + 4 + 2))
    assert plan.room == (80 << 30) - 2 * 8_190_735_360 - lanes
    assert plan.micro_batch_tokens == int(0.4 * plan.room) // kept_bytes(base)
    engine = LocalEngine(base, Lanes(base), dense=False)
    engine.begin(plan)
    assert engine.affordable_rows(2048) == 167
    assert engine.affordable_rows(2000) == 167  # columns come in 128s
    assert engine.affordable_rows(2048, truncated=True) < 167


@pytest.fixture
def machine(monkeypatch, host_memory):
    """Set memory size and micro-batch budget; record the rows decoded at once and the micro-batches of updates."""
    begin, compute = SlotBatch.__init__, accumulating.GradientAccumulator._add_gradients
    shapes: list[tuple[str, int]] = []

    def batch(self, *args):
        shapes.append(("rows", args[4]))
        begin(self, *args)

    def computed(self, specs):
        shapes.append(("micro-batches", len(specs)))
        return compute(self, specs)

    def become(total: int, tokens: int) -> list[tuple[str, int]]:
        host_memory.total = total
        host_memory.available *= 2  # sizes depend on the total alone
        monkeypatch.setattr(bases.layers, "cpu_token_budget", lambda weight_bytes: tokens)
        shapes.clear()
        return shapes

    monkeypatch.setattr(SlotBatch, "__init__", batch)
    monkeypatch.setattr(accumulating.GradientAccumulator, "_add_gradients", computed)
    return become


def results(out):
    """Return the final adapters, and the numbers of every update."""
    numbers = ("loss", "optim/grad_norm", "kl_sample_train_v2", "reward/total", "completion_tokens")
    adapters = [path.read_bytes() for path in sorted(out.rglob("final/adapter_model.safetensors"))]
    rows = [row for path in sorted(out.rglob("metrics.jsonl")) for row in read_jsonl(path)]
    return adapters, [[row.get(key) for key in numbers] for row in rows]


def test_a_resumed_campaign_computes_in_the_same_shapes_on_any_machine(model, tmp_path, machine):
    """Twice the memory changes no bit. Shapes that do not fit are planned anew, with a message."""
    keys = ["campaign.seeds=[1]", "squeeze.enabled=false", "evaluation.problems=0", "training.eval_every=0"]

    def train_to(name, steps, observer):
        train(campaign(tmp_path, model, name, steps=steps), tmp_path / name, *keys, observer=observer)
        return read_json(tmp_path / name / "manifest.json")["memory"]

    shapes = machine(500_000, 60)
    train_to("whole", 2, NullObserver())
    expected = list(shapes)
    assert {kind for kind, number in expected if number > 1} == {"rows", "micro-batches"}
    assert max(number for kind, number in expected if kind == "rows") < 12
    shapes = machine(500_000, 60)
    kept, before = train_to("cut", 1, NullObserver()), list(shapes)
    assert {each["micro_batch_tokens"] for each in kept.values()} == {60}
    assert len({each["decode_bytes"] for each in kept.values()}) == 1 < len(kept)
    shapes, seen = machine(2_000_000, 1000), Heard()
    assert train_to("cut", 2, seen) == kept
    assert before + shapes == expected
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    assert not any("do not fit" in line for line in seen.messages)
    shapes = machine(370_000, 40)
    train_to("cut", 3, seen)
    assert {number for kind, number in shapes if kind == "rows"} == {1}
    assert sum("decode batches of 0.0 GiB do not fit in this device's memory" in line for line in seen.messages) == 1
    for run in kept:
        log = (tmp_path / f"cut/runs/{run}/run.log").read_text()
        assert "micro-batches of 60 tokens do not fit in this device's memory" in log


def test_a_budget_goes_on_as_it_was_unless_the_user_wants_less(base, machine):
    """Planned tokens stay the planned ones, the user's own stay theirs; what was learnt bounds both."""
    machine(1_000_000, 60)
    plan = MemoryPlan.of(base)
    for planned, learnt, expected in (
        (True, False, {"plan": 60, "more": 500, "less": 20}), (True, True, {"plan": 30, "more": 30, "less": 20}),
        (False, False, {"plan": 1000, "more": 500, "less": 20}), (False, True, {"plan": 30, "more": 30, "less": 20}),
    ):  # fmt: skip
        before = Budget(60, plan=plan) if planned else Budget(60)
        if learnt:
            before.shrink([5, 2], [40, 40], "out of memory")
        budgets = {"plan": Budget(1000, plan=plan), "more": Budget(500), "less": Budget(20)}
        for budget in budgets.values():
            budget.restore(before.state())
        assert {name: budget.tokens for name, budget in budgets.items()} == expected


def test_prompts_prefilled_in_parts_sample_the_same(base, lanes, reads):
    """Up to rounding; as one part, nothing changes at all."""
    adapters = [trained(lanes, i) for i in range(3)]
    asked = [request for lane in range(3) for request in requests(lane, prompts=2 + 2 * lane)]
    whole = sample(engine := LocalEngine(base, lanes), asked, adapters)
    per_token = CPU_DECODING.prefill_bytes // engine.decoder.prefill_tokens
    small = CPU_DECODING._replace(prefill_bytes=3 * 4 * 9 * per_token)
    parts = sample(LocalEngine(base, lanes, settings=small), asked, adapters)
    assert [rows for rows, _ in reads["prefill"]] == [3 * 6, 3 * 4, 3 * 2]
    assert_same(whole, parts, 1e-5)


CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
DRIVER = RuntimeError("CUDA error: out of memory")
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")
PLACES = {
    "a prefill": (DenseDecoder, "prefill", 2, CUDA), "decoding": (DenseDecoder, "decode_steps", 3, CUBLAS),
    "compacting": (KVCache, "select", 1, CPU), "scoring": (backbone, "token_logprobs", 2, CUDA),
    "a forward pass": (accumulating, "token_logprobs", 2, CPU),
    "a backward pass": (torch.Tensor, "backward", 2, MemoryError()),
    "the first moment": (torch, "zeros_like", 1, DRIVER), "the second moment": (torch, "zeros_like", 2, CUBLAS),
}  # fmt: skip
"""The function in which memory runs out, at which of its calls (of ``zeros_like``: those for a parameter), and how."""


def two_steps(engine: LocalEngine, policy: LocalPolicy):
    """Return tokens, log-probabilities, weights and learnt limits of two steps of sampling, scoring and updating."""
    ids, logprobs, noise = [], [], generator("drill")
    with torch.no_grad():
        for b in policy.adapter.B.values():
            b.copy_(torch.linspace(-0.3, 0.3, b.numel()).view(b.shape))
    for step in range(2):
        asked = [replace(each, stream=(*each.stream, step)) for each in requests(prompts=6, samples=3)]
        groups = sample(engine, asked, [policy.adapter], max_rows=12)
        samples = [
            Sample.single_turn(r.prompt_ids, c.token_ids, c.logprobs_T, noise.normal(size=len(c)))
            for r, group in zip(asked, groups, strict=True)
            for c in group
        ]
        scores = policy.score(samples, frozenset({Want.LOGPROBS}))
        policy.update(StepBatch(samples, totals(samples), step, ()), objective(), 0.01)
        ids += [c.token_ids for group in groups for c in group]
        logprobs += [c.logprobs_T for group in groups for c in group] + list(scores.logprobs or ())
    return ids, np.concatenate(logprobs), policy.adapter.flat.detach().clone(), (engine.fitting, policy.budget.tokens)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Lanes of a base in float64, and the results of two steps."""
    lanes = Lanes(toy_base(tmp_path_factory.mktemp("toy"), "float64"))
    return lanes, two_steps(*engine_and_policy(lanes))


def engine_and_policy(lanes: Lanes) -> tuple[LocalEngine, LocalPolicy]:
    return LocalEngine(lanes.base, lanes), local_policy(lanes.base, lanes, training={"micro_batch_tokens": 100})


@pytest.mark.parametrize("place", PLACES)
def test_a_run_in_which_memory_runs_out_gives_what_it_would_have_given(undisturbed, monkeypatch, place):
    """The optimizer allocates again, and no bit changes; elsewhere a smaller shape rounds differently."""
    lanes, (ids, logprobs, weights, learnt) = undisturbed
    owner, name, at, error = PLACES[place]
    function, calls = getattr(owner, name), []

    def out_of_memory(*args, **options):
        if name != "zeros_like" or isinstance(args[0], torch.nn.Parameter):
            calls.append(name)
            if len(calls) == at:
                raise error
        return function(*args, **options)

    engine, policy = engine_and_policy(lanes)
    monkeypatch.setattr(owner, name, out_of_memory)
    again_ids, again_logprobs, again_weights, taught = two_steps(engine, policy)
    assert len(calls) >= at
    assert again_ids == ids
    if "moment" in place:
        assert taught == learnt
        assert torch.equal(again_weights, weights)
        assert np.array_equal(again_logprobs, logprobs)
        return
    assert taught == ((6, 100) if owner in (DenseDecoder, KVCache) else (None, 50))
    # AdamW's first step divides a gradient by its own size: rounding of those near 0 shows, on some processors more.
    np.testing.assert_allclose(again_logprobs, logprobs, atol=1e-4)
    assert float((again_weights - weights).norm()) < 1e-4 * float(weights.norm())


def test_a_step_that_has_begun_to_change_weights_is_not_made_again(base, lanes):
    """Nor is another error a reason to try again."""

    class Failing(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(factor)
            raise error

    for factor, error in ((0.5, torch.OutOfMemoryError("CUDA out of memory")), (1.0, RuntimeError("other shapes"))):
        adapter = trained(lanes, 0)
        before = adapter.flat.detach().clone()
        failing = Failing([adapter.flat], lr=0.1)
        with pytest.raises(type(error)):
            apply_gradient(failing)
        assert torch.equal(adapter.flat, before * factor)
        assert failing.steps == 1


def test_adamw_as_one_kernel_goes_on_from_a_checkpoint(base, lanes, fuse_on_cpu, tmp_path):
    """Loading changes no bit, fusing only rounds. On a GPU the step count is on the device."""
    plain, samples = local_policy(base, lanes), rollout(base, lanes, trained(lanes, 0))
    fuse_on_cpu()
    fused, later = local_policy(base, lanes), local_policy(base, lanes, 1)
    assert fused.optimizer.param_groups[0]["fused"]
    assert not plain.optimizer.param_groups[0]["fused"]
    for step in range(3):
        if step == 2:
            fused.snapshot(resumable=True).write(tmp_path)
            later.load(tmp_path)
        for policy in (plain, fused, later)[: 2 + (step == 2)]:
            policy.update(StepBatch(samples, totals(samples), step, ()), objective(), 0.01)
    assert torch.equal(later.adapter.flat, fused.adapter.flat)
    torch.testing.assert_close(fused.adapter.flat, plain.adapter.flat, rtol=1e-5, atol=1e-6)
