from pathlib import Path
from typing import Any

import pytest
from helpers.campaigns import run_cli
from helpers.records import BASE, campaign, shifted

from retrain.files import read_json, write_json
from retrain.verdicts.pooling import compare_directories

EIGHT = list(range(1, 9))
PENDING = {f"{label}_s{seed}": "pending" for label in "ab" for seed in (7, 8)}
TWO = {"a": list(BASE), "b": shifted(0.03)}


def declared(folder: Path, **first: Any) -> Path:
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
    folder = declared(campaign(tmp_path, TWO, {"campaign": {"seed": 7}}, states=PENDING))
    for run in PENDING:
        (folder / f"runs/{run}/config.json").unlink()  # as of runs that have not begun
    report = compare_directories([folder])
    found = report["conditions"][1]
    assert (found["standing"], found["verdict"]) == ("interim", "interim: 6 of 8 pairs")
    assert found["p_value"] is None  # it would have read: better
    assert {each["conditions"][1]["p_value"] for each in report["secondary"]} == {None}
    assert "6 of 8 pairs: interim, no verdict yet" in found["sentence"]
    output = run_cli("compare", tmp_path).output
    assert "interim: 6 of 8 pairs" in output
    assert "better" not in output
    assert "6 of 8 pairs: interim, no verdict yet; missing seeds could change the verdict" in found["sentence"]


def test_a_declared_run_that_failed_or_is_missing_counts_in_the_worst_case(tmp_path):
    """One lost run of nine can turn neither p nor the mean where they differ by 30 points, and the mean at 3."""
    values, nine = [*BASE, 0.6], list(range(1, 10))

    def of(name: str, lead: float, state: str = "failed") -> dict[str, Any]:
        results = {"a": [value - 0.4 for value in values], "b": [value - 0.4 + lead for value in values]}
        folder = declared(campaign(tmp_path / name, results, states={"b_s4": state}), seeds=nine)
        return finding(folder)

    clear = of("clear", 0.3)
    assert (clear["standing"], clear["verdict"], clear["p_value"]) == ("interim", "interim: 8 of 9 pairs", None)
    assert clear["missing_could_change"] is False
    assert "interim, no verdict yet; better also with the missing accuracies at 0 % or at 100 %" in clear["sentence"]
    small = of("small", 0.03)
    assert (small["standing"], small["missing_could_change"]) == ("interim", True)
    assert "missing seeds could change the verdict" in small["sentence"]
    assert of("killed", 0.3, "interrupted")["standing"] == "interim"
    whole = of("whole", 0.3, "done")
    assert (whole["standing"], whole["verdict"], whole["missing_could_change"]) == ("declared", "better", None)


@pytest.mark.parametrize(("first", "asked", "why"), [
    ({"seeds": EIGHT[:6]}, {}, "2 seeds were added: 7, 8"),
    ({"max_steps": {"a": 20, "b": 12}}, {}, "b was declared with 12 steps and planned with 20"),
    ({}, {"baseline": "b"}, "the baseline declared was a"),
    ({}, {"metric": "auc"}, "auc:eval/heldout/correct_rate was not declared as deciding"),
])  # fmt: skip
def test_what_was_chosen_afterwards_is_exploratory(tmp_path, first, asked, why):
    folder = declared(campaign(tmp_path, TWO), **first)
    found = finding(folder, **asked)
    assert (found["standing"], found["verdict"]) == ("exploratory", "exploratory")
    assert why in found["sentence"]
    assert found["p_value"] == 2**-7  # as if it had been declared; only a person can judge it
    for words in ("better", "worse", "no difference", "alike"):
        assert words not in found["sentence"]


def test_a_condition_that_was_added_leaves_the_verdicts_of_the_others(tmp_path):
    folder = declared(campaign(tmp_path, TWO | {"c": shifted(0.05)}), conditions=["a", "b"])
    *others, added = compare_directories([folder])["conditions"]
    assert [each["verdict"] for each in others] == ["baseline", "better"]
    assert (added["verdict"], "c was added" in added["sentence"]) == ("exploratory", True)


def test_what_was_declared_under_an_earlier_rule_is_judged_by_this_one_and_says_so(tmp_path):
    earlier = {"test": "normal", "sequential": "obrien_fleming", "futility": True}
    folder = declared(campaign(tmp_path, TWO), **earlier)
    report = compare_directories([folder])
    found = report["conditions"][1]
    assert (found["standing"], found["verdict"], found["decided_after"]) == ("declared", "better", 7)
    words = 'Declared under the rule of test = "normal", sequential = "obrien_fleming" and futility = true'
    assert words in report["note"]
    assert words in run_cli("compare", folder).output
    report = compare_directories([declared(campaign(tmp_path / "off", TWO), test="exact")])
    assert report["conditions"][1]["decided_after"] is None
    assert 'rule of test = "exact" and sequential = "off"' in report["note"]
    assert "Declared under" not in compare_directories([declared(campaign(tmp_path / "new", TWO))])["note"]


def test_runs_of_earlier_versions_are_pooled_with_new_ones(tmp_path):
    keys = {"test": "normal", "futility": True, "prior_spread": 0.04}
    earlier = campaign(tmp_path / "earlier", TWO, {"campaign": {"sequential": "linear", **keys}})
    new = campaign(tmp_path / "new", TWO, {"campaign": {"sequential": "on"}}, seeds=list(range(11, 19)))
    report = compare_directories([new, earlier])
    assert [(each["label"], len(each["finished"])) for each in report["conditions"]] == [("a", 16), ("b", 16)]
    assert "Declared under the rule of test" in report["note"]


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
