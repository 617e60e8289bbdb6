import json
from typing import Any

import numpy as np
import pytest
from helpers.records import BASE, DR_GRPO, EIGHT, GRPO, RLOO, Played, campaign, shifted

from retrain.config import parse_dict
from retrain.config.campaign import seeds_for_verdict
from retrain.errors import ConfigError, UsageError
from retrain.files import append_jsonl
from retrain.maths.normal import additive_fit, step_down
from retrain.maths.permutation import closed_permutation
from retrain.maths.rules import Rule
from retrain.maths.statistics import sign_flip_p
from retrain.verdicts.declared_rule import FUTILITY
from retrain.verdicts.pooling import compare_directories

THREE = [GRPO, RLOO, DR_GRPO]
MODES = [{"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "rloo", "maxrl", "dr_grpo")]


def test_a_clear_difference_stops_after_six_pairs_and_the_rest_is_listed(tmp_path):
    played = Played(tmp_path)
    for seed in range(1, 6):
        played.finish(seed)
        assert played.look()["stopped_after"] is None
    found = played.compare()["conditions"][1]
    assert (found["verdict"], found["p_value"]) == ("interim: 5 of 8 pairs", None)
    played.finish(6)
    condition = played.look()
    assert condition["stopped_after"] == 6
    assert [each["pairs"] for each in condition["looks"]] == [1, 2, 3, 4, 5, 6]
    assert condition["looks"][-1]["p"] == condition["looks"][-1]["spent"] == 2**-5
    assert played.states() == ["done"] * 12 + ["stopped"] * 4
    stopped = played.manifest.run("rloo+none_s7")
    assert stopped["reason"] == "sequential rule: decided after 6 of 8 pairs, p = 0.031 at level 0.05"
    assert played.manifest.run("grpo+none_s7")["reason"] == "sequential rule: every comparison is decided"
    comparison = played.compare()
    found = comparison["conditions"][1]
    assert (found["verdict"], found["p_value"], found["p_holm"]) == ("better", 2**-5, 2**-5)
    assert "Stopped after 6 of 8 pairs by the sequential rule, 0.031 of 0.05 spent." in found["sentence"]
    assert [run["state"] for run in found["missing"]] == ["stopped", "stopped"]
    assert "4 stopped (sequential rule) runs are not in the means" in comparison["note"]


def test_the_decision_does_not_depend_on_when_and_how_often_one_looks(tmp_path):
    often, once = Played(tmp_path / "often"), Played(tmp_path / "once")
    for seed in EIGHT:
        often.finish(seed)
        once.finish(seed)
        often.look()
    mine, other = often.look(), once.look()
    assert mine == other
    assert other["stopped_after"] == 6  # the look after six pairs decides, although eight were there
    for file in (once.manifest.directory / "runs").rglob("evals.jsonl"):
        file.unlink()  # what was looked at stands in the manifest
    once.start_again()
    assert once.look() == other


@pytest.mark.parametrize(
    ("conditions", "keys", "message"),
    [
        (2, {"sequential": "linear", "seeds": [1, 2, 3]}, r"after 6 at the earliest.*seeds = \[1, 2, 3, 4,"),
        (2, {"sequential": "linear", "seeds": [1, 2, 3], "test": "normal"}, "after 3 at the earliest"),
        (4, {"sequential": "pocock", "seeds": EIGHT}, "after 8 at the earliest"),
        (2, {"sequential": "linear", "seeds": list(range(30))}, "to 20"),
        (2, {"sequential": "linear", "seeds": EIGHT, "lanes": 16}, 'lanes = 16 trains all 16 runs.*lanes = "auto"'),
        (1, {"sequential": "linear", "seeds": EIGHT}, 'there is one condition.*sequential = "off"'),
        (2, {"test": "permutation", "sequential": "linear"}, "looks by the exact or the normal test only"),
        (2, {"test": "normal", "sequential": "always_valid"}, "looks by signs only"),
        (3, {"race": True}, 'is on with sequential = "off".*sequential = "obrien_fleming"'),
        (2, {"race": True, "sequential": "linear"}, "is on with 2 conditions.*race = false"),
        (3, {"test": "normal", "prior_spread": 0.04}, "two conditions and sequential"),
        (2, {"prior_spread": 0.04}, "an earlier spread counts"),
    ],
)
def test_impossible_rules_are_configuration_errors(conditions, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_dict({"campaign": {"conditions": MODES[:conditions], **keys}})


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"conditions": [RLOO, GRPO, DR_GRPO]}, "grpo.none as the first of its conditions"),
        ({"conditions": THREE[:2]}, "conditions grpo.none, rloo.none, dr_grpo.none"),
        ({"rule": "off"}, "sequential = 'linear'"),
        ({"seeds": list(range(1, 11))}, "seeds = "),
        ({"race": True}, "race = "),
        ({"primary_metric": "auc", "rest": "[training]\neval_every = 1"}, "primary_metric = "),
    ],
)
def test_what_is_compared_is_fixed_when_the_first_run_begins(tmp_path, settings, what):
    """Until then the file is corrected freely, and the order of the other conditions is free. Looks that were not
    declared are refused too: deciding to look early after results is what the declaration is there to stop."""
    as_declared: dict[str, Any] = {"conditions": THREE, "seeds": list(range(1, 10))}
    played = Played(tmp_path, conditions=THREE[:2], rule="pocock")
    played.look()
    played.start_again(**as_declared)
    played.finish(1)
    before = json.loads(json.dumps(played.look()))
    played.start_again(**as_declared | {"conditions": [GRPO, DR_GRPO, RLOO]})
    assert played.look() == before
    played.start_again(**as_declared | settings)
    with pytest.raises(UsageError, match=f"was begun with .*{what}.* is fixed when the first run begins"):
        played.look()
    if settings.get("rule") != "off":
        del played.manifest.content["declared"]  # only the record says it
        with pytest.raises(UsageError, match="was begun with "):
            played.look()
    assert played.manifest.content["sequential"]["conditions"]["rloo+none"] == before
    late = Played(tmp_path / "late", rule="off")
    late.finish(1)
    late.start_again(rule="linear")
    with pytest.raises(UsageError, match=r"was begun with .campaign. sequential = 'off'"):
        late.look()
    assert "sequential" not in late.manifest.content


@pytest.mark.parametrize(("rule", "test", "failed"), [("always_valid", "exact", "rloo"), ("linear", "normal", "grpo")])
def test_a_failed_first_seed_is_no_pair_and_comes_in_late(tmp_path, rule, test, failed):
    played = Played(tmp_path, rule=rule, test=test)
    played.finish(1)
    played.finish(1, state="failed", only=failed)
    assert played.look()["differences"] == [[1, None]]
    played.finish(2)
    played.finish(3, only="grpo")
    played.finish(4)
    assert [seed for seed, _ in played.look()["differences"]] == [1, 2]  # seed 3 is not complete and holds back 4
    played.manifest.update(f"{failed}+none_s1", state="done")
    played.finish(3, only="rloo")
    condition = played.look()
    assert [seed for seed, _ in condition["differences"]][:3] == [2, 1, 3]
    assert [each["pairs"] for each in condition["looks"]][:3] == [1, 2, 3]
    again = json.loads(json.dumps(played.manifest.content["sequential"]))
    played.look()
    assert played.manifest.content["sequential"] == again


def test_what_has_left_stays_out_whatever_comes_late(tmp_path):
    """A value that comes late is no new look at what has been decided, and is looked at once in what is open."""
    played = Played(tmp_path, conditions=THREE, rule="linear", test="normal")
    noise = {1: 0.0, 2: 0.012, 3: -0.009, 4: 0.004}
    for seed in (1, 2, 3, 4):
        played.put(seed, "grpo", 0.5)
        played.put(seed, "dr_grpo", 0.5 + noise[seed])
        played.put(seed, "rloo", 0.7 - noise[seed])
    played.manifest.update("grpo+none_s2", state="failed")
    left = json.loads(json.dumps(played.look()))
    assert (left["stop_reason"], left["stopped_after"]) == ("decided", 3)
    played.put(2, "grpo", 0.99)  # with which no rule would have decided
    assert played.look() == left
    other = played.manifest.content["sequential"]["conditions"]["dr_grpo+none"]
    assert [each["pairs"] for each in other["looks"]] == [1, 2, 3, 4]
    assert [seed for seed, _ in other["differences"]] == [1, 3, 4, 2]
    assert not other["looks"][-1]["stop"]


# What decides

MAXRL = ("maxrl", "none")
NOISE = 0.01 * np.random.default_rng(4).standard_normal((8, 3))


@pytest.mark.parametrize("test", ["exact", "normal", "permutation"])
def test_missing_runs_under_every_test(tmp_path, test):
    values = np.array(BASE)[:, None] + NOISE + [0.0, 0.06, 0.0]
    results = {label: values[:, i].tolist() for i, label in enumerate("abc")}
    failed = {"a_s2": "failed", "c_s5": "failed"}
    folder = campaign(tmp_path, results, {"campaign": {"seed": 0, "test": test}}, states=failed)
    values[1, 0] = values[4, 2] = np.nan
    base, better, same = compare_directories([folder])["conditions"]
    assert (better["pairs"], same["pairs"]) == (7, 6)
    assert (better["verdict"], better["test"]) == ("better", test)
    fit, differences = additive_fit(values[None]), values[:, 1:] - values[:, :1]
    tested = fit.difference[0] if test == "normal" else np.nanmean(differences, axis=0)
    for each, one in zip((better, same), tested, strict=True):
        assert each["difference"] == each["difference_tested"] == pytest.approx(one)
        assert f"{100 * one:+.1f}".replace("-", "−") + " points [" in each["sentence"]
    if test == "exact":
        expected = 2 * sign_flip_p(np.delete(differences[:, 0], 1))
    elif test == "normal":
        expected = step_down(fit.t()[0], float(fit.freedom[0]), float(fit.correlation[0]))[0]
    else:
        expected = closed_permutation(values)[0]
    assert better["p_holm"] == pytest.approx(expected)
    assert better["p_exact"] == sign_flip_p(np.delete(differences[:, 0], 1))
    assert base["collapsed"] == better["collapsed"] == []
    assert same["verdict"] == ("cannot tell: 6 pairs of seeds, 7 needed" if test == "exact" else "no difference shown")


def test_a_collapsed_run_is_named_and_the_exact_test_decides(tmp_path):
    fallen = shifted(0.05)
    fallen[2] -= 0.3
    results = {"a": list(BASE), "b": fallen}
    compared = compare_directories([campaign(tmp_path, results, {"campaign": {"seed": 0, "test": "normal"}})])
    found = compared["conditions"][1]
    (run,) = found["collapsed"]
    assert run["seed"] == 3
    assert run["gap"] == pytest.approx(0.3, abs=0.03)
    assert (found["test"], found["pairs_needed"]) == ("exact", 6)
    assert found["p_value"] == found["p_exact"]
    assert "This speaks of typical runs, not of the mean: b of seed 3 collapsed (29.2 points below" in found["sentence"]
    assert found["sentence"].endswith("The exact test decides.")


def test_a_family_steps_down_by_looks_of_the_normal_test(tmp_path):
    settings = {"conditions": [GRPO, RLOO, DR_GRPO], "rule": "obrien_fleming", "test": "normal", "futility": True}
    played = Played(tmp_path, **settings)
    random = np.random.default_rng(0)
    for seed in EIGHT:
        finish(played, seed, {"rloo": 0.1, "dr_grpo": 0.0}, random)
        played.look()
    record = played.manifest.content["sequential"]
    first, second = record["conditions"].values()
    assert (first["stop_reason"], second["stop_reason"]) == ("decided", "futility")
    assert first["stopped_after"] == first["looks"][-1]["pairs"] < 8
    assert second["stopped_after"] >= 4
    assert first["looks"][-1]["p_adjusted"] <= 0.05 < second["looks"][-1]["p_adjusted"]
    assert "stopped" in played.states()
    reasons = [run["reason"] for run in played.manifest.content["runs"] if run["label"].startswith("dr_grpo")]
    assert reasons[-1] == f"sequential rule: stopped for futility after {second['stopped_after']} of 8 pairs"
    found = played.compare()["conditions"]
    assert found[1]["verdict"] == "better"
    assert (found[1]["test"], found[1]["stop_reason"]) == ("normal", "decided")
    assert found[2]["verdict"] == FUTILITY
    assert "does not make the conditions equivalent" in found[2]["sentence"]


def finish(played: Played, seed: int, leads: dict[str, float], random: np.random.Generator) -> None:
    """Put a seed's runs that still train on the disk, with noise of a point."""
    for spec in played.specs:
        if spec.seed == seed and played.manifest.run(spec.run_id)["state"] != "stopped":
            value = 0.5 + leads.get(spec.config.algorithm.advantage_mode, 0.0) + 0.01 * float(random.standard_normal())
            row = {"step": 1, "name": "heldout", "eval/heldout/correct_rate": value}
            append_jsonl(played.manifest.directory / "runs" / spec.run_id / "evals.jsonl", [row])
            played.manifest.update(spec.run_id, state="done", step=1)


def test_in_a_race_what_cannot_win_leaves_first_and_a_resumed_one_agrees(tmp_path):
    settings = {"conditions": [GRPO, RLOO, DR_GRPO, MAXRL], "rule": "square", "test": "normal", "race": True}
    records = []
    for begin in (1, 3):  # in the second, the first seeds were not looked at before the process ended
        played, random = Played(tmp_path / str(begin), **settings), np.random.default_rng(3)
        for seed in EIGHT:
            finish(played, seed, {"rloo": 0.1, "dr_grpo": -0.1}, random)
            if seed >= begin - 1:
                played.look()
        records.append(played.manifest.content["sequential"]["conditions"])
    record = records[0]
    assert records[1] == record
    assert (record["dr_grpo+none"]["stop_reason"], record["dr_grpo+none"]["stopped_after"]) == ("futility", 2)
    assert record["rloo+none"]["stop_reason"] == "decided"
    assert played.states("dr_grpo").count("done") == 2
    last = max(each["stopped_after"] or 8 for each in record.values())
    assert played.states("grpo").count("done") == last  # the baseline stays while one is in the race


def test_the_configuration_refuses_by_the_numbers_of_the_tests():
    """Configuration imports nothing above it, so that these numbers stand there a second time."""
    for family in range(1, 40):
        for test in ("exact", "normal", "permutation"):
            assert seeds_for_verdict(family, test) == Rule(test=test, family=family).fewest
