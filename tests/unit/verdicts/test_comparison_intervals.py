from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.files import append_jsonl
from retrain.maths.crossed import new_problems_interval
from retrain.maths.sequential import sequential_looks
from retrain.maths.statistics import tost_p
from retrain.verdicts.comparison import compare_runs
from retrain.verdicts.results import METRIC, Measure, RunResult

PASS = "eval/heldout/pass@4"
OF_AUC = (0.25**2 + 0.375**2 + 0.25**2 + 0.125**2) ** 0.5 / 512


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
    (Measure("final", "eval/heldout/maj@4"), 1 / 128),  # two blocks of four votes
    (Measure("auc", METRIC), OF_AUC),
    (Measure("last3", METRIC), 1 / 512 / 3**0.5),
    (Measure("final", "eval/heldout/mean_length"), 0.0),
])  # fmt: skip
def test_the_step_of_the_scale(measure, step):
    values = {measure.key: 0.5} if measure.key != METRIC else {}
    assert run("a", 1, 0.5, **values).resolution(measure) == pytest.approx(step)


STEPS = st.lists(st.integers(-20, 20), min_size=9, max_size=9)


@settings(max_examples=30)
@given(st.lists(STEPS, min_size=1, max_size=3), st.integers(5, 9), st.booleans())
def test_no_interval_stands_beside_a_contradicting_verdict(steps, seeds, looks):
    """Whatever the differences, ties and outliers: with and without looks, alone and in a family."""
    values = {"a": [0.5] * seeds}
    record = looked_at({}, 9)
    for i, each in enumerate(steps):
        differences = [step / 64 for step in each[:seeds]]
        if looks:
            one = looked_at({f"b{i}": differences}, 9, 0.05 / len(steps))
            record["conditions"] |= one["conditions"]
            differences = [d for _, d in one["conditions"][f"b{i}"]["differences"]]
        values[f"b{i}"] = [0.5 + d for d in differences]
    for condition in found(values, sequential=record if looks else None, margin=0.02)["conditions"][1:]:
        low, high = condition["difference_interval"]
        assert -1.0 <= low <= high <= 1.0
        match condition["verdict"].split()[0].rstrip(","):
            case "better":
                assert low >= 0.0
            case "worse":
                assert high <= 0.0
            case "no":
                assert low <= 0.0 <= high


def looked_at(differences: dict[str, list[float]], planned: int, alpha: float = 0.05) -> dict:
    conditions = {}
    for label, values in differences.items():
        seen = [vars(each) for each in sequential_looks(values, planned, alpha=alpha)]
        stop = seen[-1]["pairs"] if seen[-1]["stop"] else None
        pairs = [[seed, d] for seed, d in enumerate(values[: len(seen)])]
        conditions[label] = {"differences": pairs, "looks": seen, "stopped_after": stop}
    return {"rule": "linear", "alpha": 0.05, "metric": f"final:{METRIC}", "planned": planned, "conditions": conditions}


def judged(differences: list[float], looked: int = 8, **declared) -> dict:
    values = {"a": [0.5] * len(differences), "b": [0.5 + d for d in differences]}
    record = looked_at({"b": differences[:looked]}, 8)
    return found(values, sequential=record, **declared)["conditions"][1]


def test_with_looks_equivalence_is_claimed_at_the_planned_end_alone():
    small = [0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002, 0.0]
    at_end, before = judged(small, margin=0.02), judged(small[:7], margin=0.02)
    assert at_end["verdict"] == "no difference beyond 2.0 points"
    assert at_end["equivalence_p"] == pytest.approx(tost_p(small, 0.02, 1 / 512))
    assert before["verdict"].startswith("cannot tell")
    assert before["equivalence_p"] is None
    positive = [0.004, 0.003, 0.002, 0.004, 0.001, 0.003]
    shown = judged(positive, margin=0.02)
    ceiling = [run(label, seed, 1.0) for label in "ab" for seed in range(6)]
    equal = compare_runs(ceiling, ["a", "b"], margin=0.003)["conditions"][1]
    assert equal["equivalence_p"] == pytest.approx(tost_p(np.zeros(6), 0.003, 1 / 512))  # known up to rounding only
    assert (shown["verdict"], shown["equivalence_p"]) == ("better", None)
    adjusted = shown["difference_adjusted"]
    assert 0.0 <= adjusted["low"] < adjusted["estimate"] < adjusted["high"]
    assert shown["difference_interval"] == pytest.approx([min(positive), max(positive)])  # as the test inverts


@pytest.mark.parametrize("sign", [1, -1])
def test_pairs_after_the_rule_has_stopped_do_not_turn_the_interval_against_the_verdict(sign):
    """The rule stopped for a difference after six pairs. A cohort trained two more seeds, which collapsed and turn the
    mean of all pairs around: the interval must not say the opposite of the verdict."""
    first = [sign * d for d in (0.02, 0.03, 0.025, 0.035, 0.02, 0.03)]
    shown = judged([*first, -0.2 * sign, -0.2 * sign], looked=6)
    assert shown["verdict"] == ("better" if sign > 0 else "worse")
    assert sign * shown["difference"] < 0.0
    low, high = shown["difference_interval"]
    assert low < high
    assert low == 0.0 if sign > 0 else high == 0.0


def answers(folder: Path, right: np.ndarray) -> RunResult:
    """A run whose final evaluation, ``right`` [problems, samples], is on disk."""
    rows = [
        {"step": 20, "name": "heldout", "problem_id": f"p{i}", "sample": j, "correct": bool(mark), "tags": [],
         "reward": float(mark), "num_tokens": 3, "answer": str(int(mark))}
        for i, marks in enumerate(right) for j, mark in enumerate(marks)
    ]  # fmt: skip
    append_jsonl(folder / "emergence/evaluations.jsonl", rows)
    label, seed = folder.name.split("_s")
    return run(label, int(seed), float(right.mean()), folder, **{PASS: float(right[:, :4].any(axis=1).mean())})


def test_new_problems_from_the_completions_of_the_final_evaluation(tmp_path):
    random = np.random.default_rng(0)
    right = random.random((2, 6, 40, 4)) < np.clip(random.normal(0.5, 0.3, 40), 0, 1)[None, None, :, None]
    runs = [answers(tmp_path / f"{label}_s{s}", right[i, s]) for i, label in enumerate("ab") for s in range(6)]
    for metric, step, scored in (
        (None, 1 / 512, right.mean(axis=3)),
        ("final:pass@4", 4 / 512, 1.0 * right.any(axis=3)),
    ):
        own = compare_runs(runs, ["a", "b"], metric=metric)["conditions"][1]
        wider = new_problems_interval(scored[::-1].transpose(1, 2, 0), resolution=step)
        low, high = own["difference_interval"]
        assert own["difference_new_problems"] == pytest.approx(
            {"estimate": wider.estimate, "low": min(wider.low, low), "high": max(wider.high, high)}
        )
    runs[3].evaluations[-1][METRIC] += 0.1  # not what these completions scored
    assert compare_runs(runs, ["a", "b"])["conditions"][1]["difference_new_problems"] is None
