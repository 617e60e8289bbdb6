"""Several directories in one comparison, and what of a campaign's declarations holds there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from verdict_cases import BASE, campaign, shifted

from retrain.campaign.judging.comparison import compare_runs
from retrain.campaign.judging.pooling import compare_directories, read_source
from retrain.campaign.judging.results import Measure
from retrain.errors import UsageError
from retrain.files import read_json, write_json
from retrain.maths.intervals import mean_interval
from retrain.maths.statistics import sign_flip_p, tost_p

RULE = {
    "rule": "linear", "metric": Measure().name, "planned": 8, "alpha": 0.05,
    "conditions": {"b": {
        "stopped_after": 6, "differences": [[seed, 0.03] for seed in range(1, 7)],
        "looks": [{"pairs": 6, "mean": 0.03, "allowed": 0.0375, "tail": 0.03, "p": 0.03, "spent": 0.03, "stop": True}],
    }},
}  # fmt: skip


def test_replicates_that_differ_only_in_what_is_kept_shown_or_given_up_are_one_condition(tmp_path):
    settings = {"training": ("keep_every", "nonfinite_limit"), "reward": ("reward_max", "reward_min", "timeout_s")}
    folders = []
    for value, seeds in ((3, [1, 2, 3, 4]), (7, [5, 6, 7, 8])):
        config = {section: dict.fromkeys(names, value) for section, names in settings.items()}
        results = {"a": [BASE[seed - 1] for seed in seeds], "b": [shifted(0.03)[seed - 1] for seed in seeds]}
        folders.append(campaign(tmp_path / str(value), results, config, seeds=seeds))
    report = compare_directories(folders)
    assert [each["label"] for each in report["conditions"]] == ["a", "b"]
    assert report["conditions"][1]["pairs"] == 8
    assert not any("kept apart" in warning for warning in report["warnings"])


def test_a_rule_of_stopping_holds_for_its_own_campaign_baseline_and_metric_alone(tmp_path):
    one = campaign(tmp_path / "one", {"a": list(BASE), "b": shifted(0.03), "c": shifted(0.06)})
    write_json(one / "manifest.json", read_json(one / "manifest.json") | {"sequential": RULE})
    alone = compare_directories([one])["conditions"][1]
    assert (alone["p_value"], alone["sequential"]["stopped_after"]) == (0.03, 6)
    for named in ({"baseline": "c"}, {"metric": "auc"}, {"metric": "hard/correct_rate"}):
        assert all("sequential" not in each for each in compare_directories([one], **named)["conditions"])
    more = campaign(tmp_path / "two", {"a": list(BASE), "b": shifted(0.03)}, seeds=list(range(11, 19)))
    pooled = compare_directories([one, more])["conditions"][1]
    differences = np.subtract(shifted(0.03), BASE)
    assert "sequential" not in pooled
    assert (pooled["pairs"], pooled["p_value"]) == (16, sign_flip_p([*differences, *differences]))


@pytest.mark.parametrize(("margins", "applied"), [((0.02, 0.02), 0.02), ((0.02, 0.05), None), ((0.05, 0.02), None)])
def test_different_margins_are_none_and_equal_ones_hold(tmp_path, margins, applied):
    folders = []
    for start, margin in zip((1, 11), margins, strict=True):
        config = {"campaign": {"equivalence_margin": margin}}
        seeds = list(range(start, start + 8))
        results = {"a": list(BASE), "b": shifted(0.0, 0.01)}
        folders.append(campaign(tmp_path / str(start), results, config, seeds=seeds))
    report = compare_directories(folders)
    assert report["margin"] == applied
    assert (report["conditions"][1]["equivalence_p"] is None) == (applied is None)
    refused = any("different equivalence margins; none is applied" in warning for warning in report["warnings"])
    assert refused == (applied is None)


def test_every_run_of_every_directory_is_measured_alike(tmp_path):
    """Not only the first directory, nor the first run of one; a run that measured nothing is in nobody's way."""
    folders = [
        campaign(tmp_path / name, {"a": list(BASE[:2])}, seeds=[start, start + 1])
        for name, start in (("one", 1), ("two", 3), ("three", 5))
    ]
    assert compare_directories(folders)["conditions"][0]["finished"] == [1, 2, 3, 4, 5, 6]
    last = folders[2] / "runs/a_s6"
    facts = read_json(last / "config.json")
    for change, what in (
        ({"heldout_hash": "problems B"}, "held-out problems differ"),
        ({"evaluation": {**facts["evaluation"], "max_tokens": 7}}, r"\[evaluation\] max_tokens differ \(80 and 7\)"),
        ({"data": {"prompt_template": "Q: {prompt}"}}, "prompt_template"),
    ):
        write_json(last / "config.json", facts | change)
        with pytest.raises(UsageError, match=what):
            compare_directories(folders)
    (last / "evals.jsonl").unlink()
    assert compare_directories(folders)["conditions"][0]["finished"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("first", "second", "counted"), [
    ("done", "done", [0.6]), ("failed", "done", [0.7]), ("done", "running", [0.6]), ("failed", "running", []),
])  # fmt: skip
def test_of_a_seed_that_was_run_twice_the_first_finished_run_counts(tmp_path, first, second, counted):
    """It is one replicate; where none finished, the first is named."""
    one = campaign(tmp_path / "one", {"a": [0.6]}, states={"a_s1": first})
    two = campaign(tmp_path / "two", {"a": [0.7]}, states={"a_s1": second})
    report = compare_directories([one, two])
    assert report["conditions"][0]["after_values"] == counted
    assert [run["state"] for run in report["conditions"][0]["missing"]] == ([] if counted else [first])
    assert any("more than once" in warning for warning in report["warnings"])


def test_the_coarsest_evaluation_decides_how_fine_an_interval_can_be(tmp_path):
    """Equal values have the width of one answer; of runs measured on 50 and on 5 problems, that of 5."""
    runs = read_source(campaign(tmp_path, {"a": [0.6, 0.6, 0.6, 0.6]})).runs
    coarse = [{**row, "eval/heldout/problems": 5} for row in runs[2].evaluations]
    runs[2] = replace(runs[2], evaluations=coarse)
    expected = mean_interval([0.6] * 4, share=True, resolution=1 / 10)  # 5 problems × 2 samples
    for order in (runs, runs[::-1]):
        assert compare_runs(order, ["a"])["conditions"][0]["interval"] == pytest.approx([expected.low, expected.high])


def test_equivalence_is_tested_on_the_scale_of_the_evaluation(tmp_path):
    """Differences that are all equal are known to one answer of 50 problems with two samples, and no better."""
    values = {"a": list(BASE), "b": [value + 0.01 for value in BASE]}
    folder = campaign(tmp_path, values, {"campaign": {"equivalence_margin": 0.02}})
    found = compare_directories([folder])["conditions"][1]
    d = np.array(found["differences"])
    assert found["equivalence_p"] == pytest.approx(tost_p(d, 0.02, 1 / 100))
    assert found["equivalence_p"] > 100 * tost_p(d, 0.02)
