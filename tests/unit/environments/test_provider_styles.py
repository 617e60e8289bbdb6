"""Classes in the styles of other trainers become environments of ours; the cookbook's own types where installed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from toy_styles import Echo, Squares
from toy_two_turns import GuessTwice

from retrain.environments.providers.styles import adapt
from retrain.errors import DataError, PluginError, UsageError
from retrain.types import Action, Problem


def move(episode, text, ids=(1,)):
    return episode.step(Action(list(ids), text, np.zeros(len(ids)), None, "stop"))


def test_an_environment_of_ours_stays_as_it_is():
    problems = [Problem("a", "guess", "")]
    assert isinstance(adapt(GuessTwice, {"problems": problems}), GuessTwice)
    made = GuessTwice(problems)
    assert adapt(made, {}) is made


def test_one_turn_that_is_graded():
    environment = adapt(Squares, {"largest": 30})
    assert environment.reward_range == (0.0, 1.0)
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
    assert len(adapt(Squares, {"heldout": 5}).problems("train")) == 15


def test_several_turns_that_are_graded():
    environment = adapt(Echo(), {})
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


class Limited(Echo):
    """Ended by the number of its turns alone."""

    is_done = None
    max_turns = 2


def test_turns_are_limited_by_max_turns():
    environment = adapt(Limited, {})
    episode = environment.start(environment.problems("train")[0], 0)
    assert [move(episode, "w9").done for _ in range(2)] == [False, True]
    endless = Limited()
    endless.max_turns = None
    episode = adapt(endless, {}).start(environment.problems("train")[0], 0)
    with pytest.raises(PluginError, match="neither is_done nor max_turns to end it"):
        move(episode, "w9")


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
    environment = adapt(Counting, {"goal": 2, "size": 3, "heldout": 2})
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
        self.word = word

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
    environment = adapt(data, {})
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
    environment = adapt(WordsBuilder, {})
    assert [len(environment.problems(split)) for split in ("train", "test")] == [4, 2]
    begun = environment.start(environment.problems("test")[1], 0)
    assert begun.observe().messages[0]["content"] == "say zz"
    assert [len(adapt(WordsBuilder, {"held": False}).problems(split)) for split in ("train", "test")] == [3, 1]
    with pytest.raises(UsageError, match="has held-out problems of its own, has no argument 'heldout'"):
        adapt(WordsBuilder, {"heldout": 1})


def test_tokens_need_a_tokenizer():
    environment = adapt(Words, {"make": TokenTalk})
    with pytest.raises(PluginError, match="its observations are tokens, which only a tokenizer reads"):
        environment.start(environment.problems("train")[0], 0)
    environment = adapt(Words, {"make": TokenTalk}, tokenizer=Letters())
    episode = environment.start(environment.problems("train")[0], 0)
    assert episode.observe().messages == ({"role": "user", "content": "hi"},)
    step = move(episode, "ba", [2, 1])
    assert (step.done, step.reward, step.conversation) == (False, 0.25, [{"role": "user", "content": "hibab"}])
    assert move(episode, "ab", [1, 2]).done
    assert episode.result().total_reward == 0.5 + 0.5 * 2


class Nothing:
    def step(self, action):
        return action


class OneGroup(Builder):
    def __init__(self):
        super().__init__(Talk, "ab")


@pytest.mark.parametrize(
    ("written", "arguments", "error", "message"),
    [
        (Nothing, {}, PluginError, "Nothing is no environment: it has none of problems and start; load_dataset and"),
        (Talk, {"word": "ab"}, PluginError, "Talk is one episode .* and takes no seed"),
        (OneGroup, {}, PluginError, "is one problem .* with get_batch and __len__"),
        (Squares, {"largst": 3}, UsageError, "Squares has no argument 'largst'; did you mean largest"),
        (Squares, {"size": 3}, UsageError, "Squares has no argument 'size'"),
        (GuessTwice, {}, UsageError, "GuessTwice needs the argument 'problems'"),
        (Echo(), {"a": 1}, UsageError, "Echo is made already and takes no arguments: a"),
        (Words, {"words": 7}, PluginError, "Words: TypeError: 'int' object is not iterable"),
        (lambda: 3, {}, PluginError, "is no environment"),
    ],
)
def test_what_is_no_environment_is_told(written, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        adapt(written, arguments)
    assert "\n" not in str(raised.value)


def test_few_samples():
    with pytest.raises(DataError, match="returned 1 samples"):
        adapt(Squares, {"largest": 1}).problems("train")
    with pytest.raises(DataError, match="heldout = 20 leaves none of 20 samples"):
        adapt(Squares, {"heldout": 20}).problems("train")


def test_within_an_event_loop_it_says_so():
    environment = adapt(Words, {})
    problem = environment.problems("train")[0]

    async def inside():
        return environment.start(problem, 0)

    with pytest.raises(PluginError, match="cannot be called within another event loop"):
        asyncio.run(inside())


@pytest.mark.filterwarnings("default")
def test_the_cookbook_s_own_types():
    pytest.importorskip("tinker_cookbook", reason="pip install tinker-cookbook")
    from functools import partial

    import tinker
    from tinker_cookbook.rl import message_env, problem_env, types

    class Renderer:
        """What the environments use of one: letters are tokens, and 0 ends an answer."""

        tokenizer = Letters()

        def build_generation_prompt(self, messages, **kwargs):
            text = "".join(message["content"] for message in messages)
            return tinker.ModelInput.from_ints([ord(letter) - 96 for letter in text if "a" <= letter <= "z"])

        def get_stop_sequences(self):
            return [0]

        def parse_response(self, action):
            from tinker_cookbook.renderers.base import ParseTermination

            return {"role": "assistant", "content": Letters().decode(action)}, ParseTermination.STOP_SEQUENCE

    class Sum(problem_env.ProblemEnv):
        def get_question(self):
            return "one and one?"

        def check_answer(self, sample_str):
            return sample_str == "b"

        def check_format(self, sample_str):
            return len(sample_str) == 1

        def get_reference_answer(self):
            return "b"

    class Say(message_env.MessageEnv):
        async def initial_observation(self):
            return [{"role": "user", "content": "say b"}]

        async def step(self, message):
            right = message["content"] == "b"
            said = [{"role": "user", "content": "say b"}, message, {"role": "user", "content": "no"}]
            return message_env.MessageStepResult(float(right), right, said, metrics={"said": 1.0})

    class Raw(types.Env):
        async def initial_observation(self):
            return Renderer().build_generation_prompt([{"content": "hi"}]), [0]

        async def step(self, action, *, extra=None):
            return types.StepResult(float(action == [2]), True, tinker.ModelInput.empty(), [0])

    class Data(types.RLDataset):
        def __init__(self, thunks):
            self.builders = [problem_env.ProblemGroupBuilder(thunk, 2) for thunk in thunks]

        def get_batch(self, index):
            return [self.builders[index]]

        def __len__(self):
            return len(self.builders)

    wrapped = partial(message_env.EnvFromMessageEnv, Renderer(), Say())
    environment = adapt(Data([partial(Sum, Renderer()), wrapped, Raw, Raw]), {}, tokenizer=Letters())
    sums, say, raw = (environment.start(problem, 0) for problem in environment.problems("train"))
    assert [episode.observe().messages[0]["content"] for episode in (sums, say, raw)] == ["one and one?", "say b", "hi"]
    assert (move(sums, "b", [2]).reward, sums.result().total_reward) == (1.0, 1.0)
    assert sums.result().sample_metrics == {"format": 1.0, "correct": 1.0}
    assert move(say, "c", [3]).messages == [{"role": "user", "content": "no"}]
    assert move(say, "b", [2]).done
    assert (say.result().total_reward, say.result().sample_metrics) == (1.0, {"said": 2.0})
    assert move(raw, "b", [2]).done
    assert raw.result().total_reward == 1
