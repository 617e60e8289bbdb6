"""The simulation of many GPUs, against what can be known without it: packing, Daly's formulas, the books."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
from snippets import ROOT

from retrain.campaign.running.protocol import CohortJob, JobEnded
from retrain.maths.rules import Rule

sys.path.insert(0, str(ROOT / "benchmarks"))
import scale
from scale import (
    CALM,
    HOUR,
    MTBF_HOURS,
    SPENT,
    Gpus,
    SimulatedLooks,
    World,
    cut_for,
    exact,
    first_order,
    made_campaign,
    simulate,
    young_daly,
)

ROUGH = World(mtbf=5 * HOUR, max_restarts=50)


def a_second_per_run(runs: int) -> float:
    return float(runs)


def ten_seconds(runs: int) -> float:
    return 10.0


# -- nothing happens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "seeds"), [(1, 3), (4, 4), (4, 10), (3, 64)])
def test_in_a_calm_world_goodput_is_the_packing(gpus, seeds):
    """Whole seeds on whole GPUs: as many rounds as it takes, the last of them not full."""
    found = simulate(cut_for(seeds, gpus), gpus, CALM, a_second_per_run)
    rounds = math.ceil(seeds / gpus)
    assert found.seconds == pytest.approx(rounds * 200 * 5)
    assert found.goodput == pytest.approx(seeds / (gpus * rounds), abs=1e-12)
    assert found.shares["idle"] == pytest.approx(1 - seeds / (gpus * rounds), abs=1e-12)
    assert (found.deaths, found.begun, found.given_up) == (0, 5 * seeds, 0)


def test_parts_of_a_seed_are_packed_too():
    """Two seeds on four GPUs: 3 and 2 runs of each, and the GPUs with 2 wait for those with 3."""
    groups = cut_for(2, 4)
    assert [len(group) for group in groups] == [3, 2, 3, 2]
    found = simulate(groups, 4, CALM, a_second_per_run)
    assert found.seconds == pytest.approx(3 * 200)
    assert found.goodput == pytest.approx(10 / 12)


def test_saving_and_starting_alone():
    """A save of 3 s every 20 of 200 steps of 5 s, and a start of 40 s."""
    world = replace(CALM, save=3, start=40)
    found = simulate(cut_for(2, 1), 1, world, a_second_per_run)
    assert found.seconds == pytest.approx(2 * (40 + 1000 + 10 * 3))
    assert found.goodput == pytest.approx(2000 / 2140)
    assert found.shares["saving"] == pytest.approx(60 / 2140)
    assert found.shares["starting"] == pytest.approx(80 / 2140)
    odd = simulate(cut_for(1, 1), 1, replace(world, save_every=30), a_second_per_run)
    assert odd.seconds == pytest.approx(40 + 1000 + 7 * 3)  # after 30, 60, …, 180 steps, and after the last


def test_slow_gpus_and_steps_cost_nothing_in_the_mean_but_make_the_others_wait():
    uneven = replace(CALM, gpu_spread=0.05)
    found = simulate(cut_for(64, 64), 64, uneven, a_second_per_run)
    assert found.shares["slow"] == pytest.approx(0, abs=1e-9)  # the fleet's mean is 1
    assert 0.05 < found.shares["idle"] < 0.25
    more = simulate(cut_for(64 * 8, 64), 64, uneven, a_second_per_run)
    assert more.shares["idle"] < found.shares["idle"]
    steps = simulate(cut_for(64, 1), 1, replace(CALM, step_spread=0.5), a_second_per_run)
    assert steps.seconds == pytest.approx(64_000, rel=0.02)  # of 12,800 steps
    assert steps.seconds != pytest.approx(64_000, rel=1e-6)


# -- one GPU that fails -----------------------------------------------------------------------------------------------

ALONE = World(mtbf=5000, node_share=0, told=0, repair=0, start=0, save=20, gpu_spread=0, step_spread=0,
              steps=1024, max_restarts=10**6)  # fmt: skip


@pytest.mark.parametrize("every", [8, 32, 128])
def test_goodput_between_saves_is_daly_s(every):
    """300 runs of 1,024 steps of 10 s, about two failures in each."""
    world = replace(ALONE, save_every=every)
    found = simulate(cut_for(300, 1), 1, world, ten_seconds)
    expected = exact(10 * every, 20, 5000, 0)
    assert found.deaths > 500
    assert found.goodput == pytest.approx(expected, rel=0.02)
    assert found.shares["saving"] / found.goodput == pytest.approx(20 / (10 * every), abs=1e-9)


def test_goodput_with_restarts_is_daly_s():
    """Every run also starts once without a failure; failures come while it starts, too."""
    world = replace(ALONE, save_every=32, start=400)
    found = simulate(cut_for(300, 1), 1, world, ten_seconds)
    run = 1024 * 10 / exact(320, 20, 5000, 400)
    first = 5000 * math.expm1(400 / 5000)  # a start that may fail and begin again
    assert found.goodput == pytest.approx(10240 / (run + first), rel=0.02)


def test_the_best_interval_is_young_s_and_daly_s():
    found = {
        every: simulate(cut_for(300, 1), 1, replace(ALONE, save_every=every), ten_seconds).goodput
        for every in (4, 8, 16, 32, 64, 128, 256)
    }
    best = young_daly(20, 5000)
    assert best == pytest.approx(447.2, abs=0.1)
    nearest = min(found, key=lambda every: abs(math.log(10 * every / best)))
    assert nearest == 32  # 320 s: less far than 640 s
    assert max(found, key=found.__getitem__) in (32, 64)
    assert found[4] < found[16] < found[32]
    assert found[64] > found[128] > found[256]


def test_the_formulas_agree_where_both_hold():
    """To first order, and their best intervals."""
    for interval in (100.0, 1000.0):
        assert exact(interval, 1, 1e6, 10) == pytest.approx(first_order(interval, 1, 1e6, 10), abs=2e-4)
    best = max(range(1000, 2000), key=lambda interval: first_order(interval, 1, 1e6, 0))
    assert best == pytest.approx(young_daly(1, 1e6), abs=1)
    best = max(range(1000, 2000), key=lambda interval: exact(interval, 1, 1e6, 0))
    assert best == pytest.approx(young_daly(1, 1e6), rel=0.01)


def test_the_rate_of_failures_is_the_fleet_s():
    assert pytest.approx(50_677, abs=1) == MTBF_HOURS
    world = World(mtbf=100 * HOUR, node_share=0, told=0, repair=0, start=0, save=0, max_restarts=10**6)
    found = simulate(cut_for(128, 16), 16, world, lambda runs: 60.0)
    expected = 16 * found.seconds / (100 * HOUR) * (1 - found.shares["idle"])  # those that hit a job
    assert found.deaths == pytest.approx(expected, abs=3 * math.sqrt(expected))


# -- the books --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 8, 24])
def test_every_second_is_accounted_for(gpus):
    found = simulate(cut_for(4 * gpus, gpus), gpus, ROUGH, lambda runs: 60.0, seed=3)
    assert set(found.shares) == set(SPENT)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(found.shares[key] > -1e-12 for key in SPENT if key != "slow")
    assert found.deaths > 0
    assert found.shares["redone"] > 0
    assert found.shares["repaired"] > 0
    assert found.goodput * gpus * found.seconds == pytest.approx((4 * gpus - found.given_up / 5) * 200 * 60)


def test_the_seed_decides():
    groups = cut_for(16, 8)
    first, again, other = (simulate(groups, 8, ROUGH, ten_seconds, seed) for seed in (1, 1, 2))
    assert first == again != other
    uneven = replace(CALM, step_spread=0.1)
    assert simulate(groups, 8, uneven, ten_seconds, 1) != simulate(groups, 8, uneven, ten_seconds, 2)


def test_a_node_takes_all_of_its_gpus():
    world = replace(CALM, mtbf=200 * HOUR, node_share=1, told=0, repair=0, max_restarts=10**6, save_every=10**6)
    found = simulate(cut_for(16, 16), 16, world, lambda runs: 360.0)
    assert found.deaths > 0
    assert found.deaths % 8 == 0
    alone = simulate(cut_for(16, 16), 16, replace(world, node_share=0), lambda runs: 360.0)
    assert 0 < alone.deaths < found.deaths


def test_a_job_that_dies_too_often_is_given_up():
    """With saves that are further apart than failures, no run would ever end."""
    world = replace(CALM, mtbf=100, node_share=0, told=0, repair=0, max_restarts=2, save_every=100)
    found = simulate(cut_for(2, 2), 2, world, ten_seconds)
    assert (found.given_up, found.deaths) == (10, 6)
    assert found.goodput == 0
    assert found.shares["redone"] > 0
    some = simulate(cut_for(2, 2), 2, replace(world, save_every=2), ten_seconds)
    assert some.given_up == 10
    assert some.goodput == 0  # what they had saved is nobody's use
    assert some.shares["unneeded"] > 0


def test_what_a_dead_job_had_saved_is_kept():
    """One step of 10 s, saved each time; the GPU fails in the mean every 25 s, and a run is 200 steps."""
    world = replace(CALM, mtbf=25, node_share=0, told=0, repair=0, max_restarts=10**6, save_every=1)
    found = simulate(cut_for(1, 1), 1, world, ten_seconds)
    assert found.given_up == 0
    assert found.seconds == pytest.approx(200 * 25 * math.expm1(10 / 25), rel=0.15)


def test_a_failed_gpu_is_told_of_and_repaired():
    """A failure at a known time: 60 s until it is known, 600 s until the GPU is back, from the save after 40 steps."""
    gpus = Gpus(1, replace(CALM, told=60, repair=600, save_every=40, mtbf=1e9), ten_seconds, 0)
    gpus._events.clear()
    gpus.submit(job("a"))
    gpus._events.append((455.0, 99, "failure", "", 0))
    gpus._events.sort()
    events = gpus.events()
    assert next(events) == JobEnded("0", "died", "a died")
    assert (gpus.now, gpus.progress["a"].steps, gpus.used["redone"]) == (515.0, 40, 55.0)
    gpus.submit(job("a"))
    assert next(events) == JobEnded("1", "done")
    assert gpus.now == pytest.approx(455 + 600 + 160 * 10)
    assert gpus.used["repaired"] == 600


# -- stopping ---------------------------------------------------------------------------------------------------------


def job(name: str) -> CohortJob:
    return CohortJob(name, "", [{"run_id": name}], {})


def test_a_job_that_is_asked_to_stop_ends_after_its_step_saved():
    gpus = Gpus(2, replace(CALM, save=3, save_every=20), ten_seconds, 0)
    first, second, third = (gpus.submit(job(name)) for name in "abc")
    gpus.now = 55.0
    first.stop()
    second.stop()
    third.stop()
    gpus.now = 61.0
    first.stop()  # asked again while it saves
    events = gpus.events()
    assert next(events) == JobEnded("2", "stopped")  # had not begun
    assert gpus.now == 55.0
    assert [next(events).status for _ in range(2)] == ["stopped", "stopped"]
    assert gpus.now == 60.0 + 3
    assert [gpus.progress[name].steps for name in "abc"] == [6, 6, 0]
    assert gpus.used["saving"] == 6
    gpus.submit(job("a"))
    assert next(events).status == "done"
    assert gpus.progress["a"].steps == 200
    assert gpus.now == pytest.approx(63 + 194 * 10 + 10 * 3)


RULE = Rule(test="normal", family=4, planned=20, looks="obrien_fleming", race=True)


def looked(gpus: int, effect: float, seed: int = 0):
    specs = made_campaign(20, "obrien_fleming")
    looks = SimulatedLooks(specs, RULE, effect, seed)
    return simulate(cut_for(20, gpus, "obrien_fleming"), gpus, CALM, a_second_per_run, seed, looks), looks


def test_looks_save_more_on_fewer_gpus():
    one, looks = looked(1, 3.0)
    few, many = looked(5, 3.0)[0], looked(20, 3.0)[0]
    assert one.begun < few.begun < many.begun == 100
    assert looks.left[-1] is not None
    assert looks.left[-1].different
    assert all(left is not None for left in looks.left)
    assert one.seconds < 20 * 200 * 5 / 2
    assert many.seconds == pytest.approx(200 * 5)


def test_a_condition_that_has_left_is_not_trained():
    """What each seed trains after a look is what is still in the comparison."""
    specs = made_campaign(20, "obrien_fleming")
    looks = SimulatedLooks(specs, RULE, 1.5, 1)
    unwanted, ended, trained = set[str](), set[str](), []
    for seed in range(1, 21):
        runs = [spec.run_id for spec in specs if spec.seed == seed and spec.run_id not in unwanted]
        trained.append(len(runs))
        ended.update(runs)
        unwanted = looks.look(ended)
    assert trained[0] == trained[1] == 5
    assert trained == sorted(trained, reverse=True)
    assert 2 in trained  # the baseline and the one that differs
    assert trained[-1] == 0
    assert looked(1, 1.5, 1)[0].begun == sum(trained)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_draws(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(scale, "SAVE_SWEEP", (8, 32))
    monkeypatch.setattr(scale, "LOOKED", (20,))
    words = ["scale.py", "--gpus", "1", "8", "--repeats", "1", "--plots", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    assert scale.main() == 0
    first = capsys.readouterr().out
    assert first.count("| GPUs |") == 3
    assert "Young and Daly: 9.2 steps between saves" in first
    assert {path.name for path in tmp_path.iterdir()} == {"scale-goodput.svg", "scale-saves.svg"}
    for seed, same in (("0", True), ("1", False)):
        monkeypatch.setattr(sys, "argv", [*words, "--only", "goodput", "--seed", seed])
        assert scale.main() == 0
        again = capsys.readouterr().out
        assert again.count("| GPUs |") == 2
        assert first.startswith(again) == same
