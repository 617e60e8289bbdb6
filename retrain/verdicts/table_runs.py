"""One run's values of the deciding metric, from the table of another tool's results.

A value is the mean over problems of the mean over answers, or without answers the number that the tool wrote. As in
retrain's own evaluations, an answer that could not be graded counts as wrong for a share, and is left out of the mean
of any other number; an evaluation without graded answers (for a number: of one problem) has no value.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from retrain.errors import UsageError, plural
from retrain.records.foreign.table import RunTable
from retrain.verdicts.problem_scores import SAME
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.table_measure import Column

Grades = Mapping[str, Sequence[float | None]]  # By problem

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
    has_later: bool

    @classmethod
    def of(cls, table: RunTable, column: Column, end: int | None) -> "TableRun":
        """Return the run's values of ``column``. ``end``: declared number of updates after which a run must end."""
        numbers, answers = table.numbers.get(column, {}), table.answers.get(column, {})
        steps = {*numbers, *answers}
        has_later = end is not None and max(steps, default=0) > end
        state, reason = table.state, None
        if state == "unknown" or (state == "unfinished" and has_later):
            state = "done"
        if state == "done" and not steps:
            state, reason = "unfinished", f"its files have no {column[1]}"
        elif state == "done" and end is not None and end not in steps:
            state, reason = "unfinished", f"it has no evaluation after {end} steps"
        if end is not None:
            numbers = {step: value for step, value in numbers.items() if step <= end}
            answers = {step: grades for step, grades in answers.items() if step <= end}
        return cls(table, state, reason, numbers, answers, has_later)

    @property
    def is_done(self) -> bool:
        return self.state == "done"

    @property
    def path(self) -> Path:
        return self.table.files[0] if self.table.files else Path(self.table.name)

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

    def result(self, measure: Measure, decimals: int | None) -> RunResult:
        """Return the run as the comparison takes it. ``decimals``: those of numbers that the tool rounded."""
        scores = {step: _scores(grades, is_share=measure.is_share) for step, grades in self.answers.items()}
        values = dict(self.numbers)
        if not self.answers and decimals is not None:
            # Rounding errors of float32 would break ties between differences.
            values = {step: None if value is None else round(value, decimals) for step, value in values.items()}
        for step, of_step in scores.items():
            values[step] = sum(of_step.values()) / len(of_step) if of_step else None
        seed = self.table.seed or 0
        return RunResult(
            self.table.name,
            self.table.condition,
            seed,
            self.state,
            self.reason,
            self.path,
            pair=(0, seed),
            evaluations=[{"name": measure.held_out, "step": step, measure.key: values[step]} for step in self.steps],
            problems={step: of_step for step, of_step in scores.items() if of_step},
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


def _scores(grades: Grades, *, is_share: bool) -> dict[str, float]:
    """Return the mean over the answers to each problem; empty if the evaluation could not be graded."""
    graded = {key: [grade for grade in grades[key] if grade is not None] for key in grades}
    if not any(graded.values()) or (not is_share and not all(graded.values())):
        return {}
    counted = grades if is_share else graded
    return {key: sum(graded[key]) / len(counted[key]) for key in grades}


def merged(runs: Sequence[TableRun]) -> TableRun:
    """Return the runs of one model as one run with the answers of all finished runs."""
    finished = [run for run in runs if run.is_done] or runs[:1]
    if len(finished) == 1:
        return finished[0]
    answers: dict[int, dict[str, list[float | None]]] = {}
    for step, grades in chain.from_iterable(run.answers.items() for run in finished):
        for problem, of_problem in grades.items():
            answers.setdefault(step, {}).setdefault(problem, []).extend(of_problem)
    return replace(finished[0], answers=answers, numbers={} if answers else finished[0].numbers)


def same_problems(runs: Sequence[TableRun], *, common: bool) -> tuple[list[TableRun], list[str]]:
    """Require that all finished runs have the same problems at every step. With ``common``, keep those that all have,
    without the tool's numbers, and return the reason against a verdict. Raises UsageError."""
    keyed = [(f"{run.table.name} (step {step})", run.answers[step].keys())
             for run in runs if run.is_done for step in sorted(run.answers)]  # fmt: skip
    union = set[str]().union(*(keys for _, keys in keyed))
    shared = union.intersection(*(keys for _, keys in keyed))
    if union == shared:
        return list(runs), []
    if not shared or not common:
        raise UsageError(_mismatch_message(keyed, has_common=bool(shared)))
    restricted = [replace(run, numbers=dict.fromkeys(run.numbers), answers=_restricted(run.answers, shared))
                  if run.is_done else run for run in runs]  # fmt: skip
    dropped = len(union) - len(shared)
    verb = "was" if dropped == 1 else "were"
    return restricted, [f"{plural(dropped, 'problem')} that not all runs have {verb} left out"]


def _mismatch_message(keyed: Sequence[tuple[str, Set[str]]], *, has_common: bool) -> str:
    """Return a message about the first evaluation whose problems differ from those of the first one."""
    where, first = keyed[0]
    elsewhere, keys = next(each for each in keyed if each[1] != first)
    fix = 'in [compare], type problems = "common" to compare those that all runs have, without a verdict'
    if not has_common:
        fix = "no problem is in all runs. If their prompt templates differ, name a column that identifies a problem"
    return (
        f"{where} and {elsewhere} do not have the same problems: {len(first ^ keys)} of {len(first | keys)} are in one "
        f"of them only; {fix}"
    )


def _restricted(answers: Mapping[int, Grades], problems: Set[str]) -> dict[int, Grades]:
    return {step: {key: grades[key] for key in grades if key in problems} for step, grades in answers.items()}


def require_possible_values(runs: Sequence[TableRun], measure: Measure) -> None:
    """Raise UsageError for a share outside [0, 1], or a number that is too large to compute with."""
    low, high = (-SAME, 1 + SAME) if measure.is_share else (-LARGEST, LARGEST)
    for run in runs:
        for step in run.steps:
            grades = chain.from_iterable(run.answers.get(step, {}).values())
            values = (value for value in (run.numbers.get(step), *grades) if value is not None)
            value = next((value for value in values if not low <= value <= high), None)
            if value is None:
                continue
            place = f"{run.path}: {measure.key} of {run.table.name} is {value:g} at step {step}"
            if not measure.is_share:
                raise UsageError(f"{place}, too large to compute with: leave out this run, or use another metric")
            percent = ", or divide values from 0 to 100 by 100" if 0 <= value <= 100 else ""
            raise UsageError(
                f'{place}, but a share lies from 0 to 1: in [compare], type unit = "number" (--unit number){percent}'
            )


def decimals_of(runs: Sequence[TableRun], *, is_share: bool) -> int | None:
    """Return the number of decimals to which all numbers are rounded, where runs have no answers; None if they are not
    rounded. float32 values may differ from the rounded ones by their precision. A share has at least one decimal."""
    values = [value for run in runs if not run.answers for value in run.numbers.values() if value is not None]
    decimals = range(1 if is_share else 0, MOST_DECIMALS + 1)
    return next((d for d in decimals if all(abs(v - round(v, d)) <= SINGLE * max(abs(v), 1e-3) for v in values)), None)
