"""Do the intervals of a verdict hold what they promise? Every rule beside the one that it took the place of.

    python benchmarks/intervals.py [--simulations 4000] [--only family kept scores problems stopped equivalence]

- ``family``: how often the intervals of four differences to a baseline contain the truth *all at once*, and how wide
  they are: Student's t for each alone, t at level α/4, the sign-flip test inverted at α/4 (what campaigns with the
  exact test have), the pooled spread with Dunnett's quantile (what those with ``test = "normal"`` have); and the
  sign-flip intervals cut at 0 where Holm's test shows a difference, at the worst place for that.
- ``kept``: how often a compressed adapter that loses exactly 2 points is called good enough, by Tango's score interval
  and by that of Agresti and Min, with whole problems lost, gains beside losses, single samples lost.
- ``scores``: coverage and width of the interval of pass@k within one evaluation, from the spread of the problems and as
  if every problem were right or wrong.
- ``problems``: how often the interval for new problems misses, and how often the one over seeds covers when it is read
  as if it were that.
- ``stopped``: how often mean and median-unbiased estimate lie above the truth after looks (½ is unbiased), and how
  often their intervals cover.
- ``equivalence``: how often a difference as large as the margin is called none beyond it, with looks and without.

Coverage and errors in per cent; differences are in units of one pair's standard deviation unless points are named.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

from retrain.maths.bounded import smallest_room
from retrain.maths.crossed import new_problems_interval
from retrain.maths.family import simultaneous_intervals, t_interval
from retrain.maths.sequential import sequential_looks
from retrain.maths.statistics import Interval, _t_quantile, accuracy_interval, holm, pass_at_k, sign_flip_p, tost_p
from retrain.maths.stopped import stopped_interval

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
FAMILY = 4
SPREADS: dict[str, Draw] = {
    "normal": lambda r, size: r.normal(size=size),
    "t, 3 degrees": lambda r, size: r.standard_t(3, size=size),
    "one condition 3 times as wide": lambda r, size: r.normal(size=size) * np.array([1, 1, 1, 1, 3]),
    "baseline 3 times as wide": lambda r, size: r.normal(size=size) * np.array([3, 1, 1, 1, 1]),
    "10 % collapse by 5": lambda r, size: r.normal(size=size) - 5.0 * (r.random(size) < 0.1),
}


def ends(interval: Interval | None) -> tuple[float, float]:
    """Both ends, in points; an interval that does not exist excludes everything."""
    if interval is None or interval.low is None or interval.high is None:
        return math.inf, -math.inf
    return interval.low, interval.high


def covers(interval: Interval | None, truth: float) -> bool:
    """Whether there is an interval and it contains the truth."""
    low, high = ends(interval)
    return low - 1e-12 <= truth <= high + 1e-12


def family(count: int) -> Iterator[str]:
    """Joint coverage and mean width."""
    yield f"{'spread':<30} seeds  " + "".join(f"{name:>18}" for name in ("t alone", "t, α/4", "sign flips", "pooled"))
    for name, draw in SPREADS.items():
        for seeds in (5, 7, 8, 9):
            random = np.random.default_rng(seeds)
            hits, widths, tables = np.zeros(4), np.zeros(4), draw(random, (count, seeds, FAMILY + 1))
            for x in tables:
                d = x[:, 1:] - x[:, :1]
                rules = [
                    [t_interval(each) for each in d.T],
                    [t_interval(each, 1 - 0.05 / FAMILY) for each in d.T],
                    simultaneous_intervals(x, "exact"),
                    simultaneous_intervals(x, "normal"),
                ]
                hits += [all(covers(each, 0.0) for each in rule) for rule in rules]
                widths += [np.mean([each.high - each.low for each in rule if each]) for rule in rules]
            cells = [
                f"{100 * hit / count:>10.1f} {width / count:>6.2f} " for hit, width in zip(hits, widths, strict=True)
            ]
            yield f"{name:<30}{seeds:>6}  " + "".join(cells)
    yield "with fewer than 8 seeds sign flips reach no p = 0.05/4: the t at α/4 takes their place"
    yield from _cut(count)


def _cut(count: int) -> Iterator[str]:
    """Where one difference is a hair below 0 and the others are shown by Holm's test: its interval may be cut."""
    random, missed, uncut = np.random.default_rng(0), 0, 0
    truth = np.array([0.0, -1e-6, 8.0, 8.0, 8.0])
    for x in random.normal(size=(count, 9, FAMILY + 1)) + truth:
        d = x[:, 1:] - x[:, :1]
        shown = holm([sign_flip_p(each) for each in d.T]) <= 0.05
        for j, (own, each) in enumerate(zip(simultaneous_intervals(x, "exact"), d.T, strict=True)):
            low, high = ends(own)
            if shown[j]:
                low, high = (max(low, 0.0), high) if each.mean() > 0 else (low, min(high, 0.0))
            if not low <= truth[j + 1] <= high:
                missed += 1
                break
        uncut += all(covers(own, t) for own, t in zip(simultaneous_intervals(x, "exact"), truth[1:], strict=True))
    yield (
        f"one of four a hair below 0, three far above, 9 seeds: all covered {100 * (1 - missed / count):.1f} with "
        f"cuts, {100 * uncut / count:.1f} without"
    )


def _lows(gains: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower ends of [simulations, problems]: Tango's and Agresti and Min's."""
    support = np.arange(-samples, samples + 1) / samples
    shares = np.stack([(np.rint(gains * samples) == k).mean(axis=1) for k in range(-samples, samples + 1)], axis=1)
    score = -1.0 + smallest_room((support + 1.0)[None], shares, gains.shape[1], _t_quantile(0.95, math.inf))
    n = gains.shape[1]
    centre = gains.sum(axis=1) / (n + 2)
    variance = ((gains**2).sum(axis=1) + 1.0) / (n + 2) - centre**2
    return score, centre - _t_quantile(0.95, n - 1) * np.sqrt(variance / (n + 2))


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


def scores(count: int) -> Iterator[str]:
    """pass@k of one evaluation: problems of unequal difficulty, Beta(a, b)."""
    yield f"{'':<48}{'spread of problems':>22}{'as right or wrong':>22}"
    for problems, n, k, a, b in (
        (128, 8, 2, 50, 50), (128, 8, 2, 2, 2), (128, 8, 4, 2, 2), (32, 8, 4, 2, 2), (128, 8, 4, 0.2, 0.2),
        (128, 16, 4, 0.5, 3), (32, 4, 2, 9, 0.5), (128, 8, 8, 2, 2),
    ):  # fmt: skip
        random = np.random.default_rng(problems)
        table = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
        values = table[random.binomial(n, random.beta(a, b, (count, problems)))]
        truth = float((1.0 - (1.0 - random.beta(a, b, 2_000_000)) ** k).mean())
        support = np.unique(table)
        shares = np.stack([(values == each).mean(axis=1) for each in support], axis=1)
        quantile = _t_quantile(0.95, problems - 1)
        low = smallest_room(support[None], shares, problems - 1, quantile)
        high = 1.0 - smallest_room((1.0 - support)[None], shares, problems - 1, quantile)
        old = [accuracy_interval(row, range(problems)) for row in values[: count // 8]]
        words = f"pass@{k} of {n}, {problems} problems, Beta({a:g}, {b:g})"
        ours = 100 * np.mean((low <= truth) & (truth <= high)), 100 * np.mean(high - low)
        widths = [high - low for low, high in map(ends, old)]
        theirs = 100 * np.mean([covers(each, truth) for each in old]), 100 * np.mean(widths)
        yield f"{words:<48}" + "".join(f"{c:>12.1f} ±{w / 2:>5.1f} pts" for c, w in (ours, theirs))


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
                read += covers(t_interval((score[:, :, 0] - score[:, :, 1]).mean(axis=1)), 0.0)
            words = f"{seeds:>5}{count_p:>9}{samples:>8}" + "".join(f"{each:>8}" for each in spreads)
            yield f"{words:<48}{100 * missed / count:>20.1f}{100 * read / count:>20.1f}"


def stopped(count: int) -> Iterator[str]:
    """Eight planned pairs, normal differences of spread 1, the real rule."""
    yield f"{'rule':<16}{'truth':>6}{'early':>8}{'mean: above, covers':>24}{'adjusted: above, covers':>26}"
    for rule in ("linear", "obrien_fleming"):
        for truth in (0.0, 0.5, 1.0, 1.5, 2.5):
            random, rows = np.random.default_rng(1), []
            for d in random.normal(truth, 1.0, (count // 8, 8)):
                looks = sequential_looks(d, 8, spending=rule)
                seen = d[: looks[-1].pairs]
                spread, spent = float(seen.std(ddof=1)), [round(each.spent, 3) for each in looks]
                own = stopped_interval(float(seen.mean()), spread, spent, len(seen) - 1)
                rows.append((
                    len(seen) < 8, seen.mean() > truth, covers(t_interval(seen), truth), own.estimate > truth,
                    covers(own, truth),
                ))  # fmt: skip
            early, above, cover, own_above, own_cover = 100 * np.mean(rows, axis=0)
            cells = f"{early:>8.0f}{above:>14.1f}{cover:>10.1f}{own_above:>16.1f}{own_cover:>10.1f}"
            yield f"{rule:<16}{truth:>6.1f}{cells}"


def equivalence(count: int) -> Iterator[str]:
    """A difference as large as the margin, or none: how often it is called none beyond the margin."""
    yield f"{'seeds':>5}{'margin':>8}{'truth':>8}{'without looks':>16}{'with looks, at the end':>24}"
    for seeds in (8, 12):
        for margin, truth in ((0.8, 0.8), (1.2, 1.2), (1.2, 0.0)):
            random, plain, looked = np.random.default_rng(seeds), 0, 0
            for d in random.normal(truth, 1.0, (count // 2, seeds)):
                small = tost_p(d, margin) <= 0.05
                plain += small
                looked += small and not sequential_looks(d, seeds)[-1].stop
            rates = f"{200 * plain / count:>16.1f}{200 * looked / count:>24.1f}"
            yield f"{seeds:>5}{margin:>8.1f}{truth:>8.1f}{rates}"


PARTS = {each.__name__: each for each in (family, kept, scores, problems, stopped, equivalence)}


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
