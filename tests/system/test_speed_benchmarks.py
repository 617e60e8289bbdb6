"""The speed benchmarks in their smallest form: equal work on all sides, and a limit that computes the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[2]
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


def test_the_limit_is_the_same_model_and_the_same_gradient(models):
    """Log-probabilities equal transformers', the adapter's gradient that of autograd through it."""
    import limit
    import workload
    from transformers import AutoModelForCausalLM

    setting = workload.Setting("tiny", 6, prompts=2, samples=3, prompt_tokens=5)
    side = limit.Limit(workload.model_directory(models, "tiny"), workload.SHAPES["tiny"], torch.float32)
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
    pieces = zip(tokens.split(3), logprobs.split(3), advantage.split(3), strict=True)
    found, worst = side._gradient(list(pieces), setting)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert worst < 1e-4


class InProcess:
    """A side of ``campaign.py`` without a process of its own."""

    def __init__(self, name, command, setting, *, models, threads, device="cpu", runs=1):
        import ours
        import workload

        arguments = list(map(str, command))
        first = int(arguments[arguments.index("--first") + 1]) if "--first" in arguments else 0
        self.name, self.setting, self.steps = name, setting, []
        self.context = ours.cohort(setting, models, ours.FIVE[first : first + runs], device)
        self.cohort = self.context.__enter__()
        self.facts = {
            "imported_mib": workload.peak_mib(),
            "base_mib": 1.0,
            "run_mib": ours.run_mib(self.cohort, setting),
        }

    def step(self, keep):
        import ours

        measured = ours.step(self.cohort)
        if keep:
            self.steps.append(measured)

    def close(self):
        self.context.__exit__(None, None, None)


def test_five_lanes_are_compared_with_five_runs_on_equal_tokens(models, tmp_path, monkeypatch, capsys):
    import campaign

    monkeypatch.setattr(campaign, "Side", InProcess)
    file = tmp_path / "campaign.json"
    monkeypatch.setattr(sys, "argv", ["campaign.py", "--quick", "--models", str(models), "--json", str(file)])
    campaign.main()
    assert "tinyx8: decode" in capsys.readouterr().out
    found = json.loads(file.read_text())["settings"]["tinyx8"]
    tokens = {name: steps[0]["tokens"] for name, steps in found["steps"].items()}
    assert tokens == {"five lanes": 5 * 512} | {f"alone {i}": 512 for i in range(5)}
    ratio = found["alone"]["sampling_s"] / found["lanes"]["sampling_s"]
    assert found["decode"] == pytest.approx(ratio)


def test_turns_are_measured_in_three_ways(models, tmp_path, monkeypatch, capsys):
    import turns

    file = tmp_path / "turns.json"
    monkeypatch.setattr(sys, "argv", ["turns.py", "--quick", "--threads=1", f"--models={models}", f"--json={file}"])
    turns.main()
    assert "read again" in capsys.readouterr().out
    (own,) = json.loads(file.read_text())["shapes"].values()
    assert set(own) == {"one", "kept", "again"}
    assert all(seconds > 0 for seconds in own.values())
    found = {"shapes": {"a": {"one": 1.0, "kept": 1.19, "again": 2.0}}}
    assert "met" in turns.report(found)
    assert "missed" in turns.report({"shapes": {"a": {"one": 1.0, "kept": 1.21, "again": 2.0}}})


def test_decoding_is_set_against_roofline_and_prediction(models, tmp_path, monkeypatch, capsys):
    import decode

    file, plots = tmp_path / "decode.json", tmp_path / "plots"
    arguments = ["--quick", "--threads", "1", "--models", models, "--json", file, "--plots", plots]
    monkeypatch.setattr(sys, "argv", ["decode.py", *map(str, arguments)])
    decode.main()
    assert "share of the roofline" in capsys.readouterr().out
    points = json.loads(file.read_text())["grid"]
    assert all(p["predicted_s"] >= p["roofline_s"] > 0 and p["tokens_per_s"] > 0 for p in points)
    for axis in ("lanes", "new-tokens", "group", "rank"):
        svg = ElementTree.parse(plots / f"decode-{axis}.svg").getroot()
        assert len(svg.findall(".//{*}circle[@class='measured']")) == 3  # two points and the legend


def test_the_roofline_counts_what_a_step_reads_and_computes(models):
    """By hand for one layer: every weight once, every row's two operations per weight."""
    import decode
    import workload

    shape = workload.Shape(hidden=8, layers=1, vocab=16, inner=12, heads=2, kv_heads=1, head_dim=4)
    case = decode.Case(lanes=3, group=1, prompts=2, new_tokens=4, prompt_tokens=8, rank=2)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 12 + 8 * 16
    adapter = 2 * (16 + 2 * 12 + 16 + 3 * 20)
    read = 4 * (weights + 3 * adapter + 6 * 10 * 2 * 4)
    operations = 6 * 2 * (weights + adapter + 2 * 8 * 10)
    assert decode.roofline(shape, case, decode.Machine(1.0, 1e9, 4)) == pytest.approx(read)
    assert decode.roofline(shape, case, decode.Machine(1e9, 1.0, 4)) == pytest.approx(operations)


def test_an_update_is_set_beside_the_limit(models, tmp_path):
    file = tmp_path / "update.json"
    out = script("update.py", "--quick", "--only", "plain,ragged", "--models", models, "--json", file)
    assert "| ours to limit |" in out
    found = json.loads(file.read_text())["cpu_s"]
    assert {name: set(sides) for name, sides in found.items()} == {"plain": {"ours", "limit"}, "ragged": {"ours"}}
    assert all(seconds > 0 for sides in found.values() for times in sides.values() for seconds in times)


def test_overhead_is_read_from_a_real_run(models):
    out = script("overhead.py", "--quick", "--threads", 1, "--models", models)
    assert "| sampling and update |" in out
    assert "% is not sampling or update (bar ≤ 5 %)" in out


def test_overhead_counts_what_is_outside_sampling_and_update(models):
    import overhead

    def step(at):
        spans = [("rollout", at, at + 5), ("credit", at + 5, at + 6), ("update", at + 6, at + 9)]
        return [{"name": n, "wall_start": a, "wall_end": b, "duration": b - a} for n, a, b in spans]

    steps = [step(0.0), step(10.0), step(20.0)]
    record = {"name": "record", "wall_start": 19.2, "wall_end": 19.7, "duration": 0.5}
    steps[2].insert(0, record)  # of step 1, told by the next line
    assert overhead.shares(steps) == [{"total": 10.0, "model": 8.0, "other": 2.0, "credit": 1.0, "record": 0.5}]


def test_records_cost_a_small_part_of_a_step(models, tmp_path):
    """In a step of a few milliseconds they are a larger part than the bar; what they cost at all is bounded here."""
    out = script("records.py", "--quick", "--models", models, "--json", tmp_path / "records.json")
    assert "records take" in out
    steps = json.loads((tmp_path / "records.json").read_text())["steps"]
    assert len(steps) == 3
    assert all(0 < row["making"] + row["writing"] < row["step"] for row in steps)
    assert min(row["making"] + row["writing"] for row in steps) < 0.1
