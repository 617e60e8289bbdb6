"""Judge results of other tools: each run's table becomes a ``RunResult``, and the rule compares the conditions.

A run's value is the mean over problems of the mean over answers, or without answers the number that the tool wrote. As
in retrain's own evaluations, an answer that could not be graded counts as wrong for a share, and is left out of the
mean of any other number; an evaluation without graded answers (for a number: of one problem) has no value.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from retrain.config.comparing import Compare
from retrain.errors import UsageError, listed, plural
from retrain.records.foreign.table import RunTable
from retrain.records.schema.base import Row
from retrain.records.schema.comparison import Comparison
from retrain.verdicts.comparison import Design, baseline_of, compare_runs
from retrain.verdicts.declaration import Standing
from retrain.verdicts.models import model_conditions
from retrain.verdicts.results import Measure, RunResult
from retrain.verdicts.rule import FEWEST_PAIRS
from retrain.verdicts.table_measure import Column, table_measure
from retrain.verdicts.table_runs import SAME, TableRun, decimals_of, require_possible_values, same_problems
from retrain.verdicts.unpaired import unpaired_conditions

UNDECLARED = Standing(("nothing was declared before the results",))
NAMED = 6  # Runs and steps listed by name; the rest are only counted

# "models": one model for each condition, by problem; "runs": whole runs; "pairs": pairs of runs with one seed
Comparing = Literal["models", "runs", "pairs"]
DESIGNS: dict[Comparing, Design | None] = {"models": model_conditions, "runs": unpaired_conditions, "pairs": None}


def compare_tables(
    tables: Sequence[RunTable],
    compare: Compare,
    standing: Standing = UNDECLARED,
    *,
    tools: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Row:
    """Return the comparison of ``judge_tables`` as JSON."""
    return judge_tables(tables, compare, standing, tools=tools, warnings=warnings).comparison.to_json()


class TableComparison(NamedTuple):
    """A comparison with the runs and the measure that are compared."""

    comparison: Comparison
    runs: list[RunResult]
    measure: Measure


def judge_tables(
    tables: Sequence[RunTable],
    compare: Compare,
    standing: Standing = UNDECLARED,
    *,
    tools: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> TableComparison:
    """Compare the conditions.

    ``tools``: names of the tools that wrote the files; ``warnings`` come first among the warnings of the result. The
    key ``read`` has lines about what was read and which runs are missing. Raises UsageError for results that cannot be
    compared, with the line to type.
    """
    notes = list(warnings)
    labels = compare.conditions or sorted({table.condition for table in tables})
    chosen = _chosen(tables, labels, compare, notes)
    measure, column = table_measure(chosen, compare)
    first = baseline_of(compare.baseline, labels)
    comparing = _comparing(chosen, labels, first, compare, notes)
    runs = _runs(chosen, column, measure, compare, notes)
    runs, dropped = same_problems(runs, common=compare.problems == "common")
    if dropped:
        reason = f"{plural(dropped, 'problem')} that not all runs have {'was' if dropped == 1 else 'were'} left out"
        standing = replace(standing, reasons=(*standing.reasons, reason))
    require_possible_values(runs, measure)
    results = _results(runs, measure, comparing)
    missing = _missing(runs, labels, compare, comparing)
    notes += [*_answer_notes(runs, measure), *_number_notes(runs, measure)]
    _require_values(results, measure)
    if comparing != "pairs" and compare.equivalence_margin is not None:
        notes.append("equivalence_margin is not used: only runs that are paired by seed can be typically alike.")
    compared = sorted([*results, *missing], key=lambda run: run.pair)
    comparison = compare_runs(
        compared,
        labels,
        metric=measure,
        baseline=first,
        margin=compare.equivalence_margin if comparing == "pairs" else None,
        warnings=notes,
        standing=standing,
        design=DESIGNS[comparing],
    )
    files = len({path for table in chosen for path in table.files})
    comparison = replace(
        comparison,
        source=f"{' and '.join(tools) or 'files'} ({plural(files, 'file')})",
        replicate="none" if comparing == "models" else "training",
        pairing="seed" if comparing == "pairs" else "none",
        read=_read(runs, [run.run_id for run in missing], len(labels), tools),
    )
    return TableComparison(comparison, compared, measure)


def _chosen(tables: Sequence[RunTable], labels: Sequence[str], compare: Compare, notes: list[str]) -> list[RunTable]:
    """Return the tables of the chosen conditions and seeds. Runs without a known seed are kept."""
    names = sorted({table.condition for table in tables})
    chosen = [table for table in tables if table.condition in labels]
    if not chosen:
        others = f" of {listed(labels, NAMED)}: there are those of {listed(names, NAMED)}" if names else ""
        raise UsageError(f"there are no results{others}")
    if others := [label for label in names if label not in labels]:
        notes.append(f"Not among the conditions, and left out: {listed(others, NAMED)}.")
    seeds = compare.seeds
    if seeds is not None:
        if others := [table.name for table in chosen if table.seed is not None and table.seed not in seeds]:
            notes.append(f"Not among the seeds, and left out: {listed(others, NAMED)}.")
        chosen = [table for table in chosen if table.seed is None or table.seed in seeds]
    if len(labels) == 1:
        notes.append(f"{labels[0]} is the only condition: there is nothing to compare it with.")
    return chosen


def _comparing(
    tables: Sequence[RunTable], labels: Sequence[str], baseline: str, compare: Compare, notes: list[str]
) -> Comparing:
    """Return what is compared. It depends on which runs there are, never on their results. Raises UsageError if two
    runs have one condition and seed."""
    if compare.replicate == "none":
        return "models"
    if len(labels) == 1:
        return "pairs"
    seeds = [[table.seed for table in tables if table.condition == label] for label in labels]
    if all(len(of_label) <= 1 for of_label in seeds) and len(compare.seeds or ()) <= 1:
        notes.append("There is one run for each condition: only these models can be compared, by problem.")
        return "models"
    if compare.pairing == "none":
        return "runs"
    if unknown := [table.name for table in tables if table.seed is None]:
        notes.append(f"The seed is not known of {listed(unknown, NAMED)}: runs are not paired.")
        return "runs"
    by_seed: dict[tuple[str, int | None], RunTable] = {}
    for table in tables:
        other = by_seed.setdefault((table.condition, table.seed), table)
        if other is not table:
            places = " and ".join(f"{each.name} ({listed([str(p) for p in each.files], 1)})" for each in (other, table))
            raise UsageError(f"{table.condition} has two runs with the seed {table.seed}: {places}. Leave one out")
    of_label = {label: set(of_label) for label, of_label in zip(labels, seeds, strict=True)}
    pairs = [len(of_label[label] & of_label[baseline]) for label in labels if label != baseline]
    if compare.seeds is None and not any(pairs):
        notes.append("No other condition has a seed in common with the baseline: runs are not paired.")
        return "runs"
    most = min(len(of_label[label]) for label in labels)
    if compare.seeds is None and max(pairs) < FEWEST_PAIRS <= most:
        notes.append('pairing = "none" compares whole runs instead of pairs: declare it before the results.')
    return "pairs"


def _runs(
    tables: Sequence[RunTable], column: Column, measure: Measure, compare: Compare, notes: list[str]
) -> list[TableRun]:
    """Return the runs with their states. With ``replicate = "none"``, the answers of all runs of a condition are those
    of one model."""
    runs = [TableRun.of(table, column, compare.steps) for table in tables]
    if compare.replicate == "none":
        groups = [[run for run in runs if run.label == label] for label in dict.fromkeys(run.label for run in runs)]
        for group in groups:
            _check_ends(group, measure, compare, [])
            if len(group) > 1:
                notes.append(f"The {len(group)} runs of {group[0].label} count as samples of one model.")
        runs = [TableRun.merged(group) for group in groups]
        ends = {run.last_step for run in runs if run.is_done}
        if len(ends) > 1:
            notes.append(f"The models are from steps {listed([str(step) for step in sorted(ends)], NAMED)}.")
    else:
        _check_ends(runs, measure, compare, notes)
    if longer := [run.name for run in runs if run.has_later]:
        notes.append(f"Evaluations after {compare.steps} steps are left out: of {listed(longer, NAMED)}.")
    return runs


def _check_ends(runs: Sequence[TableRun], measure: Measure, compare: Compare, notes: list[str]) -> None:
    """Raise UsageError if finished runs end at different steps, unless the step is declared or curves are compared."""
    finished = sorted((run for run in runs if run.is_done and run.steps), key=lambda run: run.last_step)
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
            f"{short.name} ends after {short.last_step} steps and {long.name} after {long.last_step}: in [compare], "
            f"type steps = {long.last_step} (--steps {long.last_step}; runs that end earlier are unfinished), or "
            f'metric = "auc:{measure.key}" (--metric auc:{measure.key}, the area under the curve)'
        )


def _results(runs: Sequence[TableRun], measure: Measure, comparing: Comparing) -> list[RunResult]:
    decimals = decimals_of(runs, is_share=measure.is_share)
    results = []
    for label in dict.fromkeys(run.label for run in runs):
        for number, run in enumerate((run for run in runs if run.label == label), 1):
            seed = number if run.table.seed is None else run.table.seed
            pair = seed if comparing == "pairs" else number
            results.append(run.result(measure, seed, pair, decimals))
    return results


def _missing(
    runs: Sequence[TableRun], labels: Sequence[str], compare: Compare, comparing: Comparing
) -> list[RunResult]:
    """Return the runs that are declared, or that other conditions have, and that are not there."""
    seeds = {label: [run.table.seed for run in runs if run.label == label] for label in labels}
    if comparing == "models":
        absent = [(label, 0, label) for label in labels if not seeds[label]]
    elif any(seed is None for of_label in seeds.values() for seed in of_label):
        planned = range(1, len(compare.seeds or ()) + 1)
        absent = [(label, n, f"{label} run {n}") for label in labels for n in planned if n > len(seeds[label])]
    else:
        present = sorted({seed for of_label in seeds.values() for seed in of_label if seed is not None})
        planned = compare.seeds or (present if comparing == "pairs" else [])
        absent = [(label, n, f"{label} seed {n}") for label in labels for n in planned if n not in seeds[label]]
    return [RunResult(name, label, seed, "missing", None, Path(), (0, seed)) for label, seed, name in absent]


def _require_values(results: Sequence[RunResult], measure: Measure) -> None:
    finished = [result for result in results if result.done]
    if measure.summary == "final" or not finished or any(run.value(measure) is not None for run in finished):
        return
    needs = "two evaluations" if measure.summary == "auc" else "three evaluations after the start"
    raise UsageError(
        f"no run has {needs}, which {measure.summary} needs: in [compare], type "
        f'metric = "{measure.key}" (--metric {measure.key})'
    )


def _answer_notes(runs: Sequence[TableRun], measure: Measure) -> list[str]:
    """Return warnings about answers without a grade, and unequal numbers of answers to a problem."""
    notes = []
    ungraded = {run.name: run.ungraded for run in runs if run.is_done and run.ungraded}
    if ungraded:
        fate = "count as wrong" if measure.is_share else "are left out of the means"
        names = listed([f"{name} ({number})" for name, number in ungraded.items()], NAMED)
        notes.append(f"Answers without a grade {fate}: {names}.")
    sizes = _sizes(runs)
    if len(sizes) > 1:
        least, most = min(sizes), max(sizes)
        notes.append(f"Problems have {least} to {most} answers: the score of a problem is the mean of its answers.")
    bare = [run.name for run in runs if run.is_done and not run.answers]
    if sizes and bare:
        notes.append(f"No answers to problems, so that these cannot be checked to be the same: {listed(bare, NAMED)}.")
    return notes


def _number_notes(runs: Sequence[TableRun], measure: Measure) -> list[str]:
    """Return a warning about numbers of the tool that differ from those of its answers."""
    notes = []
    for run in (run for run in runs if run.is_done):
        values = run.values(measure)
        for step in run.answers:
            number, value = run.numbers.get(step), values[step]
            if number is not None and value is not None and abs(number - value) > SAME:
                notes.append(f"{run.name}, step {step}: {number:.6g}, its answers say {value:.6g}")
    if not notes:
        return []
    return [f"The tool's numbers are not those of its answers, which count (often failures left out): {notes[0]}"
            f"{f' and {len(notes) - 1} more' if len(notes) > 1 else ''}."]  # fmt: skip


def _sizes(runs: Sequence[TableRun]) -> set[int]:
    """Return the numbers of answers that problems have."""
    grades = [grades for run in runs if run.is_done for grades in run.answers.values()]
    return {len(of_problem) for of_step in grades for of_problem in of_step.values()}


def _read(runs: Sequence[TableRun], missing: Sequence[str], conditions: int, tools: Sequence[str]) -> list[str]:
    tool = f" of {' and '.join(tools)}" if tools else ""
    parts = [plural(conditions, "condition")]
    problems = max((len(grades) for run in runs if run.is_done for grades in run.answers.values()), default=0)
    if problems:
        sizes = _sizes(runs)
        each = plural(max(sizes), "answer") if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} answers"
        parts.append(f"{plural(problems, 'problem')} × {each}")
    steps = sorted({step for run in runs for step in run.steps})
    if len(steps) > 1:
        parts.append(f"steps {listed([str(step) for step in steps], NAMED)}")
    equal = "; problem sets equal" if problems and all(run.answers for run in runs if run.is_done) else ""
    lines = [f"read {plural(len(runs), 'run')}{tool}: {', '.join(parts)}{equal}"]
    return [*lines, f"missing: {listed(missing, NAMED)}"] if missing else lines
