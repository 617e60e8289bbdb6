"""How often the intervals of a fitted learning curve hold the truth: simulated campaigns of known curves.

    python benchmarks/scaling.py --campaigns 400

Seeds differ in their ceiling (2 points) and in their pace (15 %), each evaluation is of so many problems, and the
curves bend at different places, some of them beyond the last evaluation. Printed for each: how often the interval of
the ceiling A and that of the midpoint held the truth, how often the ceiling's was closed on both sides, and its median
width then.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from retrain.maths.scaling import Sigmoid, sigmoid_interval

START, CEILING, STEPS = 0.35, 0.8, np.arange(10.0, 61.0, 10.0)


def evaluations(
    curve: Sigmoid, seeds: int, problems: int, rng: np.random.Generator, steps: np.ndarray = STEPS
) -> np.ndarray:
    """Scores of so many seeds, [seeds, evaluations]."""
    rows = []
    for _ in range(seeds):
        pace = curve.midpoint * math.exp(0.15 * rng.standard_normal())
        own = Sigmoid(curve.start, curve.asymptote + 0.02 * rng.standard_normal(), curve.exponent, pace)
        rows.append(rng.binomial(problems, np.clip([own.at(step) for step in steps], 0.0, 1.0)) / problems)
    return np.array(rows)


def main() -> None:
    """Print a line for each curve and number of seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--campaigns", type=int, default=400, help="simulated for each line")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("midpoint  exponent  seeds  ceiling held  midpoint held  closed  median width, points")
    for midpoint in (12.0, 40.0):
        for exponent in (1.0, 2.0):
            for seeds in (3, 8):
                print(line(Sigmoid(START, CEILING, exponent, midpoint), seeds, given), flush=True)


def line(curve: Sigmoid, seeds: int, given: argparse.Namespace) -> str:
    """The table's line of one curve."""
    rng = np.random.default_rng(given.seed)
    held, widths = np.zeros(2), []
    for _ in range(given.campaigns):
        scores = evaluations(curve, seeds, given.problems, rng)
        ceiling = sigmoid_interval(STEPS, scores, START, "asymptote")
        middle = sigmoid_interval(STEPS, scores, START, "midpoint")
        for place, (found, truth) in enumerate(((ceiling, curve.asymptote), (middle, curve.midpoint))):
            low, high = found.low, found.high
            held[place] += (low is None or low <= truth) and (high is None or truth <= high)
        if ceiling.low is not None and ceiling.high is not None:
            widths.append(100.0 * (ceiling.high - ceiling.low))
    shares = [f"{100 * count / given.campaigns:.1f} %" for count in held]
    width = f"{np.median(widths):.1f}" if widths else "–"
    closed = f"{100 * len(widths) / given.campaigns:.0f} %"
    where = f"{curve.midpoint:8g}  {curve.exponent:8g}  {seeds:5}"
    return f"{where}  {shares[0]:>12}  {shares[1]:>13}  {closed:>6}  {width:>20}"


if __name__ == "__main__":
    main()
