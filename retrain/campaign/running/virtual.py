"""An executor on which nothing is computed: its clock moves on from one end of a job to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from dataclasses import dataclass

from retrain.campaign.running.protocol import Event, Job, JobEnded


@dataclass(frozen=True)
class Span:
    """What one of the ``slots`` did from ``begin`` to ``end``, in seconds since the first submission."""

    slot: int
    begin: float
    end: float
    job: Job


@dataclass(frozen=True)
class VirtualHandle:
    """See ``Handle``."""

    id: str

    def stop(self) -> None:
        """See ``Handle.stop``: nobody asks a plan to end early."""
        raise AssertionError("a job of a virtual executor goes on to its end")


class VirtualExecutor:
    """See ``Executor``: a job takes ``seconds(job, now)``, and its only event is its end. ``spans`` has all jobs, in
    the order in which they began; ``now`` is the time by this clock."""

    def __init__(self, slots: int, seconds: Callable[[Job, float], float]):
        self.slots, self.seconds = slots, seconds
        self.now = 0.0
        self.spans: list[Span] = []
        self._free = list(range(slots))
        self._ends: list[tuple[float, int]] = []

    def has_gpu(self) -> bool:
        """See ``Executor.has_gpu``."""
        return True

    def submit(self, job: Job) -> VirtualHandle:
        """See ``Executor.submit``: it takes the free slot with the lowest number."""
        number = len(self.spans)
        end = self.now + self.seconds(job, self.now)
        self.spans.append(Span(heapq.heappop(self._free), self.now, end, job))
        heapq.heappush(self._ends, (end, number))
        return VirtualHandle(str(number))

    def events(self) -> Generator[Event, None, None]:
        """See ``Executor.events``."""
        while self._ends:
            self.now, number = heapq.heappop(self._ends)
            heapq.heappush(self._free, self.spans[number].slot)
            yield JobEnded(str(number))

    def close(self) -> None:
        """See ``Executor.close``."""
