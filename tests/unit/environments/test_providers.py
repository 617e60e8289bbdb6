import contextlib
import importlib
import random
import sys

import numpy as np
import pytest

from retrain.cli.environments import ABOUT_PROVIDERS
from retrain.config import tasks
from retrain.environments.providers import PROVIDERS
from retrain.environments.providers.randomness import OwnRandomness
from retrain.errors import MissingExtra
from retrain.extras import EXTRA_OF

ARGUMENTS = {"reasoning_gym": {"id": "chain_sum"}, "verifiers": {"id": "any"}, "openenv": {"url": "http://127.0.0.1:9"}}


@pytest.mark.parametrize("name", PROVIDERS)
def test_without_its_package_a_provider_says_what_to_type(name, monkeypatch):
    assert set(tasks.PROVIDERS) == set(PROVIDERS) == set(ABOUT_PROVIDERS)
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
