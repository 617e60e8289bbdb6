import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    before = {*sys.modules}
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def models(benchmark, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    benchmark("shared").model_directory(root, "tiny")
    return root


@pytest.fixture
def script(tmp_path):

    def run(name: str, *arguments: object) -> tuple[str, dict]:
        words = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", *map(str, arguments), "--json", tmp_path / "out"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, json.loads((tmp_path / "out").read_text())

    return run


# -- learning ---------------------------------------------------------------------------------------------------------


def test_maxrl_digits_prints_its_tables_and_orders_the_methods(script):
    out, found = script("maxrl_digits")
    assert "sgd: held-out pass@1" in out
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["maxrl", "grpo", "rloo", "cross_entropy"]
    assert all(row["before_training"] == pytest.approx(1 / 200, rel=0.2) for row in rows.values())
    assert rows["rloo"]["pass_at_1"] < rows["maxrl"]["pass_at_1"] < rows["cross_entropy"]["pass_at_1"] + 0.02


# -- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "says"), [
    ("step", ["--only", "ours,limit"], "the limit (bar ≤ 1.15)"),
    ("turns", ["--threads=1"], "read again"),
    ("update", ["--only", "plain,rounded"], "| limit in bfloat16 |"),
    ("ui", [], "the server's memory"),
])  # fmt: skip
def test_a_benchmark_prints_its_table_after_equal_work(script, models, name, options, says):
    out, found = script(name, *options, "--models", models)
    assert says in out
    if name == "step":
        steps = found["settings"]["tinyx8"]
        assert {m["tokens"] for side in ("ours", "limit") for m in steps[side]} == {8 * 8 * 8}


def test_the_limit_is_the_same_model_and_the_same_gradient(benchmark, models):
    """Log-probabilities equal transformers', the adapter's gradient that of autograd through it."""
    from transformers import AutoModelForCausalLM

    limit, shared = benchmark("limit"), benchmark("shared")
    setting = shared.Setting("tiny", 6, prompts=2, samples=3, prompt_tokens=5)
    side = limit.Limit(shared.model_directory(models, "tiny"), shared.SHAPES["tiny"], torch.float32)
    side.flat.data += 0.05 * torch.randn(side.flat.shape, generator=torch.Generator().manual_seed(1))  # B is zero
    tokens, logprobs = side.sample(setting, seed=3)
    assert logprobs.shape == (6, 6)

    model = AutoModelForCausalLM.from_pretrained(shared.model_directory(models, "tiny"), attn_implementation="eager")
    weights = {}
    for i, layer in enumerate(side.layers):
        for part, names in limit.PARTS.items():
            product = layer[part]
            parts = (product.a.split(limit.RANK), product.b.split(product.sizes), product.frozen.split(product.sizes))
            for name, a, b, w in zip(names, *parts, strict=True):
                weights[f"model.layers.{i}.{name}.weight"] = w + limit.ALPHA / limit.RANK * b @ a
    logits = torch.func.functional_call(model, weights, (tokens[:, :-1],)).logits[:, -6:]
    fresh = logits.log_softmax(-1).gather(-1, tokens[:, -6:, None]).squeeze(-1)
    torch.testing.assert_close(fresh, logprobs, atol=1e-5, rtol=1e-5)

    advantage = torch.tensor(shared.advantages(setting)) / logprobs.numel()
    loss = -((fresh - logprobs).exp() * advantage[:, None]).sum()
    views = [view for layer in side.layers for p in layer.values() for view in (p.a, p.b)]
    expected = torch.cat([grad.reshape(-1) for grad in torch.autograd.grad(loss, views)])
    pieces = zip(tokens.split(3), logprobs.split(3), advantage.split(3), strict=True)
    gradient, worst = side._gradient(list(pieces), setting)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert worst < 1e-4


def test_the_race_s_factors_are_those_of_its_parts(benchmark):
    race = benchmark("race")
    differences = np.array([0.05, 0.07, 0.06, 0.08, 0.04, 0.06, 0.05, 0.07, 0.06, 0.05])
    mine, trl = race.Side(differences, seconds=3.0), race.Side(2 * differences - 0.059, seconds=12.0)
    assert trl.spread == pytest.approx(2 * mine.spread)
    assert mine.verdict.startswith("higher, p = 0.00")
    wanted = 2 * mine.spread  # 2 pair spreads of ours, 1 of TRL's
    seeds = mine.seeds(wanted), trl.seeds(wanted)
    parts = race.factors(mine, trl, 4.0, wanted, seeds)
    assert (parts["a run"], parts["lanes"]) == (3.0, pytest.approx(4 / 3))
    assert parts["pairs"] == seeds[1] / seeds[0] > 1.5
    assert parts["early stopping"] >= 1
    assert parts["altogether"] == pytest.approx(
        parts["a run"] * parts["lanes"] * parts["pairs"] * parts["early stopping"]
    )
    text = race.report("easy", mine, trl, 4.0)
    assert text.startswith("easy question: 2e-3 or 0.001?\n  retrain  +5.9 points")
    first, second = (float(part) for part in re.findall(r"TRL takes ([\d.]+) times", text))
    assert first <= second
    text = race.report("hard", mine, race.Side(differences - differences.mean(), seconds=12.0), 4.0)
    assert "TRL's difference: no number of seeds of ours, no number of seeds of TRL's" in text
