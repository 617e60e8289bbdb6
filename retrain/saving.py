"""Checkpoints of a cohort: when they are due, and written while training goes on, all of them before any is published.

Saving copies the state to host memory, which is all that a step waits for; a thread writes the copies in order. The
last bits of what is sampled depend on the composition of the batch, so the runs of a cohort are saved at a common step,
from which all of them can resume.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from retrain.checkpoints import Snapshot
from retrain.run import RollbackPoint, Run

Guard = Callable[[Run, Callable[[], object]], None]  # Does one run's part; what it raises ends that run only


class Saver:
    """Saves a cohort. ``shared`` gives the state that its runs have in common, for every checkpoint."""

    def __init__(self, guard: Guard, shared: Callable[[], dict[str, Any]]):
        self.guard, self.shared = guard, shared
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._waiting: list[tuple[Run, Future[None]]] = []

    def save_if_due(self, runs: Sequence[Run], before: Mapping[Run, RollbackPoint] | None = None) -> list[Run]:
        """Save at this step when a run is due, ends, or has just failed; the runs that are done, with all saved.

        A run that failed is saved as it was ``before`` that step, if its weights still are.
        """
        alive = [run for run in runs if run.error is None]
        done = [run for run in alive if run.finished]
        left = len(alive) < len(runs) and any(run.config.training.save_every for run in runs)
        if done or left or any(run.save_due() for run in alive):
            failed = [run for run in runs if run.error is not None and before and run.roll_back(before[run])]
            self.save([*alive, *failed])
        if done:
            self.settle()
        return [run for run in done if run.error is None]

    def save(self, runs: Sequence[Run]) -> None:
        """Copy the state of these runs and queue the copies for writing, once the saves before are complete.

        All are written before the first is published, and so before anything older is deleted.
        """
        self.settle()
        saved: list[tuple[Run, Snapshot]] = []
        written: set[Run] = set()
        for run in runs:
            with run.span("checkpoint"):
                self.guard(run, lambda run=run: saved.append((run, run.snapshot(self.shared()))))

        def write(run: Run, state: Snapshot) -> None:
            run.write(state)
            written.add(run)

        def publish(run: Run, state: Snapshot) -> None:
            if len(written) == len(saved):
                run.publish(state, final=state.step >= run.config.training.max_steps)

        for work in (write, publish):
            for run, state in saved:
                self.submit(run, partial(work, run, state))

    def submit(self, run: Run, work: Callable[[], None]) -> None:
        """Do ``work`` in the background, after all that was submitted before; what it raises ends the run."""
        self._waiting.append((run, self._pool.submit(work)))

    def settle(self) -> None:
        """Wait for what was submitted; what it raised ends its run."""
        while self._waiting:
            run, future = self._waiting.pop(0)
            self.guard(run, future.result)

    def close(self, abandon: bool = False) -> None:
        """End the thread after all saves, or with ``abandon`` after the current one."""
        self._pool.shutdown(cancel_futures=abandon)
