from __future__ import annotations

import json

import numpy as np
import pytest
from verdict_cases import BASE, DR_GRPO, EIGHT, GRPO, RLOO, Played, campaign, shifted

from retrain.campaign.judging.pooling import compare_directories
from retrain.campaign.judging.rule import FUTILITY
from retrain.campaign.judging.sequential import Looks
from retrain.config import parse_dict
from retrain.config.campaign import seeds_for_verdict
from retrain.errors import ConfigError
from retrain.files import append_jsonl
from retrain.maths.normal import additive_fit, step_down
from retrain.maths.permutation import closed_permutation
from retrain.maths.rules import Rule
from retrain.maths.statistics import sign_flip_p
from retrain.record.observer import NullObserver

MAXRL = ("maxrl", "none")
NOISE = 0.01 * np.random.default_rng(4).standard_normal((8, 3))


@pytest.mark.parametrize("test", ["exact", "normal", "permutation"])
def test_missing_runs_under_every_test(tmp_path, test):
    """A missing run takes its pairs away from every test; the exact p stands beside what decides."""
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


MODES = [{"advantage_mode": name, "transform_mode": "none"} for name in ("grpo", "rloo", "maxrl", "dr_grpo")]


@pytest.mark.parametrize(
    ("conditions", "keys", "message"),
    [
        (2, {"test": "permutation", "sequential": "linear"}, "looks by the exact or the normal test only"),
        (2, {"test": "normal", "sequential": "always_valid"}, "looks by signs only"),
        (3, {"race": True}, 'is on with sequential = "off".*sequential = "obrien_fleming"'),
        (2, {"race": True, "sequential": "linear"}, "is on with 2 conditions.*race = false"),
        (3, {"test": "normal", "prior_spread": 0.04}, "two conditions and sequential"),
        (2, {"prior_spread": 0.04}, "an earlier spread counts"),
        (2, {"test": "normal", "sequential": "linear", "seeds": [1, 2, 3]}, "after 3 at the earliest"),
    ],
)
def test_what_does_not_go_together_is_an_error(conditions, keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_dict({"campaign": {"conditions": MODES[:conditions], **keys}})
    parse_dict({"campaign": {"conditions": MODES, "test": "normal", "sequential": "square", "seeds": [1, 2, 3, 4]}})


def test_the_configuration_refuses_by_the_numbers_of_the_tests():
    """Configuration imports nothing above it, so that these numbers stand there a second time."""
    for family in range(1, 40):
        for test in ("exact", "normal", "permutation"):
            assert seeds_for_verdict(family, test) == Rule(test=test, family=family).fewest
