import contextlib
import importlib
import json
import random
import sys

import numpy as np
import pytest
from helpers.campaigns import run_cli

from retrain.config import tasks
from retrain.environments.installed import ABOUT, arguments_of, capabilities, gym_names
from retrain.environments.providers import PROVIDERS
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import MissingExtra, UsageError
from retrain.extras import EXTRA_OF

ARGUMENTS = {"reasoning_gym": {"id": "chain_sum"}, "verifiers": {"id": "any"}, "openenv": {"url": "http://127.0.0.1:9"}}


@pytest.mark.parametrize("name", PROVIDERS)
def test_without_its_package_a_provider_says_what_to_type(name, monkeypatch):
    assert set(tasks.PROVIDERS) == set(PROVIDERS) == set(ABOUT)
    module, _, wanted = PROVIDERS[name].partition(":")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf"needs the package .*: pip install '\.\[{EXTRA_OF[name]}\]'"):
        getattr(importlib.import_module(module), wanted)(**ARGUMENTS[name])


def test_global_generators_are_held_apart():
    def drawn(own):
        with own:
            return random.random(), np.random.random()

    alone = OwnRandomness("a")
    expected = [drawn(alone) for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    outside = [random.Random(1).random(), np.random.RandomState(1).random_sample()]
    one, other = OwnRandomness("a"), OwnRandomness("b")
    together = []
    for _ in range(3):
        together.append(drawn(one))
        assert drawn(other) not in expected
        with contextlib.suppress(KeyError), other:
            random.seed(5)
            raise KeyError
    assert together == expected
    assert [random.random(), np.random.random()] == outside


CLASSIC = "def load_environment(size: int = 3, *, kind: str): ..."
METADATA = "Name: toy-hub\nVersion: 1.0\nSummary: a toy\nRequires-Dist: verifiers>=0.2"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An installed environment of verifiers, and a library that nothing may import while it is listed."""
    for name, text in {"verifiers": "raise ImportError('imported')", "toy_hub": CLASSIC}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "toy_hub-1.0.dist-info").mkdir()
    (tmp_path / "toy_hub-1.0.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_what_is_installed_is_listed_without_an_import(hub):
    listed = {(each.kind, each.name): each for each in capabilities()}
    assert {kind for kind, _ in listed} == {"provider", "environment", "tool", "reward", "sandbox"}
    assert listed["environment", "toy-hub"][2:] == ("ready", "a toy")
    assert listed["provider", "verifiers"].state == "ready"
    assert listed["tool", "calculator"].state == "ready"
    assert "toy_hub" not in sys.modules


def test_the_command_lists_and_describes(hub):
    assert 'environment name="toy-hub" state="ready" about="a toy"' in run_cli("environments").stdout.splitlines()
    described = json.loads(run_cli("environments", "toy-hub", "--json").stdout)
    assert described[0] == {"name": "size", "type": "int", "default": "3"}
    unknown = run_cli("environments", "toy-hup")
    assert unknown.exit_code == 2
    assert "there is no environment, tool or data set 'toy-hup' here (did you mean 'toy-hub'?)" in unknown.output


def test_arguments_are_described(hub):
    assert [tuple(each) for each in arguments_of("toy-hub")[:3]] == [
        ("size", "int", "3"),
        ("kind", "str", "required"),
        ("train", "int | None", "None"),
    ]
    assert ("k", "int", "3") in arguments_of("search")
    assert arguments_of("calculator") == []
    assert ("command", "Optional[list[str]]", "None") in arguments_of("openenv")
    with pytest.raises(UsageError, match=r"'calculater' here \(did you mean 'calculator'\?\)"):
        arguments_of("calculater")


def test_the_names_of_data_sets_are_those_that_the_library_registers():
    gym = pytest.importorskip("reasoning_gym.factory")
    assert gym_names() == sorted({*gym.DATASETS} - {"composite"})
    assert {("min_animals", "int", "3"), ("size", "int", "1000")} <= {*arguments_of("leg_counting")}
