"""Libraries that draw from Python's and numpy's global generators, held apart from each other.

Episodes take turns in one process; a game that calls ``random.seed`` and ``random.choice`` would draw what another
game left behind, and its answers would depend on who else is playing.
"""

from __future__ import annotations

import random
import sys
import zlib
from typing import Any


class OwnRandomness:
    """The global generators as one owner sees them: ``with own: …`` swaps its state in, and keeps it afterwards.

    All of it comes from ``seed``; what the rest of the process draws is not disturbed. Not reentrant.
    """

    def __init__(self, seed: str):
        self.seed = seed
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = None
        self._outside: tuple[Any, Any] = (None, None)

    def __enter__(self) -> OwnRandomness:
        numpy = sys.modules.get("numpy.random")
        self._outside = random.getstate(), numpy.get_state() if numpy else None
        random.setstate(self._python)
        if numpy is not None and self._numpy is None:
            numpy.seed(zlib.crc32(self.seed.encode()))
        elif numpy is not None:
            numpy.set_state(self._numpy)
        return self

    def __exit__(self, *exc_info: object) -> None:
        numpy, (python_before, numpy_before) = sys.modules.get("numpy.random"), self._outside
        self._python, self._numpy = random.getstate(), numpy.get_state() if numpy else None
        random.setstate(python_before)
        if numpy is not None and numpy_before is not None:
            numpy.set_state(numpy_before)
