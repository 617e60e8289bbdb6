"""What decides a campaign: a rule that is declared before anything is seen.

A ``Rule`` names the test, the looks that may stop a condition before the planned seeds are there, and when going on is
called futile. ``deciding`` applies it to the results of one campaign, ``following`` to many simulated ones:

- ``exact``: sign flips of the paired differences, Holm's correction; with looks, each comparison has α/m and
  stage-wise p (``maths.sequential``);
- ``normal``: t by the pooled residual, stepping down (``maths.normal``); with looks, levels from ``maths.boundaries``.
  A collapsed run (``maths.collapse``) in what has been seen hands that look to the exact test;
- ``permutation``: closed permutation within seeds (``maths.permutation``), at the end only.

Futility never counts as evidence, and the error is kept if nobody heeds it. In a race a condition leaves when it
cannot be expected to beat the baseline, from the second seed on.
"""

import math
from dataclasses import dataclass
from typing import Literal

from retrain.maths.normal import FEWEST_PAIRS
from retrain.maths.statistics import pairs_for_verdict

Test = Literal["exact", "normal", "permutation"]
Looks = Literal["off", "linear", "pocock", "obrien_fleming", "square", "always_valid"]
FUTILE = 0.2  # Chance of showing a difference at the planned end below which going on is futile
FUTILE_FROM = 0.5  # Share of the planned pairs before which nothing is futile; a race begins earlier
RACE_FROM = 2


@dataclass(frozen=True)
class Rule:
    """A declared rule; ``family`` is the number of conditions compared with the baseline, ``planned`` of the seeds.

    ``futility`` is the chance below which a condition stops (None: never), ``race`` lets those go that cannot win;
    ``upward`` says whether winning means higher values (else either direction counts). ``prior_spread`` is the
    standard deviation of a paired difference that earlier campaigns showed, with ``prior_freedom`` degrees of freedom.
    Raises ValueError for what does not go together.
    """

    test: Test = "exact"
    family: int = 1
    planned: int = 8
    looks: Looks = "off"
    futility: float | None = None
    race: bool = False
    upward: bool = True
    prior_spread: float = 0.0
    prior_freedom: float = 0.0
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if self.family < 1 or self.planned < 1 or not 0.0 < self.alpha < 1.0:
            raise ValueError(f"a rule compares at least one condition over one seed: got {self}")
        if self.looks != "off" and self.test == "permutation":
            raise ValueError("closed permutation is a test at the end: it has no looks")
        if self.looks == "always_valid" and self.test != "exact":
            raise ValueError("the always-valid rule bets on signs: it has no other test")
        if (self.futility is not None or self.race) and self.looks in ("off", "always_valid"):
            raise ValueError("stopping for futility needs looks at a planned number of pairs")
        if self.prior_freedom and (self.test != "normal" or self.family > 1 or self.looks != "off"):
            raise ValueError("an earlier spread counts for the normal test of one comparison without looks")

    @property
    def chance(self) -> float | None:
        """The chance below which going on is futile: a race has one in any case."""
        return FUTILE if self.race and self.futility is None else self.futility

    @property
    def fewest(self) -> int:
        """Pairs without which no comparison can reach its level."""
        if self.test == "normal":
            return FEWEST_PAIRS
        return pairs_for_verdict(1 if self.test == "permutation" else self.family, self.alpha)

    def futile_from(self) -> int:
        """The number of pairs from which on a condition may stop for futility."""
        return RACE_FROM if self.race else math.ceil(FUTILE_FROM * self.planned)
