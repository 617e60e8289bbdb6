"""One run's values of the deciding metric, from the table of another tool's results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from retrain.errors import UsageError
from retrain.records.foreign.table import RunTable
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.table_measure import Column

Grades = Mapping[str, Sequence[float | None]]  # By problem

SAME = 1e-6  # Tolerance for the tool's own number
SINGLE = 1e-7  # Relative rounding error of float32, which some tools write
MOST_DECIMALS = 6
LARGEST = 1e100  # The squares of larger values overflow


@dataclass(frozen=True)
class TableRun:
    """Values of one run by step, up to the step at which it must end."""

    table: RunTable
    state: str
    reason: str | None
    # Numbers that the tool wrote
    numbers: Mapping[int, float | None]
    answers: Mapping[int, Grades]
    # Whether there are evaluations after the step at which runs must end
    has_later: bool = False

    @classmethod
    def of(cls, table: RunTable, column: Column, end: int | None) -> "TableRun":
        """Return the run's values of ``column``. ``end``: declared number of updates after which a run must end."""
        numbers, answers = table.numbers.get(column, {}), table.answers.get(column, {})
        last = max([*numbers, *answers], default=None)
        has_later = end is not None and last is not None and last > end
        state, reason = table.state, None
        if state in ("done", "unknown") or (state == "unfinished" and has_later):
            state = "done"
            if last is None:
                state, reason = "unfinished", f"its files have no {column[1]}"
            elif end is not None and end not in numbers and end not in answers:
                state, reason = "unfinished", f"it has no evaluation after {end} steps"
        return cls(
            table,
            state,
            reason,
            {step: value for step, value in numbers.items() if end is None or step <= end},
            {step: grades for step, grades in answers.items() if end is None or step <= end},
            has_later,
        )

    @classmethod
    def merged(cls, runs: Sequence["TableRun"]) -> "TableRun":
        """Return the runs of one model as one run, with the answers of all that are done."""
        finished = [run for run in runs if run.is_done] or runs[:1]
        if len(finished) == 1:
            return finished[0]
        answers: dict[int, dict[str, list[float | None]]] = {}
        for step, grades in chain.from_iterable(run.answers.items() for run in finished):
            for problem, of_problem in grades.items():
                answers.setdefault(step, {}).setdefault(problem, []).extend(of_problem)
        return replace(finished[0], answers=answers, numbers={} if answers else finished[0].numbers)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def label(self) -> str:
        return self.table.condition

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def steps(self) -> list[int]:
        return sorted({*self.numbers, *self.answers})

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def ungraded(self) -> int:
        """Answers that could not be graded, in all evaluations."""
        grades = chain.from_iterable(grades.values() for grades in self.answers.values())
        return sum(grade is None for of_problem in grades for grade in of_problem)

    @property
    def path(self) -> Path:
        return self.table.files[0] if self.table.files else Path(self.name)

    def scores(self, measure: Measure) -> dict[int, dict[str, float]]:
        """Return the score of each problem, by step; steps whose evaluation could not be graded are left out."""
        by_step = {step: _scores(grades, is_share=measure.is_share) for step, grades in self.answers.items()}
        return {step: scores for step, scores in by_step.items() if scores is not None}

    def values(self, measure: Measure) -> dict[int, float | None]:
        """Return the value of each evaluation, by ascending step: from the answers where there are any."""
        values = {**self.numbers, **dict.fromkeys(self.answers)}
        values |= {step: sum(scores.values()) / len(scores) for step, scores in self.scores(measure).items()}
        return dict(sorted(values.items()))

    def result(self, measure: Measure, seed: int, pair: int, decimals: int | None) -> RunResult:
        """Return the run as the comparison takes it. ``decimals``: those of numbers that the tool rounded."""
        values = self.values(measure)
        if not self.answers and decimals is not None:
            # Rounding errors of float32 would break ties between differences.
            values = {step: None if value is None else round(value, decimals) for step, value in values.items()}
        rows = [{"name": measure.held_out, "step": step, measure.key: value} for step, value in values.items()]
        return RunResult(
            self.name,
            self.label,
            seed,
            self.state,
            self.reason,
            self.path,
            pair=(0, pair),
            evaluations=rows,
            problems=self.scores(measure),
            value_step=self._value_step(decimals),
        )

    def _value_step(self, decimals: int | None) -> float:
        """Return the change of an evaluation's value by one answer; without answers, by its rounding. 0: unknown."""
        if not self.answers:
            return 0.0 if decimals is None else 10.0**-decimals
        grades = self.answers[max(self.answers)]
        if any(grade not in (0, 1, None) for of_problem in grades.values() for grade in of_problem):
            return 0.0
        return 1 / min(len(of_problem) for of_problem in grades.values()) / len(grades)


def _scores(grades: Grades, *, is_share: bool) -> dict[str, float] | None:
    """Return the mean over the answers to each problem; None if the evaluation could not be graded."""
    graded = {key: [grade for grade in grades[key] if grade is not None] for key in grades}
    if not any(graded.values()) or (not is_share and not all(graded.values())):
        return None
    # As in retrain's evaluations, an answer without a grade is wrong, and has no reward.
    counts = {key: len(grades[key]) if is_share else len(graded[key]) for key in grades}
    return {key: sum(graded[key]) / counts[key] for key in grades}


def same_problems(runs: Sequence[TableRun], *, common: bool) -> tuple[list[TableRun], int]:
    """Require that all finished runs have the same problems at every step. With ``common``, keep those that all have,
    and return how many were left out. Raises UsageError."""
    finished = [run for run in runs if run.is_done]
    keyed = [(run, step, run.answers[step].keys()) for run in finished for step in sorted(run.answers)]
    other = next(((run, step, keys) for run, step, keys in keyed if keys != keyed[0][2]), None)
    if other is None:
        return list(runs), 0
    first, (run, step, keys) = keyed[0], other
    shared = set.intersection(*(set(keys) for _, _, keys in keyed))
    if not shared or not common:
        where = f"{first[0].name} (step {first[1]}) and {run.name} (step {step})"
        counts = f"{len(first[2] ^ keys)} of {len(first[2] | keys)}"
        fix = 'in [compare], type problems = "common" to compare those that all runs have, without a verdict'
        if not shared:
            fix = "no problem is in all runs. If their prompt templates differ, name a column that identifies a problem"
        raise UsageError(f"{where} do not have the same problems: {counts} are in one of them only; {fix}")
    if bare := next((run for run in finished if run.steps and run.last_step not in run.answers), None):
        raise UsageError(f"{bare.name} has no answers to problems, so that common ones cannot be compared")
    restricted = [
        replace(
            run,
            numbers={step: value for step, value in run.numbers.items() if step not in run.answers},
            answers={
                step: {key: of_problem for key, of_problem in grades.items() if key in shared}
                for step, grades in run.answers.items()
            },
        )
        if run.is_done
        else run
        for run in runs
    ]
    return restricted, len(set().union(*(keys for _, _, keys in keyed))) - len(shared)


def require_possible_values(runs: Sequence[TableRun], measure: Measure) -> None:
    """Raise UsageError for a value that is infinite or too large to compute with, or a share outside [0, 1]."""
    for run in runs:
        for step in run.steps:
            grades = chain.from_iterable(run.answers.get(step, {}).values())
            values = [value for value in (run.numbers.get(step), *grades) if value is not None]
            least, most = min(values, default=0.0), max(values, default=0.0)
            value = least if least < -SAME else most
            place = f"{run.path}: {measure.key} of {run.name} is {value:g} at step {step}"
            if max(-least, most) > LARGEST:
                raise UsageError(f"{place}: leave out this run, or take another metric")
            if measure.is_share and not -SAME <= value <= 1 + SAME:
                percent = ", or divide values from 0 to 100 by 100" if 0 <= value <= 100 else ""
                raise UsageError(
                    f"{place}, but a share lies from 0 to 1: in [compare], "
                    f'type unit = "number" (--unit number){percent}'
                )


def decimals_of(runs: Sequence[TableRun], *, is_share: bool) -> int | None:
    """Return the number of decimals to which all numbers are rounded, where runs have no answers; None if they are not
    rounded. float32 values may differ from the rounded ones by their precision. A share has at least one decimal."""
    values = [value for run in runs if not run.answers for value in run.numbers.values() if value is not None]
    decimals = range(1 if is_share else 0, MOST_DECIMALS + 1)
    return next((d for d in decimals if all(abs(v - round(v, d)) <= SINGLE * max(abs(v), 1e-3) for v in values)), None)
