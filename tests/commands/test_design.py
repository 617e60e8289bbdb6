import tomllib
from pathlib import Path

import numpy as np
import pytest
from helpers.campaigns import run_cli
from helpers.models import campaign_head
from helpers.records import BASE, campaign, shifted

from retrain.campaign.planning.plan import plan
from retrain.config import parse_dict
from retrain.errors import UsageError
from retrain.verdicts.design import factors, pilot_spread, verdict_lines, warnings_of
from retrain.verdicts.planning import power, seeds_needed
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


def test_the_power_by_pair_spreads_and_with_a_measured_spread(tmp_path):
    specs = planned("grpo+none", "maxrl+none", "rloo+none")
    first, needs, spread, found, proposed = verdict_lines(specs, None, None)
    assert first.endswith("8 pairs of seeds, 2 comparisons, interim analysis after 7 seeds")
    assert needs == "a verdict needs 6 seeds or more, 7 at an interim analysis"
    assert spread.startswith("pair spread unknown")
    assert found.endswith("1, 1.5, 2, 3 pair spreads is found with 49, 85, 98, 100 % probability")
    assert proposed.startswith("proposed: 10 seeds with the interim analysis")
    assert "67, 96 and 100 %" in proposed
    pilot = campaign(tmp_path, {"a": list(BASE), "b": shifted(0.02, 0.01), "c": shifted(0.0, 0.01)})
    measured = pilot_spread(pilot, Measure())
    pairs = np.subtract([shifted(0.02, 0.01), shifted(0.0, 0.01)], BASE)
    assert measured.value == pytest.approx(np.sqrt(pairs.var(axis=1, ddof=1).mean()))
    target = 1.5 * measured.value
    lines = verdict_lines(specs, pilot, 100 * target)
    spread = f"(standard deviation of a paired difference) {100 * measured.value:.2g} points: 16 pairs of {pilot}"
    assert lines[2] == f"pair spread {spread}"
    found = f"a difference of {100 * target:.2g} points is found with 85 % probability"
    assert lines[3] == f"{found}; for 80 % it takes 8 seeds"


def test_the_declared_margin_and_an_earlier_campaign_of_the_same_file(tmp_path):
    head = "equivalence_margin = 0.02\nseeds = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"
    earlier = campaign(tmp_path, {"a": list(BASE), "b": shifted(0.02, 0.01)})
    lines = verdict_lines(planned("grpo+none", "rloo+none", head=head), None, None, earlier)
    assert "16 pairs" not in lines[2]
    assert f"8 pairs of {earlier}" in lines[2]
    assert "a difference of 2 points is found with" in lines[3]
    assert not any(line.startswith("proposed") for line in lines)
    assert "unknown" in verdict_lines(planned("grpo+none", "rloo+none"), None, None, tmp_path / "nowhere")[2]


def test_a_pilot_with_one_condition_one_seed_or_no_spread(tmp_path):
    for name, results in (("one", {"a": list(BASE)}), ("few", {"a": [0.5], "b": [0.6]})):
        with pytest.raises(UsageError, match="two conditions and two seeds"):
            pilot_spread(campaign(tmp_path / name, results), Measure())
    same = campaign(tmp_path / "same", {"a": [0.5, 0.5], "b": [0.5, 0.5]})
    assert "cannot tell how much seeds vary" in verdict_lines(planned("grpo+none", "rloo+none"), same, None)[3]


def test_a_design_that_cannot_decide_is_told():
    specs = planned("grpo+none", "maxrl+none", head="seeds = [1, 2, 3, 4, 5]")
    assert verdict_lines(specs, None, None)[1].endswith(": 5 cannot decide")
    assert verdict_lines(planned("grpo+none"), None, None) == []


def test_the_table_of_power_is_interpolated():
    assert [power(10, 1, effect) for effect in (1, 1.5, 2, 3, 5)] == [0.79, 0.98, 1.0, 1.0, 1.0]
    assert power(5, 1, 3) == 0.0
    assert power(11, 3, 1) == pytest.approx(0.67)
    assert power(8, 1, 1.25) == pytest.approx(0.80)
    assert power(8, 4, 1) == pytest.approx(0.40 - 0.09 * np.log(4 / 3) / np.log(5 / 3))
    assert power(80, 1, 0.5) == pytest.approx(power(20, 1, 1.0))
    for comparisons in (1, 2, 3, 5, 8, 11, 16):
        for effect in (0.3, 0.5, 1.0, 2.0):
            needed = seeds_needed(comparisons, effect)
            assert needed is not None
            assert power(needed - 1, comparisons, effect) < 0.8 <= power(needed, comparisons, effect)
    assert seeds_needed(1, 0.001) is None


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


def test_check_and_explain_say_it(tmp_path):
    file = str(ROOT / "campaigns" / "five_conditions.toml")
    for command in ("explain", "check"):
        result = run_cli(command, file)
        assert result.exit_code == 0
        assert "final:eval/heldout/correct_rate, 10 pairs of seeds, 4 comparisons" in result.stdout
        assert "a verdict needs 6 seeds or more, 7 at an interim analysis" in result.stdout
    assert "careful" in run_cli("explain", file).stdout
    pilot = campaign(tmp_path, {"a": list(BASE), "b": shifted(0.02)})
    quickstart = str(ROOT / "campaigns" / "quickstart.toml")
    assert f"8 pairs of {pilot}" in run_cli("explain", quickstart, "--pilot", str(pilot)).stdout
    assert run_cli("explain", quickstart, "--pilot", str(tmp_path / "nowhere")).exit_code == 2


def test_more_than_eight_comparisons_are_warned_of(tmp_path):
    rates = "".join(
        campaign_head(("grpo", "none")).removeprefix("[campaign]\n") + f"lr = {rate}e-4\n" for rate in range(1, 11)
    )
    (tmp_path / "many.toml").write_text(f"[campaign]\n{rates}")
    result = run_cli("check", tmp_path / "many.toml")
    assert "9 comparisons share one error of 5 %" in result.stderr
    assert "split the question" in result.stderr
