"""Held-out evaluations of a cohort: one decode batch for all runs that are due, one answer for all that are alike.

What an evaluation raises ends the runs that it was for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from retrain.config.evaluation import HeldOut
from retrain.data.dataset import column_values
from retrain.evaluation import Evaluator, Subject
from retrain.record.observer import Observer
from retrain.run import Run
from retrain.saving import Guard, Saver
from retrain.types import EvalRecord


class Evaluations:
    """``evaluator`` has the held-out sets, which all runs share; ``guard`` does one run's part; ``fail`` ends a run."""

    def __init__(
        self,
        evaluator: Evaluator,
        observer: Observer,
        saver: Saver,
        guard: Guard,
        fail: Callable[[Run, Exception], None],
    ):
        self.evaluator, self.observer, self.saver, self.guard, self.fail = evaluator, observer, saver, guard, fail

    def trained(self, runs: Sequence[Run]) -> None:
        """Evaluate these runs as they are now, each on whole sets or on parts of them, as its schedule says."""
        for held_out in self.evaluator.sets:
            for extent, asked in (("whole", held_out), ("part", held_out.part)):
                due = [run for run in runs if run.error is None and run.evaluation_due() == extent]
                self._evaluate(asked, [[run] for run in due])

    def untrained(self, runs: Sequence[Run]) -> Iterator[None]:
        """Evaluate runs before their first update, with a pause for the caller after each set."""
        for held_out in self.evaluator.sets:
            others = [run for run in runs if not run.equals_base and run.error is None]
            self._evaluate(held_out, [[run] for run in others])
            self._evaluate_base(held_out, [run for run in runs if run.equals_base and run.error is None])
            yield

    def _evaluate_base(self, held_out: HeldOut, runs: Sequence[Run]) -> None:
        """Score untrained runs on a held-out set: they all equal the base, so what is graded alike is sampled once, and
        not at all where an earlier cohort has."""
        alike: dict[str, list[Run]] = {}
        for run in runs:
            config = run.config
            audit = [config.audit.model_dump_json()] if config.audit.wanted else []
            rubrics = column_values(config.rubric_columns, run.environments[held_out.name].problems(held_out.name))
            measured = (config.environment.measured, config.reward.grading, config.campaign.seed)
            setting = repr((*measured, *audit, *rubrics))
            alike.setdefault(setting, []).append(run)
        for setting, same in list(alike.items()):
            known = self.evaluator.known_base(held_out, same[0].environments[held_out.name], setting)
            if known is not None:
                del alike[setting]
                self._record_evaluation(same, known)
        records = self._evaluate(held_out, list(alike.values()))
        for (setting, same), record in zip(alike.items(), records, strict=True):
            environment = same[0].environments[held_out.name]
            self.saver.submit(same[0], partial(self.evaluator.keep_base, held_out, environment, setting, record))

    def _evaluate(self, held_out: HeldOut, alike: Sequence[Sequence[Run]]) -> list[EvalRecord]:
        """Evaluate the first run of each of ``alike`` on a held-out set, in one decode batch; its record, which is
        returned, counts for all of them."""
        if not alike:
            return []
        subjects = [Subject(run.policy_ref, run.environments, run.evaluation_stream, run.step) for run, *_ in alike]
        with ExitStack() as spans:
            for same in alike:
                for run in same:
                    spans.enter_context(run.span("eval"))
            records = self.evaluator.evaluate(held_out, subjects)
            for same, record in zip(alike, records, strict=True):
                for run in same:
                    if record.error is not None:
                        self.fail(run, record.error)
                self._record_evaluation([run for run in same if run.error is None], record)
        return records

    def _record_evaluation(self, runs: Sequence[Run], record: EvalRecord) -> None:
        for run in runs:
            report = partial(self.observer.evaluated, run.spec, record.name)
            self.guard(run, lambda run=run, report=report: report(run.recorder.record_eval(record)))
