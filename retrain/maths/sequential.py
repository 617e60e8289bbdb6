"""A group-sequential sign-flip test: look after every pair of seeds, stop when sure, and keep the promised error.

Two things differ from the textbook's group-sequential designs (Lan and DeMets 1983):

- Nothing is normal. Under "the two conditions are alike" a paired difference is as likely +|d| as −|d|, so given the
  sizes |d| seen so far all 2^k sign patterns are equally likely, and the probability of having stopped is counted by
  going through them. The error is at most α for every distribution of seeds and from the first pair on.
- Few pairs cannot reach small probabilities, so that a look rarely spends all that it may. What is left over stays
  available for later looks.

A look happens after every pair, in an order fixed before; how the planned number of pairs enters is ``spending``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from retrain.maths.arrays import Values

MOST_PAIRS = 20
"""2^20 sign patterns take a second and 10 MB; a campaign of more seeds needs no early stopping rule of this kind."""
TIE = 1e-9
"""Sums that differ by less than this share of Σ|d| are equal: rounding must not decide."""


def _linear(alpha: float, share: float) -> float:
    return alpha * share


def _pocock(alpha: float, share: float) -> float:
    return alpha * math.log1p((math.e - 1.0) * share)


def _obrien_fleming(alpha: float, share: float) -> float:
    from scipy.special import ndtr, ndtri

    return 2.0 * float(ndtr(float(ndtri(alpha / 2.0)) / math.sqrt(share)))


SPENDING: dict[str, Callable[[float, float], float]] = {
    "linear": _linear,
    "pocock": _pocock,
    "obrien_fleming": _obrien_fleming,
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


def fewest_pairs(planned: int, *, alpha: float = 0.05, spending: str = "linear") -> int | None:
    """The first look at which equal differences of one sign would stop; None when no look can."""
    looks = sequential_looks(np.ones(planned), planned, alpha=alpha, spending=spending)
    return looks[-1].pairs if looks and looks[-1].stop else None
