"""Classes in the styles of other trainers become environments of ours; the cookbook's own types where installed."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toy_styles import Echo, Squares
from toy_two_turns import GuessTwice

from retrain.environments.providers.styles import adapt
from retrain.errors import DataError, PluginError, UsageError
from retrain.types import Action, Problem


@pytest.fixture(scope="module", autouse=True)
def runner():
    with asyncio.Runner() as made:
        global run
        run = made.run
        yield


def adapted(written, args):
    async def awaited(value):
        return await value

    return adapt(written, args, lambda value: run(awaited(value)) if inspect.isawaitable(value) else value)


def move(episode, text, ids=(1,)):
    return episode.step(Action(list(ids), text, np.zeros(len(ids)), None, "stop"))


def test_an_environment_of_ours_stays_as_it_is():
    assert isinstance(adapted(GuessTwice, {"problems": [Problem("a", "guess", "")]}), GuessTwice)


def test_one_turn_that_is_graded():
    environment = adapted(Squares, {"largest": 30})
    assert (environment.reward_min, environment.reward_max) == (0.0, 1.0)
    assert environment.metrics_ranges == {"length": {"min": 0, "invert": True}}
    assert not environment.exact
    train, held = environment.problems("train"), environment.problems("test")
    assert (len(train), len(held)) == (27, 3)
    assert (train[4].prompt, train[4].answer, train[4].metadata["n"]) == ("4²?", "16", 4)
    assert held == environment.problems("other")
    episode = environment.start(train[4], 0)
    system, user = episode.observe().messages
    assert (system["content"], user["content"]) == ("You square.", "Only a number.\n\n4²?")
    assert move(episode, "16").done
    result = episode.result()
    assert (result.total_reward, result.sample_metrics, result.tags) == (1.0, {"length": 2.0}, ("parity=even",))
    broken = environment.start(train[4], 0)
    move(broken, "four")
    assert broken.result().total_reward is None
    assert "ValueError: invalid literal for int()" in (broken.result().error or "")
    assert len(adapted(Squares, {"heldout": 5}).problems("train")) == 15
    with pytest.raises(DataError, match="returned 1 samples"):
        adapted(Squares, {"largest": 1}).problems("train")
    with pytest.raises(DataError, match="heldout = 20 leaves none of 20 problems"):
        adapted(Squares, {"heldout": 20}).problems("train")


def test_several_turns_that_are_graded():
    environment = adapted(Echo, {})
    (held,) = environment.problems("test")
    assert held.prompt == ({"role": "user", "content": "say w3"},)
    episode, lost = environment.start(held, 0), environment.start(held, 0)
    first = move(episode, "w1")
    assert (first.done, first.messages) == (False, [{"role": "user", "content": "no, 2"}])
    assert move(lost, "w1").messages == first.messages
    last = move(episode, "w3")
    assert (last.done, last.logs) == (True, {"stop_reason": "said"})
    assert episode.result().total_reward == 0.5
    assert episode.result().sample_metrics == {"total_tool_calls": 2.0}
    assert move(lost, "w1").messages == [{"role": "user", "content": "no, 4"}]
    assert move(lost, "w1").logs == {"stop_reason": "max_turns"}
    assert lost.result().total_reward == 0
    limited = type("Limited", (Echo,), {"is_done": None, "max_turns": 2})
    environment = adapted(limited, {})
    episode = environment.start(environment.problems("train")[0], 0)
    assert [move(episode, "w9").done for _ in range(2)] == [False, True]
    limited.max_turns = None
    with pytest.raises(PluginError, match="neither is_done nor max_turns to end it"):
        move(environment.start(environment.problems("train")[0], 0), "w9")


@dataclass
class StepResult:  # as tinker_cookbook.rl.types and message_env have it
    reward: float
    episode_done: bool
    next_observation: Any
    next_stop_condition: Any = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class MessageStepResult:
    reward: float
    episode_done: bool
    next_messages: list[dict[str, Any]]


class Tokens:
    """Stands for a ModelInput."""

    def __init__(self, ids):
        self.ids = ids

    def to_ints(self):
        return self.ids


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(96 + number) for number in ids)


class Counting:
    """Text, not async; the seed is where to count from."""

    exact = True

    def __init__(self, seed, goal=2):
        self.at, self.goal = seed, goal

    def initial_observation(self):
        return f"after {self.at}?"

    def step(self, action):
        right = action == str(self.at + 1)
        self.at += 1
        self.goal -= 1
        return StepResult(float(right), self.goal == 0, f"after {self.at}?", metrics={"tries": 1.0})


def test_text_that_is_not_async():
    environment = adapted(Counting, {"goal": 2, "size": 3, "heldout": 2})
    assert environment.exact
    assert [len(environment.problems(split)) for split in ("train", "test")] == [3, 2]
    episode = environment.start(environment.problems("train")[0], 9)
    assert episode.observe().messages == ({"role": "user", "content": "after 2?"},)
    step = move(episode, "3")
    assert (step.done, step.reward, step.messages) == (False, 1.0, [{"role": "user", "content": "after 3?"}])
    assert move(episode, "7").reward == 0
    assert episode.result().total_reward == 1
    assert episode.result().sample_metrics == {"tries": 2.0}
    episode.close()


class Talk:
    """Messages, async, with a lock of its loop; repeats the conversation."""

    def __init__(self, word):
        self.word, self.lock = word, asyncio.Lock()

    async def initial_observation(self):
        self.said = [{"role": "user", "content": [{"type": "text", "text": f"say {self.word}"}]}]
        return self.said

    async def step(self, message):
        async with self.lock:
            await asyncio.sleep(0)
        right = message["content"] == self.word
        self.said = [*self.said, message, {"role": "user", "content": "again"}]
        return MessageStepResult(float(right), right, self.said)


class TokenTalk:
    """Tokens: ids 1… are letters."""

    def __init__(self, word):
        self.word, self.renderer = word, SimpleNamespace(tokenizer=Letters() if word == "ab" else None)

    async def initial_observation(self):
        return Tokens([8, 9]), [0]

    async def step(self, action, *, extra=None):
        assert extra == {"stop_reason": "stop"}
        done = Letters().decode(action) == self.word
        return StepResult(0.25, done, Tokens([8, 9, *action, 2]))


class Builder:
    def __init__(self, make, word):
        self.make, self.word, self.cleaned = make, word, 0

    async def make_envs(self):
        return [self.make(self.word) for _ in range(4)]

    async def compute_group_rewards(self, trajectories, environments):
        (trajectory,), (environment,) = trajectories, environments
        return [(0.5 * len(trajectory.transitions), {"word": float(len(environment.word))})]

    async def cleanup(self):
        self.cleaned += 1


class Words:
    """A data set, in batches of two."""

    def __init__(self, make=Talk, words=("ab", "cd", "ef", "gh")):
        self.builders = [Builder(make, word) for word in words]

    def get_batch(self, index):
        return self.builders[2 * index : 2 * index + 2]

    def __len__(self):
        return len(self.builders) // 2


class WordsBuilder:
    def __init__(self, held=True):
        self.held = held

    async def __call__(self):
        return Words(), Words(words=("xy", "zz")) if self.held else None


def test_messages_of_a_data_set():
    data = Words()
    environment = adapted(lambda: data, {})
    assert [len(environment.problems(split)) for split in ("train", "test")] == [3, 1]
    problem = environment.problems("test")[0]
    episode = environment.start(problem, 0)
    assert episode.observe().messages == ({"role": "user", "content": "say gh"},)
    step = move(episode, "hg")
    assert (step.done, step.messages) == (False, [{"role": "user", "content": "again"}])
    assert move(episode, "gh").done
    assert episode.result().total_reward == 1 + 0.5 * 2
    assert episode.result().sample_metrics == {"word": 2.0}
    episode.close()
    episode.close()
    assert data.builders[3].cleaned == 1


def test_a_builder_of_data_sets_has_its_own_held_out_one():
    environment = adapted(WordsBuilder, {})
    assert [len(environment.problems(split)) for split in ("train", "test")] == [4, 2]
    begun = environment.start(environment.problems("test")[1], 0)
    assert begun.observe().messages[0]["content"] == "say zz"
    assert [len(adapted(WordsBuilder, {"held": False}).problems(split)) for split in ("train", "test")] == [3, 1]
    with pytest.raises(UsageError, match="has held-out problems of its own, has no argument 'heldout'"):
        adapted(WordsBuilder, {"heldout": 1})


def test_tokens_need_a_tokenizer():
    environment = adapted(Words, {"make": TokenTalk})
    with pytest.raises(PluginError, match="its observations are tokens, which only a tokenizer reads"):
        environment.start(environment.problems("train")[1], 0)
    episode = environment.start(environment.problems("train")[0], 0)
    assert episode.observe().messages == ({"role": "user", "content": "hi"},)
    step = move(episode, "ba", [2, 1])
    assert (step.done, step.reward, step.conversation) == (False, 0.25, [{"role": "user", "content": "hibab"}])
    assert move(episode, "ab", [1, 2]).done
    assert episode.result().total_reward == 0.5 + 0.5 * 2


@pytest.mark.parametrize(
    ("written", "arguments", "error", "message"),
    [
        (Letters, {}, PluginError, "Letters is no environment: it has none of problems and start; load_dataset and"),
        (Talk, {"word": "ab"}, PluginError, "Talk is one episode .* and takes no seed"),
        (lambda: Builder(Talk, "ab"), {}, PluginError, "is one problem .* with get_batch and __len__"),
        (Squares, {"largst": 3}, UsageError, "args: got an unexpected keyword argument 'largst'"),
        (Squares, {"size": 3}, UsageError, "Squares has no argument 'size'"),
        (GuessTwice, {}, UsageError, "args: missing a required argument: 'problems'"),
        (lambda: 3, {}, PluginError, "is no environment"),
    ],
)
def test_what_is_no_environment_is_told(written, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        adapted(written, arguments)
    assert "\n" not in str(raised.value)
