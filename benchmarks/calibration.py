"""Does the machinery of verdicts keep its promises? A/A comparisons, simulated and real: no difference is the truth.

    python benchmarks/calibration.py [--simulations 4000] [--resampled 1000] [--runs N --steps S] [--json FILE]

Simulated seeds go through the very functions that `retrain compare` uses. Told are, for 5, 8 and 16 seeds and five
spreads: how often a difference is declared (5 % is promised; 5 pairs never declare one), how often Holm's correction
lets any of four null conditions through, the same for the sequential rule, and how often each 95 % interval contains
the truth. `--runs N` trains N identical runs of the bundled reasoner with different random streams, deals them into
pairs of two "conditions" again and again, and does the same with what they scored.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from windtunnel import PROBLEMS, accuracies, train

from retrain.files import write_json
from retrain.maths.intervals import iqm_interval, mean_interval
from retrain.maths.sequential import sequential_looks
from retrain.maths.statistics import Interval, accuracy_interval, bootstrap_ci, holm, iqm, paired_comparison

SEEDS = (5, 8, 16)
PROMISE, BAND = 0.05, (0.93, 0.97)
FAMILY = 4
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _of_problems(problems: int, mean: float, spread: float) -> Draw:
    """Accuracy over so many problems of runs whose true accuracies have this mean and spread."""

    def draw(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        return random.binomial(problems, np.clip(random.normal(mean, spread, size), 0.0, 1.0)) / problems

    return draw


SPREADS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda random, size: random.normal(0.8, 0.03, size), 0.0),
    "heavy tails (t, 3 degrees)": (lambda random, size: np.clip(0.8 + 0.02 * random.standard_t(3, size), 0, 1), 0.0),
    "skewed (Beta(9, 1))": (lambda random, size: random.beta(9.0, 1.0, size), 0.0),
    "accuracy of 128 problems": (_of_problems(128, 0.85, 0.03), 1 / 128),
    "accuracy of 20 problems": (_of_problems(20, 0.95, 0.0), 1 / 20),
}
"""How results of seeds are spread: name → (draw, step of the scale). The last two are discrete, with many ties."""


def error(rate: float, count: int) -> float:
    """Two standard errors of a simulated rate."""
    return 2.0 * math.sqrt(max(rate * (1.0 - rate), 1.0 / count) / count)


def covers(interval: Interval, truth: float) -> bool:
    """Whether the interval contains the truth, up to rounding."""
    return (
        interval.low is not None and interval.high is not None and interval.low - 1e-9 <= truth <= interval.high + 1e-9
    )


def false_positives(draw: Draw, seeds: int, simulations: int, random: np.random.Generator) -> dict[str, Any]:
    """How often two equal conditions are called different: alone, in a family of four, and with the sequential rule."""
    alone = family = stopped = covered = 0
    pairs = 0
    for _ in range(simulations):
        results = draw(random, (FAMILY + 1, seeds))
        found = [paired_comparison(results[i], results[0]) for i in range(1, FAMILY + 1)]
        alone += found[0].verdict_possible and found[0].p <= PROMISE
        covered += covers(Interval(found[0].mean, found[0].low, found[0].high), 0.0)
        family += found[0].verdict_possible and bool((holm([each.p for each in found]) <= PROMISE).any())
        looks = sequential_looks(results[1] - results[0], seeds)
        stopped += looks[-1].stop
        pairs += looks[-1].pairs
    return {
        "seeds": seeds,
        "declared": alone / simulations,
        "declared_in_family": family / simulations,
        "declared_sequentially": stopped / simulations,
        "pairs_used": pairs / simulations,
        "difference_t": covered / simulations,
    }


INTERVALS = {
    "difference_t": "difference",
    "level": "level",
    "iqm": "IQM",
    "iqm_difference": "IQM diff.",
    "level_t": "level, t",
    "level_bootstrap": "level, boot.",
    "iqm_bootstrap": "IQM, boot.",
    "level_percentile": "percentile",
}
"""Whose coverage is told, with the heading: first what comparisons have, then what stands beside or was not chosen."""


def coverage(
    draw: Draw, step: float, seeds: int, counts: tuple[int, int], random: np.random.Generator
) -> dict[str, float]:
    """Share of intervals that contain the truth, for conditions that are alike: levels, interquartile means."""
    sample = draw(random, (400_000,))
    mean, middle = float(sample.mean()), float(iqm(sample))
    quick: dict[str, int] = dict.fromkeys(("level", "level_t", "iqm", "iqm_difference"), 0)
    slow: dict[str, int] = dict.fromkeys(("level_bootstrap", "iqm_bootstrap", "level_percentile"), 0)
    for x, y in draw(random, (counts[0], 2, seeds)):
        quick["level"] += covers(mean_interval(x, share=True, resolution=step), mean)
        quick["level_t"] += covers(mean_interval(x), mean)
        quick["iqm"] += covers(iqm_interval(x, resolution=step), middle)
        quick["iqm_difference"] += covers(iqm_interval(x - y, resolution=step), 0.0)
    for x in draw(random, (counts[1], seeds)):
        slow["level_bootstrap"] += covers(bootstrap_ci(x, random, resamples=2000, expanded=True), mean)
        slow["level_percentile"] += covers(bootstrap_ci(x, random, resamples=2000), mean)
        slow["iqm_bootstrap"] += covers(bootstrap_ci(x, random, statistic=iqm, resamples=2000, expanded=True), middle)
    return {name: hit / count for hits, count in zip((quick, slow), counts, strict=True) for name, hit in hits.items()}


def evaluations(simulations: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Coverage of one evaluation's interval: problems differ in difficulty, samples of a problem are alike."""
    rows = []
    for problems, samples, name, (a, b) in (
        (128, 1, "middling", (2.0, 2.0)),
        (128, 4, "middling", (2.0, 2.0)),
        (32, 4, "middling", (2.0, 2.0)),
        (128, 4, "easy or hopeless", (0.2, 0.2)),
        (32, 4, "nearly solved", (9.0, 0.5)),
    ):
        clusters = np.repeat(np.arange(problems), samples)
        rates = random.beta(a, b, (simulations, problems)).repeat(samples, axis=1)
        correct = random.random(rates.shape) < rates
        hits = sum(covers(accuracy_interval(row, clusters.tolist()), a / (a + b)) for row in correct)
        rows.append({"problems": problems, "samples": samples, "kind": name, "coverage": hits / simulations})
    return rows


def simulate(simulations: int, resampled: int) -> dict[str, Any]:
    """All simulated tables."""
    spreads = []
    for index, (name, (draw, step)) in enumerate(SPREADS.items()):
        for seeds in SEEDS:
            random = np.random.default_rng((index, seeds))
            row = false_positives(draw, seeds, simulations, random)
            spreads.append({"spread": name} | row | coverage(draw, step, seeds, (simulations, resampled), random))
            print(f"{name}, {seeds} seeds: done", file=sys.stderr)
    return {"spreads": spreads, "evaluations": evaluations(resampled, np.random.default_rng(7))}


def campaigns(runs: int, steps: int, deals: int, out: Path) -> dict[str, Any]:
    """Real A/A comparisons: identical runs with different random streams, dealt into pairs of two conditions."""
    begin = time.process_time()
    alike = {"advantage_mode": "grpo", "transform_mode": "none"}
    scores = accuracies(train(out, [alike], seeds=range(1, runs + 1), steps=steps, batch_size=4))[0]
    seconds = time.process_time() - begin
    level = partial(mean_interval, share=True, resolution=1.0 / PROBLEMS)
    random = np.random.default_rng(1)
    rows = []
    for pairs in (n for n in SEEDS if 2 * n <= len(scores)):
        dealt = [random.permutation(scores)[: 2 * pairs].reshape(2, pairs) for _ in range(deals)]
        found = [paired_comparison(a, b) for a, b in dealt]
        stopped = [sequential_looks(a - b, pairs)[-1].stop for a, b in dealt]
        rows.append(
            {
                "pairs": pairs,
                "declared": float(np.mean([each.verdict_possible and each.p <= PROMISE for each in found])),
                "declared_sequentially": float(np.mean(stopped)),
                "difference_t": float(np.mean([covers(Interval(e.mean, e.low, e.high), 0.0) for e in found])),
                "level": float(np.mean([covers(level(a), float(scores.mean())) for a, _ in dealt])),
            }
        )
    deviation = scores - scores.mean()
    return {
        "runs": len(scores),
        "steps": steps,
        "deals": deals,
        "cpu_seconds": seconds,
        "mean": float(scores.mean()),
        "spread": float(scores.std(ddof=1)),
        "skewness": float((deviation**3).mean() / scores.std() ** 3),
        "rows": rows,
    }


def told(found: dict[str, Any], simulations: int, resampled: int) -> str:
    """The tables as text, values outside what is promised marked with *."""
    lines = [
        f"A/A comparisons, {simulations} simulations each (± two standard errors of 5 %: "
        f"{100 * error(PROMISE, simulations):.1f} points)",
        "",
        f"{'spread':<28}seeds  declared  of four  sequential  pairs used",
    ]
    for row in found["spreads"]:
        rates = (row["declared"], row["declared_in_family"], row["declared_sequentially"])
        marks = [f"{100 * r:.1f}%{'*' if r > PROMISE + error(PROMISE, simulations) else ' '}" for r in rates]
        lines.append(
            f"{row['spread']:<28}{row['seeds']:>5}{marks[0]:>10}{marks[1]:>9}{marks[2]:>12}{row['pairs_used']:>12.1f}"
        )
    lines += ["", f"Coverage of 95 % intervals (resampled ones: {resampled} simulations); * outside 93 to 97 %", ""]
    lines.append(f"{'spread':<28}seeds" + "".join(f"{heading:>14}" for heading in INTERVALS.values()))
    for row in found["spreads"]:
        cells = [f"{100 * row[key]:.1f}%{' ' if BAND[0] <= row[key] <= BAND[1] else '*'}" for key in INTERVALS]
        lines.append(f"{row['spread']:<28}{row['seeds']:>5}" + "".join(f"{cell:>14}" for cell in cells))
    lines += ["", "Coverage of the interval within one evaluation, clustered by problem", ""]
    for row in found["evaluations"]:
        lines.append(
            f"{row['problems']:>4} problems × {row['samples']}, {row['kind']:<18}{100 * row['coverage']:>6.1f}%"
        )
    if real := found.get("campaigns"):
        lines += [
            "",
            f"{real['runs']} identical runs of {real['steps']} steps ({real['cpu_seconds']:.0f} CPU seconds): held-out "
            f"accuracy {100 * real['mean']:.1f}% ± {100 * real['spread']:.1f} points, skewness {real['skewness']:.2f}; "
            f"dealt {real['deals']} times into two conditions",
            "",
            "pairs  declared  sequential  difference  level",
        ]
        for row in real["rows"]:
            rates = [row[key] for key in ("declared", "declared_sequentially", "difference_t", "level")]
            lines.append(f"{row['pairs']:>5}" + "".join(f"{100 * rate:>10.1f}%" for rate in rates))
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--resampled", type=int, default=1000, help="simulations of the slow, resampled intervals")
    parser.add_argument("--runs", type=int, default=0, help="identical runs to train; 0 leaves the campaigns out")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each of them")
    parser.add_argument("--deals", type=int, default=4000, help="how often they are dealt into pairs")
    parser.add_argument("--out", type=Path, help="where the runs go; default a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = simulate(args.simulations, args.resampled)
    if args.runs:
        with tempfile.TemporaryDirectory() as folder:
            found["campaigns"] = campaigns(args.runs, args.steps, args.deals, args.out or Path(folder))
    print(told(found, args.simulations, args.resampled))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
