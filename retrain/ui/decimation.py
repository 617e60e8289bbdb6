"""Smooth a run's rows, then thin them to the points that a chart can show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from retrain.ui.answers import ApiError
from retrain.verdicts.evidence import moving_average, window_of

Item = TypeVar("Item")
MOST_POINTS = 2_000
MOST_STEPS = 100_000  # Steps of a moving average
NEGLIGIBLE = 1e-17  # Weight of a row below which it is left out of an exponential average


@dataclass(frozen=True)
class Smoothing:
    """Smoothing of a line. ``amount``: weight below 1 for the ``kind`` "ema", steps for "mean", points for "auto"."""

    kind: str = "none"
    amount: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Smoothing:
        """Parse ``none``, ``auto``, ``ema:0.9``, ``mean:20``, or ``20`` for ``mean:20``. Raises ApiError (400)."""
        if text in ("none", "0", "1", "mean:1", "mean:0"):
            return cls()
        if text in ("auto", "-1"):
            return cls("auto")
        if match := re.fullmatch(r"ema:(0?\.\d{1,9}|0)", text):
            return cls("ema", float(match[1]))
        if (match := re.fullmatch(r"(?:mean:)?(\d{1,6})", text)) and int(match[1]) <= MOST_STEPS:
            return cls("mean", int(match[1]))
        raise ApiError(400, f"smooth is none, ema:W with W below 1, or mean:N with N up to {MOST_STEPS}, as in ema:0.9")

    def for_points(self, longest: int) -> Smoothing:
        return Smoothing("auto", window_of(longest)) if self.kind == "auto" else self

    @property
    def window(self) -> int:
        return int(self.amount) if self.kind in ("mean", "auto") else 1

    @property
    def is_none(self) -> bool:
        return self.kind != "ema" and self.window < 2

    def __str__(self) -> str:
        if self.is_none:
            return "none"
        return f"ema:{self.amount:g}" if self.kind == "ema" else f"mean:{self.window}"

    def of(self, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Smooth the values of all rows. NaN stay NaN and do not count; ``steps`` are in order."""
        if self.kind == "ema":
            return exponential_average(values, self.amount)
        return moving_average(np.arange(len(steps)) if self.kind == "auto" else steps, values, self.window)


def exponential_average(values: np.ndarray, weight: float) -> np.ndarray:
    """Return TensorBoard's debiased average: ``last = weight * last + (1 - weight) * value``, divided by
    ``1 - weight**n`` after the n-th value. NaN stay NaN and do not count."""
    finite = np.isfinite(values)
    sums, averages = values[finite].astype(np.float64), np.full(len(values), np.nan)
    ages = np.arange(1, len(sums) + 1)
    span = 1  # Each entry is the weighted sum of the last `span` values.
    while span < len(sums) and weight**span > NEGLIGIBLE:
        sums[span:] = sums[span:] + weight**span * sums[:-span]
        span *= 2
    averages[finite] = sums * (1.0 - weight) / (1.0 - weight**ages)
    return averages


def extremes(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Return the indices of at most ``most`` points of a line (four or more), in order: both ends, and the least and
    the greatest in each of equal stretches. NaN are left out."""
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) <= most:
        return finite
    values = y[finite]
    edges = np.linspace(0, len(finite), max(1, (most - 2) // 2) + 1).astype(int)
    starts, ends = edges[:-1], edges[1:]
    # Stretches differ in length by one: the last index of a shorter one is looked at twice.
    indices = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
    stretches = values[indices]
    rows = np.arange(len(starts))
    chosen = [indices[rows, pick(stretches, axis=1)] for pick in (np.argmin, np.argmax)]
    return finite[np.unique(np.concatenate([[0, len(finite) - 1], *chosen]))]


def evenly_spaced(items: Sequence[Item], most: int) -> list[Item]:
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, most).astype(int))] if items else []
