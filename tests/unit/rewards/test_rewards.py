import math
import sys
import time
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config import tasks
from retrain.data.sources import ProblemColumns, problem_of_row
from retrain.errors import MissingExtra, PluginError, printable
from retrain.rewards import Grader, Reward, RewardResult, build_grader
from retrain.rewards.base import FormatReward, MatchReward
from retrain.rewards.build import Component, WeightedReward
from retrain.types import Problem
from retrain.util.answers import normalise, reference_answer

ADD = Problem("p", "6*7=?", "42", ("easy",))
MEGABYTE = 1 << 20

problem = partial(Problem, "p", "?")


def graded(reward: Reward, completion: str = "", item: Problem = ADD) -> RewardResult:
    (result,) = Grader(reward).grade([(item, completion)])
    return result


@pytest.mark.parametrize(("completion", "answer", "strict", "loose"), [
    (r"\boxed{\$1,450}", "1450", 1, 1),
    (r"\boxed{4 2}", "42", 1, 1),
    (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1, 1),
    (r"\boxed{\left( 1,\, 2 \right)}", "(1,2)", 1, 1),
    (r"$\boxed 5$ units", "5", 1, 1),
    (r"\boxed{−1,234.50}", "-1234.5", 1, 1),
    (r"\boxed{1} and \boxed{2", "2", 0, 0),
    (r"\boxedness{3}", "3", 0, 1),
    ("between 3-5", "5", 0, 1),
    (r"\boxed{12}", "1,2", 0, 0),
    (r"\boxed{41} no: 42", "42", 0, 0),  # the box decides, not what is said after it
    (r"42 \boxed{42", "42", 0, 0),  # truncated in the box
    ("6*7 = 42", "42", 0, 1),  # without any box the last number counts, unless strict
    ("42, or is it 43?", "42", 0, 0),
    ("The capital is\nParis.", "Paris", 0, 1),
])  # fmt: skip
def test_match(completion, answer, strict, loose):
    assert graded(MatchReward(), completion, problem(answer)).total_reward == strict
    with build_grader(tasks.RewardSection(type="match", strict=False)) as grader:
        assert grader.grade([(problem(answer), completion)])[0].total_reward == loose


@pytest.mark.parametrize(("completion", "correct", "format_ok"), [
    ("9 a day, 9*2=18\n#### 18", True, True),
    ("#### 17\nNo.\n#### $18.00", True, True),
    (r"#### 17 \boxed{18}", True, True),  # a box decides
    ("####", False, False),
    ("the line #### 18", False, False),  # GSM8K begins a line with it
])  # fmt: skip
def test_the_marker_of_the_data_set_marks_an_answer(completion, correct, format_ok):
    row = {"question": "Ducks?", "answer": "9 * 2 = <<9*2=18>>18\n#### 18"}
    ducks = problem_of_row("gsm8k.jsonl:1", row, ProblemColumns("question", "answer"))
    for kind in ("match", "math") if find_spec("math_verify") else ("match",):
        with build_grader(tasks.RewardSection.model_validate({"type": kind, "workers": 1})) as grader:
            (result,) = grader.grade([(ducks, completion)])
            assert (result.correct, result.format_ok) == (correct, format_ok)
    assert graded(FormatReward(), completion, ducks).total_reward == float(format_ok)


def test_an_empty_answer_never_equals_an_empty_reference():
    for answer in ("", " ", "$", "."):
        for completion in ("", r"\boxed{}", r"\boxed{ }", "$", r"\boxed{$$}", "."):
            assert graded(MatchReward(), completion, problem(answer)).total_reward == 0.0


HOSTILE = {
    "digits": "9" * MEGABYTE, "boxes": r"\boxed{" * (MEGABYTE // 7), "deep and open": r"\boxed{" + "{" * 500_000,
    "backslashes": r"\boxed{" + "\\" * MEGABYTE, "box of digits": r"\boxed{" + "7" * MEGABYTE + "}",
    "hashes": "####" * (MEGABYTE // 4),
    "control characters": "".join(map(chr, range(32))) * 1000 + r"\boxed{42}" + "\x1b[2J",
    "surrogates": "\ud800\udfff" * 1000 + r"\boxed{" + "\udc80" + "}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_completions_cost_milliseconds(name):
    text = HOSTILE[name]
    start = time.process_time()
    for answer in ("42", "Paris"):
        total = graded(MatchReward(), text, problem(answer)).total_reward
        assert total == float(name == "control characters" and answer == "42")
    normalise(text)
    reference_answer(text)
    graded(FormatReward(), text)
    assert time.process_time() - start < 6.0


@given(st.text(), st.text(max_size=20))
def test_any_text_can_be_graded(completion, answer):
    for reward in (MatchReward(), FormatReward()):
        assert graded(reward, completion, problem(answer)).total_reward in (0.0, 1.0)


class Says(Reward):
    """A reward that returns or raises what it was made with."""

    name = "says"

    def __init__(self, value: object):
        self.value = value

    def grade(self, problem: Problem, completion: str):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.mark.parametrize("value", [1, True, np.float32(0.5), np.array(2.0)])
def test_numbers_of_any_kind_are_rewards(value):
    result = graded(Says(value))
    assert type(result.total_reward) is float
    assert (result.components, result.error) == ({"says": float(value)}, None)


@pytest.mark.parametrize(("value", "reason"), [
    (math.nan, "nan"),
    (1.7e308, "the reward returned 1.7e+308, not a number within ±1e30"),
    (RewardResult(None, error="no verdict"), "no verdict"),
    (RewardResult(1.0, sample_metrics={"length": "long"}), "length"),  # type: ignore[dict-item]
    (None, "NoneType"),
    (ValueError("boom"), "ValueError: boom (test_rewards.py:"),
    (MemoryError(), "MemoryError"),
    (ValueError("a\nb\x1b[31m\x07" + "x" * 10_000), "a b"),
])  # fmt: skip
def test_what_is_no_reward_gives_null_and_a_printable_reason(value, reason):
    result = graded(Says(value))
    assert (result.total_reward, result.components, result.is_correct) == (None, {"says": None}, False)
    assert result.error is not None
    assert reason in result.error
    assert result.error.isprintable()
    assert len(result.error) <= 300
    assert printable("\ud800") == ""


def test_correct_is_what_the_reward_sets_else_more_than_one_half():
    assert [RewardResult(total).is_correct for total in (None, 0.0, 0.5, 0.51)] == [False, False, False, True]
    assert RewardResult(0.0, correct=True).is_correct
    assert not RewardResult(1.0, correct=False).is_correct


def weighted(*parts: tuple[str, object, float, float]) -> RewardResult:
    components = [Component(Says(value), *factors) for _, value, *factors in parts]
    for component, (name, *_) in zip(components, parts, strict=True):
        component.reward.name = name
    return graded(WeightedReward(components))


def test_a_weighted_sum_records_its_components():
    result = weighted(("a", 1.0, 2.0, 0.0), ("b", 0.5, 0.1, -1.0))
    assert result.total_reward == pytest.approx(2.0 + 0.1 * (0.5 - 1))
    assert result.components == {"a": 1.0, "b": 0.5}
    failed = weighted(("a", 1.0, 1.0, 0.0), ("b", math.nan, 1.0, 0.0))
    assert (failed.total_reward, failed.components) == (None, {"a": 1.0, "b": None})
    assert str(failed.error).startswith("b: ")
    first = RewardResult(1.0, sample_metrics={"n": 1.0}, tags=("x",))
    second = RewardResult(0.0, sample_metrics={"n": 2.0, "a": 3.0}, tags=("x", "y"))
    both = weighted(("a", first, 1.0, 0.0), ("b", second, 1.0, 0.0))
    assert both.sample_metrics == {"n": 1.0, "b/n": 2.0, "b/a": 3.0}
    assert both.tags == ("x", "y")


@pytest.mark.parametrize(("completion", "total", "correct", "format_ok"), [
    (r"\boxed{42}", 1.0, True, True), (r"\boxed{41}", 0.0, False, True), (r"\boxed{ }", -0.1, False, False),
])  # fmt: skip
def test_the_gsm8k_recipe(completion, total, correct, format_ok):
    parts = [{"type": "match", "name": "correct"}, {"type": "format", "weight": 0.1, "offset": -1.0}]
    with build_grader(tasks.RewardSection.model_validate({"type": "weighted", "components": parts})) as grader:
        (result,) = grader.grade([(ADD, completion)])
    assert grader.names == ("correct", "format")
    assert result.total_reward == pytest.approx(total)
    assert (result.correct, result.format_ok) == (correct, format_ok)
    assert result.components == {"correct": float(correct), "format": float(format_ok)}


def test_what_a_section_names_and_is_missing_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    section = tasks.RewardSection.model_validate({"type": "custom", "custom_module": "absent.py"})
    with pytest.raises(PluginError, match="no such file"):
        build_grader(section, base_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[math\]'"):
        build_grader(tasks.RewardSection.model_validate({"type": "math"}))
