"""Bins of histograms, and the values in each."""

from collections.abc import Sequence
from typing import Any

import numpy as np

BINS = 24


def edges_of(values: np.ndarray) -> np.ndarray:
    """Return the ends of equal bins; few different integers have a bin each, and lie in its middle."""
    if not len(values):
        return np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, high + 0.5])
    whole = bool(np.all(values == np.rint(values))) and high - low < BINS
    return np.arange(low - 0.5, high + 1.0) if whole else np.linspace(low, high, BINS + 1)


def counted(values: np.ndarray, edges: np.ndarray) -> list[int]:
    """Return how many values lie between each two edges."""
    return np.histogram(values, edges)[0].tolist()


def rewards(values: Sequence[float | None]) -> dict[str, Any]:
    """Return {"ends", "counts", "at", "absent"}: counts between the ends; few distinct values have a count each, and
    are themselves ``at``."""
    known = np.array([value for value in values if value is not None], np.float64)
    found: dict[str, Any] = {"ends": [], "counts": [], "at": None, "absent": len(values) - len(known)}
    if not len(known):
        return found
    distinct, times = np.unique(known, return_counts=True)
    if len(distinct) <= BINS:
        return found | {"counts": times.tolist(), "at": distinct.tolist()}
    edges = edges_of(known)
    return found | {"ends": edges.tolist(), "counts": counted(known, edges)}
