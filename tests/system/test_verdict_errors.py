"""How often the rule finds a difference where there is none: 2,000 simulated campaigns in six kinds of results."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from retrain.verdicts.rule import interim_seeds, judge

Floats = NDArray[np.float64]
CAMPAIGNS = 2_000
LIMIT = 0.05 + 3 * (0.05 * 0.95 / CAMPAIGNS) ** 0.5


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


@pytest.mark.parametrize(
    ("results", "conditions", "seeds", "least"),
    [
        (normal, 1, 10, 0.035),
        (noisy_baseline, 3, 8, 0.02),
        (heavy_tails, 5, 8, 0.025),
        (skew, 2, 10, 0.03),
        (collapsing, 3, 10, 0.03),
        (half_take_off, 1, 8, 0.03),  # with 8 conditions the rule is conservative there: about 1 %
    ],
)
def test_finds_a_difference_in_at_most_one_of_twenty(
    results: Callable[[Generator, tuple[int, int]], Floats], conditions: int, seeds: int, least: float
) -> None:
    rng = np.random.default_rng(40)
    interim = interim_seeds(seeds)
    wrong = 0
    for _ in range(CAMPAIGNS):
        runs = results(rng, (conditions + 1, seeds))
        differences = runs[1:] - runs[0]
        wrong += any(found.is_decided for found in judge(differences, differences[:, :interim]))
    assert least < wrong / CAMPAIGNS < LIMIT
