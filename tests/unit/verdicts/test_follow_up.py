"""The command that is printed after "no difference shown"."""

import shlex

import pytest
from helpers.campaigns import campaign as toy_file
from helpers.campaigns import run_cli, toy_world
from helpers.records import BASE, campaign

from retrain.campaign.planning.manifest import write_plan
from retrain.campaign.planning.plan import Plan
from retrain.config import load
from retrain.files import read_json
from retrain.verdicts.pooling import compare_directories

NOISE = [0.010, -0.012, 0.004, 0.008, -0.006, 0.011, -0.009, 0.005]
SETS = [
    "campaign.seeds=[1,2,3,4,5,6,7,8]", "campaign.max_steps=1", "training.eval_every=0", "evaluation.problems=2",
    "training.max_tokens=3", "squeeze.enabled=false",
]  # fmt: skip


@pytest.fixture
def undecided(tmp_path, monkeypatch):
    """A campaign of a file with settings, seen from the directory above: eight seeds show no difference."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    plan = Plan.of(load(toy_file(tmp_path / "a folder", toy_world(tmp_path)), SETS))
    first, second = dict.fromkeys(spec.label for spec in plan.specs)
    campaign(plan.directory, {first: list(BASE), second: [b + d for b, d in zip(BASE, NOISE, strict=True)]})
    write_plan(plan)
    return plan


def test_the_printed_command_trains_the_same_file_with_fresh_seeds(undecided):
    report = compare_directories([undecided.directory])
    assert report["conditions"][1]["verdict"] == "no difference shown"
    power, command = report["follow_up"].splitlines()
    assert power.startswith("A new campaign with 10 fresh seeds finds a difference of 1.5 pair spreads")
    assert power.endswith("with 98 % probability; declare it with")
    printed = run_cli("compare", undecided.directory).stdout.splitlines()
    assert command in printed
    done = run_cli(*shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    followed = read_json(undecided.directory.with_name("toy_seeds9-18") / "manifest.json")
    assert followed["declared"]["seeds"] == list(range(9, 19))
    assert followed["declared"]["conditions"] == list(dict.fromkeys(spec.label for spec in undecided.specs))
    assert set(followed["declared"]["max_steps"].values()) == {1}
    assert [run["state"] for run in followed["runs"]] == ["done"] * 20
    plan = read_json(undecided.directory.with_name("toy_seeds9-18") / "plan.json")
    assert {run["config"]["training"]["max_tokens"] for run in plan["runs"]} == {3}
    assert plan["sets"][:-1] == SETS[1:]


def test_a_directory_without_a_plan_has_no_command(undecided):
    (undecided.directory / "plan.json").unlink()
    assert compare_directories([undecided.directory])["follow_up"] == ""


def test_several_directories_have_none_either(undecided, tmp_path):
    labels = dict.fromkeys(spec.label for spec in undecided.specs)
    other = campaign(tmp_path / "other", {label: [0.6] for label in labels}, seeds=[9])
    assert compare_directories([undecided.directory, other])["follow_up"] == ""
