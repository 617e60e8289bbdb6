"""The scalability law on Gunther's Cisco benchmark, and a controller that does not trust a fit beyond its data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.maths.backpressure import DecodeWork, Limits, UslFit, decide, fit_usl, roofline_regime, usl

CISCO = [
    *(955.16, 1878.91, 2688.01, 3548.68, 4315.54, 5130.43, 5931.37, 6531.08, 7219.8, 7867.61, 8278.71),
    *(8646.7, 9047.84, 9426.55, 9645.37, 9897.24, 10097.6, 10240.5, 10532.39, 10798.52, 11151.43, 11518.63),
    *(11806, 12089.37, 12075.41, 12177.29, 12211.41, 12158.93, 12155.27, 12118.04, 12140.4, 12074.39),
]
LOADS = list(range(1, 33))
LIMITS = Limits(1, 64, warmup_steps=3)


def curve(loads, lam=1000.0, sigma=0.02, kappa=0.002, noise=0.0, seed=0):
    x = np.asarray(usl(np.asarray(loads, float), lam, sigma, kappa))
    return (x * (1 + noise * np.random.default_rng(seed).standard_normal(len(x)))).tolist()


def test_cisco():
    fit = fit_usl(LOADS, CISCO)
    assert fit.sigma == pytest.approx(0.0267159, abs=2e-7)
    assert fit.kappa == pytest.approx(7.69095e-4, abs=2e-9)
    assert fit.lam == pytest.approx(995.6486, abs=1e-3)
    assert fit.n_star == pytest.approx(35.57, abs=0.005)
    assert usl(fit.n_star, fit.lam, fit.sigma, fit.kappa) == pytest.approx(12341, abs=3)


def test_a_peak_is_certain_only_two_standard_errors_above_zero():
    """κ̂ at 1, 1.9, 2 and 2.1 standard errors: only the last says that there is a peak."""
    for ratio, certain in ((1.0, False), (1.9, False), (2.0, False), (2.1, True)):
        fit = UslFit(1000.0, 0.02, ratio * 0.01, kappa_se=0.01, n_star=10.0)
        assert fit.kappa_is_positive == certain


def test_beyond_the_peak_is_retrograde_and_below_it_the_roofline_decides():
    """The peak is at 22.1, the aim 0.85 of it."""
    loads, roofline = [1, 2, 4, 8, 16, 24, 32, 48, 64], {"peak_gflops": 1000.0, "peak_bw_gb_s": 100.0}
    throughputs = curve(loads)
    for load, expected in ((22, ("hold", "optimal", 22)), (23, ("throttle", "retrograde", 19))):
        decision = decide(loads, throughputs, load, LIMITS)
        assert (decision.action, decision.regime, decision.load) == expected
    bound = decide(loads, throughputs, 22, Limits(1, 64, warmup_steps=3, **roofline), flops_per_byte=5.0)
    beyond = decide(loads, throughputs, 23, Limits(1, 64, warmup_steps=3, **roofline), flops_per_byte=5.0)
    assert (bound.regime, beyond.regime) == ("memory_bound", "retrograde")


def test_what_the_fit_predicts_is_given_before_it_is_acted_on():
    """Below the peak, without a peak and with one: the best allowed load, and the share of its throughput."""
    assert decide([1, 2, 4, 4], [1.0, 2.0, 3.0, 3.0], 4, Limits(1, 64, warmup_steps=4)).best_load is None
    below = decide(LOADS[:8], CISCO[:8], 8, LIMITS)
    fit = fit_usl(LOADS[:8], CISCO[:8])
    assert below.basis == "explore"
    assert below.best_load == pytest.approx(min(fit.n_star or math.inf, 64))
    assert below.utilization == pytest.approx(CISCO[7] / usl(below.best_load, fit.lam, fit.sigma, fit.kappa))
    straight = decide([1, 2, 4, 8, 16], [100.0, 200.0, 400.0, 800.0, 1600.0], 16, Limits(1, 16, warmup_steps=3))
    assert (straight.basis, straight.best_load) == ("unbounded", 16.0)
    assert straight.utilization == pytest.approx(1.0, rel=1e-6)
    whole = decide(LOADS, CISCO, 8, Limits(1, 20, warmup_steps=3))
    assert whole.best_load == 20.0  # n* = 35.6 is not allowed
    known = decide([1, 2, 4, 8, 16, 24, 32, 48, 64], curve([1, 2, 4, 8, 16, 24, 32, 48, 64]), 16, LIMITS)
    assert known.best_load == known.n_star == pytest.approx(22.1, abs=0.1)


def test_loads_below_the_peak_end_in_explore():
    decision = decide(LOADS[:8], CISCO[:8], 8, LIMITS)
    assert (decision.basis, decision.action, decision.load) == ("explore", "increase", 16)
    assert decision.n_star is None
    whole = decide(LOADS, CISCO, 32, LIMITS)  # n* = 35.6 lies beyond 32: go and look just past it
    assert (whole.basis, whole.action, whole.load) == ("explore", "increase", 45)


@given(st.floats(1.0, 1e6), st.floats(0.0, 0.3), st.floats(5e-4, 0.05))
def test_fit_recovers_exact_curves(lam, sigma, kappa):
    loads = [1, 2, 4, 8, 16, 32, 64]
    fit = fit_usl(loads, curve(loads, lam, sigma, kappa))
    assert fit.lam == pytest.approx(lam, rel=1e-4)
    assert fit.sigma == pytest.approx(sigma, abs=1e-4)
    assert fit.kappa == pytest.approx(kappa, rel=1e-3)
    assert fit.n_star == pytest.approx(math.sqrt((1 - sigma) / kappa), rel=1e-3)


def test_the_standard_error_matches_repeated_experiments():
    loads = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    kappas, errors = [], []
    truth = np.asarray(usl(np.asarray(loads, float), 1000.0, 0.02, 0.002))
    for seed in range(200):
        noise = 60.0 * np.random.default_rng(seed).standard_normal(len(loads))
        fit = fit_usl(loads, (truth + noise).tolist())
        kappas.append(fit.kappa)
        errors.append(fit.kappa_se)
    assert np.mean(errors) == pytest.approx(np.std(kappas), rel=0.25)


def test_acts_when_the_peak_is_bracketed():
    loads = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    throughputs = curve(loads, noise=0.01)  # n* = 22.1
    down = decide(loads, throughputs, 64, LIMITS)
    assert (down.basis, down.action, down.regime) == ("fit", "throttle", "retrograde")
    assert down.load == pytest.approx(0.85 * 22.1, abs=1.5)
    assert down.n_star == pytest.approx(22.1, rel=0.1)
    up = decide(loads, throughputs, 2, LIMITS)
    assert (up.basis, up.action, up.regime, up.load) == ("fit", "increase", "optimal", down.load)
    stay = decide(loads, throughputs, 16, LIMITS)
    assert (stay.basis, stay.action, stay.load) == ("fit", "hold", 16)
    assert stay.utilization == pytest.approx(throughputs[-1] / max(throughputs), rel=0.05)


def test_warmup():
    assert decide([1, 2, 4], [1.0, 2.0, 3.0], 4, LIMITS).basis == "warmup"
    same = decide([8] * 20, [5.0] * 20, 8, LIMITS)  # one load says nothing about the law
    assert (same.basis, same.action, same.load) == ("warmup", "increase", 16)
    assert decide([], [], 8, LIMITS).action == "hold"


@pytest.mark.parametrize(("start", "kappa", "low", "high"), [(64, 0.004, 8, 16), (1, 0.004, 8, 16), (64, 0.0, 64, 64)])
def test_a_controller_finds_the_peak_from_either_end(start, kappa, low, high):
    """Also from the largest load, where there is nothing above to measure: it then measures below."""
    loads, throughputs, load = [], [], start
    for number in range(24):
        loads.append(load)
        throughputs.append(curve([load], kappa=kappa, noise=0.01, seed=number)[0])
        load = decide(loads, throughputs, load, LIMITS).load
    assert low <= load <= high
    few = decide([2] * 9 + [1], [1.0] * 10, 1, Limits(1, 2, warmup_steps=3))
    assert (few.basis, few.load) == ("warmup", 2)  # no third load to be had: as many as are allowed


def test_without_a_peak_it_grows_to_the_maximum_and_stays():
    limits = Limits(1, 32, warmup_steps=3)
    loads = [1, 2, 4, 8]
    growing = decide(loads, curve(loads, kappa=0.0, noise=0.01), 8, limits)
    assert (growing.basis, growing.action, growing.load) == ("explore", "increase", 16)
    loads = [1, 2, 4, 8, 16, 32]
    full = decide(loads, curve(loads, kappa=0.0, noise=0.01), 32, limits)
    assert (full.basis, full.action, full.load, full.regime) == ("unbounded", "hold", 32, "optimal")


def test_a_peak_below_all_loads_is_looked_for_downward():
    loads = [40, 44, 48, 56, 64]
    decision = decide(loads, curve(loads), 64, LIMITS)
    assert (decision.basis, decision.action) == ("explore", "throttle")
    assert decision.load < 22


def test_limits_hold():
    loads = [4, 8, 16, 24, 32, 48, 64]
    throughputs = curve(loads)
    assert decide(loads, throughputs, 64, Limits(4, 10, warmup_steps=3)).load <= 10
    assert decide(loads, throughputs, 64, Limits(30, 64, warmup_steps=3)).load >= 30


def test_the_intensity_of_a_decoding_step_by_hand():
    """A model of 1000 parameters in 2 bytes, 8 operations and 16 bytes of cache per earlier token."""
    work = DecodeWork(parameters=1000, parameter_bytes=2, operations_per_position=8, cache_bytes=16)
    assert work.intensity(1, 0) == 1.0  # each weight is read for one multiplication and one addition
    assert work.intensity(64, 0) == 64.0
    assert work.intensity(10, 50) == pytest.approx(10 * (2000 + 400) / (2000 + 10 * 50 * 16))


@given(st.integers(1, 512), st.floats(0, 4096), st.floats(0, 4096))
def test_more_rows_raise_the_intensity_and_the_cache_bounds_it(rows, context, further):
    """An 8-billion-parameter shape (Qwen3-8B): long contexts pull every batch down to the intensity of attention."""
    work = DecodeWork(7_568_405_504, 2, 4 * 36 * 32 * 128, 2 * 36 * 8 * 128 * 2)
    assert work.intensity(rows + 1, context) > work.intensity(rows, context)
    if rows > 8:
        assert work.intensity(rows, context + further) <= work.intensity(rows, context) * (1 + 1e-12)
    assert work.intensity(rows, 1e15) == pytest.approx(4.0, rel=1e-3)  # 4 query heads share a key and a value


def test_roofline():
    limits = Limits(1, 64, warmup_steps=3, peak_gflops=1000.0, peak_bw_gb_s=100.0)
    assert roofline_regime(limits, 5.0) == "memory_bound"
    assert roofline_regime(limits, 20.0) == "compute_bound"
    assert roofline_regime(limits, None) is None
    assert roofline_regime(LIMITS, 5.0) is None
    loads = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert decide(loads, curve(loads), 16, limits, flops_per_byte=5.0).regime == "memory_bound"


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e9)), min_size=0, max_size=12),
    st.integers(1, 64),
)
def test_any_measurements_give_a_decision_within_limits(pairs, current):
    decision = decide([n for n, _ in pairs], [x for _, x in pairs], current, LIMITS)
    assert 1 <= decision.load <= 64
    moved = decision.load - current
    assert decision.action == ("increase" if moved > 0 else "throttle" if moved < 0 else "hold")
    assert (decision.n_star is None) == (decision.basis != "fit")
    assert (decision.best_load is None) == (decision.utilization is None) == (decision.basis == "warmup")
    assert decision.best_load is None or 1 <= decision.best_load <= 64


def test_impossible_measurements_are_named():
    with pytest.raises(ValueError, match="at least 4 measurements at 3 different loads"):
        fit_usl([1, 2, 3], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="at least 4 measurements"):
        fit_usl([1, 1, 2, 2], [1.0, 1.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="one throughput per load"):
        fit_usl([1, 2, 3, 4], [1.0])
    for x in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="throughputs > 0"):
            fit_usl([1, 2, 3, 4], [1.0, 2.0, 3.0, x])
    with pytest.raises(ValueError, match="min_load"):
        Limits(8, 4)
    with pytest.raises(ValueError, match="margin"):
        Limits(throttle_margin=1.5)
