"""MaxRL, GRPO and RLOO on a known result: scikit-learn's digits as "one of 200 classes", where success starts rare.

    python benchmarks/maxrl_digits.py [--seeds 3] [--steps 1500] [--workers 2] [--json FILE] [--quick] [--tune]

The policy is a small network with 200 outputs, of which ten mean a digit, so the first guess is right once in 200. For
each image of a batch it samples N answers, the reward is 1 for the right one, and the update climbs the mean of
advantage × log-probability with the advantages of ``retrain.algorithms``. Cross-entropy on the labels, which samples
nothing and is told the answer, is the ceiling. pass@1 is the probability of the right digit, averaged over held-out
images and computed from the policy's probabilities, so it has no sampling noise.

Two optimizers, because they answer differently: plain SGD takes steps as long as the gradient, so what an advantage
does with rare success shows in full; Adam rescales every step and hides much of it. Methods share, by seed, the first
weights, the order of images and the random numbers of sampling. RATES holds the learning rates that ``--tune`` chose,
for each method and N alone from the same grid, on seeds and images that the table does not use.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from retrain.algorithms import GROUP_ADVANTAGES
from retrain.files import write_json
from retrain.maths.intervals import mean_interval
from retrain.maths.statistics import paired_interval
from retrain.rng import torch_seed

CLASSES, DIGITS = 200, 10
BATCH, HIDDEN = 64, 128
HELD_OUT, VALIDATION = 360, 360
SAMPLES = (8, 64, 512)
METHODS = ("maxrl", "grpo", "rloo")
CEILING = "cross_entropy"
TUNING_SEEDS = (100, 101, 102)
GRID = {"sgd": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "sgd": {"maxrl": (0.3, 0.3, 1.0), "grpo": (3.0, 0.1, 1.0), "rloo": (3.0, 3.0, 10.0), CEILING: (1.0,)},
    "adam": {"maxrl": (1e-3, 1e-2, 3e-2), "grpo": (1e-3, 3e-2, 1e-2), "rloo": (1e-3, 3e-3, 3e-3), CEILING: (3e-2,)},
}


@dataclass(frozen=True)
class Job:
    """One training run. ``samples`` is N, 0 for the ceiling; ``tuning`` keeps the held-out images out of it."""

    optimizer: str
    method: str
    samples: int
    rate: float
    seed: int
    steps: int
    tuning: bool = False


@dataclass(frozen=True)
class Result:
    """pass@1 before and after training, after it by digit, and the processor time of the run."""

    start: float
    pass_at_1: float
    by_digit: list[float]
    cpu_s: float

    @property
    def learned(self) -> int:
        return sum(value > 0.5 for value in self.by_digit)


@cache
def images(tuning: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images [n, 64] and labels [n], then those to measure on: held out, or for tuning a part of training."""
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels / 16.0, labels, test_size=HELD_OUT, stratify=labels, random_state=0)
    if tuning:
        pixels, labels = split[0], split[2]
        split = train_test_split(pixels, labels, test_size=VALIDATION, stratify=labels, random_state=0)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    return x.float(), y, x_test.float(), y_test


def surrogate(logprobs_P_V: Tensor, labels_P: Tensor, job: Job, draw: torch.Generator) -> Tensor:
    """What one step descends: −mean A·log π over N answers for each image, or the cross-entropy of the ceiling."""
    if job.method == CEILING:
        return -logprobs_P_V.gather(1, labels_P[:, None]).mean()
    cumulative_P_V = logprobs_P_V.detach().double().exp().cumsum(-1)
    uniform_P_N = torch.rand(len(labels_P), job.samples, generator=draw, dtype=torch.float64)
    answers_P_N = torch.searchsorted(cumulative_P_V, uniform_P_N * cumulative_P_V[:, -1:], right=True)
    answers_P_N.clamp_(max=CLASSES - 1)
    rewards_P_N = (answers_P_N == labels_P[:, None]).double()
    advantages_P_N = GROUP_ADVANTAGES[job.method](rewards_P_N).float()
    return -(advantages_P_N * logprobs_P_V.gather(1, answers_P_N)).mean()


@torch.no_grad()
def by_digit(policy: torch.nn.Module, x: Tensor, y: Tensor) -> tuple[float, list[float]]:
    """Mean probability of the right class over all images, and over those of each digit."""
    right = policy(x).double().softmax(-1).gather(1, y[:, None])[:, 0]
    return right.mean().item(), [right[y == digit].mean().item() for digit in range(DIGITS)]


def train(job: Job) -> Result:
    """One run, the same for the same job whatever else runs: every random number comes from the seed."""
    torch.set_num_threads(1)
    began = time.process_time()
    x, y, x_test, y_test = images(job.tuning)
    torch.manual_seed(torch_seed("weights", job.seed))
    policy = torch.nn.Sequential(torch.nn.Linear(x.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))
    order, draw = (torch.Generator().manual_seed(torch_seed(stream, job.seed)) for stream in ("order", "answers"))
    optimizer = OPTIMIZERS[job.optimizer](policy.parameters(), lr=job.rate)
    start, _ = by_digit(policy, x_test, y_test)
    for _ in range(job.steps):
        batch_P = torch.randint(len(x), (BATCH,), generator=order)
        loss = surrogate(policy(x[batch_P]).log_softmax(-1), y[batch_P], job, draw)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Result(start, *by_digit(policy, x_test, y_test), time.process_time() - began)


def run(jobs: Sequence[Job], workers: int) -> list[Result]:
    """Results in the order of the jobs. The longest start first, so that no worker waits for another at the end."""
    longest_first = sorted(range(len(jobs)), key=lambda i: -jobs[i].samples)
    if workers == 1:
        done = [train(jobs[i]) for i in longest_first]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            done = list(pool.map(train, [jobs[i] for i in longest_first]))
    return [result for _, result in sorted(zip(longest_first, done, strict=True), key=lambda pair: pair[0])]


def cells(optimizer: str, samples: Sequence[int]) -> Iterator[tuple[str, int, float]]:
    """Method, N and learning rate of every cell of one optimizer's table."""
    for method in METHODS:
        for n in samples:
            yield method, n, RATES[optimizer][method][SAMPLES.index(n)]
    yield CEILING, 0, RATES[optimizer][CEILING][0]


def tune(steps: int, workers: int) -> None:
    """Validation pass@1 of every cell for every rate of the grid; the best rates are those to write into RATES."""
    jobs = [
        Job(optimizer, method, n, rate, seed, steps, tuning=True)
        for optimizer, rates in GRID.items()
        for method, n, _ in cells(optimizer, SAMPLES)
        for rate in rates
        for seed in TUNING_SEEDS
    ]
    scores: dict[tuple[str, str, int], dict[float, float]] = {}
    for job, result in zip(jobs, run(jobs, workers), strict=True):
        cell = scores.setdefault((job.optimizer, job.method, job.samples), {})
        cell[job.rate] = cell.get(job.rate, 0.0) + result.pass_at_1 / len(TUNING_SEEDS)
    for (optimizer, method, n), by_rate in scores.items():
        best = max(by_rate, key=by_rate.__getitem__)
        row = "  ".join(f"{rate:g}: {score:.3f}{'*' if rate == best else ' '}" for rate, score in by_rate.items())
        print(f"{optimizer:<5} {method:<14} {n or '':>4}  {row}")


def summarise(jobs: Sequence[Job], results: Sequence[Result]) -> list[dict]:
    """One row for each cell: pass@1 of every seed with mean and t interval, how many digits were learned, the rate."""
    by_cell: dict[tuple[str, str, int, float], list[Result]] = {}
    for job, result in zip(jobs, results, strict=True):
        by_cell.setdefault((job.optimizer, job.method, job.samples, job.rate), []).append(result)
    rows = []
    for (optimizer, method, n, rate), runs in by_cell.items():
        values = [result.pass_at_1 for result in runs]
        interval = mean_interval(values)
        rows.append(
            {"optimizer": optimizer, "method": method, "samples": n or None, "rate": rate}
            | {"pass_at_1": interval.estimate, "low": interval.low, "high": interval.high, "by_seed": values}
            | {"before_training": sum(result.start for result in runs) / len(runs)}
            | {"digits_learned": sum(result.learned for result in runs) / len(runs)}
        )
    return rows


def compare(rows: Sequence[dict]) -> list[dict]:
    """MaxRL − GRPO, MaxRL − RLOO and GRPO − RLOO over paired seeds, for each optimizer and N."""
    values = {(row["optimizer"], row["samples"], row["method"]): row["by_seed"] for row in rows}
    return [
        {"optimizer": optimizer, "samples": n, "better": a, "than": b}
        | asdict(paired_interval(values[optimizer, n, a], values[optimizer, n, b]))
        for optimizer, n in dict.fromkeys((optimizer, n) for optimizer, n, _ in values if n)
        for a, b in combinations(METHODS, 2)
    ]


def print_tables(rows: Sequence[dict], differences: Sequence[dict]) -> None:
    samples = list(dict.fromkeys(row["samples"] for row in rows if row["samples"]))
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        print(f"\n{optimizer}: held-out pass@1 ± half its 95 % t interval over seeds | digits learned, of ten")
        print(f"{'':<15}" + "".join(f"{f'N = {n}':<24}" for n in samples))
        for method in (*METHODS, CEILING):
            cells_N = [row for row in rows if (row["optimizer"], row["method"]) == (optimizer, method)]
            texts = [
                f"{row['pass_at_1']:.3f} ± {row['high'] - row['pass_at_1']:.3f} | {row['digits_learned']:.1f}"
                for row in cells_N
            ]
            print(f"{method:<15}" + "".join(f"{text:<24}" for text in texts).rstrip())
        print("difference over paired seeds [95 % t interval]")
        for a, b in combinations(METHODS, 2):
            texts = [
                f"{d['estimate']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
                for d in differences
                if (d["optimizer"], d["better"], d["than"]) == (optimizer, a, b)
            ]
            print(f"{f'{a} - {b}':<15}" + "".join(f"{text:<34}" for text in texts).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, 2 or more")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")
    parser.add_argument("--quick", action="store_true", help="SGD with N = 64 alone, 2 seeds, 300 steps, one process")
    parser.add_argument("--tune", action="store_true", help="search the learning rates instead")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("an interval over seeds needs --seeds 2 or more")
    if options.tune:
        tune(options.steps, options.workers)
        return
    optimizers, samples = tuple(OPTIMIZERS), SAMPLES
    if options.quick:
        optimizers, samples, options.seeds, options.steps, options.workers = ("sgd",), (64,), 2, 300, 1
    jobs = [
        Job(optimizer, method, n, rate, seed, options.steps)
        for optimizer in optimizers
        for method, n, rate in cells(optimizer, samples)
        for seed in range(options.seeds)
    ]
    began = time.perf_counter()
    results = run(jobs, options.workers)
    rows = summarise(jobs, results)
    differences = compare(rows)
    start = sum(result.start for result in results) / len(results)
    cpu_s = sum(result.cpu_s for result in results)
    print(
        f"{len(jobs)} runs of {options.steps} steps, seeds 0 to {options.seeds - 1}; pass@1 before training {start:.4f}"
    )
    print(f"{time.perf_counter() - began:.0f} s, {cpu_s:.0f} s of processor time")
    print_tables(rows, differences)
    if options.json:
        write_json(options.json, {"steps": options.steps, "rows": rows, "differences": differences})


if __name__ == "__main__":
    main()
