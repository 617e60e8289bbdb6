"""A rule applied to many simulated campaigns at once, seed by seed: what is planned is what will decide.

``follow`` takes tables [campaigns, seeds, 1 + m] (first column the baseline) and lets a condition that has left train
no further seeds, as a campaign does. One look at all campaigns is ``take_look``, which is also what ``deciding`` looks
at a real campaign with; ``maths.power`` is ``follow`` of simulated tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from retrain.maths.arrays import Marks, Table
from retrain.maths.boundaries import boundaries, final_levels
from retrain.maths.collapse import flagged
from retrain.maths.normal import FEWEST_PAIRS, additive_fit, moderated, step_down, t_p
from retrain.maths.permutation import SAMPLED, closed_permutation
from retrain.maths.rules import Rule
from retrain.maths.sequential import SPENDING, TIE, evidence, hopeless, sequential_looks
from retrain.maths.statistics import EXACT_SIGN_FLIP_PAIRS, holm, pairs_for_verdict, sampled_sign_flip_p, sign_flip_p

PATTERNS = 1024
"""Sign patterns that simulated campaigns of more than 12 pairs are judged by; a real one is judged by all."""
PLANNED_SAMPLES = 499  # Arrangements by which closed permutation judges simulated campaigns


@dataclass(frozen=True)
class Followed:
    """What became of each comparison [campaigns, m]: whether it was found ``different``, the ``pairs`` after which its
    condition left (all planned ones if it never did), whether it left as ``futile``, and whether the exact test had to
    ``stand_in`` when it left."""

    different: Marks
    pairs: Table
    futile: Marks
    stood_in: Marks


def follow(tables: Table, rule: Rule, resolution: float = 0.0) -> Followed:
    """Apply the rule to tables [campaigns, seeds, 1 + family] as if their seeds came one by one; NaN is a missing run.

    Of more than 12 pairs the exact test's patterns are sampled, except for a single table.
    """
    y = np.asarray(tables, dtype=np.float64)
    if y.ndim != 3 or y.shape[-1] != rule.family + 1:
        raise ValueError(f"a rule for {rule.family} comparisons takes tables of {rule.family + 1}: got {y.shape}")
    if not y.shape[1]:
        course = Course.new(len(y), rule.family)
        return Followed(~course.open_, course.pairs, course.futile, course.stood_in)
    if rule.looks == "off":
        return _at_the_end(y, rule, resolution)
    return _with_looks(y, rule, resolution)


def _at_the_end(y: np.ndarray, rule: Rule, resolution: float) -> Followed:
    adjusted, stood_in = adjusted_at_the_end(y, rule, resolution)
    shape = adjusted.shape
    pairs = np.full(shape, y.shape[1])
    return Followed(adjusted <= rule.alpha, pairs, np.zeros(shape, bool), np.broadcast_to(stood_in[:, None], shape))


def adjusted_at_the_end(y: Table, rule: Rule, resolution: float = 0.0) -> tuple[Table, Marks]:
    """Adjusted p [campaigns, m] of the rule without looks, and in which campaigns the exact test stood in.

    Of several campaigns the normal test's p are only right about α: 0 below it, 1 above.
    """
    stood_in: np.ndarray = np.zeros(len(y), dtype=bool)
    if rule.test == "permutation":
        sampled = SAMPLED if len(y) == 1 else PLANNED_SAMPLES
        return np.array([closed_permutation(table, sampled) for table in y]), stood_in
    if rule.test == "exact":
        return np.array([holm(row) for row in _exact_p(y, rule)]), stood_in
    stood_in = np.asarray(flagged(y, resolution).any(axis=(1, 2)))
    adjusted = np.ones((len(y), rule.family))
    fit = additive_fit(y, resolution)
    statistics, freedom = fit.t(), np.asarray(fit.freedom, dtype=np.float64)
    if rule.prior_freedom:
        for i in range(len(y)):
            spread = float(fit.spread[i]) if freedom[i] else 0.0
            own = moderated(spread, freedom[i], rule.prior_spread / math.sqrt(2.0), rule.prior_freedom)
            statistics[i] = fit.difference[i] / (np.sqrt(fit.factor[i]) * own[0])
            freedom[i] = own[1]
    enough = _pairs(y)[:, -1] >= FEWEST_PAIRS
    statistics = np.where(enough, statistics, np.nan)
    if len(y) == 1:
        adjusted = step_down(statistics[0], float(freedom[0]), float(fit.correlation[0]))[None]
    else:
        own = t_p(statistics, freedom[:, None])
        for f, c in {(float(f), round(float(c), 6)) for f, c in zip(freedom, fit.correlation, strict=True)}:
            these = np.flatnonzero((freedom == f) & (np.abs(fit.correlation - c) < 1e-5))
            if f > 0:
                levels = final_levels(rule.family, f, c, rule.alpha)
                adjusted[these] = np.where(_step(own[these], np.broadcast_to(levels, own[these].shape)), 0.0, 1.0)
    if stood_in.any():
        adjusted[stood_in] = adjusted_at_the_end(y[stood_in], replace(rule, test="exact", prior_freedom=0.0))[0]
    return adjusted, stood_in


def _step(p: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Which of p [campaigns, m] are at most the level for as many as are still open, smallest first."""
    order = np.argsort(p, axis=1, kind="stable")
    passed = np.take_along_axis(p, order, axis=1) <= levels[:, ::-1]
    passed = np.logical_and.accumulate(passed, axis=1)
    found = np.zeros_like(passed)
    np.put_along_axis(found, order, passed, axis=1)
    return found


def _pairs(y: np.ndarray) -> np.ndarray:
    """How many pairs with the baseline each comparison has after each seed, [campaigns, seeds, m]."""
    return (~np.isnan(y[..., 1:]) & ~np.isnan(y[..., :1])).cumsum(axis=1)


def _differences(y: np.ndarray) -> np.ndarray:
    return y[..., 1:] - y[..., :1]


def _exact_p(y: np.ndarray, rule: Rule) -> np.ndarray:
    """Sign-flip p of each comparison [campaigns, m], 1 with too few pairs for any verdict."""
    d = _differences(y)
    if len(y) > 1 and not np.isnan(d).any():
        if d.shape[1] < pairs_for_verdict(1, rule.alpha):
            return np.ones((len(y), d.shape[2]))
        return _batch_p(d)
    rows = []
    for table in d:
        own = [column[~np.isnan(column)] for column in table.T]
        least = pairs_for_verdict(1, rule.alpha)
        rows.append([1.0 if len(each) < least else exact_p(each) for each in own])
    return np.array(rows)


def exact_p(differences: Table) -> float:
    """The sign-flip p of differences, from all patterns or, beyond 40 pairs, from sampled ones."""
    if len(differences) <= EXACT_SIGN_FLIP_PAIRS:
        return sign_flip_p(differences)
    return sampled_sign_flip_p(differences)


@lru_cache(maxsize=4)
def _patterns(pairs: int) -> np.ndarray:
    """Sign patterns up to a global flip [patterns, pairs], the observed one first: all of them, or random ones."""
    if pairs <= 12:
        bits = np.arange(2 ** (pairs - 1))[:, None] >> np.arange(pairs - 1)[None, :]
        return np.concatenate([np.ones((len(bits), 1)), 1.0 - 2.0 * (bits & 1)], axis=1)
    signs = np.random.default_rng(pairs).integers(0, 2, (PATTERNS, pairs)) * 2.0 - 1.0
    signs[0] = 1.0
    return signs


def _batch_p(d: np.ndarray) -> np.ndarray:
    """Sign-flip p of differences [campaigns, pairs, m] without NaN, [campaigns, m]."""
    signs, out = _patterns(d.shape[1]), []
    for part in np.array_split(d, max(1, d.shape[0] * d.shape[2] * len(signs) // 2_000_000)):
        sums = np.abs(np.swapaxes(part, 1, 2) @ signs.T)
        out.append((sums >= sums[..., :1] - TIE * np.abs(part).sum(axis=1)[..., None]).mean(axis=-1))
    return np.concatenate(out)


def _batch_stops(d: np.ndarray, rule: Rule) -> np.ndarray:
    """Whether ``sequential_looks`` would have stopped at each look or before, of differences [campaigns, pairs, m]."""
    campaigns, pairs, family = d.shape
    stops = np.zeros(d.shape, dtype=bool)
    signs, level = _patterns(pairs), rule.alpha / family
    for start in range(0, campaigns, block := max(1, 2_000_000 // (len(signs) * family))):
        part = d[start : start + block]
        sums = np.zeros((len(part), family, len(signs)))
        size = np.zeros((len(part), family, 1))
        going = np.ones(sums.shape, dtype=bool)
        spent, stopped = np.zeros((len(part), family)), np.zeros((len(part), family), dtype=bool)
        for k in range(pairs):
            sums += part[:, k, :, None] * signs[:, k]
            size += np.abs(part[:, k, :, None])
            distance, slack = np.abs(sums), TIE * size
            left = np.where(going, distance, -1.0)
            tail = (left >= distance[..., :1] - slack).mean(axis=-1)
            room = SPENDING[rule.looks](level, (k + 1) / rule.planned) - spent + 1e-12
            stopped |= tail <= room
            if room.max() * len(signs) >= 1.0:
                count = np.minimum((room * len(signs)).astype(int), len(signs) - 1)
                reach = np.take_along_axis(np.sort(left, axis=-1), (len(signs) - 1 - count)[..., None], axis=-1)
                stopping = going & (distance - slack > np.maximum(reach, 0.0))
                spent += stopping.mean(axis=-1)
                going &= ~stopping
            stops[start : start + block, k] = stopped
    return stops


def _exact_stops(y: np.ndarray, rule: Rule) -> np.ndarray:
    """Whether the exact or the always-valid test stops each comparison at each seed, [campaigns, seeds, m]."""
    d, level = _differences(y), rule.alpha / rule.family
    stops = np.zeros(d.shape, dtype=bool)
    if len(y) > 1 and not np.isnan(d).any() and rule.looks != "always_valid":
        return _batch_stops(d, rule)
    for i, table in enumerate(d):
        for c, column in enumerate(table.T):
            rows = np.flatnonzero(~np.isnan(column))
            if rule.looks == "always_valid":
                stops[i, rows, c] = np.maximum.accumulate(evidence(column[rows])) >= 1.0 / level
            else:
                looks = sequential_looks(column[rows], rule.planned, alpha=level, spending=rule.looks)
                if looks and looks[-1].stop:
                    stops[i, rows[looks[-1].pairs - 1 :], c] = True
    return stops


def _with_looks(y: np.ndarray, rule: Rule, resolution: float) -> Followed:
    campaigns, seeds, m = len(y), y.shape[1], rule.family
    pairs = _pairs(y)
    seen = y.copy()  # without what was not trained because its condition had left
    course = Course.new(campaigns, m)
    course.pairs[:] = pairs[:, -1]
    normal = rule.test == "normal"
    # Of the normal test only campaigns with a flag are asked, when they have one; a look knows no later seed.
    exact = np.zeros(pairs.shape, dtype=bool) if normal else _exact_stops(y, rule)
    asked = np.full(campaigns, not normal)

    def stops(row: int, which: np.ndarray) -> np.ndarray:
        new = which & ~asked
        if new.any():
            exact[new] = _exact_stops(y[new], replace(rule, test="exact"))
            asked[new] = True
        return exact[:, row]

    for row in range(seeds):
        seen[:, row, 1:] = np.where(course.going, seen[:, row, 1:], np.nan)
        now = ~np.isnan(seen[:, row, 1:]) & ~np.isnan(seen[:, row, :1])
        take_look(course, seen[:, : row + 1], now, pairs[:, row], rule, resolution, partial(stops, row))
    return Followed(~course.open_, course.pairs, course.futile, course.stood_in)


@dataclass
class Course:
    """Where campaigns stand, per comparison [campaigns, m]: whether it is ``open_`` (not decided, be it futile or not),
    whether its condition is still ``going``, with how many ``pairs`` it left, whether as ``futile``, and whether the
    exact test ``stood_in`` at its last look."""

    open_: Marks
    going: Marks
    pairs: Table
    futile: Marks
    stood_in: Marks

    @classmethod
    def new(cls, campaigns: int, family: int) -> Course:
        shape = (campaigns, family)
        none, all_ = np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)
        return cls(all_, all_.copy(), np.zeros(shape, dtype=np.int64), none, none.copy())


@dataclass(frozen=True)
class OwnTest:
    """Of each comparison [campaigns, m]: two-sided t ``p`` without correction, and the ``difference`` it is of."""

    p: Table
    difference: Table


def take_look(
    course: Course,
    seen: Table,
    now: Marks,
    pairs: Table,
    rule: Rule,
    resolution: float,
    exact: Callable[[Marks], Marks],
) -> OwnTest | None:
    """Look at what is ``seen`` [campaigns, seeds so far, 1 + m], and note in ``course`` what is decided or futile.

    Only comparisons that have a new pair, ``now`` [campaigns, m], are looked at; ``pairs`` is how many they have now.
    ``exact`` says of the campaigns in a mask [campaigns] which comparisons sign flips stop here [campaigns, m]. What is
    returned is the t test of each comparison where this look needed one.
    """
    from scipy.special import ndtri

    now = now & course.going
    rows = seen.shape[1]
    late = pairs >= rule.futile_from()  # a failed run is no information, here as in a campaign's own looks
    futility = rule.chance is not None and bool(late.any())
    normal = rule.test == "normal"
    marks = boundaries(rule.planned, rule.family, rule.looks, rule.alpha) if normal else None
    own = own_test(seen, rule, resolution) if normal or futility else None
    if marks is None or own is None:
        found = exact(np.ones(len(seen), dtype=bool)) & now
    else:
        found = np.zeros(now.shape, dtype=bool)
        if rows >= FEWEST_PAIRS:
            clean = np.asarray(~flagged(seen, resolution).any(axis=(1, 2)))
            look = np.minimum(pairs, rule.planned)
            found = _look_normally(np.where(now & clean[:, None], own.p, 2.0), look, course.open_, marks.level)
            if not clean.all():
                found[~clean] = (exact(~clean) & now)[~clean]
            course.stood_in[:] = np.where(now, ~clean[:, None], course.stood_in)
    course.pairs[found] = pairs[found]
    course.open_ &= ~found
    course.going &= ~found
    if futility and rule.chance is not None and own is not None:
        last_level = marks.level[-1, rule.family - 1] if marks is not None else rule.alpha / rule.family
        critical = -float(ndtri(max(last_level, 1e-12) / 2.0))
        z = -ndtri(np.maximum(own.p, 1e-300) / 2.0) * np.sign(own.difference)
        upward = rule.race and rule.upward
        gone = now & course.going & late & hopeless(z, pairs / rule.planned, critical, rule.chance, upward=upward)
        course.futile |= gone
        course.pairs[gone] = pairs[gone]
        course.going &= ~gone
    return own


def own_test(y: Table, rule: Rule, resolution: float = 0.0) -> OwnTest:
    """The t test of each comparison in tables [campaigns, seeds, 1 + m] on its own: by the pooled residual for the
    normal test, by the comparison's own differences for the exact one's futility."""
    if rule.test == "normal":
        fit = additive_fit(y, resolution)
        return OwnTest(t_p(fit.t(), fit.freedom[:, None]), np.nan_to_num(fit.difference))
    d = _differences(y)
    count = (~np.isnan(d)).sum(axis=1)
    mean = np.nansum(d, axis=1) / np.maximum(count, 1)
    squares = np.nansum((d - mean[:, None]) ** 2, axis=1)
    variance = np.maximum(squares / np.maximum(count - 1, 1), resolution**2 / 6.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = mean / np.sqrt(variance / np.maximum(count, 1))
    return OwnTest(t_p(t, np.maximum(count - 1, 0)), mean)


def _look_normally(p: np.ndarray, look: np.ndarray, open_: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Which comparisons are decided at this look: the smallest p by the level for all open ones, and so on."""
    found = np.zeros(p.shape, dtype=bool)
    rows = np.arange(len(p))
    for _ in range(p.shape[1]):
        rest = np.where(found, 2.0, p)
        best = rest.argmin(axis=1)
        remaining = (open_ & ~found).sum(axis=1)
        at = level[np.maximum(look[rows, best], 1) - 1, np.maximum(remaining, 1) - 1]
        passed = (rest[rows, best] <= at) & (rest[rows, best] <= 1.0)
        if not passed.any():
            break
        found[rows[passed], best[passed]] = True
    return found
