"""The sequential sign-flip test: exact error by going through all sign patterns, and by simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from retrain.maths.sequential import MOST_PAIRS, SPENDING, evidence, hopeless, sequential_looks
from retrain.maths.statistics import sign_flip_p


def stops(differences, planned=None, **settings) -> bool:
    looks = sequential_looks(differences, planned or len(differences), **settings)
    return looks[-1].stop


@pytest.mark.parametrize("spending", SPENDING)
@pytest.mark.parametrize("sizes", [[1.0] * 8, [0.3, 2.0, 0.0, 1.0, 1.0, 5.0, 0.1, 0.7]], ids=["equal", "mixed"])
def test_over_all_sign_patterns_the_error_is_what_was_spent_and_at_most_alpha(spending, sizes):
    patterns = [np.array(signs) * sizes for signs in itertools.product((-1.0, 1.0), repeat=len(sizes))]
    ended = [sequential_looks(d, len(sizes), alpha=0.05, spending=spending)[-1] for d in patterns]
    rejected = sum(look.stop for look in ended) / len(patterns)
    assert rejected <= 0.05
    whole = next(look for look in ended if not look.stop)
    assert rejected == pytest.approx(whole.spent)
    for bound in (0.01, 0.03, 0.05):  # a p-value: P(p <= u) <= u, at and below alpha
        assert sum(look.p <= bound + 1e-12 for look in ended if look.stop) / len(patterns) <= bound + 1e-9


def test_one_look_at_the_end_would_be_the_plain_sign_flip_test():
    differences = np.random.default_rng(1).normal(0.4, 1.0, 9)
    looks = sequential_looks(differences, 9, alpha=1e-3)  # too little to stop before the end
    assert [look.pairs for look in looks] == list(range(1, 10))
    assert looks[-1].spent == looks[-2].spent == 0.0
    assert looks[-1].p == looks[-1].tail == sign_flip_p(differences)


@pytest.mark.parametrize(("n", "spread"), [(8, "normal"), (12, "heavy"), (12, "few values")])
def test_error_by_simulation_with_realistic_spreads(n, spread):
    random = np.random.default_rng(n)
    draw = {
        "normal": lambda: random.normal(size=n),
        "heavy": lambda: random.standard_t(2, n),
        "few values": lambda: (random.binomial(16, 0.95, n) - random.binomial(16, 0.95, n)) / 16,
    }[spread]
    campaigns = 600
    rate = sum(stops(draw()) for _ in range(campaigns)) / campaigns
    assert rate <= 0.05 + 3 * (0.05 * 0.95 / campaigns) ** 0.5


def test_a_clear_difference_stops_early_in_either_direction_and_a_faint_one_does_not():
    up = sequential_looks([1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.0], 8)
    down = sequential_looks([-1.0, -1.2, -0.9, -1.1, -1.0, -1.3, -0.8, -1.0], 8)
    assert up[-1].stop
    assert up[-1].pairs == down[-1].pairs == 6 == sequential_looks([1.0] * 8, 8)[-1].pairs
    assert (up[-1].mean, down[-1].mean) == pytest.approx((1.083333, -1.083333))
    assert up[-1].p == 2 * 2**-6 <= up[-1].allowed
    faint = sequential_looks([1.0, -1.2, 0.9, 1.1, -1.0, 1.3, -0.8, 1.0], 8)
    assert len(faint) == 8
    assert not faint[-1].stop


def test_what_is_not_spent_stays_available():
    looks = sequential_looks([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 10)
    assert all(look.spent <= look.allowed for look in looks)
    assert looks[4].spent == 0.0 < looks[4].allowed
    assert not sequential_looks([1.0] * 4, 4)[-1].stop


@pytest.mark.parametrize("spending", SPENDING)
def test_all_of_alpha_may_be_spent_at_the_end_and_more_as_pairs_come(spending):
    spent = [SPENDING[spending](0.05, k / 10) for k in range(1, 11)]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(0.05)


@pytest.mark.usefixtures("unchecked")
def test_values_that_have_no_answer():
    assert sequential_looks([], 5) == []
    assert not stops([0.0] * 6)
    for wrong in ([np.nan], [[1.0]], [1.0] * 3):
        with pytest.raises(ValueError, match=r"finite|planned"):
            sequential_looks(wrong, 2)
    with pytest.raises(ValueError, match="planned"):
        sequential_looks([1.0], MOST_PAIRS + 1)
    with pytest.raises(ValueError, match="spending"):
        sequential_looks([1.0], 4, spending="all at once")


def test_a_p_value_holds_what_earlier_looks_have_spent():
    """Five ones, minus one, one: of the 128 patterns 4 stopped at the sixth look, 12 of the others reach a sum of 5."""
    looks = sequential_looks([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, 1.0], 8)
    assert (looks[5].spent, looks[5].stop) == (2 / 64, False)
    assert looks[6].tail == 12 / 128
    assert looks[6].p == 4 / 128 + 12 / 128


@pytest.mark.parametrize("sizes", [[1.0] * 8, [0.3, 2.0, 0.0, 1.0, 1.0, 5.0, 0.1, 0.7]], ids=["equal", "mixed"])
def test_evidence_is_one_on_average_over_signs_after_every_pair(sizes):
    patterns = np.array(list(itertools.product((-1.0, 1.0), repeat=len(sizes)))) * sizes
    found = evidence(patterns)
    assert found.mean(axis=0) == pytest.approx(np.ones(8))
    assert found == pytest.approx(evidence(-patterns))
    assert evidence(1000.0 * patterns) == pytest.approx(found)
    for k in range(1, 8):  # a martingale: the next pair wins and loses as much, whatever came before
        for start in patterns[:: 2 ** (8 - k), :k]:
            same = (np.sign(patterns[:, :k]) == np.sign(start)).all(axis=1)
            assert found[same, k].mean() == pytest.approx(found[same, k - 1].mean())


def test_evidence_rarely_ever_reaches_twenty_and_needs_six_pairs():
    alike = np.random.default_rng(5).standard_t(3, (4000, 60))
    assert (evidence(alike).max(axis=1) >= 20.0).mean() <= 0.05
    growing = evidence(np.ones(8))
    assert growing[4] < 20.0 < growing[5]
    assert evidence(np.zeros(3)) == pytest.approx(np.ones(3))


def test_hopeless_is_the_predictive_chance_of_the_planned_end():
    random = np.random.default_rng(6)
    for z, share in ((0.0, 0.5), (1.0, 0.5), (-2.0, 0.25), (1.5, 0.75)):
        drift = z / share**0.5 + random.normal(size=200_000) / share**0.5  # flat prior: z/√share ± 1/√share
        end = z * share**0.5 + drift * (1.0 - share) + random.normal(size=200_000) * (1.0 - share) ** 0.5
        for upward, chance in ((False, (np.abs(end) > 1.96).mean()), (True, (end > 1.96).mean())):
            assert not hopeless(np.array([z]), share, 1.96, chance - 0.005, upward=upward)[0]
            assert hopeless(np.array([z]), share, 1.96, chance + 0.005, upward=upward)[0]
    assert not hopeless(np.array([0.0]), 1.0, 1.96, 0.2)[0]
