"""The loop: sample → score → credit → update → record → save, for a cohort of runs over one frozen base.

The runs of a cohort take each step together: one decode batch holds the prompts of all of them, each row with its
own run's adapter. Everything else belongs to one run alone; a run that fails leaves the cohort, the others go on.
A cohort of one is the single run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from retrain.checkpoints import SaveQueue, Snapshot
from retrain.config.evaluation import HeldOut
from retrain.credit import assign_credit, fill_advantages, mark_planning
from retrain.engines.protocol import Engine
from retrain.errors import Interrupted, LeaseLost, NonFinite, RunFailed, StorageError
from retrain.evaluation import Evaluator, Subject
from retrain.maths.losses import RATIO_METRICS
from retrain.maths.schedules import sepa_observe
from retrain.policy.base import BaseModel
from retrain.policy.lora import Lanes
from retrain.policy.threads import Workers
from retrain.pressure import Pressure, decode_work
from retrain.record.observer import Observer
from retrain.rewards import Grader
from retrain.run import Mark, Run
from retrain.scoring import Scoring
from retrain.types import EvalRecord, Group, Prompt, StepRecord

UNGRADED_STEPS = 3
"""A run fails after so many steps in a row in which no completion at all could be graded."""
TOLD_ERRORS = 20
"""Different grading errors that go into a run's log."""


class Cohort:
    """Runs that share one base model and step together.

    ``graders[i]`` scores run i, ``evaluator`` has the held-out sets, which all runs share, ``stop`` is asked between
    steps whether the user wants an end.
    """

    def __init__(
        self,
        base: BaseModel,
        lanes: Lanes | None,
        engine: Engine,
        runs: Sequence[Run],
        graders: Sequence[Grader],
        evaluator: Evaluator,
        observer: Observer,
        stop: Callable[[], bool] = lambda: False,
        workers: Workers | None = None,
    ):
        self.base, self.lanes, self.engine = base, lanes, engine
        self.runs, self.graders, self.evaluator = list(runs), list(graders), evaluator
        self.observer, self.stop, self.workers = observer, stop, workers or Workers()
        self.pressure = self._new_pressure()
        self.saves: SaveQueue[Run] = SaveQueue()
        self.sync_seconds: float | None = None

    def train(self) -> None:
        """Step until every run has finished or failed. Raises Interrupted, with all saved, when asked to stop."""
        for run in self.runs:
            run.last_end = time.time()
        try:
            self._start()
            while active := self._active():
                if self.stop():
                    self._save([run for run, _ in active])
                    self._settle()
                    raise Interrupted("stopped after a finished step; everything is saved")
                self.step(active)
            self._settle()
        except KeyboardInterrupt:
            self.saves.close(abandon=True)
            raise
        finally:
            self.saves.close()

    def step(self, active: Sequence[tuple[Run, Grader]]) -> None:
        """One optimizer step of every active run."""
        before = {}
        for run, _ in active:
            run.last_end = run.last_end or time.time()
            self._guarded_and_told(run, run.anneal)
            before[id(run)] = run.mark()
        asked = self._prompts_of(active)
        graded = self._sample([pair for pair, _ in asked], [prompts for _, prompts in asked])
        numbers = self._learn_all([run for run, _ in active if run.error is None], graded)
        due = [(run, grader) for run, grader in active if run.error is None and run.evaluation_due()]
        for held_out in self.evaluator.sets:
            self._evaluate(held_out, [[pair] for pair in due if pair[0].error is None])
        for run, _ in active:
            if run.error is None:
                self._guarded_and_told(
                    run, lambda run=run: self._record(run, len(active), graded[id(run)], numbers[id(run)])
                )
        self._save_due([run for run, _ in active], before)

    # -- the parts of a step, in order --------------------------------------------------------------------------

    def _prompts_of(self, active: Sequence[tuple[Run, Grader]]) -> list[tuple[tuple[Run, Grader], list[Prompt]]]:
        """What each run asks in this step; one whose prompts cannot be rendered fails, the others go on without it."""
        found: dict[int, list[Prompt]] = {}
        for run, _ in active:
            if run.error is None:
                self._guarded_and_told(run, lambda run=run: found.update({id(run): run.next_prompts()}))
        return [(pair, found[id(pair[0])]) for pair in active if id(pair[0]) in found]

    def _sample(
        self, active: Sequence[tuple[Run, Grader]], prompts: Sequence[Sequence[Prompt]]
    ) -> dict[int, list[Group]]:
        """Graded groups of every prompt of every run, from one decode batch; a run whose grader raises fails."""
        if not active:
            return {}
        requests = [r for lane, (run, _) in enumerate(active) for r in run.requests(prompts[lane], lane)]
        jobs = [(grader, prompt) for (_, grader), batch in zip(active, prompts, strict=True) for prompt in batch]
        if self.pressure is not None:
            self.engine.max_rows = self.pressure.max_rows
        runs = [run for run, _ in active]
        with Scoring(jobs) as scoring:
            begin = time.time()
            with _span(runs, "rollout"):
                sampled = self.engine.sample(requests, [run.adapter for run in runs], scoring.add)
            self.sync_seconds = self.engine.sync_seconds
            if self.pressure is not None:
                tokens, rows = sum(len(c) for group in sampled for c in group), sum(r.samples for r in requests)
                context = sum(r.samples * len(r.prompt_ids) for r in requests) / rows + tokens / (2 * rows)
                self.pressure.observe(tokens, time.time() - begin, context)
                self.engine.max_rows = None
            with _span(runs, "score"):
                found = scoring.groups()
        graded, groups = {}, iter(found)
        for (run, _), batch in zip(active, prompts, strict=True):
            graded[id(run)] = self._graded(run, [next(groups) for _ in batch])
        return graded

    def _graded(self, run: Run, found: Sequence[Group | Exception]) -> list[Group]:
        """The groups of one run; what its grader raised ends it."""
        errors = [group for group in found if isinstance(group, Exception)]
        if errors:
            run.fail(errors[0])
            self.observer.run_finished(run.spec, "failed", run.error or "")
        return [group for group in found if isinstance(group, Group)]

    def _learn_all(self, runs: Sequence[Run], graded: dict[int, list[Group]]) -> dict[int, dict[str, Any]]:
        """Credit and update of every run, side by side where that is faster (of a run that would be alone, its
        micro-batches); what one raises ends that run alone."""
        begin, numbers, ends = time.time(), {}, {}

        def learn(run: Run, workers: Workers) -> None:
            start = time.time()
            run.spans.append(("cohort", begin, start))
            self._guarded(run, lambda: numbers.update({id(run): self._learn(run, graded[id(run)], workers)}))
            ends[id(run)] = time.time()

        together = len(runs) - (len(runs) % self.workers.count == 1)
        self.workers.map(lambda run: learn(run, Workers()), runs[:together])
        for run in runs[together:]:
            learn(run, self.workers)
        end = time.time()
        for run in runs:
            run.spans.append(("cohort", ends[id(run)], end))
            if run.error is not None:
                self.observer.run_finished(run.spec, "failed", run.error)
        return numbers

    def _learn(self, run: Run, groups: list[Group], workers: Workers) -> dict[str, Any]:
        """What one run does with its graded completions; returns the numbers of its policy and controllers."""
        with _span([run], "credit"):
            fill_advantages(groups, run.modes.advantage, run.config.reward.type)
            mark_planning(groups, run.detector, self.base)
            sepa_lambda, gate_open = run.sepa_values()
            credit = assign_credit(groups, run.config, sepa_lambda, (*run.stream, "placebo", run.step), run.modes)
            state: dict[str, Any] = dict(credit.stats)
            if run.config.algorithm.transform_mode == "gtpo_sepa":
                state |= {"sepa_lambda": sepa_lambda, "sepa_gate_open": gate_open}
                correct_rate = _correct_rate(groups)
                run.sepa_state = sepa_observe(run.sepa, run.sepa_state, run.step, correct_rate, credit.exec_variance)
        self._check_grading(run, groups)
        with _span([run], "update"):
            update = self._update(run, credit, workers)
        run.step += 1
        return {"update": update, "state": state}

    def _update(self, run: Run, credit: Any, workers: Workers) -> dict[str, Any]:
        """The optimizer step; left out and recorded as such when loss or gradient is not finite, up to a limit."""
        try:
            update = run.update(credit, workers)
        except NonFinite as error:
            run.skipped_updates += 1
            limit = run.config.training.nonfinite_limit
            if run.skipped_updates >= limit:
                steps = "" if limit == 1 else f" ({limit} steps in a row: nonfinite_limit)"
                raise RunFailed(f"step {run.step}: {error}{steps}") from error
            run.recorder.log(f"step {run.step}: {error}", "warning")
            left_out = dict.fromkeys(("loss", "reported_loss", "optim/grad_norm", "optim/grad_clipped", *RATIO_METRICS))
            return {**left_out, "optim/lr": run.lr(), "num_datums": len(credit.sequences), "optim/skipped": True}
        finally:
            for note in run.budget.take_notes():
                run.recorder.log(f"step {run.step}: {note}", "warning")
        if credit.sequences:
            run.skipped_updates = 0
        return {**update, "optim/skipped": False}

    def _check_grading(self, run: Run, groups: Sequence[Group]) -> None:
        """Tell of gradings that failed, each reason once; RunFailed when nothing at all can be graded any more."""
        errors = [reward.error for group in groups for reward in group.rewards if reward.error]
        for error in dict.fromkeys(errors):
            if error not in run.told and len(run.told) < TOLD_ERRORS:
                run.told.add(error)
                run.recorder.log(f"step {run.step}: {errors.count(error)} completion(s) not graded: {error}", "warning")
        run.ungraded_steps = run.ungraded_steps + 1 if all(g.discarded == "no_reward" for g in groups) else 0
        limit = min(UNGRADED_STEPS, run.config.training.max_steps)
        if run.ungraded_steps >= limit:
            reasons = "; ".join(list(dict.fromkeys(errors))[:3])
            steps = "the only step" if limit == 1 else f"{limit} steps in a row"
            raise RunFailed(f"no completion of {steps} could be graded: {reasons}")

    def _record(self, run: Run, cohort_size: int, groups: list[Group], numbers: dict[str, Any]) -> None:
        config, begin, end = run.config, run.last_end, time.time()
        state = numbers["state"] | {
            "uncertainty_kind": config.algorithm.uncertainty_kind,
            "batch_size": config.training.batch_size,
            "group_size": config.training.group_size,
            "cohort_size": cohort_size,
            "epoch": run.cursor.position / max(1, len(run.cursor.problems)),
            "timing_weight_sync_inference_total": self.sync_seconds,
            "perf/peak_memory_gib": _peak_memory_gib(self.base.device),
            **(run.pressure.metrics() if run.pressure else {}),
        }
        record = StepRecord(
            step=run.step - 1,
            groups=groups,
            update=numbers["update"] | run.capabilities,
            state=state,
            spans=run.spans,
            step_start=begin or end,
            step_end=end,
        )
        run.spans, run.last_end = [], end
        with _span([run], "record"):
            row = run.recorder.record_step(record)
        self.observer.step(run.spec, row)

    # -- saving -------------------------------------------------------------------------------------------------

    def _save_due(self, runs: Sequence[Run], before: Mapping[int, Mark] | None = None) -> None:
        """Save the cohort at one common step when one of its runs is due, ends, or has just failed.

        What a batch is composed of shows in the last bits of what is sampled, so on resume every run begins where all
        of them can. A run that failed is saved as it was ``before`` that step, if its weights still are.
        """
        alive = [run for run in runs if run.error is None]
        done = [run for run in alive if run.finished]
        left = len(alive) < len(runs) and any(run.config.training.save_every for run in runs)
        if done or left or any(run.save_due() for run in alive):
            failed = [run for run in runs if run.error is not None and before and run.rewind(before[id(run)])]
            self._save([*alive, *failed])
        if done:
            self._settle()
        for run in done:
            if run.error is None:
                self.observer.run_finished(run.spec, "done")

    def _save(self, runs: Sequence[Run]) -> None:
        """Copy the state of these runs and queue the copies for writing, once the saves before are complete.

        All are written before the first is published, and so before anything older is deleted.
        """
        self._settle()
        saved, written = [], set[int]()
        for run in runs:
            with _span([run], "checkpoint"):
                self._guarded_and_told(run, lambda run=run: saved.append((run, run.snapshot())))

        def write(run: Run, state: Snapshot) -> None:
            run.write(state)
            written.add(id(run))

        def publish(run: Run, state: Snapshot) -> None:
            if len(written) == len(saved):
                run.publish(state, final=state.step >= run.config.training.max_steps)

        for work in (write, publish):
            for run, state in saved:
                self.saves.submit(run, lambda work=work, run=run, state=state: work(run, state))

    def _settle(self) -> None:
        """Wait for the saves on their way; one that failed ends its run."""
        for run, error in self.saves.wait():
            self._guarded_and_told(run, lambda error=error: raised(error))

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Announce the runs and score the untrained ones."""
        waiting = []
        for run, grader in zip(self.runs, self.graders, strict=True):
            if run.error is not None:
                continue
            self.observer.run_started(run.spec, run.step, run.config.training.max_steps)
            for row in run.first_evaluations():
                self.observer.evaluated(run.spec, row["name"], row)
            if run.finished:  # killed between its last checkpoint and the word that it was done
                self._save_due([run])
            if run.step == 0 and run.config.evaluation.at_start:
                waiting.append((run, grader))
        # Whose weights are the base's:
        untouched = [each for each in waiting if each[0].starts_as_base and not each[0].config.resume.from_]
        for held_out in self.evaluator.sets:
            self._evaluate(held_out, [[pair] for pair in waiting if pair not in untouched and pair[0].error is None])
            self._evaluate_base(held_out, untouched)

    def _evaluate_base(self, held_out: HeldOut, pairs: Sequence[tuple[Run, Grader]]) -> None:
        """Score untrained runs on a held-out set: they all equal the base, so what is graded alike is sampled once, and
        not at all where an earlier cohort has."""
        alike: dict[str, list[tuple[Run, Grader]]] = {}
        for run, grader in pairs:
            if run.error is None:
                alike.setdefault(repr((run.config.reward.grading, run.config.campaign.seed)), []).append((run, grader))
        for setting, same in list(alike.items()):
            known = self.evaluator.known_base(held_out, setting)
            if known is not None:
                del alike[setting]
                self._tell_evaluation([run for run, _ in same], known)
        records = self._evaluate(held_out, list(alike.values()))
        for (setting, same), record in zip(alike.items(), records, strict=True):
            self.saves.submit(same[0][0], partial(self.evaluator.keep_base, held_out, setting, record))

    def _evaluate(self, held_out: HeldOut, alike: Sequence[Sequence[tuple[Run, Grader]]]) -> list[EvalRecord]:
        """Evaluate the first run of each of ``alike`` on a held-out set, in one decode batch; its record, which is
        returned, counts for all of them."""
        if not alike:
            return []
        subjects = [Subject(run.adapter, grader, run.evaluation_stream, run.step) for (run, grader), *_ in alike]
        with _span([run for same in alike for run, _ in same], "eval"):
            found = self.evaluator.evaluate(held_out, subjects)
            for same, evaluated in zip(alike, found, strict=True):
                for run, _ in same:
                    if evaluated.error is not None:
                        self._guarded_and_told(run, lambda error=evaluated.error: raised(error))
                self._tell_evaluation([run for run, _ in same if run.error is None], evaluated.record)
        return [evaluated.record for evaluated in found]

    def _tell_evaluation(self, runs: Sequence[Run], record: EvalRecord) -> None:
        """Record one evaluation for every run that it counts for."""
        for run in runs:
            self._guarded_and_told(run, lambda run=run: self._record_eval(run, record))

    def _record_eval(self, run: Run, record: EvalRecord) -> None:
        self.observer.evaluated(run.spec, record.name, run.recorder.record_eval(record))

    def _new_pressure(self) -> Pressure | None:
        """The controller of the shared decode batch, when a run of the cohort asks for one."""
        asking = [run for run in self.runs if run.config.backpressure.enabled]
        if not asking:
            return None
        prompts = sum(run.config.training.batch_size for run in self.runs)
        samples = max(run.config.training.group_size for run in self.runs)
        pressure = Pressure(asking[0].config.backpressure, prompts, samples, decode_work(self.base))
        for run in asking:
            run.pressure = pressure
            if run.saved_pressure:
                pressure.restore(run.saved_pressure)
        return pressure

    # -- housekeeping -------------------------------------------------------------------------------------------

    def _active(self) -> list[tuple[Run, Grader]]:
        return [(run, grader) for run, grader in zip(self.runs, self.graders, strict=True) if run.active]

    def _guarded(self, run: Run, work: Callable[[], None]) -> None:
        """Do one run's part; what it raises ends that run only, with the traceback in its log."""
        try:
            work()
        except LeaseLost:
            raise
        except StorageError as error:
            if error.shared:  # the fault of no run: nobody can write any more
                raise
            run.fail(error)
        except Exception as error:  # one lane's fault must not take the others along
            run.fail(error)

    def _guarded_and_told(self, run: Run, work: Callable[[], None]) -> None:
        before = run.error  # a run that failed earlier in the step is saved too, and its end was told then
        self._guarded(run, work)
        if run.error is not None and before is None:
            self.observer.run_finished(run.spec, "failed", run.error)


def raised(error: Exception) -> None:
    """Raise ``error`` here."""
    raise error


@contextmanager
def _span(runs: Sequence[Run], name: str) -> Iterator[None]:
    """Note the wall-clock time of a part for every run that takes part in it."""
    begin = time.time()
    try:
        yield
    finally:
        end = time.time()
        for run in runs:
            run.spans.append((name, begin, end))


def _correct_rate(groups: Sequence[Group]) -> float:
    """Share of correct completions among all that were sampled."""
    flags = [reward.is_correct for group in groups for reward in group.rewards]
    return sum(flags) / len(flags)


def _peak_memory_gib(device: torch.device) -> float:
    """Highest memory use so far: of the GPU's allocator, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
