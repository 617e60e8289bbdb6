"""The benchmarks of verdicts: known sample sizes, and tables that hold what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrain.plugins import load_file

ROOT = Path(__file__).parents[1]


def script(name: str):
    return load_file(ROOT / "benchmarks" / f"{name}.py", name)


def test_sample_sizes_are_those_of_the_textbook():
    cost = script("verdict_cost")
    assert cost.unpaired_runs(1.0, 1.0) == 34  # Cohen: 17 in each group for d = 1
    assert cost.unpaired_runs(0.5, 1.0) == 128
    assert cost.t_test_pairs(1.0) == 10
    planned, expected = cost.sequential_pairs(2.0, 1.0, 100)
    assert planned == 6 >= expected


def test_each_saving_is_told_with_its_factor():
    cost = script("verdict_cost")
    found = {
        "conditions": ["a", "b"], "seeds": 8, "steps": 4, "accuracy": [0.5, 0.6], "run_deviation": 0.02,
        "problem_deviation": 0.03, "pair_deviation": 0.015, "correlation": 0.7, "pairing_ratio": 0.3,
        "pairing_ratio_interval": [0.1, 0.6], "seconds_together": 5.0, "seconds_alone": 10.0,
    }  # fmt: skip
    rows = cost.costs(found, 0.02, 50)
    assert [row["design"].split(" (")[0] for row in rows] == [
        "today",
        "+ problems",
        "+ pairs",
        "+ exact",
        "+ looks",
        "+ lanes",
    ]
    assert rows[0]["factor"] == 1.0 < rows[1]["factor"] < rows[2]["factor"]
    assert rows[-1]["factor"] == pytest.approx(2 * rows[-2]["factor"])
    table = cost.told(found | {"costs": [{"difference": 0.02, "designs": rows}]})
    assert "to detect 2 points" in table
    assert "variance 0.30 of unpaired [0.10, 0.60]" in table


def test_the_calibration_sees_a_broken_interval():
    calibration = script("calibration")
    draw, step = calibration.SPREADS["normal"]
    found = calibration.coverage(draw, step, 5, (400, 60), np.random.default_rng(0))
    assert found["level_percentile"] < 0.92 < found["level"]
    rates = calibration.false_positives(draw, 8, 200, np.random.default_rng(0))
    assert rates["declared"] <= 0.10
    assert rates["declared_in_family"] <= 0.10
    assert 6 <= rates["pairs_used"] <= 8
    row = {"spread": "normal"} | rates | found
    table = calibration.told({"spreads": [row], "evaluations": []}, 200, 60)
    assert f"{100 * found['level_percentile']:.1f}%*" in table


def test_the_ways_to_rank_1_take_the_same_number_of_updates():
    modes = script("squeeze_modes")
    assert modes.anneal_stages(48, 12) == [[9, 8], [18, 4], [27, 2], [36, 1]]
    conditions = {mode: modes.condition(mode, rate, 48, 12) for mode, rate in modes.RATES.items()}
    assert conditions["direct"]["model.lora_rank"] == 1
    assert conditions["anneal"]["lora.anneal"][-1] == [48 - 12, 1]
    assert set(conditions["full"]) < set(conditions["anneal"])


def test_modes_are_compared_by_seed_and_corrected_for_their_number():
    modes = script("squeeze_modes")
    noise = np.array([0.00, 0.02, -0.01, 0.03, 0.01, -0.02, 0.015, -0.005])
    found = {mode: (0.7 + noise).tolist() for mode in (*modes.MODES, "full")}
    found["anneal"] = (0.8 + noise + 0.001 * np.arange(8)).tolist()
    rows = {row["difference"]: row for row in modes.compare(found)}
    assert len(rows) == 6
    assert rows["continue − post"]["mean"] == 0.0
    ahead = rows["anneal − post"]
    assert (ahead["p"], ahead["holm"]) == (2 / 2**8, 6 * 2 / 2**8)
    assert 0.1 < ahead["low"] < ahead["mean"] < ahead["high"]
    assert "| anneal − post | +10.4 |" in modes.told(found, list(rows.values()))
