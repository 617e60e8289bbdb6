"""Histograms of numbers, such as rewards and lengths."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

BINS = 24


def edges_of(values: np.ndarray) -> np.ndarray:
    """Return the edges of ``BINS`` equal bins. Integers that span less than ``BINS`` get one bin each, with the integer
    in its middle."""
    if not len(values):
        return np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, high + 0.5])
    whole = bool(np.all(values == np.rint(values))) and high - low < BINS
    return np.arange(low - 0.5, high + 1.0) if whole else np.linspace(low, high, BINS + 1)


def counted(values: np.ndarray, edges: np.ndarray) -> list[int]:
    return np.histogram(values, edges)[0].tolist()


class RewardHistogram(TypedDict):
    ends: list[float]
    counts: list[int]
    at: list[float] | None
    absent: int


def rewards(values: Sequence[float | None]) -> RewardHistogram:
    """Count rewards: by distinct value, listed in ``at``, or, if there are more than ``BINS`` distinct values, by bin
    between consecutive ``ends``. ``absent`` is the number of None."""
    numbers = np.array([value for value in values if value is not None], np.float64)
    absent = len(values) - len(numbers)
    if not len(numbers):
        return {"ends": [], "counts": [], "at": None, "absent": absent}
    distinct, times = np.unique(numbers, return_counts=True)
    if len(distinct) <= BINS:
        return {"ends": [], "counts": times.tolist(), "at": distinct.tolist(), "absent": absent}
    edges = edges_of(numbers)
    return {"ends": edges.tolist(), "counts": counted(numbers, edges), "at": None, "absent": absent}
