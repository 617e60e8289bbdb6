"""Choose the deciding metric in the results of other tools, and find its unit and its direction."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

from retrain.config.comparing import Compare, Unit
from retrain.errors import UsageError, listed
from retrain.records.foreign.table import HELDOUT_SET, MetricFacts, RunTable
from retrain.verdicts.results import SUMMARIES, Measure

# (set, metric)
Column = tuple[str, str]
# Metrics whose names are unambiguous, by the last part of the name
_ACCURACY = r"(acc|acc_norm|accuracy|correct|correct_rate|exact_match|solve_rate|success_rate|(pass|maj)(@|_at_)\d+)"
KNOWN = (
    (re.compile(_ACCURACY), MetricFacts(higher_is_better=True, unit="share")),
    (re.compile(r"reward|reward_mean|mean_reward|score|avg_score"), MetricFacts(higher_is_better=True)),
    (re.compile(r"loss|perplexity"), MetricFacts(higher_is_better=False, unit="number")),
)
NAMED_METRICS = 8


def table_measure(tables: Sequence[RunTable], compare: Compare) -> tuple[Measure, Column]:
    """Return the measure that ``compare`` names, and the set and metric of its values. Raises UsageError with the line
    to type if metric, unit or direction are not certain."""
    summary, name = _parse(compare.metric)
    column = _column(name, tables, "" if summary == "final" else f"{summary}:")
    key = column[1] if column[0] == HELDOUT_SET else "/".join(column)
    facts = metric_facts(column[1], tables)
    unit = compare.unit or facts.unit
    merit = facts.higher_is_better if compare.higher_is_better is None else compare.higher_is_better
    lines = [] if unit else ['unit = "share" (values from 0 to 1) or "number" (--unit share or number)']
    if merit is None and compare.unit is None:
        lines.append("higher_is_better = true or false (--higher-is-better or --lower-is-better)")
    if lines:
        missing = "unit" if merit is not None else "direction" if unit else "unit and direction"
        raise UsageError(
            f"neither the files nor retrain know the {missing} of {key}: in [compare], type {' and '.join(lines)}"
        )
    return Measure(summary, key, column[0], unit, merit), column


def _parse(text: str | None) -> tuple[str, str | None]:
    """Return summary and name of the metric; None: the only one."""
    summary, colon, name = (text or "final").partition(":")
    if summary not in SUMMARIES:
        return "final", text
    return summary, name if colon and name else None


def _column(name: str | None, tables: Sequence[RunTable], prefix: str) -> Column:
    columns = sorted({column for table in tables for column in (*table.numbers, *table.answers)})
    matching = [column for column in columns if name is None or name in (column[1], "/".join(column))]
    if len(matching) == 1:
        return matching[0]
    names = [metric if held_out == HELDOUT_SET else f"{held_out}/{metric}" for held_out, metric in matching or columns]
    if not columns:
        raise UsageError("the results have no metric: their files have no number and no graded answer")
    if matching:
        fix = f'metric = "{prefix}{names[0]}" (--metric {prefix}{names[0]})'
        what = f"the metric {name} is there for {len(names)} sets" if name else f"the results have {len(names)} metrics"
        raise UsageError(f"{what}: {listed(names, NAMED_METRICS)}. In [compare], type for instance {fix}")
    near = get_close_matches(name or "", names, n=3, cutoff=0.4) or names
    raise UsageError(f"no run has the metric {name}: the results have {listed(near, NAMED_METRICS)}")


def metric_facts(metric: str, tables: Sequence[RunTable]) -> MetricFacts:
    """Return what files or names say about a metric; None where files contradict each other."""
    facts = [
        fact
        for table in tables
        for name, fact in table.facts.items()
        if name == metric or (name.endswith("*") and metric.startswith(name[:-1]))
    ]
    merits = {fact.higher_is_better for fact in facts if fact.higher_is_better is not None}
    units: set[Unit] = {fact.unit for fact in facts if fact.unit is not None}
    last = re.sub(r"^eval_", "", metric.split(",")[0].split("/")[-1])
    by_name = next((fact for pattern, fact in KNOWN if pattern.fullmatch(last)), MetricFacts())
    return MetricFacts(
        by_name.higher_is_better if not merits else merits.pop() if len(merits) == 1 else None,
        by_name.unit if not units else units.pop() if len(units) == 1 else None,
    )
