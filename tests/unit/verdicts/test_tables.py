"""``judge_tables``: results of other tools are judged as retrain's own, and what cannot be judged is refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.config.comparing import Compare
from retrain.errors import UsageError
from retrain.maths.crossed import new_problems_interval
from retrain.records.foreign.table import MetricFacts, RunTable
from retrain.verdicts.declaration import Standing
from retrain.verdicts.lock import UNDECLARED
from retrain.verdicts.rule import judge
from retrain.verdicts.tables import judge_tables

ACC = ("heldout", "acc")
BASE = (0.62, 0.60, 0.61, 0.63, 0.64, 0.60, 0.59, 0.62)
GAINS = (0.02, 0.03, 0.04, 0.01, 0.05, 0.03, 0.02, 0.04)
DECLARED = Standing()
Answers = dict[str, list[float | None]]


def scalars(condition: str, seed: int | None, values: Mapping[int, float | None], **fields: Any) -> RunTable:
    """A run whose tool wrote the accuracy at each step."""
    name = f"{condition} seed {seed}"
    return RunTable(
        condition, seed, name, numbers={ACC: dict(values)}, files=[Path(f"{name}.csv")], tool="verl", **fields
    )


def answered(condition: str, seed: int | None, answers: Answers, step: int = 0, **fields: Any) -> RunTable:
    name = f"{condition} seed {seed}"
    return RunTable(
        condition, seed, name, answers={ACC: {step: answers}}, files=[Path(f"{name}.jsonl")], tool="verl", **fields
    )


def compare_tables(tables: list[RunTable], compare: Compare, standing: Standing = UNDECLARED) -> dict[str, Any]:
    return judge_tables(tables, compare, standing).comparison.to_json()


def eight(column: tuple[str, str] = ACC, shift: int = 0) -> list[RunTable]:
    """Eight runs of each condition; the second is better by ``GAINS``, and its seeds begin at ``shift`` + 1."""
    runs = [scalars("a", seed, {0: 0.5, 40: value}) for seed, value in enumerate(BASE, 1)]
    pairs = zip(BASE, GAINS, strict=True)
    runs += [scalars("b", shift + seed, {0: 0.5, 40: base + gain}) for seed, (base, gain) in enumerate(pairs, 1)]
    return [replace(run, numbers={column: run.numbers[ACC]}) for run in runs]


def the_other(tables: list[RunTable], standing: Standing = DECLARED, **compare: Any) -> dict[str, Any]:
    return compare_tables(tables, Compare(**compare), standing)["conditions"][1]


def test_paired_by_seed_under_the_rule():
    row = compare_tables(eight(), Compare(), DECLARED)
    condition = row["conditions"][1]
    (analysis,) = judge(np.array([GAINS]))
    assert condition["difference_interval"] == pytest.approx([analysis.low, analysis.high], abs=1e-7)
    assert condition["p_value"] == analysis.p == 2**-7
    assert (condition["before"], condition["verdict"], row["share"]) == (0.5, "better", True)
    assert (row["source"], row["replicate"], row["pairing"]) == ("verl (16 files)", "training", "seed")
    assert row["read"] == ["read 16 runs from verl: 2 conditions, steps 0, 40"]
    assert "runs are finished after 40, the largest number found" in row["note"]


def test_without_a_declaration_there_is_no_verdict():
    condition = compare_tables(eight(), Compare())["conditions"][1]
    assert condition["p_value"] == 2**-7
    assert "exploratory, no verdict (nothing was declared before the results)" in condition["sentence"]


def problems(share: float, count: int = 40, samples: int = 2) -> Answers:
    right = round(share * count * samples)
    marks = [1.0] * right + [0.0] * (count * samples - right)
    return {f"p{i}": list(marks[i::count]) for i in range(count)}


def test_interval_for_new_problems_from_the_answers():
    random = np.random.default_rng(0)
    chances = np.clip(random.normal(0.5, 0.3, 40), 0, 1)
    right = random.random((2, 6, 40, 2)) < chances[None, None, :, None]
    tables = [
        answered(label, seed, {f"p{i:02}": [float(mark) for mark in marks] for i, marks in enumerate(right[c, seed])})
        for c, label in enumerate("ab")
        for seed in range(6)
    ]
    row = compare_tables(tables, Compare(), DECLARED)
    scores = right.mean(axis=3)[::-1].transpose(1, 2, 0)
    wider = new_problems_interval(scores, resolution=1 / 80)
    condition = row["conditions"][1]
    low, high = condition["difference_interval"]
    assert condition["after_values"] == pytest.approx(right[1].mean(axis=(1, 2)).tolist())
    assert condition["difference_new_problems"] == pytest.approx(
        {"estimate": wider.estimate, "low": min(wider.low, low), "high": max(wider.high, high)}
    )
    assert row["read"] == ["read 12 runs from verl: 2 conditions, 40 problems × 2 answers; problem sets equal"]
    assert condition["before"] is None  # the only evaluation is not one of the untrained model


# Which runs are there


def test_missing_and_failed_runs_are_named():
    tables = [run for run in eight() if run.name != "b seed 5"]
    tables[2] = replace(tables[2], state="failed")
    row = compare_tables(tables, Compare(), DECLARED)
    condition = row["conditions"][1]
    assert (condition["pairs"], condition["verdict"]) == (6, "interim: 6 of 8 pairs")
    assert "1 failed run is not in the means: a seed 3." in row["note"]
    assert "1 missing run is not in the means: b seed 5." in row["note"]
    nan = compare_tables([*eight()[:-1], scalars("b", 8, {0: 0.5, 40: None})], Compare(), DECLARED)
    assert "1 finished run without a value is not in the means: b seed 8." in nan["note"]
    declared = compare_tables(eight(), Compare(conditions=["a", "b", "c"]), DECLARED)
    assert "8 missing runs are not in the means: c seed 1, c seed 2, c seed 3, c seed 4," in declared["note"]
    assert declared["family"] == ["b", "c"]
    assert declared["conditions"][2]["verdict"] == "interim: 0 of 8 pairs"


def test_conditions_and_seeds_that_are_not_chosen():
    tables = [*eight(), scalars("c", 1, {40: 0.9}), scalars("b", 9, {40: 0.9})]
    row = compare_tables(tables, Compare(conditions=["a", "b"], seeds=[1, 2, 3, 4, 5, 6, 7, 8]), DECLARED)
    assert row["conditions"][1]["p_value"] == 2**-7
    assert row["warnings"][:2] == [
        "Not among the conditions, and left out: c.",
        "Not among the seeds, and left out: b seed 9.",
    ]


# Steps


def test_unequal_last_steps():
    tables = [*eight()[:-1], scalars("b", 8, {0: 0.5, 20: 0.6, 30: 0.9})]
    with pytest.raises(UsageError, match=r"b seed 8 ends after 30 steps and b seed 7 after 40: .*type steps = 40"):
        compare_tables(tables, Compare())
    row = compare_tables(tables, Compare(steps=40), DECLARED)
    missing = row["conditions"][1]["missing"]
    assert [(run["run_id"], run["state"], run["reason"]) for run in missing] == [
        ("b seed 8", "unfinished", "it has no evaluation after 40 steps")
    ]
    area = compare_tables(tables, Compare(metric="auc:acc"), DECLARED)
    assert area["summary"] == "auc"
    assert area["conditions"][1]["after_values"][-1] == pytest.approx((20 * 0.55 + 10 * 0.75) / 30)
    assert "Runs end after 30 to 40 steps" in area["note"]


def test_later_evaluations_do_not_count():
    tables = [*eight()[:-1], scalars("b", 8, {40: 0.66, 60: 0.1}, state="unfinished")]
    row = compare_tables(tables, Compare(steps=40), DECLARED)
    assert row["conditions"][1]["after_values"][-1] == 0.66
    assert "Evaluations after 40 steps are left out: of b seed 8." in row["note"]


def test_secondary_measures_need_no_other_evaluations_than_the_deciding_one():
    tables = [scalars(run.condition, run.seed, dict.fromkeys(range(0, 50, 10), 0.5)) for run in eight()]
    for metric, summaries in (("acc", []), ("last3:acc", ["final"]), ("auc:acc", ["final", "last3"])):
        row = compare_tables(tables, Compare(metric=metric))
        assert [other["summary"] for other in row["secondary"]] == summaries


def test_last3_needs_three_evaluations():
    with pytest.raises(UsageError, match=r'no run has three evaluations after the start.*metric = "acc"'):
        compare_tables(eight(), Compare(metric="last3:acc"))


# Metric, unit and direction


@pytest.mark.parametrize(
    ("metric", "compare", "message"),
    [
        ("style", {}, r'unit and direction of style: in \[compare\], type unit = "share".* and higher_is_better ='),
        ("style", {"higher_is_better": True}, "know the unit of style"),
        ("reward", {}, "know the unit of reward"),
        ("acc", {"conditions": ["c", "d"]}, "there are no results of c, d: there are those of a, b"),
        ("acc", {"seeds": [9]}, "no run has one of the seeds in .compare.: the runs are a seed 1, a seed 2"),
    ],
)
def test_what_is_not_known_is_asked_for(metric, compare, message):
    with pytest.raises(UsageError, match=message):
        compare_tables(eight(("heldout", metric)), Compare(**compare))


@pytest.mark.parametrize(
    ("metric", "compare", "facts", "verdict"),
    [
        ("val-core/acc", {}, {}, "better"),
        ("exact_match,strict", {}, {}, "better"),
        ("pass@8", {}, {}, "better"),
        ("loss", {}, {}, "worse"),
        ("style", {"unit": "number"}, {}, "higher"),
        ("style", {"unit": "share", "higher_is_better": False}, {}, "worse"),
        ("style", {}, {"sty*": MetricFacts(False, "share")}, "worse"),
        ("acc", {"higher_is_better": False}, {"acc": MetricFacts(True, "share")}, "worse"),
    ],
)
def test_direction_turns_the_verdict_not_the_numbers(metric, compare, facts, verdict):
    tables = [replace(run, facts=facts) for run in eight(("heldout", metric))]
    condition = the_other(tables, **compare)
    assert condition["verdict"] == verdict
    assert condition["typical_difference"] > 0


def test_shares_from_0_to_100_are_refused():
    tables = [*eight()[:-1], scalars("b", 8, {0: 0.5, 40: 66.0})]
    with pytest.raises(UsageError, match=r'^b seed 8.csv: acc of b seed 8 is 66 at step 40.*unit = "number".*by 100'):
        compare_tables(tables, Compare())
    assert the_other(tables, unit="number")["after_values"][-1] == 66.0
    with pytest.raises(UsageError, match=r"acc of b seed 8 is -1e\+101 at step 40, too large"):
        compare_tables([*eight()[:-1], scalars("b", 8, {40: -1e101})], Compare(unit="number"))


def test_resolution_of_rounded_and_of_single_precision_values():
    equal = [scalars(c, s, {40: float(np.float32(0.3))}) for c in "ab" for s in range(8)]
    low, high = compare_tables(equal, Compare())["conditions"][0]["interval"]
    exact = [scalars(c, s, {40: 0.3123457}) for c in "ab" for s in range(8)]
    assert low < 0.3 < high
    assert compare_tables(equal, Compare())["conditions"][0]["after_values"][0] == 0.3
    assert compare_tables(exact, Compare())["conditions"][0]["interval"] == pytest.approx([0.3123457] * 2)


# Problems and answers


def six(change: Callable[[str, int, Answers], Answers], **fields: Any) -> list[RunTable]:
    return [answered(c, s, change(c, s, problems(0.5)), 40, **fields) for c in "ab" for s in range(6)]


def test_other_problems_are_refused_or_left_out():
    def renamed(condition: str, seed: int, answers: Answers) -> Answers:
        if (condition, seed) != ("b", 2):
            return answers
        return {f"x{key}" if key in ("p1", "p2") else key: grades for key, grades in answers.items()}

    with pytest.raises(UsageError, match=r"a seed 0 \(step 40\) and b seed 2 .*: 4 of 42 .*problems = \"common\""):
        compare_tables(six(renamed), Compare())
    row = compare_tables(six(renamed), Compare(problems="common"), DECLARED)
    assert "38 problems × 2 answers" in row["read"][0]
    assert row["standing"] == "exploratory"
    assert "4 problems that not all runs have were left out" in row["conditions"][1]["sentence"]
    with pytest.raises(UsageError, match=r"no problem is in all runs\. If their prompt templates differ"):
        compare_tables(six(lambda c, _, a: {f"{c}{key}": a[key] for key in a}), Compare(problems="common"))


def test_an_answer_without_a_grade_is_wrong():
    def ungraded(condition: str, seed: int, answers: Answers) -> Answers:
        return {**answers, "p0": [None, 1.0]} if (condition, seed) == ("b", 0) else answers

    tables = six(ungraded)
    tables[6].numbers[ACC] = {40: 40 / 79}  # the tool left the failure out
    row = compare_tables(tables, Compare())
    assert row["conditions"][1]["after_values"][0] == pytest.approx(0.5)
    assert "Answers without a grade count as wrong: b seed 0 (1)." in row["note"]
    assert "(often failures left out): b seed 0, step 40: 0.506329, its answers say 0.5." in row["note"]
    rewards = compare_tables(tables, Compare(unit="number"))
    assert rewards["conditions"][1]["after_values"][0] == pytest.approx(0.5 + 0.5 / 40)
    nothing = six(lambda c, s, a: {**a, "p0": [None, None]} if (c, s) == ("b", 0) else a)
    assert len(compare_tables(nothing, Compare(unit="number"))["conditions"][1]["after_values"]) == 5


def test_unequal_numbers_of_answers_are_told():
    row = compare_tables(six(lambda c, s, a: {**a, "p0": [1.0]} if (c, s) == ("b", 0) else a), Compare())
    assert "Problems have 1 to 2 answers: the score of a problem is the mean of its answers." in row["note"]
    assert "× 1 to 2 answers" in row["read"][0]


# Runs that are not paired


@pytest.mark.parametrize("case", ["no common seed", "declared", "unknown seeds"])
def test_whole_runs(case):
    tables = eight(shift=8 if case == "no common seed" else 0)
    if case == "unknown seeds":
        tables = [replace(run, seed=None) for run in tables]
    row = compare_tables(tables, Compare(pairing="none" if case == "declared" else "seed"), DECLARED)
    condition = row["conditions"][1]
    assert (row["pairing"], row["replicate"], condition["verdict"]) == ("none", "training", "better")
    assert condition["p_value"] < 0.02
    low, high = condition["difference_interval"]
    assert 0 < low < condition["typical_difference"] < high
    assert condition["sentence"] == (
        "b − a: +2.8 points typically [+0.7, +5.0] (mean +3.0), p = 0.016, 8 + 8 runs, not paired: better (other "
        "seeds, these problems)."
    )


def test_a_run_that_fell_is_named():
    tables = [run if run.condition == "a" else scalars("b", run.seed, {0: 0.5, 40: 0.8}) for run in eight(shift=8)]
    tables[9] = scalars("b", 10, {0: 0.5, 40: 0.5})
    condition = the_other(tables)
    assert condition["verdict"] == "typical runs better"
    assert condition["sentence"].endswith(
        "typical runs better (other seeds, these problems); run 10 of b lies 30.0 points lower; the test assumes equal "
        "spreads, and those of the runs differ by more than 2.5 to 1."
    )


def test_few_whole_runs_cannot_tell():
    tables = [run for run in eight(shift=8) if run.seed in (1, 2, 3, 9, 10, 11)]
    condition = the_other(tables)
    assert condition["verdict"] == "cannot tell: 3 + 3 runs, 4 + 4 needed"
    assert condition["p_value"] is condition["difference_interval"] is None
    assert "3 + 3 runs, not paired: cannot tell" in condition["sentence"]


def test_whole_runs_that_are_still_to_come():
    tables = [run for run in eight() if run.name != "b seed 1"]
    row = compare_tables(tables, Compare(pairing="none", seeds=list(range(1, 9))), DECLARED)
    condition = row["conditions"][1]
    assert (condition["verdict"], condition["p_value"]) == ("interim", None)
    assert "1 missing run is not in the means: b run 1." in row["note"]
    assert "7 + 8 runs, not paired: interim, no verdict yet" in condition["sentence"]


def test_every_verdict_has_its_p():
    """Holm tests the last condition at 5 %, for which 4 + 4 runs are enough."""
    tables = [run for run in eight() if run.condition == "a" and run.seed in (1, 2, 3, 4)]
    tables += [scalars("b", 10 + seed, {40: 0.8 + seed / 100}) for seed in range(8)]
    tables += [scalars("c", 20 + seed, {40: 0.8 + seed / 100}) for seed in range(4)]
    last = compare_tables(tables, Compare(), DECLARED)["conditions"][2]
    assert (last["verdict"], last["difference_interval"]) == ("better", None)
    assert last["p_value"] == pytest.approx(2 / 70)


def test_more_runs_than_declared_seeds_get_no_verdict():
    tables = [replace(run, seed=None) for run in eight()]
    condition = the_other(tables, seeds=[1, 2, 3, 4, 5, 6])
    assert condition["standing_reasons"] == ["a condition has 8 runs, but 6 seeds declared"]
    assert the_other(tables, seeds=list(range(8)))["verdict"] == "better"


# One model for each condition


@pytest.mark.parametrize(("declared", "runs"), [("training", 1), ("none", 3)])
def test_one_model_of_each_is_compared_by_problem(declared, runs):
    shares = {"a": 0.5, "b": 0.75}
    tables = [answered(c, s, problems(share, 200)) for c, share in shares.items() for s in range(runs)]
    row = compare_tables(tables, Compare(replicate=declared), DECLARED)
    condition = row["conditions"][1]
    assert (row["replicate"], condition["verdict"], condition["p_value"]) == ("none", "these models: better", None)
    assert f"× {2 * runs} answers" in row["read"][0]
    assert condition["difference"] == pytest.approx(0.25)
    assert condition["sentence"].startswith("b − a: +25.0 points [+")
    assert condition["sentence"].endswith(
        "200 problems: better; these two models, on problems like these; nothing about another training run."
    )


def test_one_run_without_answers_cannot_tell():
    condition = the_other([scalars("a", 1, {40: 0.5}), scalars("b", 1, {40: 0.9})])
    assert condition["sentence"] == ("b − a: cannot tell: the answers to problems of one model or both are missing.")


def test_a_model_whose_run_failed_is_still_to_come():
    tables = [answered("a", 1, problems(0.5)), answered("b", 1, problems(0.6), state="failed")]
    assert the_other(tables)["sentence"] == "b − a: interim, no verdict yet."


@pytest.mark.parametrize("seeds", [[1], [1, 2, 3]])
def test_one_condition_is_compared_with_nothing(seeds: list[int]):
    row = compare_tables([scalars("a", seed, {40: 0.5}) for seed in seeds], Compare(steps=40))
    assert row["note"] == "a is the only condition: there is nothing to compare it with."


def test_rewards_of_two_models_have_a_t_interval():
    tables = [answered(c, None, {f"p{i}": [i % 5 + gain * (i % 2)] for i in range(50)}) for c, gain in ("a0", "b4")
              for gain in [float(gain)]]  # fmt: skip
    condition = the_other(tables, unit="number", higher_is_better=False)
    assert condition["difference"] == pytest.approx(2.0)
    assert condition["sentence"].startswith("b − a: +2 [+1.43, +2.57], 50 problems: worse;")
