"""Power of the rule by number of seeds and conditions, and the command for a follow-up campaign with fresh seeds."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from retrain.records.reader import read_plan_file
from retrain.records.schema.comparison import Comparison
from retrain.records.schema.layout import PLAN
from retrain.verdicts.results import Measure
from retrain.verdicts.wording import NOT_SHOWN, amount

EFFECTS = (1.0, 1.5, 2.0, 3.0)  # In standard deviations of a paired difference (pair spreads)
FAMILIES = (1, 2, 3, 5, 8, 11, 16)
_SIMULATED = {
    6: "36/66/87/99 20/45/68/91 16/36/57/84 11/26/45/75 7/18/33/64 4/12/26/56 3/11/22/50",
    7: "58/88/98/100 41/76/94/100 32/66/89/100 24/53/79/98 17/41/67/95 13/35/58/92 9/28/52/87",
    8: "66/94/99/100 49/85/98/100 40/78/96/100 31/68/91/100 24/59/86/100 18/48/78/99 14/41/71/98",
    9: "73/97/100/100 59/93/100/100 49/87/98/100 39/81/97/100 30/71/94/100 28/64/91/100 21/56/85/100",
    10: "79/98/100/100 67/96/100/100 60/94/100/100 48/89/99/100 41/83/98/100 35/78/97/100 30/71/95/100",
    12: "88/100/100/100 76/99/100/100 74/98/100/100 67/97/100/100 58/94/100/100 51/91/100/100 42/87/99/100",
    16: "96/100/100/100 90/100/100/100 89/100/100/100 83/100/100/100 77/99/100/100 76/99/100/100 71/99/100/100",
    20: "98/100/100/100 97/100/100/100 95/100/100/100 92/100/100/100 89/100/100/100 87/100/100/100 85/100/100/100",
}
# Power in per cent by seeds, number of comparisons (``FAMILIES``) and effect (``EFFECTS``), simulated with normal
# differences and other conditions equal to the baseline. The interim analysis, not included, costs 0 to 6 points
POWER: Mapping[int, Sequence[tuple[int, ...]]] = {
    seeds: [tuple(map(int, cell.split("/"))) for cell in row.split()] for seeds, row in _SIMULATED.items()
}

PLANNED_SEEDS = 10  # With the interim analysis, a condition that differs by 2 pair spreads trains 7.5 seeds on average
WANTED_POWER = 0.8
MOST_SEEDS = 10_000


def power(seeds: int, comparisons: int, effect: float) -> float:
    """Return the probability that a difference of ``effect`` pair spreads is found, interpolated from ``POWER``.

    Above the largest tabulated number of seeds, the power of that number is used, with ``effect`` scaled by
    √(seeds / largest). More comparisons than in ``FAMILIES`` are extrapolated by the logarithm of their number.
    """
    rows = sorted(POWER)
    if seeds < rows[0]:
        return 0.0
    if seeds > rows[-1]:
        return power(rows[-1], comparisons, effect * math.sqrt(seeds / rows[-1]))
    upper = next(row for row in rows if row >= seeds)
    lower = max(row for row in rows if row <= seeds)
    ends = [_power_of_row(row, comparisons, effect) for row in (lower, upper)]
    return ends[0] if upper == lower else _between(seeds, (lower, upper), ends)


def seeds_needed(comparisons: int, effect: float) -> int | None:
    """Return the fewest seeds that find ``effect`` pair spreads with WANTED_POWER; None above ``MOST_SEEDS``."""
    low, high = min(POWER) - 1, MOST_SEEDS
    if effect <= 0 or power(high, comparisons, effect) < WANTED_POWER:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, comparisons, effect) >= WANTED_POWER else (middle, high)
    return high


def _power_of_row(seeds: int, comparisons: int, effect: float) -> float:
    by_family = [_at_effect(values, effect) for values in POWER[seeds]]
    upper = max(1, next((i for i, family in enumerate(FAMILIES) if family >= comparisons), len(FAMILIES) - 1))
    logs = (math.log(FAMILIES[upper - 1]), math.log(FAMILIES[upper]))
    return min(1.0, max(0.0, _between(math.log(comparisons), logs, by_family[upper - 1 : upper + 1])))


def _at_effect(values: Sequence[int], effect: float) -> float:
    effects, shares = (0.0, *EFFECTS), (0.0, *(value / 100 for value in values))
    if effect >= effects[-1]:
        return shares[-1]
    upper = next(i for i, larger in enumerate(effects) if larger > effect)
    return _between(effect, effects[upper - 1 : upper + 1], shares[upper - 1 : upper + 1])


def _between(x: float, ends: Sequence[float], values: Sequence[float]) -> float:
    return values[0] + (values[1] - values[0]) * (x - ends[0]) / (ends[1] - ends[0])


MOST_FOLLOW_UP_SEEDS = 20  # A difference that needs more seeds is too small for the spread of these runs


def follow_up(comparison: Comparison, directory: Path) -> str:
    """Return the power of a follow-up and, on a second line, its command; "" unless a verdict is "no difference shown".

    The command declares the same file with seeds that no run has had; the new runs are not pooled with these.
    """
    others = comparison.conditions[1:]
    unanswered = [condition.differences for condition in others if condition.verdict == NOT_SHOWN]
    if not unanswered or not (directory / PLAN).is_file():
        return ""
    measure, margin = Measure(comparison.summary, comparison.metric), comparison.margin
    spread = pair_spread(unanswered)
    effect = 1.5 if margin is None or not spread else margin / spread
    needed = seeds_needed(len(others), effect)
    count = min(max(PLANNED_SEEDS, needed or MOST_FOLLOW_UP_SEEDS), MOST_FOLLOW_UP_SEEDS)
    share = f"{100 * power(count, len(others), effect):.0f} %"
    difference = amount(margin, measure) if margin and spread else "1.5 pair spreads"
    if margin is None and spread:
        difference += f" ({amount(1.5 * spread, measure)})"
    last = max(seed for condition in comparison.conditions for seed in condition.seeds)
    command = _command(directory, range(last + 1, last + 1 + count))
    return (
        f"A new campaign with {count} fresh seeds finds a difference of {difference} with {share} probability; declare "
        f"it with\n{command}"
    )


def _command(directory: Path, seeds: range) -> str:
    plan = read_plan_file(directory)
    sets = [setting for setting in plan.get("sets", []) if setting.partition("=")[0].strip() != "campaign.seeds"]
    sets.append(f"campaign.seeds=[{','.join(map(str, seeds))}]")
    resolved = directory.resolve()
    out = resolved.with_name(f"{resolved.name}_seeds{seeds[0]}-{seeds[-1]}")
    options = [word for setting in sets for word in ("--set", setting)]
    file = _from_here(Path(plan["folder"], plan["file"]))
    return shlex.join(["retrain", "train", file, *options, "--out", _from_here(out)])


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def pair_spread(differences: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation of paired differences, pooled over conditions; None if none has two pairs."""
    groups = [np.asarray(values) for values in differences if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    if not freedom:
        return None
    return float(np.sqrt(sum(((values - values.mean()) ** 2).sum() for values in groups) / freedom))
