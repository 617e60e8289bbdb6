"""A group-sequential sign-flip test: look after every pair of seeds, stop when sure, and keep the promised error.

Two things differ from the textbook's group-sequential designs (Lan and DeMets 1983):

- Nothing is normal. Under "the two conditions are alike" a paired difference is as likely +|d| as −|d|, so given the
  sizes |d| seen so far all 2^k sign patterns are equally likely, and the probability of having stopped is counted by
  going through them. The error is at most α for every distribution of seeds and from the first pair on.
- Few pairs cannot reach small probabilities, so that a look rarely spends all that it may. What is left over stays
  available for later looks.

A look happens after every pair, in an order fixed before; how the planned number of pairs enters is ``spending``.

Where the number of pairs is not fixed before, ``evidence`` is an e-process (Waudby-Smith and Ramdas 2024): a bet on the
signs that wins nothing on average if they are random, so that it ever reaches 1/α with probability α at most (Ville
1939), however pairs are added. ``hopeless`` is no test: it tells when going on is unlikely to show anything.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrain.maths.arrays import Marks, Table, Values

MOST_PAIRS = 20
"""2^20 sign patterns take a second and 10 MB; a campaign of more seeds needs no early stopping rule of this kind."""
TIE = 1e-9  # Sums that differ by less than this share of Σ|d| are equal: rounding must not decide


def _linear(alpha: float, share: float) -> float:
    return alpha * share


def _pocock(alpha: float, share: float) -> float:
    return alpha * math.log1p((math.e - 1.0) * share)


def _obrien_fleming(alpha: float, share: float) -> float:
    from scipy.special import ndtr, ndtri

    return 2.0 * float(ndtr(float(ndtri(alpha / 2.0)) / math.sqrt(share)))


def _square(alpha: float, share: float) -> float:
    return alpha * share**2


SPENDING: dict[str, Callable[[float, float], float]] = {
    "linear": _linear,
    "pocock": _pocock,
    "obrien_fleming": _obrien_fleming,
    "square": _square,
}
"""How much of α may be spent when a share of the planned pairs is there; all reach α at share 1."""


@dataclass(frozen=True)
class Look:
    """One look: after ``pairs`` differences with this mean, ``allowed`` of α could be spent in all so far.

    ``tail`` is the probability, with random signs, of not having stopped before and of a sum at least as far from 0
    as the one seen; ``p`` is the p-value of stopping here (stage-wise ordering): what earlier looks have spent, plus
    ``tail``. ``spent`` is what all looks up to this one have really spent. ``stop`` says whether ``tail`` fits.
    """

    pairs: int
    mean: float
    allowed: float
    tail: float
    p: float
    spent: float
    stop: bool


def sequential_looks(differences: Values, planned: int, *, alpha: float = 0.05, spending: str = "linear") -> list[Look]:
    """The looks at paired differences in their fixed order, up to the first that stops.

    ``planned`` is the number of pairs at which all of α may be spent. Raises ValueError for more pairs than planned,
    more than 20, values that are not finite, or an unknown spending function.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or not np.isfinite(d).all():
        raise ValueError("differences must be a list of finite numbers")
    if not len(d) <= planned <= MOST_PAIRS:
        raise ValueError(f"a sequential test takes at most {MOST_PAIRS} planned pairs: got {len(d)} of {planned}")
    if spending not in SPENDING or not 0.0 < alpha < 1.0:
        raise ValueError(f"spending is one of {', '.join(SPENDING)} and alpha lies in (0, 1)")
    sums, going = np.zeros(1), np.ones(1, dtype=bool)
    looks: list[Look] = []
    spent = 0.0
    for k, size in enumerate(np.abs(d), start=1):
        sums, going = np.concatenate([sums - size, sums + size]), np.concatenate([going, going])
        slack = TIE * float(np.abs(d[:k]).sum())
        distance = np.abs(sums)
        left = distance[going]
        seen = abs(float(d[:k].sum()))
        tail = float(np.count_nonzero(left >= seen - slack)) / len(sums)
        allowed = SPENDING[spending](alpha, k / planned)
        room = allowed - spent + 1e-12
        p, stopping = min(spent + tail, 1.0), going & (distance - slack > _beyond(left, int(room * len(sums))))
        spent += float(stopping.sum()) / len(sums)
        looks.append(Look(k, float(d[:k].mean()), allowed, tail, p, spent, tail <= room))
        if looks[-1].stop:
            break
        going &= ~stopping
    return looks


def _beyond(values: np.ndarray, count: int) -> float:
    """The value above which at most ``count`` of the values lie: the next largest after these."""
    return -math.inf if count >= len(values) else float(np.partition(values, len(values) - count - 1)[-count - 1])


STAKES = (1.0, 2.5)
"""λ in units of one over the typical size: the best bets on means of 0.8 and 1.4 standard deviations."""


def evidence(differences: Values | Table) -> Table:
    """How strongly differences [..., pairs] speak against "alike" after each pair, in their order, of the same shape.

    With signs random given the sizes, exp(λd)/cosh(λd) is 1 on average for every λ that depends on sizes only. Here λ
    is a stake over the root mean square of the differences so far, and the evidence the average over ``STAKES`` and
    both directions of the products. 1/evidence, at its largest, is a p-value that holds at every number of pairs.
    """
    d = np.asarray(differences, dtype=np.float64)
    count = np.arange(1, d.shape[-1] + 1)
    typical = np.sqrt((d**2).cumsum(axis=-1) / count)
    bets = d / np.where(typical > 0.0, typical, 1.0)
    log_bets = []
    for stake in STAKES:
        for side in (1.0, -1.0):
            x = side * stake * bets
            log_bets.append((x - np.logaddexp(x, -x) + math.log(2.0)).cumsum(axis=-1))
    return np.exp(log_bets).mean(axis=0)


def hopeless(z: Table, share: Table | float, critical: float, chance: float, *, upward: bool = False) -> Marks:
    """Whether the planned end would find a difference with less than this ``chance``, given what is seen.

    ``z`` is the statistic now as a normal quantile, ``share`` that of the planned pairs which are there, ``critical``
    the quantile that the end asks for. Predictive power: every true difference is as plausible before (Spiegelhalter,
    Freedman and Blackburn 1986), so that few pairs end nothing. ``upward``: only a positive difference would count.
    """
    from scipy.special import ndtr

    share = np.asarray(share, np.float64)
    inside = (share > 0.0) & (share < 1.0)  # nothing is known yet, or nothing is to come
    share = np.where(inside, share, 0.5)
    centre, reach = np.asarray(z) / np.sqrt(share), np.sqrt((1.0 - share) / share)
    found = ndtr((centre - critical) / reach)
    if not upward:
        found = found + ndtr((-centre - critical) / reach)
    return (found < chance) & inside
