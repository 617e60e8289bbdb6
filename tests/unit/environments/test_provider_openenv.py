"""OpenEnv against servers of its own kind, in processes on loopback: played, refused, killed in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from retrain.errors import PluginError, UsageError
from retrain.types import Action

pytest.importorskip("openenv", reason="pip install '.[openenv]'")

from retrain.config import parse_dict
from retrain.environments.build import close_hosted, environments_of, provided_data
from retrain.environments.providers.openenv import OpenEnv
from retrain.environments.providers.openenv_forms import Actions, messages_of
from retrain.environments.providers.openenv_server import Server

# The servers' own packages warn of each other; nothing of ours may.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:(?!retrain)")
TOY = [sys.executable, str(Path(__file__).parents[2] / "toy_openenv.py"), "{port}"]


def action(text):
    return Action([1], text, np.zeros(1), None, "stop")


def digit(problem):
    return random.Random(problem.metadata["seed"]).randrange(10)


@pytest.fixture(scope="module")
def server():
    server = Server(TOY, 90, "toy")
    yield server
    server.close()


def test_a_game_is_played_and_its_rewards_are_added(server):
    environment = OpenEnv(url=server.url, size=3, heldout=2, metrics=["distance"], exact=True, reward_range=[-0.4, 1])
    assert (environment.exact, environment.reward_range) == (True, [-0.4, 1.0])
    train, held = environment.problems("train"), environment.problems("test")
    assert [problem.metadata["seed"] for problem in [*held, *train]] == [0, 1, 2, 3, 4]
    assert len({problem.prompt for problem in [*held, *train]}) == 5
    problem = train[0]
    one, other = environment.start(problem, 7), environment.start(train[1], 7)  # two sessions take turns
    assert one.observe().messages == ({"role": "user", "content": "Guess my digit, 2."},)
    assert other.observe().messages == ({"role": "user", "content": "Guess my digit, 3."},)
    wrong = (digit(problem) + 1) % 10
    off = abs(wrong - digit(problem))
    step = one.step(action(f" {wrong}\n"))
    assert step.messages == [{"role": "user", "content": f"{off} off."}]
    assert (step.done, step.reward, step.metrics) == (False, -0.1, {"distance": off})
    assert other.step(action(str(digit(train[1])))).done
    last = one.step(action(str(digit(problem))))
    assert (last.done, last.reward) == (True, 1.0)
    result = one.result()
    assert result.total_reward == pytest.approx(0.9)
    assert result.sample_metrics == {"invalid_actions": 0, "distance": 0}
    assert other.result().total_reward == 1
    one.close()
    one.close()


@pytest.mark.parametrize(("keys", "expected"), [({}, [True, False]), ({"correct_metric": "distance"}, [False, False])])
def test_a_field_of_the_observation_decides_what_is_correct(server, keys, expected):
    section = {"provider": "openenv", "workers": 1, "args": {"url": server.url, "size": 2, "heldout": 0}, **keys}
    config = parse_dict({"environment": section, "evaluation": {"problems": 0}})
    try:
        environment = environments_of(config, provided_data(config, Path.cwd()), None, Path.cwd())["train"]
        problem = environment.problems("train")[0]
        right = digit(problem)
        episodes = [environment.start(problem, 0) for _ in range(2)]
        for episode, guesses in zip(episodes, ([right], [(right + 1) % 10, right]), strict=True):
            for guess in guesses:
                episode.step(action(str(guess)))
        results = environment.results(episodes)
    finally:
        close_hosted()
    assert [result.total_reward for result in results] == [1.0, 0.9]
    assert [result.is_correct for result in results] == expected


def test_an_error_of_the_environment_is_told(server):
    episode = OpenEnv(url=server.url).start(OpenEnv(url=server.url).problems("train")[0], 0)
    with pytest.raises(PluginError, match=f"{server.url} answered with an error: .*invalid literal for int"):
        episode.step(action("seven"))
    assert episode.result().total_reward is None
    assert "gave no reward" in (episode.result().error or "")


def test_actions_of_several_fields_are_json():
    """What the prompt shows validates the actions that the server takes, with the definitions that they refer to."""
    environment = OpenEnv(command=[*TOY, "16", "nested"], start_seconds=90)
    try:
        problem = environment.problems("train")[0]
        episode = environment.start(problem, 0)
        prompt = episode.observe().messages[-1]["content"]
        assert prompt.startswith("Guess my digit, 200.\n\nAnswer with exactly one JSON object")
        schema = json.loads(prompt[prompt.index("{") :])
        assert "metadata" not in schema["properties"]
        good = {"place": {"row": 1, "column": 2}, "pieces": [{"row": 0, "column": 0}]}
        jsonschema.validate(good, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"place": {"row": 1}}, schema)
        refused = episode.step(action("row 1"))
        assert (refused.done, refused.reward, refused.metrics) == (False, 0.0, {"invalid_actions": 1.0})
        assert refused.messages[0]["content"].startswith("That is not one JSON object. Answer with exactly")
        mistaken = episode.step(action('{"place": "x"}'))
        assert (mistaken.done, mistaken.metrics) == (False, {"invalid_actions": 1.0})
        assert "not a valid action" in mistaken.messages[0]["content"]
        won = episode.step(action(f'```json\n{{"place": {{"row": {digit(problem)}, "column": 0}}}}\n```'))
        assert (won.done, won.reward) == (True, 1.0)
        assert episode.result().sample_metrics == {"invalid_actions": 2}
    finally:
        environment.close()


@pytest.fixture(scope="module")
def tools():
    server = Server([*TOY, "16", "tools"], 90, "toy")
    yield server
    server.close()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_an_mcp_environment_is_played_by_calls_of_its_tools(tools):
    environment = OpenEnv(url=tools.url, heldout=2)
    problem = environment.problems("train")[0]
    episode = environment.start(problem, 0)
    observed = episode.observe()
    assert observed.messages == ({"role": "user", "content": "Guess my digit, 2."},)
    functions = {tool["function"]["name"]: tool["function"] for tool in observed.tools}
    assert set(functions) == {"guess", "hint"}
    assert functions["guess"]["description"] == "Guess the digit by a place."
    jsonschema.validate({"place": {"row": 1, "column": 2}}, functions["guess"]["parameters"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"place": {"row": 1}}, functions["guess"]["parameters"])
    wrong = (digit(problem) + 1) % 10
    off = abs(wrong - digit(problem))
    step = episode.step(action(call("hint") + call("guess", place={"row": 0, "column": wrong})))
    assert [message["role"] for message in step.messages] == ["tool", "tool"]
    assert json.loads(step.messages[0]["content"]) == {"even": digit(problem) % 2 == 0}
    assert step.messages[1]["content"] == f"{off} off."
    assert (step.done, step.reward) == (False, -0.1)
    won = episode.step(action(call("guess", place={"row": digit(problem), "column": 0})))
    assert (won.done, won.reward) == (True, 1.0)
    assert episode.result().total_reward == pytest.approx(0.9)
    assert episode.result().sample_metrics == {"invalid_actions": 0}


def test_wrong_calls_of_an_mcp_environment_are_answered_and_a_message_without_a_call_ends_it(tools):
    environment = OpenEnv(url=tools.url)
    episode = environment.start(environment.problems("train")[0], 0)
    step = episode.step(action(call("gues") + call("guess", place=3) + "<tool_call>{</tool_call>"))
    assert not step.done
    assert step.metrics == {"invalid_actions": 3}
    assert all(message["content"].startswith("Error: ") for message in step.messages)
    assert episode.step(action("I give up.")).done
    assert episode.result().total_reward == 0
    silent = environment.start(environment.problems("train")[0], 0)
    assert silent.step(action("I say nothing.")).done
    assert (silent.result().total_reward, silent.result().error) == (0, None)


def test_a_server_that_dies_is_told_and_replaced():
    environment = OpenEnv(command=TOY, start_seconds=90)
    try:
        problem = environment.problems("test")[0]
        episode, bystander = environment.start(problem, 0), environment.start(problem, 0)
        first = environment._server
        with pytest.raises(PluginError, match=r"the connection to http://127\.0\.0\.1:\d+ is lost"):
            episode.step(action("crash"))
        with pytest.raises(PluginError, match="is lost"):
            bystander.step(action("3"))
        first.process.wait(10)
        again = environment.start(problem, 0)
        assert environment._server is not first
        assert again.step(action(str(digit(problem)))).reward == 1
    finally:
        environment.close()


def test_a_slow_answer_and_a_full_server():
    environment = OpenEnv(command=[*TOY, "1"], start_seconds=90, step_seconds=2)
    try:
        problem = environment.problems("train")[0]
        episode = environment.start(problem, 0)
        with pytest.raises(PluginError, match=r"let it take more sessions \(max_concurrent_envs\)"):
            environment.start(problem, 0)
        with pytest.raises(PluginError, match=r"did not answer within 2 s \(step_seconds\)"):
            episode.step(action("sleep"))
    finally:
        environment.close()


def test_a_command_that_fails_or_never_listens():
    broken = [sys.executable, "-c", "raise SystemExit('no such game')"]
    with pytest.raises(PluginError, match="ended with status 1: no such game"):
        Server(broken, 30, "toy")
    with pytest.raises(PluginError, match=r"/health .* did not answer within 1 s"):
        Server([sys.executable, "-c", "import time; time.sleep(60)"], 1, "toy")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a parent's death is Linux's")
def test_a_server_ends_with_whoever_started_it():
    code = (
        "import os, sys; from retrain.environments.providers.openenv_server import Server; "
        "server = Server(sys.argv[1:], 90, 'toy'); print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, *TOY], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    server = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 10
    while server.exists() and "State:\tZ" not in server.joinpath("status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "http://a:1", "command": ["a"]}, "takes either url = "),
        ({"id": "wordle"}, "'wordle' is no address of a server"),
        ({"command": "python x.py"}, "command is 'python x.py': Input should be a valid list"),
        ({"url": "http://a:1", "sise": 3}, "has no argument 'sise'; did you mean 'size'"),
        ({"url": "http://a:1", "exact": "yes"}, "exact is 'yes': Input should be a valid boolean"),
        ({"url": "http://a:1", "reward_range": [1, 0]}, "whose first number is not below its second"),
        ({"url": "http://a:1", "step_seconds": 0}, "step_seconds is 0: Input should be greater than 0"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message):
    with pytest.raises(UsageError, match=message):
        OpenEnv(**arguments)


def test_fields_that_are_not_there(server):
    fields = {
        "message_field": "'board' is not in the observation, which has metadata, text, distance",
        "action_field": "'board' is not in the server's actions, which have guess",
    }
    for name, message in fields.items():
        environment = OpenEnv(url=server.url, **{name: "board"})
        with pytest.raises(UsageError, match=f"{name} {message}"):
            environment.start(environment.problems("train")[0], 0)


@pytest.mark.parametrize(
    ("observation", "field", "contents"),
    [
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, None, ["a", "b"]),
        ({"messages": [], "prompt": "go"}, None, ["go"]),
        ({"messages": [{"sender_id": -1, "content": "x"}, {"sender_id": 0, "content": "y"}]}, None, ["x\ny"]),
        ({"board": [1, 2]}, None, ['{"board": [1, 2]}']),
        ({"board": {"rows": ["a b", "c d"]}}, "board.rows", ["a b\nc d"]),
        ("plain", None, ["plain"]),
    ],
)
def test_observations_as_messages(observation, field, contents):
    assert [message["content"] for message in messages_of(observation, field)] == contents


def test_texts_as_actions():
    one = {"properties": {"metadata": {"type": "object"}, "count": {"type": "integer"}}, "required": ["count"]}
    assert Actions(one, None, {}).read("I take 3, no: -12.") == {"count": -12}
    with pytest.raises(ValueError, match="no number"):
        Actions(one, None, {}).read("none")
    two = {"properties": {"kind": {"type": "string"}, "price": {"type": "number"}}}
    assert Actions(two, None, {"kind": "bid"}).read("2.5") == {"kind": "bid", "price": 2.5}
    assert Actions(two, "kind", {}).read(" bid ") == {"kind": "bid"}
    assert Actions(two, None, {}).read('{"kind": "bid"}') == {"kind": "bid"}
