from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.config import tasks
from retrain.data import Dataset, load_data
from retrain.rewards import build_grader

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
pytestmark = pytest.mark.skipif(
    not (FOLDER / "test.jsonl").is_file(), reason="the GSM8K files are not beside the repository (shared/data/gsm8k)"
)
RECIPE = {
    "type": "weighted",
    "components": [
        {"type": "math", "name": "correct", "weight": 1.0},
        {"type": "format", "name": "format", "weight": 0.1, "offset": -1.0},
    ],
}


@pytest.fixture(scope="module")
def gsm8k() -> Dataset:
    return load_data(tasks.Data(source="train.jsonl", eval_source="test.jsonl"), heldout=1319, base_dir=FOLDER)


def changed(answer: str, by: int = 1) -> str:
    return str(int(answer) + by)


def test_every_problem_is_read_and_no_test_problem_is_trained_on(gsm8k):
    assert (len(gsm8k.train), len(gsm8k.heldout)) == (7473, 1319)
    lines = (FOLDER / "test.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line)["answer"].rpartition("####")[2].strip().replace(",", "") for line in lines]
    assert sorted(problem.answer for problem in gsm8k.heldout) == sorted(written)
    assert all(str(int(problem.answer)) == problem.answer for problem in gsm8k.heldout)
    assert {problem.prompt for problem in gsm8k.train}.isdisjoint(problem.prompt for problem in gsm8k.heldout)


@pytest.mark.parametrize("kind", ["match", "math"])
def test_gold_answers_score_one_and_their_neighbours_zero(gsm8k, kind):
    if kind == "math":
        pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    with build_grader(tasks.Reward.model_validate({"type": kind})) as grader:
        for spelling in (r"\boxed{%s}", r"\boxed{ %s.00 }", r"so $\boxed{\$%s}$."):
            right = grader.grade([(problem, spelling % problem.answer) for problem in gsm8k.heldout])
            assert [result.total_reward for result in right] == [1.0] * 1319
        for by in (1, -1):
            wrong = grader.grade([(p, rf"\boxed{{{changed(p.answer, by)}}}") for p in gsm8k.heldout])
            assert [result.total_reward for result in wrong] == [0.0] * 1319


def test_the_recipe_gives_its_three_values(gsm8k):
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    with build_grader(tasks.Reward.model_validate(RECIPE)) as grader:
        right = grader.grade([(p, rf"{p.metadata['solution']} \boxed{{{p.answer}}}") for p in gsm8k.heldout])
        wrong = grader.grade([(p, rf"\boxed{{{changed(p.answer)}}}") for p in gsm8k.heldout])
        written = grader.grade([(p, p.metadata["solution"]) for p in gsm8k.heldout])
        unmarked = grader.grade([(p, p.metadata["solution"].rpartition("####")[0]) for p in gsm8k.heldout])
    assert {result.total_reward for result in right} == {1.0}
    assert {result.total_reward for result in wrong} == {0.0}
    assert {result.total_reward for result in written} == {1.0}  # the data set's own way of marking an answer
    assert {result.total_reward for result in unmarked} == {-0.1}
    assert all(result.components == {"correct": 0.0, "format": 0.0} for result in unmarked)
