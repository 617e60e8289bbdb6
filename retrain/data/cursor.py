"""Which training problems come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.rng import generator
from retrain.types import Problem


class DataCursor:
    """Which problems come next: a fresh permutation for every epoch, a function of the seeds and the position.

    ``position`` counts problems taken so far. A batch may span epochs.
    """

    def __init__(self, problems: Sequence[Problem], stream: tuple[int | str, ...], shuffle: bool = True):
        self.problems, self.stream, self.shuffle = problems, stream, shuffle
        self.position = 0
        self._epoch, self._order = -1, np.arange(0)

    def ahead(self, start: int, count: int) -> list[Problem]:
        """``count`` problems, the first of them ``start`` problems after the next one."""
        return [self._at(self.position + start + i) for i in range(count)]

    def _at(self, position: int) -> Problem:
        epoch, place = divmod(position, len(self.problems))
        if not self.shuffle:
            return self.problems[place]
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = generator(*self.stream, "data", epoch).permutation(len(self.problems))
        return self.problems[int(self._order[place])]
