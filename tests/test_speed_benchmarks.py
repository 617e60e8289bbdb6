"""The speed benchmarks in their smallest form: equal work on all sides, and a limit that computes the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The directory of random-weight models; the benchmarks' own modules can be imported."""
    sys.path.insert(0, str(BENCHMARKS))
    import workload

    root = tmp_path_factory.mktemp("models")
    workload.model_directory(root, "tiny")
    yield root
    sys.path.remove(str(BENCHMARKS))


def script(name: str, *arguments: object) -> str:
    """What the benchmark printed."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_step_is_compared_with_the_limit_on_equal_work(models, tmp_path):
    file = tmp_path / "step.json"
    out = script("step.py", "--quick", "--only", "ours,limit", "--models", models, "--json", file)
    assert "| tinyx8 | limit |" in out
    assert "the limit (bar ≤ 1.15)" in out
    steps = json.loads(file.read_text())["settings"]["tinyx8"]
    assert {m["tokens"] for side in ("ours", "limit") for m in steps[side]} == {8 * 8 * 8}
    assert all(m["sampling_s"] > 0 and m["update_s"] > 0 for side in steps.values() for m in side)


def test_a_side_that_is_not_there_is_refused(models):
    done = subprocess.run([sys.executable, BENCHMARKS / "step.py", "--only", "trl"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "trl needs --trl-python" in done.stderr


def test_the_limit_is_the_same_model_and_the_same_gradient(models):
    """Log-probabilities equal transformers', the adapter's gradient that of autograd through it."""
    import limit
    import workload
    from transformers import AutoModelForCausalLM

    setting = workload.Setting("tiny", 6, prompts=2, samples=3, prompt_tokens=5)
    side = limit.Limit(workload.model_directory(models, "tiny"), workload.SHAPES["tiny"], torch.float32, micro=4)
    side.flat.data += 0.05 * torch.randn(side.flat.shape, generator=torch.Generator().manual_seed(1))  # B is zero
    tokens, logprobs = side.sample(setting, seed=3)
    assert logprobs.shape == (6, 6)

    model = AutoModelForCausalLM.from_pretrained(workload.model_directory(models, "tiny"), attn_implementation="eager")
    weights = {}
    for i, layer in enumerate(side.layers):
        for part, names in limit.PARTS.items():
            product = layer[part]
            for name, a, b, w in zip(
                names,
                product.a.split(limit.RANK),
                product.b.split(product.sizes),
                product.frozen.split(product.sizes),
                strict=True,
            ):
                weights[f"model.layers.{i}.{name}.weight"] = w + limit.ALPHA / limit.RANK * b @ a
    logits = torch.func.functional_call(model, weights, (tokens[:, :-1],)).logits[:, -6:]
    fresh = logits.log_softmax(-1).gather(-1, tokens[:, -6:, None]).squeeze(-1)
    torch.testing.assert_close(fresh, logprobs, atol=1e-5, rtol=1e-5)

    advantage = torch.tensor(workload.advantages(setting)) / logprobs.numel()
    loss = -((fresh - logprobs).exp() * advantage[:, None]).sum()
    views = [view for layer in side.layers for p in layer.values() for view in (p.a, p.b)]
    expected = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, views)])
    pieces = zip(tokens.split(4), logprobs.split(4), advantage.split(4), strict=True)
    found, worst = side._gradient(list(pieces))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert worst < 1e-4
