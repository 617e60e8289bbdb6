import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.evaluation import Backpressure
from retrain.maths.backpressure import DecodeWork, PressureLimits, decide, fit_usl, usl
from retrain.rollouts.pressure import Pressure, decode_work

CISCO = [
    *(955.16, 1878.91, 2688.01, 3548.68, 4315.54, 5130.43, 5931.37, 6531.08, 7219.8, 7867.61, 8278.71),
    *(8646.7, 9047.84, 9426.55, 9645.37, 9897.24, 10097.6, 10240.5, 10532.39, 10798.52, 11151.43, 11518.63),
    *(11806, 12089.37, 12075.41, 12177.29, 12211.41, 12158.93, 12155.27, 12118.04, 12140.4, 12074.39),
]
LOADS = list(range(1, 33))
LIMITS = PressureLimits(1, 64, warmup_steps=3)


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


PEAKED = [1, 2, 4, 8, 16, 24, 32, 48, 64]
"""Loads on both sides of the peak of ``curve``, n* = 22.1."""


@pytest.mark.parametrize(("loads", "throughputs", "load", "limits", "expected"), [
    pytest.param([], [], 8, LIMITS, ("warmup", "hold", 8), id="nothing measured"),
    pytest.param([8] * 20, [5.0] * 20, 8, LIMITS, ("warmup", "increase", 16), id="one load"),
    pytest.param(LOADS[:8], CISCO[:8], 8, LIMITS, ("explore", "increase", 16), id="below the peak"),
    pytest.param(LOADS, CISCO, 32, LIMITS, ("explore", "increase", 45), id="the peak of 35.6 beyond all loads"),
    pytest.param([40, 44, 48, 56, 64], None, 64, LIMITS, ("explore", "throttle", 18), id="the peak below them"),
    pytest.param(PEAKED, None, 64, LIMITS, ("fit", "throttle", 19), id="far above the peak"),
    pytest.param(PEAKED, None, 23, LIMITS, ("fit", "throttle", 19), id="above the peak"),
    pytest.param(PEAKED, None, 22, LIMITS, ("fit", "hold", 22), id="at the peak"),
    pytest.param(PEAKED, None, 2, LIMITS, ("fit", "increase", 19), id="below 0.85 of the peak"),
    pytest.param(PEAKED, None, 64, PressureLimits(1, 10, warmup_steps=3), ("fit", "hold", 10), id="at most 10"),
    pytest.param(PEAKED, None, 64, PressureLimits(30, 64, warmup_steps=3), ("fit", "throttle", 30), id="at least 30"),
    pytest.param([8, 16, 32, 64], [8.0, 16.0, 32.0, 64.0], 64, LIMITS, ("unbounded", "hold", 64), id="the maximum"),
])  # fmt: skip
def test_decisions(loads, throughputs, load, limits, expected):
    decision = decide(loads, throughputs or curve(loads), load, limits)
    assert (decision.basis, decision.action, decision.load) == expected


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
    for seed in range(100):
        noise = 60.0 * np.random.default_rng(seed).standard_normal(len(loads))
        fit = fit_usl(loads, (truth + noise).tolist())
        kappas.append(fit.kappa)
        errors.append(fit.kappa_se)
    assert np.mean(errors) == pytest.approx(np.std(kappas), rel=0.25)


@pytest.mark.parametrize(("start", "kappa", "low", "high"), [(64, 0.004, 8, 16), (1, 0.004, 8, 16), (64, 0.0, 64, 64)])
def test_a_controller_finds_the_peak_from_either_end(start, kappa, low, high):
    """Also from the largest load, where there is nothing above to measure: it then measures below."""
    loads, throughputs, load = [], [], start
    for number in range(24):
        loads.append(load)
        throughputs.append(curve([load], kappa=kappa, noise=0.01, seed=number)[0])
        load = decide(loads, throughputs, load, LIMITS).load
    assert low <= load <= high


def test_the_intensity_of_a_decoding_step_by_hand():
    """A model of 1000 parameters in 2 bytes, 8 operations and 16 bytes of cache per earlier token."""
    work = DecodeWork(parameters=1000, parameter_bytes=2, operations_per_position=8, cache_bytes=16)
    assert work.intensity(1, 0) == 1.0  # each weight is read for one multiplication and one addition
    assert work.intensity(64, 0) == 64.0
    assert work.intensity(10, 50) == pytest.approx(10 * (2000 + 400) / (2000 + 10 * 50 * 16))


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-3, 1e9)), max_size=12), st.integers(1, 64))
def test_any_measurements_give_a_decision_within_limits(pairs, current):
    decision = decide([n for n, _ in pairs], [x for _, x in pairs], current, LIMITS)
    assert 1 <= decision.load <= 64
    moved = decision.load - current
    assert decision.action == ("increase" if moved > 0 else "throttle" if moved < 0 else "hold")
    assert (decision.n_star is None) == (decision.basis != "fit")
    assert (decision.best_load is None) == (decision.utilization is None) == (decision.basis == "warmup")
    assert decision.best_load is None or 1 <= decision.best_load <= 64


def test_the_work_is_read_off_the_model(base):
    """2 layers of 32 hidden units, 4 heads of 8 on 2 keys and values, float32, embeddings apart from the output."""
    work = decode_work(base)
    weights = dict(base.model.named_parameters())
    table = weights["model.embed_tokens.weight"].numel()
    assert work.parameters == sum(w.numel() for w in weights.values()) - table
    assert (work.parameter_bytes, work.operations_per_position, work.cache_bytes) == (4, 4 * 2 * 32, 2 * 2 * 2 * 8 * 4)
    # Every parameter of a matrix costs two operations in a real forward pass over one token; norms cost less.
    matrices = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and "embed" not in name)
    assert matrices <= work.parameters < 1.02 * matrices


@pytest.mark.parametrize(("gflops", "regime"), [(1e3, "compute_bound"), (1e6, "memory_bound"), (0.0, "optimal")])
def test_the_roofline_shows_in_the_regime(base, gflops, regime):
    """Throughput that only grows: the load stays at the maximum, and the ridge decides what bounds it."""
    keys = {"max_batch_size": 16, "warmup_steps": 0, "peak_gflops": gflops, "peak_bw_gb_s": 1e3}
    pressure = Pressure(Backpressure.model_validate(keys), 16, 8, decode_work(base))
    for _ in range(8):
        pressure.observe(tokens=100 * pressure.load, seconds=1.0, context=40.0)
    assert (pressure.load, pressure.metrics()["bp_regime"]) == (16, regime)
