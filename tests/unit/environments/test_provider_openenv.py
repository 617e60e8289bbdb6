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
from retrain.environments.providers.openenv import OpenEnv, OpenEnvServer
from retrain.environments.providers.openenv_forms import Actions, messages_of

# The servers' own packages warn of each other; nothing of ours may.
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning:(?!retrain)")
TOY = [sys.executable, str(Path(__file__).parents[2] / "programs" / "toy_openenv.py"), "{port}"]


def send(episode, text):
    return episode.step(Action([1], text, np.zeros(1), None, "stop"))


def begun(environment, index=0):
    """An episode of a training problem, and its digit."""
    problem = environment.problems("train")[index]
    return environment.start(problem, 0), random.Random(problem.metadata["seed"]).randrange(10)


@pytest.fixture(scope="module")
def server():
    server = OpenEnvServer(TOY, 90)
    yield server
    server.close()


@pytest.fixture
def own():
    """Makes environments with servers of their own, which end with the test."""
    made = []

    def make(*words, **arguments):
        made.append(OpenEnv(command=[*TOY, *words], start_seconds=90, **arguments))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


def test_a_game_is_played_and_its_rewards_are_added(server):
    environment = OpenEnv(url=server.url, size=3, heldout=2, metrics=["distance"], exact=True, reward_range=[-0.4, 1])
    assert (environment.exact, environment.reward_range) == (True, [-0.4, 1.0])
    train, held = environment.problems("train"), environment.problems("test")
    assert [problem.metadata["seed"] for problem in [*held, *train]] == [0, 1, 2, 3, 4]
    assert len({problem.prompt for problem in [*held, *train]}) == 5
    (one, digit), (other, other_digit) = begun(environment), begun(environment, 1)  # two sessions take turns
    assert one.observe().messages == ({"role": "user", "content": "Guess my digit, 2."},)
    assert other.observe().messages == ({"role": "user", "content": "Guess my digit, 3."},)
    wrong = (digit + 1) % 10
    step = send(one, f" {wrong}\n")
    assert step.messages == [{"role": "user", "content": f"{abs(wrong - digit)} off."}]
    assert (step.done, step.reward, step.metrics) == (False, -0.1, {"distance": abs(wrong - digit)})
    assert send(other, str(other_digit)).done
    last = send(one, str(digit))
    assert (last.done, last.reward) == (True, 1.0)
    assert one.result().total_reward == pytest.approx(0.9)
    assert one.result().sample_metrics == {"invalid_actions": 0, "distance": 0}
    assert other.result().total_reward == 1
    one.close()
    one.close()
    broken, _ = begun(environment)
    with pytest.raises(
        PluginError, match=f"{server.url} answered with an error: .*invalid literal for int.*; args.invalid_on_error"
    ):
        send(broken, "seven")
    assert broken.result().total_reward is None
    assert "gave no reward" in (broken.result().error or "")


@pytest.mark.parametrize(("keys", "expected"), [({}, [True, False]), ({"correct_metric": "distance"}, [False, False])])
def test_a_field_of_the_observation_decides_what_is_correct(server, keys, expected):
    section = {"provider": "openenv", "workers": 1, "args": {"url": server.url, "size": 2, "heldout": 0}, **keys}
    config = parse_dict({"environment": section, "evaluation": {"problems": 0}})
    try:
        environment = environments_of(config, provided_data(config, Path.cwd()), None, Path.cwd())["train"]
        (right, digit), (late, _) = begun(environment), begun(environment)
        send(right, str(digit))
        send(late, str((digit + 1) % 10))
        send(late, str(digit))
        results = environment.results([right, late])
    finally:
        close_hosted()
    assert [result.total_reward for result in results] == [1.0, 0.9]
    assert [result.is_correct for result in results] == expected


def test_actions_of_several_fields_are_json(own):
    """What the prompt shows validates the actions that the server takes, with the definitions that they refer to."""
    episode, digit = begun(own("16", "nested"))
    prompt = episode.observe().messages[-1]["content"]
    assert prompt.startswith("Guess my digit, 200.\n\nAnswer with exactly one JSON object")
    schema = json.loads(prompt[prompt.index("{") :])
    assert "metadata" not in schema["properties"]
    jsonschema.validate({"place": {"row": 1, "column": 2}, "pieces": [{"row": 0, "column": 0}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"place": {"row": 1}}, schema)
    for text, reason in (("row 1", "That is not one JSON object."), ('{"place": "x"}', "That is not a valid action.")):
        refused = send(episode, text)
        assert (refused.done, refused.reward, refused.metrics) == (False, 0.0, {"invalid_actions": 1.0})
        assert refused.messages[0]["content"].startswith(f"{reason} Answer with exactly")
    won = send(episode, f'```json\n{{"place": {{"row": {digit}, "column": 0}}}}\n```')
    assert (won.done, won.reward) == (True, 1.0)
    assert episode.result().sample_metrics == {"invalid_actions": 2}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_an_mcp_environment_is_played_by_calls_of_its_tools(own):
    environment = own("16", "tools", heldout=2)
    episode, digit = begun(environment)
    observed = episode.observe()
    assert observed.messages == ({"role": "user", "content": "Guess my digit, 2."},)
    functions = {tool["function"]["name"]: tool["function"] for tool in observed.tools}
    assert set(functions) == {"guess", "hint"}
    assert functions["guess"]["description"] == "Guess the digit by a place."
    jsonschema.validate({"place": {"row": 1, "column": 2}}, functions["guess"]["parameters"])
    wrong = (digit + 1) % 10
    step = send(episode, call("hint") + call("guess", place={"row": 0, "column": wrong}))
    assert [message["role"] for message in step.messages] == ["tool", "tool"]
    assert json.loads(step.messages[0]["content"]) == {"even": digit % 2 == 0}
    assert step.messages[1]["content"] == f"{abs(wrong - digit)} off."
    assert (step.done, step.reward) == (False, -0.1)
    won = send(episode, call("guess", place={"row": digit, "column": 0}))
    assert (won.done, won.reward) == (True, 1.0)
    assert episode.result().total_reward == pytest.approx(0.9)
    assert episode.result().sample_metrics == {"invalid_actions": 0}
    clumsy, _ = begun(environment)
    step = send(clumsy, call("gues") + call("guess", place=3) + "<tool_call>{</tool_call>")
    assert (step.done, step.metrics) == (False, {"invalid_actions": 3})
    assert all(message["content"].startswith("Error: ") for message in step.messages)
    assert send(clumsy, "I give up.").done
    assert (clumsy.result().total_reward, clumsy.result().error) == (0, None)


def test_a_server_that_dies_is_told_and_replaced(own):
    environment = own()
    (episode, _), (bystander, _) = begun(environment), begun(environment)
    first = episode.server
    with pytest.raises(PluginError, match=r"the connection to http://127\.0\.0\.1:\d+ is lost"):
        send(episode, "crash")
    with pytest.raises(PluginError, match="is lost"):
        send(bystander, "3")
    first.process.wait(10)
    again, digit = begun(environment)
    assert again.server is not first
    assert send(again, str(digit)).reward == 1


def test_an_action_on_which_the_server_raises(server):
    lenient, digit = begun(OpenEnv(url=server.url, invalid_on_error=True))
    step = send(lenient, "seven")
    assert step.messages[0]["content"].startswith("That is not a valid action. Server error: invalid literal for int()")
    assert (step.done, step.reward, step.metrics) == (False, 0.0, {"invalid_actions": 1.0})
    assert send(lenient, str(digit)).reward == 1.0


def test_a_slow_answer_and_full_servers(own):
    environment = own("1", step_seconds=2)
    (first, _), (second, digit) = begun(environment), begun(environment)  # each with a server of its own
    assert first.url != second.url
    with pytest.raises(PluginError, match=r"let it take more sessions \(max_concurrent_envs\)"):
        begun(OpenEnv(url=first.url))
    with pytest.raises(PluginError, match=r"did not answer within 2 s \(step_seconds\)"):
        send(first, "sleep")
    assert send(second, str(digit)).done
    assert begun(environment)[0].url == second.url, "a server whose session has ended is used again"


def test_a_command_that_fails_or_never_listens():
    broken = [sys.executable, "-c", "raise SystemExit('no such game')"]
    with pytest.raises(PluginError, match="ended with status 1: no such game"):
        OpenEnvServer(broken, 30)
    with pytest.raises(PluginError, match=r"/health .* did not answer within 1 s"):
        OpenEnvServer([sys.executable, "-c", "import time; time.sleep(60)"], 1)
    with pytest.raises(PluginError, match="there is no program 'no_such_program'"):
        OpenEnvServer(["no_such_program"], 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a parent's death is Linux's")
def test_a_server_ends_with_whoever_started_it():
    code = (
        "import os, sys; from retrain.environments.providers.openenv import OpenEnvServer; "
        "server = OpenEnvServer(sys.argv[1:], 90); "
        "print(server.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, *TOY], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    server = Path(f"/proc/{int(done.stdout)}")
    deadline = time.monotonic() + 10
    while server.exists() and "State:\tZ" not in server.joinpath("status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"url": "http://a:1", "command": ["a"]}, "takes either url = "),
    ({"command": "python x.py"}, "command is 'python x.py': Input should be a valid list"),
    ({"url": "http://a:1", "sise": 3}, r"has no argument 'sise' \(did you mean 'size'\?\)"),
    ({"url": "http://a:1", "reward_range": [1, 0]}, "whose first number is not below its second"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(arguments, message):
    with pytest.raises(UsageError, match=message):
        OpenEnv(**arguments)


@pytest.mark.parametrize(("observation", "field", "contents"), [
    ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, None, ["a", "b"]),
    ({"messages": [{"sender_id": -1, "content": "x"}, {"sender_id": 0, "content": "y"}]}, None, ["x\ny"]),
    ({"board": [1, 2], "metadata": {}}, None, ['{"board": [1, 2]}']),
    ({"board": {"rows": ["a b", "c d"]}}, "board.rows", ["a b\nc d"]),
    ("plain", None, ["plain"]),
])  # fmt: skip
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
