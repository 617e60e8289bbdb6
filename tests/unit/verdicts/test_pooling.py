"""Several directories in one comparison, and what of a campaign's declarations holds there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from verdict_cases import BASE, campaign, shifted

from retrain.campaign.judging.comparison import MIN_BOOTSTRAP_SEEDS, compare_runs
from retrain.campaign.judging.pooling import compare_directories, read_source
from retrain.campaign.judging.results import METRIC, Measure
from retrain.cli import app
from retrain.config.root import keys
from retrain.errors import UsageError
from retrain.files import append_jsonl, read_json, write_json
from retrain.maths.intervals import mean_interval
from retrain.maths.statistics import sign_flip_p, tost_p

DIFFERENCES = np.array(shifted(0.03)) - np.array(BASE)
RULE = {
    "rule": "linear", "metric": Measure().name, "planned": 8, "alpha": 0.05,
    "conditions": {"b": {
        "stopped_after": 6, "differences": [[seed, 0.03] for seed in range(1, 7)],
        "looks": [{"pairs": 6, "mean": 0.03, "allowed": 0.0375, "tail": 0.03, "p": 0.03, "spent": 0.03, "stop": True}],
    }},
}  # fmt: skip


def with_rule(folder: Path, values: dict[str, Any] | None = None) -> Path:
    """A campaign of two conditions that was stopped by a sequential rule."""
    campaign(folder, values or {"a": list(BASE), "b": shifted(0.03)})
    write_json(folder / "manifest.json", read_json(folder / "manifest.json") | {"sequential": RULE})
    return folder


@pytest.mark.parametrize("setting", ["training.keep_every", "reward.reward_max", "reward.reward_min",
                                     "reward.timeout_s", "training.nonfinite_limit"])  # fmt: skip
def test_replicates_that_differ_only_in_what_is_kept_shown_or_given_up_are_one_condition(tmp_path, setting):
    section, _, key = setting.partition(".")
    assert setting in keys()
    one = campaign(tmp_path / "one", {"a": list(BASE[:4]), "b": shifted(0.03)[:4]}, {section: {key: 3}})
    other = {"a": list(BASE[4:]), "b": shifted(0.03)[4:]}
    two = campaign(tmp_path / "two", other, {section: {key: 7}}, seeds=[5, 6, 7, 8])
    report = compare_directories([one, two])
    assert [each["label"] for each in report["conditions"]] == ["a", "b"]
    assert report["conditions"][1]["pairs"] == 8
    result = CliRunner().invoke(app, ["compare", str(one), str(two)])
    assert result.exit_code == 0
    assert "kept apart" not in result.output


def test_a_rule_of_stopping_holds_for_its_own_campaign_alone(tmp_path):
    one = with_rule(tmp_path / "one")
    alone = compare_directories([one])["conditions"][1]
    assert (alone["p_value"], alone["sequential"]["stopped_after"]) == (0.03, 6)
    more = campaign(tmp_path / "two", {"a": list(BASE), "b": shifted(0.03)}, seeds=list(range(11, 19)))
    pooled = compare_directories([one, more])["conditions"][1]
    assert "sequential" not in pooled
    assert (pooled["pairs"], pooled["p_value"]) == (16, sign_flip_p([*DIFFERENCES, *DIFFERENCES]))


def test_a_rule_of_stopping_holds_for_its_own_baseline_and_metric_alone(tmp_path):
    folder = with_rule(tmp_path, {"c": list(BASE), "b": shifted(0.03), "a": shifted(0.06)})
    assert "sequential" in compare_directories([folder])["conditions"][1]
    for named in ({"baseline": "a"}, {"metric": "auc"}, {"metric": "hard/correct_rate"}):
        found = compare_directories([folder], **named)["conditions"][1:]
        assert all("sequential" not in each for each in found)
        assert {each["label"] for each in found} >= {"b"}


def test_different_margins_are_none_and_equal_ones_hold(tmp_path):
    noise = [0.010, -0.012, 0.004, 0.008, -0.006, 0.011, -0.009, 0.005]
    values = {"a": list(BASE), "b": [b + d for b, d in zip(BASE, noise, strict=True)]}
    folders = {}
    for name, margin, start in (("one", 0.02, 1), ("same", 0.02, 11), ("wider", 0.05, 21)):
        config = {"campaign": {"equivalence_margin": margin}}
        folders[name] = campaign(tmp_path / name, values, config, seeds=list(range(start, start + 8)))
    same = compare_directories([folders["one"], folders["same"]])
    assert same["margin"] == 0.02
    assert same["conditions"][1]["equivalence_p"] is not None
    for pair in (("one", "wider"), ("wider", "one")):
        other = compare_directories([folders[name] for name in pair])
        assert other["margin"] is None
        assert other["conditions"][1]["equivalence_p"] is None
        assert any("different equivalence margins; none is applied" in warning for warning in other["warnings"])


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
    ("done", "done", 0.6), ("failed", "done", 0.7), ("done", "failed", 0.6), ("running", "done", 0.7),
    ("done", "running", 0.6),
])  # fmt: skip
def test_of_a_seed_that_was_run_twice_the_first_finished_run_counts(tmp_path, first, second, counted):
    one = campaign(tmp_path / "one", {"a": [0.6]}, states={"a_s1": first})
    two = campaign(tmp_path / "two", {"a": [0.7]}, states={"a_s1": second})
    report = compare_directories([one, two])
    assert report["conditions"][0]["after_values"] == [counted]
    assert any("more than once" in warning for warning in report["warnings"])


def test_of_a_seed_that_finished_nowhere_the_first_run_is_named(tmp_path):
    one = campaign(tmp_path / "one", {"a": [0.6, 0.5]}, states={"a_s1": "failed"})
    two = campaign(tmp_path / "two", {"a": [0.7]}, states={"a_s1": "running"})
    found = compare_directories([one, two])["conditions"][0]
    assert found["after_values"] == [0.5]
    assert [(run["seed"], run["state"]) for run in found["missing"]] == [(1, "failed")]


def test_the_coarsest_evaluation_decides_how_fine_an_interval_can_be(tmp_path):
    """Equal values have the width of one answer; of runs measured on 50 and on 5 problems, that of 5."""
    folder = campaign(tmp_path, {"a": [0.6, 0.6, 0.6, 0.6]})
    runs = read_source(folder).runs
    coarse = [{**row, "eval/heldout/problems": 5} for row in runs[2].evaluations]
    runs[2] = replace(runs[2], evaluations=coarse)
    for order in (runs, runs[::-1]):
        low, high = compare_runs(order, ["a"])["conditions"][0]["interval"]
        expected = mean_interval([0.6] * 4, share=True, resolution=1 / 10)  # 5 problems × 2 samples
        assert (low, high) == pytest.approx((expected.low, expected.high))
    finer = mean_interval([0.6] * 4, share=True, resolution=1 / 100)
    assert (finer.low or 0) > (expected.low or 0) + 0.01


def test_a_bootstrap_has_ends_from_eight_seeds_on(tmp_path):
    assert MIN_BOOTSTRAP_SEEDS == 8
    for seeds in (7, 8):
        results = {"a": list(BASE[:seeds]), "b": shifted(0.03)[:seeds]}
        a, b = compare_directories([campaign(tmp_path / str(seeds), results)])["conditions"]
        for found in (a["mean_bootstrap"], a["iqm_bootstrap"], b["probability_of_improvement"]):
            assert (found["low"] is not None, found["high"] is not None) == (seeds == 8, seeds == 8)
            assert found["estimate"] is not None


def test_equivalence_is_tested_on_the_scale_of_the_evaluation(tmp_path):
    """Differences that are all equal are known to one answer of one problem and no better."""
    by = 0.01
    values = {"a": list(BASE), "b": [value + by for value in BASE]}
    folder = campaign(tmp_path, values, {"campaign": {"equivalence_margin": 0.02}})
    for path in folder.rglob("evals.jsonl"):
        rows = [{"step": 0, "name": "heldout", METRIC: 0.5}]
        last = {"step": 20, "name": "heldout", "samples": 2, "eval/heldout/problems": 25}
        seed = int(path.parent.name[-1])
        rows.append(last | {METRIC: BASE[seed - 1] + by * path.parent.name.startswith("b")})
        path.unlink()
        append_jsonl(path, rows)
    found = compare_directories([folder])["conditions"][1]
    d = np.array(found["differences"])
    assert found["equivalence_p"] == pytest.approx(tost_p(d, 0.02, 1 / 50))
    assert found["equivalence_p"] > 100 * tost_p(d, 0.02)
