"""Runs independent tasks of small models in threads.

Operations of a model whose weights fit a core's cache are too short to split over the cores. Such models run one task
(a part of the decode batch, one run's update) per core; larger models keep torch's split of every operation. Tasks
never depend on timing, so results do not either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """Threads that run independent tasks in parallel; inside a worker ``count`` is 1."""

    def __init__(self, count: int = 1, threads_after: int | None = None):
        self._count, self._threads_after = count, threads_after
        self._inside = threading.local()
        self._pool = ThreadPoolExecutor(count, initializer=self._begin) if count > 1 else None

    @property
    def count(self) -> int:
        return 1 if getattr(self._inside, "a_worker", False) else self._count

    def _begin(self) -> None:
        import torch

        self._inside.a_worker = True
        torch.set_num_threads(1)

    def map(self, task: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``[task(item) for item in items]``. Raises the first exception after all tasks have ended."""
        if self._pool is None or self.count == 1:
            return [task(item) for item in items]
        futures = [self._pool.submit(task, item) for item in items]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads and restore torch's number of threads."""
        import torch

        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._threads_after is not None:
            torch.set_num_threads(self._threads_after)


@contextmanager
def thread_values(state: threading.local, **values: object) -> Iterator[None]:
    """Set attributes of a thread's state, and restore them at the end of the block."""
    before = {name: getattr(state, name) for name in values}
    vars(state).update(values)
    try:
        yield
    finally:
        vars(state).update(before)
