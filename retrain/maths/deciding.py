"""A rule applied to the results of one campaign, with the p-values that people read.

``decide`` is what the rule says of a whole table. A campaign with looks takes them one at a time, ``decide_look``, from
the record of the earlier ones: what has left is what that record says, so that a value which comes late (of a failed
run that was tried again) is looked at when it is there and changes no earlier look. Taken in the order of the seeds
these are the looks of ``following.follow``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from retrain.maths.arrays import Marks, Table
from retrain.maths.boundaries import boundaries
from retrain.maths.collapse import Collapse, collapses
from retrain.maths.following import Course, OwnTest, adjusted_at_the_end, exact_p, own_test, take_look
from retrain.maths.normal import FEWEST_PAIRS, additive_fit
from retrain.maths.rules import Rule, Test
from retrain.maths.sequential import Look, evidence, sequential_looks
from retrain.maths.statistics import pairs_for_verdict

Reason = Literal["decided", "futility", "planned end"]


@dataclass(frozen=True)
class Decision:
    """One comparison: ``p`` of the declared test alone and ``p_adjusted`` for the family (stage-wise with looks),
    ``p_exact`` of the sign flips at these pairs without correction, None where there is nothing to test and in what
    ``decide_look`` gives, whose cost it would be most of;
    ``difference`` is the mean paired one, ``tested`` the estimate that the test is of (the additive fit's for the
    normal test, which differs where runs are missing), ``pairs`` those that count, ``reason`` why the condition trains
    no further (None: it goes on), ``different`` whether the rule says so, ``by`` the test that spoke. ``look`` is what
    sign flips saw, where they looked."""

    pairs: int
    difference: float | None
    tested: float | None
    p: float | None
    p_adjusted: float | None
    p_exact: float | None
    different: bool
    reason: Reason | None
    by: Test
    look: Look | None = None


@dataclass(frozen=True)
class Decisions:
    """All comparisons of a table in its order, and the runs of it that collapsed."""

    comparisons: tuple[Decision, ...]
    collapses: tuple[Collapse, ...]


@dataclass(frozen=True)
class Left:
    """What ended a comparison at an earlier look: whether it was found ``different`` (else going on was futile), and
    its adjusted p."""

    different: bool
    p_adjusted: float

    @classmethod
    def after(cls, different: bool, p_adjusted: float | None) -> Left:
        """Of the look that ended it; one at which there was nothing to test proves nothing: its p is 1."""
        return cls(different, 1.0 if p_adjusted is None else p_adjusted)


def decide(table: Table, rule: Rule, resolution: float = 0.0) -> Decisions:
    """What the rule says of one table [seeds, 1 + family] in the fixed order of seeds; NaN is a run that is not there.

    Without looks the p-values are those of all pairs. With looks a comparison's pairs end where its condition left,
    and p is what stopping there is, or would be, worth; nothing may be concluded from it while ``reason`` is None.
    """
    y = np.asarray(table, dtype=np.float64)
    if y.ndim != 2 or y.shape[1] != rule.family + 1:
        raise ValueError(f"a rule for {rule.family} comparisons takes a table of {rule.family + 1}: got {y.shape}")
    found = tuple(collapses(y, resolution)) if len(y) else ()
    return Decisions(_final(y, rule, resolution) if rule.looks == "off" else _looked(y, rule, resolution), found)


def _nothing(rule: Rule) -> list[Decision]:
    """Of every comparison: that there is no pair."""
    return [Decision(0, None, None, None, None, None, False, None, rule.test)] * rule.family


def _final(y: np.ndarray, rule: Rule, resolution: float) -> tuple[Decision, ...]:
    if not len(y):
        return tuple(_nothing(rule))
    adjusted, stood_in = adjusted_at_the_end(y[None], rule, resolution)
    by: Test = "exact" if stood_in[0] else rule.test
    fewest = pairs_for_verdict(1, rule.alpha) if by != "normal" else FEWEST_PAIRS
    single = replace(rule, test=by, family=1, prior_freedom=rule.prior_freedom if by == rule.test else 0.0)
    leads = additive_fit(y[None], resolution).difference[0] if by == "normal" else None
    out = []
    for i in range(rule.family):
        d = y[:, i + 1] - y[:, 0]
        d = d[~np.isnan(d)]
        exact = exact_p(d) if len(d) else None
        alone = exact if by != "normal" else _alone(y, i, single, rule, resolution)
        enough = len(d) >= fewest
        mean = float(d.mean()) if len(d) else None
        out.append(
            Decision(
                pairs=len(d),
                difference=mean,
                tested=mean if leads is None or mean is None else float(leads[i]),
                p=alone if enough else None,
                p_adjusted=float(adjusted[0, i]) if enough else None,
                p_exact=exact,
                different=bool(enough and adjusted[0, i] <= rule.alpha),
                reason="planned end" if len(d) >= rule.planned else None,
                by=by,
            )
        )
    return tuple(out)


def _alone(y: np.ndarray, i: int, single: Rule, rule: Rule, resolution: float) -> float:
    """The normal test's p of one comparison without correction, by the residual of the whole table."""
    if rule.family == 1:
        return float(adjusted_at_the_end(y[None], single, resolution)[0][0, 0])
    return float(own_test(y[None], rule, resolution).p[0, i])


def _looked(y: np.ndarray, rule: Rule, resolution: float) -> tuple[Decision, ...]:
    """The last look at each comparison, all taken in the order of the table."""
    found = _nothing(rule)
    left: list[Left | None] = [None] * rule.family
    paths: list[list[float]] = [[] for _ in range(rule.family)]
    seen = y.copy()
    for row in range(len(y)):
        seen[row, 1:][[each is not None for each in left]] = np.nan
        lead = seen[row, 1:] - seen[row, 0]
        fresh: np.ndarray = ~np.isnan(lead)
        for i in np.flatnonzero(fresh):
            paths[i].append(float(lead[i]))
        looks = decide_look(seen[: row + 1], [np.array(path) for path in paths], rule, left, fresh, resolution)
        for i, decision in enumerate(looks):
            if decision is None:
                continue
            found[i] = decision
            if decision.reason in ("decided", "futility"):
                left[i] = Left.after(decision.different, decision.p_adjusted)
    return tuple(
        replace(decision, p_exact=exact_p(np.array(path[: decision.pairs]))) if decision.pairs else decision
        for decision, path in zip(found, paths, strict=True)
    )


def decide_look(
    table: Table, paths: Sequence[Table], rule: Rule, left: Sequence[Left | None], fresh: Marks, resolution: float = 0.0
) -> list[Decision | None]:
    """One look, at the comparisons that are ``fresh`` [family]: those with a pair that no look has seen.

    ``table`` [seeds so far, 1 + family] is what is seen, without what was not trained because its condition had left;
    the order of its rows does not matter. ``paths`` are the paired differences of each comparison in the order in which
    they were looked at, ``left`` what ended a comparison earlier, None for one that goes on. Of what is not fresh, or
    has left, the decision is None.
    """
    y = np.asarray(table, dtype=np.float64)[None]
    if y.ndim != 3 or y.shape[-1] != rule.family + 1:
        raise ValueError(f"a rule for {rule.family} comparisons takes a table of {rule.family + 1}: got {y.shape[1:]}")
    course = Course.new(1, rule.family)
    course.open_[0] = [each is None or not each.different for each in left]
    course.going[0] = [each is None for each in left]
    now = np.asarray(fresh, dtype=bool) & course.going[0]
    if not now.any():
        return [None] * rule.family
    places, level = np.flatnonzero(now).tolist(), rule.alpha / rule.family
    flips: dict[int, Look] = {}  # the one way through all sign patterns of each comparison
    bets: dict[int, float] = {}

    def exact(_: Marks) -> Marks:
        stops = np.zeros((1, rule.family), dtype=bool)
        for i in places:
            if rule.looks == "always_valid":
                bets[i] = float(np.max(evidence(paths[i])))
                stops[0, i] = bets[i] >= 1.0 / level
            else:
                flips[i] = sequential_looks(paths[i], rule.planned, alpha=level, spending=rule.looks)[-1]
                stops[0, i] = flips[i].stop
        return stops

    open_before, counts = int(course.open_.sum()), np.array([[len(path) for path in paths]])
    own = take_look(course, y, now[None], counts, rule, resolution, exact)
    different, futile, stood_in = ~course.open_[0], course.futile[0], course.stood_in[0]
    p: dict[int, tuple[float, float]] = {}
    for i, bet in bets.items():
        value = min(1.0, 1.0 / bet)
        p[i] = value, min(1.0, value * rule.family)
    for i, look in flips.items():
        p[i] = look.p, min(1.0, look.p * rule.family)
    if rule.test == "normal" and not flips and own is not None:
        by_t = [i for i in places if len(paths[i]) >= FEWEST_PAIRS]
        p = _stage_wise(own, by_t, counts[0], different, rule, open_before, left)
    out: list[Decision | None] = [None] * rule.family
    for i in places:
        d, normal = paths[i], rule.test == "normal" and not stood_in[i]
        ended = len(d) >= rule.planned and rule.looks != "always_valid"
        reason: Reason | None = "decided" if different[i] else "futility" if futile[i] else None
        mean = float(d.mean())
        out[i] = Decision(
            pairs=len(d),
            difference=mean,
            tested=float(own.difference[0, i]) if normal and own is not None else mean,
            p=p[i][0] if i in p else None,
            p_adjusted=p[i][1] if i in p else None,
            p_exact=None,
            different=bool(different[i]),
            reason=reason or ("planned end" if ended else None),
            by="exact" if stood_in[i] else rule.test,
            look=flips.get(i),
        )
    return out


def _stage_wise(
    own: OwnTest,
    places: Sequence[int],
    counts: np.ndarray,
    different: np.ndarray,
    rule: Rule,
    remaining: int,
    left: Sequence[Left | None],
) -> dict[int, tuple[float, float]]:
    """(p, adjusted p) of the normal test's looks at these ``places``, stepping down from ``remaining`` open ones."""
    marks = boundaries(rule.planned, rule.family, rule.looks, rule.alpha)
    before = max(
        (min(each.p_adjusted, rule.alpha) for each in left if each is not None and each.different), default=0.0
    )
    out = {}
    for i in sorted(places, key=lambda i: (not different[i], own.p[0, i])):
        alone, look = float(own.p[0, i]), min(int(counts[i]), rule.planned)
        before = max(before, marks.p(alone, look, max(remaining, 1)))
        if different[i]:
            before = min(before, rule.alpha)  # the sampled p of what is decided at its boundary
        out[i] = (marks.p(alone, look, 1), before)
        remaining -= 1
    return out
