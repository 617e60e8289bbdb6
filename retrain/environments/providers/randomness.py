"""Isolate libraries that draw from Python's and numpy's global random generators.

Episodes take turns in one process; without isolation, the random numbers of a game would depend on the process's other
games.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy.random


class OwnRandomness:
    """A state of Python's and numpy's global generators, seeded with ``seed``. ``with`` installs it; the exit stores
    its progress and restores the previous state. Not reentrant."""

    def __init__(self, seed: str):
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = numpy.random.RandomState(zlib.crc32(seed.encode())).get_state()
        self._outside: tuple[Any, Any] = (None, None)

    def __enter__(self) -> OwnRandomness:
        self._outside = random.getstate(), numpy.random.get_state()
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        random.setstate(self._outside[0])
        numpy.random.set_state(self._outside[1])
