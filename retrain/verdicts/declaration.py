"""Keeps what a campaign declared before it began, so that later changes cannot alter its verdict.

A verdict is given of what was declared: this metric, margin and interim analysis, these seeds and conditions, this
baseline, this many steps. ``freeze`` keeps them in the manifest when the first run begins; a changed file changes none
of them afterwards. What is looked at otherwise has a standing of its own:

    declared      all runs that were declared are there: the verdict holds
    interim       some are not (to come, failed, lost): differences and intervals are shown, no p and no verdict
                  (looking after every pair and stopping at the first p below 0.05 calls equal conditions different far
                  more often than 1 in 20)
    exploratory   something is not as declared (protocol deviations: seeds or conditions added, other steps, settings or
                  problems, edited records; another metric or baseline, campaigns put together): p is shown as if it had
                  been declared, and no verdict

The interim analysis is part of the plan: what it has decided is decided.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.records.schema.campaign import InterimAnalysis
from retrain.verdicts.results import Measure, RunResult

DECLARED, INTERIM, EXPLORATORY = "declared", "interim", "exploratory"
DEVIATION = "protocol deviation"
COMPLETE = ("done", "stopped")  # States of runs from which nothing is missing
EARLIER_RULE_KEYS = ("test", "futility", "race", "prior_spread", "prior_freedom")
"""Keys of [campaign] that chose a rule in earlier versions; a declaration that has them was made under such a rule."""


@dataclass(frozen=True)
class DeclaredRule:
    """Declared rule of a campaign and the record of its interim analysis."""

    has_interim_analysis: bool = False
    interim: InterimAnalysis | None = None
    earlier: str = ""
    """The rule of an earlier version under which it was declared, in words."""

    @classmethod
    def of(cls, declared: Mapping[str, Any], interim: Mapping[str, Any] | None) -> "DeclaredRule":
        has_interim_analysis = declared.get("sequential", "off") != "off"
        record = InterimAnalysis.from_row(interim) if interim and has_interim_analysis else None
        return cls(has_interim_analysis, record, _earlier_rule(declared))


def _earlier_rule(declared: Mapping[str, Any]) -> str:
    if not set(EARLIER_RULE_KEYS) & set(declared):
        return ""
    words = [f'test = "{declared.get("test", "exact")}"', f'sequential = "{declared.get("sequential", "off")}"']
    words += [f"{key} = {declared[key]}".lower() for key in ("futility", "race", "prior_spread") if declared.get(key)]
    return f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True)
class ConditionStanding:
    """Status of one condition (declared, interim, exploratory), with reasons and the number of declared pairs."""

    name: str
    reasons: list[str]
    pairs_planned: int


@dataclass(frozen=True)
class Standing:
    """Status of a campaign's verdicts. ``reasons`` make every comparison exploratory, ``of_condition`` single ones.
    ``seeds`` are the declared ones, None where unknown; ``added`` are conditions that were not declared."""

    reasons: tuple[str, ...] = ()
    of_condition: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: frozenset[int] | None = None
    added: Collection[str] = ()

    def of(self, label: str, baseline: str, runs: Sequence[RunResult], analysed: Collection[int]) -> ConditionStanding:
        """Return the standing of a compared condition whose analysis is of these seeds."""
        both = [run for run in runs if run.label in (label, baseline) and self._counts(run)]
        is_incomplete = any(run.state not in COMPLETE for run in both if run.seed in analysed)
        reasons = (*self.reasons, *self.of_condition.get(label, ()), *self.of_condition.get(baseline, ()))
        name = EXPLORATORY if reasons else INTERIM if is_incomplete else DECLARED
        return ConditionStanding(name, list(dict.fromkeys(reasons)), len({run.seed for run in both}))

    def _counts(self, run: RunResult) -> bool:
        return self.seeds is None or run.seed in self.seeds


def standing(
    first: Mapping[str, Any],
    runs: Sequence[RunResult],
    measure: Measure,
    asked: Measure,
    baseline: str,
    deviations: Sequence[str],
) -> Standing:
    """Return the status of one campaign's runs.

    ``first`` is what its manifest declared, {} in directories from before there was such a record: what they planned
    then counts as declared. ``measure`` is the declared one and ``asked`` the one looked at; ``deviations`` are those
    of the records.
    """
    reasons = []
    if asked != measure:
        reasons.append(f"{asked.name} was not declared as deciding ({measure.name} was)")
    if first.get("baseline", baseline) != baseline:
        reasons.append(f"the baseline declared was {first['baseline']}")
    seeds = first.get("seeds")
    added = sorted({run.seed for run in runs} - set(seeds or [run.seed for run in runs]))
    if added:
        words = f"{plural(len(added), 'seed')} {'was' if len(added) == 1 else 'were'} added"
        reasons.append(f"{DEVIATION}: {words}: {listed([str(seed) for seed in added], 8)}")
    reasons += [f"{DEVIATION}: {clause}" for clause in deviations]
    labels = {run.label for run in runs}
    return Standing(
        tuple(reasons),
        _of_conditions(first, runs),
        None if seeds is None else frozenset(seeds),
        labels - set(first.get("conditions", labels)),
    )


def pooled(count: int, deviations: Sequence[str]) -> Standing:
    together = f"the runs come from {count} directories, and nothing declares them together"
    return Standing((together, *(f"{DEVIATION}: {clause}" for clause in deviations)))


def _of_conditions(first: Mapping[str, Any], runs: Sequence[RunResult]) -> dict[str, tuple[str, ...]]:
    """Return protocol deviations of single conditions, by label."""
    found: dict[str, tuple[str, ...]] = {}
    for label in dict.fromkeys(run.label for run in runs):
        if label not in first.get("conditions", [label]):
            found[label] = (f"{DEVIATION}: {condition_name(label)} was added",)
            continue
        planned = first.get("max_steps", {}).get(label)
        trained = {run.config.get("training", {}).get("max_steps") for run in runs if run.label == label} - {None}
        if planned is not None and trained - {planned}:
            numbers = listed([str(steps) for steps in sorted(trained)], 4)
            words = f"{condition_name(label)} was declared with {planned} steps and planned with {numbers}"
            found[label] = (f"{DEVIATION}: {words}",)
    return found
