"""The declared rule in a campaign's comparison and looks: which test spoke, races, futility, seeds that are added."""

from __future__ import annotations

import json

import numpy as np
import pytest
from played_campaigns import DR_GRPO, EIGHT, GRPO, RLOO, Played, configuration
from verdict_cases import BASE, campaign, shifted

from retrain.campaign.judging.pooling import compare_directories
from retrain.campaign.judging.results import Measure
from retrain.campaign.judging.rule import FUTILITY, overlay, rule_of
from retrain.campaign.judging.sequential import Looks
from retrain.campaign.judging.words import verdict
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import plan
from retrain.config import campaign as config
from retrain.config import load, parse_dict
from retrain.errors import ConfigError, UsageError
from retrain.files import append_jsonl
from retrain.maths.normal import FEWEST_PAIRS, MOST_PRIOR_FREEDOM, additive_fit, step_down, t_p
from retrain.maths.permutation import MOST_COMPARISONS, closed_permutation
from retrain.maths.rules import Rule
from retrain.maths.sequential import MOST_PAIRS
from retrain.maths.statistics import sign_flip_p
from retrain.record.observer import NullObserver

MAXRL = ("maxrl", "none")
NOISE = 0.01 * np.random.default_rng(4).standard_normal((8, 3))


def family(tmp_path, **declared):
    """Three conditions of eight seeds, of which the second is four points better, under these keys of [campaign]."""
    values = np.array(BASE)[:, None] + NOISE + [0.0, 0.04, 0.0]
    results = {label: values[:, i].tolist() for i, label in enumerate("abc")}
    compared = compare_directories([campaign(tmp_path, results, {"campaign": {"seed": 0, **declared}})])
    return values, compared["conditions"]


def test_the_declared_test_is_what_decides_with_the_exact_p_beside_it(tmp_path):
    values, (base, better, same) = family(tmp_path / "n", test="normal")
    fit = additive_fit(values[None])
    assert better["p_value"] == pytest.approx(t_p(fit.t(), fit.freedom[:, None])[0, 0])
    assert better["p_value"] < better["p_holm"] < 0.05
    assert better["p_exact"] == sign_flip_p(values[:, 1] - values[:, 0])
    assert (better["test"], better["pairs_needed"], better["verdict"]) == ("normal", 3, "better")
    assert (same["test"], same["verdict"]) == ("normal", "no difference shown")
    assert base["collapsed"] == better["collapsed"] == []
    _, closed = family(tmp_path / "p", test="permutation")
    assert [each["p_holm"] for each in closed[1:]] == pytest.approx(closed_permutation(values))
    assert closed[1]["test"] == "permutation"
    _, exact = family(tmp_path / "e")
    assert exact[1]["test"] == "exact"
    assert exact[1]["p_value"] == exact[1]["p_exact"] == better["p_exact"]


@pytest.mark.parametrize("test", ["exact", "normal", "permutation"])
def test_missing_runs_under_every_test(tmp_path, test):
    """A run that is not there takes its pairs away from every test, and what is tested is said."""
    values = np.array(BASE)[:, None] + NOISE + [0.0, 0.06, 0.0]
    results = {label: values[:, i].tolist() for i, label in enumerate("abc")}
    failed = {"a_s2": "failed", "c_s5": "failed"}
    compared = compare_directories(
        [campaign(tmp_path, results, {"campaign": {"seed": 0, "test": test}}, states=failed)]
    )
    values[1, 0] = values[4, 2] = np.nan
    _, better, same = compared["conditions"]
    assert (better["pairs"], same["pairs"]) == (7, 6)
    assert (better["verdict"], better["test"]) == ("better", test)
    means = np.nanmean(values[:, 1:] - values[:, :1], axis=0)
    fit = additive_fit(values[None])
    tested = fit.difference[0] if test == "normal" else means
    assert abs(fit.difference[0] - means).min() > 1e-4
    for each, one in zip((better, same), tested, strict=True):
        assert each["difference_tested"] == pytest.approx(one)
        assert each["difference"] == pytest.approx(one)  # what the interval and the sentence are about
        assert f"{100 * one:+.1f}".replace("-", "−") + " points [" in each["sentence"]
    if test == "normal":  # t around the estimate; the exact test's intervals lie as they come
        assert sum(better["difference_interval"]) / 2 == pytest.approx(tested[0])
    expected = {
        "exact": lambda: [2 * sign_flip_p(values[[0, 2, 3, 4, 5, 6, 7], 1] - values[[0, 2, 3, 4, 5, 6, 7], 0])],
        "normal": lambda: step_down(fit.t()[0], float(fit.freedom[0]), float(fit.correlation[0])),
        "permutation": lambda: closed_permutation(values),
    }[test]()
    assert better["p_holm"] == pytest.approx(expected[0])


def test_the_direction_is_that_of_what_was_tested():
    found = {
        "standing": "declared", "pairs": 8, "pairs_needed": 3, "verdict": "", "p_holm": 0.01,
        "equivalence_p_holm": None, "difference": -0.01, "difference_tested": 0.02,
    }  # fmt: skip
    assert verdict(found, Measure(), None) == "better"
    look_of = {"pairs": 4, "mean": -0.01, "tested": 0.02, "p": 0.01, "p_adjusted": 0.02, "by": "normal", "spent": 0.01}
    own = {"differences": [], "looks": [look_of], "stopped_after": 4, "stop_reason": "decided"}
    record = {"rule": "linear", "test": "normal", "alpha": 0.05, "planned": 8, "conditions": {"b": own}}
    (condition,) = conditions = [{"label": "b"}]
    overlay(conditions, record, Measure())
    assert (condition["verdict"], condition["difference_tested"]) == ("better", 0.02)
    del look_of["tested"]  # as of before it was kept
    overlay(conditions, record, Measure())
    assert (condition["verdict"], condition["difference_tested"]) == ("worse", -0.01)


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
    again = json.loads(json.dumps(record))
    Looks(played.manifest, played.specs, NullObserver()).look()
    assert played.manifest.content["sequential"] == again


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
    leads = {"rloo": 0.1, "dr_grpo": -0.1, "maxrl": 0.0}
    whole = Played(tmp_path / "whole", **settings)
    random = np.random.default_rng(3)
    for seed in EIGHT:
        finish(whole, seed, leads, random)
        whole.look()
    record = whole.manifest.content["sequential"]["conditions"]
    assert record["dr_grpo+none"]["stop_reason"] == "futility"
    assert record["dr_grpo+none"]["stopped_after"] == 2
    assert record["rloo+none"]["stop_reason"] == "decided"
    assert whole.states("dr_grpo").count("done") == 2
    last = max(each["stopped_after"] or 8 for each in record.values())
    assert whole.states("grpo").count("done") == last  # the baseline stays while one is in the race
    late = Played(tmp_path / "late", **settings)
    random = np.random.default_rng(3)
    for seed in range(1, 3):  # seeds that were not looked at before the process ended
        finish(late, seed, leads, random)
    for seed in range(3, 9):
        late.look()
        finish(late, seed, leads, random)
    late.look()
    assert late.manifest.content["sequential"]["conditions"] == record


def test_a_failed_run_is_no_value_and_comes_in_later_under_the_normal_test(tmp_path):
    played = Played(tmp_path, rule="linear", test="normal")
    random = np.random.default_rng(1)
    for seed in (1, 2):
        finish(played, seed, {"rloo": 0.01}, random)
    played.manifest.update("rloo+none_s2", state="failed")
    assert [pair[1] is None for pair in played.look()["differences"]] == [False, True]
    played.manifest.update("rloo+none_s2", state="done")
    played.look()
    assert played.manifest.content["sequential"]["values"][1][1]["rloo+none"] is not None


def test_seeds_may_be_added_under_the_always_valid_rule_only(tmp_path):
    played = Played(tmp_path, rule="always_valid", seeds=[1, 2, 3, 4])
    for seed in range(1, 5):
        played.finish(seed)
        assert played.look()["stopped_after"] is None
    found = played.compare()["conditions"][1]
    assert "Always-valid rule: not decided; seeds may be added." in found["sentence"]
    assert (found["standing"], found["verdict"]) == ("declared", "cannot tell: 4 pairs of seeds, 6 needed")
    played.manifest.files.flush()
    more = plan(load(configuration(tmp_path, rule="always_valid", seeds=EIGHT)))
    played.specs, played.manifest = more, Manifest.open(tmp_path / "out", "rule", more)
    for seed in range(5, 9):
        played.finish(seed)
        condition = played.look()
    assert condition["stopped_after"] == 6
    assert condition["looks"][-1]["p"] <= 0.05
    found = played.compare()["conditions"][1]
    assert (found["verdict"], found["standing"]) == ("better", "declared")
    other = plan(load(configuration(tmp_path, rule="always_valid", seeds=[9, 1, 2])))
    with pytest.raises(UsageError, match=r"was begun with .* is fixed when the first run begins"):
        Looks(Manifest.open(tmp_path / "out", "rule", other), other, NullObserver()).look()


@pytest.mark.parametrize("changed", [{"test": "normal"}, {"futility": True}, {"conditions": "race"}])
def test_what_decides_is_fixed_with_the_first_look(tmp_path, changed):
    three = {"conditions": [GRPO, RLOO, DR_GRPO]}
    played = Played(tmp_path, **three)
    played.finish(1)
    played.look()
    changed = {"race": True} if "conditions" in changed else changed
    other = plan(load(configuration(tmp_path, **three, **changed)))
    with pytest.raises(UsageError, match=r"was begun with .* is fixed when the first run begins"):
        Looks(played.manifest, other, NullObserver()).look()


def test_records_of_before_are_of_the_exact_test(tmp_path):
    played = Played(tmp_path)
    for seed in range(1, 7):
        played.finish(seed)
        played.look()
    record = played.manifest.content["sequential"]
    for key in ("test", "futility", "race", "values", "resolution"):
        del record[key]
    for each in record["conditions"].values():
        del each["stop_reason"]
        each["looks"] = [
            {key: value for key, value in one.items() if key not in ("p_adjusted", "by")} for one in each["looks"]
        ]
    played.look()
    found = played.compare()["conditions"][1]
    assert (found["verdict"], found["p_holm"], found["stop_reason"]) == ("better", 2**-5, "decided")


def test_rules_from_keys():
    merit, length = Measure(), Measure(key="completions/mean_length")
    assert rule_of({}, 2, 8, merit) == Rule(family=2)
    assert rule_of({"test": "normal", "sequential": "square", "race": True}, 4, 9, length) == Rule(
        "normal", 4, 9, "square", race=True, upward=False
    )
    assert rule_of({"sequential": "linear", "futility": True}, 1, 8, merit).futility == 0.2
    assert rule_of({"sequential": "linear", "futility": 0.1}, 1, 8, merit, looks=False).futility is None
    prior = {"test": "normal", "prior_spread": 0.03, "prior_freedom": 6}
    assert rule_of(prior, 1, 4, merit).prior_freedom == 6
    assert rule_of(prior, 2, 4, merit).prior_freedom == 0
    assert rule_of({"test": "permutation"}, 9, 8, merit).test == "exact"


def modes(count: int) -> list[dict[str, str]]:
    names = ("grpo", "rloo", "maxrl", "dr_grpo")
    return [{"advantage_mode": name, "transform_mode": "none"} for name in names][:count]


@pytest.mark.parametrize(
    ("keys", "conditions", "message"),
    [
        ({"test": "permutation", "sequential": "linear"}, 2, "looks by the exact or the normal test only"),
        ({"test": "normal", "sequential": "always_valid"}, 2, "looks by signs only"),
        ({"race": True}, 3, 'is on with sequential = "off".*sequential = "obrien_fleming"'),
        ({"futility": 0.1, "sequential": "always_valid"}, 3, "at looks at a planned number"),
        ({"race": True, "sequential": "linear"}, 2, "is on with 2 conditions.*race = false"),
        ({"test": "normal", "prior_spread": 0.04}, 3, "two conditions and sequential"),
        ({"prior_spread": 0.04}, 2, "an earlier spread counts"),
        ({"test": "normal", "sequential": "linear", "seeds": [1, 2, 3]}, 2, "after 3 at the earliest"),
        ({"futility": 1.5, "sequential": "linear"}, 2, "futility"),
        ({"prior_freedom": 9}, 2, "prior_freedom"),
    ],
)
def test_what_does_not_go_together_is_an_error(keys, conditions, message):
    with pytest.raises(ConfigError, match=message):
        parse_dict({"campaign": {"conditions": modes(conditions), **keys}})


def test_the_normal_test_needs_fewer_seeds_and_says_so():
    parse_dict({"campaign": {"conditions": modes(4), "test": "normal", "sequential": "square", "seeds": [1, 2, 3, 4]}})
    campaign_of = parse_dict(
        {"campaign": {"conditions": modes(4), "race": True, "sequential": "linear", "seeds": list(range(9))}}
    ).campaign
    assert (campaign_of.test, campaign_of.futility, campaign_of.race) == ("exact", False, True)


def test_the_numbers_that_the_configuration_refuses_by_are_those_of_the_tests():
    """Configuration imports nothing above it, so that these numbers stand there a second time."""
    assert config.NORMAL_FEWEST == FEWEST_PAIRS
    assert config.PERMUTED_MOST == MOST_COMPARISONS
    assert config.SEQUENTIAL_MOST == MOST_PAIRS
    (most,) = [bound.le for bound in config.Campaign.model_fields["prior_freedom"].metadata if hasattr(bound, "le")]
    assert most == MOST_PRIOR_FREEDOM
    for family in range(1, 40):
        for test in ("exact", "normal", "permutation"):
            assert config.seeds_for_verdict(family, test) == Rule(test=test, family=family).fewest
    assert [config.seeds_suggested(family) for family in (1, 2, 3, 4)] == [7, 8, 8, 9]
