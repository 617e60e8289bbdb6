"""Checkpoints of a cohort: when they are due, and written while training goes on, all of them before any is published.

Saving copies the state to host memory, which is all that a step waits for; a thread writes the copies in order. The
last bits of what is sampled depend on the composition of the batch, so the runs of a cohort are saved at a common step,
from which all of them can resume.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from retrain.errors import DeviceLost, ServerFailed
from retrain.training.checkpoint_files import Snapshot
from retrain.training.failures import Failures
from retrain.training.run import Run
from retrain.training.state import RollbackPoint


class Saver:
    """Saves a cohort. ``shared`` returns the state that its runs have in common, for every checkpoint."""

    def __init__(self, failures: Failures, shared: Callable[[], Mapping[str, object]]):
        self.failures, self.shared = failures, shared
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._pending: list[tuple[Run, Future[None]]] = []

    def save_if_due(self, runs: Sequence[Run], points: Mapping[Run, RollbackPoint]) -> list[Run]:
        """Save at this step when a run is due, ends, or has just failed; return the runs that are done, with all saved.

        A run that failed is saved as it was at its rollback point, if its weights have not changed since.
        """
        alive = [run for run in runs if run.error is None]
        failed = [run for run in runs if run.error is not None]
        done = [run for run in alive if run.finished]
        after_failure = failed and any(run.config.training.save_every for run in runs)
        if done or after_failure or any(run.checkpoints.is_due(run.step) for run in alive):
            self.save([*alive, *(run for run in failed if run.roll_back(points[run]))])
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
            with run.timer("checkpoint"), self.failures.isolated(run):
                saved.append((run, run.snapshot(self.shared())))

        def write(run: Run, snapshot: Snapshot) -> None:
            run.checkpoints.write(snapshot)
            written.add(run)

        def publish(run: Run, snapshot: Snapshot) -> None:
            if len(written) == len(saved):
                run.checkpoints.publish(snapshot, final=snapshot.step >= run.config.training.max_steps)

        for action in (write, publish):
            for run, snapshot in saved:
                self.submit(run, partial(action, run, snapshot))

    def submit(self, run: Run, action: Callable[[], None]) -> None:
        """Call ``action`` in the background, after all that was submitted before; what it raises ends the run."""
        self._pending.append((run, self._pool.submit(action)))

    def settle(self) -> None:
        """Wait for what was submitted; what it raised ends its run."""
        while self._pending:
            run, future = self._pending.pop(0)
            with self.failures.isolated(run):
                future.result()

    def close(self, abandon: bool = False) -> None:
        """End the thread after all saves, or with ``abandon`` after the current one."""
        self._pool.shutdown(cancel_futures=abandon)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close after the block; abandon saves when the process is to end at once or the GPU's context is lost."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit, DeviceLost):
            self.close(abandon=True)
            raise
        finally:
            self.close()

    @contextmanager
    def undo_on_server_failure(self, points: Mapping[Run, RollbackPoint]) -> Iterator[None]:
        """Save the runs as they were at their rollback points when the servers that sample fail in the block: nothing
        was learnt from this step, and all before it is kept."""
        try:
            yield
        except ServerFailed:
            self.save([run for run in points if run.error is None and run.roll_back(points[run])])
            self.settle()
            raise
