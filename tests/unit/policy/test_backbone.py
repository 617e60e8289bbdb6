from itertools import accumulate

import numpy as np
import pytest
import torch
from helpers.lanes import drawn, fresh_scores, in_turns, trained, update
from torch.autograd import gradcheck
from torch.nn import functional as F

from retrain.policy import head as heads
from retrain.policy.arithmetic import adapted_linear, rms_norm, swiglu
from retrain.policy.backbone import backbone_of, collate, token_logprobs
from retrain.policy.head import Head, Supports
from retrain.policy.lora import Lanes
from retrain.policy.packing import packed_layout, split_microbatches
from retrain.rng import generator
from retrain.types import Sample

FAMILIES = [
    "qwen3", "qwen3_moe", "tied llama", "mistral", "windowed mistral", "gemma2", "granite", "cohere", "phi", "phi3",
    "gpt_neox", "opt", "bloom", "mamba",
]  # fmt: skip
NOT_PACKED = {"bloom", "mamba"}
IN_FP32 = {"bloom", "mamba"}
"""Models that take their softmax or logits in fp32 whatever their own precision."""


def ragged() -> list[Sample]:
    """Three groups of 3, 1 and 2 completions, all lengths different."""
    noise, samples = generator("ragged"), []
    for width, lengths in ((4, (5, 1, 8)), (1, (3,)), (6, (7, 2))):
        prompt = tuple(int(t) for t in noise.integers(3, 60, width))
        for length in lengths:
            ids = [int(t) for t in noise.integers(3, 60, length)]
            ones = np.ones(length)
            samples.append(Sample.single_turn(prompt, ids, -ones, ones))
    return samples


def with_conversations() -> list[Sample]:
    """Some of the samples also as several turns after the same prompt."""
    return ragged() + [in_turns(s) for s in ragged() if len(drawn(s)) > 4]


def weights(sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Arbitrary factors of each log-probability and entropy, so that their gradients cannot cancel."""
    noise = generator("weights", *sample.token_ids.tolist())
    one, two = noise.normal(size=(2, len(drawn(sample))))
    return torch.from_numpy(one), torch.from_numpy(two)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_whole_logits_of_single_sequences(tiny, name):
    """Log-probabilities, entropies and their gradient; what was read between two actions is context and not scored."""
    base, samples, temperature = tiny(name, torch.float64), with_conversations(), 0.7
    lanes = Lanes(base, ["in_proj"] if "mamba" in name else "all-linear")  # its code reads the other layers' weights
    adapter = trained(lanes, 0, rank=2)
    tolerance = 1e-5 if name in IN_FP32 else 1e-9
    within: dict = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    expected = []
    for s in samples:
        chosen, entropy = fresh_scores(lanes, adapter, s, temperature)
        one, two = weights(s)
        ((one * chosen).sum() + (two * entropy).sum()).backward()
        expected.append((chosen.detach(), entropy.detach()))
    gradient = adapter.flat.grad.clone()
    adapter.flat.grad.zero_()
    backbone = backbone_of(base)
    assert backbone.head is not None
    assert backbone.packs == (name not in NOT_PACKED) == (not backbone.notes)
    for indices in split_microbatches(samples, 30, packed=backbone.packs):
        batch = collate([samples[i] for i in indices], base)
        with lanes.single(adapter):
            chosen_BT, entropy_BT = token_logprobs(base, batch, temperature, entropy=True)
            total = torch.zeros((), dtype=torch.float64)
            for row, i in enumerate(indices):
                one, two = weights(samples[i])
                total = total + (one * chosen_BT[row, : len(one)]).sum() + (two * entropy_BT[row, : len(one)]).sum()
            total.backward()
        for row, i in enumerate(indices):
            length = len(drawn(samples[i]))
            torch.testing.assert_close(chosen_BT[row, :length].detach(), expected[i][0], **within)
            torch.testing.assert_close(entropy_BT[row, :length].detach(), expected[i][1], **within)
            assert not chosen_BT[row, length:].any()
    error = float((adapter.flat.grad - gradient).norm() / gradient.norm())
    assert error < max(1e-6, 10 * tolerance)  # gradients add up in fp32


def test_an_output_layer_that_does_something_else_is_not_split_off(tiny):
    base = tiny("qwen3", torch.float64)
    plain = base.model.forward

    def shifted(*args, **options):
        out = plain(*args, **options)
        out.logits = out.logits + torch.sin(out.logits)
        return out

    base.model.forward = shifted
    backbone = backbone_of(base)
    assert backbone.head is None
    assert "cannot be split off" in backbone.notes[0]


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("head", [{}, {"bias_V": 1.0}, {"softcap": 1.5}, {"multiplier": 0.4}], ids=str)
def test_the_output_layer_in_chunks_passes_gradcheck(head, truncated, monkeypatch):
    torch.manual_seed(0)
    hidden_NH = torch.randn(40, 4, dtype=torch.float64, requires_grad=True)
    weight_VH, targets_N = torch.randn(7, 4, dtype=torch.float64), torch.randint(0, 7, (40,))
    options = dict(head)
    if "bias_V" in head:
        options["bias_V"] = torch.randn(7, dtype=torch.float64)
    monkeypatch.setitem(heads.CHUNK_BYTES, "cpu", 1)  # rows of 16
    made = Head(weight_VH, **options)
    assert made.chunk_rows() == 16
    kept = [sorted({int(target), 2, 5}) for target in targets_N]
    rows, tokens = torch.tensor([(row, token) for row, tokens in enumerate(kept) for token in tokens]).unbind(1)
    supports = Supports(rows, tokens, [0, *accumulate(map(len, kept))]) if truncated else None
    assert gradcheck(lambda h: made.logprobs(h, targets_N, 0.6, entropy=True, supports=supports), (hidden_NH,))
    assert gradcheck(lambda h: made.logprobs(h, targets_N, supports=supports)[0], (hidden_NH,))


def test_a_certain_distribution_has_entropy_zero_and_finite_gradients():
    hidden_NH = torch.tensor([[400.0, 0.0]], requires_grad=True)
    head = Head(torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, 0.0]]))
    chosen_N, entropy_N = head.logprobs(hidden_NH, torch.tensor([0]), entropy=True)
    (chosen_N.sum() + entropy_N.sum()).backward()
    assert chosen_N.item() == entropy_N.item() == 0
    assert torch.equal(hidden_NH.grad, torch.zeros(1, 2))


def test_fused_layers_pass_gradcheck_and_equal_the_plain_formulas():
    torch.manual_seed(0)
    linear = torch.nn.Linear(5, 7, dtype=torch.float64).requires_grad_(False)
    x, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 5), (7, 2)))
    torch.testing.assert_close(adapted_linear(linear, x, a, b, 1.5), linear(x) + 1.5 * x @ a.T @ b.T)
    assert gradcheck(lambda x, a, b: adapted_linear(linear, x, a, b, 1.5), (x, a, b))
    weight = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (5,), weight, 1e-5))
    assert gradcheck(lambda given: rms_norm(given, weight, 1e-5), (x,))
    gate, up = (x[0].detach().requires_grad_(), x[1].detach().requires_grad_())
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert gradcheck(swiglu, (gate, up))


def test_in_half_precision_the_adapter_is_not_merged_into_the_weight():
    """A ΔW below the weight's resolution must still count, and its gradient arrive in the masters' precision."""
    linear = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    torch.nn.init.ones_(linear.weight)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[1.0, -1.0, 1.0, -1.0]], requires_grad=True), torch.full((4, 1), 1e-4, requires_grad=True)
    out = adapted_linear(linear, x, a, b, 1.0)
    assert torch.allclose(out.float(), torch.full((1, 4), 4e-4), rtol=1e-2)
    out.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    assert torch.allclose(b.grad, torch.full((4, 1), 4.0))


def test_packing_holds_each_prompt_once_and_no_padding():
    samples = ragged()
    layout = packed_layout(samples, torch.device("cpu"))
    assert layout.ids_BL.shape == (1, (4 + 4 + 0 + 7) + (1 + 2) + (6 + 6 + 1))
    assert layout.positions_BL[0, :15].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, *range(4, 11)]
    assert len(layout.rows_M) == sum(len(drawn(s)) for s in samples)
    apart = packed_layout(samples, torch.device("cpu"), share=False)
    assert apart.ids_BL.shape[1] == sum(len(s) - 1 for s in samples)


def test_packed_micro_batches_stay_within_the_budget_and_keep_groups_together():
    samples = with_conversations()
    for budget in (1, 20, 30, 1000):
        batches = split_microbatches(samples, budget, packed=True)
        assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
        for batch in batches:
            size = packed_layout([samples[i] for i in batch], torch.device("cpu")).ids_BL.numel() + len(batch)
            assert size <= budget or len(batch) == 1
    assert len(split_microbatches(samples, 1000, packed=True)) == 1


def test_a_half_precision_base_trains_with_masters_in_full_precision(tiny):
    """bf16 products, fp32 log-probabilities, loss, gradient and weights; the same direction as in fp64."""
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        base, samples = tiny("qwen3", dtype), ragged()
        lanes = Lanes(base)
        adapter = trained(lanes, 0)
        metrics = update(lanes, adapter, samples, loss="reinforce", kl_coef=0.1, entropy_coef=0.1)
        with torch.no_grad(), lanes.single(adapter):
            logprobs_BT, _ = token_logprobs(base, collate(samples, base), 1.0)
        assert logprobs_BT.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
        assert adapter.flat.dtype == adapter.flat.grad.dtype == torch.float32
        assert np.isfinite(metrics["loss"])
        gradients.append(adapter.flat.grad.clone())
    half, exact = gradients
    assert torch.nn.functional.cosine_similarity(half, exact, dim=0) > 0.98
