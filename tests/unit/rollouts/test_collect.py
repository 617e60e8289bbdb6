import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from helpers.lanes import TwoTurns, TwoTurnsEpisode
from helpers.models import word_tokenizer

from retrain.config.evaluation import HELDOUT, HeldOut
from retrain.config.tasks import Data
from retrain.config.training import Sampling
from retrain.data.prompts import Renderer
from retrain.engines.local import LocalEngine
from retrain.environments.build import SplitEnvironment
from retrain.environments.protocol import EpisodeLimits
from retrain.errors import ModelError, RunFailed
from retrain.rewards import Grader, RewardResult
from retrain.rollouts.collect import RolloutRequest, collect, require_graded
from retrain.training.evaluation import EvaluatedPolicy, Evaluator
from retrain.types import Action, Group, PolicyRef, Problem, SampleRequest

RENDERER = Renderer(word_tokenizer(["a b c d"]), Data())


class Lengths(Grader):
    """Scores a completion by the length of its text; notes how many came at once."""

    names, ranges = ("length",), {}

    def __init__(self, gate: threading.Event | None = None):
        self.calls: list[int] = []
        self.gate = gate

    def grade(self, items):
        self.calls.append(len(items))
        if self.gate is not None:
            assert self.gate.wait(10)
        if any(text == "raise" for _, text in items):
            raise RuntimeError("a grader that breaks its promise")
        if any(text == "exit" for _, text in items):
            sys.exit(3)
        return [RewardResult(float(len(text))) for _, text in items]


def actions(*texts: str) -> list[Action]:
    return [Action([5], text, np.zeros(1), np.zeros(1), "stop") for text in texts]


def asked(environment, name: str, samples: int = 1) -> RolloutRequest:
    """A request for rollouts of the problem ``name``; a grader is for one turn."""
    if isinstance(environment, Grader):
        environment = graded(environment)
    problem, sampling = Problem(name, name, "1"), Sampling(4, 1.0)
    return RolloutRequest(environment, RENDERER, problem, PolicyRef("run", 0), samples, sampling, (name,))


def graded(grader: Grader) -> SplitEnvironment:
    return SplitEnvironment((), Data(), grader)


class Scripted:
    """Answers by problem, in the order of the script, then with "more". Calls ``between`` after each problem."""

    gives_entropy, exact, is_concurrent = True, False, False

    def __init__(self, script: dict[str, Sequence[str]], between: Callable[[], object] = lambda: None):
        self.script, self.between = script, between
        self.requests: list[list[SampleRequest]] = []
        self.sync_seconds: float | None = 0.25

    def forget_sequences(self):
        pass

    def sample(self, requests, *, max_rows=None, finished=None):
        self.requests.append(list(requests))
        names = {request.stream[0]: place for place, request in enumerate(requests) if len(request.stream) == 1}
        answers = [actions(*["more"] * request.samples) for request in requests]
        for name, texts in self.script.items():
            if name in names:
                answers[names[name]] = actions(*texts)
                finished(names[name], answers[names[name]])
                self.between()
        for place, request in enumerate(requests):
            if len(request.stream) > 1:
                finished(place, answers[place])
        return answers


def rewards(group: Group) -> list[float | None]:
    return [rollout.reward.total_reward for rollout in group.rollouts]


def test_grading_runs_beside_sampling_and_takes_what_gathered_in_one_call():
    """Four groups gather while the first is graded."""
    gate = threading.Event()
    grader, done = Lengths(gate), []

    def between():
        """After the first, wait for its grading to begin; after the last, let it end."""
        while not grader.calls:
            time.sleep(0.001)
        done.append(1)
        if len(done) == 5:
            gate.set()

    engine = Scripted({"0": ["a"], "1": ["b"], "2": ["bb"], "3": ["bbb"], "4": ["bbbb"]}, between)
    environment = graded(grader)
    groups = collect(engine, [asked(environment, str(i)) for i in range(5)]).groups
    assert grader.calls == [1, 4]
    assert [rewards(group) for group in groups] == [[1.0], [1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize(("does", "reason"), [("raise", "breaks its promise"), ("exit", r"called exit\(3\)")])
def test_an_error_of_a_grader_leaves_other_graders_alone(does, reason):
    good, bad = Lengths(), Lengths()
    engine = Scripted({"b": [does], "a": ["xy"]})
    groups = collect(engine, [asked(good, "a"), asked(bad, "b")]).groups
    assert rewards(groups[0]) == [2.0]
    assert isinstance(groups[1], RuntimeError)
    assert re.search(reason, str(groups[1]))


def test_errors_of_graders_are_one_line_without_keys(monkeypatch):
    key = "sk-0123456789abcdef0123"
    monkeypatch.setitem(os.environ, "JUDGE_API_KEY", key)

    class Telling(Lengths):
        def grade(self, items):
            if items[0][1] == "recorded":
                return [RewardResult(None, error=f"refused: {key}") for _ in items]
            raise (ModelError if items[0][1] == "z" else ValueError)(f"refused: {key}")

    good, bad = asked(Lengths(), "a"), asked(Telling(), "b")
    with pytest.raises(RunFailed, match=r"^rollouts failed: ValueError: refused: .*\(test_collect\.py:\d+\)$") as error:
        require_graded(collect(Scripted({"a": ["xy"], "b": ["w"]}), [good, bad]).groups)
    assert key not in str(error.value)
    assert require_graded(collect(Scripted({"a": ["xy"]}), [good]).groups)[0].rewards_N.tolist() == [2.0]
    with pytest.raises(ModelError, match=r"^refused"):  # such an error is raised as it is
        require_graded(collect(Scripted({"b": ["z"]}), [bad]).groups)
    (group,) = collect(Scripted({"b": ["recorded"]}), [bad]).groups
    assert group.rollouts[0].reward.error.startswith("refused: ")
    assert key not in group.rollouts[0].reward.error


def test_ctrl_c_waits_for_no_slow_grader():
    gate = threading.Event()
    grader, begun = Lengths(gate), time.monotonic()

    def interrupt():
        while not grader.calls:
            time.sleep(0.001)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            collect(Scripted({"a": ["x"]}, interrupt), [asked(grader, "a")])
        assert time.monotonic() - begun < 5
        (worker,) = [thread for thread in threading.enumerate() if thread.name == "episodes"]
        assert worker.daemon  # nor does the end of the process
    finally:
        gate.set()
    worker.join(10)
    assert not worker.is_alive()


@pytest.mark.parametrize("in_flight", [True, False])
def test_later_turns_are_drawn_by_the_newest_weights_where_that_is_asked_for(in_flight):
    newest = iter([PolicyRef("run", 5), PolicyRef("run", 6)])
    request = replace(asked(TwoTurns(3), "a"), newest=(lambda: next(newest)) if in_flight else None)
    engine = Scripted({"a": ["x"]})
    collect(engine, [request])
    used = [one.policy.version for batch in engine.requests for one in batch]
    assert used == ([0, 5, 6] if in_flight else [0, 0, 0])


def test_turns_of_all_that_go_on_are_one_batch_and_a_group_is_graded_when_all_its_episodes_are_over():
    environment = TwoTurns()
    engine = Scripted({"a": ["last", "go on"], "b": ["go on", "go on"], "c": ["last"]})
    collected = collect(engine, [asked(environment, "a", 2), asked(environment, "b", 2), asked(environment, "c")])
    assert [rewards(group) for group in collected.groups] == [[1.0, 2.0], [2.0, 2.0], [1.0]]
    first, second = engine.requests
    assert [(request.stream, request.samples) for request in first] == [(("a",), 2), (("b",), 2), (("c",), 1)]
    assert [(request.stream, request.samples) for request in second] == [
        (("a", "turn", 1, 1), 1), (("b", "turn", 1, 0), 1), (("b", "turn", 1, 1), 1),
    ]  # fmt: skip
    going = collected.groups[0].rollouts[1]
    assert [turn.action.text for turn in going.turns] == ["go on", "more"]
    read = (*going.turns[0].observation_ids, *going.turns[0].action.token_ids, *going.turns[1].observation_ids)
    assert second[0].prompt_ids == read
    assert [turn.messages for turn in going.turns] == [
        ({"role": "user", "content": "a"},), ({"role": "user", "content": "more?"},),
    ]  # fmt: skip
    assert sorted(environment.graded) == ["a", "a", "b", "b", "c"]
    assert environment.graded[0] == "c"  # over after its first turn
    assert [name for name, _, _ in collected.spans] == ["rollout", "score"] * 2
    assert collected.sync_seconds == 0.5
    times = [moment for _, begin, end in collected.spans for moment in (begin, end)]
    assert times == sorted(times)


def test_an_episode_ends_at_its_limits():
    """Turns, and tokens: an action gets what is left of them at most."""
    request = replace(asked(TwoTurns(turns=9), "a", 2), limits=EpisodeLimits(turns=3))
    engine = Scripted({"a": ["x", "last"]})
    (group,) = collect(engine, [request]).groups
    assert [(len(rollout.turns), rollout.ended) for rollout in group.rollouts] == [(3, "max_turns"), (1, "done")]
    assert rewards(group) == [3.0, 1.0]
    first, second = len(group.prompt.token_ids), len(group.rollouts[0].turns[1].observation_ids)
    limit = first + 1 + second + 3
    engine = Scripted({"a": ["x"]})
    (group,) = collect(engine, [replace(request, samples=1, limits=EpisodeLimits(tokens=limit))]).groups
    (rollout,) = group.rollouts
    assert rollout.ended == "max_tokens"
    assert rollout.observation_tokens + len(rollout) <= limit
    asked_for = [batch[0].max_tokens for batch in engine.requests]
    assert asked_for[:2] == [min(request.sampling.max_tokens, limit - first), 3]
    (group,) = collect(Scripted({}), [replace(request, limits=EpisodeLimits(tokens=first))]).groups
    assert [(rollout.turns, rollout.ended) for rollout in group.rollouts] == [((), "max_tokens")] * 2
    assert "max_episode_tokens" in group.rollouts[0].reward.error


class Unlike(TwoTurns):
    """Every episode begins otherwise, as a server may."""

    def start(self, problem, seed):
        self.begun = getattr(self, "begun", 0) + 1
        return TwoTurnsEpisode(replace(problem, prompt=problem.id + "b" * self.begun), 1)


def test_episodes_that_begin_otherwise_have_prompts_of_their_own():
    engine = Scripted({"a": ["x", "x"]})
    (group,) = collect(engine, [asked(Unlike(), "a", 2)]).groups
    (first,) = engine.requests
    assert [request.samples for request in first] == [1, 1]
    read = [one.turns[0].observation_ids for one in group.rollouts]
    assert read == [request.prompt_ids for request in first]
    assert read[0] != read[1]


def test_what_an_environment_raises_costs_the_episode_alone():
    environment, good = TwoTurns(), Lengths()
    engine = Scripted({"a": ["go on", "fail"], "b": ["go on"], "c": ["xyz"], "d": ["exit"]})
    named = [(environment, "a", 2), (environment, "unknown"), (environment, "b"), (good, "c"), (environment, "d")]
    groups = collect(engine, [asked(*each) for each in named]).groups
    assert [rewards(group) for group in groups] == [[2.0, None], [None], [2.0], [3.0], [None]]
    ended = [[rollout.ended for rollout in group.rollouts] for group in groups]
    assert ended == [["done", "raised"], ["raised"], ["done"], ["done"], ["raised"]]
    errors = [group.rollouts[-1].reward.error for group in groups]
    assert "an environment with a mistake" in errors[0]
    assert "no such problem" in errors[1]
    assert "it called exit('enough')" in errors[4]
    assert groups[1].rollouts[0].turns == ()
    assert len(groups[0].rollouts[1].turns) == 1  # what was sampled is kept
    streams = [request.stream for request in engine.requests[1]]
    assert streams == [("a", "turn", 1, 0), ("b", "turn", 1, 0)]  # the failed episodes are over


def test_held_out_problems_are_rendered_with_the_template_of_their_environment():
    held_out = HeldOut(HELDOUT, 2, 2, Sampling(4, 1.0), Data())
    problems = [Problem(name, name, "1") for name in "ab"]
    evaluator = Evaluator(Scripted({}), RENDERER, [held_out])
    for template, texts in (("{prompt}", ["a", "b"]), ("c {prompt}", ["c a", "c b"]), ("{prompt}", ["a", "b"])):
        environment = SplitEnvironment(problems, Data(prompt_template=template), Lengths())
        policy = EvaluatedPolicy(PolicyRef("r", 0), {HELDOUT: environment}, ("r",), 0)
        (record,) = evaluator.evaluate(held_out, [policy])
        assert [group.prompt.text.split(">")[1].split("<")[0] for group in record.groups] == texts


def test_where_every_request_fails_or_there_is_none_nothing_is_sampled(base, lanes):
    engine = LocalEngine(base, lanes)
    assert collect(engine, []).groups == []
    (group,) = collect(engine, [asked(TwoTurns(), "unknown")]).groups
    assert rewards(group) == [None]
