"""Two steps of training from the command line in environments of other libraries, where these are installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrain.files import read_jsonl

ROOT = Path(__file__).parents[3]
TOYS = ROOT / "tests" / "verifiers_toys"
SERVER = [sys.executable, str(ROOT / "tests" / "programs" / "toy_openenv.py"), "{port}"]
TRAINING = """
[model]
model = "tiny-tool-user"

[training]
max_steps = 2
batch_size = 2
group_size = 2
max_tokens = 48
save_every = 0

[evaluation]
problems = 1
"""


def has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def openenv(*words: str) -> str:
    return f'provider = "openenv"\nargs = {{ command = {[*SERVER, *words]} }}\nmax_turns = 2'


def verifiers(id: str, more: str = "") -> str:
    return f'provider = "verifiers"\nid = "{id}"\nmax_turns = 4\ntools_prompt = ""\n{more}'


V1, CLASSIC, OPENENV = has("verifiers.v1.harnesses.utils"), has("verifiers.legacy.envs"), has("openenv")
CASES = {
    "v1, one turn": (V1, verifiers("toy_reverse"), "length"),
    "v1, tools": (V1, verifiers("toy_calculator"), "solved"),
    "v1, several turns": (V1, verifiers("toy_echo", "args = { heldout_args = {} }"), None),
    "classic, one turn": (CLASSIC, verifiers("toy_classic"), "exact"),
    "classic, tools": (CLASSIC, verifiers("toy_classic", 'args = { kind = "calculator" }'), "solved"),
    "openenv, a server for each episode": (OPENENV, openenv("1", "nested"), "invalid_actions"),
    "openenv, tools": (OPENENV, openenv("16", "tools"), "invalid_actions"),
}


@pytest.mark.parametrize("case", CASES)
def test_training_in_an_environment(case, tmp_path):
    installed, section, metric = CASES[case]
    if not installed:
        pytest.skip("its package is not installed")
    (tmp_path / "run.toml").write_text(f"[environment]\n{section}\ntimeout_s = 60\nworkers = 1\n{TRAINING}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TOYS)]), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "retrain", "train", "run.toml", "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["env/all/total_episodes"] for row in rows] == [4, 4]
    assert [row["reward_failed"] for row in rows] == [0, 0]
    assert all(row["mean_reward"] is not None for row in rows)
    if metric is not None:
        assert all(f"env/all/{metric}" in row for row in rows)
    if metric == "solved":
        assert max(row["mean_reward"] for row in rows) > 0
        assert max(row["env/all/turns_per_episode"] for row in rows) > 1
