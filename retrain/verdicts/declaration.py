"""Keep what a campaign declared before it began, so that later changes cannot alter its verdict.

A verdict concerns the declared metric, margin, interim analysis, seeds, conditions, baseline and numbers of steps. The
manifest stores them when the first run begins; a changed file does not change them. Comparisons have a status:

    declared      no declared run is missing: the verdict holds
    interim       some are missing (to come, failed, lost): differences and intervals are shown, no p and no verdict
                  (looking after every pair and stopping at the first p below 0.05 calls equal conditions different far
                  more often than 1 in 20)
    exploratory   something is not as declared (protocol deviations: seeds or conditions added, other steps, settings or
                  problems, edited records; another metric or baseline, campaigns put together): p is shown as if it had
                  been declared, and no verdict

The interim analysis is part of the declaration: its decisions are final.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.records.schema.base import Values
from retrain.records.schema.campaign import CampaignDeclaration, InterimAnalysis
from retrain.verdicts.results import Measure, RunResult

DECLARED, INTERIM, EXPLORATORY = "declared", "interim", "exploratory"
DEVIATION = "protocol deviation"
COMPLETE = ("done", "stopped")  # States of runs that do not count as missing
# Keys of [campaign] that chose a rule in earlier versions. A declaration with one of them was made under such a rule
EARLIER_RULE_KEYS = ("test", "futility", "race", "prior_spread", "prior_freedom")


@dataclass(frozen=True)
class DeclaredRule:
    has_interim_analysis: bool = False
    interim: InterimAnalysis | None = None
    # Settings of an earlier version's rule under which the campaign was declared, as text; "" for the present rule
    earlier: str = ""
    # Equivalence margin; None if none was declared for the metric that is compared
    margin: float | None = None

    @classmethod
    def of(cls, declared: Values, interim: Values | None) -> "DeclaredRule":
        has_interim_analysis = declared.get("sequential", "off") != "off"
        record = InterimAnalysis.from_row(interim) if interim and has_interim_analysis else None
        return cls(has_interim_analysis, record, _earlier_rule(declared))


def _earlier_rule(declared: Values) -> str:
    if not set(EARLIER_RULE_KEYS) & set(declared):
        return ""
    settings = [f'test = "{declared.get("test", "exact")}"', f'sequential = "{declared.get("sequential", "off")}"']
    optional = [key for key in ("futility", "race", "prior_spread") if declared.get(key)]
    settings += [f"{key} = {declared[key]}".lower() for key in optional]
    return f"{', '.join(settings[:-1])} and {settings[-1]}"


@dataclass(frozen=True)
class ConditionStanding:
    name: str
    reasons: list[str]
    pairs_planned: int


@dataclass(frozen=True)
class Standing:
    """Status of a campaign's verdicts. ``reasons`` make every comparison exploratory, ``of_condition`` single
    conditions. ``seeds`` are the declared seeds, None if unknown; ``added`` are conditions that were not declared."""

    reasons: tuple[str, ...] = ()
    of_condition: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: frozenset[int] | None = None
    added: Collection[str] = ()

    def of(self, label: str, baseline: str, runs: Sequence[RunResult], analysed: Collection[int]) -> ConditionStanding:
        """Return the status of the condition ``label``; ``analysed`` are the seeds of its analysis."""
        declared = [run for run in runs if self.seeds is None or run.seed in self.seeds]
        both = [run for run in declared if run.label in (label, baseline)]
        is_incomplete = any(run.state not in COMPLETE for run in both if run.seed in analysed)
        reasons = (*self.reasons, *self.of_condition.get(label, ()), *self.of_condition.get(baseline, ()))
        name = EXPLORATORY if reasons else INTERIM if is_incomplete else DECLARED
        return ConditionStanding(name, list(dict.fromkeys(reasons)), len({run.seed for run in both}))


def standing(
    declared: CampaignDeclaration,
    runs: Sequence[RunResult],
    measure: Measure,
    compared: Measure,
    baseline: str,
    deviations: Sequence[str],
) -> Standing:
    """Return the status of one campaign's runs.

    Facts that an earlier version did not declare are not checked. ``measure`` is the declared measure, ``compared`` the
    measure of this comparison; ``deviations``: clauses about records that differ from the declaration.
    """
    reasons = []
    if compared != measure:
        reasons.append(f"{compared.name} was not declared as deciding ({measure.name} was)")
    if declared.baseline not in ("", baseline):
        reasons.append(f"the baseline declared was {declared.baseline}")
    added = sorted({run.seed for run in runs} - set(declared.seeds)) if declared.seeds else []
    if added:
        clause = f"{plural(len(added), 'seed')} {'was' if len(added) == 1 else 'were'} added"
        reasons.append(f"{DEVIATION}: {clause}: {listed([str(seed) for seed in added], 8)}")
    reasons += [f"{DEVIATION}: {clause}" for clause in deviations]
    labels = {run.label for run in runs}
    return Standing(
        tuple(reasons),
        _of_conditions(declared, runs),
        frozenset(declared.seeds) or None,
        labels - set(declared.conditions or labels),
    )


def pooled(count: int, deviations: Sequence[str]) -> Standing:
    undeclared = f"the runs come from {count} directories, and nothing declares them together"
    return Standing((undeclared, *(f"{DEVIATION}: {clause}" for clause in deviations)))


def _of_conditions(declared: CampaignDeclaration, runs: Sequence[RunResult]) -> dict[str, tuple[str, ...]]:
    clauses: dict[str, str] = {}
    for label in dict.fromkeys(run.label for run in runs):
        if declared.conditions and label not in declared.conditions:
            clauses[label] = "was added"
            continue
        planned = declared.max_steps.get(label)
        trained = {run.config.get("training", {}).get("max_steps") for run in runs if run.label == label} - {None}
        if planned is not None and trained - {planned}:
            numbers = listed([str(steps) for steps in sorted(trained)], 4)
            clauses[label] = f"was declared with {planned} steps and planned with {numbers}"
    return {label: (f"{DEVIATION}: {condition_name(label)} {clause}",) for label, clause in clauses.items()}
