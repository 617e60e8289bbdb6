"""Do the intervals of evaluations hold what they promise?

    python benchmarks/intervals.py [--simulations 4000] [--only kept problems]

- ``kept``: how often a compressed adapter that loses exactly 2 points is called good enough, by Tango's score interval
  and by that of Agresti and Min, with whole problems lost, gains beside losses, single samples lost.
- ``problems``: how often the interval for new problems misses, and how often the one over seeds covers when it is read
  as if it were that.

Coverage and errors in per cent.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

from retrain.maths.bounded import smallest_room
from retrain.maths.crossed import new_problems_interval
from retrain.maths.statistics import Interval, _t_quantile, paired_interval

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def ends(interval: Interval | None) -> tuple[float, float]:
    """Both ends, in points; an interval that does not exist excludes everything."""
    if interval is None or interval.low is None or interval.high is None:
        return math.inf, -math.inf
    return interval.low, interval.high


def covers(interval: Interval | None, truth: float) -> bool:
    """Whether there is an interval and it contains the truth."""
    low, high = ends(interval)
    return low - 1e-12 <= truth <= high + 1e-12


def _lows(gains: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower ends of [simulations, problems]: Tango's and Agresti and Min's."""
    support = np.arange(-samples, samples + 1) / samples
    shares = np.stack([(np.rint(gains * samples) == k).mean(axis=1) for k in range(-samples, samples + 1)], axis=1)
    score = -1.0 + smallest_room((support + 1.0)[None], shares, gains.shape[1], _t_quantile(math.inf))
    n = gains.shape[1]
    centre = gains.sum(axis=1) / (n + 2)
    variance = ((gains**2).sum(axis=1) + 1.0) / (n + 2) - centre**2
    return score, centre - _t_quantile(n - 1) * np.sqrt(variance / (n + 2))


def kept(count: int) -> Iterator[str]:
    """Losses of exactly 2 points that are called none above 2 points."""
    kinds: dict[str, tuple[int, Draw]] = {
        "1 sample, problems lost": (1, lambda r, size: np.where(r.random(size) < 0.02, -1.0, 0.0)),
        "1 sample, 3 % lost, 1 % gained": (1, lambda r, size: _pick(r.random(size), (0.03, -1.0), (0.04, 1.0))),
        "1 sample, 11 % lost, 9 % gained": (1, lambda r, size: _pick(r.random(size), (0.11, -1.0), (0.20, 1.0))),
        "4 samples, independent": (4, _independent),
        "4 samples, 1 % lost, 4 % lose one": (4, lambda r, size: _pick(r.random(size), (0.01, -1.0), (0.05, -0.25))),
        "8 samples, 1 % lost, 8 % lose one": (8, lambda r, size: _pick(r.random(size), (0.01, -1.0), (0.09, -0.125))),
    }
    yield f"{'':<36}" + "".join(f"{n:>9} problems" for n in (64, 128, 189, 256, 512)) + "   (Tango, Agresti–Min)"
    for name, (samples, draw) in kinds.items():
        cells = []
        for problems in (64, 128, 189, 256, 512):
            lows = _lows(draw(np.random.default_rng(problems), (count, problems)), samples)
            cells.append("".join(f"{100 * (low >= -0.02).mean():>9.1f}" for low in lows))
        yield f"{name:<36}" + "".join(cells)


def _pick(u: np.ndarray, *steps: tuple[float, float]) -> np.ndarray:
    return np.select([u < below for below, _ in steps], [value for _, value in steps], 0.0)


def _independent(random: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    rate = np.clip(random.beta(2.0, 1.0, size), 0.02, 1.0)
    return (random.binomial(4, rate - 0.02) - random.binomial(4, rate)) / 4


def problems(count: int) -> Iterator[str]:
    """Equal conditions on average; spreads of seeds, of a problem's own effect, of the cell, in points."""
    yield f"{'seeds problems samples   seed  problem  cell':<48}{'new problems miss':>20}{'over seeds covers':>20}"
    for seeds, count_p, samples in ((5, 64, 4), (8, 128, 1), (8, 128, 4), (6, 32, 1), (9, 256, 1)):
        for spreads in ((2, 30, 10), (3, 10, 5), (3, 0, 5), (0, 30, 10), (1, 20, 20)):
            of_seed, of_problem, cell = (each / 100 for each in spreads)
            random, missed, read = np.random.default_rng(seeds), 0, 0
            for _ in range(count):
                rate = random.beta(2.0, 1.5, count_p)[None, :, None] + of_seed * random.normal(size=(seeds, 1, 2))
                effect = 0.5 * of_problem * random.normal(size=count_p)
                rate = rate + np.stack([effect, -effect], axis=1) + cell * random.normal(size=(seeds, count_p, 2))
                score = random.binomial(samples, np.clip(rate, 0.0, 1.0)) / samples
                missed += not covers(new_problems_interval(score), 0.0)
                read += covers(paired_interval(*score.mean(axis=1).T), 0.0)
            words = f"{seeds:>5}{count_p:>9}{samples:>8}" + "".join(f"{each:>8}" for each in spreads)
            yield f"{words:<48}{100 * missed / count:>20.1f}{100 * read / count:>20.1f}"


PARTS = {each.__name__: each for each in (kept, problems)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    for name in args.only:
        print(f"== {name} ==", flush=True)
        for line in PARTS[name](args.simulations):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
