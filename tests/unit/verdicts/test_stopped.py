"""After a stop: what looks change and what they do not, and the bias that is left with the real rule."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from retrain.maths.sequential import sequential_looks
from retrain.maths.stopped import stopped_interval


def test_without_looks_it_is_the_t_interval():
    found = stopped_interval(0.3, 0.8, [0.0] * 8, 7)
    reach = stats.t.ppf(0.975, 7) * 0.8 / 8**0.5
    assert (found.estimate, found.low, found.high) == pytest.approx((0.3, 0.3 - reach, 0.3 + reach), abs=0.02)


def test_it_scales_and_mirrors():
    spent = [0.0] * 5 + [0.03, 0.04]
    found = stopped_interval(1.2, 1.0, spent, 6)
    scaled, mirrored = stopped_interval(0.12, 0.1, spent, 6), stopped_interval(-1.2, 1.0, spent, 6)
    assert np.multiply((scaled.estimate, scaled.low, scaled.high), 10) == pytest.approx(
        (found.estimate, found.low, found.high)
    )
    assert (mirrored.estimate, mirrored.low, mirrored.high) == pytest.approx((-found.estimate, -found.high, -found.low))
    assert found.estimate < 1.2  # it went on where a larger difference would have stopped
    for wrong in (([], 1.0), (spent, 0.0)):
        with pytest.raises(ValueError, match="a look and a positive spread"):
            stopped_interval(0.1, wrong[1], wrong[0], 6)


def test_the_estimate_is_nearly_median_unbiased_and_more_cautious_than_the_mean():
    """Half a spread apart, with the real rule."""
    random = np.random.default_rng(0)
    means, estimates, inside = [], [], 0
    for _ in range(250):
        d = random.normal(0.5, 1.0, 8)
        looks = sequential_looks(d, 8)
        seen = d[: looks[-1].pairs]
        found = stopped_interval(seen.mean(), seen.std(ddof=1), [round(x.spent, 3) for x in looks], len(seen) - 1)
        means.append(seen.mean())
        estimates.append(found.estimate)
        inside += found.low <= 0.5 <= found.high
    above = [float((np.array(each) > 0.5).mean()) for each in (means, estimates)]
    assert 0.42 < above[1] <= above[0] < 0.62
    assert np.mean(estimates) < np.mean(means)
    assert inside / 250 > 0.92
