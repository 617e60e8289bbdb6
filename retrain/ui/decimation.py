"""Long lines as short ones that keep their extremes: a chart has a couple of thousand columns of pixels."""

from __future__ import annotations

import numpy as np

MOST_POINTS = 2_000


def extremes(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """The places of at most ``most`` points of a line (four or more), in order: of each stretch its least and its
    greatest one, and both ends of the line. NaN are left out."""
    known = np.flatnonzero(np.isfinite(y))
    if len(known) <= most:
        return known
    values = y[known]
    edges = np.linspace(0, len(known), max(1, (most - 2) // 2) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    # Stretches differ in length by one: the last place of a shorter one is looked at twice.
    places = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
    stretches = values[places]
    rows = np.arange(len(starts))
    chosen = [places[rows, pick(stretches, axis=1)] for pick in (np.argmin, np.argmax)]
    return known[np.unique(np.concatenate([[0, len(known) - 1], *chosen]))]


def joined(x: np.ndarray, columns: list[np.ndarray], most: int) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """Rows joined into at most ``most`` stretches: their last x, and of each column mean, least and greatest value,
    NaN where a stretch has none."""
    edges = np.linspace(0, len(x), min(most, len(x)) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    return x[ends - 1], [_reduced(column.astype(np.float64), starts) for column in columns]


def _reduced(y: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    known = np.isfinite(y)
    count = np.add.reduceat(known.astype(np.int64), starts)
    total = np.add.reduceat(np.where(known, y, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, y, -np.inf), starts)
    empty = count == 0
    mean = np.where(empty, np.nan, total / np.maximum(count, 1))
    return mean, np.where(empty, np.nan, low), np.where(empty, np.nan, high)
