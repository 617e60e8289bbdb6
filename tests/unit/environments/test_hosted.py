import importlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy_environments import Echo

from retrain.config import parse_dict
from retrain.config.tasks import EnvironmentSection
from retrain.environments.build import close_hosted, provided_data
from retrain.environments.hosted import HostedEnvironment
from retrain.environments.protocol import EpisodeFailed
from retrain.errors import DataError, PluginMissing
from retrain.types import Action, Problem

HERE = Path(__file__).parents[2] / "programs"


def send(episode, text):
    return episode.step(Action([1], text, np.zeros(1), None, "stop"))


@pytest.fixture(scope="module")
def host():
    made = []

    def make(folder=HERE, **keys):
        made.append(
            HostedEnvironment(EnvironmentSection(**{"provider": "toy_environments:Echo", "workers": 1, **keys}), folder)
        )
        return made[-1]

    yield make
    for hosted in made:
        hosted.close()


@pytest.fixture(scope="module")
def echo(host):
    return host(args={"turns": 3}, timeout_s=3.0)


def test_problems_and_episodes_are_those_of_the_environment(echo):
    problems = echo.problems("train")
    assert [problem.id for problem in problems] == [f"train{i}" for i in range(6)]
    assert problems[1] == Problem("train1", "Say train 1", "x", ("toy",), {"i": 1})
    assert echo.exact
    assert echo.ranges == {"reward": {"min": 0.0, "max": 9.0}, "words": {"min": 0, "max": 9}}
    with pytest.raises(EpisodeFailed, match="no such problem") as caught:
        echo.start(Problem("p", "no", ""), 1)
    assert caught.value.ended == "raised"
    with pytest.raises(DataError, match="no problems in 'empty'"):
        echo.problems("empty")
    with pytest.raises(DataError, match="KeyError"):
        echo.problems("other")
    episode = echo.start(problems[0], 9)
    assert episode.first.messages == ({"role": "user", "content": "Say train 0"},)
    step = send(episode, "a")
    assert (step.messages, step.done, step.reward) == (({"role": "user", "content": "2: a"},), False, 1.0)
    assert step.metrics == {"length": 1.0}
    assert [send(episode, text).done for text in ("right", "c")] == [False, True]
    result = episode.result()
    assert (result.total_reward, result.sample_metrics, result.is_correct) == (3.0, {"words": 3.0}, True)


@pytest.mark.parametrize(("text", "ended", "reason"), [
    ("raise", "raised", "an environment with a mistake"), ("hang", "timeout", "longer than 3 s"),
    ("die", "died", "exit status 3"), ("flood", "flooded", "2,000,000 characters"),
])  # fmt: skip
def test_what_goes_wrong_ends_one_episode_and_the_others_continue(echo, text, ended, reason):
    problem = echo.problems("train")[0]
    others = [echo.start(problem, seed) for seed in (9, 10)]
    finished, bad = echo.start(problem, 1), echo.start(problem, 9)
    assert [send(other, "a").messages[0]["content"] for other in others] == ["2: a", "3: a"]
    for word in "abc":
        send(finished, word)
    begun = time.monotonic()
    with pytest.raises(EpisodeFailed, match=reason) as caught:
        send(bad, text)
    assert caught.value.ended == ended
    assert time.monotonic() - begun < 20
    # Whether they were lost with the process or not, the others go on where they were.
    assert [send(other, "b").messages[0]["content"] for other in others] == ["2: a b", "3: a b"]
    assert [result.total_reward for result in echo.results([finished, *others])] == [3.0, 2.0, 2.0]


def test_what_is_not_exact_is_not_begun_anew(host):
    made = host(args={"exact": False}, python=sys.executable)
    problem = made.problems("train")[0]
    other = made.start(problem, 1)
    with pytest.raises(EpisodeFailed):
        send(made.start(problem, 1), "die")
    with pytest.raises(EpisodeFailed, match="ended with another episode") as caught:
        send(other, "a")
    assert caught.value.ended == "died"
    assert made.results([other])[0].error is not None


def test_a_reward_outside_the_declared_range_is_no_reward(host):
    made = host(args={"turns": 10}, workers=3)
    assert made.parallel == 3
    problem = made.problems("train")[0]
    episodes = [made.start(problem, seed) for seed in range(4)]
    for episode in episodes:
        while not send(episode, "a").done:
            pass
    fault = "the reward is 10, outside the declared range [0, 9]"
    assert [(result.total_reward, result.error) for result in made.results(episodes)] == [(None, fault)] * 4
    with pytest.raises(DataError, match=r"the reward is 10, outside the declared range \[0, 9\] for an episode of"):
        made.examine(problem)


class PathOfAnotherPython(type(Path())):
    """Cannot be unpickled, as the paths of Python 3.13 in Python 3.12."""

    def __reduce__(self):
        return importlib.import_module, ("pathlib.absent",)


def test_another_python_need_not_know_the_class_of_a_path(host):
    folder = PathOfAnotherPython(HERE)
    assert len(host(folder, python=sys.executable).problems("train")) == 6
    tools = host(folder, provider=None, tools=["calculator"], python=sys.executable)
    assert tools.exact


class Leak(Echo):
    """Holds out what it trains with."""

    def problems(self, split):
        return [Problem("p", "q", "a")]


def test_what_is_held_out_must_not_train(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = parse_dict({"environment": {"provider": "test_hosted:Leak", "workers": 1}})
    try:
        with pytest.raises(DataError, match="is also trained on"):
            provided_data(config, Path(__file__).parent)
    finally:
        close_hosted()


@pytest.mark.parametrize(("keys", "fault"), [
    ({"provider": "toy_environments:Nothing"}, "no function 'Nothing'"),
    ({"args": {"turn": 3}}, r"\[environment\] args: got an unexpected keyword argument 'turn'"),
    ({"python": "no/such/python"}, "no such file"),
])  # fmt: skip
def test_what_cannot_be_made_says_so_in_one_line(host, keys, fault):
    with pytest.raises(PluginMissing, match=fault) as caught:
        host(**keys)
    assert "\n" not in str(caught.value)
