import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.campaigns import campaign, run_cli, train
from helpers.lanes import assert_fresh, requests, rollout, sample, trained, update
from helpers.models import TINY_RUN, qwen3_directory
from safetensors.torch import load_file, save_file
from torch import nn

from retrain.adapters.provenance import provenance
from retrain.config import parse_dict
from retrain.engines.local import LocalEngine
from retrain.errors import ModelError
from retrain.files import read_json, read_jsonl, write_json
from retrain.models.layers import Architecture
from retrain.policy import quantized
from retrain.policy.base import BaseModel, find_model_files, load_weights
from retrain.policy.lora import Lanes
from retrain.policy.quantized import QuantizedLinear
from retrain.training.estimate import base_bytes

KINDS = ["int8", "nf4"]
SMOLLM2 = Path(os.environ.get("RETRAIN_REAL_MODEL", Path(__file__).parents[2] / "models" / "smollm2"))


def base_in(directory: Path, kind: str, dtype: str = "float32") -> BaseModel:
    config = parse_dict({"model": {"model": str(directory), "quantize": kind}})
    return load_weights(find_model_files(config), "cpu", dtype)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    return qwen3_directory(tmp_path_factory.mktemp("toy") / "model", ["12 + 34 = 46", "wait let me check"])


@pytest.fixture(scope="module", params=KINDS)
def quant(request, toy) -> BaseModel:
    return base_in(toy, request.param)


@pytest.fixture
def lanes(quant):
    yield Lanes(quant)
    quant.release()


def quantised_linear(weight: torch.Tensor, kind: str) -> QuantizedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return QuantizedLinear(linear, kind, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_int8_is_the_nearest_of_255_levels_of_its_row(dtype):
    weight = torch.tensor([[127.0, -63.25, 1.625], [0.0, 0.0, 0.0], [-2.54, 1.27, 0.01]], dtype=dtype)
    layer = quantised_linear(weight, "int8")
    assert layer.packed.tolist()[:2] == [[127, -63, 2], [0, 0, 0]]
    assert layer.packed.tolist()[2] in ([-127, 64, 0], [-127, 63, 0], [-127, 64, 1], [-127, 63, 1])
    step = layer.scale.double()
    assert bool(((layer.weight - weight).double().abs() <= 0.51 * step + 2**-8 * weight.abs()).all())
    assert layer.weight.dtype == dtype


@pytest.mark.parametrize("columns", [32, 64, 96, 24])
def test_blocks_go_over_the_ends_of_rows(columns):
    """Blocks are of the flat matrix; some kernels of the library take a block for a part of one row."""
    import bitsandbytes.functional as library

    weight = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 8)[:, None]
    layer = quantised_linear(weight, "nf4")
    code = library.get_4bit_type("nf4", device="cpu")
    blocks = weight.flatten().view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scale)[..., None].sub(code).abs().argmin(-1)
    torch.testing.assert_close(layer.weight, (code[nearest] * scale).view(8, columns))


def test_nf4_has_16_levels_by_the_largest_of_each_64_numbers():
    """Levels as QLoRA (arXiv 2305.14314, appendix E) lists them."""
    levels = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803,
              0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
    weight = torch.tensor([levels * 4, [3 * level + 1e-3 for level in levels[:-1]] * 4 + [0.0] * 4])
    layer = quantised_linear(weight, "nf4")
    assert layer.packed.nbytes == 64
    torch.testing.assert_close(layer.weight[0], weight[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(layer.weight[1], weight[1], atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_their_gradient_are_those_of_the_weight_and_nothing_is_kept(kind):
    torch.manual_seed(0)
    layer = QuantizedLinear(nn.Linear(64, 48).requires_grad_(False), kind, torch.device("cpu"))
    x, seen = torch.randn(2, 5, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        out = layer(x)
    assert not seen
    torch.testing.assert_close(out, x @ layer.weight.T + layer.bias)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.weight)


def test_what_is_quantised_and_what_it_weighs(quant, toy):
    plain, kind = base_in(toy, "none"), quant.quantized.kind
    modules = dict(quant.model.named_modules())
    linear = 0
    for name, module in plain.model.named_modules():
        within = isinstance(module, nn.Linear) and name != "lm_head"
        assert type(modules[name]) is (QuantizedLinear if within else type(module))
        linear += module.weight.numel() if within else 0
    layers = [module for module in modules.values() if isinstance(module, QuantizedLinear)]
    packed = sum(layer.packed.nbytes for layer in layers)
    assert packed == linear // (1 if kind == "int8" else 2)
    assert not any(layer.original for layer in layers)
    assert quant.quantized.bytes_before == plain.weight_bytes
    after = plain.weight_bytes - 4 * linear + packed + sum(layer.scale.nbytes for layer in layers)
    assert quant.weight_bytes == quant.quantized.bytes_after == after
    assert quant.fingerprint == f"{plain.fingerprint}+{kind}"
    shapes = Architecture.from_config(quant.model.config.to_dict())
    assert shapes is not None
    estimate = base_bytes(parse_dict({"model": {"quantize": kind}}), shapes, 4)
    assert estimate == pytest.approx(quant.weight_bytes, rel=0.03)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_logprobs_equal_a_fresh_forward(quant, lanes, dense, count):
    engine, adapters = LocalEngine(quant, lanes, dense=dense), [trained(lanes, i) for i in range(count)]
    assert engine.fast is dense
    asked = [request for lane in range(count) for request in requests(lane)]
    assert_fresh(quant, lanes, adapters, asked, sample(engine, asked, adapters))


def test_on_policy_ratio_is_one_and_every_split_gives_the_same_gradient(quant, lanes):
    samples = rollout(quant, lanes, trained(lanes, 0))
    gradients = []
    for tokens in (16384, 1, 40):
        adapter = trained(lanes, 0)
        metrics = update(lanes, adapter, samples, micro_batch_tokens=tokens)
        assert abs(metrics["val/ratio"] - 1) < 1e-5
        assert metrics["kl_sample_train_v2"] < 1e-6
        gradients.append(adapter.flat.grad.clone())
    assert gradients[0].norm() > 0
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_k3_tells_how_far_a_badly_quantised_base_is(toy, tmp_path):
    """One large column, which the norms before it switch off, leaves the other numbers of its rows few levels. k3 is
    unbiased for the divergence of the quantised base, from which the tokens are drawn; with the models exchanged it
    would be several times as large."""

    def with_large_column(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "layernorm" in name:
            tensor[0] = 0
        if "lm_head" in name:
            return 2 * tensor
        if "proj" in name:
            tensor *= 3
            if "o_proj" not in name and "down_proj" not in name:
                tensor[:, 0] = 160 * tensor.std()
        return tensor

    path = shutil.copytree(toy, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    changed = {name: with_large_column(name, tensor.clone()) for name, tensor in weights.items()}
    save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
    measured = base_in(path, "int8").quantized
    assert measured.kl > 0.3
    assert measured.k3 == pytest.approx(measured.kl, rel=0.3)


def test_answers_that_measure_the_difference_end_with_an_end_token(toy, tmp_path):
    """Every token ends an answer here: one token answers a question, and no text behind it is measured."""
    path = shutil.copytree(toy, tmp_path / "model")
    ends = list(range(read_json(path / "config.json")["vocab_size"]))
    for name in ("config.json", "generation_config.json"):
        write_json(path / name, read_json(path / name) | {"eos_token_id": ends})
    measured = base_in(path, "int8").quantized
    assert measured.tokens == len(quantized.QUESTIONS)
    assert f"over {measured.tokens} tokens of its own" in measured.summary


@pytest.mark.skipif(not (SMOLLM2 / "config.json").is_file(), reason="not made here: make real-model")
@pytest.mark.parametrize(("kind", "share", "least", "most"), [("int8", 0.42, 1e-3, 2e-2), ("nf4", 0.33, 0.1, 1.0)])
def test_a_real_model_samples_and_trains_with_the_same_weights(kind, share, least, most):
    base = base_in(SMOLLM2, kind)
    assert base.quantized is not None
    assert base.weight_bytes < share * base.quantized.bytes_before
    assert least < base.quantized.kl < most
    assert base.quantized.k3 == pytest.approx(base.quantized.kl, rel=0.5)
    lanes = Lanes(base)
    samples = rollout(base, lanes, trained(lanes, 0, size=1e-3), asked=requests(prompts=2, samples=2, max_tokens=8))
    metrics = update(lanes, trained(lanes, 0, size=1e-3), samples)
    assert abs(metrics["val/ratio"] - 1) < 1e-4
    assert metrics["kl_sample_train_v2"] < 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_a_cohort_equals_the_run_alone_and_says_what_it_trained_over(model, tmp_path, kind):
    path = campaign(tmp_path, model, steps=2, dtype="float64")
    for name, lanes in (("together", 4), ("alone", 1)):
        train(path, tmp_path / name, f"campaign.lanes={lanes}", f"model.quantize={kind}")
    for run in sorted((tmp_path / "together/runs").iterdir()):
        both = (run, tmp_path / "alone/runs" / run.name)
        texts = [[row["completion"] for row in read_jsonl(each / "emergence/generations.jsonl")] for each in both]
        assert texts[0] == texts[1]
        losses = [[row["loss"] for row in read_jsonl(each / "metrics.jsonl")] for each in both]
        np.testing.assert_allclose(*losses, atol=1e-9)
    facts = read_json(run / "config.json")["built"]["quantized"]
    assert facts["kind"] == kind
    assert 0 < facts["k3"] < 1
    assert f"k3 to the unquantised base {facts['k3']:.2g} nats per token" in (run / "run.log").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_more_steps_equal_a_run_that_had_them_from_the_start(model, tmp_path, kind):
    path = tmp_path / "run.toml"
    path.write_text(
        TINY_RUN.format(model=model)
        + 'save_every = 2\nmax_tokens = 6\n[optimizer]\nschedule = "constant"\n[squeeze]\nenabled = false\n'
    )
    for name, steps in (("a", 2), ("a", 4), ("b", 4)):
        train(path, tmp_path / name, f"model.quantize={kind}", f"training.max_steps={steps}")
    first, second = (tmp_path / name / "final/adapter_model.safetensors" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    source = provenance(tmp_path / "b/final")
    base, plain = source.load("cpu", "float32"), source.unquantised()
    assert base.quantized is not None
    assert not source.other_weights(base)
    assert not plain.other_weights(loaded := plain.load("cpu", "float32"))
    assert loaded.quantized is None


def test_files_that_are_quantised_already_are_refused_before_they_are_read(toy, tmp_path):
    other = shutil.copytree(toy, tmp_path / "model")
    config = read_json(other / "config.json") | {"quantization_config": {"quant_method": "gptq"}}
    write_json(other / "config.json", config)
    with pytest.raises(ModelError, match=r"quantised already \(gptq\)"):
        find_model_files(parse_dict({"model": {"model": str(other), "quantize": "int8"}}))


def test_without_the_package_check_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    path = tmp_path / "run.toml"
    path.write_text('[model]\nquantize = "nf4"\n')
    told = run_cli("check", path)
    assert told.exit_code == 2
    assert "pip install '.[quantize]'" in told.output
    assert "run.toml:2" in told.output
