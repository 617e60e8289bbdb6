"""The real GSM8K: every gold answer scores 1 when boxed and 0 when changed by one."""

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
    section = tasks.Data(
        source="train.jsonl", eval_source="test.jsonl", prompt_column="question", answer_column="answer"
    )
    return load_data(section, heldout=1319, base_dir=FOLDER)


def written_answers() -> list[str]:
    """The test set's gold answers as they stand after ``####``, read without the package."""
    lines = (FOLDER / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"].rpartition("####")[2].strip() for line in lines]


def changed(answer: str, by: int = 1) -> str:
    return str(int(answer) + by)


def test_every_problem_is_read_and_no_test_problem_is_trained_on(gsm8k: Dataset) -> None:
    assert len(gsm8k.train) == 7473
    assert len(gsm8k.heldout) == 1319
    assert sorted(problem.answer for problem in gsm8k.heldout) == sorted(
        answer.replace(",", "") for answer in written_answers()
    )
    assert all(str(int(problem.answer)) == problem.answer for problem in gsm8k.heldout)
    assert {problem.prompt for problem in gsm8k.train}.isdisjoint(problem.prompt for problem in gsm8k.heldout)


@pytest.mark.parametrize("kind", ["match", "math"])
def test_gold_answers_score_one_and_their_neighbours_zero(gsm8k: Dataset, kind: str) -> None:
    if kind == "math":
        pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    spellings = [r"\boxed{%s}", r"\boxed{ %s.00 }", r"so $\boxed{\$%s}$."]
    with build_grader(tasks.Reward.model_validate({"type": kind})) as grader:
        for spelling in spellings:
            right = grader.grade([(problem, spelling % problem.answer) for problem in gsm8k.heldout])
            assert [result.total_reward for result in right] == [1.0] * 1319
        for by in (1, -1):
            wrong = grader.grade([(p, rf"\boxed{{{changed(p.answer, by)}}}") for p in gsm8k.heldout])
            assert [result.total_reward for result in wrong] == [0.0] * 1319


def test_the_recipe_gives_its_three_values(gsm8k: Dataset) -> None:
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
