"""Half precision: sampler and trainer round alike, and no sum has an order that a GPU chooses."""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from helpers.lanes import AS_ON_A_GPU, lane_of, ref, sample, trained, update
from helpers.models import toy_base
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.engines import dense, grid
from retrain.engines.dense import DenseDecoder
from retrain.engines.local import LocalEngine, dense_decoder, reproduces
from retrain.engines.step import CPU_DECODING
from retrain.policy import arithmetic, packing
from retrain.policy.arithmetic import attention, causal_attention, fp32_product, packed, rms_norm
from retrain.policy.backbone import backbone_of, collate, token_logprobs
from retrain.policy.base import load_base
from retrain.policy.head import Head
from retrain.policy.lora import Adapter, Lanes
from retrain.types import Sample, SampleRequest

BF16 = torch.bfloat16
needs_packing = pytest.mark.skipif(not arithmetic.packs("cpu", BF16), reason="this torch cannot lay weights out anew")

DENSE = ["llama", "qwen2", "qwen3", "mistral"]
"""Families that the dense decoder takes."""
OTHERS = ["llama", "gemma2", "granite", "phi", "qwen3_moe"]
IN_FP32_ONLY = ["gemma3_text", "gpt_neox", "windowed mistral"]


def trainer_minus_sampler(engine: LocalEngine, asked: list[SampleRequest], adapters: list[Adapter]) -> torch.Tensor:
    """Return the differences of the log-probabilities of all sampled tokens."""
    base, lanes, differences = engine.base, engine.lanes, []
    for request, group in zip(asked, sample(engine, asked, adapters), strict=True):
        own = [Sample.single_turn(request.prompt_ids, c.token_ids, c.logprobs_T, np.ones(len(c))) for c in group]
        batch = collate(own, base)
        with torch.no_grad(), lanes.single(adapters[lane_of(request)]):
            logprobs_BT, _ = token_logprobs(base, batch, 1.0)
        differences.append((logprobs_BT - batch.sampler_logprobs_BT)[batch.action_BT])
    return torch.cat(differences)


SAMPLED = [(family, True, dtype) for family in DENSE for dtype in (BF16, torch.float32)]
SAMPLED += [(family, False, BF16) for family in OTHERS]
SAMPLED += [(family, False, torch.float32) for family in IN_FP32_ONLY]


@pytest.mark.parametrize(("family", "dense_path", "dtype"), SAMPLED, ids=str)
def test_every_family_trains_on_the_logprobs_that_it_sampled(tiny, family, dense_path, dtype):
    """Also where the model's own forward pass samples, and with a LoRA scale that is no power of two."""
    base = tiny(family, dtype)
    lanes = Lanes(base)
    adapters = [trained(lanes, seed, rank=3, size=0.05) for seed in (1, 2)]
    engine = LocalEngine(base, lanes, dense=dense_path)
    assert engine.fast == dense_path
    prompts = [tuple(range(3, 3 + width)) for width in (4, 11)]
    asked = [SampleRequest(ref(lane), prompt, 3, 14, 1.0, ("half", lane)) for lane in (0, 1) for prompt in prompts]
    gaps = trainer_minus_sampler(engine, asked, adapters)
    if dtype != BF16:
        assert float(gaps.abs().max()) < 1e-4
        return
    squares = gaps.square()
    if "moe" in family:  # a last bit that decides between two experts moves some tokens by more
        squares = squares[squares < squares.quantile(0.9)]
    assert float(squares.mean()) / 2 < 5e-5


def gradients(function, inputs, grad):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("fused", "plain", "shapes"), [
    (lambda x: rms_norm(x, torch.linspace(0.5, 2.0, 64).to(BF16), 1e-6),
     lambda x: F.rms_norm(x, (64,), torch.linspace(0.5, 2.0, 64).to(BF16).to(x), 1e-6), [(40, 64)]),
    (partial(attention, scale=0.3), partial(causal_attention, scale=0.3), 3 * [(2, 4, 30, 16)]),
    (partial(attention, scale=0.3), partial(causal_attention, scale=0.3), [(2, 4, 30, 16), *2 * [(2, 2, 30, 16)]]),
], ids=["norm", "attention", "attention with shared heads"])  # fmt: skip
def test_a_fused_layer_in_half_precision_has_the_gradient_of_the_plain_one_rounded_once(fused, plain, shapes):
    """Its output is the sampler's, to the bit."""
    torch.manual_seed(0)
    inputs, grad = [torch.randn(shape, dtype=BF16) for shape in shapes], torch.randn(shapes[0], dtype=BF16)
    out, half = gradients(fused, inputs, grad)
    _, exact = gradients(plain, [x.double() for x in inputs], grad.double())
    if len(shapes) > 1:
        assert torch.equal(out, plain(*inputs))
    for one, other in zip(half, exact, strict=True):
        assert one.dtype == BF16
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-5)


def test_logits_of_half_precision_products_are_not_rounded_to_half_precision(tiny, tmp_path):
    base = toy_base(tmp_path / "toy", "bfloat16")
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(BF16)
    exact = hidden.double() @ base.model.lm_head.weight.double().t()
    head = backbone_of(base).head
    assert head is not None
    for logits in (head.logits(hidden), fp32_product(hidden, base.head_weight)):
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=2**-16, atol=2**-16)
    engine = LocalEngine(base, Lanes(base))
    assert engine.decoder.frame.head.weight is base.head_weight is head.product_VH  # one copy for all
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    for dtype in (torch.float32, torch.float64):  # where products are not rounded, the output layer is not copied
        base = tiny("llama", dtype)
        assert base.head_weight.data_ptr() == base.model.lm_head.weight.data_ptr()


@pytest.fixture
def no_memory_of_devices():
    arithmetic.multiplies_into_fp32.cache_clear()
    yield
    arithmetic.multiplies_into_fp32.cache_clear()


def test_a_gpu_multiplies_bf16_into_fp32(no_memory_of_devices):
    """On torch's meta device, with the backward pass."""
    weight = torch.empty(50, 8, dtype=BF16, device="meta")
    hidden = torch.empty(4, 8, dtype=BF16, device="meta", requires_grad=True)
    assert arithmetic.multiplies_into_fp32("meta")
    assert Head(weight, product_VH=weight).logits(hidden).dtype == torch.float32
    chosen_N, _ = Head(weight).logprobs(hidden, torch.zeros(4, dtype=torch.long, device="meta"), entropy=True)
    chosen_N.sum().backward()
    assert hidden.grad.dtype == BF16


def scripted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function as a decode step runs it on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@pytest.mark.parametrize("pack", [False, pytest.param(True, marks=needs_packing)])
def test_a_device_that_rounds_its_sums_gives_what_it_rounded_off_in_a_second_product(pack, no_memory_of_devices):
    assert not arithmetic.multiplies_into_fp32("cpu")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, 96, dtype=BF16), torch.randn(110, 96, dtype=BF16), torch.randn(110, dtype=BF16)
    exact = F.linear(x.double(), weight.double(), bias.double())
    weight = packed(weight) if pack else weight
    assert weight.is_mkldnn == pack
    for product_of in (fp32_product, scripted(fp32_product)):
        logits = product_of(x, weight, bias)
        assert logits.dtype == torch.float32
        assert float((logits - exact).abs().max()) < 2**-16 * float(exact.abs().max())
    assert torch.equal(Head(weight, bias_V=bias).logits(x), logits)


@needs_packing
@pytest.mark.parametrize(("runs", "dtype"), [(1, BF16), (1, torch.float32), (3, torch.float32)], ids=str)
def test_a_larger_model_decodes_from_packed_weights_what_the_update_sees(tiny, runs, dtype):
    """The adapter is merged for one run in fp32, and a product of its own otherwise."""
    base = tiny("qwen3", dtype)
    base.is_small = False
    lanes = Lanes(base)
    adapters = [trained(lanes, seed, rank=2 + seed, size=0.05) for seed in range(runs)]
    engine = LocalEngine(base, lanes)
    blocks = engine.decoder.blocks([adapter.frozen() for adapter in adapters])
    assert all(part.weight.is_mkldnn for block in blocks for part in block[:4])
    assert {block.qkv.a is None for block in blocks} == {runs == 1 and dtype == torch.float32}
    assert engine.decoder.frame.head.weight.is_mkldnn
    asked = [SampleRequest(ref(lane), tuple(range(3, 9)), 4, 16, 1.0, ("packed", lane)) for lane in range(runs)]
    gaps = trainer_minus_sampler(engine, asked, adapters)
    if dtype == BF16:
        assert float(gaps.square().mean()) / 2 < 1e-4  # a rounding of 4e-3 in both; processors differ by a third
    else:
        assert float(gaps.abs().max()) < 1e-4


def sees_what_follows(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def scaled_otherwise(q, k, v, scale):
    return causal_attention(q, k, v, 1.3 * (scale or q.shape[-1] ** -0.5))


def right_in_one_sequence_alone(q, k, v, scale):
    return torch.cat([causal_attention(q[:1], k[:1], v[:1], scale), scaled_otherwise(q[1:], k[1:], v[1:], scale)])


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_packing_that_computes_something_else_is_refused(tiny, dtype, monkeypatch):
    assert backbone_of(tiny("qwen3", dtype)).packs
    for fault in (sees_what_follows, scaled_otherwise, right_in_one_sequence_alone):
        monkeypatch.setattr(packing, "attention", fault)
        backbone = backbone_of(tiny("qwen3", dtype))
        assert not backbone.packs
        assert "does not take packed sequences" in backbone.notes[0]


def rotated_otherwise(decoder: DenseDecoder) -> None:
    """Rotation base 4e3 for 1e4."""
    right = decoder.rotary.inv_freq.clone()
    decoder.rotary.inv_freq.pow_(0.9)
    decoder.frame = decoder.frame._replace(cos=decoder.frame.cos[:0])
    decoder.frame_of(256)
    decoder.rotary.inv_freq.copy_(right)


def attention_scaled(decoder: DenseDecoder) -> None:
    decoder.frame = decoder.frame._replace(scaling=1.1 * decoder.frame.scaling)


def gate_and_up_swapped_in_one_layer(decoder: DenseDecoder) -> None:
    layer = decoder.layers[-1]
    layer.gate_up._joined = torch.cat(layer.gate_up.weight.chunk(2)[::-1])


FAULTS = [rotated_otherwise, attention_scaled, gate_and_up_swapped_in_one_layer]


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("family", [*DENSE, "tiny-reasoner"])
def test_a_sound_decoder_is_admitted_and_one_with_a_fault_is_refused(tiny, family, dtype):
    is_bundled = family == "tiny-reasoner"
    name = str(dtype).removeprefix("torch.")
    base = load_base(family, devices="cpu", dtype=name) if is_bundled else tiny(family, dtype)
    assert is_bundled or dense_decoder(tiny(family, dtype, 0.0), CPU_DECODING) is not None  # weights of a fresh model
    assert reproduces(sound := DenseDecoder(base, CPU_DECODING), base)
    for fault in FAULTS:
        decoder = DenseDecoder(base, CPU_DECODING)
        fault(decoder)
        assert not reproduces(decoder, base), fault
    base.model.lm_head.register_forward_hook(lambda layer, given, made: made * 1.02)
    assert not reproduces(sound, base), "another output layer"


class Deterministic(TorchDispatchMode):
    """Refuses what ``use_deterministic_algorithms`` refuses on CUDA, and sums into repeated places."""

    REFUSED = ("aten.cumsum.default", "aten.histc.default", "aten.bincount.default", "aten.median.dim",
               "aten.put_.default", "aten.kthvalue.default")  # fmt: skip
    ADDING = ("aten.index_add.default", "aten.index_add_.default", "aten.scatter_add.default",
              "aten.scatter_add_.default", "aten.embedding_dense_backward.default",
              "aten._unsafe_index_put.default", "aten.index_put_.default", "aten.index_put.default")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = str(func)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if name in self.REFUSED and tensors[0].is_floating_point():
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if name in self.ADDING and tensors[0].is_floating_point() and self._repeats(name, args):
            raise RuntimeError(f"{name} adds into one place in any order")
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _repeats(name: str, args) -> bool:
        if "index_put" in name:
            if len(args) < 4 or not args[3]:
                return False
            index = torch.stack([part.flatten() for part in args[1] if part is not None], 1)
            return len(index.unique(dim=0)) < len(index)
        if "scatter" in name:
            dim, index = args[1], args[2]
            return any(len(row.unique()) < len(row) for row in index.movedim(dim, -1).flatten(0, -2))
        index = args[2] if "index_add" in name else args[1]
        return len(index.unique()) < index.numel()


@pytest.fixture
def like_a_gpu(monkeypatch):
    for module in (dense, grid):
        monkeypatch.setattr(module, "needs_exact_sums", lambda device: True)


@pytest.mark.parametrize(("family", "truncated"), [("qwen3", True), ("qwen3_moe", True), ("gemma2", False)])
def test_sampling_and_update_run_no_kernel_that_a_deterministic_gpu_refuses(tiny, family, truncated, like_a_gpu):
    base = tiny(family, torch.float32)
    lanes = Lanes(base)
    adapter, cut = trained(lanes, 0, size=0.05), {"top_k": 9, "top_p": 0.9} if truncated else {}
    asked = [SampleRequest(ref(0), tuple(range(3, 3 + n)), 2, 6, 0.9, ("any", n), **cut) for n in (4, 7)]
    with Deterministic() as watch:
        for dense_path in {True, False} if family in DENSE else {False}:
            groups = sample(LocalEngine(base, lanes, dense=dense_path, settings=AS_ON_A_GPU), asked, [adapter])
            sampled = watch.operations
            samples = [
                Sample.single_turn(
                    r.prompt_ids, c.token_ids, c.logprobs_T, np.linspace(-1, 1, len(c)), support=c.support
                )
                for r, group in zip(asked, groups, strict=True)
                for c in group
            ]
            for packs in {backbone_of(base).packs, False}:
                backbone_of(base).packs = packs
                update(lanes, adapter, samples, temperature=0.9, kl_coef=0.1, entropy_coef=0.1)
            base.backbone = None
            assert watch.operations > sampled + 100
