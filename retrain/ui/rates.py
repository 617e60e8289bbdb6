"""Rates, each with its number of answers and Wilson's 95 % interval: the page's one interval of a rate."""

from collections.abc import Mapping
from typing import Any

from retrain.maths.statistics import score_interval

QUANTILE = 1.959963984540054  # 97.5 % of the standard normal distribution


def rate_of(correct: float, n: int) -> dict[str, Any]:
    """Return {"rate", "n", "low", "high"} of ``correct`` among ``n`` answers; all but ``n`` null where ``n`` is 0."""
    if not n:
        return {"rate": None, "n": 0, "low": None, "high": None}
    interval = score_interval(correct / n, n, QUANTILE)
    return {"rate": correct / n, "n": n, "low": interval.low, "high": interval.high}


def evaluation_rate(row: Mapping[str, Any], held_out: str) -> dict[str, Any]:
    """Return the accuracy of a row of ``evals.jsonl``. Its own interval counts several answers to a problem as one
    cluster; rows of other tools have none, and get Wilson's for as many answers as problems."""
    prefix = f"eval/{held_out}/"
    rate, problems = row.get(f"{prefix}correct_rate"), row.get(f"{prefix}problems")
    if not isinstance(rate, int | float) or not isinstance(problems, int):
        return rate_of(0, 0) | {"rate": rate if isinstance(rate, int | float) else None}
    found = rate_of(rate * problems, problems)
    low, high = row.get(f"{prefix}ci_low"), row.get(f"{prefix}ci_high")
    return found | {"low": low, "high": high} if isinstance(low, float) and isinstance(high, float) else found
