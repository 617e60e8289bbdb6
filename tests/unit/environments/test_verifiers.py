"""Environments of the verifiers library, driven by a scripted policy: the real package and its real grading.

Either kind is tested where a version of verifiers that has it is installed.
"""

import json
import os
import random
import signal
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from retrain.config import parse_dict
from retrain.environments.build import close_hosted, environments_of, provided_data
from retrain.environments.providers.inversion import HarnessResult, Inversion, InvertedEpisode
from retrain.environments.tools.calls import Call, read_calls
from retrain.errors import DataError, PluginError, UsageError
from retrain.types import Action, Problem, RewardResult

TOYS = Path(__file__).parents[2] / "verifiers_toys"
HAS = find_spec("verifiers") is not None
# What the library and its dependencies warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def has_classic() -> bool:
    if not HAS:
        return False
    import verifiers

    return hasattr(verifiers, "load_environment")


def has_v1() -> bool:
    try:
        return find_spec("verifiers.v1.harnesses.utils") is not None
    except ModuleNotFoundError:
        return False


classic = pytest.mark.skipif(not has_classic(), reason="needs verifiers 0.3 or older")
v1 = pytest.mark.skipif(not has_v1(), reason="needs verifiers 0.4 or newer")


def act(text: str, stop_reason="stop") -> Action:
    ids = [ord(letter) % 97 for letter in text]
    return Action(ids, text, np.full(len(ids), -0.5), None, stop_reason)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module", autouse=True)
def toys():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOYS))
        patch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # loading a taskset extends it
        yield


@pytest.fixture(scope="module")
def opened(toys):
    """Environments of this module, each loaded once."""
    from retrain.environments.providers.verifiers import Verifiers

    made = {}

    def make(id: str, **args):
        key = json.dumps([id, args], sort_keys=True)
        if key not in made:
            made[key] = Verifiers(id, **args)
        return made[key]

    yield make
    for environment in made.values():
        environment.close()


def played(environment, texts, seed=0, row=0):
    """Steps and result of one episode with these answers."""
    episode = environment.start(environment.problems("train")[row], seed)
    steps = [episode.observe()]
    for text in texts:
        steps.append(episode.step(act(text)))
        if steps[-1].done:
            break
    result = episode.result()
    episode.close()
    return steps, result


def judged(id, texts, **keys):
    """Whether each of these answers, in worker processes, counts as correct with these keys of [environment]."""
    section = {"provider": "verifiers", "id": id, "args": {"heldout": 0}, "workers": 1, "timeout_s": 60.0, **keys}
    config = parse_dict({"environment": section, "evaluation": {"problems": 0}})
    try:
        environment = environments_of(config, provided_data(config, TOYS), None, TOYS)["train"]
        episodes = [environment.start(environment.problems("train")[0], 0) for _ in texts]
        for episode, text in zip(episodes, texts, strict=True):
            episode.step(act(text))
        return [result.is_correct for result in environment.results(episodes)]
    finally:
        close_hosted()


@v1
def test_the_named_metric_of_a_taskset_decides_what_is_correct():
    assert judged("toy_reverse", ["elppa", "wrong", ""]) == [True, False, False]
    assert judged("toy_reverse", ["elppa", "wrong", ""], correct_metric="length") == [True, True, False]


@classic
def test_the_named_metric_of_a_rubric_decides_what_is_correct():
    assert judged("toy_classic", ["0", "7"], correct_metric="num_turns") == [True, True]


# --- environments with load_environment ---------------------------------------------------------------------------


@classic
def test_one_turn_is_graded_by_the_rubric(opened):
    environment = opened("toy_classic")
    problem = environment.problems("train")[3]
    assert problem.prompt == ({"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 3+3?"})
    assert problem.answer == "6"
    assert not environment.exact
    json.dumps(dict(problem.metadata))
    for text, reward in (("6", 1.0), (" 6\n", 1.0), ("7", 0.0), ("", 0.0)):
        (seen, step), result = played(environment, [text], row=3)
        assert tuple(seen.messages) == problem.prompt
        assert (step.done, step.logs) == (True, {"stop": "max_turns_reached"})
        assert result == RewardResult(reward, {"exact": reward, "num_turns": 1.0})
    other = Problem(problem.id, problem.prompt, "6", metadata={**problem.metadata, "digest": "0"})
    with pytest.raises(DataError, match="drawn at random"):
        environment.start(other, 0)


@classic
def test_tools_are_offered_and_called(opened):
    environment = opened("toy_classic", kind="tools")
    (seen, first, second), result = played(environment, [f"Let me see. {call('capital', country='France')}", "Paris"])
    assert [tool["function"]["name"] for tool in seen.tools] == ["capital"]
    assert seen.tools[0]["function"]["parameters"]["required"] == ["country"]
    assert first.messages == ({"role": "tool", "content": "Paris", "tool_call_id": "call00000"},)
    assert (first.done, second.done) == (False, True)
    assert (result.total_reward, result.sample_metrics["capital_calls"]) == (1.0, 1.0)
    (_, unknown, _), wrong = played(environment, [call("capital", country="Mars"), "none"])
    assert "Mars" in unknown.messages[0]["content"]
    assert wrong.total_reward == 0.0


@classic
def test_episodes_have_random_numbers_of_their_own_whatever_their_order(opened):
    number = random.Random("5").randint(1, 1000)
    random.seed(77)
    unmoved = random.getstate()
    steps, _ = played(opened("toy_classic", kind="guess"), ["0", "1001", str(number), "never"], seed=5)
    assert [step.messages[0]["content"].split()[0] for step in steps[1:3]] == ["higher", "lower"]
    assert [step.logs for step in steps[3:]] == [{"stop": "found"}]
    assert random.getstate() == unmoved, "an episode's draws are its own"
    environment = opened("toy_classic", kind="guess", max_turns=6)
    problem = environment.problems("train")[0]
    texts = ["10", "200", "300", "400", "500", "600"]
    alone = [played(environment, texts, seed=seed) for seed in range(4)]
    episodes = [environment.start(problem, seed) for seed in range(4)]
    steps = [[episode.observe()] for episode in episodes]
    for turn, text in enumerate(texts):
        order = range(4) if turn % 2 else reversed(range(4))
        for index in order:
            steps[index].append(episodes[index].step(act(text)))
    assert [(taken, episode.result()) for taken, episode in zip(steps, episodes, strict=True)] == alone


@classic
def test_rewritten_history_is_the_whole_conversation(opened):
    environment = opened("toy_classic", kind="forgetful", max_turns=3)
    (_, first, second, _), _ = played(environment, ["  5 ", "<think>hm</think> 7", "9"], seed=3)
    for number, (step, text) in enumerate(((first, "  5 "), (second, "<think>hm</think> 7")), 1):
        assert not step.messages
        assert [message["role"] for message in step.conversation] == ["user", "assistant", "user"]
        assert step.conversation[0]["content"] == f"{number} so far."
        assert step.conversation[1]["content"] == text, "what was sampled, as it was sampled"


@classic
def test_what_raises_gives_no_reward_unless_it_is_a_metric(opened):
    (_, first, second), result = played(opened("toy_classic", kind="guess", fault="out of paper"), ["1", "2"])
    assert (first.done, second.done) == (False, True)
    assert result.total_reward is None
    assert "out of paper" in result.error
    _, result = played(opened("toy_classic", kind="broken"), ["0"])
    assert result.total_reward is None
    assert "no such number" in result.error
    (_, step), result = played(opened("toy_classic", kind="broken metric"), ["0"])
    assert result == RewardResult(1.0, {"exact": 1.0, "broken": None, "num_turns": 1.0})
    assert "no such number" in step.logs["failed_metrics"]


@classic
def test_problems_are_held_out_by_the_environment_or_by_hash(opened):
    own = opened("toy_classic")
    assert [problem.metadata["part"] for problem in own.problems("test")] == ["eval"]
    assert len(own.problems("train")) == 20
    episode = own.start(own.problems("test")[0], 0)
    assert episode.observe().messages[-1]["content"] == "Guess."
    episode.close()
    shared = opened("toy_classic", kind="untested", heldout=5)
    train, test = ({problem.id for problem in shared.problems(split)} for split in ("train", "test"))
    assert len(test) == 5
    assert len(train) == 15
    assert not train & test
    assert opened("toy_classic", kind="untested", heldout=5, train=3).problems("train") == shared.problems("train")[:3]
    twice = opened("toy_classic", kind="untested", heldout_args={"kind": "tools"})
    assert [problem.answer for problem in twice.problems("test")] == ["Paris", "Lima"]
    episode = twice.start(twice.problems("test")[1], 0)
    assert episode.observe().messages == ({"role": "user", "content": "Capital of Peru?"},)
    episode.close()
    with pytest.raises(UsageError, match="leaves none of the 20"):
        opened("toy_classic", kind="untested", heldout=20).problems("train")
    with pytest.raises(DataError, match="no held-out problems"):
        opened("toy_classic", kind="untested", heldout=0).problems("test")


@classic
def test_what_cannot_be_loaded_says_so(opened):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(DataError, match="toy_nowhere cannot be loaded: ValueError: Could not import"):
        opened("toy_nowhere")
    with pytest.raises(DataError, match="No module named 'absent_package'"):
        opened("toy_unmet")
    with pytest.raises(DataError, match="unexpected keyword argument 'size'"):
        opened("toy_classic", size=3)
    with pytest.raises(UsageError, match="rollouts of a group together"):
        opened("toy_classic", kind="group")
    assert signal.getsignal(signal.SIGINT) is before


# --- tasksets of verifiers.v1 --------------------------------------------------------------------------------------


@v1
def test_a_task_of_one_turn_is_graded_by_its_rewards(opened):
    environment = opened("toy_reverse", heldout=0, words=["apple", "break"])
    problem = environment.problems("train")[0]
    assert problem.answer == "elppa"
    for text, reward in (("elppa", 2.0), ("", 0.0)):
        (seen, step), result = played(environment, [text])
        assert (tuple(seen.messages), step.done) == (problem.prompt, True)
        assert (result.total_reward, result.error) == (reward, None)
        assert result.components == {"reversed": reward / 2, "ripeness": 0.5}
        assert result.sample_metrics == {"length": float(len(text)), "sweetness": 0.5}
    (_, step), result = played(environment, ["mulp"])  # a metric that raises costs no reward
    assert (result.total_reward, result.error) == (0.0, None)
    assert "sweetness" not in result.sample_metrics
    assert "sweetness: ArithmeticError: too sweet" in step.logs["failed_metrics"]
    assert "ripeness: ArithmeticError: too ripe" in step.logs["failed_metrics"]
    (_, step), result = played(environment, ["raise"])
    assert (step.done, result.total_reward) == (True, None)
    assert "no such number" in result.error
    with pytest.raises(PluginError, match="broken on purpose"):
        environment.start(environment.problems("train")[1], 0)
    package = opened("toy_package.inner.reverse", heldout=0)
    assert played(package, ["elppa"])[1].total_reward == 2.0


@v1
def test_a_tool_in_a_process_of_its_own(opened):
    environment = opened("toy_stamp", train=3, heldout=0)
    assert len(environment.problems("train")) == 3
    calls = [call("stamp_back", message="a"), f"Two {call('stamp_back', message='b')} {call('nothing')}", "done"]
    (seen, first, second, third), result = played(environment, calls)
    assert seen.tools[0]["function"]["name"] == "stamp_back"
    assert first.messages == (
        {"role": "tool", "content": "a [stamp 1]", "name": "stamp_back", "tool_call_id": "call00000"},
    )
    assert [message["content"] for message in second.messages] == ["b [stamp 2]", "error: unknown tool 'nothing'"]
    assert third.logs == {"stop": "agent_completed"}
    assert result.total_reward == pytest.approx(2 / 3)
    steps, result = played(environment, [call("stamp_back", message="c")] * 5)
    assert len(steps) == 4, "its stop condition refuses a fourth turn"
    assert steps[-1].logs == {"stop": "enough"}
    assert result.total_reward == 1.0


@v1
def test_an_environment_that_plays_the_user(opened):
    environment = opened("toy_echo", heldout=0)
    problem = environment.problems("train")[0]
    assert problem.prompt[-1]["content"] == "toy_echo, task 0"
    (seen, *steps), result = played(environment, ["one", "two", "four"])
    assert seen.messages == ({"role": "system", "content": "Repeat."}, {"role": "user", "content": "one"})
    assert [message["content"] for step in steps for message in step.messages] == ["two", "three"]
    assert result.total_reward == pytest.approx(2 / 3)
    episode = environment.start(problem, 0)
    assert not episode.step(act("one")).done
    cut_short = episode.result()
    assert (cut_short.total_reward, cut_short.error) == (pytest.approx(1 / 3), None)


@v1
def test_episodes_of_several_runs_are_refused_before_anything_is_sampled(opened):
    with pytest.raises(UsageError, match="BestOfNEnv runs its agents 3 times in one episode"):
        opened("toy_reverse", heldout=0, env={"id": "best-of-n", "n": 3}).problems("train")


@v1
def test_what_v1_cannot_load_says_so(opened):
    with pytest.raises(UsageError, match="endless"):
        opened("toy_stamp").problems("train")
    with pytest.raises(DataError, match="No module named 'absent_package'"):
        opened("toy_unmet")
    with pytest.raises(DataError, match="wrods"):
        opened("toy_reverse", wrods=["a"])
    if not has_classic():
        with pytest.raises(UsageError, match="no taskset toy_nowhere"):
            opened("toy_nowhere")


# --- what needs no verifiers ---------------------------------------------------------------------------------------


@pytest.fixture
def inversion():
    pytest.importorskip("aiohttp")
    made = Inversion()
    yield made
    made.close()


async def posted(inversion, channel, messages, **body):
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"{inversion.endpoint.url_of(channel)}/chat/completions"
        reply = await client.post(url, json={"messages": messages, **body})
        return reply.status_code, reply.text


PROPERTIES = {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Go."}


def test_the_endpoint_answers_as_openai_does(inversion):
    replies = []

    async def lead(channel):
        replies.append(await posted(inversion, channel, [USER], tools=[TOOL]))
        replies.append(await posted(inversion, channel, [USER], tools=[TOOL], stream=True))
        return HarnessResult(RewardResult(1.0))

    episode = InvertedEpisode(inversion, lead, 0)
    assert episode.observe().tools == (TOOL,)
    episode.step(act(f"I add. {call('add', a=1)}"))
    assert episode.step(act("ab", "length")).done
    status, text = replies[0]
    choice = json.loads(text)["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "tool_calls", "I add.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
    events = [line[6:] for line in replies[1][1].splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    content, ended, usage = map(json.loads, events)
    assert content["choices"][0]["delta"] == {"role": "assistant", "content": "ab"}
    assert ended["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 2
    episode.close()


@pytest.mark.parametrize("fault", ["image_url", "other tools", "went on asking", "closed"])
def test_a_harness_that_cannot_continue_is_stopped(inversion, fault):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    messages = [USER, image] if fault == "image_url" else [USER]
    ended = []

    async def lead(channel):
        try:
            assert (await posted(inversion, SimpleNamespace(name="guessed"), [USER]))[0] == 404
            await posted(inversion, channel, [USER])
            while True:
                await posted(inversion, channel, messages, tools=[TOOL] * (fault == "other tools"))
        finally:
            ended.append(True)

    episode = InvertedEpisode(inversion, lead, 0)
    if fault == "closed":
        episode.observe()
        episode.close()
    else:
        assert episode.step(act("a")).done == (fault != "went on asking")
    result = episode.result()
    assert result.total_reward is None
    assert fault in result.error
    episode.close()
    assert ended
    assert not inversion.endpoint.channels


@pytest.mark.parametrize(("text", "content", "arguments"), [
    (f"<think>two</think> Now. {call('add', a=1)}", "<think>two</think>\n\nNow.", {"a": 1}),
    ("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", "", {"a": 1}),
    (call("add", a="one", b="2"), "", {"a": "one", "b": "2"}),
    ("no call", "no call", None),
])  # fmt: skip
def test_calls_are_read_in_the_formats_of_open_models(text, content, arguments):
    expected = [] if arguments is None else [Call("add", arguments)]
    assert read_calls(text, [TOOL]) == (content, expected)
