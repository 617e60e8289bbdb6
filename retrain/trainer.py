"""The loop: sample → credit → update → record → save, for a cohort of runs over one frozen base.

The runs of a cohort take each step together: one decode batch holds the prompts of all of them, each row with its
own run's adapter. Everything else belongs to one run alone; a run that fails leaves the cohort, the others go on.
A cohort of one is the single run.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from retrain.clock import timestamp
from retrain.engines.protocol import Engine
from retrain.errors import DeviceLost, Interrupted, RunFailed, ServerFailed
from retrain.evaluation import Evaluator
from retrain.evaluations import Evaluations
from retrain.gpus import lost
from retrain.policy.memory import peak_memory_gib
from retrain.policy.threads import Workers
from retrain.pressure import Pressure
from retrain.record.observer import Observer
from retrain.rollouts.queue import RolloutQueue, Taken
from retrain.run import RollbackPoint, Run
from retrain.saving import Saver
from retrain.types import Group


class Cohort:
    """Runs that share an engine and step together.

    ``evaluator`` has the held-out sets, which all runs share; ``stop`` is asked between steps whether to stop;
    ``workers`` credit and update several runs at once; ``pressure`` controls the shared decode batch.
    """

    def __init__(
        self,
        engine: Engine,
        runs: Sequence[Run],
        evaluator: Evaluator,
        observer: Observer,
        stop: Callable[[], bool] = lambda: False,
        workers: Workers | None = None,
        pressure: Pressure | None = None,
    ):
        self.engine, self.runs, self.observer = engine, list(runs), observer
        self.stop, self.workers, self.pressure = stop, workers or Workers(), pressure
        ahead = engine.beside and any(run.recent.bound for run in runs)
        self.queue: RolloutQueue[Run] = RolloutQueue(engine, pressure, ahead)
        self.saver = Saver(self.guarded, lambda: {"pressure": pressure and pressure.state(), "engine": engine.state()})
        self.evaluations = Evaluations(evaluator, observer, self.saver, self.guarded, self.fail)

    def train(self) -> Generator[None, None, None]:
        """Step until every run has finished or failed, with a pause for the caller between steps and evaluations.

        Raises Interrupted, with everything saved, when asked to stop. Closed in a pause, or when the GPU's context is
        lost, it ends as on KeyboardInterrupt: without saving.
        """
        for run in self.runs:
            run.begin(timestamp())
        try:
            yield from self._start()
            while active := [run for run in self.runs if run.active]:
                if self.stop():
                    self.saver.save(active)
                    self.saver.settle()
                    raise Interrupted("stopped after a finished step; everything is saved")
                self.step(active)
                yield
            self.saver.settle()
        except (KeyboardInterrupt, GeneratorExit, DeviceLost):
            self.saver.close(abandon=True)
            raise
        finally:
            self.queue.close()
            self.saver.close()

    def step(self, active: Sequence[Run]) -> None:
        before: dict[Run, RollbackPoint] = {}
        for run in active:
            self.guarded(run, partial(self._begin_step, run))
            before[run] = run.rollback_point()
        try:
            groups, taken = self._sample([run for run in active if run.error is None])
            since = timestamp()
            numbers = self._learn([run for run in active if run.error is None], groups)
        except ServerFailed:  # nothing was learnt from it: everything before this step is saved
            self.saver.save([run for run in active if run.error is None and run.roll_back(before[run])])
            self.saver.settle()
            raise
        for run in numbers:
            run.publish_to(self.engine)
        if due := [run for run in numbers if run.error is None and run.evaluation_due()]:
            with self.queue.paused():
                self.evaluations.trained(due)
        shared = {"cohort_size": len(active), **self._shared(taken)}
        ahead = {"queue_depth": taken.depth, "time/overlap": self.queue.overlap(since, timestamp())}
        for run, (update, state) in numbers.items():
            if run.error is None:
                own = state | shared | (ahead if run.recent.bound else {})
                self.guarded(run, partial(self._record, run, groups[run], update, own))
        self._save_due(active, before)

    # -- the parts of a step, in order --------------------------------------------------------------------------

    def _begin_step(self, run: Run) -> None:
        """What is due before the step; where that changes the weights, the engine samples with the new ones."""
        ref = run.policy_ref
        run.begin_step()
        if run.policy_ref != ref:
            run.publish_to(self.engine)

    def _sample(self, runs: Sequence[Run]) -> tuple[dict[Run, list[Group]], Taken[Run]]:
        """Graded groups of every run, and how they were come by; a run whose prompts or graders fail leaves."""
        for run in runs:
            self.guarded(
                run, lambda run=run: self.queue.offer(run, run.rollout_requests(self.queue.ahead), run.further)
            )
        taken = self.queue.take({run: run.step for run in runs if run.error is None})
        graded = {}
        for run, own in taken.groups.items():
            for span in taken.spans:
                run.note_span(*span)
            if error := next((group for group in own if isinstance(group, Exception)), None):
                self.fail(run, error)
            graded[run] = run.take([group for group in own if isinstance(group, Group)])
        return graded, taken

    def _learn(
        self, runs: Sequence[Run], groups: dict[Run, list[Group]]
    ) -> dict[Run, tuple[dict[str, Any], dict[str, Any]]]:
        """Credit and update of every run, several at once where that is faster (a run left over has the workers for
        its micro-batches); what one raises ends that run alone. Returns the numbers of update and algorithm."""
        begin, numbers, ends = timestamp(), {}, {}

        def learn(run: Run) -> None:
            start = timestamp()
            run.note_span("cohort", begin, start)
            try:
                with run.span("credit"):
                    credit = run.credit(groups[run])
                with run.span("update"):
                    numbers[run] = run.update(groups[run], credit), dict(credit.metrics)
            finally:
                ends[run] = timestamp()

        together = len(runs) - (len(runs) % self.workers.count == 1)
        self.workers.map(lambda run: self.guarded(run, partial(learn, run), quietly=True), runs[:together])
        for run in runs[together:]:
            self.guarded(run, partial(learn, run), quietly=True)
        end = timestamp()
        for run in runs:
            run.note_span("cohort", ends[run], end)
            if run.error is not None:
                self.observer.run_finished(run.spec, "failed", run.error)
        return {run: numbers[run] for run in runs if run in numbers}

    def _shared(self, taken: Taken[Run]) -> dict[str, Any]:
        numbers: dict[str, Any] = dict(self.pressure.metrics()) if self.pressure else {}
        sync = {"timing_weight_sync_inference_total": taken.sync_seconds}
        return {"perf/peak_memory_gib": peak_memory_gib(), **sync, **numbers}

    def _record(self, run: Run, groups: Sequence[Group], update: dict[str, Any], state: dict[str, Any]) -> None:
        now = timestamp()
        with run.span("record"):
            row = run.record_step(groups, update, state, now)
        self.observer.step(run.spec, row)

    def _save_due(self, runs: Sequence[Run], before: dict[Run, RollbackPoint] | None = None) -> None:
        for run in self.saver.save_if_due(runs, before):
            run.withdraw_from(self.engine)
            self.observer.run_finished(run.spec, "done")

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _start(self) -> Iterator[None]:
        """Announce the runs and score the untrained ones."""
        waiting = []
        for run in self.runs:
            if run.error is not None:
                continue
            self.observer.run_started(run.spec, run.step, run.config.training.max_steps)
            run.publish_to(self.engine)
            for row in run.first_evaluations():
                self.observer.evaluated(run.spec, row["name"], row)
            if run.finished:  # killed between its last checkpoint and being recorded as done
                self._save_due([run])
            if run.step == 0 and run.config.evaluation.at_start:
                waiting.append(run)
        yield
        yield from self.evaluations.untrained(waiting)

    # -- one run's fault ----------------------------------------------------------------------------------------

    def guarded(self, run: Run, work: Callable[[], object], quietly: bool = False) -> None:
        """Do one run's part; what it raises ends that run only, as ``fail``."""
        try:
            work()
        except Exception as error:  # a failed run must not end the others
            self.fail(run, error, quietly)

    def fail(self, run: Run, error: Exception, quietly: bool = False) -> None:
        """End a run, with the traceback in its log. ``quietly``: the caller reports it to the observer. Raises a fault
        that is no run's own (``RunFailed.shared``)."""
        error = lost(error) or error
        if isinstance(error, RunFailed) and error.shared:
            raise error
        self.queue.withdraw(run)
        run.withdraw_from(self.engine)
        before = run.error  # a run that failed earlier in the step is saved too
        run.fail(error)
        if run.error is not None and before is None and not quietly:
            self.observer.run_finished(run.spec, "failed", run.error)
