"""Back pressure by the Universal Scalability Law (Gunther): X(n) = λn/(1 + σ(n−1) + κn(n−1)), peak n* = √((1−σ)/κ).

λ is the throughput at load 1, σ contention, κ coherency (crosstalk). A fit alone always yields some n*; the controller
uses n* only when κ̂ − 2·SE > 0 and loads on both sides of n* were observed. Pairs of different loads are never
averaged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.maths.arrays import Table

PARAMETERS = 3
BEYOND_PEAK = 1.25  # How far past an extrapolated n* exploration goes, so that the next measurement can bracket it
STANDARD_ERRORS = 2.0  # How many standard errors κ̂ must lie above 0


@dataclass(frozen=True)
class UslFit:
    lam: float
    sigma: float
    kappa: float
    kappa_se: float  # Standard error of κ̂
    n_star: float | None  # None when κ̂ = 0: no peak

    @property
    def kappa_is_positive(self) -> bool:
        return self.kappa - STANDARD_ERRORS * self.kappa_se > 0.0


def usl(n: float | Table, lam: float, sigma: float, kappa: float) -> float | Table:
    return lam * n / (1.0 + sigma * (n - 1.0) + kappa * n * (n - 1.0))


def _jacobian(n: np.ndarray, lam: float, sigma: float, kappa: float) -> np.ndarray:
    below = 1.0 + sigma * (n - 1.0) + kappa * n * (n - 1.0)
    x = lam * n / below
    return np.stack([n / below, -x * (n - 1.0) / below, -x * n * (n - 1.0) / below], axis=1)


def fit_usl(loads: Sequence[float], throughputs: Sequence[float]) -> UslFit:
    """Fit (load, throughput) pairs by bounded non-linear least squares, λ > 0, 0 ≤ σ ≤ 1, κ ≥ 0.

    The covariance of the parameters is s²(JᵀJ)⁻¹ at the optimum with s² = RSS/(points − 3), so it needs at least 4
    pairs of 3 different loads. Loads are at least 1, throughputs above 0.
    """
    from scipy.optimize import least_squares

    n, x = np.asarray(loads, dtype=np.float64), np.asarray(throughputs, dtype=np.float64)
    unit = float((x / n).max())  # the fit runs in units of λ, so that all three parameters are of order 1 or less

    fit = least_squares(
        lambda p: np.asarray(usl(n, *p)) - x / unit,
        x0=(1.0, 0.02, 1e-3),
        jac=lambda p: _jacobian(n, *p),  # type: ignore[arg-type]
        bounds=([1e-6, 0.0, 0.0], [np.inf, 1.0, np.inf]),
        x_scale=(1.0, 0.1, 1e-2),
        ftol=1e-14,
        xtol=1e-14,
        gtol=1e-14,
    )
    scaled, sigma, kappa = (float(value) for value in fit.x)
    # The solver keeps strictly inside its bounds, so that a κ at the bound 0 comes back as a tiny positive number.
    kappa = 0.0 if kappa < 1e-12 else kappa
    noise = 2.0 * fit.cost / (len(n) - PARAMETERS)
    # JᵀJ is nearly singular when the measured loads lie close together.
    covariance = noise * np.linalg.pinv(fit.jac.T @ fit.jac)
    kappa_se = math.sqrt(max(float(covariance[2, 2]), 0.0))
    n_star = math.sqrt((1.0 - sigma) / kappa) if kappa > 0.0 and sigma < 1.0 else None
    return UslFit(scaled * unit, sigma, kappa, kappa_se, n_star)


@dataclass(frozen=True)
class PressureLimits:
    """Limits of the controller. The target load is ``throttle_margin``·n*; a load is increased only below
    ``increase_margin``·target. A peak rate of 0 means that it is unknown, so that no roofline is computed."""

    min_load: int = 1
    max_load: int = 64
    warmup_steps: int = 10
    throttle_margin: float = 0.85
    increase_margin: float = 0.5
    peak_gflops: float = 0.0
    peak_bw_gb_s: float = 0.0

    def allowed(self, load: float) -> float:
        return min(max(load, self.min_load), self.max_load)


@dataclass(frozen=True)
class Decision:
    """The controller's decision on the next load.

    ``load``: the next load. ``action``: hold, increase or throttle, by comparison with the present load. ``basis``:
    ``warmup`` (too few points), ``explore`` (the data do not yet show where n* is), ``unbounded`` (κ ≈ 0 over the
    allowed range, so the load goes to the maximum) or ``fit``. ``regime``: warmup, optimal, retrograde, memory_bound or
    compute_bound. ``n_star`` is None unless the basis is ``fit``. If a curve was fitted, ``best_load`` is the allowed
    load with the highest predicted throughput, and ``utilization`` the last measured throughput divided by this
    prediction.
    """

    action: str
    regime: str
    basis: str
    load: int
    n_star: float | None = None
    sigma: float | None = None
    kappa: float | None = None
    best_load: float | None = None
    utilization: float | None = None


@dataclass(frozen=True)
class DecodeWork:
    """The cost of one decode step of a dense transformer, from its shapes.

    ``parameters``: weights multiplied with every token (without the embedding table), ``parameter_bytes`` each;
    ``operations_per_position``: attention's operations per earlier token of a sequence; ``cache_bytes``: keys and
    values of one token. Adapters, activations and processor caches are neglected: all weights are read once per step.
    """

    parameters: int
    parameter_bytes: int
    operations_per_position: int
    cache_bytes: int

    def intensity(self, rows: float, context: float) -> float:
        """Return the floating-point operations per byte read of one step of ``rows`` sequences of ``context``
        tokens."""
        # A multiplication and an addition per weight and row; weights are read once for all rows, keys and values per
        # row.
        operations = rows * (2.0 * self.parameters + self.operations_per_position * context)
        return operations / (self.parameters * self.parameter_bytes + rows * context * self.cache_bytes)


def roofline_regime(limits: PressureLimits, flops_per_byte: float | None) -> str | None:
    """Return ``memory_bound`` below the ridge point peak FLOP/s ÷ peak bytes/s, else ``compute_bound``; None if
    unknown."""
    if flops_per_byte is None or limits.peak_gflops <= 0.0 or limits.peak_bw_gb_s <= 0.0:
        return None
    return "memory_bound" if flops_per_byte < limits.peak_gflops / limits.peak_bw_gb_s else "compute_bound"


def decide(
    loads: Sequence[float],
    throughputs: Sequence[float],
    current_load: int,
    limits: PressureLimits,
    flops_per_byte: float | None = None,
) -> Decision:
    """Return the next load from all (load, throughput) pairs so far, the latest last.

    With fewer than three different loads, the load is doubled, or halved if the double was measured. After that, a
    curve is fitted. The load follows n* only when κ̂ − 2·SE > 0 and the observed loads bracket n*. Until then it
    explores: towards an n* that lies outside the observed loads, else upwards by doubling; once the maximum was
    measured without a peak, it stays there. ``flops_per_byte``: arithmetic intensity of decoding, for the roofline.
    """
    load = int(limits.allowed(int(current_load)))
    roofline = roofline_regime(limits, flops_per_byte)
    if len(loads) <= limits.warmup_steps:
        return Decision("hold", "warmup", "warmup", load)
    if len(loads) <= PARAMETERS or len(set(loads)) < PARAMETERS:
        return _move("warmup", "warmup", load, _unmeasured(loads, load, limits))
    fit = fit_usl(loads, throughputs)
    best = limits.allowed(math.inf if fit.n_star is None else fit.n_star)
    facts = {
        "sigma": fit.sigma,
        "kappa": fit.kappa,
        "best_load": float(best),
        "utilization": float(throughputs[-1]) / float(usl(best, fit.lam, fit.sigma, fit.kappa)),
    }
    if not fit.kappa_is_positive or fit.n_star is None:
        # κ cannot be told from 0 and the largest load was measured: no peak lies within the limits.
        if max(loads) >= limits.max_load:
            return _move("unbounded", roofline or "optimal", load, limits.max_load, **facts)
        return _move("explore", roofline or "warmup", load, min(2 * load, limits.max_load), **facts)
    if min(loads) < fit.n_star < max(loads):
        return _move_to_peak(fit.n_star, load, limits, roofline, facts)
    if fit.n_star >= max(loads):
        target = max(load, min(2 * load, math.ceil(BEYOND_PEAK * fit.n_star), limits.max_load))
    else:
        target = min(load, max(math.floor(fit.n_star * limits.throttle_margin), limits.min_load))
    return _move("explore", roofline or "warmup", load, target, **facts)


def _move_to_peak(
    n_star: float, load: int, limits: PressureLimits, roofline: str | None, facts: dict[str, float]
) -> Decision:
    aim = int(limits.allowed(round(n_star * limits.throttle_margin)))
    regime = "retrograde" if load > n_star else roofline or "optimal"
    # Hysteresis: between increase_margin·target and n* the load stays, or noise in the fitted n* would move it every
    # step.
    moves = (load > n_star and aim < load) or load < limits.increase_margin * aim
    return replace(_move("fit", regime, load, aim if moves else load, **facts), n_star=n_star)


def _unmeasured(loads: Sequence[float], load: int, limits: PressureLimits) -> int:
    """Return the first of 2, 1/2, 1/4, … times ``load`` that was not measured yet; twice ``load`` if all were."""
    candidates = [min(2 * load, limits.max_load)]
    while load // 2 >= limits.min_load and load > 1:
        load //= 2
        candidates.append(load)
    return next((candidate for candidate in candidates if candidate not in loads), candidates[0])


def _move(basis: str, regime: str, load: int, target: int, **facts: float) -> Decision:
    action = "increase" if target > load else "throttle" if target < load else "hold"
    return replace(Decision(action, regime, basis, target), **facts)
