"""Rewards by text: extraction, normalisation, match, format, weighted sums, and what a grader makes of faults."""

from __future__ import annotations

import math
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import tasks
from retrain.data.sources import Columns, problem_of_row
from retrain.errors import MissingExtra, PluginError
from retrain.rewards import Grader, Reward, RewardResult, build_grader
from retrain.rewards.base import printable
from retrain.rewards.extract import last_boxed, last_number, normalise, plain_number, reference_answer
from retrain.rewards.rules import FormatReward, MatchReward
from retrain.rewards.weighted import Component, WeightedReward
from retrain.types import Problem

ADD = Problem("p", "6*7=?", "42", ("easy",))
MEGABYTE = 1 << 20


def problem(answer: str) -> Problem:
    return Problem("p", "?", answer)


def match(completion: str, answer: str = "42", strict: bool = True) -> float | None:
    (result,) = Grader(MatchReward(strict)).grade([(problem(answer), completion)])
    return result.total_reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$ units", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{12", None),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxedness{3}", None),
        ("no box", None),
    ],
)
def test_the_last_box_decides(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50", "1234.5"),
        ("−3", "-3"),
        ("007", "7"),
        (".5", "0.5"),
        ("42.", "42"),
        ("1e3", None),
        ("", None),
        ("٣", None),
        ("1" * 5000 + ".0", "1" * 5000),
    ],
)
def test_plain_numbers_have_one_spelling(text: str, number: str | None) -> None:
    assert plain_number(text) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=4))
def test_plain_number_keeps_the_value(value) -> None:
    spelled = f"{value:,f}"
    number = plain_number(spelled)
    assert number is not None
    assert float(number) == float(value)
    assert plain_number(number) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("6*7 is 42, so 42.", "42"),
        ("between 3-5", "5"),
        ("x = -5", "-5"),
        ("1234,567", "567"),
        ("pi is 3.14.", "3.14"),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Add them.\n#### 1,234", "1234"),
        ("#### 3 apples, 2 pears", "3 apples, 2 pears"),
        (r"Thus $x = \boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        ("  Paris ", "Paris"),
        ("", ""),
    ],
)
def test_reference_answers_of_solutions(text: str, answer: str) -> None:
    assert reference_answer(text) == answer


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"\boxed{42}", "42", 1),
        (r"\boxed{\$1,450}", "1450", 1),
        (r"\boxed{1{,}450.}", "1450", 1),
        (r"\boxed{1,450}", "1,450.00", 1),
        (r"\boxed{4 2}", "42", 1),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\left( 1,\, 2 \right)}", "(1,2)", 1),
        (r"\boxed{12}", "1,2", 0),
        (r"\boxed{41} no: 42", "42", 0),  # the box decides, not what is said after it
        (r"\boxed{42", "42", 0),  # truncated in the box
        (r"\boxed{}", "42", 0),
        ("6*7 = 42", "42", 0),  # nothing is marked as the answer
        ("The capital is\nParis.", "Paris", 0),
        (r"\boxed{paris}", "Paris", 0),
    ],
)
def test_match(completion: str, answer: str, reward: float) -> None:
    assert match(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("6*7 = 42", "42", 1),  # without any box the last number counts
        ("42, or is it 43?", "42", 0),
        ("The capital is\nParis.", "Paris", 1),
        ("Paris\n\nLyon", "Paris", 0),
        (r"42 \boxed{42", "42", 0),
    ],
)
def test_match_that_is_not_strict(completion: str, answer: str, reward: float) -> None:
    with build_grader(tasks.Reward(type="match", strict=False)) as grader:
        assert grader.grade([(problem(answer), completion)])[0].total_reward == reward


@pytest.mark.parametrize(
    ("completion", "correct", "format_ok"),
    [
        ("9 a day, 9*2=18\n#### 18", True, True),
        ("9 a day\n#### 17", False, True),
        ("#### 17\nNo.\n#### $18.00", True, True),
        (r"#### 17 \boxed{18}", True, True),  # a box decides
        ("####", False, False),
        ("It is 18", False, False),
        ("the line #### 18", False, False),  # GSM8K begins a line with it
    ],
)
def test_the_marker_of_the_data_set_marks_an_answer(completion: str, correct: bool, format_ok: bool) -> None:
    row = {"question": "Ducks?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}
    ducks = problem_of_row("gsm8k.jsonl:1", row, Columns("question", "answer"))
    rewards = ("match", "math") if find_spec("math_verify") else ("match",)
    for kind in rewards:
        with build_grader(tasks.Reward.model_validate({"type": kind, "workers": 1})) as grader:
            (result,) = grader.grade([(ducks, completion)])
            assert (result.correct, result.format_ok) == (correct, format_ok)
    assert Grader(FormatReward()).grade([(ducks, completion)])[0].total_reward == float(format_ok)


def test_an_empty_answer_never_equals_an_empty_reference() -> None:
    for answer in ("", " ", "$", "."):
        for completion in ("", " ", r"\boxed{}", r"\boxed{ }", "$", r"\boxed{$$}", "."):
            assert match(completion, answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [(r"\boxed{x}", 1), (r"\boxed{ }", 0), (r"\boxed{1", 0), ("1", 0), (r"\boxed{1} \boxed{}", 0)],
)
def test_format(completion: str, reward: float) -> None:
    (result,) = Grader(FormatReward()).grade([(ADD, completion)])
    assert result.total_reward == reward
    assert result.format_ok is bool(reward)
    assert FormatReward().grade(ADD, completion).correct is None  # as a component it leaves that to another


HOSTILE = {
    "digits": "9" * MEGABYTE,
    "minus signs": "-" * MEGABYTE,
    "boxes": r"\boxed{" * (MEGABYTE // 7),
    "closed boxes": r"\boxed{1}" * (MEGABYTE // 9),
    "deep and open": r"\boxed{" + "{" * 500_000,
    "backslashes": r"\boxed{" + "\\" * MEGABYTE,
    "box of digits": r"\boxed{" + "7" * MEGABYTE + "}",
    "box of dollars": r"\boxed{" + "$" * MEGABYTE + "}",
    "hashes": "####" * (MEGABYTE // 4),
    "control characters": "".join(map(chr, range(32))) * 1000 + r"\boxed{42}" + "\x1b[2J",
    "surrogates": "\ud800\udfff" * 1000 + r"\boxed{" + "\udc80" + "}",
    "power tower": r"\boxed{9**9**9**9}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_cost_milliseconds(name: str) -> None:
    text = HOSTILE[name]
    start = time.process_time()
    for answer in ("42", "Paris"):
        assert match(text, answer) == float(name == "control characters" and answer == "42")
    normalise(text)
    reference_answer(text)
    Grader(FormatReward()).grade([(ADD, text)])
    assert time.process_time() - start < 6.0


@given(st.text(), st.text(max_size=20))
def test_any_text_can_be_graded(completion: str, answer: str) -> None:
    for reward in (MatchReward(), FormatReward()):
        (result,) = Grader(reward).grade([(problem(answer), completion)])
        assert result.total_reward in (0.0, 1.0)


class Says(Reward):
    """A reward that returns or raises what it was made with."""

    name = "says"

    def __init__(self, value: object):
        self.value = value

    def grade(self, problem: Problem, completion: str):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


def said(value: object) -> RewardResult:
    (result,) = Grader(Says(value)).grade([(ADD, "")])
    return result


@pytest.mark.parametrize("value", [1, True, np.float32(0.5), np.array(2.0)])
def test_numbers_of_any_kind_are_rewards(value: object) -> None:
    result = said(value)
    assert type(result.total_reward) is float
    assert result.components == {"says": float(value)}  # type: ignore[arg-type]
    assert result.error is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "nan"),
        (10**400, "inf"),
        (1.7e308, "the reward returned 1.7e+308, not a number within ±1e30"),
        (RewardResult(-1.01e30), "-1.01e+30"),
        (RewardResult(None, error="no verdict"), "no verdict"),
        (RewardResult("1"), "str"),  # type: ignore[arg-type]
        (RewardResult(1.0, sample_metrics={"length": "long"}), "length"),  # type: ignore[dict-item]
        (None, "NoneType"),
        ("0.5", "str"),
        (np.array([1.0, 2.0]), "ndarray"),
        (ValueError("boom"), "ValueError: boom (test_rewards.py:"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_what_is_no_reward_gives_null_and_a_reason(value: object, reason: str) -> None:
    result = said(value)
    assert result.total_reward is None
    assert result.components == {"says": None}
    assert reason in (result.error or "")
    assert not result.is_correct


def test_errors_are_one_printable_line() -> None:
    result = said(ValueError("a\nb\x1b[31m\x07" + "x" * 10_000))
    assert result.error is not None
    assert result.error.isprintable()
    assert len(result.error) <= 300
    assert printable("\ud800") == ""


def test_correct_is_what_the_reward_sets_else_more_than_one_half() -> None:
    assert [RewardResult(total).is_correct for total in (None, 0.0, 0.5)] == [False] * 3
    assert [RewardResult(total).is_correct for total in (0.51, 1.0)] == [True] * 2
    assert RewardResult(0.0, correct=True).is_correct
    assert not RewardResult(1.0, correct=False).is_correct


def weighted(*parts: tuple[str, object, float, float]) -> RewardResult:
    reward = WeightedReward([Component(name, Says(value), weight, offset) for name, value, weight, offset in parts])
    (result,) = Grader(reward).grade([(ADD, "")])
    return result


def test_a_weighted_sum_records_its_components() -> None:
    result = weighted(("a", 1.0, 2.0, 0.0), ("b", 0.5, 0.1, -1.0))
    assert result.total_reward == pytest.approx(2.0 + 0.1 * (0.5 - 1))
    assert result.components == {"a": 1.0, "b": 0.5}
    failed = weighted(("a", 1.0, 1.0, 0.0), ("b", math.nan, 1.0, 0.0))
    assert failed.total_reward is None
    assert failed.components == {"a": 1.0, "b": None}
    assert str(failed.error).startswith("b: ")
    assert weighted(("a", 1e30, 1.0, 0.0)).total_reward == 1e30
    doubled = weighted(("a", 1e30, 2.0, 0.0))
    assert (doubled.total_reward, doubled.components) == (None, {"a": 1e30})
    assert "2e+30" in str(doubled.error)


def test_sample_metrics_of_components_keep_apart() -> None:
    first = RewardResult(1.0, sample_metrics={"n": 1.0}, tags=("x",))
    second = RewardResult(0.0, sample_metrics={"n": 2.0, "a": 3.0}, tags=("x", "y"))
    result = weighted(("a", first, 1.0, 0.0), ("b", second, 1.0, 0.0))
    assert result.sample_metrics == {"n": 1.0, "b/n": 2.0, "b/a": 3.0}
    assert result.tags == ("x", "y")


RECIPE = {
    "type": "weighted",
    "components": [
        {"type": "match", "name": "correct", "weight": 1.0},
        {"type": "format", "weight": 0.1, "offset": -1.0},
    ],
}


@pytest.mark.parametrize(
    ("completion", "total", "correct", "format_ok"),
    [(r"\boxed{42}", 1.0, True, True), (r"\boxed{41}", 0.0, False, True), ("who knows", -0.1, False, False)],
)
def test_the_gsm8k_recipe(completion: str, total: float, correct: bool, format_ok: bool) -> None:
    with build_grader(tasks.Reward.model_validate(RECIPE)) as grader:
        (result,) = grader.grade([(ADD, completion)])
    assert grader.names == ("correct", "format")
    assert result.total_reward == pytest.approx(total)
    assert (result.correct, result.format_ok) == (correct, format_ok)
    assert result.components == {"correct": float(correct), "format": float(format_ok)}


def test_math_without_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[math\]'"):
        build_grader(tasks.Reward.model_validate({"type": "math"}))


def test_a_missing_custom_file_is_an_error_before_anything_runs(tmp_path) -> None:
    with pytest.raises(PluginError, match="no such file"):
        build_grader(tasks.Reward.model_validate({"type": "custom", "custom_module": "absent.py"}), base_dir=tmp_path)
