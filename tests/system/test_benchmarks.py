"""The learning benchmark in its quick form: its tables, its file, and what it is known to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrain.files import read_json
from retrain.plugins import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "maxrl_digits.py"


@pytest.fixture(scope="module")
def digits():
    yield load_file(SCRIPT, "maxrl_digits")
    del sys.modules["maxrl_digits"]


def test_quick_run_prints_its_tables_and_orders_the_methods(tmp_path):
    file = tmp_path / "digits.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--json", file],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert "sgd: held-out pass@1" in done.stdout
    assert "maxrl - rloo" in done.stdout
    found = read_json(file)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["maxrl", "grpo", "rloo", "cross_entropy"]
    assert all(row["before_training"] == pytest.approx(1 / 200, rel=0.2) for row in rows.values())
    assert all(len(row["by_seed"]) == 2 and row["low"] <= row["pass_at_1"] <= row["high"] for row in rows.values())
    assert rows["rloo"]["pass_at_1"] < rows["maxrl"]["pass_at_1"] < rows["cross_entropy"]["pass_at_1"] + 0.02
    for difference in found["differences"]:
        a, b = rows[difference["better"]], rows[difference["than"]]
        assert difference["mean"] == pytest.approx(a["pass_at_1"] - b["pass_at_1"])


def test_a_run_depends_on_its_job_alone(digits):
    job = digits.Job("adam", "grpo", 8, 1e-3, seed=4, steps=20)
    first = digits.train(job)
    torch.rand(3)
    again = digits.train(job)
    assert (again.start, again.pass_at_1, again.by_digit) == (first.start, first.pass_at_1, first.by_digit)


def test_tuning_never_sees_the_held_out_images(digits):
    x, _, x_test, _ = digits.images(tuning=False)
    x_tuning, _, x_validation, _ = digits.images(tuning=True)
    assert len(x) + len(x_test) == 1797
    assert len(x_tuning) + len(x_validation) == len(x)
    training = {tuple(row) for row in x.tolist()}
    assert {tuple(row) for row in (*x_tuning.tolist(), *x_validation.tolist())} == training


@pytest.mark.parametrize("method", ["maxrl", "rloo"])
def test_the_step_climbs_the_right_objective(digits, method):
    """With many samples the gradient is that of log p (MaxRL) and of p (RLOO), p the probability of the right class."""
    start = torch.linspace(-1.0, 1.0, digits.CLASSES).repeat(3, 1)
    labels = torch.tensor([199, 150, 120])
    job = digits.Job("sgd", method, 200_000, 1.0, seed=0, steps=1)
    logits = start.clone().requires_grad_()
    digits.surrogate(logits.log_softmax(-1), labels, job, torch.Generator().manual_seed(0)).backward()
    exact = start.clone().requires_grad_()
    p = exact.softmax(-1).gather(1, labels[:, None])
    (-(p.log() if method == "maxrl" else p).mean()).backward()
    error = (logits.grad - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 0.05
