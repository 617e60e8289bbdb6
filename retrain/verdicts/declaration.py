"""What a campaign declared before it began, kept so that nothing seen later can bend it.

A verdict is given of what was declared: this metric, margin and interim analysis, these seeds and conditions, this
baseline, this many steps. ``freeze`` keeps them in the manifest when the first run begins; a changed file changes none
of them afterwards. What is looked at otherwise has a standing of its own:

    declared      all runs that were declared have ended: the verdict holds
    interim       some have not: differences and intervals are shown, no p and no verdict (looking after every pair
                  and stopping at the first p below 0.05 calls equal conditions different far more often than 1 in 20)
    exploratory   something was chosen after results were there (seeds or conditions added, other steps, another metric
                  or baseline, campaigns put together): p is shown as if it had been declared, and no verdict

The interim analysis is part of the plan: what it has decided is decided.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.records.schema.campaign import ENDED, InterimAnalysis
from retrain.verdicts.results import Measure, RunResult

DECLARED, INTERIM, EXPLORATORY = "declared", "interim", "exploratory"
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
    """Whether verdicts may be given. ``reasons`` make every finding exploratory, ``of_condition`` single ones;
    ``seeds`` are the declared ones, None where nothing says which; ``added`` are conditions that were not declared."""

    reasons: tuple[str, ...] = ()
    of_condition: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: frozenset[int] | None = None
    added: Collection[str] = ()

    def of(self, label: str, baseline: str, runs: Sequence[RunResult], *, is_decided: bool) -> ConditionStanding:
        """Return the standing of a compared condition; ``is_decided``: by the interim analysis."""
        both = [run for run in runs if run.label in (label, baseline) and self._counts(run)]
        open_seeds = {run.seed for run in both if run.state not in ENDED}
        reasons = (*self.reasons, *self.of_condition.get(label, ()), *self.of_condition.get(baseline, ()))
        name = EXPLORATORY if reasons else INTERIM if open_seeds and not is_decided else DECLARED
        return ConditionStanding(name, list(dict.fromkeys(reasons)), len({run.seed for run in both}))

    def _counts(self, run: RunResult) -> bool:
        return self.seeds is None or run.seed in self.seeds


def standing(
    declared: Mapping[str, Any] | None, runs: Sequence[RunResult], measure: Measure, asked: Measure, baseline: str
) -> Standing:
    """Return the status of one campaign's runs.

    ``declared`` is what its manifest kept, None in directories from before there was such a record: what they planned
    then counts as declared. ``measure`` is the declared one and ``asked`` the one looked at.
    """
    first = declared or {}
    reasons = []
    if asked != measure:
        reasons.append(f"{asked.name} was not declared as deciding ({measure.name} was)")
    if first.get("baseline", baseline) != baseline:
        reasons.append(f"the baseline declared was {first['baseline']}")
    seeds = first.get("seeds")
    added = sorted({run.seed for run in runs} - set(seeds or [run.seed for run in runs]))
    if added:
        reasons.append(f"{plural(len(added), 'seed')} {'was' if len(added) == 1 else 'were'} added: "
                       f"{listed([str(seed) for seed in added], 8)}")  # fmt: skip
    labels = {run.label for run in runs}
    return Standing(
        tuple(reasons),
        _of_conditions(first, runs),
        None if seeds is None else frozenset(seeds),
        labels - set(first.get("conditions", labels)),
    )


def pooled(count: int) -> Standing:
    return Standing((f"the runs come from {count} directories, and nothing declares them together",))


def _of_conditions(first: Mapping[str, Any], runs: Sequence[RunResult]) -> dict[str, tuple[str, ...]]:
    """Return protocol deviations of single conditions, by label."""
    found: dict[str, tuple[str, ...]] = {}
    for label in dict.fromkeys(run.label for run in runs):
        if label not in first.get("conditions", [label]):
            found[label] = (f"{condition_name(label)} was added",)
            continue
        planned = first.get("max_steps", {}).get(label)
        trained = {run.config.get("training", {}).get("max_steps") for run in runs if run.label == label} - {None}
        if planned is not None and trained - {planned}:
            numbers = listed([str(steps) for steps in sorted(trained)], 4)
            found[label] = (f"{condition_name(label)} was declared with {planned} steps and planned with {numbers}",)
    return found
