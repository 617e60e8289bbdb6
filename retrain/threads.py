"""Threads for tasks: in parallel (``Workers``), or in order in the background (``Thread``).

Operations of a model whose weights fit a core's cache are too short to split over the cores. Such models run one task
(a part of the decode batch, one run's update) per core; larger models keep torch's split of every operation. Tasks
never depend on timing, so results do not either.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[], object]


class Workers:
    """Threads that run independent tasks in parallel. Inside a task ``count`` is 1, so nested calls of ``map`` run in
    order. ``threads_after``: torch's number of threads after ``close``."""

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
        """Return ``[task(item) for item in items]``. Raises the exception of the first failing item, while tasks of
        later items may still run."""
        if self._pool is None or self.count == 1:
            return [task(item) for item in items]
        futures = [self._pool.submit(task, item) for item in items]
        return [future.result() for future in futures]

    def close(self) -> None:
        import torch

        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._threads_after is not None:
            torch.set_num_threads(self._threads_after)


@contextmanager
def thread_values(state: threading.local, **values: object) -> Iterator[None]:
    before = {name: getattr(state, name) for name in values}
    vars(state).update(values)
    try:
        yield
    finally:
        vars(state).update(before)


class Thread:
    """Runs tasks in order on one thread, which starts with the first task.

    At most ``limit`` tasks wait. The first exception is stored as ``error``; after it, only tasks put with ``always``
    run.
    """

    def __init__(self, name: str, limit: int):
        self.name = name
        self.error: Exception | None = None
        self._queue: queue.Queue[tuple[Work, bool] | None] = queue.Queue(limit)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, task: Work, always: bool = False, wait: bool = True) -> bool:
        """Queue the task. If the queue is full, wait, or without ``wait`` return False and drop the task."""
        self._start()
        try:
            self._queue.put((task, always), block=wait)
        except queue.Full:
            return False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds until all queued tasks have run; return whether they have."""
        if self._thread is None or self._thread is threading.current_thread():
            return True
        done = threading.Event()
        try:
            self._queue.put((done.set, True), timeout=timeout)
        except queue.Full:
            return False
        return done.wait(timeout)

    def close(self, last: Work = lambda: None) -> None:
        """Run all queued tasks, then ``last``, and end the thread if it was started; a later ``put`` starts another."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put((last, False))
            self._queue.put(None)
            thread.join()

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None:
                # Daemonic: a tracker that hangs must not keep the process alive. Callers that need the tasks done wait.
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            task, always = item
            if self.error is not None and not always:
                continue
            try:
                task()
            except Exception as error:  # reported by the owner of the thread
                self.error = self.error or error
