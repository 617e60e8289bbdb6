"""Statistics of gradients against the vectors themselves, and their intervals against what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.maths import gradients


def stream(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gram_of(vectors_CBD: np.ndarray) -> np.ndarray:
    return np.einsum("aid,bjd->aibj", vectors_CBD, vectors_CBD)


def test_cosines_and_ratios_are_those_of_the_vectors():
    vectors = stream().normal(size=(2, 6, 9))
    gram = gram_of(vectors)
    explicit = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*vectors, strict=True)]
    found = gradients.cosine_interval(gram, 0, 1, stream())
    assert found is not None
    assert found.estimate == pytest.approx(np.mean(explicit))
    lengths = [gradients.lengths(gram, each) for each in range(2)]
    np.testing.assert_allclose(lengths, np.linalg.norm(vectors, axis=2))
    ratio = gradients.ratio_interval(lengths[0], lengths[1], stream())
    assert ratio is not None
    assert ratio.estimate == pytest.approx(np.exp(np.log(lengths[0] / lengths[1]).mean()))


def test_proportional_gradients_have_cosine_one_and_their_factor():
    base = stream().normal(size=(5, 7))
    gram = gram_of(np.stack([base, 8 / 7 * base]))
    cosine = gradients.cosine_interval(gram, 0, 1, stream())
    ratio = gradients.ratio_interval(gradients.lengths(gram, 1), gradients.lengths(gram, 0), stream())
    expected = gradients.expected_cosine(gram, 0, 1, stream())
    assert cosine is not None
    assert ratio is not None
    assert (cosine.estimate, cosine.low, cosine.high) == pytest.approx((1, 1, 1))
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((8 / 7, 8 / 7, 8 / 7))
    assert expected is None or expected.estimate == pytest.approx(1)


def test_batches_without_a_gradient_take_no_part():
    base = stream().normal(size=(4, 3))
    base[1] = 0
    gram = gram_of(np.stack([base, 2 * base]))
    assert np.isnan(gradients.same_batch_cosines(gram, 0, 1)[1])
    cosine = gradients.cosine_interval(gram, 0, 1, stream())
    assert cosine is not None
    assert cosine.estimate == pytest.approx(1)
    nothing = gram_of(np.zeros((2, 4, 3)))
    assert gradients.cosine_interval(nothing, 0, 1, stream()) is None
    assert gradients.noise_floor(nothing[0, :, 0], stream()) is None
    assert gradients.signal_to_noise(nothing[0, :, 0], stream()) is None
    assert gradients.ratio_interval(np.zeros(3), np.ones(3), stream()) is None


def test_products_between_batches_are_unbiased_for_the_square_of_the_mean():
    mean = np.array([1.0, -0.5, 0.25])
    draws = mean + stream().normal(0, 3, size=(20_000, 5, 3))
    grams = np.einsum("sid,sjd->sij", draws, draws)
    found = np.array([gradients.between_batches(gram)[0] for gram in grams])
    assert abs(found.mean() - mean @ mean) < 4 * found.std() / np.sqrt(len(found))
    assert np.mean([np.diag(gram).mean() for gram in grams]) > mean @ mean + 20  # the naive estimate is far off


def test_signal_to_noise_is_the_squared_mean_over_the_variance():
    mean = np.full(40, 0.5)
    draws = mean + stream().normal(0, 1, size=(400, 40))
    found = gradients.signal_to_noise(draws @ draws.T, stream())
    assert found is not None
    assert found.estimate == pytest.approx(0.25, rel=0.1)  # 40·0.25 over 40·1


def test_the_noise_floor_is_the_cosine_of_two_batches():
    draws = stream().normal(size=(5, 8)) + 1
    unit = draws / np.linalg.norm(draws, axis=1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(5) for j in range(5) if i != j]
    found = gradients.noise_floor(draws @ draws.T, stream())
    assert found is not None
    assert found.estimate == pytest.approx(np.mean(pairs))
    halves = gradients.halves_cosine(draws @ draws.T, stream())
    assert halves is not None
    assert halves > found.estimate  # larger batches, less noise


def test_the_steady_length_is_that_of_an_exponential_average():
    mean, beta1 = np.full(30, 0.3), 0.9
    draws = mean + stream().normal(size=(2500, 30))
    average, squares = np.zeros(30), []
    for step, draw in enumerate(draws):
        average = beta1 * average + (1 - beta1) * draw
        if step > 200:
            squares.append(average @ average)
    found = gradients.steady_length(draws @ draws.T, beta1)[0]
    assert found == pytest.approx(np.sqrt(np.mean(squares)), rel=0.05)


def test_clipping_shortens_what_is_longer():
    lengths = np.array([0.5, 2.0])
    np.testing.assert_array_equal(gradients.clipped_lengths(lengths, 1.0), [0.5, 1.0])
    np.testing.assert_array_equal(gradients.clipped_lengths(lengths, 0.0), lengths)


@pytest.mark.parametrize("batches", [16])
def test_bootstrap_intervals_contain_the_truth_as_often_as_they_promise(batches):
    """300 probes of two conditions that share most of their noise, 95 % intervals of each statistic."""
    width, campaigns, noise = 30, 300, stream(batches)
    mean = noise.normal(size=(2, width)) * 0.4 + 0.3
    wanted = noise.normal(size=width)
    mixed = np.array([[1.0, 0.0], [0.8, 0.4]])

    def draw(count: int) -> np.ndarray:
        return mean[:, None] + np.einsum("ab,bid->aid", mixed, noise.normal(size=(2, count, width)))

    many = draw(100_000)
    norms = np.linalg.norm(many, axis=2)
    truth = {
        "cosine": float((np.einsum("id,id->i", *many) / norms[0] / norms[1]).mean()),
        "ratio": float(np.exp(np.log(norms[1] / norms[0]).mean())),
        "expected": float(mean[0] @ mean[1] / np.linalg.norm(mean[0]) / np.linalg.norm(mean[1])),
        "noise": float(mean[0] @ mean[0] / width),
        "product": float(mean[0] @ wanted),
    }
    hits = dict.fromkeys(truth, 0)
    for campaign in range(campaigns):
        own = draw(batches)
        gram, at = gram_of(own), stream(campaign)
        parts = wanted + noise.normal(size=(batches, width))
        lengths = [gradients.lengths(gram, each) for each in range(2)]
        found = {
            "cosine": gradients.cosine_interval(gram, 0, 1, at),
            "ratio": gradients.ratio_interval(lengths[1], lengths[0], at),
            "expected": gradients.expected_cosine(gram, 0, 1, at),
            "noise": gradients.signal_to_noise(gram[0, :, 0], at),
            "product": gradients.mean_product(own[0] @ parts.T, at),
        }
        for name, interval in found.items():
            assert interval is not None
            assert interval.low is not None
            assert interval.high is not None
            hits[name] += interval.low <= truth[name] <= interval.high
    shares = {name: count / campaigns for name, count in hits.items()}
    # The first two are means of independent numbers; the others are ratios of pairs, whose intervals are wider.
    assert all(shares[name] > 0.90 for name in truth), shares


def test_a_difference_that_is_paired_is_known_better():
    noise = stream(3)
    shared = noise.normal(size=(12, 1)) + noise.normal(size=(1, 10))
    own, base = (shared + 0.05 * noise.normal(size=(12, 10)) + shift for shift in (0.2, 0.0))
    one = gradients.mean_difference(own, base, stream(), lambda weights: np.ones(len(weights)))
    assert one.estimate == pytest.approx(own.mean() - base.mean())
    assert one.low is not None
    assert one.low > 0.1
    absolute = gradients.mean_product(own, stream())
    assert absolute.low is not None
    assert absolute.low < 0 < one.low
