from pathlib import Path

import pytest

from retrain.data.arithmetic import (
    ARITHMETIC_LEVELS,
    arithmetic_problems,
    evaluate_expression,
    parse_expression,
    split_of_expression,
)
from retrain.errors import DataError
from retrain.plugins import load_file


def test_answers_agree_with_python_and_no_step_is_negative():
    for problem in arithmetic_problems("train", 4000, ARITHMETIC_LEVELS, seed=3):
        expression = problem.metadata["expression"]
        assert problem.prompt == f"{expression}=?"
        assert int(problem.answer) == eval(expression) == evaluate_expression(expression) >= 0
        first, operations = parse_expression(expression)
        for end in range(1, len(operations) + 1):
            text = str(first) + "".join(f"{op}{number}" for op, number in operations[:end])
            assert evaluate_expression(text) >= 0


def test_train_and_heldout_never_meet_whatever_the_seed():
    train = {p.id for seed in range(4) for p in arithmetic_problems("train", 6000, seed=seed)}
    heldout = {p.id for seed in range(4) for p in arithmetic_problems("heldout", 1500, seed=seed)}
    assert not train & heldout
    assert all(split_of_expression(identifier.removeprefix("arithmetic/")) == "heldout" for identifier in heldout)
    share = sum(split_of_expression(f"{a}+{b}") == "heldout" for a in range(10, 100) for b in range(10, 100)) / 8100
    assert 0.11 < share < 0.14  # one in eight


def test_lists_are_stable_unique_balanced_and_prefixes_of_longer_ones():
    chosen = arithmetic_problems("train", 999, seed=7)
    assert chosen == arithmetic_problems("train", 2000, seed=7)[:999]
    assert chosen != arithmetic_problems("train", 999, seed=8)
    assert len({p.id for p in chosen}) == 999
    assert [p.tags[0] for p in chosen[:4]] == ["easy", "medium", "hard", "easy"]
    assert {p.tags for p in arithmetic_problems("train", 50, ["medium"])} == {("medium",)}


def test_the_most_problems_of_a_level_can_be_had_and_no_more():
    assert len(arithmetic_problems("heldout", 3_200, ["easy"])) == 3_200
    with pytest.raises(DataError, match="at most 24000 train problems of level 'easy'"):
        arithmetic_problems("train", 24_001, ["easy"])


def test_unknown_levels_splits_and_expressions_are_errors():
    for levels in (["middling"], []):
        with pytest.raises(DataError, match="easy"):
            arithmetic_problems("train", 3, levels)
    with pytest.raises(DataError, match="use 'train' or 'heldout'"):
        arithmetic_problems("test", 3)
    for text in ("", "4x5", "-3+4", "12+", "1 + 2"):
        with pytest.raises(DataError, match="not an arithmetic expression"):
            parse_expression(text)


def test_calculations_are_right_and_held_out_by_their_text():
    path = Path(__file__).parents[3] / "campaigns" / "calculations.py"
    calculations = load_file(path, "calculations")
    train, test = (calculations.problems(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (6000, 600)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in (*train[:50], *test[:50]):
        assert eval(row["prompt"].removesuffix("=?")) == int(row["answer"]) >= 0


def test_the_calculator_takes_one_operation_a_call():
    """Every problem of the data source is solved by its steps, each of them one call."""
    path = Path(__file__).parents[3] / "campaigns" / "calculations.py"
    calculations = load_file(path, "calculations")
    for row in calculations.problems("test")[:50]:
        assert [calculations.calculator(step) for step in row["steps"]][-1] == row["answer"]
    assert calculations.calculator("3 - 10") == "-7"
    for text in ("", "38*47-128", "7/2", "-3+4", "2**9", "9" * 10 + "*2", "__import__('os')"):
        assert calculations.calculator(text) == "one operation, such as 38*47"
