"""Tests of conditions against a baseline that take the seeds' deviations to be normal: fewer seeds than exact tests.

A table holds one number per seed and condition. Its additive fit (seed + condition, least squares, also where runs
are missing) leaves the seed × condition residual, whose spread is pooled over all conditions: that is the gain, five
conditions at six seeds know it with 20 degrees of freedom instead of 5. Every condition is compared with the baseline
by t at these degrees of freedom, and the family by Dunnett's (1955) distribution of the largest of them, stepping down
(Marcus, Peritz and Gabriel 1976). With one comparison this is the paired t test, which can be *moderated* (Smyth 2004)
by the spread that earlier campaigns showed; unlike there, the spread is never taken to be below the observed one.

What unequal spreads, heavy tails and collapses do to the error is in ``docs/verdicts.md``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np

from retrain.maths.arrays import Doubles_S, Table

MOST_PRIOR_FREEDOM = 8  # Earlier campaigns count for no more than nine pairs: they had other settings
FEWEST_PAIRS = 3  # With fewer the t distribution leans on normality alone
TINY = 1e-150
ROUNDING = 1e-12  # A share of the squares that the fit leaves because of rounding alone


@dataclass(frozen=True)
class Fit:
    """Additive fits of tables [..., seeds, 1 + m] whose first column is the baseline.

    ``difference`` [..., m] is each condition's lead over the baseline (NaN without a pair with it), ``factor`` [..., m]
    its variance in units of that of one residual (2/n with n whole pairs), ``correlation`` [...] the smallest one
    between two differences (½ when nothing is missing), ``spread`` [...] the standard deviation of the residual (NaN
    without a degree of freedom) and ``freedom`` [...] its degrees of freedom.
    """

    difference: Table
    factor: Table
    correlation: Table
    spread: Table
    freedom: Table

    def t(self) -> Table:
        """The t statistics [..., m]; NaN where there is none."""
        with np.errstate(invalid="ignore"):
            error = np.sqrt(self.factor) * np.maximum(self.spread, TINY)[..., None]
        return self.difference / error


def additive_fit(tables: Table, resolution: float = 0.0) -> Fit:
    """Least squares of seed + condition; NaN in the tables is a missing run.

    ``resolution`` is the step of the scale of the values: a run varies by step/√12 at least, that of rounding to it.
    """
    y = np.asarray(tables, dtype=np.float64)
    seen = np.logical_not(np.isnan(y))
    paired: np.ndarray = np.any(seen & seen[..., :1], axis=-2)  # a condition without a pair says nothing here
    seen &= paired[..., None, :]
    seen &= seen.sum(axis=-1, keepdims=True) > 1
    o = seen.astype(np.float64)
    size = np.maximum(o.sum(axis=-1, keepdims=True), 1.0)
    values = np.where(seen, y, 0.0)
    centred = np.where(seen, values - values.sum(axis=-1, keepdims=True) / size, 0.0)
    weights = o / np.sqrt(size)
    information = -np.swapaxes(weights, -1, -2) @ weights
    diagonal = np.arange(y.shape[-1])
    information[..., diagonal, diagonal] += o.sum(axis=-2)
    information = information[..., 1:, 1:]
    known = paired[..., 1:] & paired[..., :1]
    inner = np.arange(y.shape[-1] - 1)
    information[..., inner, inner] += ~known
    right = centred.sum(axis=-2)[..., 1:]
    inverse = np.linalg.inv(information)
    lead = (inverse @ right[..., None])[..., 0]
    squares = (centred**2).sum(axis=(-2, -1))
    left = squares - (lead * right).sum(axis=-1)
    left = np.where(left > ROUNDING * squares, left, 0.0)
    rows, columns = seen.any(axis=-1).sum(axis=-1), seen.any(axis=-2).sum(axis=-1)
    freedom = np.where(columns > 1, seen.sum(axis=(-2, -1)) - rows - columns + 1, 0)
    factor = np.diagonal(inverse, axis1=-2, axis2=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.where(freedom > 0, np.sqrt(left / np.maximum(freedom, 1)), np.nan)
    root = np.sqrt(factor)
    between = inverse / (root[..., :, None] * root[..., None, :])
    pairs = known[..., :, None] & known[..., None, :] & ~np.eye(len(inner), dtype=bool)
    correlation = np.where(pairs, between, 1.0).min(axis=(-2, -1), initial=1.0)
    correlation = np.where(pairs.any(axis=(-2, -1)), np.clip(correlation, 0.0, 1.0), 0.5)
    lead, factor = np.where(known, lead, np.nan), np.where(known, factor, np.nan)
    return Fit(lead, factor, correlation, np.maximum(spread, resolution / math.sqrt(12.0)), freedom)


def moderated(spread: float, freedom: float, prior: float, prior_freedom: float) -> tuple[float, float]:
    """Standard deviation and degrees of freedom after earlier campaigns have had their say.

    (d₀s₀² + ds²)/(d₀ + d) with d₀ + d degrees of freedom, but never below the observed variance. At most 8 degrees
    of freedom are the earlier ones'. Both spreads are of the same thing. Raises ValueError for a negative number.
    """
    weight = min(prior_freedom, MOST_PRIOR_FREEDOM)
    if weight < 0 or prior < 0.0:
        raise ValueError(f"a spread and its degrees of freedom are not negative: got {prior} and {prior_freedom}")
    if weight == 0:
        return spread, freedom
    variance = (weight * prior**2 + freedom * spread**2) / (weight + freedom)
    return math.sqrt(max(variance, spread**2)), freedom + weight


def t_p(t: Table | float, freedom: Table | float) -> Table:
    """Two-sided p of Student's t; 1 where there is no statistic or no degree of freedom."""
    from scipy.special import stdtr

    with np.errstate(invalid="ignore"):
        p = 2.0 * stdtr(np.maximum(freedom, 1e-9), -np.abs(np.asarray(t, dtype=np.float64)))
    return np.where(np.isnan(p) | (np.asarray(freedom) <= 0), 1.0, p)


@lru_cache(maxsize=64)
def _rules(freedom: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes and weights of the normal variable that all conditions share, and of s/σ with these degrees of freedom."""
    from scipy.special import gammainccinv

    normal, weight = np.polynomial.hermite_e.hermegauss(64)
    nodes, scale_weight = np.polynomial.legendre.leggauss(96)
    scale = np.sqrt(2.0 * gammainccinv(freedom / 2.0, 0.5 - nodes / 2.0) / freedom)  # by quantiles: every d converges
    return normal, weight / weight.sum(), scale, scale_weight / 2.0


def dunnett_p(t: float, family: int, freedom: float, correlation: float = 0.5) -> float:
    """P(the largest of ``family`` |t| reaches |``t``|) when all conditions are alike: Dunnett's two-sided p.

    ``correlation`` is the one between any two of them, in [0, 1). By a product of quadratures over the variable that
    all share and over the estimated spread: the same number at every call, right to 1e-4 (its tests hold it to scipy).
    Raises ValueError without a comparison or a degree of freedom.
    """
    from scipy.special import ndtr

    if family < 1 or freedom <= 0 or not 0.0 <= correlation <= 1.0:
        raise ValueError(f"no distribution for {family} comparisons, {freedom} degrees of freedom, ρ = {correlation}")
    if family == 1 or correlation == 1.0:
        return float(t_p(abs(t), freedom))
    normal, weight, scale, scale_weight = _rules(float(freedom))
    shared, own = math.sqrt(correlation) * normal, math.sqrt(1.0 - correlation)
    reach = abs(t) * scale[:, None]
    within = (ndtr((reach + shared) / own) - ndtr((-reach + shared) / own)) ** family
    return float(min(max(scale_weight @ (1.0 - within) @ weight, 0.0), 1.0))


@lru_cache(maxsize=512)
def dunnett_quantile(family: int, freedom: float, level: float = 0.95, correlation: float = 0.5) -> float:
    """Where ``dunnett_p`` is 1 − ``level``: the largest of ``family`` |t| stays below it with that probability."""
    from scipy.optimize import brentq
    from scipy.special import stdtrit

    alpha = 1.0 - level
    if family == 1:
        return -float(stdtrit(freedom, alpha / 2.0))
    most = -float(stdtrit(freedom, alpha / (4.0 * family)))  # beyond Bonferroni's
    root = brentq(lambda t: dunnett_p(t, family, freedom, correlation) - alpha, 0.0, most)
    return cast("float", root)


def step_down(t: Doubles_S, freedom: float, correlation: float = 0.5) -> Doubles_S:
    """Dunnett p-values adjusted step by step: the largest |t| among all, the next among the others, and so on.

    NaN has no statistic: its p is 1, and it counts in the family. Never smaller than one of a larger |t|.
    """
    statistics = np.asarray(t, dtype=np.float64)
    sizes = np.where(np.isnan(statistics), -1.0, np.abs(statistics))
    adjusted, before = np.ones(len(sizes)), 0.0
    for step, index in enumerate(np.argsort(-sizes, kind="stable")):
        if sizes[index] < 0.0 or freedom <= 0:
            continue
        before = max(before, dunnett_p(float(sizes[index]), len(sizes) - step, freedom, correlation))
        adjusted[index] = before
    return adjusted
