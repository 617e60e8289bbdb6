"""What was declared decides: looking early, adding, and choosing afterwards give no verdicts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from played_campaigns import Played
from typer.testing import CliRunner
from verdict_cases import BASE, campaign, shifted

from retrain.campaign.judging.declaration import declaration, freeze
from retrain.campaign.judging.pooling import compare_directories
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import plan
from retrain.cli import app
from retrain.config import parse_dict
from retrain.files import read_json, write_json
from retrain.maths.statistics import sign_flip_p

EIGHT = list(range(1, 9))
TWO = {"a": list(BASE), "b": shifted(0.03)}


def declared(folder: Path, **first: Any) -> Path:
    """Keep a declaration in a campaign's manifest: of what is there, unless told otherwise."""
    manifest = read_json(folder / "manifest.json")
    labels = list(dict.fromkeys(run["label"] for run in manifest["runs"]))
    kept = {
        "primary_metric": "final", "equivalence_margin": None, "sequential": "off", "baseline": labels[0],
        "conditions": labels, "seeds": EIGHT, "max_steps": dict.fromkeys(labels, 20),
    }  # fmt: skip
    write_json(folder / "manifest.json", manifest | {"declared": kept | first})
    return folder


def finding(folder: Path, **asked: Any) -> dict[str, Any]:
    return compare_directories([folder], **asked)["conditions"][1]


def test_a_look_before_the_planned_end_gives_no_verdict_and_no_p(tmp_path):
    states = {f"{label}_s{seed}": "pending" for label in "ab" for seed in (7, 8)}
    found = finding(declared(campaign(tmp_path, TWO, states=states)))
    assert sign_flip_p(found["differences"]) == 2**-5  # which would have read: better
    assert (found["standing"], found["verdict"]) == ("interim", "interim: 6 of 8 pairs")
    assert (found["p_value"], found["p_holm"], found["equivalence_p"]) == (None, None, None)
    assert "6 of 8 pairs: interim, no verdict yet" in found["sentence"]
    output = CliRunner().invoke(app, ["compare", str(tmp_path)]).output
    assert "interim: 6 of 8 pairs" in output
    assert "better" not in output
    failed = dict.fromkeys(states, "failed")  # nothing more is to come
    ended = finding(declared(campaign(tmp_path / "failed", TWO, states=failed)))
    assert (ended["standing"], ended["verdict"]) == ("declared", "better")


def test_runs_that_were_declared_and_never_planned_again_stay_open(tmp_path):
    """Taking seeds out of the file when the result looks good ends nothing."""
    states = {f"{label}_s{seed}": "pending" for label in "ab" for seed in (7, 8)}
    folder = declared(campaign(tmp_path, TWO, states=states))
    assert finding(folder)["standing"] == "interim"


@pytest.mark.parametrize(("first", "asked", "why"), [
    ({"seeds": EIGHT[:6]}, {}, "2 seeds were added: 7, 8"),
    ({"seeds": EIGHT[:7]}, {}, "1 seed was added: 8"),
    ({"conditions": ["a"]}, {}, "b was added"),
    ({"max_steps": {"a": 20, "b": 12}}, {}, "b was declared with 12 steps and planned with 20"),
    ({"max_steps": {"a": 12, "b": 20}}, {}, "a was declared with 12 steps and planned with 20"),
    ({}, {"baseline": "b"}, "the baseline declared was a"),
    ({}, {"metric": "auc"}, "auc:eval/heldout/correct_rate was not declared as deciding"),
    ({"primary_metric": "auc"}, {"metric": "final"}, "(auc:eval/heldout/correct_rate was)"),
])  # fmt: skip
def test_what_was_chosen_afterwards_is_exploratory(tmp_path, first, asked, why):
    folder = declared(campaign(tmp_path, TWO), **first)
    found = finding(folder, **asked)
    assert (found["standing"], found["verdict"]) == ("exploratory", "exploratory")
    assert why in found["sentence"]
    assert found["p_value"] == 2**-7  # as if it had been declared; only a person can judge it
    for words in ("better", "worse", "no difference"):
        assert words not in found["sentence"]
    options = [text for key, value in asked.items() for text in (f"--{key}", value)]
    assert "exploratory" in CliRunner().invoke(app, ["compare", str(folder), *options]).output


def test_a_condition_that_was_added_leaves_the_verdicts_of_the_others(tmp_path):
    folder = declared(campaign(tmp_path, TWO | {"c": shifted(0.05)}), conditions=["a", "b"])
    report = compare_directories([folder])
    assert [each["verdict"] for each in report["conditions"]] == ["baseline", "better", "exploratory"]


def test_always_valid_allows_seeds_to_be_added(tmp_path):
    """With the record of looks that the campaign itself makes; without that rule they would be exploratory."""
    played = Played(tmp_path, rule="always_valid", seeds=EIGHT[:4])
    for seed in EIGHT[:4]:
        played.finish(seed)
    played.look()
    played.start_again(rule="always_valid", seeds=EIGHT)
    for seed in EIGHT[4:]:
        played.finish(seed)
    played.look()
    found = played.compare()["conditions"][1]
    looks = read_json(tmp_path / "out/manifest.json")["sequential"]["conditions"]["rloo+none"]
    assert (found["standing"], found["verdict"]) == ("declared", "better")
    assert (found["p_value"], found["pairs"]) == (looks["looks"][-1]["p"], 8)
    assert looks["stopped_after"] == 6
    content = read_json(tmp_path / "out/manifest.json")
    del content["sequential"]
    write_json(tmp_path / "out/manifest.json", content | {"declared": content["declared"] | {"sequential": "off"}})
    assert finding(tmp_path / "out")["standing"] == "exploratory"


def test_the_declared_order_and_metric_decide_whatever_the_file_says_now(tmp_path):
    """A file that is changed when results are there moves nothing; the change is told."""
    folder = declared(campaign(tmp_path, TWO), baseline="b", primary_metric="auc", equivalence_margin=0.5)
    now = {"primary_metric": "final", "equivalence_margin": 0.01, "sequential": "off"}
    entry = {"run_id": "a_s1", "config": {"campaign": now}, "overrides": {}}
    write_json(folder / "plan.json", {"format": 1, "runs": [entry]})
    report = compare_directories([folder])
    assert (report["baseline"], report["summary"], report["margin"]) == ("b", "auc", 0.5)
    assert report["conditions"][1]["standing"] == "declared"
    assert "primary_metric was declared as auc and is final in the file now" in report["note"]
    assert "equivalence_margin was declared as 0.5 and is 0.01" in report["note"]


def test_directories_from_before_there_was_a_declaration_are_judged_as_planned(tmp_path):
    assert finding(campaign(tmp_path, TWO))["verdict"] == "better"
    old = campaign(tmp_path / "old", TWO)
    manifest = read_json(old / "manifest.json")
    write_json(old / "manifest.json", manifest | {"declared": {"primary_metric": "final", "equivalence_margin": 0.02}})
    report = compare_directories([old])
    assert (report["margin"], report["conditions"][1]["verdict"]) == (0.02, "better")


TOML = """
[campaign]
seeds = [1, 2]
equivalence_margin = {margin}
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
[[campaign.conditions]]
advantage_mode = "rloo"
transform_mode = "none"
"""


def test_a_declaration_may_be_corrected_until_a_run_has_begun():
    first, second = (plan(parse_dict(tomllib.loads(TOML.format(margin=margin)))) for margin in (0.01, 0.02))
    content: dict[str, Any] = {}
    waiting = [{"state": "pending", "step": 0, "label": "grpo+none", "seed": 1, "max_steps": 100}]
    freeze(content, first, [], {})
    assert content["declared"] == declaration(first)
    assert content["declared"]["conditions"] == ["grpo+none", "rloo+none"]
    assert content["declared"]["max_steps"] == dict.fromkeys(["grpo+none", "rloo+none"], 100)
    freeze(content, second, waiting, {})
    assert content["declared"]["equivalence_margin"] == 0.02
    freeze(content, first, [waiting[0] | {"state": "running"}], {})
    assert content["declared"]["equivalence_margin"] == 0.02


def test_what_an_earlier_release_did_not_record_is_taken_from_its_runs_and_not_from_the_file_now():
    """Seeds, test and rule that come with the new release are no declaration of the runs that were there before."""
    now = plan(parse_dict(tomllib.loads(TOML.format(margin=0.02).replace("[1, 2]", "[1, 2, 3]\ntest = 'normal'"))))
    before = [{"state": "done", "step": 9, "label": label, "seed": seed, "max_steps": 9}
              for seed in (1, 2) for label in ("rloo+none", "grpo+none")]  # fmt: skip
    recorded = {"campaign": {"primary_metric": "auc", "equivalence_margin": None, "sequential": "off"}}
    content: dict[str, Any] = {"declared": {"primary_metric": "auc", "equivalence_margin": None}}
    freeze(content, now, before, {"rloo+none_s1": recorded})
    found = content["declared"]
    assert (found["seeds"], found["baseline"], found["test"]) == ([1, 2], "rloo+none", "exact")
    assert found["max_steps"] == {"rloo+none": 9, "grpo+none": 9}
    assert found["equivalence_margin"] is None


def test_runs_that_never_began_leave_with_the_file_until_one_has_begun(tmp_path):
    """A mistake in the seeds that is seen before anything ran is no addition afterwards."""
    few, many = (plan(parse_dict(tomllib.loads(TOML.format(margin=0.1).replace("[1, 2]", seeds))))
                 for seeds in ("[1, 2]", "[1, 2, 3]"))  # fmt: skip
    with Manifest.open(tmp_path, "m", many) as manifest:
        assert len(manifest.content["runs"]) == 6
    with Manifest.open(tmp_path, "m", few) as manifest:
        assert len(manifest.content["runs"]) == 4
        manifest.update(few[0].run_id, state="running")
    with Manifest.open(tmp_path, "m", many) as manifest:
        assert len(manifest.content["runs"]) == 6
    with Manifest.open(tmp_path, "m", few) as manifest:
        assert len(manifest.content["runs"]) == 6  # they were planned beside one that had begun


def test_an_interim_look_has_no_p_anywhere(tmp_path):
    states = {f"{label}_s{seed}": "pending" for label in "ab" for seed in (7, 8)}
    folder = declared(campaign(tmp_path, TWO, states=states))
    report = compare_directories([folder])
    assert [each["conditions"][1]["p_value"] for each in report["secondary"]] == [None] * len(report["secondary"])
    assert len(report["secondary"]) > 1
    whole = compare_directories([declared(campaign(tmp_path / "whole", TWO))])
    assert whole["secondary"][0]["conditions"][1]["p_value"] == 2**-7


def test_planned_pairs_are_counted_by_seed_whatever_the_seed_of_the_campaign(tmp_path):
    """A run that has not begun has no configuration yet to say which campaign's streams it would have."""
    folder = declared(campaign(tmp_path, TWO, {"campaign": {"seed": 7}}, states={"b_s7": "pending", "b_s8": "pending"}))
    (folder / "runs/b_s7/config.json").unlink()
    (folder / "runs/b_s8/config.json").unlink()
    assert finding(folder)["verdict"] == "interim: 6 of 8 pairs"


def test_too_few_pairs_have_no_p(tmp_path):
    values = {label: [value + 0.03 * place for value in BASE[:6]] for place, label in enumerate("abcde")}
    found = compare_directories([campaign(tmp_path, values)])["conditions"][1]
    assert found["verdict"].startswith("cannot tell: 6 pairs of seeds, 8 needed")
    assert (found["p_value"], found["p_holm"], found["p_exact"]) == (None, None, None)
    assert "p =" not in found["sentence"]


def test_looks_of_a_rule_that_was_not_declared_decide_nothing(tmp_path):
    folder = declared(campaign(tmp_path, TWO))
    manifest = read_json(folder / "manifest.json")
    look = {"pairs": 6, "mean": 0.03, "allowed": 0.04, "tail": 0.03, "p": 0.031, "spent": 0.031, "stop": True}
    pairs = [[seed, 0.03] for seed in range(1, 7)]
    conditions = {"b": {"differences": pairs, "looks": [look], "stopped_after": 6}}
    record = {"rule": "linear", "alpha": 0.05, "metric": "final:eval/heldout/correct_rate", "planned": 8,
              "seeds": EIGHT, "conditions": conditions}  # fmt: skip
    write_json(folder / "manifest.json", manifest | {"sequential": record})
    found = finding(folder)
    assert "sequential" not in found
    assert found["p_value"] == 2**-7


def test_more_than_forty_pairs_are_compared(tmp_path):
    seeds = list(range(1, 43))
    base = [0.5 + 0.001 * (7 * seed % 13) for seed in seeds]
    results = {"a": base, "b": [value + 0.02 + 0.01 * (seed % 2) for seed, value in zip(seeds, base, strict=True)]}
    report = compare_directories([campaign(tmp_path, results, seeds=seeds)])
    low, high = report["conditions"][1]["difference_interval"]
    assert low < 0.025 < high
    assert report["secondary"][0]["conditions"][1]["difference_interval"] is not None


def test_an_always_valid_rule_never_finds_equivalence(tmp_path):
    """It has no planned end at which equivalence could be tested once."""
    small = [value + 0.001 * (-1) ** i for i, value in enumerate(BASE)]
    folder = declared(campaign(tmp_path, {"a": list(BASE), "b": small}), equivalence_margin=0.05,
                      sequential="always_valid")  # fmt: skip
    manifest = read_json(folder / "manifest.json")
    pairs = [[seed, a - b] for seed, a, b in zip(EIGHT, small, BASE, strict=True)]
    look = {"pairs": 8, "mean": 0.0, "p": 1.0, "p_adjusted": 1.0, "by": "exact", "spent": None, "stop": False}
    record = {"rule": "always_valid", "test": "exact", "alpha": 0.05, "metric": "final:eval/heldout/correct_rate",
              "planned": 8, "seeds": EIGHT,
              "conditions": {"b": {"differences": pairs, "looks": [look], "stopped_after": None}}}  # fmt: skip
    write_json(folder / "manifest.json", manifest | {"sequential": record})
    found = finding(folder)
    assert found["equivalence_p"] is None
    assert found["verdict"] == "no difference shown"
