import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.campaigns import run_cli
from helpers.records import BASE, campaign, shifted

from retrain.config import parse_dict
from retrain.errors import UsageError
from retrain.files import read_json, write_json
from retrain.verdicts.pooling import compare_directories, conclude
from retrain.verdicts.results import Measure, area_under
from retrain.verdicts.rule import judge


def invoke(*arguments: str | Path):
    return run_cli("compare", *arguments)


def found(folder: Path, values: Sequence[float], margin: float | None = None) -> dict[str, Any]:
    """The one compared condition of a campaign with these values against ``BASE``."""
    settings = {"campaign": {"equivalence_margin": margin}}
    base = list(BASE) if len(values) == len(BASE) else [0.6] * len(values)
    return compare_directories([campaign(folder, {"a": base, "b": list(values)}, settings)])["conditions"][1]


def test_a_verdict_that_can_be_quoted(tmp_path):
    report = compare_directories([campaign(tmp_path, {"grpo": list(BASE), "maxrl": shifted(0.03)})])
    base, other = report["conditions"]
    d = np.array(other["differences"])
    assert d == pytest.approx(np.array(shifted(0.03)) - BASE)
    (analysis,) = judge(d[None])
    assert other["typical_difference"] == analysis.typical
    assert other["difference_interval"] == [analysis.low, analysis.high]
    assert other["p_value"] == analysis.p == 2**-7
    assert (base["verdict"], other["verdict"], report["follow_up"]) == ("baseline", "better", "")
    assert other["sentence"] == (
        "maxrl − grpo: +3.0 points typically [+2.6, +3.4] (mean +3.0), p = 0.0078, 8 pairs: better (other seeds, these "
        "problems); 1.00 times the device time per run."
    )
    assert (base["tokens_per_run"], base["seconds_per_run"]) == (2000, 20 * (2.0 + 4.0 / 4))
    assert other["probability_of_improvement"]["estimate"] == pytest.approx(
        np.mean([a > b for a in shifted(0.03) for b in BASE])
    )
    assert report["secondary"][0]["summary"] == "auc"


NOISE = [0.010, -0.012, 0.004, 0.008, -0.006, 0.011, -0.009, 0.005]


def test_no_difference_shown_says_what_stays_open(tmp_path):
    values = [b + d for b, d in zip(BASE, NOISE, strict=True)]
    report = compare_directories([campaign(tmp_path, {"a": list(BASE), "b": values})])
    other = report["conditions"][1]
    low, high = other["difference_interval"]
    assert other["verdict"] == "no difference shown"
    assert f"up to {100 * max(-low, high):.1f} points stay open" in other["sentence"]


def test_typical_runs_alike_has_a_second_bound(tmp_path):
    other = found(tmp_path, [b + d for b, d in zip(BASE, NOISE, strict=True)], margin=0.02)
    assert other["verdict"] == "typical runs alike"
    rate = 1 - (0.05 / 2) ** (1 / 8)
    after = max(np.mean(BASE), np.mean(BASE) + np.mean(NOISE))
    assert other["unseen_collapse_rate"] == pytest.approx(rate)
    assert other["mean_difference_bound"] == pytest.approx(0.02 + rate * (after - 0.5))
    assert (
        "8 pairs: typical runs alike within 2.0 points (other seeds, these problems); none of 8 + 8 runs is an "
        "outlier; collapses in up to 37% of runs would have gone unseen, so that the means differ by at most "
        f"{100 * other['mean_difference_bound']:.1f} points"
    ) in other["sentence"]
    for words in ("equivalent", "no difference"):
        assert words not in other["sentence"]


TEN = [0.63, 0.64, 0.625, 0.635, 0.62, 0.632, 0.628, 0.641, 0.619, 0.63]


def test_outlier_seeds_are_named_and_a_verdict_against_them_speaks_of_typical_runs(tmp_path):
    other = found(tmp_path / "fallen", [*TEN[:2], 0.45, *TEN[3:]])
    assert [each["seed"] for each in other["outlier_seeds"]] == [3]
    assert other["verdict"] == "typical runs better"
    assert "typical runs better (other seeds, these problems); seed 3 lies 17.9 points lower" in other["sentence"]
    other = found(tmp_path / "risen", [*TEN[:2], 0.8, *TEN[3:]])
    assert other["verdict"] == "better"
    assert "; seed 3 lies 16.8 points higher" in other["sentence"]
    alike = found(tmp_path / "alike", [0.6] * 9 + [0.5], margin=0.03)
    assert alike["verdict"] == "no difference shown"


def test_a_mean_on_the_other_side_gives_no_verdict(tmp_path):
    other = found(tmp_path, [*TEN[:2], 0.1, *TEN[3:]])
    assert other["difference"] < 0 < other["typical_difference"]
    assert other["verdict"] == "cannot tell: mean and typical difference disagree"


@pytest.mark.parametrize(("seeds", "conditions"), [(1, 2), (5, 2), (5, 5)])
def test_few_seeds_cannot_tell(tmp_path, seeds, conditions):
    results = {label: [v + 0.03 * place for v in BASE[:seeds]] for place, label in enumerate("abcde"[:conditions])}
    report = compare_directories([campaign(tmp_path, results)])
    other = report["conditions"][1]
    assert other["verdict"] == f"cannot tell: {seeds} pair{'s' * (seeds > 1)} of seeds, 6 needed"
    assert (other["p_value"], other["difference_interval"]) == (None, None)
    assert "cannot tell, 6 are needed" in other["sentence"]
    assert "p =" not in other["sentence"]
    assert "a verdict needs 6 or more" in report["note"]


def test_all_conditions_are_judged_together(tmp_path):
    results = {"a": list(BASE), "b": shifted(0.03), "c": shifted(0.04), "d": shifted(0.0)}
    states = {f"c_s{seed}": "failed" for seed in range(1, 9)}
    report = compare_directories([campaign(tmp_path, results, states=states)])
    b, c, d = report["conditions"][1:]
    assert (c["p_value"], c["verdict"]) == (None, "interim: 0 of 8 pairs")
    expected = judge(np.array([b["differences"], [np.nan] * 8, d["differences"]]))
    assert [b["p_value"], d["p_value"]] == [expected[0].p, expected[2].p]
    assert "corrected for 3 comparisons" in b["sentence"]
    assert report["pairs_needed"] == 6


def test_failed_and_unfinished_runs_are_named_and_never_silently_dropped(tmp_path):
    states = {"b_s2": "failed", "b_s3": "running", "a_s4": "pending", "b_s5": "interrupted"}
    folder = campaign(tmp_path, {"a": list(BASE), "b": [*shifted(0.02)[:7], None]}, states=states)
    report = compare_directories([folder])
    a, b = report["conditions"]
    missing = {"b_s2": "failed", "b_s3": "running", "b_s5": "interrupted", "b_s8": "done"}
    assert {run["run_id"]: run["state"] for run in b["missing"]} == missing
    assert b["missing"][0]["reason"] == "CUDA out of memory"
    assert "no final:eval/heldout/correct_rate" in b["missing"][3]["reason"]
    assert (a["finished"], b["finished"], b["failed"]) == ([1, 2, 3, 5, 6, 7, 8], [1, 4, 6, 7], 1)
    assert (b["pairs"], b["paired_seeds"], report["failed"]) == (3, [1, 6, 7], ["b_s2"])
    output = invoke(folder).output
    assert all(run_id in output for run_id in (*missing, "a_s4", "flatter", "4/8"))
    for path in folder.rglob("*.jsonl"):
        path.unlink()  # as of a campaign that has hardly begun
    result = invoke(folder)
    assert result.exit_code == 0
    assert "are not in the means" in result.output


def test_directories_are_pooled_by_condition(tmp_path):
    sections = {"training": ("keep_every", "nonfinite_limit"), "reward": ("reward_max", "reward_min", "timeout_s")}
    folders = []
    for value, half in ((3, slice(0, 4)), (7, slice(4, 8))):
        config = {section: dict.fromkeys(names, value) for section, names in sections.items()}
        results = {"a": BASE[half], "b": shifted(0.03)[half]}
        folders.append(campaign(tmp_path / str(value), results, config, seeds=[1, 2, 3, 4, 5, 6, 7, 8][half]))
    one, two = folders
    report = compare_directories([one, two, one, tmp_path / "3" / ".." / "3"])
    whole = compare_directories([campaign(tmp_path / "whole", {"a": list(BASE), "b": shifted(0.03)})])
    assert [each["conditions"][1]["verdict"] for each in (report, whole)] == ["exploratory", "better"]
    for mine, theirs in zip(report["conditions"], whole["conditions"], strict=True):
        for key in mine.keys() - {"standing", "standing_reasons", "verdict", "sentence"}:
            assert mine[key] == theirs[key], key


def test_metrics_and_baseline_are_chosen(tmp_path):
    folder = campaign(tmp_path, {"a": list(BASE), "b": shifted(0.03)})
    report = json.loads(invoke(folder, "--json", "--metric", "auc", "--baseline", "b").stdout)
    assert (report["baseline"], report["summary"]) == ("b", "auc")
    assert report["conditions"][0]["after_values"][0] == pytest.approx((0.5 + BASE[0] + 0.034) / 2)
    assert report["conditions"][1]["difference"] < 0
    assert report["conditions"][1]["verdict"] == "exploratory"
    assert "was not declared as deciding" in report["conditions"][1]["sentence"]
    longer = compare_directories([folder], metric="mean_length")
    assert not longer["share"]
    start = "b − a: +0 typically [+0, +0] (mean +0), p = 1, 8 pairs: exploratory"
    assert longer["conditions"][1]["sentence"].startswith(start)
    for arguments, message in (
        ((folder, "--metric", "corect_rate"), "did you mean correct_rate"),
        ((folder, "--baseline", "c"), "the conditions are a, b"),
        ((folder / "runs/a_s1",), "its campaign is"),
        ((folder / "runs",), "not the directory of a campaign or run"),
        ((folder / "nowhere",), "has no nowhere; it contains"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    at_the_end = conclude(folder)
    assert at_the_end["conditions"] == compare_directories([folder])["conditions"]
    assert read_json(folder / "comparison.json") == json.loads(json.dumps(at_the_end))


def test_names_of_measures():
    assert Measure.parse("final") == Measure.parse("correct_rate") == Measure()
    assert Measure.parse("auc:pass@4") == Measure("auc", "eval/heldout/pass@4")
    assert Measure.parse("hard/correct_rate").key == "eval/heldout/hard/correct_rate"
    assert Measure.parse("final:completions/mean_length").key == "completions/mean_length"
    shares = ("eval/heldout/maj@8", "eval/heldout/hard/pass@8", "mean_length")
    assert [Measure.parse(name).is_share for name in shares] == [True, True, False]
    assert [Measure.parse(name).higher_is_better for name in ("mean_reward", "entropy")] == [True, None]
    assert area_under([(0, 0.0), (10, 1.0), (30, 1.0)]) == pytest.approx(25 / 30)
    assert area_under([(5, 1.0)]) is None


def test_what_cannot_be_measured_cannot_be_declared():
    measured = {"training": {"eval_every": 5}, "evaluation": {"samples": 4}}
    parse_dict({"campaign": {"primary_metric": "auc:pass@4"}, **measured})
    for metric, message in (("best", "not final, last3 or auc"), ("auc", "eval_every"), ("final:pass@4", "4 samples")):
        with pytest.raises(UsageError, match=message):
            parse_dict({"campaign": {"primary_metric": metric}})


def test_other_settings_are_kept_apart_and_other_margins_are_not_applied(tmp_path):
    def made(name: str, margin: float, lr: float = 0.001, seeds: int = 1) -> Path:
        config = {"campaign": {"equivalence_margin": margin}, "training": {"lr": lr}}
        results = {"a": list(BASE), "b": shifted(0.0, 0.01)}
        return campaign(tmp_path / name, results, config, seeds=list(range(seeds, seeds + 8)))

    one, same, other, faster = made("1", 0.02), made("2", 0.02, seeds=11), made("3", 0.05, seeds=11), made("4", 0.02, 1)
    for folders, margin in (([one, same], 0.02), ([one, other], None), ([other, one], None)):
        report = compare_directories(folders)
        assert report["margin"] == margin
        refused = any("different equivalence margins; none is applied" in warning for warning in report["warnings"])
        assert refused == (margin is None)
    report = compare_directories([one, faster])
    assert [each["label"] for each in report["conditions"]] == ["a", "b", "a@4", "b@4"]
    assert report["conditions"][2]["verdict"] == "exploratory"
    assert any("training.lr 1 instead of 0.001" in warning for warning in report["warnings"])


def test_an_interim_analysis_holds_for_its_own_campaign_baseline_and_metric_alone(tmp_path):
    one = campaign(tmp_path / "one", {"a": list(BASE), "b": shifted(0.03), "c": shifted(0.06)})
    on = {"sequential": "on", "primary_metric": "final", "baseline": "a", "conditions": list("abc"),
          "seeds": list(range(1, 9))}  # fmt: skip
    write_json(one / "manifest.json", read_json(one / "manifest.json") | {"declared": on})
    assert [each["decided_after"] for each in compare_directories([one])["conditions"]] == [None, 7, 7]
    for named in ({"baseline": "c"}, {"metric": "auc"}, {"metric": "hard/correct_rate"}):
        assert {each["decided_after"] for each in compare_directories([one], **named)["conditions"]} == {None}
    more = campaign(tmp_path / "two", {"a": list(BASE), "b": shifted(0.03)}, seeds=list(range(11, 19)))
    pooled = compare_directories([one, more])["conditions"][1]
    assert (pooled["pairs"], pooled["decided_after"]) == (16, None)
    differences = np.subtract(shifted(0.03), BASE)
    added = np.concatenate([np.subtract(shifted(0.06), BASE), np.full(8, np.nan)])
    assert pooled["p_value"] == judge(np.stack([np.tile(differences, 2), added]))[0].p


def test_every_run_of_every_directory_is_measured_alike(tmp_path):
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
    assert invoke(*folders, "--metric", "final:num_tokens").exit_code == 0  # a number of training is another matter
    (last / "evals.jsonl").unlink()
    assert compare_directories(folders)["conditions"][0]["finished"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("first", "second", "counted"), [
    ("done", "done", [0.6]), ("failed", "done", [0.7]), ("done", "running", [0.6]), ("failed", "running", []),
])  # fmt: skip
def test_of_a_seed_that_was_run_twice_the_first_finished_run_counts(tmp_path, first, second, counted):
    one = campaign(tmp_path / "one", {"a": [0.6]}, states={"a_s1": first})
    two = campaign(tmp_path / "two", {"a": [0.7]}, states={"a_s1": second})
    report = compare_directories([one, two])
    assert report["conditions"][0]["after_values"] == counted
    assert [run["state"] for run in report["conditions"][0]["missing"]] == ([] if counted else [first])
    assert any("more than once" in warning for warning in report["warnings"])
