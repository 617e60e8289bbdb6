"""Compute rates with their number of answers and Wilson's 95 % interval, the page's only interval for rates."""

from typing import TypedDict

from retrain.maths.statistics import score_interval
from retrain.records.schema.base import Row

QUANTILE = 1.959963984540054  # 97.5 % of the standard normal distribution


class Rate(TypedDict):
    rate: float | None
    n: int
    low: float | None
    high: float | None


def rate_of(correct: float, n: int) -> Rate:
    if not n:
        return {"rate": None, "n": 0, "low": None, "high": None}
    interval = score_interval(correct / n, n, QUANTILE)
    return {"rate": correct / n, "n": n, "low": interval.low, "high": interval.high}


def evaluation_rate(row: Row, held_out: str) -> Rate:
    """Return the accuracy of a row of ``evals.jsonl`` with the row's interval, which counts answers to a problem as one
    cluster. Rows of other tools have no interval and get Wilson's over the number of problems."""
    prefix = f"eval/{held_out}/"
    rate, problems = row.get(f"{prefix}correct_rate"), row.get(f"{prefix}problems")
    if not isinstance(rate, int | float) or not isinstance(problems, int):
        return {"rate": rate if isinstance(rate, int | float) else None, "n": 0, "low": None, "high": None}
    wilson = rate_of(rate * problems, problems)
    low, high = row.get(f"{prefix}ci_low"), row.get(f"{prefix}ci_high")
    return {**wilson, "low": low, "high": high} if isinstance(low, float) and isinstance(high, float) else wilson
