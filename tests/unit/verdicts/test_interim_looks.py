"""The sequential rule in a campaign: what it looks at, what it stops, what it writes, and that resuming repeats it."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
from played_campaigns import DR_GRPO, EIGHT, GRPO, RLOO, Played, configuration
from toymodels import qwen3_directory

from retrain.campaign.judging.sequential import Looks
from retrain.campaign.planning.manifest import Manifest
from retrain.campaign.planning.plan import plan
from retrain.campaign.running.controller import launch, resume
from retrain.config import load, parse_dict
from retrain.errors import ConfigError, UsageError
from retrain.files import read_json
from retrain.maths.sequential import sequential_looks
from retrain.record.observer import NullObserver


def test_a_clear_difference_stops_after_six_pairs_and_the_rest_is_listed(tmp_path):
    played = Played(tmp_path)
    for seed in range(1, 6):
        played.finish(seed)
        assert played.look()["stopped_after"] is None
    found = played.compare()["conditions"][1]
    assert found["verdict"] == "interim: 5 of 8 pairs"
    assert found["p_value"] is None
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
    once.manifest.files.flush()
    again = Played.__new__(Played)
    again.specs, again.manifest = once.specs, Manifest.open(once.manifest.directory, "rule", once.specs)
    for file in (once.manifest.directory / "runs").rglob("evals.jsonl"):
        file.unlink()  # what was looked at stands in the manifest
    assert again.look() == other


def test_no_difference_runs_to_the_end(tmp_path):
    played = Played(tmp_path)
    for seed in EIGHT:
        played.finish(seed, sign=1 if seed % 2 else -1)
        played.look()
    assert played.states() == ["done"] * 16
    found = played.compare()["conditions"][1]
    assert found["verdict"] == "no difference shown"
    assert found["sentence"].endswith("Sequential rule: not stopped in 8 looks, 0.031 of 0.05 spent.")


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3, 4, 5, 6, 7]])
def test_a_rule_without_a_second_condition_is_an_error(tmp_path, seeds):
    path = configuration(tmp_path, [GRPO], seeds=seeds)
    with pytest.raises(ConfigError, match=r'rule.toml:4 .*there is one condition.*sequential = "off"'):
        load(path)


@pytest.mark.parametrize("conditions", [2, 3, 4, 5])
@pytest.mark.parametrize("rule", ["linear", "pocock", "obrien_fleming"])
def test_seeds_that_are_accepted_are_the_fewest_that_can_stop_early(conditions, rule):
    alpha = 0.05 / (conditions - 1)

    def last_look(planned: int) -> int:
        """Where equal differences of one sign stop."""
        return sequential_looks(np.ones(planned), planned, alpha=alpha, spending=rule)[-1].pairs

    least = next(n for n in range(2, 20) if last_look(n) < n)
    modes = [{"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "rloo", "maxrl", "dr_grpo")]
    modes = [*modes, {"advantage_mode": "maxrl", "transform_mode": "gtpo"}][:conditions]
    settings = {"conditions": modes, "sequential": rule}
    assert parse_dict({"campaign": {**settings, "seeds": list(range(least))}}).campaign.sequential == rule
    with pytest.raises(ConfigError, match="to stop early"):
        parse_dict({"campaign": {**settings, "seeds": list(range(least - 1))}})


def test_failed_runs_are_no_pairs_and_come_in_when_tried_again(tmp_path):
    played = Played(tmp_path)
    played.finish(1)
    played.finish(2, only="grpo")
    played.finish(3)
    assert played.look()["differences"][-1][0] == 1  # seed 2 is not complete and holds back seed 3
    played.finish(2, state="failed", only="rloo")
    assert [seed for seed, value in played.look()["differences"] if value is not None] == [1, 3]
    played.manifest.update("rloo+none_s2", state="pending")
    assert len(played.look()["looks"]) == 2
    played.finish(2, only="rloo")
    assert [seed for seed, _ in played.look()["differences"]] == [1, 3, 2]


def test_three_conditions_share_the_error_and_stop_one_by_one(tmp_path):
    played = Played(tmp_path, conditions=[GRPO, RLOO, DR_GRPO], seeds=list(range(1, 13)))
    for seed in range(1, 13):
        played.finish(seed)
        played.look()
    record = played.manifest.content["sequential"]["conditions"]
    assert record["rloo+none"]["stopped_after"] == 8  # 2^-7 fits 0.025 * 8/12
    assert record["dr_grpo+none"]["stopped_after"] is None
    assert played.states("rloo").count("stopped") == 4
    assert "stopped" not in played.states("grpo") + played.states("dr_grpo")


def test_the_rule_is_fixed_with_the_first_look(tmp_path):
    played = Played(tmp_path)
    played.finish(1)
    played.look()
    changed: list[dict[str, Any]] = [
        {"rule": "pocock"},
        {"rule": "off"},
        {"seeds": list(range(1, 10))},
        {"primary_metric": "auc"},
    ]
    for settings in changed:
        rest = "[training]\neval_every = 1" if "primary_metric" in settings else ""
        other = plan(load(configuration(tmp_path, **settings, rest=rest)))
        with pytest.raises(UsageError, match=r"was begun with .* is fixed when the first run begins"):
            Looks(played.manifest, other, NullObserver()).look()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": [1, 2, 3]}, r"rule.toml:4 .*after 6 at the earliest.*seeds = \[1, 2, 3, 4, 5, 6, 7, 8\]"),
        ({"seeds": [1, 2, 3, 4, 5, 6]}, "takes 7 to 20 to stop early"),
        ({"seeds": list(range(30))}, "to 20"),
        ({"lanes": 16}, 'lanes = 16 trains all 16 runs at once.*lanes = "auto"'),
    ],
)
def test_impossible_rules_are_configuration_errors(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        load(configuration(tmp_path, **settings))
    text = (tmp_path / "rule.toml").read_text().split("[[campaign.conditions]]")
    (tmp_path / "one.toml").write_text(f"{text[0]}[[campaign.conditions]]{text[1]}")
    with pytest.raises(ConfigError, match="one condition"):
        load(tmp_path / "one.toml")


THREE = [GRPO, RLOO, DR_GRPO]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"conditions": [RLOO, GRPO, DR_GRPO]}, "grpo.none as the first of its conditions"),
        ({"conditions": [*THREE, ("maxrl", "none")]}, "conditions grpo.none, rloo.none, dr_grpo.none"),
        ({"conditions": THREE[:2]}, "conditions grpo.none, rloo.none, dr_grpo.none"),
        ({"rule": "pocock"}, "sequential = 'linear'"),
        ({"seeds": list(range(1, 11))}, "seeds = "),
    ],
)
def test_what_is_compared_is_fixed_when_the_first_run_begins(tmp_path, settings, what):
    played = Played(tmp_path, conditions=THREE, seeds=list(range(1, 10)))
    played.finish(1)
    before = json.loads(json.dumps(played.look()))
    changed = {"conditions": THREE, "seeds": list(range(1, 10))} | settings
    played.start_again(**changed)
    with pytest.raises(UsageError, match=f"was begun with .*{what}"):
        played.look()
    del played.manifest.content["declared"]  # only the record says it
    record = played.manifest.content["sequential"]
    with pytest.raises(UsageError, match="was begun with "):
        played.look()
    played.manifest.content["declared"] = {"baseline": "grpo+none"}
    del record["labels"]  # as of before labels were kept
    with pytest.raises(UsageError, match="was begun with "):
        played.look()
    assert record["conditions"]["rloo+none"] == before


def test_the_order_of_the_other_conditions_is_free(tmp_path):
    played = Played(tmp_path, conditions=THREE, rule="square", test="normal")
    for seed in (1, 2, 3):
        played.finish(seed)
    before = json.loads(json.dumps(played.look()))
    played.start_again(conditions=[GRPO, DR_GRPO, RLOO], rule="square", test="normal")
    assert played.look() == before
    assert before["looks"][0]["mean"] == pytest.approx(0.1)


def test_looks_that_were_not_declared_are_refused_once_a_run_has_begun(tmp_path):
    """Deciding after results to look at them early is what the declaration is there to stop."""
    played = Played(tmp_path, rule="off")
    for seed in range(1, 7):
        played.finish(seed)
    played.start_again(rule="linear")
    with pytest.raises(UsageError, match=r"was begun with .campaign. sequential = 'off'"):
        played.look()
    assert "sequential" not in played.manifest.content
    assert "stopped" not in played.states()
    played.start_again(rule="off")
    Looks(played.manifest, played.specs, NullObserver()).look()
    assert "sequential" not in played.manifest.content


def test_a_file_is_corrected_freely_before_anything_has_begun(tmp_path):
    played = Played(tmp_path)
    played.look()
    played.start_again(conditions=THREE, rule="square", test="normal", seeds=[1, 2, 3, 4, 5])
    played.look()
    record = played.manifest.content["sequential"]
    assert (record["rule"], record["test"], record["planned"]) == ("square", "normal", 5)
    assert record["labels"] == ["grpo+none", *record["conditions"]]
    assert list(record["conditions"]) == ["rloo+none", "dr_grpo+none"]


@pytest.mark.parametrize("failed", ["rloo", "grpo"])
@pytest.mark.parametrize(("rule", "test"), [("linear", "exact"), ("always_valid", "exact"), ("linear", "normal")])
def test_a_failed_first_seed_is_no_pair_and_comes_in_late(tmp_path, rule, test, failed):
    played = Played(tmp_path, rule=rule, test=test)
    played.finish(1)
    played.finish(1, state="failed", only=failed)
    assert played.look()["differences"] == [[1, None]]
    assert played.look()["looks"] == []
    played.finish(2)
    condition = played.look()
    assert [seed for seed, _ in condition["differences"]] == [1, 2]
    assert [each["pairs"] for each in condition["looks"]] == [1]
    played.manifest.update(f"{failed}+none_s1", state="done")
    condition = played.look()
    assert [seed for seed, _ in condition["differences"]] == [2, 1]
    assert [each["pairs"] for each in condition["looks"]] == [1, 2]
    again = json.loads(json.dumps(played.manifest.content["sequential"]))
    played.look()
    assert played.manifest.content["sequential"] == again


def test_a_late_value_is_looked_at_once_and_may_decide(tmp_path):
    """Under the normal test it used to be stored and never looked at."""
    played, whole = (Played(tmp_path / name, rule="linear", test="normal") for name in ("late", "whole"))
    lead = {1: 0.05, 2: 0.11, 3: 0.08, 4: 0.1, 5: 0.07}
    for seed, value in lead.items():
        for each in (played, whole):
            each.put(seed, "grpo", 0.5)
            each.put(seed, "rloo", 0.5 + value)
    played.manifest.update("rloo+none_s1", state="failed")
    for seed in (4, 5):
        played.manifest.update(f"rloo+none_s{seed}", state="failed")
    condition = played.look()
    assert [each["pairs"] for each in condition["looks"]] == [1, 2]
    assert condition["stopped_after"] is None
    played.manifest.update("rloo+none_s1", state="done")
    condition = played.look()
    assert [seed for seed, _ in condition["differences"]] == [2, 3, 4, 5, 1]
    third = condition["looks"][-1]
    three = whole.look()["looks"][2]
    assert third == pytest.approx(three)
    assert (third["tested"], third["mean"]) == pytest.approx((0.08, 0.08))
    assert not third["stop"]
    played.manifest.update("rloo+none_s4", state="done")
    condition = played.look()
    assert [each["pairs"] for each in condition["looks"]] == [1, 2, 3, 4]
    assert (condition["stopped_after"], condition["stop_reason"]) == (4, "decided")


def test_what_has_left_stays_out_whatever_comes_late(tmp_path):
    """A value that comes late is no new look at what has been decided, and takes nothing back."""
    played = Played(tmp_path, conditions=THREE, rule="linear", test="normal")
    noise = {1: 0.0, 2: 0.012, 3: -0.009, 4: 0.004, 5: -0.006}
    for seed in (1, 2, 3, 4):
        played.put(seed, "grpo", 0.5)
        played.put(seed, "dr_grpo", 0.5 + noise[seed])
        played.put(seed, "rloo", 0.7 - noise[seed])
    played.manifest.update("grpo+none_s2", state="failed")
    left = json.loads(json.dumps(played.look()))
    other = played.manifest.content["sequential"]["conditions"]["dr_grpo+none"]
    assert (left["stop_reason"], left["stopped_after"]) == ("decided", 3)
    assert [each["pairs"] for each in other["looks"]] == [1, 2, 3]
    played.put(2, "grpo", 0.99)  # with which no rule would have decided
    assert played.look() == left
    other = played.manifest.content["sequential"]["conditions"]["dr_grpo+none"]
    assert [each["pairs"] for each in other["looks"]] == [1, 2, 3, 4]
    assert [seed for seed, _ in other["differences"]] == [1, 3, 4, 2]
    assert not other["looks"][-1]["stop"]


def test_the_exact_rule_knows_the_step_of_the_scale(tmp_path):
    """Equal differences of less than a step have no spread of 0: going on is futile, as with the normal test."""
    played = Played(tmp_path, futility=True)
    for seed in (1, 2, 3, 4):
        for label, value in (("grpo", 0.5), ("rloo", 0.51)):
            played.put(seed, label, value, **{"eval/heldout/problems": 10, "samples": 1})
        condition = played.look()
    assert played.manifest.content["sequential"]["resolution"] == 0.1
    assert (condition["stop_reason"], condition["stopped_after"]) == ("futility", 4)
    fine = Played(tmp_path / "fine", futility=True)
    for seed in (1, 2, 3, 4):
        for label, value in (("grpo", 0.5), ("rloo", 0.51)):
            fine.put(seed, label, value, **{"eval/heldout/problems": 10_000, "samples": 1})
    assert fine.look()["stopped_after"] is None


def test_a_new_pair_goes_through_the_sign_patterns_once(tmp_path, monkeypatch):
    sizes = []

    def counted(differences, *arguments, **keys):
        sizes.append(len(differences))
        return sequential_looks(differences, *arguments, **keys)

    monkeypatch.setattr("retrain.maths.deciding.sequential_looks", counted)
    monkeypatch.setattr("retrain.maths.following.sequential_looks", counted)
    played = Played(tmp_path)
    for seed in (1, 2, 3, 4):
        played.finish(seed)
        played.look()
    assert sizes == [1, 2, 3, 4]


REWARD = "def score(completion, answer):\n    return float(len(completion) % 2)\n"
WORLD = """
[model]
model = "{folder}/model"
lora_rank = 2
[training]
batch_size = 2
group_size = 2
max_tokens = 8
save_every = 0
[evaluation]
problems = 0
[reward]
type = "custom"
custom_module = "{folder}/oddrewards.py"
custom_function = "score"
workers = 1
[squeeze]
enabled = false
"""


def test_a_campaign_that_stops_itself_and_a_resumed_one_agree(tmp_path):
    (tmp_path / "oddrewards.py").write_text(REWARD)
    qwen3_directory(tmp_path / "model", ["12+34=? the answer is \\boxed{46}"])
    path = configuration(
        tmp_path,
        primary_metric="final:completions/mean_length",
        rest="[campaign.conditions.training]\nmax_tokens = 3\n" + WORLD.format(folder=tmp_path),
    )
    outcome = launch(load(path), tmp_path / "out", NullObserver())
    assert outcome.exit_status == 0
    states = [run["state"] for run in outcome.summary["runs"]]
    assert states == ["done"] * 12 + ["stopped"] * 4  # three cohorts of two seeds, then decided
    condition = outcome.summary["comparison"]["conditions"][1]
    assert condition["verdict"] == "lower"
    assert condition["sequential"]["stopped_after"] == 6
    # Killed before the third cohort: resuming gives the same looks, bit by bit.
    manifest = read_json(tmp_path / "out/manifest.json")
    looks = json.loads(json.dumps(manifest["sequential"]))
    for run in manifest["runs"][8:]:
        run |= {"state": "pending", "reason": None, "step": 0}
        shutil.rmtree(tmp_path / "out" / run["path"], ignore_errors=True)
    only = manifest["sequential"]["conditions"]["rloo+none~max_tokens=3"]
    only |= {"differences": only["differences"][:4], "looks": only["looks"][:4], "stopped_after": None}
    (tmp_path / "out/manifest.json").write_text(json.dumps(manifest))
    again = resume(tmp_path / "out", NullObserver())
    assert [run["state"] for run in again.summary["runs"]] == states
    assert read_json(tmp_path / "out/manifest.json")["sequential"] == looks


def test_several_comparisons_share_alpha_and_their_p_values_are_corrected(tmp_path):
    played = Played(tmp_path, conditions=(GRPO, RLOO, DR_GRPO))
    for seed in EIGHT:
        played.finish(seed)
        condition = played.look()
    last = condition["looks"][-1]
    assert last["allowed"] == pytest.approx(0.05 / 2 * last["pairs"] / 8)
    for found in played.compare()["conditions"][1:]:
        looks = played.manifest.content["sequential"]["conditions"][found["label"]]["looks"]
        assert found["p_value"] == looks[-1]["p"]
        assert found["p_holm"] == min(1.0, 2 * looks[-1]["p"])
    assert played.compare()["conditions"][1]["p_holm"] == 2 * 2**-6


@pytest.mark.parametrize("test", ["exact", "normal"])
@pytest.mark.parametrize(("left", "verdict"), [(0, "cannot tell: no pair"), (2, "cannot tell: 2 pairs of seeds")])
def test_a_condition_whose_runs_failed_has_no_verdict_from_the_few_that_did_not(tmp_path, test, left, verdict):
    played = Played(tmp_path, test=test)
    for seed in EIGHT:
        played.finish(seed, only="grpo")
        played.finish(seed, "done" if seed <= left else "failed", only="rloo")
        played.look()
    found = played.compare()["conditions"][1]
    assert found["verdict"].startswith(verdict)
    assert found["p_holm"] is None


def test_what_looks_decided_keeps_its_p_whatever_the_others_do_later(tmp_path):
    played = Played(tmp_path, conditions=[GRPO, RLOO, DR_GRPO], rule="linear", test="normal")
    random = np.random.default_rng(3)
    for seed in EIGHT:
        for label, gain in (("grpo", 0.0), ("rloo", 0.2), ("dr_grpo", -0.4 if seed == 8 else 0.0)):
            if played.manifest.run(f"{label}+none_s{seed}")["state"] != "stopped":
                played.put(seed, label, 0.5 + gain + 0.004 * random.standard_normal())
        played.look()
    found = next(each for each in played.compare()["conditions"] if each["label"] == "rloo+none")
    assert (found["verdict"], found["stop_reason"]) == ("better", "decided")
    assert found["p_holm"] <= 0.05
    assert found["pairs_needed"] <= found["pairs"] < 8
    assert "p < 0.0001" in found["sentence"]
