import subprocess
import sys
from pathlib import Path

import pytest
from helpers.campaigns import campaign

from retrain.campaign.controller import execute
from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.files import read_json, read_jsonl
from retrain.records.observer import NullObserver

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def made(model, world) -> dict[str, Path]:
    """One step of two seeds, for each thing that may vary."""
    found = {}
    for vary in ("all", "init", "data", "sampling"):
        path = campaign(world, model, f"toy_{vary}", steps=1)
        sets = [f"campaign.vary={vary}", "campaign.seeds=[1,2]", "squeeze.enabled=false", "training.save_every=0"]
        sets += ["evaluation.problems=0", "training.eval_every=0"]
        plan = Plan.of(load(path, sets), world / vary)
        assert execute(plan, NullObserver()).exit_status == 0
        found[vary] = world / vary
    return found


def drawn(run: Path) -> tuple[list, list]:
    rows = [row for row in read_jsonl(run / "emergence/generations.jsonl") if row["step"] == 0]
    return [row["prompt"] for row in rows], [row["completion"] for row in rows]


@pytest.mark.parametrize(("vary", "other_init", "other_problems"), [
    ("all", True, True), ("init", True, False), ("data", False, True), ("sampling", False, False),
])  # fmt: skip
def test_seeds_differ_in_what_is_named_and_in_nothing_else(made, vary, other_init, other_problems):
    one, two = (made[vary] / "runs" / f"grpo+none_s{seed}" for seed in (1, 2))
    initial = [read_json(run / "config.json")["initial_adapter"] for run in (one, two)]
    assert (initial[0] != initial[1]) is other_init
    (problems, answers), (other, others) = drawn(one), drawn(two)
    assert (problems != other) is other_problems
    if not other_problems:  # an untrained adapter changes nothing: answers differ with the random numbers alone
        assert (answers != others) is (vary == "sampling")
    ends = [(run / "final/adapter_model.safetensors").read_bytes() for run in (one, two)]
    assert ends[0] != ends[1]


def test_the_script_reads_directories(made, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/noise.py")]
    done = subprocess.run([*command, *map(str, made.values())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["varies", "all", "init", "data", "sampling"]
    nothing = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert (nothing.returncode, "is no directory of a campaign" in nothing.stderr) == (2, True)
