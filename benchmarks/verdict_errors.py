"""How often the rule of verdicts finds a difference, in simulated campaigns whose true differences are known.

    python benchmarks/verdict_errors.py
    python benchmarks/verdict_errors.py --comparisons 11 16 --seeds 10 --results normal collapsing --campaigns 4000

Every condition has the same results, except that with ``--effects`` above 0 the first one is ahead by so many pair
spreads (standard deviations of a paired difference of two runs that vary as normal ones do). At an effect of 0 the
share is that of campaigns in which any condition is found to differ, elsewhere that in which the first one is found
ahead. Both are printed with the interim analysis and without it, in per cent, ± one standard error of the simulation.
"""

import argparse
from collections.abc import Callable, Mapping

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from retrain.verdicts.rule import interim_seeds, judge

Floats = NDArray[np.float64]
PAIR_SPREAD = 2**0.5  # of two normal runs with a standard deviation of 1


def normal(rng: Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(size=shape)


def noisy_baseline(rng: Generator, shape: tuple[int, int]) -> Floats:
    runs = rng.normal(size=shape)
    runs[0] *= 3
    return runs


def heavy_tails(rng: Generator, shape: tuple[int, int]) -> Floats:
    return rng.standard_t(3, size=shape)


def skew(rng: Generator, shape: tuple[int, int]) -> Floats:
    return rng.exponential(size=shape)


def collapsing(rng: Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(size=shape) - 10 * (rng.random(shape) < 0.1)


def half_take_off(rng: Generator, shape: tuple[int, int]) -> Floats:
    return np.where(rng.random(shape) < 0.5, rng.normal(0, 0.1, shape), rng.normal(10, 1, shape))


RESULTS: Mapping[str, Callable[[Generator, tuple[int, int]], Floats]] = {
    function.__name__: function for function in (normal, noisy_baseline, heavy_tails, skew, collapsing, half_take_off)
}
"""Results of [conditions + 1, seeds] runs by name; the first row is the baseline."""


def share_found(
    results: str, comparisons: int, seeds: int, campaigns: int, effect: float = 0.0, *, has_interim: bool = True
) -> float:
    """Return the share of simulated campaigns in which a difference is found: any where all are alike, else that the
    first condition is better."""
    rng, found = np.random.default_rng(40), 0
    interim = interim_seeds(seeds) if has_interim else None
    for _ in range(campaigns):
        runs = RESULTS[results](rng, (comparisons + 1, seeds))
        differences = runs[1:] - runs[0]
        differences[0] += effect * PAIR_SPREAD
        analyses = judge(differences, None if interim is None else differences[:, :interim])
        found += analyses[0].outcome == "higher" if effect else any(each.is_decided for each in analyses)
    return found / campaigns


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/verdict_errors.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--comparisons", type=int, nargs="+", default=[1, 8, 11, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--results", nargs="+", choices=RESULTS, default=["normal", "noisy_baseline", "collapsing"])
    parser.add_argument("--effects", type=float, nargs="+", default=[0.0, 1.0, 1.5, 2.0], metavar="SPREADS")
    parser.add_argument("--campaigns", type=int, default=2_000)
    args = parser.parse_args()
    print(f"{'results':<15} {'comparisons':>11} {'seeds':>5} {'spreads':>7}  with interim  without")
    for results in args.results:
        for comparisons in args.comparisons:
            for seeds in args.seeds:
                for effect in args.effects:
                    cell = (results, comparisons, seeds, args.campaigns, effect)
                    shares = [share_found(*cell, has_interim=has_interim) for has_interim in (True, False)]
                    ends = [100 * (share * (1 - share) / args.campaigns) ** 0.5 for share in shares]
                    both = [f"{100 * share:5.1f} ± {end:.1f}" for share, end in zip(shares, ends, strict=True)]
                    print(f"{results:<15} {comparisons:>11} {seeds:>5} {effect:>7g}  {both[0]:>12}  {both[1]}")


if __name__ == "__main__":
    main()
