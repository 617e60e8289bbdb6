import json
from typing import Any

import pytest
from helpers.records import BASE, DR_GRPO, EIGHT, GRPO, RLOO, Played, campaign

from retrain.config import parse_dict
from retrain.errors import ConfigError
from retrain.verdicts.pooling import compare_directories

THREE = [GRPO, RLOO, DR_GRPO]
TEN = list(range(1, 11))
NOISE = [0.002, -0.003, 0.001, 0.004, -0.002, 0.003, -0.001, 0.002, 0.0, -0.004]


def finish(played: Played, seeds: list[int], rloo: float, dr_grpo: float | None = None) -> None:
    for seed in seeds:
        leads = {"grpo": 0.0, "rloo": rloo} | ({} if dr_grpo is None else {"dr_grpo": dr_grpo})
        for place, (label, lead) in enumerate(leads.items()):
            run = played.manifest.run(f"{label}+none_s{seed}")
            if run.state != "stopped":
                played.put(seed, label, 0.5 + lead + NOISE[(seed + 3 * place) % 10])


def test_a_clear_difference_stops_after_seven_seeds_and_the_rest_is_listed(tmp_path):
    played = Played(tmp_path, seeds=TEN)
    finish(played, TEN[:6], 0.1)
    assert played.analyse() is None
    found = played.compare()["conditions"][1]
    assert (found["verdict"], found["p_value"]) == ("interim: 6 of 10 pairs", None)
    finish(played, [7], 0.1)
    record = played.analyse()
    assert record is not None
    assert (record["seeds"], record["decided"], record["p"]) == (TEN[:7], ["rloo+none"], {"rloo+none": 1 / 64})
    assert played.states() == ["done"] * 14 + ["stopped"] * 6
    reasons = [played.manifest.run(f"{label}+none_s8").reason for label in ("rloo", "grpo")]
    assert reasons[0] == "interim analysis: decided after 7 of 10 seeds, p = 0.016"
    assert reasons[1] == "interim analysis: every comparison is decided"
    comparison = played.compare()
    found = comparison["conditions"][1]
    assert (found["verdict"], found["p_value"], found["decided_after"]) == ("better", 1 / 64, 7)
    assert found["standing"] == "declared"
    assert "decided after 7 of 10 pairs; later seeds were not trained" in found["sentence"]
    assert [run["state"] for run in found["missing"]] == ["stopped"] * 3
    assert "6 stopped (interim analysis) runs are not in the means" in comparison["note"]


def test_what_is_decided_stops_and_the_others_go_on_to_the_end(tmp_path):
    played = Played(tmp_path, conditions=THREE, seeds=TEN, equivalence_margin=0.05)
    finish(played, TEN[:7], 0.1, 0.0)
    record = played.analyse()
    assert record is not None
    assert record["decided"] == ["rloo+none"]
    assert played.states("rloo").count("stopped") == 3
    assert set(played.states("dr_grpo")[7:]) == set(played.states("grpo")[7:]) == {"pending"}
    found = played.compare()["conditions"]
    assert [each["standing"] for each in found[1:]] == ["declared", "interim"]
    finish(played, TEN[7:], 0.1, 0.0)
    before = json.loads(json.dumps(record))
    assert played.analyse() == before
    found = played.compare()["conditions"]
    assert [each["verdict"] for each in found[1:]] == ["better", "typical runs alike"]
    assert [each["decided_after"] for each in found[1:]] == [7, None]


def test_the_decision_is_that_of_the_record_whatever_the_files_say_later(tmp_path):
    played = Played(tmp_path, seeds=TEN)
    finish(played, TEN[:7], 0.1)
    record = json.loads(json.dumps(played.analyse()))
    for file in (played.manifest.directory / "runs").rglob("evals.jsonl"):
        file.unlink()
    played.start_again(seeds=TEN)
    assert played.analyse() == record
    assert played.states("rloo").count("stopped") == 3


@pytest.mark.parametrize("under_way", [[], ["rloo+none_s8", "grpo+none_s8"]])
def test_runs_that_are_under_way_are_returned_instead_of_stopped(tmp_path, under_way):
    from retrain.campaign.running.interim import InterimMonitor
    from retrain.records.observer import NullObserver

    played = Played(tmp_path, seeds=TEN)
    finish(played, TEN[:7], 0.1)
    monitor = InterimMonitor.of(played.manifest, played.specs, NullObserver())
    assert monitor is not None
    unwanted = monitor.update(under_way)
    assert unwanted == set(under_way)
    assert played.states().count("stopped") == 6 - len(under_way)


def test_a_failed_run_counts_as_missing_at_the_interim_analysis_and_comes_in_at_the_end(tmp_path):
    played = Played(tmp_path, seeds=TEN)
    finish(played, TEN[:7], 0.1)
    played.manifest.update("rloo+none_s3", state="failed")
    record = played.analyse()
    assert record is not None
    assert record["differences"]["rloo+none"][2] is None
    assert record["decided"] == []  # six pairs cannot decide there
    played.manifest.update("rloo+none_s3", state="done")
    finish(played, TEN[7:], 0.1)
    assert played.analyse() == record
    found = played.compare()["conditions"][1]
    assert (found["verdict"], found["pairs"], found["decided_after"]) == ("better", 10, None)


@pytest.mark.parametrize(
    "settings", [{"rule": "off", "seeds": TEN}, {"seeds": TEN[:7]}, {"seeds": TEN, "conditions": [GRPO]}]
)
def test_without_an_interim_analysis_nothing_is_stopped(tmp_path, settings):
    played = Played(tmp_path, **settings)
    for seed in TEN[:7]:
        played.finish(seed)
    assert played.analyse() is None
    assert "stopped" not in played.states()


def test_a_file_that_is_changed_later_changes_nothing_of_the_interim_analysis(tmp_path):
    as_declared: dict[str, Any] = {"conditions": THREE, "seeds": TEN}
    played = Played(tmp_path, **as_declared)
    finish(played, [1], 0.1, 0.0)
    changed = {"conditions": [RLOO, GRPO, DR_GRPO], "seeds": list(range(1, 17)), "rule": "off"}
    played.start_again(**changed)
    finish(played, TEN[1:7], 0.1, 0.0)
    record = played.analyse()
    assert record is not None
    assert (record["seeds"], record["baseline"], record["decided"]) == (TEN[:7], "grpo+none", ["rloo+none"])
    found = played.compare()["conditions"]
    assert {each["standing"] for each in found[1:]} == {"exploratory"}  # seeds were added


def test_a_late_declaration_of_an_interim_analysis_does_not_count(tmp_path):
    played = Played(tmp_path, rule="off", seeds=TEN)
    played.finish(1)
    played.start_again(rule="on", seeds=TEN)
    for seed in TEN[1:7]:
        played.finish(seed)
    assert played.analyse() is None


@pytest.mark.parametrize("earlier", ["linear", "pocock", "obrien_fleming", "square", "always_valid"])
def test_stopping_rules_of_earlier_versions_are_answered_and_mean_on_in_their_directories(tmp_path, earlier):
    with pytest.raises(ConfigError, match=f'sequential +is "{earlier}": there is one interim analysis.*"on"'):
        parse_dict({"campaign": {"sequential": earlier}})
    folder = campaign(tmp_path, {"a": list(BASE), "b": [value + 0.1 for value in BASE]},
                      {"campaign": {"test": "exact", "sequential": earlier}})  # fmt: skip
    found = compare_directories([folder])["conditions"][1]
    assert (found["verdict"], found["decided_after"]) == ("better", 7)
    assert "decided after 7 of 8 pairs" in found["sentence"]
    assert "not trained" not in found["sentence"]  # they were


def test_eight_seeds_train_the_last_one_only_where_that_can_decide(tmp_path):
    played = Played(tmp_path, seeds=EIGHT)
    finish(played, EIGHT[:7], 0.1)
    played.analyse()
    assert played.states("rloo") == ["done"] * 7 + ["stopped"]
