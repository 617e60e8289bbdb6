"""The table of modes says what there is: its names are those of the functions, its keys are used, its papers cited; and
a new mode is one row of it and one function."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.config import parse_dict
from retrain.config.base import UsedWhen
from retrain.config.describe import choices
from retrain.config.modes import MODES, Mode, Need, credit_of, modes_markdown, used_by
from retrain.config.root import keys, sections
from retrain.errors import ConfigError
from retrain.maths import advantages, credit, critic, losses

ROOT = Path(__file__).parents[3]
FUNCTIONS = {
    "advantage_mode": {**advantages.ADVANTAGES, "gae": critic.gae},
    "transform_mode": credit.TRANSFORMS,
    "uncertainty_kind": credit.UNCERTAINTIES,
    "loss": losses.POLICY_LOSSES,
}
ROWS = [pytest.param(key, name, mode, id=name) for key, table in MODES.items() for name, mode in table.items()]


@pytest.mark.parametrize("key", MODES)
def test_a_key_accepts_the_modes_of_the_table_which_are_the_functions_there_are(key):
    assert set(MODES[key]) == set(FUNCTIONS[key])
    assert choices(keys()[f"algorithm.{key}"]) == list(MODES[key])


@pytest.mark.parametrize(("key", "name", "mode"), ROWS)
def test_the_keys_of_a_mode_have_an_effect_with_it_alone(key: str, name: str, mode: Mode):
    named = [dotted for each in mode.keys for dotted in keys() if dotted == each or dotted.startswith(f"{each}.")]
    assert len(named) >= len(mode.keys)
    assert all(each in sections() or each in keys() for each in mode.keys)
    for dotted in named:
        markers = [marker for marker in keys()[dotted].metadata if isinstance(marker, UsedWhen)]
        assert any(marker.key == f"algorithm.{key}" and name in marker.values for marker in markers), dotted
        assert name in used_by(key, dotted)


def test_keys_that_are_used_with_a_mode_are_keys_of_its_row():
    for dotted, field in keys().items():
        for marker in field.metadata:
            if isinstance(marker, UsedWhen) and marker.key in {f"algorithm.{key}" for key in MODES}:
                assert marker.values == used_by(marker.key.partition(".")[2], dotted), dotted


@pytest.mark.parametrize(("key", "name", "mode"), ROWS)
def test_the_documents_tell_of_every_mode_with_its_paper(key: str, name: str, mode: Mode):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    found = re.search(rf"^###.*`{name}`.*\n\n(.*)|^\| `{name}` \|(.*)", page, re.MULTILINE)
    assert found, name
    if mode.paper:
        assert mode.paper in (found[1] or found[2])
    assert f"| `{name}` |" in modes_markdown()
    assert modes_markdown() in (ROOT / "docs/configuration.md").read_text(encoding="utf-8")


def test_what_a_configuration_needs_is_what_its_modes_need():
    def needs(**algorithm: str) -> frozenset[Need]:
        return parse_dict({"algorithm": algorithm}).algorithm.needs

    assert needs() == {Need.GROUP}
    assert needs(transform_mode="gtpo_sepa") == {Need.GROUP, Need.PLANNING}
    assert needs(transform_mode="gtpo", uncertainty_kind="shannon_entropy") == {Need.GROUP, Need.ENTROPY}
    assert needs(transform_mode="entropy_mask") == {Need.GROUP, Need.ENTROPY}
    assert needs(advantage_mode="mine:own", transform_mode="mine:spread") == set()
    assert credit_of("mine:spread").own_advantage
    assert credit_of(lambda: None).own_advantage


def test_a_mode_that_is_known_elsewhere_says_what_to_type():
    with pytest.raises(ConfigError, match=r'this variant is not available.*transform_mode = "gtpo_sepa"'):
        parse_dict({"algorithm": {"transform_mode": "gtpo_sepa_amp"}})


ROW = """ADVANTAGES: dict[str, Advantage] = {
    "median": Advantage(formula="r − median of its group", paper="0000.00000"),
"""
FUNCTION = """def median(rewards_N: Rewards_PN) -> Doubles_PN:
    rewards_N = _checked(rewards_N)
    return rewards_N - rewards_N.median(-1, keepdim=True).values


ADVANTAGES: dict[str, Callable[[Rewards_PN], Doubles_PN]] = {
    "median": median,
"""
CAMPAIGN = """
[campaign]
seeds = [1, 2]
max_steps = 2
[training]
batch_size = 2
max_tokens = 16
[evaluation]
problems = 4
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "median"
transform_mode = "gtpo"
"""
COMMANDS = """
import sys
from typer.testing import CliRunner
import retrain
from retrain.cli import app
from retrain.config import configuration_markdown
print(retrain.__file__)
for words in (["check", "f.toml"], ["explain", "f.toml"], ["train", "f.toml", "--out", "out"]):
    result = CliRunner().invoke(app, words)
    print(result.output)
    assert result.exit_code == 0, (words, result.exception)
print(configuration_markdown())
"""


def test_a_new_advantage_is_one_row_and_one_function(tmp_path):
    """Written into a copy of the package as one would write it, it trains, and is told of wherever modes are."""
    package = tmp_path / "retrain"
    shutil.copytree(ROOT / "retrain", package, ignore=shutil.ignore_patterns("__pycache__"))
    for module, old, new in (
        ("config/modes.py", ROW.partition("\n")[0] + "\n", ROW),
        ("maths/advantages.py", FUNCTION.splitlines()[-2] + "\n", FUNCTION),
    ):
        text = (package / module).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (package / module).write_text(text.replace(old, new), encoding="utf-8")
    (tmp_path / "f.toml").write_text(CAMPAIGN, encoding="utf-8")
    command = [sys.executable, "-c", COMMANDS]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(str(package))
    assert "r − median of its group" in done.stdout
    assert "| `advantage_mode` | `median` | r − median of its group | [0000.00000]" in done.stdout
    assert 'one of "median", "grpo"' in done.stdout
    for seed in (1, 2):
        rows = (tmp_path / f"out/runs/median+gtpo_s{seed}/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(rows) == 2
