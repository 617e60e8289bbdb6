"""Judge results of other tools: each run's table becomes a ``RunResult``, and the rule compares the conditions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from retrain.config.comparing import Compare
from retrain.errors import UsageError, listed, plural
from retrain.records.foreign.table import RunTable
from retrain.records.schema.comparison import Comparison
from retrain.verdicts.comparison import baseline_first, compare_pairs, comparison_of
from retrain.verdicts.declaration import DeclaredRule, Standing
from retrain.verdicts.models import model_conditions
from retrain.verdicts.problem_scores import SAME
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.rule import FEWEST_PAIRS
from retrain.verdicts.table_measure import table_measure
from retrain.verdicts.table_runs import TableRun, decimals_of, merged, require_possible_values, same_problems
from retrain.verdicts.unpaired import unpaired_conditions

NAMED = 6  # Runs and steps listed by name; the rest are only counted

# "models": one model of each condition, by problem; "runs": whole runs; "pairs": pairs of runs with one seed
Replicates = Literal["models", "runs", "pairs"]


class TableComparison(NamedTuple):
    """A comparison with the runs and the measure that are compared."""

    comparison: Comparison
    runs: list[RunResult]
    measure: Measure


def judge_tables(
    tables: Sequence[RunTable], compare: Compare, standing: Standing, warnings: Sequence[str] = ()
) -> TableComparison:
    """Compare the conditions. ``warnings`` come first among the warnings of the result. Raises UsageError for results
    that cannot be compared, with the line to type."""
    notes = list(warnings)
    found = sorted({table.condition for table in tables})
    labels = baseline_first(compare.conditions or found, compare.baseline)
    tables = _chosen(tables, labels, compare.seeds, notes)
    measure, column = table_measure(tables, compare)
    replicates = _replicates(tables, labels, compare, notes)
    tables, planned, excess = _numbered(tables, compare.seeds or [])
    runs = [TableRun.of(table, column, compare.steps) for table in tables]
    runs = _checked_ends(runs, measure, compare, notes)
    runs, dropped = same_problems(runs, common=compare.problems == "common")
    standing = replace(standing, reasons=(*standing.reasons, *excess, *dropped))
    require_possible_values(runs, measure)
    decimals = decimals_of(runs, is_share=measure.is_share)
    results = [run.result(measure, decimals) for run in runs]
    _require_values(results, measure)
    notes += [*_answer_notes(runs, measure), *_number_notes(runs, results, measure)]
    results += _missing(results, labels, planned, replicates)
    results.sort(key=lambda run: run.pair)
    if replicates == "pairs":
        rule = DeclaredRule(margin=compare.equivalence_margin)
        comparison = compare_pairs(results, labels, measure, rule, standing, notes)
    else:
        if compare.equivalence_margin is not None:
            notes.append("equivalence_margin is not used: only runs that are paired by seed can be typically alike.")
        conditions_of = model_conditions if replicates == "models" else unpaired_conditions
        comparison = comparison_of(conditions_of(results, labels, measure, standing), results, measure, notes)
    tools = " and ".join(sorted({table.tool for table in tables} - {""})) or "files"
    files = set(chain.from_iterable(table.files for table in tables))
    comparison = replace(
        comparison,
        source=f"{tools} ({plural(len(files), 'file')})",
        replicate="none" if replicates == "models" else "training",
        pairing="seed" if replicates == "pairs" else "none",
        read=[f"read {plural(len(runs), 'run')} from {tools}: {_content(runs, len(labels))}"],
    )
    return TableComparison(comparison, results, measure)


def _chosen(
    tables: Sequence[RunTable], labels: Sequence[str], seeds: Sequence[int] | None, notes: list[str]
) -> list[RunTable]:
    """Return the tables of these conditions and seeds (None: all). Runs without a known seed are kept."""
    others = sorted({table.condition for table in tables} - set(labels))
    tables = [table for table in tables if table.condition in labels]
    if not tables:
        raise UsageError(f"there are no results of {listed(labels, NAMED)}: there are those of {listed(others, NAMED)}")
    if others:
        notes.append(f"Not among the conditions, and left out: {listed(others, NAMED)}.")
    if len(labels) == 1:
        notes.append(f"{labels[0]} is the only condition: there is nothing to compare it with.")
    if seeds is None:
        return tables
    if others := [table.name for table in tables if table.seed not in (None, *seeds)]:
        notes.append(f"Not among the seeds, and left out: {listed(others, NAMED)}.")
    if len(others) == len(tables):
        raise UsageError(f"no run has one of the seeds in [compare]: the runs are {listed(others, NAMED)}")
    return [table for table in tables if table.seed in (None, *seeds)]


def _replicates(tables: Sequence[RunTable], labels: Sequence[str], compare: Compare, notes: list[str]) -> Replicates:
    """Return what is compared. It depends on which runs there are, never on their results."""
    if compare.replicate == "none":
        return "models"
    if len(labels) == 1:
        return "pairs"
    runs = Counter(table.condition for table in tables)
    if max(*runs.values(), len(compare.seeds or ())) <= 1:
        notes.append("There is one run for each condition: only these models can be compared, by problem.")
        return "models"
    if compare.pairing == "none":
        return "runs"
    if unknown := [table.name for table in tables if table.seed is None]:
        notes.append(f"The seed is not known of {listed(unknown, NAMED)}: runs are not paired.")
        return "runs"
    if compare.seeds is not None:
        return "pairs"
    pairs = _pair_counts(tables, labels[0])
    if not pairs:
        notes.append("No other condition has a seed in common with the baseline: runs are not paired.")
        return "runs"
    if max(pairs.values()) < FEWEST_PAIRS <= min(runs[label] for label in labels):
        notes.append('pairing = "none" compares whole runs instead of pairs: declare it before the results.')
    return "pairs"


def _pair_counts(tables: Sequence[RunTable], baseline: str) -> Counter[str]:
    """Return the number of runs with a seed that the baseline has too, by condition; conditions without one are left
    out."""
    seeds = {table.seed for table in tables if table.condition == baseline}
    return Counter(table.condition for table in tables if table.condition != baseline and table.seed in seeds)


def _numbered(
    tables: Sequence[RunTable], planned: Sequence[int]
) -> tuple[Sequence[RunTable], Sequence[int], list[str]]:
    """Return the tables, the planned seeds, and a reason against a verdict if there are more runs than planned.

    Where a seed is unknown, all runs are numbered instead, within their condition, and as many are planned.
    """
    if all(table.seed is not None for table in tables):
        return tables, planned, []
    numbers, numbered = Counter[str](), []
    for table in tables:
        numbers[table.condition] += 1
        numbered.append(replace(table, seed=numbers[table.condition]))
    most = max(numbers.values())
    excess = (
        [f"a condition has {most} runs, but {plural(len(planned), 'seed')} declared"] if most > len(planned) > 0 else []
    )
    return numbered, range(1, len(planned) + 1), excess


def _checked_ends(runs: Sequence[TableRun], measure: Measure, compare: Compare, notes: list[str]) -> Sequence[TableRun]:
    """Return the runs, checked to end at the same step; with ``replicate = "none"``, the runs of each condition as
    those of one model. Raises UsageError."""
    if longer := [run.table.name for run in runs if run.has_later]:
        notes.append(f"Evaluations after {compare.steps} steps are left out: of {listed(longer, NAMED)}.")
    if compare.replicate == "training":
        _require_same_end(runs, measure, compare, notes)
        return runs
    groups: dict[str, list[TableRun]] = {}
    for run in runs:
        groups.setdefault(run.table.condition, []).append(run)
    for label, group in groups.items():
        _require_same_end(group, measure, compare, [])
        if len(group) > 1:
            notes.append(f"The {len(group)} runs of {label} count as samples of one model.")
    models = [merged(group) for group in groups.values()]
    ends = sorted({run.last_step for run in models if run.is_done})
    if len(ends) > 1:
        notes.append(f"The models are from steps {listed([str(step) for step in ends], NAMED)}.")
    return models


def _require_same_end(runs: Sequence[TableRun], measure: Measure, compare: Compare, notes: list[str]) -> None:
    """Raise UsageError if finished runs end at different steps, unless the step is declared or curves are compared."""
    finished = sorted((run for run in runs if run.is_done), key=lambda run: run.last_step)
    if not finished or compare.steps is not None:
        return
    short, long = finished[0], finished[-1]
    if short.last_step == long.last_step:
        if long.last_step and any(run.table.state == "unknown" for run in finished):
            notes.append(f"steps is not set: runs are finished after {long.last_step}, the largest number found.")
    elif measure.summary == "auc":
        notes.append(f"Runs end after {short.last_step} to {long.last_step} steps: auc is the mean over each curve.")
    else:
        raise UsageError(
            f"{short.table.name} ends after {short.last_step} steps and {long.table.name} after {long.last_step}: in "
            f"[compare], type steps = {long.last_step} (--steps {long.last_step}; runs that end earlier are "
            f'unfinished), or metric = "auc:{measure.key}" (--metric auc:{measure.key}, the area under the curve)'
        )


def _require_values(results: Sequence[RunResult], measure: Measure) -> None:
    finished = [run for run in results if run.done]
    if measure.summary == "final" or not finished or any(run.value(measure) is not None for run in finished):
        return
    needs = "two evaluations" if measure.summary == "auc" else "three evaluations after the start"
    raise UsageError(
        f"no run has {needs}, which {measure.summary} needs: in [compare], type "
        f'metric = "{measure.key}" (--metric {measure.key})'
    )


def _missing(
    results: Sequence[RunResult], labels: Sequence[str], planned: Sequence[int], replicates: Replicates
) -> list[RunResult]:
    """Return the runs that are declared, or that other conditions have, and that are not there."""
    there = {(run.label, run.seed) for run in results}
    if replicates == "models":
        absent = [(label, 0, label) for label in labels if label not in {run.label for run in results}]
    else:
        kind = "seed" if replicates == "pairs" else "run"
        if replicates == "pairs" and not planned:
            planned = sorted({seed for _, seed in there})
        absent = [(label, seed, f"{label} {kind} {seed}")
                  for label in labels for seed in planned if (label, seed) not in there]  # fmt: skip
    return [RunResult(name, label, seed, "missing", None, Path(), (0, seed)) for label, seed, name in absent]


def _answer_notes(runs: Sequence[TableRun], measure: Measure) -> list[str]:
    """Return warnings about answers without a grade, unequal numbers of answers to a problem, and runs without any."""
    notes = []
    finished = [run for run in runs if run.is_done]
    if ungraded := [f"{run.table.name} ({run.ungraded})" for run in finished if run.ungraded]:
        fate = "count as wrong" if measure.is_share else "are left out of the means"
        notes.append(f"Answers without a grade {fate}: {listed(ungraded, NAMED)}.")
    sizes = _answer_counts(runs)
    if len(sizes) > 1:
        notes.append(
            f"Problems have {sizes[0]} to {sizes[-1]} answers: the score of a problem is the mean of its answers."
        )
    bare = [run.table.name for run in finished if not run.answers]
    if sizes and bare:
        notes.append(f"No answers to problems, so that these cannot be checked to be the same: {listed(bare, NAMED)}.")
    return notes


def _number_notes(runs: Sequence[TableRun], results: Sequence[RunResult], measure: Measure) -> list[str]:
    """Return a warning if a number that the tool wrote differs from the value computed from its answers."""
    other = []
    for run, result in zip(runs, results, strict=True):
        for row in result.evaluations if run.is_done else ():
            step, value = row["step"], row[measure.key]
            number = run.numbers.get(step) if step in run.answers else None
            if number is not None and value is not None and abs(number - value) > SAME:
                other.append(f"{run.table.name}, step {step}: {number:.6g}, its answers say {value:.6g}")
    if not other:
        return []
    return [f"The tool's numbers are not those of its answers, which count (often failures left out): {other[0]}"
            f"{f' and {len(other) - 1} more' if len(other) > 1 else ''}."]  # fmt: skip


def _answer_counts(runs: Sequence[TableRun]) -> list[int]:
    """Return the numbers of answers that problems have."""
    evaluations = [grades for run in runs if run.is_done for grades in run.answers.values()]
    return sorted({len(of_problem) for grades in evaluations for of_problem in grades.values()})


def _content(runs: Sequence[TableRun], conditions: int) -> str:
    """Return what was read, such as "2 conditions, 200 problems × 2 answers, steps 0, 40; problem sets equal"."""
    parts = [plural(conditions, "condition")]
    problems = max((len(grades) for run in runs if run.is_done for grades in run.answers.values()), default=0)
    if problems:
        *_, most = sizes = _answer_counts(runs)
        answers = plural(most, "answer") if len(sizes) == 1 else f"{sizes[0]} to {most} answers"
        parts.append(f"{plural(problems, 'problem')} × {answers}")
    steps = sorted({step for run in runs for step in run.steps})
    if len(steps) > 1:
        parts.append(f"steps {listed([str(step) for step in steps], NAMED)}")
    has_answers = problems and all(run.answers for run in runs if run.is_done)
    return f"{', '.join(parts)}{'; problem sets equal' if has_answers else ''}"
