"""Ends failed runs of a cohort, saves the others at common steps, and resumes runs from checkpoints.

A step waits only until its state is copied to host memory; a thread writes the copies in order. The last bits of
sampled log-probabilities depend on the other runs in the batch. The runs of a cohort are therefore saved at a common
step, from which all of them can resume.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from retrain.device import lost
from retrain.engines.protocol import Engine
from retrain.errors import DeviceLost, RunFailed, ServerFailed, UsageError
from retrain.ranks import RankGroup
from retrain.records.observer import Observer
from retrain.records.schema.layout import STATE
from retrain.rollouts.queue import RolloutQueue
from retrain.training.checkpoints import Snapshot, checkpoint_directory, newest_undamaged
from retrain.training.run import Run
from retrain.training.state import RollbackPoint, SharedState


@dataclass
class Failures:
    engine: Engine
    queue: RolloutQueue[Run]
    observer: Observer
    ranks: RankGroup | None = None

    @contextmanager
    def isolated(self, run: Run, quiet: bool = False) -> Iterator[None]:
        """Catch an exception of the block, and end only this run with it (``end``)."""
        try:
            yield
        except Exception as error:  # a failed run must not end the others
            self.end(run, error, quiet)

    def end(self, run: Run, error: Exception, quiet: bool = False) -> None:
        """End a run, with the traceback in its log. ``quiet``: the caller reports the failure to the observer. An error
        that stops all runs (``RunFailed.shared``) is raised instead."""
        error = lost(error) or error
        if isinstance(error, RunFailed) and error.shared:
            raise error
        self.queue.withdraw(run)
        run.requests.recent.withdraw_from(self.engine)
        before = run.error  # a run that has failed is saved too, and may fail again: it is reported once
        run.fail(error)
        if run.error is not None and before is None and not quiet:
            self.observer.run_finished(run.spec, "failed", run.error)

    def share(self, runs: Sequence[Run], stop: Callable[[], bool] = lambda: False) -> bool:
        """End the runs that have failed on another rank (as with a full disk on rank 0); return what ``stop`` returns
        on rank 0."""
        if (ranks := self.ranks) is None:
            return stop()
        errors = {run.run_id: run.error for run in runs if run.error is not None}
        all_errors = ranks.gather("failures", lambda: errors)
        for run in runs:
            found = next((errors[run.run_id] for errors in all_errors if run.run_id in errors), None)
            if found is not None and run.error is None:
                self.end(run, RunFailed(found))
        return ranks.from_first("stopping", stop)


@dataclass
class Saver:
    """Saves the runs of a cohort. ``shared`` returns the state common to all runs, which every checkpoint contains."""

    failures: Failures
    shared: Callable[[], SharedState]
    _pool: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="save"))
    _pending: list[tuple[Run, Future[None]]] = field(default_factory=list)

    @contextmanager
    def closed_after(self) -> Iterator[None]:
        """Close after the block; drop queued saves on KeyboardInterrupt, GeneratorExit or a lost GPU context."""
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit, DeviceLost):
            self.close(abandon=True)
            raise
        finally:
            self.close()

    def save_if_due(self, runs: Sequence[Run], points: Mapping[Run, RollbackPoint]) -> list[Run]:
        """Save all runs if a run is due for saving, done, or has just failed; return the done runs, after their saves.

        A run that failed is saved as it was at its rollback point, if its weights have not changed since.
        """
        alive = [run for run in runs if run.error is None]
        failed = [run for run in runs if run.error is not None]
        done = [run for run in alive if run.finished]
        after_failure = failed and any(run.config.training.save_every for run in runs)
        if done or after_failure or any(map(_is_due, alive)):
            self.save([*alive, *_rolled_back(failed, points)])
        if done:
            self.settle()
        return [run for run in done if run.error is None]

    def save(self, runs: Sequence[Run]) -> None:
        """Wait for earlier saves, copy the state of these runs, and queue the copies for writing.

        All checkpoints are written before the first is published, because publishing deletes older checkpoints. If a
        write fails, none is published.
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
        """Queue ``action`` for the saving thread, which keeps the order; an exception of the action ends the run."""
        self._pending.append((run, self._pool.submit(action)))

    def settle(self) -> None:
        """Wait for all queued actions; end each run whose action raised an exception."""
        while self._pending:
            run, future = self._pending.pop(0)
            with self.failures.isolated(run):
                future.result()

    def close(self, abandon: bool = False) -> None:
        """End the thread after all saves, or with ``abandon`` after the current one."""
        self._pool.shutdown(cancel_futures=abandon)

    @contextmanager
    def undo_on_server_failure(self, points: Mapping[Run, RollbackPoint]) -> Iterator[None]:
        """If sampling servers fail in the block, save the runs as they were at their rollback points and raise
        ServerFailed again, so that all earlier steps are kept."""
        try:
            yield
        except ServerFailed:
            self.save(_rolled_back([run for run in points if run.error is None], points))
            self.settle()
            raise


def _is_due(run: Run) -> bool:
    every = run.config.training.save_every
    return every > 0 and run.step % every == 0


def _rolled_back(runs: Iterable[Run], points: Mapping[Run, RollbackPoint]) -> list[Run]:
    return [run for run in runs if run.roll_back(points[run])]


def resume(run: Run, step: int, skipped: Sequence[str] = ()) -> list[str]:
    """Continue from the run's own checkpoint of ``step`` (0 is the start); remove rows and checkpoints of later steps.

    ``skipped``: lines about unusable later checkpoints. Returns these and further lines for the user. Raises
    CheckpointError when the checkpoint belongs to another base.
    """
    lines, checkpoints = list(skipped), run.checkpoints
    if step:
        run.restore(checkpoint_directory(run.recorder.directory, step))
        checkpoints.restored_step = run.step
        lines.append(f"continues at step {run.step}")
    elif checkpoints.any_written:
        lines.append("no checkpoint to continue from: the run starts again from step 0")
    checkpoints.discard_after(run.step)
    if step:
        checkpoints.record_restored(run.step, run.requests.cursor.position)
    return lines


def continue_from(run: Run, directory: Path) -> list[str]:
    """Begin with the state in a run or checkpoint directory (``[resume] from``), or with the weights of an adapter
    directory. Returns lines for the user.

    Raises UsageError when no steps are left to train or the adapter has another scale.
    """
    lines: list[str] = []
    checkpoint = directory if (directory / STATE).is_file() else newest_undamaged(directory, lines)
    if checkpoint is None:
        run.policy.begin_with(directory)
        return [*lines, f"starts at step 0 with the weights of {directory}"]
    run.restore(checkpoint)
    run.recorder.begin_own_records()
    if run.finished:
        raise UsageError(
            f"{checkpoint} is at step {run.step} of max_steps = {run.config.training.max_steps}: "
            f"set [training] max_steps above {run.step}"
        )
    return [*lines, f"continues {checkpoint} at step {run.step}"]
