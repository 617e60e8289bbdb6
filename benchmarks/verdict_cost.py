"""What a verdict costs: device-seconds to detect a true difference with 80 % power, one saving after the other.

    python benchmarks/verdict_cost.py [--seeds 16] [--steps 16] [--differences 0.02 0.05 0.1] [--out DIR] [--json FILE]

Two conditions train in the wind tunnel, paired by seed and in lanes; a few of the same runs train once more one by one.
From these files come the spreads (of one run, of a paired difference, of problems) and the seconds per run. How many
runs a difference takes is then counted by simulation with these spreads, for designs that differ in one step each:

    today       unpaired seeds, every run with held-out problems of its own, one run after the other, Welch's t test
    + problems  the same held-out problems for all runs
    + pairs     the same seed for both conditions (common random numbers), paired t test
    + exact     the sign-flip test instead, which assumes nothing of the spread and needs 6 pairs: a price, not a saving
    + looks     the sequential rule, which stops when it is sure (expected number of pairs)
    + lanes     runs train together over one copy of the base

`--out` keeps the runs; a directory that already holds them is only read.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import accuracies, train

from retrain.files import read_jsonl, write_json
from retrain.maths.power import pairs_needed, t_test_power
from retrain.maths.sequential import MOST_PAIRS, sequential_looks

POWER, ALPHA = 0.8, 0.05
MOST_RUNS = 4000


def measure(out: Path, seeds: int, steps: int) -> dict[str, Any]:
    """Train what is not there yet and read off spreads and seconds."""
    conditions = [{"advantage_mode": mode, "transform_mode": "none"} for mode in ("grpo", "maxrl")]
    together = train(out / "together", conditions, seeds=range(1, seeds + 1), steps=steps, batch_size=6)
    alone = train(out / "alone", conditions, seeds=(1, 2), steps=steps, batch_size=6, lanes="1")
    labels = list(dict.fromkeys(run.label for run in together))
    scores = accuracies(together)
    rates = _problem_rates([run for run in together if run.label == labels[0]])
    problems = len(rates)
    difference = scores[1] - scores[0]
    runs_variance = float(scores.var(axis=1, ddof=1).mean())
    resampled = np.random.default_rng(0).integers(0, seeds, (4000, seeds))
    ratios = difference[resampled].var(axis=1, ddof=1) / np.maximum(
        scores[:, resampled].var(axis=2, ddof=1).sum(axis=0), 1e-12
    )
    return {
        "conditions": labels,
        "seeds": seeds,
        "steps": steps,
        "accuracy": scores.mean(axis=1).tolist(),
        "run_deviation": math.sqrt(runs_variance),
        "problem_deviation": math.sqrt(float(rates.var(ddof=1)) / problems),
        "pair_deviation": float(difference.std(ddof=1)),
        "correlation": float(np.corrcoef(scores)[0, 1]),
        "pairing_ratio": float(difference.var(ddof=1)) / (2.0 * runs_variance),
        "pairing_ratio_interval": np.quantile(ratios, [0.025, 0.975]).tolist(),
        "seconds_together": float(np.mean([run.device_seconds for run in together])),
        "seconds_alone": float(np.mean([run.device_seconds for run in alone])),
        "difference_seen": float(difference.mean()),
    }


def _problem_rates(runs: list[Any]) -> np.ndarray:
    """Share of right answers of every held-out problem, over the runs of one condition: what problems differ by."""
    marks: dict[str, list[bool]] = {}
    for run in runs:
        for row in read_jsonl(run.path / "emergence/evaluations.jsonl"):
            marks.setdefault(row["problem_id"], []).append(row["correct"])
    return np.array([np.mean(each) for each in marks.values()])


# -- how many runs a difference takes -----------------------------------------------------------------------------


def unpaired_runs(difference: float, deviation: float) -> int:
    """Runs in all (two conditions) for Welch's t test to have the power, by the noncentral t distribution."""
    from scipy.stats import nct, t

    for n in range(2, MOST_RUNS):
        freedom, shift = 2 * n - 2, difference / (deviation * math.sqrt(2.0 / n))
        reach = t.ppf(1.0 - ALPHA / 2.0, freedom)
        if 1.0 - nct.cdf(reach, freedom, shift) + nct.cdf(-reach, freedom, shift) >= POWER:
            return 2 * n
    return 2 * MOST_RUNS


def t_test_pairs(effect: float) -> int:
    """Pairs for the paired t test to have the power, for an effect in standard deviations of the difference."""
    return next((n for n in range(2, MOST_RUNS) if t_test_power(effect, n, ALPHA) >= POWER), MOST_RUNS)


def sequential_pairs(difference: float, deviation: float, simulations: int) -> tuple[int, float] | None:
    """(planned pairs, expected pairs) of the sequential rule with the power; None when 20 planned pairs are too few."""

    def ends(planned: int) -> tuple[float, float]:
        draws = np.random.default_rng(planned).normal(difference, deviation, (simulations, planned))
        last = [sequential_looks(row, planned)[-1] for row in draws]
        return float(np.mean([end.stop for end in last])), float(np.mean([end.pairs for end in last]))

    planned = 6 + bisect_left(range(6, MOST_PAIRS + 1), True, key=lambda n: ends(n)[0] >= POWER)
    return (planned, ends(planned)[1]) if planned <= MOST_PAIRS else None


def costs(found: dict[str, Any], difference: float, simulations: int) -> list[dict[str, Any]]:
    """Runs and device-seconds of each design, in the order in which the savings are added."""
    alone, together = found["seconds_alone"], found["seconds_together"]
    effect = difference / found["pair_deviation"]
    own = math.hypot(found["run_deviation"], found["problem_deviation"])
    rows: list[tuple[str, float, float]] = [
        ("today", unpaired_runs(difference, own), alone),
        ("+ problems", unpaired_runs(difference, found["run_deviation"]), alone),
        ("+ pairs", 2 * t_test_pairs(effect), alone),
        ("+ exact", 2 * (pairs_needed(effect, wanted=POWER, alpha=ALPHA) or MOST_RUNS), alone),
    ]
    looks = sequential_pairs(difference, found["pair_deviation"], simulations)
    if looks is not None:
        rows.append((f"+ looks (planned {looks[0]})", 2.0 * looks[1], alone))
    rows.append(("+ lanes", rows[-1][1], together))
    first = rows[0][1] * rows[0][2]
    return [
        {"design": name, "runs": runs, "seconds": runs * seconds, "factor": first / (runs * seconds)}
        for name, runs, seconds in rows
    ]


def told(found: dict[str, Any]) -> str:
    """The measured spreads and the tables."""
    low, high = found["pairing_ratio_interval"]
    lines = [
        f"{' and '.join(found['conditions'])}: {found['seeds']} pairs of runs of {found['steps']} steps, accuracy "
        + " and ".join(f"{100 * value:.1f}%" for value in found["accuracy"]),
        f"standard deviation of a run            {100 * found['run_deviation']:.2f} points",
        f"added by problems of its own           {100 * found['problem_deviation']:.2f} points",
        f"of a paired difference                 {100 * found['pair_deviation']:.2f} points (correlation "
        f"{found['correlation']:+.2f}, variance {found['pairing_ratio']:.2f} of unpaired [{low:.2f}, {high:.2f}])",
        f"device-seconds of a run                {found['seconds_alone']:.1f} alone, "
        f"{found['seconds_together']:.1f} together",
    ]
    for table in found["costs"]:
        lines += [
            "",
            f"{'to detect ' + format(100 * table['difference'], 'g') + ' points':<26}    runs   device-s  factor",
        ]
        for row in table["designs"]:
            lines.append(f"{row['design']:<26}{row['runs']:>8.1f}{row['seconds']:>11.0f}{row['factor']:>7.1f}×")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--differences", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="true differences")
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--out", type=Path, help="where the runs are kept; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.out or Path(folder), args.seeds, args.steps)
    found["costs"] = [
        {"difference": value, "designs": costs(found, value, args.simulations)} for value in args.differences
    ]
    print(told(found))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
