"""The intervals of a comparison: scale, family, new problems, looks, and that none contradicts its verdict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_cases import BASE, campaign, shifted

from retrain.campaign.judging.comparison import compare_runs
from retrain.campaign.judging.pooling import compare_directories
from retrain.campaign.judging.results import METRIC, Measure, RunResult
from retrain.files import append_jsonl
from retrain.maths.crossed import new_problems_interval
from retrain.maths.family import sign_flip_interval, t_interval
from retrain.maths.sequential import sequential_looks
from retrain.maths.statistics import tost_p

PASS = "eval/heldout/pass@4"


def run(label: str, seed: int, value: float, path: Path = Path(), **row: float) -> RunResult:
    """A finished run of four evaluations of 64 problems with 8 samples each; the last has this accuracy."""
    rows = [
        {"step": step, "name": "heldout", "samples": 8, "eval/heldout/problems": 64, METRIC: each, **row}
        for step, each in ((0, 0.5), (10, 0.5), (15, 0.5), (20, value))
    ]
    return RunResult(f"{label}_s{seed}", label, seed, "done", None, path, pair=(0, seed), evaluations=rows)


def found(values: dict[str, list[float]], **declared) -> dict:
    runs = [run(label, seed, value) for label, each in values.items() for seed, value in enumerate(each)]
    return compare_runs(runs, list(values), **declared)


@pytest.mark.parametrize(("measure", "step"), [
    (Measure(), 1 / 512),
    (Measure("final", PASS), 4 / 512),  # the first right answer: 1 − C(7, 4)/C(8, 4) = ½
    (Measure("final", "eval/heldout/pass@8"), 1 / 64),
    (Measure("final", "eval/heldout/avg@8"), 1 / 512),
    (Measure("final", "eval/heldout/maj@4"), 1 / 128),  # two blocks of four votes
    (Measure("final", "eval/heldout/easy/correct_rate"), 1 / 512),
    (Measure("auc", METRIC), (0.25**2 + 0.375**2 + 0.25**2 + 0.125**2) ** 0.5 / 512),
    (Measure("last3", METRIC), 1 / 512 / 3**0.5),
    (Measure("final", "eval/heldout/mean_length"), 0.0),
    (Measure("final", "correct_rate"), 0.0),
])  # fmt: skip
def test_the_step_of_the_scale(measure, step):
    values = {measure.key: 0.5} if measure.key != METRIC else {}
    assert run("a", 1, 0.5, **values).resolution(measure) == pytest.approx(step)


def test_six_equal_pairs_at_the_ceiling_prove_no_equivalence_beyond_rounding():
    for metric, step in (("final:pass@4", 4 / 512), ("auc", (0.25**2 + 0.375**2 + 0.25**2 + 0.125**2) ** 0.5 / 512)):
        runs = [run(label, seed, 1.0, **{PASS: 1.0}) for label in "ab" for seed in range(6)]
        other = compare_runs(runs, ["a", "b"], metric=metric, margin=0.003)["conditions"][1]
        assert other["equivalence_p"] == pytest.approx(tost_p(np.zeros(6), 0.003, step))
        assert other["equivalence_p"] > 0.0
        low, high = other["difference_interval"]
        assert low < 0.0 < high


def test_one_comparison_has_the_test_inverted_a_family_all_at_once():
    values = {"a": [*BASE, 0.63], "b": [*shifted(0.03), 0.66], "c": [*shifted(0.0), 0.60], "d": [*shifted(0.01), 0.66]}
    one = found({label: values[label] for label in "ab"})["conditions"][1]
    d = np.subtract(values["b"], values["a"])
    own = sign_flip_interval(d, resolution=1 / 512)
    assert one["difference_interval"] == pytest.approx([own.low, own.high])
    plain = t_interval(d, resolution=1 / 512)
    assert one["difference_t"] == pytest.approx([plain.low, plain.high])
    for condition in found(values)["conditions"][1:]:
        d = np.subtract(values[condition["label"]], values["a"])
        own = sign_flip_interval(d, 1 - 0.05 / 3, resolution=1 / 512)
        low, high = condition["difference_interval"]
        assert (low, high) == pytest.approx((own.low, own.high)) or 0.0 in (low, high)


STEPS = st.lists(st.integers(-20, 20), min_size=9, max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(5, 9), st.booleans())
def test_no_interval_stands_beside_a_contradicting_verdict(steps, seeds, looks):
    """Whatever the differences, ties and outliers: with and without looks, alone and in a family."""
    values = {"a": [0.5] * seeds}
    for i, each in enumerate(steps):
        values[f"b{i}"] = [0.5 + step / 64 for step in each[:seeds]]
    record = None
    if looks:
        level, conditions = 0.05 / len(steps), {}
        for label in list(values)[1:]:
            d = np.array(values[label]) - 0.5
            seen = [vars(each) for each in sequential_looks(d, 9, alpha=level)]
            stop = seen[-1]["pairs"] if seen[-1]["stop"] else None
            values[label] = values[label][: seen[-1]["pairs"]]
            pairs = [[seed, float(each)] for seed, each in enumerate(d[: seen[-1]["pairs"]])]
            conditions[label] = {"differences": pairs, "looks": seen, "stopped_after": stop}
        record = {"rule": "linear", "alpha": 0.05, "metric": f"final:{METRIC}", "planned": 9, "conditions": conditions}
    for condition in found(values, sequential=record, margin=0.02)["conditions"][1:]:
        low, high = condition["difference_interval"]
        assert -1.0 <= low <= high <= 1.0
        match condition["verdict"].split()[0].rstrip(","):
            case "better":
                assert low >= 0.0
            case "worse":
                assert high <= 0.0
            case "no":
                assert low <= 0.0 <= high


def looked_at(differences: list[float], planned: int) -> dict:
    seen = [vars(each) for each in sequential_looks(differences, planned)]
    stop = seen[-1]["pairs"] if seen[-1]["stop"] else None
    pairs = [[seed, d] for seed, d in enumerate(differences[: len(seen)])]
    conditions = {"b": {"differences": pairs, "looks": seen, "stopped_after": stop}}
    return {"rule": "linear", "alpha": 0.05, "metric": f"final:{METRIC}", "planned": planned, "conditions": conditions}


def test_with_looks_equivalence_is_claimed_at_the_planned_end_alone():
    small = [0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002, 0.0]
    record = looked_at(small, 8)
    values = {"a": [0.5] * 8, "b": [0.5 + d for d in small]}
    at_end = found(values, sequential=record, margin=0.02)["conditions"][1]
    assert at_end["verdict"] == "no difference beyond 2.0 points"
    assert at_end["equivalence_p"] == pytest.approx(tost_p(small, 0.02, 1 / 512))
    early = {label: each[:7] for label, each in values.items()}
    before = found(early, sequential=looked_at(small[:7], 8), margin=0.02)["conditions"][1]
    assert before["verdict"].startswith("cannot tell")
    assert before["equivalence_p"] is None
    positive = [0.004, 0.003, 0.002, 0.004, 0.001, 0.003]
    stopped = looked_at(positive, 8)
    values = {"a": [0.5] * 6, "b": [0.5 + d for d in positive]}
    shown = found(values, sequential=stopped, margin=0.02)["conditions"][1]
    assert (shown["verdict"], shown["equivalence_p"]) == ("better", None)
    adjusted = shown["difference_adjusted"]
    assert 0.0 <= adjusted["low"] < adjusted["estimate"] < adjusted["high"]
    assert shown["difference_interval"] == pytest.approx([min(positive), max(positive)])  # as the test inverts


@pytest.mark.parametrize("sign", [1, -1])
def test_pairs_after_the_rule_has_stopped_do_not_turn_the_interval_against_the_verdict(sign):
    """The rule stopped for a difference after six pairs. A cohort trained two more seeds, which collapsed and turn the
    mean of all pairs around: the interval must not say the opposite of the verdict."""
    first = [sign * d for d in (0.02, 0.03, 0.025, 0.035, 0.02, 0.03)]
    record = looked_at(first, 8)
    assert record["conditions"]["b"]["stopped_after"] == 6
    values = {"a": [0.5] * 8, "b": [0.5 + d for d in [*first, -0.2 * sign, -0.2 * sign]]}
    shown = found(values, sequential=record)["conditions"][1]
    assert shown["verdict"] == ("better" if sign > 0 else "worse")
    assert sign * shown["difference"] < 0.0
    low, high = shown["difference_interval"]
    assert low < high
    assert low == 0.0 if sign > 0 else high == 0.0


def answers(folder: Path, right: np.ndarray, steps: tuple[int, ...] = (20,)) -> RunResult:
    """A run whose evaluations of ``right`` [problems, samples] are on disk."""
    rows = [
        {"step": step, "name": "heldout", "problem_id": f"p{i}", "sample": j, "correct": bool(mark), "tags": [],
         "reward": float(mark), "num_tokens": 3, "answer": str(int(mark))}
        for step in steps for i, marks in enumerate(right) for j, mark in enumerate(marks)
    ]  # fmt: skip
    append_jsonl(folder / "emergence/evaluations.jsonl", rows)
    label, seed = folder.name.split("_s")
    return run(label, int(seed), float(right.mean()), folder, **{PASS: float(right[:, :4].any(axis=1).mean())})


def test_new_problems_from_the_completions_of_the_final_evaluation(tmp_path):
    random = np.random.default_rng(0)
    right = random.random((2, 6, 40, 4)) < np.clip(random.normal(0.5, 0.3, 40), 0, 1)[None, None, :, None]
    runs = [answers(tmp_path / f"{label}_s{s}", right[i, s]) for i, label in enumerate("ab") for s in range(6)]
    scores = right.mean(axis=3)[::-1].transpose(1, 2, 0)
    for metric, step in ((None, 1 / 512), ("final:pass@4", 4 / 512)):
        values = scores if metric is None else right.any(axis=3)[::-1].transpose(1, 2, 0).astype(float)
        own = compare_runs(runs, ["a", "b"], metric=metric)["conditions"][1]
        wider = new_problems_interval(values, resolution=step)
        low, high = own["difference_interval"]
        assert own["difference_new_problems"] == pytest.approx(
            {"estimate": wider.estimate, "low": min(wider.low, low), "high": max(wider.high, high)}
        )
    runs[3].evaluations[-1][METRIC] += 0.1  # not what these completions scored
    assert compare_runs(runs, ["a", "b"])["conditions"][1]["difference_new_problems"] is None


def test_directories_without_completions_have_no_interval_for_new_problems(tmp_path):
    report = compare_directories([campaign(tmp_path, {"a": list(BASE), "b": shifted(0.03)})])
    assert report["conditions"][1]["difference_new_problems"] is None
    assert report["conditions"][0]["difference_new_problems"] is None


def test_a_level_of_a_share_stays_within_the_scale():
    report = found({"a": [0.99, 1.0, 1.0, 0.9, 1.0, 0.97], "b": [0.0, 0.01, 0.0, 0.1, 0.0, 0.03]})
    for condition in report["conditions"]:
        assert 0.0 <= condition["iqm"]["low"] <= condition["iqm"]["high"] <= 1.0
    assert report["conditions"][1]["iqm_difference"]["low"] >= -1.0
