"""How the cores of a CPU are used: many small pieces side by side, or every operation split.

A model whose weights fit a core's cache spends its time in operations so short that splitting each over the cores
costs more than it gains, and stalls whenever another program takes a core for a moment. Such models run one
independent piece (a part of the decode batch, one run's update) per core instead. Larger models, bound by reading
their weights, keep torch's own split. Which pieces there are never depends on timing, so results do not either.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from retrain.policy.base import BaseModel

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Does independent pieces of work side by side; with ``count`` 1 simply one after the other.

    A piece that is itself done by one of the workers has no others to share its own pieces with.
    """

    def __init__(self, count: int = 1, threads_after: int | None = None):
        self._count, self._threads_after = count, threads_after
        self._inside = threading.local()
        self._pool = ThreadPoolExecutor(count, initializer=self._begin) if count > 1 else None

    @property
    def count(self) -> int:
        return 1 if getattr(self._inside, "a_worker", False) else self._count

    def _begin(self) -> None:
        self._inside.a_worker = True
        torch.set_num_threads(1)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """``[work(item) for item in items]``; the first exception is raised after all pieces have ended."""
        if self._pool is None or self.count == 1:
            return [work(item) for item in items]
        futures = [self._pool.submit(work, item) for item in items]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; torch has as many again as before, so that the next cohort is split as this one was."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._threads_after is not None:
            torch.set_num_threads(self._threads_after)


def workers_for(base: BaseModel) -> Workers:
    """One worker per core for a small model (torch itself then uses one thread), else one worker, and where several
    ranks hold the weights, which they gather for one piece of work each."""
    cores = torch.get_num_threads()
    if not base.small or cores == 1 or base.presence.shared:
        return Workers(1)
    torch.set_num_threads(1)
    return Workers(cores, threads_after=cores)
