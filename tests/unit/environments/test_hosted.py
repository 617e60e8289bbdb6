"""Environments in worker processes: whatever one episode does costs that episode alone."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy_environments import Echo

from retrain.config import parse_dict
from retrain.config.tasks import Environment
from retrain.environments.build import close_hosted, provided_data
from retrain.environments.hosted import Hosted
from retrain.environments.protocol import EpisodeFailed
from retrain.errors import DataError, PluginMissing
from retrain.sandbox.sandbox import available
from retrain.types import Action, Problem

HERE = Path(__file__).parents[2]


def said(text: str) -> Action:
    return Action([1], text, np.zeros(1), None, "stop")


def host(**keys) -> Hosted:
    return Hosted(Environment(**{"provider": "toy_environments:Echo", "workers": 1, **keys}), HERE)


@pytest.fixture(scope="module")
def echo():
    made = host(args={"turns": 3}, timeout_s=3.0)
    yield made
    made.close()


def test_problems_come_as_they_were_made(echo):
    problems = echo.problems("train")
    assert [problem.id for problem in problems] == [f"train{i}" for i in range(6)]
    assert problems[1] == Problem("train1", "Say train 1", "x", ("toy",), {"i": 1})
    assert echo.reward_range == (0.0, 9.0)
    assert echo.metrics_ranges == {"words": {"min": 0, "max": 9}}
    assert echo.exact
    with pytest.raises(EpisodeFailed, match="no such problem") as caught:
        echo.start(Problem("p", "no", ""), 1)
    assert caught.value.ended == "raised"
    with pytest.raises(DataError, match="no problems in 'empty'"):
        echo.problems("empty")
    with pytest.raises(DataError, match="KeyError"):
        echo.problems("other")


def test_an_episode_is_a_conversation(echo):
    episode = echo.start(echo.problems("train")[0], 9)
    assert episode.observe().messages == ({"role": "user", "content": "Say train 0"},)
    step = episode.step(said("a"))
    assert (step.messages, step.done, step.reward) == (({"role": "user", "content": "2: a"},), False, 1.0)
    assert step.metrics == {"length": 1.0}
    assert not episode.step(said("right")).done
    assert episode.step(said("c")).done
    result = episode.result()
    assert (result.total_reward, result.sample_metrics, result.is_correct) == (3.0, {"words": 3.0}, True)


@pytest.mark.parametrize(
    ("text", "ended", "words"),
    [
        ("raise", "raised", "an environment with a mistake"),
        ("hang", "timeout", "longer than 3 s"),
        ("die", "died", "exit status 3"),
        ("flood", "flooded", "2,000,000 characters"),
    ],
)
def test_what_goes_wrong_ends_one_episode_and_the_others_go_on(echo, text, ended, words):
    problem = echo.problems("train")[0]
    others = [echo.start(problem, 9), echo.start(problem, 10)]
    first = [other.step(said("a")).messages for other in others]
    bad = echo.start(problem, 9)
    begun = time.monotonic()
    with pytest.raises(EpisodeFailed, match=words) as caught:
        bad.step(said(text))
    assert caught.value.ended == ended
    assert time.monotonic() - begun < 20
    # The others were lost with the process, or not: they have said the same, and say the same.
    assert first == [({"role": "user", "content": "2: a"},), ({"role": "user", "content": "3: a"},)]
    for other, digit in zip(others, "23", strict=True):
        assert other.step(said("b")).messages == ({"role": "user", "content": f"{digit}: a b"},)
        other.step(said("c"))
        assert other.result().total_reward == 3.0


def test_a_result_survives_the_process_too(echo):
    problem = echo.problems("train")[0]
    done = echo.start(problem, 1)
    for word in "abc":
        done.step(said(word))
    with pytest.raises(EpisodeFailed):
        echo.start(problem, 1).step(said("die"))
    assert done.result().total_reward == 3.0
    failed = echo.start(problem, 1)
    with pytest.raises(EpisodeFailed):
        failed.step(said("die"))
    assert echo.results([failed])[0].total_reward == 0.0  # begun anew, without the action that killed it


def test_what_is_not_exact_is_not_begun_anew():
    made = host(args={"exact": False}, python=sys.executable)
    try:
        other = made.start(made.problems("train")[0], 1)
        with pytest.raises(EpisodeFailed):
            made.start(made.problems("train")[0], 1).step(said("die"))
        with pytest.raises(EpisodeFailed, match="ended with another episode") as caught:
            other.step(said("a"))
        assert caught.value.ended == "died"
        assert made.results([other])[0].error is not None
    finally:
        made.close()


def test_a_reward_outside_the_declared_range_is_no_reward():
    made = host(args={"turns": 10}, workers=3)
    try:
        assert made.parallel == 3
        episodes = [made.start(made.problems("train")[i], i) for i in range(4)]
        for episode in episodes:
            while not episode.step(said("a")).done:
                pass
        results = made.results(episodes)
        assert {result.total_reward for result in results} == {None}
        assert results[3].error == "the reward is 10, outside the declared range [0, 9]"
        with pytest.raises(DataError, match=r"the reward is 10, outside the declared range \[0, 9\] for an episode of"):
            made.examine(made.problems("train")[0])
    finally:
        made.close()


class Leak(Echo):
    """Holds out what it trains with."""

    def problems(self, split):
        return [Problem("p", "q", "a")]


class Shut(Echo):
    """Cannot begin."""

    def start(self, problem, seed):
        raise ValueError("closed today")


def test_what_is_held_out_must_not_train_and_episodes_must_begin(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = parse_dict({"environment": {"provider": "test_hosted:Leak", "workers": 1}})
    try:
        with pytest.raises(DataError, match="is also trained on"):
            provided_data(config, Path(__file__).parent)
    finally:
        close_hosted()
    made = Hosted(Environment(provider="test_hosted:Shut", workers=1), Path(__file__).parent)
    try:
        with pytest.raises(DataError, match=r"an episode of train0 cannot begin: ValueError: closed today"):
            made.examine(made.problems("train")[0])
    finally:
        made.close()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"provider": "toy_environments:Nothing"}, "no function 'Nothing'"),
        ({"provider": "not_there:Echo"}, "no module 'not_there'"),
        ({"args": {"turn": 3}}, r"\[environment\] args: got an unexpected keyword argument 'turn'"),
        ({"python": "no/such/python"}, "no such file"),
    ],
)
def test_what_cannot_be_made_says_so_in_one_line(keys, words):
    with pytest.raises(PluginMissing, match=words) as caught:
        host(**keys)
    assert "\n" not in str(caught.value)


def call(name: str, **arguments: str) -> Action:
    return said(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


@pytest.mark.skipif(available() is not None, reason=f"no sandbox: {available()}")
def test_tools_in_processes(tmp_path):
    (tmp_path / "a.txt").write_text("Paris is the capital of France.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Lima is the capital of Peru.", encoding="utf-8")
    tools = [
        {"tool": "python", "keep_state": True, "timeout_s": 2.0},
        {"tool": "search", "corpus": str(tmp_path), "k": 1},
    ]
    made = Hosted(Environment(tools=tools, workers=2), None)
    try:
        assert not made.exact
        first, second = (made.start(Problem("p", "?", ""), 1) for _ in range(2))
        assert [tool["function"]["name"] for tool in first.observe().tools] == ["python", "search"]
        first.step(call("python", code="x = 6 * 7"))
        assert "42" in first.step(call("python", code="print(x)")).messages[0]["content"]
        assert "NameError" in second.step(call("python", code="print(x)")).messages[0]["content"]
        begun = time.monotonic()
        assert not second.step(call("python", code="while True: pass")).done
        assert time.monotonic() - begun < 20
        (answer,) = second.step(call("search", query="capital of Peru")).messages
        assert "Lima" in answer["content"]
        assert "Paris" not in answer["content"]
        assert second.step(said("42")).done
        assert second.result().sample_metrics["tools/total_tool_calls"] == 3
        first.close()
    finally:
        made.close()
