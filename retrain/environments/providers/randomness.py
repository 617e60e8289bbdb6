"""Isolate libraries that draw from Python's and numpy's global random generators.

Episodes take turns in one process; without isolation, the random numbers of a game would depend on the process's other
games.
"""

from __future__ import annotations

import random
import zlib

import numpy.random


class OwnRandomness:
    """A separate state of Python's and numpy's global generators, seeded with ``seed``. A ``with`` block uses it; at
    the end of the block it is saved and the previous state is restored. Not reentrant."""

    def __init__(self, seed: str):
        self._python = random.Random(seed).getstate()
        self._numpy = numpy.random.RandomState(zlib.crc32(seed.encode())).get_state()

    def __enter__(self) -> OwnRandomness:
        self._exchange()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exchange()

    def _exchange(self) -> None:
        python, self._python = self._python, random.getstate()
        outside, self._numpy = self._numpy, numpy.random.get_state()
        random.setstate(python)
        numpy.random.set_state(outside)
