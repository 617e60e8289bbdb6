"""What a campaign declared before it began, kept so that nothing seen later can bend it.

A verdict is given of what was declared: this metric, test, margin and rule of looks, these seeds and conditions, this
baseline, this many steps. ``freeze`` keeps them in the manifest when the first run begins; a changed file changes none
of them afterwards. What is looked at otherwise has a standing of its own:

    declared      all runs that were declared have ended: the verdict holds
    interim       some have not: differences and intervals are shown, no p and no verdict (looking after every pair
                  and stopping at the first p below 0.05 calls equal conditions different far more often than 1 in 20)
    exploratory   something was chosen after results were there (seeds or conditions added, other steps, another metric
                  or baseline, campaigns put together): p is shown as if it had been declared, and no verdict

Under ``[campaign] sequential`` a look before the end is part of the plan: what it has decided is decided. With
``"always_valid"`` seeds may be added at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.config.campaign import condition_name
from retrain.errors import listed, plural
from retrain.verdicts.results import Measure, RunResult

DECLARED, INTERIM, EXPLORATORY = "declared", "interim", "exploratory"
P_VALUES = ("p_value", "p_holm", "p_exact", "equivalence_p", "equivalence_p_holm")
"""Of a compared condition: what an interim look and too few pairs do not give."""
ENDED = ("done", "failed", "stopped")


@dataclass(frozen=True)
class Standing:
    """Whether verdicts may be given. ``reasons`` make every finding exploratory, ``of_condition`` single ones;
    ``seeds`` are the declared ones, None where nothing says which."""

    reasons: tuple[str, ...] = ()
    of_condition: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: frozenset[int] | None = None

    def judge(self, condition: dict[str, Any], runs: Sequence[RunResult], baseline: str) -> None:
        """Write ``standing``, ``standing_reasons`` and the number of declared ``pairs_planned`` into a compared
        condition, and take the p-values out of an interim one."""
        own = [run for run in runs if run.label in (condition["label"], baseline) and self._counts(run)]
        open_seeds = {run.seed for run in own if run.state not in ENDED}
        reasons = (*self.reasons, *self.of_condition.get(condition["label"], ()), *self.of_condition.get(baseline, ()))
        decided = bool((condition.get("sequential") or {}).get("stopped_after"))
        standing = EXPLORATORY if reasons else INTERIM if open_seeds and not decided else DECLARED
        condition["standing"], condition["standing_reasons"] = standing, list(dict.fromkeys(reasons))
        condition["pairs_planned"] = len({run.seed for run in own})
        if standing == INTERIM:
            condition |= dict.fromkeys(P_VALUES)

    def _counts(self, run: RunResult) -> bool:
        return self.seeds is None or run.seed in self.seeds


def standing(
    declared: Mapping[str, Any] | None, runs: Sequence[RunResult], measure: Measure, asked: Measure, baseline: str
) -> Standing:
    """The standing of one campaign's runs.

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
    if added and first.get("sequential") != "always_valid":
        reasons.append(f"{plural(len(added), 'seed')} {'was' if len(added) == 1 else 'were'} added: "
                       f"{listed([str(seed) for seed in added], 8)}")  # fmt: skip
    return Standing(tuple(reasons), _of_conditions(first, runs), None if seeds is None else frozenset(seeds))


def pooled(count: int) -> Standing:
    return Standing((f"the runs come from {count} directories, and nothing declares them together",))


def _of_conditions(first: Mapping[str, Any], runs: Sequence[RunResult]) -> dict[str, tuple[str, ...]]:
    """What departs from the declaration in single conditions, by label."""
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
