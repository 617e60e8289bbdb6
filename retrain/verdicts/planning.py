"""Power of the rule by number of seeds and conditions, simulated once and kept as a table."""

import math
from collections.abc import Mapping, Sequence

EFFECTS = (1.0, 1.5, 2.0, 3.0)
"""Difference of one condition, in standard deviations of a paired difference (pair spreads)."""
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
POWER: Mapping[int, Sequence[tuple[int, ...]]] = {
    seeds: [tuple(map(int, cell.split("/"))) for cell in row.split()] for seeds, row in _SIMULATED.items()
}
"""Power in per cent without the interim analysis, which costs 0 to 6 points: by seeds, for each of ``FAMILIES`` and
``EFFECTS``. Normal differences, the other conditions like the baseline."""

PLANNED_SEEDS = 10
"""Recommended number of seeds. With the interim analysis, a condition that differs by 2 pair spreads uses 7.5."""
WANTED_POWER = 0.8
MOST_SEEDS = 10_000


def power(seeds: int, comparisons: int, effect: float) -> float:
    """Return the probability that a difference of ``effect`` pair spreads is found, interpolated from ``POWER``.

    Beyond the last row a difference counts as larger by the square root of the share of seeds; more comparisons than
    in ``FAMILIES`` are extrapolated by the logarithm of their number.
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


def seeds_needed(comparisons: int, effect: float, wanted: float = WANTED_POWER) -> int | None:
    """Return the fewest seeds with this power for a difference in pair spreads; None above ``MOST_SEEDS``."""
    low, high = min(POWER) - 1, MOST_SEEDS
    if effect <= 0 or power(high, comparisons, effect) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, comparisons, effect) >= wanted else (middle, high)
    return high


def _power_of_row(seeds: int, comparisons: int, effect: float) -> float:
    by_family = [_at_effect(values, effect) for values in POWER[seeds]]
    place = next((i for i, family in enumerate(FAMILIES) if family >= comparisons), len(FAMILIES) - 1)
    place = max(1, place)
    logs = (math.log(FAMILIES[place - 1]), math.log(FAMILIES[place]))
    return min(1.0, max(0.0, _between(math.log(comparisons), logs, by_family[place - 1 : place + 1])))


def _at_effect(values: Sequence[int], effect: float) -> float:
    effects, shares = (0.0, *EFFECTS), (0.0, *(value / 100 for value in values))
    if effect >= effects[-1]:
        return shares[-1]
    place = next(i for i, each in enumerate(effects) if each > effect)
    return _between(effect, effects[place - 1 : place + 1], shares[place - 1 : place + 1])


def _between(x: float, ends: Sequence[float], values: Sequence[float]) -> float:
    return values[0] + (values[1] - values[0]) * (x - ends[0]) / (ends[1] - ends[0])
