"""Long lines as short ones that keep their extremes: a chart has a couple of thousand columns of pixels."""

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


def last_of_stretches(y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut a line into at most ``most`` stretches; return of each its last place, the place of its last value, and its
    least and greatest value. Where a stretch has no value, its last place and NaN."""
    edges = np.linspace(0, len(y), min(most, len(y)) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:] - 1
    known = np.isfinite(y)
    values = y.astype(np.float64)
    low = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    last = np.maximum.reduceat(np.where(known, np.arange(len(y)), -1), starts)
    empty = last < 0
    return ends, np.where(empty, ends, last), np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def moving_average(steps: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Return for each value the mean of the values at the last ``window`` steps up to its own. NaN stay NaN and do not
    count; ``steps`` are in order."""
    known = np.isfinite(values)
    if window < 2 or not known.any():
        return values
    at, numbers = np.maximum.accumulate(steps[known]), values[known].astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(numbers)])
    ends = np.arange(1, len(numbers) + 1)
    starts = np.minimum(np.searchsorted(at, at - window, side="right"), ends - 1)
    averages = np.full(len(values), np.nan)
    averages[known] = (total[ends] - total[starts]) / (ends - starts)
    return averages
