"""Isolation of failures: a run that fails leaves its cohort, and the others continue."""

from collections.abc import Iterator
from contextlib import contextmanager

from retrain.device import lost
from retrain.engines.protocol import Engine
from retrain.errors import RunFailed
from retrain.records.observer import Observer
from retrain.rollouts.queue import RolloutQueue
from retrain.training.run import Run


class Failures:
    """Ends the runs of a cohort that fail."""

    def __init__(self, engine: Engine, queue: RolloutQueue[Run], observer: Observer):
        self.engine, self.queue, self.observer = engine, queue, observer

    @contextmanager
    def isolated(self, run: Run, quiet: bool = False) -> Iterator[None]:
        """End only this run with what its part of a step raises (``end``)."""
        try:
            yield
        except Exception as error:  # a failed run must not end the others
            self.end(run, error, quiet)

    def end(self, run: Run, error: Exception, quiet: bool = False) -> None:
        """End a run, with the traceback in its log. ``quiet``: the caller reports it to the observer. Raises an error
        that stops all runs alike (``RunFailed.shared``)."""
        error = lost(error) or error
        if isinstance(error, RunFailed) and error.shared:
            raise error
        self.queue.withdraw(run)
        run.requests.recent.withdraw_from(self.engine)
        before = run.error  # a run that failed earlier in the step is saved too
        run.fail(error)
        if run.error is not None and before is None and not quiet:
            self.observer.run_finished(run.spec, "failed", run.error)
