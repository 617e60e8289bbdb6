"""The self-check: it passes on what is right, and each check fails on the fault that it is there for, alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from retrain.cli import app
from retrain.engines.dense import DenseDecoder
from retrain.policy import budget
from retrain.policy.local import LocalPolicy
from retrain.selfcheck import machine, memory, speed
from retrain.selfcheck.examine import CHECKS, examine
from retrain.selfcheck.results import Result, Status, judged
from retrain.selfcheck.source import Source
from retrain.selfcheck.subject import Rates, Subject

TOML = """\
[model]
model = "{model}"
lora_rank = 4
[training]
max_tokens = 24
[inference]
dtype = "{dtype}"
"""
BY_NAME = {check.name: check for check in CHECKS}
ELSEWHERE = ("resume", "speed")
"""A new process, and clocks: in tests of their own."""


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def opened(model, tmp_path_factory, dtype: str, stack: ExitStack) -> Subject:
    file = tmp_path_factory.mktemp("doctor") / "toy.toml"
    file.write_text(TOML.format(model=model, dtype=dtype))
    return stack.enter_context(Subject.open(Source.of(file, "cpu")))


@pytest.fixture(scope="module")
def subject(model, tmp_path_factory):
    with ExitStack() as stack:
        yield opened(model, tmp_path_factory, "float32", stack)


def statuses(subject: Subject) -> dict[str, Status]:
    """How the checks end that neither start a process nor read a clock."""
    checks = [check for check in CHECKS if check.name not in ELSEWHERE]
    return {finding.name: finding.result.status for finding in examine(subject, checks)}


def failed(subject: Subject) -> set[str]:
    return {name for name, status in statuses(subject).items() if status is Status.FAIL}


# -- it passes ------------------------------------------------------------------------------------------------------


def test_the_bundled_model_passes_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "judged", without_limits("decode_share", "update_share"))
    done = run("doctor", "--device", "cpu", "--json", tmp_path / "found.json")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("tiny-reasoner, its own weights: 3 layers, ")
    assert [line.split()[0] for line in lines[1:-1]] == [
        "SKIP" if c.name == "graph = eager" else "PASS" for c in CHECKS
    ]
    assert "none failed, 1 skipped" in lines[-1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [check["name"] for check in found["checks"]] == [check.name for check in CHECKS]
    assert found["failed"] == []
    assert all(check["seconds"] >= 0 for check in found["checks"])
    assert {"torch", "transformers"} <= found["packages"].keys()
    assert not {"argv", "executable"} & found["machine"].keys()
    again = run("doctor", "--device", "nowhere", "--json", tmp_path / "found.json")  # ours: may be written again
    assert (again.exit_code, "--device 'nowhere' is none of" in again.stderr) == (2, True)


def without_limits(*keys: str) -> Callable[..., Result]:
    """``judged`` for numbers that depend on what else the machine does."""
    return lambda kinds, values, *words, **facts: judged(
        kinds, {key: value for key, value in values.items() if key not in keys}, *words, **facts
    )


def test_a_toy_model_passes_in_bfloat16(model, tmp_path_factory):
    with ExitStack() as stack:
        assert failed(opened(model, tmp_path_factory, "bfloat16", stack)) == set()


def test_a_toy_model_passes_in_float32(subject):
    found = statuses(subject)
    assert {name for name, status in found.items() if status is not Status.PASS} == {"graph = eager"}


# -- each check fails on its fault, and no other does ----------------------------------------------------------------


def a_perturbed_engine(subject: Subject, monkeypatch) -> None:
    """The engine's own copy of a weight is not the trainer's."""
    down = subject.engine.decoder.layers[0].down
    monkeypatch.setattr(down, "weight", down.weight * 1.01)


def mixed_up_lanes(subject: Subject, monkeypatch) -> None:
    """In a batch of more than two the lanes have each other's adapters."""
    blocks = DenseDecoder.blocks
    monkeypatch.setattr(
        DenseDecoder, "blocks", lambda own, given: blocks(own, given[::-1] if len(given) > 2 else given)
    )


def a_scaled_gradient(subject: Subject, monkeypatch) -> None:
    after_update(monkeypatch, lambda gradient: gradient.mul_(1.01))


def a_turned_gradient(subject: Subject, monkeypatch) -> None:
    after_update(monkeypatch, lambda gradient: gradient[: len(gradient) // 9].neg_())


def after_update(monkeypatch, change: Callable[[torch.Tensor], object]) -> None:
    """The gradient that every update leaves, changed."""
    update = LocalPolicy.update

    def changed(policy: LocalPolicy, *given: Any) -> dict[str, Any]:
        found = update(policy, *given)
        change(policy.adapter.flat.grad)
        return found

    monkeypatch.setattr(LocalPolicy, "update", changed)


def no_bandwidth(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "measure", lambda subject: Rates(0.0, 1e12))


def a_gpu_that_torch_cannot_use(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(machine, "gpu_name", lambda: "NVIDIA H100")


def no_dense_decoder(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(subject.engine, "decoder", None)


def a_cache_planned_too_small(subject: Subject, monkeypatch) -> None:
    monkeypatch.setattr(memory, "cache_bytes", lambda base: 10)


def activations_planned_too_small(subject: Subject, monkeypatch) -> None:
    kept = memory.kept_bytes
    monkeypatch.setattr(memory, "kept_bytes", lambda base: kept(base) // 2)


def shortages_that_nobody_knows(subject: Subject, monkeypatch) -> None:
    for module in (budget, "retrain.engines.local", "retrain.policy.update"):
        name = f"{module}.is_out_of_memory" if isinstance(module, str) else "retrain.policy.budget.is_out_of_memory"
        monkeypatch.setattr(name, lambda error: False)


FAULTS = [
    (a_gpu_that_torch_cannot_use, "device and build"),
    (no_bandwidth, "rates"),
    (no_dense_decoder, "paths"),
    (a_perturbed_engine, "sampler = trainer"),
    (mixed_up_lanes, "lane of 5 = alone"),
    (a_scaled_gradient, "gradient"),
    (a_turned_gradient, "gradient"),
    (a_cache_planned_too_small, "memory"),
    (activations_planned_too_small, "memory"),
    (shortages_that_nobody_knows, "out of memory"),
]


@pytest.mark.parametrize(("fault", "name"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_fails_its_check_alone(subject, monkeypatch, fault, name):
    fault(subject, monkeypatch)
    assert failed(subject) == {name}
