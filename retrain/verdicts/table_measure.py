"""The deciding metric in the results of other tools, with its unit and its direction."""

import re
from collections.abc import Sequence
from typing import TypeVar

from retrain.config.comparing import Compare
from retrain.errors import UsageError
from retrain.records.foreign.table import HELDOUT_SET, MetricFacts, RunTable
from retrain.verdicts.results import Measure

T = TypeVar("T")
# (set, metric)
Column = tuple[str, str]
# Metrics whose names are unambiguous, by the last part of the name
_ACCURACY = r"(acc|acc_norm|accuracy|correct|correct_rate|exact_match|solve_rate|success_rate|(pass|maj)(@|_at_)\d+)"
KNOWN = (
    (re.compile(_ACCURACY), MetricFacts(higher_is_better=True, unit="share")),
    (re.compile(r"reward|reward_mean|mean_reward|score|avg_score"), MetricFacts(higher_is_better=True)),
    (re.compile(r"loss|perplexity"), MetricFacts(higher_is_better=False, unit="number")),
)


def table_measure(tables: Sequence[RunTable], compare: Compare) -> tuple[Measure, Column]:
    """Return the measure that ``compare`` names, and the set and metric of its values: the only ones in the tables.
    Raises UsageError with the line to type if unit or direction are not certain."""
    summary, name = compare.measure
    column = next((column for table in tables for column in (*table.numbers, *table.answers)), None)
    if column is None:
        raise UsageError(f"the runs have no value of {name or 'a metric'}: their files have no number and no answer")
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


def metric_facts(metric: str, tables: Sequence[RunTable]) -> MetricFacts:
    """Return what files or names say about a metric; None where files contradict each other."""
    facts = [
        fact
        for table in tables
        for name, fact in table.facts.items()
        if name == metric or (name.endswith("*") and metric.startswith(name[:-1]))
    ]
    last = re.sub(r"^eval_", "", metric.split(",")[0].split("/")[-1])
    by_name = next((fact for pattern, fact in KNOWN if pattern.fullmatch(last)), MetricFacts())
    return MetricFacts(
        _agreed([fact.higher_is_better for fact in facts], by_name.higher_is_better),
        _agreed([fact.unit for fact in facts], by_name.unit),
    )


def _agreed(stated: Sequence[T | None], default: T | None) -> T | None:
    """Return what is stated; None if statements contradict each other, ``default`` if there is none."""
    values = set(stated) - {None}
    return default if not values else values.pop() if len(values) == 1 else None
