"""The loop: sample → credit → update → publish → evaluate → record → save, for a cohort of runs over one frozen base.

The runs of a cohort take each step together: one decode batch holds the prompts of all of them, each row with its
own run's adapter. Everything else belongs to one run alone; a run that fails leaves the cohort, the others continue.
A single run is trained as a cohort of one.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from retrain.config.evaluation import Extent
from retrain.device import peak_memory_gib, timestamp
from retrain.engines.protocol import Engine
from retrain.errors import RunInterrupted
from retrain.records.observer import Observer
from retrain.rollouts.pressure import Pressure
from retrain.rollouts.queue import RolloutQueue, SampledStep
from retrain.rollouts.resample import SelectedGroups
from retrain.threads import Workers
from retrain.training.by_ranks import ServedQueue
from retrain.training.evaluation import CohortEvaluator, Evaluator, first_evaluations
from retrain.training.recovery import Failures, Saver
from retrain.training.run import Run
from retrain.training.state import RollbackPoint
from retrain.types import CreditedBatch, Group

Selections = Mapping[Run, SelectedGroups]


@dataclass(frozen=True)
class StepResult:
    batch: CreditedBatch
    update: Mapping[str, object]


def learn(run: Run, selected: SelectedGroups) -> StepResult:
    with run.timer("credit"):
        credited = run.credit([run.with_staleness(group) for group in selected.groups])
    with run.timer("update"):
        return StepResult(*run.update(credited))


class Cohort:
    """Runs that share an engine and step together.

    ``evaluator`` has the held-out sets, which all runs share; ``stop``, called between steps, returns whether to stop;
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
        ahead, ranks = engine.is_concurrent and any(run.requests.recent.bound for run in runs), evaluator.ranks
        self.queue: RolloutQueue[Run] = RolloutQueue(engine, pressure, ahead, evaluator.collect)
        if ranks is not None and any(run.config.inference.served for run in runs):
            self.queue = ServedQueue(engine, ahead, ranks)
        self.extent: Callable[[Run], Extent | None] = lambda run: run.config.evaluation_after(run.step)
        self.failures = Failures(engine, self.queue, observer, ranks)
        self.saver = Saver(self.failures, lambda: {"pressure": pressure and pressure.state(), "engine": engine.state()})
        self.evaluations = CohortEvaluator(evaluator, observer, self.saver, self.failures)

    def train(self) -> Generator[None, None, None]:
        """Step until every run has finished or failed; yield between steps and evaluations.

        Raises RunInterrupted, with everything saved, when ``stop`` returns True. On KeyboardInterrupt, when the
        generator is closed, or when the GPU's context is lost, it ends without saving.
        """
        for run in self.runs:
            run.timer.start(timestamp())
        with closing(self.queue), self.saver.closed_after():
            yield from self._start()
            while active := [run for run in self.runs if run.active]:
                if self.failures.share(active, self.stop):
                    self.saver.save(active)
                    self.saver.settle()
                    raise RunInterrupted("stopped after a finished step; everything is saved")
                self.step(active)
                yield
            self.saver.settle()

    def step(self, active: Sequence[Run]) -> None:
        points = self._begin_step(active)
        with self.saver.undo_on_server_failure(points):
            selections, sampled = self._sample(_alive(active))
            learning = timestamp()
            results = self._learn(_alive(active), selections)
        for run in results:
            run.publish_to(self.engine)
        extents: dict[Run, Extent | None] = {run: self.extent(run) for run in _alive(results)}
        if any(extents.values()):
            with self.queue.paused():
                self.evaluations.trained(extents)
        shared = {"cohort_size": len(active), **self._shared_metrics(sampled)}
        ahead = {"queue_depth": sampled.depth, "time/overlap": self.queue.overlap(learning, timestamp())}
        for run in _alive(results):
            self._record(run, selections[run], results[run], shared | ahead if run.requests.recent.bound else shared)
        self._save_if_due(active, points)

    # -- the parts of a step, in order --------------------------------------------------------------------------

    def _begin_step(self, active: Sequence[Run]) -> dict[Run, RollbackPoint]:
        points = {}
        for run in active:
            with self.failures.isolated(run):
                run.begin_step(self.engine)
            # After begin_step, which may have changed the weights: roll_back compares their version.
            points[run] = run.rollback_point()
        return points

    def _sample(self, runs: Sequence[Run]) -> tuple[Selections, SampledStep[Run]]:
        for run in runs:
            with self.failures.isolated(run):
                requests = run.requests
                self.queue.offer(run, requests.due(run.step, self.queue.ahead), requests.resample)
        sampled = self.queue.take({run: run.step for run in _alive(runs)})
        selections = {}
        for run, groups in sampled.groups.items():
            for span in sampled.spans:
                run.timer.add(*span)
            if error := next((group for group in groups if isinstance(group, Exception)), None):
                self.failures.end(run, error)
            selections[run] = run.take([group for group in groups if isinstance(group, Group)])
        return selections, sampled

    def _learn(self, runs: Sequence[Run], selections: Selections) -> dict[Run, StepResult]:
        begin, results, ends = timestamp(), dict[Run, StepResult](), dict[Run, float]()

        def learn_one(run: Run) -> None:
            run.timer.add("cohort", begin, timestamp())
            with self.failures.isolated(run, quiet=True):
                try:
                    results[run] = learn(run, selections[run])
                finally:
                    ends[run] = timestamp()

        # A run that is alone in the last round of workers trains after the others, with all workers.
        side_by_side = len(runs) - (len(runs) % self.workers.count == 1)
        self.workers.map(learn_one, runs[:side_by_side])
        for run in runs[side_by_side:]:
            learn_one(run)
        end = timestamp()
        for run in runs:
            run.timer.add("cohort", ends[run], end)
            if run.error is not None:
                self.observer.run_finished(run.spec, "failed", run.error)
        return {run: results[run] for run in runs if run in results}

    def _shared_metrics(self, sampled: SampledStep[Run]) -> dict[str, object]:
        sync = {"timing_weight_sync_inference_total": sampled.sync_seconds}
        pressure = self.pressure.metrics() if self.pressure else {}
        return {"perf/peak_memory_gib": peak_memory_gib(), **sync, **pressure}

    def _record(self, run: Run, selected: SelectedGroups, result: StepResult, shared: Mapping[str, object]) -> None:
        now = timestamp()
        with self.failures.isolated(run), run.timer("record"):
            row = run.record_step(selected, result.batch, result.update, shared, now)
        if run.error is None:  # outside the block: an error of the observer does not fail the run
            self.observer.step(run.spec, row)

    def _save_if_due(self, runs: Sequence[Run], points: Mapping[Run, RollbackPoint]) -> None:
        for run in self.saver.save_if_due(runs, points):
            run.requests.recent.withdraw_from(self.engine)
            self.observer.run_finished(run.spec, "done")

    def _start(self) -> Iterator[None]:
        untrained = []
        for run in _alive(self.runs):
            self.observer.run_started(run.spec, run.step, run.config.training.max_steps)
            self.observer.sealed(run.spec, run.recorder.seal())
            run.publish_to(self.engine)
            for row in first_evaluations(run):
                self.observer.evaluated(run.spec, row["name"], row)
            if run.finished and run.step:  # killed between its last checkpoint and being recorded as done
                self._save_if_due([run], {})
            if run.step == 0 and run.config.evaluation.at_start:
                untrained.append(run)
        yield
        yield from self.evaluations.untrained(untrained)
        self._save_if_due([run for run in _alive(self.runs) if run.finished and not run.step], {})  # max_steps = 0


def _alive(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.error is None]
