"""The benchmarks of verdicts: known sample sizes, and tables that hold what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrain.plugins import load_file

ROOT = Path(__file__).parents[2]


def script(name: str):
    return load_file(ROOT / "benchmarks" / f"{name}.py", name)


def test_sample_sizes_are_those_of_the_textbook():
    cost = script("verdict_cost")
    assert cost.unpaired_runs(1.0, 1.0) == 34  # Cohen: 17 in each group for d = 1
    assert cost.unpaired_runs(0.5, 1.0) == 128
    assert cost.t_test_pairs(1.0) == 10
    planned, different, alike = cost.rule_runs(2.0)
    assert 4 <= planned <= 6
    assert alike < different <= 2 * planned


def test_each_saving_is_told_with_its_factor():
    cost = script("verdict_cost")
    draw = np.random.default_rng(3)
    seed = draw.normal(0.0, 0.02, 12)  # shared by both conditions: what pairing takes out
    scores = 0.6 + seed + draw.normal(0.0, 0.01, (2, 12))
    found = {"conditions": ["a", "b"], "steps": 4, "scores": scores.tolist(), "seconds_together": [5.0] * 24,
             "seconds_alone": [10.0] * 4}  # fmt: skip
    rows = cost.table(found, 0.02)
    assert [row["design"].split(" (")[0] for row in rows] == ["one by one", "+ pairs", "+ looks", "+ lanes"]
    assert rows[0]["factor"] == 1.0 < rows[1]["factor"] < rows[2]["factor"]
    assert rows[-1]["factor"] == pytest.approx(2 * rows[-2]["factor"])
    assert rows[0]["runs_alike"] == rows[0]["runs"]
    assert rows[2]["runs_alike"] < rows[1]["runs_alike"]
    assert all(row["factor_interval"][0] <= row["factor"] <= row["factor_interval"][1] for row in rows)
    assert "to detect 2 points" in cost.told(found | {"costs": [{"difference": 0.02, "designs": rows}]})


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


def test_the_last_three_are_compared_at_equal_numbers_of_answers():
    last3 = script("last3")
    steps = list(range(3, 31, 3))
    problems = 40
    for metric in last3.METRICS:
        parts = last3.parts(metric, steps)
        assert sum(part.weight for part in parts) == pytest.approx(1.0)
        counted = np.zeros((problems, last3.SAMPLES), int)
        marks = {step: np.ones((problems, last3.SAMPLES)) for step in steps}
        for part in parts:
            counted[part.problems, part.samples] += 1
        assert (counted == 1).all()  # each answer's place once, whatever the step it is from
        assert sum(part.weight * part.mean(marks) for part in parts) == pytest.approx(1.0)
    assert [part.step for part in last3.parts("last3", steps)] == [24, 27, 30]


def test_the_factor_in_seeds_is_that_of_what_varies():
    """Policies that jump about from evaluation to evaluation: three of them average it out. Where they only differ by
    seed, and answers are all that varies besides, the last three are worth what one evaluation is."""
    last3 = script("last3")
    rng = np.random.default_rng(0)
    steps = list(range(3, 31, 3))

    def runs(jumps: float, level: float, seeds: int = 200) -> list[list[dict[int, np.ndarray]]]:
        made = []
        for shift in (0.0, 0.05):
            own = []
            for _ in range(seeds):
                at = rng.normal(0.5 + shift, level)
                rates = {step: np.clip(at + rng.normal(0, jumps), 0, 1) for step in steps}
                own.append({step: (rng.random((200, 3)) < rate).astype(float) for step, rate in rates.items()})
            made.append(own)
        return made

    jumping = {row["metric"]: row for row in last3.measured(runs(0.1, 0.0))["metrics"]}
    assert jumping["final"]["paired_factor"] == 1.0
    assert 2.2 < jumping["last3"]["paired_factor"] < 4.0
    low, high = jumping["last3"]["paired_interval"]
    assert low < jumping["last3"]["paired_factor"] < high
    steady = {row["metric"]: row for row in last3.measured(runs(0.0, 0.1))["metrics"]}
    assert 0.9 < steady["last3"]["paired_factor"] < 1.1
    assert steady["final"]["noise"] == pytest.approx(0.24 / 600, rel=0.1)
    assert jumping["last3"]["difference"] == pytest.approx(-0.05, abs=0.03)
    table = last3.told(last3.measured(runs(0.1, 0.0, 8)))
    assert "| final |" in table
    assert "600 answers a run" in table
