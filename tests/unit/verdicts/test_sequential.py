"""The sequential sign-flip test: exact error by going through all sign patterns, and by simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from retrain.maths.sequential import MOST_PAIRS, SPENDING, evidence, hopeless, sequential_looks
from retrain.maths.statistics import sign_flip_p

SIZES = [0.3, 2.0, 0.0, 1.0, 1.0, 5.0, 0.1, 0.7]


@pytest.mark.parametrize("spending", SPENDING)
@pytest.mark.parametrize("sizes", [[1.0] * 8, SIZES], ids=["equal", "mixed"])
def test_over_all_sign_patterns_the_error_is_what_was_spent_and_at_most_alpha(spending, sizes):
    patterns = [np.array(signs) * sizes for signs in itertools.product((-1.0, 1.0), repeat=len(sizes))]
    ended = [sequential_looks(d, len(sizes), alpha=0.05, spending=spending)[-1] for d in patterns]
    rejected = sum(look.stop for look in ended) / len(patterns)
    assert rejected <= 0.05
    whole = next(look for look in ended if not look.stop)
    assert rejected == pytest.approx(whole.spent)
    for bound in (0.01, 0.03, 0.05):  # a p-value: P(p <= u) <= u, at and below alpha
        assert sum(look.p <= bound + 1e-12 for look in ended if look.stop) / len(patterns) <= bound + 1e-9
    spent = [SPENDING[spending](0.05, k / 10) for k in range(1, 11)]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(0.05)


def test_looks_by_hand():
    for sign in (1.0, -1.0):
        looks = sequential_looks(sign * np.array([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.0]), 8)
        assert (looks[-1].stop, looks[-1].pairs) == (True, 6)
        assert looks[-1].mean == pytest.approx(sign * 1.083333)
        assert looks[-1].p == 2 * 2**-6 <= looks[-1].allowed
    faint = sequential_looks([1.0, -1.2, 0.9, 1.1, -1.0, 1.3, -0.8, 1.0], 8)
    assert (len(faint), faint[-1].stop) == (8, False)
    # Of the 128 patterns 4 stopped at the sixth look, 12 of the others reach a sum of 5.
    looks = sequential_looks([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0], 8)
    assert (looks[5].spent, looks[5].stop) == (2 / 64, False)
    assert (looks[6].tail, looks[6].p) == (12 / 128, 4 / 128 + 12 / 128)
    differences = np.random.default_rng(1).normal(0.4, 1.0, 9)
    looks = sequential_looks(differences, 9, alpha=1e-3)  # too little to stop before the end
    assert [look.pairs for look in looks] == list(range(1, 10))
    assert looks[-1].p == looks[-1].tail == sign_flip_p(differences)


@pytest.mark.usefixtures("unchecked")
def test_values_that_have_no_answer():
    assert sequential_looks([], 5) == []
    assert not sequential_looks([0.0] * 6, 6)[-1].stop
    for wrong, planned in (([np.nan], 2), ([[1.0]], 2), ([1.0] * 3, 2), ([1.0], MOST_PAIRS + 1)):
        with pytest.raises(ValueError, match=r"finite|planned"):
            sequential_looks(wrong, planned)
    with pytest.raises(ValueError, match="spending"):
        sequential_looks([1.0], 4, spending="all at once")


def test_evidence_is_one_on_average_over_signs_after_every_pair():
    patterns = np.array(list(itertools.product((-1.0, 1.0), repeat=8))) * SIZES
    found = evidence(patterns)
    assert found.mean(axis=0) == pytest.approx(np.ones(8))
    assert found == pytest.approx(evidence(-1000.0 * patterns))
    for k in range(1, 8):  # a martingale: the next pair wins and loses as much, whatever came before
        for start in patterns[:: 2 ** (8 - k), :k]:
            same = (np.sign(patterns[:, :k]) == np.sign(start)).all(axis=1)
            assert found[same, k].mean() == pytest.approx(found[same, k - 1].mean())


def test_evidence_rarely_ever_reaches_twenty_and_needs_six_pairs():
    alike = np.random.default_rng(5).standard_t(3, (2000, 60))
    assert (evidence(alike).max(axis=1) >= 20.0).mean() <= 0.055
    growing = evidence(np.ones(8))
    assert growing[4] < 20.0 < growing[5]


def test_hopeless_is_the_predictive_chance_of_the_planned_end():
    random = np.random.default_rng(6)
    for z, share in ((0.0, 0.5), (1.0, 0.5), (-2.0, 0.25), (1.5, 0.75)):
        drift = z / share**0.5 + random.normal(size=200_000) / share**0.5  # flat prior: z/√share ± 1/√share
        end = z * share**0.5 + drift * (1.0 - share) + random.normal(size=200_000) * (1.0 - share) ** 0.5
        for upward, chance in ((False, (np.abs(end) > 1.96).mean()), (True, (end > 1.96).mean())):
            assert not hopeless(np.array([z]), share, 1.96, chance - 0.005, upward=upward)[0]
            assert hopeless(np.array([z]), share, 1.96, chance + 0.005, upward=upward)[0]
    assert not hopeless(np.array([0.0]), 1.0, 1.96, 0.2)[0]
