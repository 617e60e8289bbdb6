"""What a verdict costs: device-seconds to detect a true difference with 80 % power, one saving after the other.

    python benchmarks/verdict_cost.py [--seeds 16] [--steps 16] [--differences 0.02 0.05 0.1] [--out DIR] [--json FILE]

Two conditions train in the wind tunnel, paired by seed, in lanes of the size that the rule uses (two seeds together); a
few further seeds train one by one. From these files come the spreads (of one run, of a paired difference) and the
seconds per run. How many runs a difference takes is then counted for designs that differ in one step each:

    one by one  other seeds for each condition, the same held-out problems, one run after the other, Welch's t test
    + pairs     the same seed for both conditions (common random numbers), the paired t test
    + looks     the rule of the shipped files, which stops when it is sure or when going on is futile (expected runs)
    + lanes     runs train together over one copy of the base

Power and expected runs of the rule are simulated by the functions that decide (``retrain.maths.power``). Each design is
planned for the difference; its cost is told where there is that difference and where there is none. Intervals are
bootstrap intervals of 95 % over the measured seeds. `--out` keeps the runs; a directory that holds them is only read.
"""

import argparse
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import accuracies, train

from retrain.config.runs import LOOK_SEEDS
from retrain.files import write_json
from retrain.maths.power import detectable, outlook, t_test_power
from retrain.maths.rules import Rule
from retrain.maths.sequential import MOST_PAIRS

POWER, ALPHA = 0.8, 0.05
MOST_RUNS = 4000
FEWEST_SEEDS = 4
RESAMPLES = 400


def measure(out: Path, seeds: int, steps: int) -> dict[str, Any]:
    """Train what is not there yet and read off results by condition and seed, and seconds of every run."""
    conditions = [{"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "maxrl")]
    lanes = str(LOOK_SEEDS * len(conditions))
    paired = range(1, seeds + 1)
    together = train(out / "together", conditions, seeds=paired, steps=steps, batch_size=6, lanes=lanes)
    further = range(seeds + 1, seeds + 3)
    alone = train(out / "alone", conditions, seeds=further, steps=steps, batch_size=6, lanes="1")
    return {
        "conditions": list(dict.fromkeys(run.label for run in together)),
        "steps": steps,
        "scores": accuracies(together).tolist(),
        "seconds_together": [run.device_seconds for run in together],
        "seconds_alone": [run.device_seconds for run in alone],
    }


def spreads(scores: np.ndarray) -> tuple[float, float]:
    """Standard deviation of a run and of a paired difference, of results [2, seeds]."""
    return math.sqrt(float(scores.var(axis=1, ddof=1).mean())), float((scores[1] - scores[0]).std(ddof=1))


# -- how many runs a difference takes -----------------------------------------------------------------------------


def unpaired_runs(difference: float, deviation: float) -> int:
    """Runs in all (two conditions) for Welch's t test to have the power, by the noncentral t distribution."""
    from scipy.special import stdtrit
    from scipy.stats import nct

    def found(n: int) -> bool:
        freedom, shift = 2 * n - 2, difference / (deviation * math.sqrt(2.0 / n))
        reach = float(stdtrit(freedom, 1.0 - ALPHA / 2.0))
        power = 1.0 - nct.cdf(reach, freedom, shift) + nct.cdf(-reach, freedom, shift)
        return shift > reach + 8.0 or bool(power >= POWER)

    return 2 * next((n for n in range(2, MOST_RUNS) if found(n)), MOST_RUNS)


def t_test_pairs(effect: float) -> int:
    """Pairs for the paired t test to have the power, for an effect in standard deviations of the difference."""
    return next((n for n in range(2, MOST_RUNS) if t_test_power(effect, n, ALPHA) >= POWER), MOST_RUNS)


@cache
def rule_of(planned: int) -> tuple[Rule, float, float, float]:
    """The rule of the shipped files over so many seeds, the effect that it finds with the power, and its expected runs
    where there is this effect and where there is none."""
    rule = Rule(test="normal", planned=planned, looks="obrien_fleming", futility=0.2, alpha=ALPHA)
    effect = detectable(rule, POWER) or math.inf
    expected = outlook(rule, min(effect, 1e3), LOOK_SEEDS)
    return rule, effect, expected.runs_different, expected.runs_alike


def rule_runs(effect: float) -> tuple[int, float, float] | None:
    """(planned pairs, expected runs with the effect, expected runs without) of the rule with the fewest seeds that have
    the power; None when 20 planned pairs are too few."""
    for planned in range(FEWEST_SEEDS, MOST_PAIRS + 1):
        _, found, different, alike = rule_of(planned)
        if found <= effect:
            return planned, different, alike
    return None


def costs(scores: np.ndarray, alone: float, together: float, difference: float) -> list[dict[str, Any]]:
    """Runs and device-seconds of each design, in the order in which the savings are added; of the rule the expected
    ones. ``scores`` [2, seeds] have the spreads, ``alone`` and ``together`` are the seconds of a run."""
    run, pair = spreads(scores)
    unpaired, pairs = unpaired_runs(difference, run), t_test_pairs(difference / pair)
    rows: list[tuple[str, float, float, float]] = [
        ("one by one", unpaired, unpaired, alone),
        ("+ pairs", 2 * pairs, 2 * pairs, alone),
    ]
    looks = rule_runs(difference / pair)
    if looks is not None:
        rows.append((f"+ looks (planned {looks[0]})", looks[1], looks[2], alone))
    rows.append(("+ lanes", rows[-1][1], rows[-1][2], together))
    first = rows[0][1] * rows[0][3]
    return [
        {
            "design": name,
            "runs": different,
            "runs_alike": alike,
            "seconds": different * seconds,
            "seconds_alike": alike * seconds,
            "factor": first / (different * seconds),
            "factor_alike": first / (alike * seconds),
        }
        for name, different, alike, seconds in rows
    ]


def table(found: dict[str, Any], difference: float) -> list[dict[str, Any]]:
    """The designs for a difference, with an interval for the factor of each."""
    scores = np.array(found["scores"])
    alone, together = float(np.mean(found["seconds_alone"])), float(np.mean(found["seconds_together"]))
    rows = costs(scores, alone, together, difference)
    draw = np.random.default_rng(0)
    factors = []
    for _ in range(RESAMPLES):
        again = scores[:, draw.integers(0, scores.shape[1], scores.shape[1])]
        if min(spreads(again)) > 0.0:
            own = costs(again, alone, together, difference)
            # Where more than 20 pairs would be planned there are no looks: the row before stands for them.
            own = [own[0], own[1], own[-2], own[-1]]
            factors.append([row["factor"] for row in own[: len(rows) - 1]] + [own[-1]["factor"]])
    for row, ends in zip(rows, np.quantile(np.array(factors), [0.025, 0.975], axis=0).T, strict=True):
        row["factor_interval"] = ends.tolist()
    return rows


def told(found: dict[str, Any]) -> str:
    """The measured spreads and the tables."""
    scores = np.array(found["scores"])
    run, pair = spreads(scores)
    lines = [
        f"{' and '.join(found['conditions'])}: {scores.shape[1]} pairs of runs of {found['steps']} steps, accuracy "
        + " and ".join(f"{100 * value:.1f}%" for value in scores.mean(axis=1)),
        f"standard deviation of a run            {100 * run:.2f} points",
        f"of a paired difference                 {100 * pair:.2f} points (correlation "
        f"{np.corrcoef(scores)[0, 1]:+.2f}, variance {pair**2 / (2 * run**2):.2f} of unpaired)",
        f"device-seconds of a run                {np.mean(found['seconds_alone']):.1f} alone, "
        f"{np.mean(found['seconds_together']):.1f} in lanes of {2 * LOOK_SEEDS}",
    ]
    for each in found["costs"]:
        name = f"to detect {100 * each['difference']:g} points"
        lines += ["", f"{name:<26}    runs   device-s  factor            if alike: runs  factor"]
        for row in each["designs"]:
            low, high = row["factor_interval"]
            interval = f"[{low:.1f}, {high:.1f}]"
            lines.append(
                f"{row['design']:<26}{row['runs']:>8.1f}{row['seconds']:>11.0f}{row['factor']:>7.1f}× {interval:<14}"
                f"{row['runs_alike']:>12.1f}{row['factor_alike']:>8.1f}×"
            )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--differences", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="true differences")
    parser.add_argument("--out", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.out or Path(folder), args.seeds, args.steps)
    found["costs"] = [{"difference": value, "designs": table(found, value)} for value in args.differences]
    print(told(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
