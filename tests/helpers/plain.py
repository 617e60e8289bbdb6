"""Steps of the rule in plain Python, to recompute its tests."""

import math
from collections.abc import Sequence
from statistics import median


def cut(values: Sequence[float]) -> list[float]:
    sizes = [abs(value) for value in values if abs(value) > 1e-9]
    limit = 1.5 * median(sizes) if sizes else 0.0
    return [max(-limit, min(limit, value)) for value in values]


def typical(values: Sequence[float]) -> float:
    values = [value for value in values if not math.isnan(value)]
    low, high = min(values), max(values)
    for _ in range(60):
        middle = (low + high) / 2
        if sum(cut([value - middle for value in values])) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
