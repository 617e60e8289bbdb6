"""How often the rule finds a difference, by the simulation in benchmarks/verdict_errors.py: where there is none, and
where one condition is ahead."""

import importlib
import sys
from pathlib import Path

import pytest

from retrain.verdicts.planning import EFFECTS, FAMILIES, POWER

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
CAMPAIGNS = 2_000
LIMIT = 0.05 + 3 * (0.05 * 0.95 / CAMPAIGNS) ** 0.5


@pytest.fixture(scope="module")
def share_found():
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("verdict_errors").share_found
    sys.path.remove(BENCHMARKS)
    del sys.modules["verdict_errors"]


@pytest.mark.parametrize(("results", "conditions", "seeds", "least"), [
    ("normal", 1, 10, 0.035),
    ("noisy_baseline", 3, 8, 0.02),
    ("heavy_tails", 5, 8, 0.025),
    ("skew", 2, 10, 0.03),
    ("collapsing", 3, 10, 0.03),
    ("half_take_off", 1, 8, 0.03),  # with 8 conditions the rule is conservative there: about 1 %
    ("normal", 11, 10, 0.03),
    ("collapsing", 16, 10, 0.03),
])  # fmt: skip
def test_finds_a_difference_in_at_most_one_of_twenty(share_found, results, conditions, seeds, least) -> None:
    assert least < share_found(results, conditions, seeds, CAMPAIGNS) < LIMIT


@pytest.mark.parametrize("conditions", [3, 11, 16])
def test_finds_what_the_planning_table_promises(share_found, conditions) -> None:
    promised = POWER[10][FAMILIES.index(conditions)][EFFECTS.index(1.5)] / 100
    found = share_found("normal", conditions, 10, 400, 1.5, has_interim=False)
    assert found == pytest.approx(promised, abs=0.08)  # four standard errors
