"""Command for a follow-up campaign with fresh seeds, printed after "no difference shown"."""

from collections.abc import Sequence

import numpy as np

from retrain.records.schema.comparison import ConditionComparison
from retrain.verdicts.planning import PLANNED_SEEDS, power, seeds_needed
from retrain.verdicts.results import Measure
from retrain.verdicts.words import NOT_SHOWN, amount

MOST_FOLLOW_UP_SEEDS = 20
"""Seeds of a follow-up at most: beyond, a difference is too small for the spread of these runs."""


def follow_up(
    others: Sequence[ConditionComparison], seeds: Sequence[int], margin: float | None, measure: Measure
) -> str:
    """Return the command of a follow-up with its power, "" where every comparison has an answer.

    The same file is declared anew with seeds that no run has had: nothing is pooled.
    """
    unanswered = [condition for condition in others if condition.verdict == NOT_SHOWN]
    if not unanswered:
        return ""
    spread = pair_spread([condition.differences for condition in unanswered])
    effect = 1.5 if margin is None or not spread else margin / spread
    needed = seeds_needed(len(others), effect)
    count = min(max(PLANNED_SEEDS, needed or MOST_FOLLOW_UP_SEEDS), MOST_FOLLOW_UP_SEEDS)
    fresh = list(range(max(seeds) + 1, max(seeds) + 1 + count))
    share = f"{100 * power(count, len(others), effect):.0f} %"
    what = f"a difference of {amount(margin, measure)}" if margin and spread else "a difference of 1.5 pair spreads"
    if margin is None and spread:
        what += f" ({amount(1.5 * spread, measure)})"
    listed = ",".join(map(str, fresh))
    return (
        f"To follow up, declare a new campaign with fresh seeds: retrain train FILE --set campaign.seeds=[{listed}] "
        f"--out NEW_DIR. Its {count} seeds find {what} with {share} probability."
    )


def pair_spread(differences: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of paired differences within conditions; None without two pairs."""
    groups = [np.asarray(values) for values in differences if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return None
    return float(np.sqrt(sum(((values - values.mean()) ** 2).sum() for values in groups) / freedom))
