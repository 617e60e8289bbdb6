"""Grading beside decoding: what is asked for comes back in order, together where it gathered, faults with it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from retrain.scoring import Scoring

from retrain.rewards import Grader, RewardResult
from retrain.types import Completion, Problem, Prompt


class Lengths(Grader):
    """Scores a completion by the length of its text; notes how many came at once."""

    names = ("length",)

    def __init__(self, gate: threading.Event | None = None):
        self.calls: list[int] = []
        self.gate = gate

    def grade(self, items):
        self.calls.append(len(items))
        if self.gate is not None:
            assert self.gate.wait(10)
        if any(text == "raise" for _, text in items):
            raise RuntimeError("a grader that breaks its promise")
        return [RewardResult(float(len(text))) for _, text in items]


def prompt(name: str) -> Prompt:
    return Prompt(Problem(name, name, "1"), name, (1, 2))


def completions(*texts: str) -> list[Completion]:
    return [Completion([5], text, np.zeros(1), np.zeros(1), "stop") for text in texts]


def test_groups_come_back_in_the_order_of_the_requests():
    one, other = Lengths(), Lengths()
    with Scoring([(one, prompt("a")), (other, prompt("b")), (one, prompt("c"))]) as scoring:
        scoring.add(2, completions("x", "xx"))
        scoring.add(0, completions("xxx"))
        scoring.add(1, completions("", "xxxx"))
        groups = scoring.groups()
    assert [[r.total_reward for r in g.rewards] for g in groups] == [[3.0], [0.0, 4.0], [1.0, 2.0]]
    assert [g.prompt.text for g in groups] == ["a", "b", "c"]
    assert sum(one.calls) == 3
    assert sum(other.calls) == 2


def test_grading_runs_while_others_are_still_drawn_and_takes_what_gathered_together():
    gate = threading.Event()
    grader = Lengths(gate)
    with Scoring([(grader, prompt(str(i))) for i in range(5)]) as scoring:
        scoring.add(0, completions("a"))
        deadline = time.monotonic() + 10
        while not grader.calls and time.monotonic() < deadline:
            time.sleep(0.001)
        assert grader.calls == [1]  # the first is being graded though four are still to come
        for i in range(1, 5):
            scoring.add(i, completions("b" * i))
        gate.set()
        groups = scoring.groups()
    assert grader.calls == [1, 4]
    assert [g.rewards[0].total_reward for g in groups] == [1.0, 1.0, 2.0, 3.0, 4.0]


def test_what_a_grader_raises_is_found_at_its_requests_only():
    good, bad = Lengths(), Lengths()
    with Scoring([(good, prompt("a")), (bad, prompt("b"))]) as scoring:
        scoring.add(1, completions("raise"))
        scoring.add(0, completions("xy"))
        groups = scoring.groups()
    assert groups[0].rewards[0].total_reward == 2.0
    assert isinstance(groups[1], RuntimeError)


def test_a_failing_engine_leaves_no_thread_behind():
    before = threading.active_count()
    with pytest.raises(ValueError, match="engine"), Scoring([(Lengths(), prompt("a"))]):
        raise ValueError("engine")
    assert threading.active_count() == before
