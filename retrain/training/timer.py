"""Wall-clock times of a run's steps."""

from collections.abc import Iterator
from contextlib import contextmanager

from retrain.device import timestamp

Span = tuple[str, float, float]
"""Name, begin and end of a part of a step, in seconds since the epoch."""


class StepTimer:
    """Measures the parts of a run's steps: ``with timer("update"): …``.

    A checkpoint and the record itself come after a step's row is made, so their times stand in the next row.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._last_end: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = timestamp()
        try:
            yield
        finally:
            self.add(name, begin, timestamp())

    def add(self, name: str, begin: float, end: float) -> None:
        self._spans.append((name, begin, end))

    def start(self, now: float) -> None:
        """Begin the first step of this process."""
        self._last_end = now

    def finish_step(self, now: float) -> tuple[list[Span], float]:
        """Return the spans since the last finished step, and when the step began; the next one begins ``now``."""
        spans, begin = self._spans, self._last_end or now
        self._spans, self._last_end = [], now
        return spans, begin
