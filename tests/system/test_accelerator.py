"""Golden scenarios on a device that is not the CPU but has its numbers (tests/programs/accelerator.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden.observe import Excluded, observed
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
SCENARIOS = [
    "advantages", "token_credit", "uncertainties", "sepa_schedules", "losses", "normalizers", "corrections",
    "rejections", "kl_and_optimizer", "critic", "several_updates", "rollouts_ahead", "annealed", "distillation",
    "truncated_sampling", "tools", "interrupted_single_run", "adapters", "quantised",
]  # fmt: skip
"""All algorithms, lanes, evaluation, saving and continuing, squeeze, export and the local engine; in one process."""
MOST_READS = 480
"""Host reads of ``advantages``: two steps of five lanes with two evaluations and a save."""

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the device needs torch 2.13: its interface is private to torch"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accelerator")
    for part in ("world", "cpu", "device"):
        (folder / part).mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-W", "ignore"]
    subprocess.run([*python, "tests/golden/world.py", folder / "world"], cwd=ROOT, check=True)
    arguments = [*python, "-m", "tests.programs.accelerator", folder / "world", folder, *SCENARIOS]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return folder, [json.loads(line) for line in done.stdout.splitlines()]


def numbers(folder: Path) -> dict[str, object]:
    """What the scenario left in its files of rows, by place: numbers and texts that do not depend on time."""
    values = observed(folder, Excluded.read())
    # The length of a row depends on the digits of its numbers.
    names = [name for name in values if ".jsonl:" in name and ".lines[" not in name and not name.endswith("sha256")]
    return {name: values[name] for name in names}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_device_computes_what_the_cpu_computes(results, scenario):
    folder, _ = results
    cpu, device = (numbers(folder / kind / scenario) for kind in ("cpu", "device"))
    assert len(cpu) > 100
    assert cpu.keys() == device.keys()
    for name, value in cpu.items():
        if not isinstance(value, float):
            assert device[name] == value, name
        else:
            assert device[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    paths = sorted((folder / "cpu" / scenario).rglob("adapter_model.safetensors"))
    assert paths
    for path in paths:
        other = load_file(folder / "device" / path.relative_to(folder / "cpu"))
        for name, tensor in load_file(path).items():
            assert torch.allclose(other[name], tensor, rtol=0, atol=TOLERANCE), (path, name)


def test_the_program_waits_for_the_device_as_seldom_as_before(results):
    """On a GPU each read of a number waits for everything that was queued before it."""
    _, lines = results
    reads = {line["scenario"]: line["host_reads"] for line in lines}
    assert reads["advantages"] <= MOST_READS


@pytest.mark.parametrize(("expression", "refusal"), [
    ("torch.zeros(3, device=device) + torch.ones(3)", "a tensor of the CPU, (3,), meets the device"),
    ("torch.zeros(3, device=device)[torch.tensor([0])]", "a tensor of the CPU, (1,), meets the device"),
    ("torch.rand(3, device=device, generator=torch.Generator())", "a generator of the CPU draws on the device"),
    ("torch.zeros(3, device=device).numpy()", ".numpy() is not supported"),
])  # fmt: skip
def test_the_device_refuses_what_a_gpu_refuses(expression, refusal):
    program = (
        "import torch, tests.programs.accelerator as accelerator\n"
        f"device = accelerator.use_device()\n{expression}\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert refusal in done.stderr.splitlines()[-1]
