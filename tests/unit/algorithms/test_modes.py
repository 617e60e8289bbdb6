"""The table of modes: its names are those of the functions, its keys have an effect, and a new mode is one row of it
and one function."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.commands.formulas import DIVISORS, credit_formula
from retrain.config import parse_dict
from retrain.config.base import UsedWhen
from retrain.config.describe import choices
from retrain.config.modes import MODES, Need, credit_of, used_by
from retrain.config.root import keys
from retrain.errors import ConfigError
from retrain.maths import advantages, credit, critic, losses

ROOT = Path(__file__).parents[3]
FUNCTIONS = {
    "advantage_mode": {**advantages.ADVANTAGES, "gae": critic.gae},
    "transform_mode": credit.TRANSFORMS,
    "uncertainty_kind": credit.UNCERTAINTIES,
    "loss": losses.POLICY_LOSSES,
}


@pytest.mark.parametrize("key", MODES)
def test_a_key_accepts_the_modes_of_the_table_which_are_the_functions_there_are(key):
    assert set(MODES[key]) == set(FUNCTIONS[key])
    assert choices(keys()[f"algorithm.{key}"]) == list(MODES[key])
    assert set(DIVISORS) == set(losses.NORMALIZERS)
    assert all(credit_formula(parse_dict({"algorithm": {"transform_mode": mode}})) for mode in credit.TRANSFORMS)


@pytest.mark.parametrize("key", MODES)
def test_a_mode_and_the_keys_of_its_row_name_each_other(key):
    used = {dotted: used_by(key, dotted) for dotted in keys()}
    for dotted, field in keys().items():
        markers = [each for each in field.metadata if isinstance(each, UsedWhen) and each.key == f"algorithm.{key}"]
        assert all(marker.values == used[dotted] for marker in markers), dotted
        assert bool(markers) == bool(used[dotted]), dotted
    for name, mode in MODES[key].items():
        assert all(any(name in used[dotted] for dotted in keys() if dotted.startswith(each)) for each in mode.keys)


def test_what_a_configuration_needs_is_what_its_modes_need():
    def needs(**algorithm: str) -> frozenset[Need]:
        return parse_dict({"algorithm": algorithm}).algorithm.needs

    assert needs() == needs(transform_mode="gtpo") == {Need.GROUP}
    assert needs(transform_mode="gtpo_sepa") == needs(transform_mode="gtpo_hicra") == {Need.GROUP, Need.PLANNING}
    assert needs(transform_mode="gtpo", uncertainty_kind="shannon_entropy") == {Need.GROUP, Need.ENTROPY}
    assert needs(transform_mode="entropy_mask") == {Need.GROUP, Need.ENTROPY}
    assert needs(advantage_mode="mine:own", transform_mode="mine:spread") == set()
    assert credit_of("mine:spread").own_advantage
    with pytest.raises(ConfigError, match=r'this variant is not available.*transform_mode = "gtpo_sepa"'):
        needs(transform_mode="gtpo_sepa_amp")


ROW = """ADVANTAGES: dict[str, Advantage] = {
    "median": Advantage(formula="r − median of its group", paper="0000.00000"),
"""
FUNCTION = """def median(rewards_N: Rewards_PN) -> Doubles_PN:
    rewards_N = _checked(rewards_N)
    return rewards_N - rewards_N.median(-1, keepdim=True).values


ADVANTAGES: dict[str, Callable[[Rewards_PN], Doubles_PN]] = {
    "median": median,
"""
PROGRAM = """
import torch
from retrain.commands.formulas import advantage_words
from retrain.config import configuration_markdown, parse_dict
from retrain.maths.advantages import group_advantages
config = parse_dict({"algorithm": {"advantage_mode": "median", "transform_mode": "gtpo"}})
print(advantage_words(config))
print(group_advantages("median", torch.tensor([1.0, 0.0, 0.0])).tolist())
print(configuration_markdown())
"""


def test_a_new_advantage_is_one_row_and_one_function(tmp_path):
    """Written into a copy of the package as one would write it, it is accepted, computed, and told of."""
    shutil.copytree(ROOT / "retrain", tmp_path / "retrain", ignore=shutil.ignore_patterns("__pycache__", "models"))
    for module, old, new in (
        ("config/modes.py", ROW.partition("\n")[0] + "\n", ROW),
        ("maths/advantages.py", FUNCTION.splitlines()[-2] + "\n", FUNCTION),
    ):
        path = tmp_path / "retrain" / module
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"r − median of its group\n\[1\.0, 0\.0, 0\.0\]\n", done.stdout)
    assert "| `advantage_mode` | `median` | r − median of its group | [0000.00000]" in done.stdout
    assert 'one of "median", "grpo"' in done.stdout
