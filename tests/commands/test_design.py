import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers.models import campaign_head
from helpers.records import BASE, campaign, shifted
from typer.testing import CliRunner

from retrain.campaign.planning.plan import plan
from retrain.cli import app
from retrain.config import parse_dict
from retrain.errors import UsageError
from retrain.maths.power import detectable, seeds_needed, spread_limit
from retrain.maths.rules import Rule
from retrain.verdicts.design import factors, pilot_spread, verdict_lines, warnings_of
from retrain.verdicts.results import Measure

ROOT = Path(__file__).parents[2]


def planned(*conditions: str, head: str = ""):
    """Plan conditions given as advantage+transform, or advantage+transform|further keys."""
    text = f"[campaign]\n{head}\n"
    for condition in conditions:
        modes, _, more = condition.partition("|")
        advantage, transform = modes.split("+")
        text += campaign_head((advantage, transform)).removeprefix("[campaign]\n") + f"{more}\n"
    return plan(parse_dict(tomllib.loads(text)))


def test_what_the_seeds_detect_with_an_assumed_and_with_a_measured_spread(tmp_path):
    specs, effect = planned("grpo+none", "maxrl+none", "rloo+none"), detectable(Rule(family=2))
    first, found, cost, needs = verdict_lines(specs, None, 2.0)
    assert "8 pairs of seeds, exact test, p corrected for 2 comparisons" in first
    assert "4 points (assumed" in first
    assert found == f"detected with 80 % probability: {4 * effect:.2g} points or more"
    assert needs == f"a difference of 2 points needs {seeds_needed(Rule(family=2), 0.5)} seeds"
    assert "after all 24 runs" in cost
    runs = np.array([BASE[:4], shifted(0.02, 0.01)[:4], shifted(0.0, 0.01)[:4]])
    pilot = campaign(tmp_path, dict(zip("abc", runs.tolist(), strict=True)))
    spread = pilot_spread(pilot, Measure())
    residual = runs - runs.mean(axis=0) - runs.mean(axis=1, keepdims=True) + runs.mean()
    assert spread.freedom == 6
    assert spread.value == pytest.approx((2.0 * (residual**2).sum() / 6) ** 0.5)
    lines = verdict_lines(specs, pilot, None)
    assert "0.94 points (residual of 12 runs of" in lines[0]
    assert "90 % sure to be 0.65 to 1.8" in lines[0]
    limit = 100.0 * spread_limit(spread.value, 6)
    assert lines[1] == f"planned with {limit:.2g} points, which it is below with 80 % probability"
    assert lines[2] == f"detected with 80 % probability: {limit * effect:.2g} points or more"


def test_a_pilot_with_one_condition_or_one_seed(tmp_path):
    alone = pilot_spread(campaign(tmp_path / "one", {"a": list(BASE)}), Measure())
    assert alone.value == pytest.approx(2**0.5 * np.std(BASE, ddof=1))
    with pytest.raises(UsageError, match="two seeds or more"):
        pilot_spread(campaign(tmp_path / "few", {"a": [0.5], "b": [0.6]}), Measure())
    same = campaign(tmp_path / "same", {"a": [0.5, 0.5], "b": [0.6, 0.6]})
    assert "cannot tell how much seeds vary" in verdict_lines(planned("grpo+none", "rloo+none"), same, None)[1]


def test_a_design_that_cannot_reach_significance_is_told():
    specs = planned("grpo+none", "maxrl+none", "rloo+none", head="seeds = [1, 2, 3, 4, 5, 6]")
    assert "no verdict is possible: with 3 conditions it needs 7 seeds" in verdict_lines(specs, None, None)[1]
    assert verdict_lines(planned("grpo+none"), None, None) == []


def test_conditions_in_more_than_one_factor_are_told_with_the_one_that_isolates():
    further = "maxrl+gtpo|gtpo.beta = 0.5\nlr = 1e-3"
    specs = planned("grpo+none", "maxrl+none", "maxrl+gtpo", further, head="seeds = [1]")
    assert factors(specs[2], specs[0]) == ["advantage_mode", "transform_mode"]
    assert factors(specs[3], specs[2]) == ["gtpo.beta", "training.lr"]
    assert factors(specs[3], specs[1]) == ["transform_mode", "training.lr"]  # beta belongs to gtpo
    first, second = [line for line in warnings_of(specs) if "factors" in line]
    assert first.endswith("retrain compare DIR --baseline maxrl")
    assert "retrain compare" not in second


def test_advantages_on_different_scales_are_told():
    (line,) = warnings_of(planned("grpo+none", "maxrl+none"))
    assert "grpo 1, 1, 1; maxrl 3, 1, 0.33" in line
    assert warnings_of(planned("dr_grpo+none", "rloo+none")) == []
    assert warnings_of(planned("grpo+none", "maxrl+none|lr = 3e-4")) != []  # two factors now


def test_explain_says_it(tmp_path):
    """Five conditions that race take at most 60 % of the runs that eight seeds of the exact test take."""

    def explain(name: str, *arguments: str):
        return CliRunner().invoke(app, ["explain", str(ROOT / "campaigns" / name), *arguments])

    result = explain("five_conditions.toml")
    assert result.exit_code == 0
    assert re.search(r"^verdict +final:eval/heldout/correct_rate, 8 pairs", result.stdout, re.MULTILINE)
    alike = re.search(r"after (\d+) of 40 runs on average; after (\d+) if all are alike", result.stdout)
    assert max(map(int, alike.groups())) <= 0.6 * 40
    assert "careful" in result.stdout
    pilot = campaign(tmp_path, {"a": list(BASE), "b": shifted(0.02)})
    assert f"residual of 16 runs of {pilot}" in explain("quickstart.toml", "--pilot", str(pilot)).stdout
    assert explain("quickstart.toml", "--pilot", str(tmp_path / "nowhere")).exit_code == 2
