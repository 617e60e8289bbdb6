from pathlib import Path

import numpy as np
import pytest

from retrain.files import append_jsonl
from retrain.maths.crossed import new_problems_interval
from retrain.verdicts.comparison import compare_pairs
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


def test_the_interval_of_shares_ends_at_what_shares_can_be():
    runs = [run(label, seed, value) for label, value in (("a", 0.0), ("b", 1.0)) for seed in range(8)]
    low, high = compare_pairs(runs, ["a", "b"], Measure()).conditions[1].difference_interval
    assert (low, high) == (1.0, 1.0)


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
    share, solved = right.mean(axis=3), 1.0 * right.any(axis=3)
    for measure, step, scored in ((Measure(), 1 / 512, share), (Measure("final", PASS), 4 / 512, solved)):
        own = compare_pairs(runs, ["a", "b"], measure).conditions[1]
        wider = new_problems_interval(scored[::-1].transpose(1, 2, 0), resolution=step)
        low, high = own.difference_interval
        assert vars(own.difference_new_problems) == pytest.approx(
            {"estimate": wider.estimate, "low": min(wider.low, low), "high": max(wider.high, high)}
        )
    runs[3].evaluations[-1][METRIC] += 0.1  # not what these completions scored
    assert compare_pairs(runs, ["a", "b"], Measure()).conditions[1].difference_new_problems is None
