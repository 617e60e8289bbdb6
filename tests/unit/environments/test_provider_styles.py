import asyncio
import inspect
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from retrain.environments.providers.styles import adapt
from retrain.errors import DataError, PluginError, UsageError
from retrain.types import Action, Problem


@pytest.fixture(scope="module", autouse=True)
def runner():
    with asyncio.Runner() as made:
        global run
        run = made.run
        yield


def adapted(written, **args):
    async def awaited(value):
        return await value

    return adapt(written, args, lambda value: run(awaited(value)) if inspect.isawaitable(value) else value)


def begun(environment, index=0, split="train"):
    return environment.start(environment.problems(split)[index], 0)


def sizes(environment):
    return [len(environment.problems(split)) for split in ("train", "test")]


def move(episode, text, ids=(1,)):
    return episode.step(Action(list(ids), text, np.zeros(len(ids)), None, "stop"))


class GuessTwice:
    def __init__(self, problems):
        self._problems = problems

    def problems(self, split):
        return self._problems

    def start(self, problem, seed):
        raise NotImplementedError


def test_an_environment_of_ours_stays_as_it_is():
    assert isinstance(adapted(GuessTwice, problems=[Problem("a", "guess", "")]), GuessTwice)


class WithoutSignature(dict):
    """Subclass of a built-in type: ``inspect.signature`` raises ValueError for it."""

    start, problems = GuessTwice.start, GuessTwice.problems


def test_an_environment_without_a_signature_is_made():
    assert adapted(WithoutSignature, size=3) == {"size": 3}


def reward(total, metrics=(), tags=()):
    return SimpleNamespace(total_reward=total, sample_metrics=dict(metrics), sample_tags=dict(tags))


class Squares:
    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = {"length": {"min": 0, "invert": True}}  # noqa: RUF012
    system_prompt, instruction_prompt = "You square.", "Only a number."

    def __init__(self, largest=20):
        self.largest = largest

    def load_dataset(self, num_samples=-1):
        return [SimpleNamespace(prompt=f"{n}²?", answer=str(n * n), metadata={"n": n}) for n in range(self.largest)]

    async def compute_reward(self, completion, sample, eos_token=""):
        right = float(int(completion) == sample.metadata["n"] ** 2)
        return reward(right, {"length": len(completion)}, {"parity": "odd" if sample.metadata["n"] % 2 else "even"})


class Echo:
    """Several turns: say the word that was asked for, three tries, one tool."""

    def load_dataset(self, num_samples=-1):
        prompts = [[{"role": "user", "content": f"say w{n}"}] for n in range(4)]
        return [SimpleNamespace(prompt=prompt, answer=f"w{n}", metadata={}) for n, prompt in enumerate(prompts)]

    async def env_response(self, messages, state):
        state.custom["said"] = messages[-1]["content"] == state.sample.answer
        answer = {"role": "user", "content": f"no, {len(messages)}", "turn_type": "feedback"}
        return [] if state.custom["said"] else [answer]

    def is_done(self, state):
        return state.custom["said"] or state.num_turns >= 3, "said" if state.custom["said"] else "max_turns"

    def get_tool_metrics(self, state):
        return {"total_tool_calls": float(state.num_turns)}

    async def compute_reward(self, state, eos_token=""):
        return reward(1 / state.num_turns if state.custom.get("said") else 0.0)


def test_one_turn_that_is_graded():
    environment = adapted(Squares, largest=30)
    assert (environment.reward_min, environment.reward_max, environment.exact) == (0.0, 1.0, False)
    assert environment.metrics_ranges == {"length": {"min": 0, "invert": True}}
    assert sizes(environment) == [27, 3]
    problem = environment.problems("train")[4]
    assert (problem.prompt, problem.answer, problem.metadata["n"]) == ("4²?", "16", 4)
    episode, broken = begun(environment, 4), begun(environment, 4)
    assert [message["content"] for message in episode.observe().messages] == ["You square.", "Only a number.\n\n4²?"]
    assert move(episode, "16").done
    result = episode.result()
    assert (result.total_reward, result.sample_metrics, result.tags) == (1.0, {"length": 2.0}, ("parity=even",))
    move(broken, "four")
    assert broken.result().total_reward is None
    assert "ValueError: invalid literal for int()" in (broken.result().error or "")
    assert sizes(adapted(Squares, heldout=5)) == [15, 5]
    with pytest.raises(DataError, match="heldout = 20 leaves none of 20 problems"):
        adapted(Squares, heldout=20).problems("train")


def test_several_turns_that_are_graded():
    environment = adapted(Echo)
    episode, lost = begun(environment, split="test"), begun(environment, split="test")
    assert episode.observe().messages == ({"role": "user", "content": "say w3"},)
    first = move(episode, "w1")
    assert (first.done, first.messages) == (False, [{"role": "user", "content": "no, 2"}])
    assert move(lost, "w1").messages == first.messages
    assert move(episode, "w3").logs == {"stop_reason": "said"}
    assert (episode.result().total_reward, episode.result().sample_metrics) == (0.5, {"total_tool_calls": 2.0})
    assert move(lost, "w1").messages == [{"role": "user", "content": "no, 4"}]
    assert move(lost, "w1").logs == {"stop_reason": "max_turns"}
    assert lost.result().total_reward == 0
    limited = type("Limited", (Echo,), {"is_done": None, "max_turns": 2})
    episode = begun(adapted(limited))
    assert [move(episode, "w9").done for _ in range(2)] == [False, True]


# The Tinker cookbook: data sets of builders of environments, with its own types stood for.


class Tokens:
    def __init__(self, ids):
        self.ids = ids

    def to_ints(self):
        return self.ids


class Letters:
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
        self.at, self.goal = self.at + 1, self.goal - 1
        facts = {"next_observation": f"after {self.at}?", "metrics": {"tries": 1.0}}
        return SimpleNamespace(reward=float(right), episode_done=self.goal == 0, **facts)


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
        return SimpleNamespace(reward=float(right), episode_done=right, next_messages=self.said)


class TokenTalk:
    """Tokens: ids 1… are letters."""

    def __init__(self, word):
        self.word, self.renderer = word, SimpleNamespace(tokenizer=Letters() if word == "ab" else None)

    async def initial_observation(self):
        return Tokens([8, 9]), [0]

    async def step(self, action, *, extra=None):
        assert extra == {"stop_reason": "stop"}
        done = Letters().decode(action) == self.word
        return SimpleNamespace(reward=0.25, episode_done=done, next_observation=Tokens([8, 9, *action, 2]))


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


def test_builders_of_seeds_are_made_when_their_episodes_begin():
    tracemalloc.start()
    try:
        environment = adapted(Counting, size=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    last = Problem("train/1000199", "", "", (), {"split": "train", "number": 1_000_199})
    assert environment.start(last, 0).observe().messages[0]["content"] == "after 1000199?"


def test_text_that_is_not_async():
    environment = adapted(Counting, goal=2, size=3, heldout=2)
    assert environment.exact
    assert sizes(environment) == [3, 2]
    episode = begun(environment)
    assert episode.observe().messages == ({"role": "user", "content": "after 2?"},)
    step = move(episode, "3")
    assert (step.done, step.reward, step.messages) == (False, 1.0, [{"role": "user", "content": "after 3?"}])
    assert move(episode, "7").reward == 0
    assert (episode.result().total_reward, episode.result().sample_metrics) == (1, {"tries": 2.0})
    episode.close()


def test_messages_of_a_data_set():
    data = Words()
    environment = adapted(lambda: data)
    assert sizes(environment) == [3, 1]
    episode = begun(environment, split="test")
    assert episode.observe().messages == ({"role": "user", "content": "say gh"},)
    step = move(episode, "hg")
    assert (step.done, step.messages) == (False, [{"role": "user", "content": "again"}])
    assert move(episode, "gh").done
    assert (episode.result().total_reward, episode.result().sample_metrics) == (1 + 0.5 * 2, {"word": 2.0})
    episode.close()
    episode.close()
    assert data.builders[3].cleaned == 1


def test_a_builder_of_data_sets_has_its_own_held_out_one():
    environment = adapted(WordsBuilder)
    assert sizes(environment) == [4, 2]
    assert begun(environment, 1, "test").observe().messages[0]["content"] == "say zz"
    assert sizes(adapted(WordsBuilder, held=False)) == [3, 1]
    with pytest.raises(UsageError, match="has held-out problems of its own, has no argument 'heldout'"):
        adapted(WordsBuilder, heldout=1)


def test_tokens_need_a_tokenizer():
    environment = adapted(Words, make=TokenTalk)
    with pytest.raises(PluginError, match="its observations are tokens, which only a tokenizer reads"):
        begun(environment, 1)
    episode = begun(environment)
    assert episode.observe().messages == ({"role": "user", "content": "hi"},)
    step = move(episode, "ba", [2, 1])
    assert (step.done, step.reward, step.conversation) == (False, 0.25, [{"role": "user", "content": "hibab"}])
    assert move(episode, "ab", [1, 2]).done
    assert episode.result().total_reward == 0.5 + 0.5 * 2


@pytest.mark.parametrize(("written", "arguments", "error", "message"), [
    (Letters, {}, PluginError, "Letters is no environment: it has none of problems and start; load_dataset and"),
    (Talk, {"word": "ab"}, PluginError, "Talk is one episode .* and takes no seed"),
    (lambda: Builder(Talk, "ab"), {}, PluginError, "is one problem .* with get_batch and __len__"),
    (Squares, {"largst": 3}, UsageError, "args: got an unexpected keyword argument 'largst'"),
    (Squares, {"heldout": "x"}, UsageError, "Squares: heldout is 'x': Input should be a valid integer"),
])  # fmt: skip
def test_what_is_no_environment_is_told(written, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        adapted(written, **arguments)
    assert "\n" not in str(raised.value)
