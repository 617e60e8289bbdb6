"""The arithmetic problems and the pupil's way of working them."""

from __future__ import annotations

from random import Random

import pytest
from demonstrations import CAREFUL, PUPIL, demonstration, guess

from retrain.data.arithmetic import LEVELS, evaluate, parse, problems, split_of
from retrain.errors import DataError
from retrain.maths.planning import STRATEGIC_GRAMS, RegexDetector


def boxed(text: str) -> str:
    return text.rsplit("\\boxed{", 1)[1].split("}", 1)[0]


def test_answers_agree_with_python_and_no_step_is_negative():
    for problem in problems("train", 3000, seed=3):
        expression = problem.metadata["expression"]
        assert problem.prompt == f"{expression}=?"
        assert int(problem.answer) == eval(expression) == evaluate(expression) >= 0
        first, operations = parse(expression)
        for end in range(1, len(operations) + 1):
            text = str(first) + "".join(f"{op}{number}" for op, number in operations[:end])
            assert evaluate(text) >= 0


def test_train_and_heldout_never_meet_whatever_the_seed():
    train = {p.id for seed in range(4) for p in problems("train", 6000, seed=seed)}
    heldout = {p.id for seed in range(4) for p in problems("heldout", 1500, seed=seed)}
    assert not train & heldout
    assert all(split_of(identifier.removeprefix("arithmetic/")) == "heldout" for identifier in heldout)
    share = sum(split_of(f"{a}+{b}") == "heldout" for a in range(10, 100) for b in range(10, 100)) / 8100
    assert 0.11 < share < 0.14  # one in eight


def test_lists_are_stable_unique_balanced_and_prefixes_of_longer_ones():
    chosen = problems("train", 999, seed=7)
    assert chosen == problems("train", 2000, seed=7)[:999]
    assert chosen != problems("train", 999, seed=8)
    assert len({p.id for p in chosen}) == 999
    assert [p.tags[0] for p in chosen[:4]] == ["easy", "medium", "hard", "easy"]
    assert {p.tags for p in problems("train", 50, ["medium"])} == {("medium",)}


def test_the_most_problems_of_a_level_can_be_had_and_no_more():
    assert len(problems("heldout", 3_200, ["easy"])) == 3_200
    with pytest.raises(DataError, match="at most 24000 train problems of level 'easy'"):
        problems("train", 24_001, ["easy"])


def test_unknown_levels_splits_and_expressions_are_errors():
    for levels in (["middling"], []):
        with pytest.raises(DataError, match="easy"):
            problems("train", 3, levels)
    with pytest.raises(DataError, match="use 'train' or 'heldout'"):
        problems("test", 3)  # pyright: ignore[reportArgumentType]
    for text in ("", "4x5", "-3+4", "12+", "1 + 2"):
        with pytest.raises(DataError, match="not an arithmetic expression"):
            parse(text)


def test_a_careful_pupil_is_always_right():
    rng = Random(0)
    for problem in problems("train", 1000, seed=1):
        text = demonstration(problem, rng, CAREFUL)
        assert boxed(text) == problem.answer
        for equation in text.replace("\n", ", ").split(", "):
            left, equals, right = equation.rpartition(": ")[2].partition("=")
            assert not equals or eval(left) == int(right), equation


def test_demonstrations_depend_only_on_the_random_numbers():
    chosen = problems("train", 300)
    first, second = Random(5), Random(5)
    assert [demonstration(p, first) for p in chosen] == [demonstration(p, second) for p in chosen]


def test_a_guess_forgets_carries():
    assert guess("+", 47, 38) == 75
    assert guess("-", 52, 38) == 26
    assert guess("*", 7, 46) == 282
    assert guess("+", 123, 45) == 168


def test_habits_leave_room_to_learn_and_checks_help():
    rng = Random(4)
    chosen = problems("train", 6000)
    right: dict[str, list[bool]] = {level: [] for level in LEVELS}
    for problem in chosen:
        right[problem.tags[0]].append(boxed(demonstration(problem, rng)) == problem.answer)
    rates = {level: sum(values) / len(values) for level, values in right.items()}
    assert rates["easy"] > rates["hard"] + 0.2
    assert 0.35 < sum(rates.values()) / 3 < 0.65

    def rate(**changes: float) -> float:
        pupil = type(PUPIL)(**{**PUPIL.__dict__, "guess": 0.0, **changes})
        rng = Random(9)
        return sum(boxed(demonstration(p, rng, pupil)) == p.answer for p in chosen) / len(chosen)

    without = rate(repair=0.0, plan=0.0)
    with_checks = rate(repair=1.0, plan=0.0)
    with_plans = rate(repair=0.0, plan=1.0)
    assert with_checks > without + 0.1
    assert with_plans > without + 0.1


def test_all_planning_phrases_of_the_detector_come_from_the_pupil():
    rng = Random(1)
    text = "\n".join(demonstration(p, rng) for p in problems("train", 9000)).lower()
    phrases = {text[start:end] for start, end in RegexDetector().char_spans(text)}
    assert phrases >= set(STRATEGIC_GRAMS), set(STRATEGIC_GRAMS) - phrases
