import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.errors import UsageError
from retrain.maths.squeeze import analyse, energy, rank_pattern, recommend, truncate


def factors(seed: int, rank: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float64):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, inputs, generator=draw, dtype=torch.float64).to(dtype)
    return a, torch.randn(outputs, rank, generator=draw, dtype=torch.float64).to(dtype)


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.floats(-3, 3))
def test_spectrum_is_that_of_the_product(seed, rank, inputs, outputs, scale):
    a, b = factors(seed, rank, inputs, outputs)
    full = torch.linalg.svdvals(scale * b @ a)
    got = analyse(a, b, scale)
    assert len(got) == min(rank, inputs, outputs)
    assert torch.allclose(got, full[: len(got)], atol=1e-10)
    assert (full[len(got) :] < 1e-10).all()


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.data())
def test_truncation_is_the_best_approximation(seed, rank, inputs, outputs, data):
    a, b = factors(seed, rank, inputs, outputs)
    target = data.draw(st.integers(1, rank))
    new_scale = data.draw(st.sampled_from([None, 0.5, -2.0]))
    a_k, b_k = truncate(a, b, 1.5, target, new_scale)
    assert a_k.shape == (target, inputs)
    assert b_k.shape == (outputs, target)
    u, s, v = torch.linalg.svd(1.5 * b @ a, full_matrices=False)
    best = u[:, :target] * s[:target] @ v[:target]
    got = (new_scale or 1.5) * b_k @ a_k
    lost = s[target:].square().sum().sqrt()
    assert float((1.5 * b @ a - got).norm()) == pytest.approx(float(lost), abs=1e-9)
    if len(s) <= target or s[target - 1] - s[target] > 1e-3:
        assert torch.allclose(got, best, atol=1e-8)


def test_energy_and_table_by_hand():
    spectra = {"a": torch.tensor([2.0, 1.0, 1.0]), "b": torch.tensor([3.0, 0.0, 0.0])}
    assert energy(spectra["a"]).tolist() == pytest.approx([4 / 6, 5 / 6, 1.0])
    rows = recommend(spectra, 1.0, 1.0).rows
    assert [row.rank for row in rows] == [1, 2, 3]
    assert rows[0].mean_energy == pytest.approx(5 / 6)
    assert (rows[0].min_energy, rows[0].max_energy) == (pytest.approx(4 / 6), 1.0)
    assert rows[0].weight_error == pytest.approx(math.sqrt(1 / 6))
    assert rows[2].weight_error == 0.0
    small = {"small": torch.tensor([1.0]), "large": torch.tensor([1.0, 1.0])}  # keeps all of its energy
    shorter = recommend(small, 1.0, 1.0).rows
    assert (shorter[0].mean_energy, shorter[1].min_energy) == (pytest.approx(0.75), 1.0)


def test_recommendation_by_mean_and_by_worst_module():
    spectra = {"sharp": torch.tensor([1.0, 0.0, 0.0, 0.0]), "flat": torch.tensor([1.0, 1.0, 1.0, 1.0])}
    by_mean = recommend(spectra, 0.75, 0.0)
    assert (by_mean.recommended, by_mean.worst_module, by_mean.source_rank) == (2, "flat", 4)
    by_layer = recommend(spectra, 0.75, 0.7)
    assert by_layer.recommended == 3
    assert "every module" in by_layer.reason
    assert recommend(spectra, 1.0, 0.0).recommended == 4
    dead = recommend({"live": torch.tensor([1.0, 1.0]), "dead": torch.zeros(2)}, 0.5, 0.0)
    assert (dead.recommended, dead.untrained, dead.rank_pattern) == (1, ("dead",), {"live": 1, "dead": 1})
    assert dead.rows[0].mean_energy == pytest.approx(0.5)  # untrained modules count in no average
    untrained = recommend({"a": analyse(torch.randn(4, 8), torch.zeros(6, 4), 1.0)}, 0.95, 0.5)
    assert (untrained.recommended, untrained.untrained, "untrained" in untrained.reason) == (None, ("a",), True)
    none = recommend(spectra, 0.9, 0.0, [1, 2])
    assert (none.recommended, none.rank_pattern) == (None, {})
    assert "no candidate rank up to 2" in none.reason
    with pytest.raises(UsageError, match="target rank 5 is outside 1 … 4"):
        recommend(spectra, 0.95, 0.9, [5])


@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 5))
def test_rank_pattern_keeps_the_energy_of_the_uniform_rank(values, uniform):
    spectra = {str(i): torch.tensor(sorted(v, reverse=True), dtype=torch.float64) for i, v in enumerate(values)}
    pattern = rank_pattern(spectra, uniform)
    kept = sum(float(s[: pattern[name]].square().sum()) for name, s in spectra.items())
    target = sum(float(s[:uniform].square().sum()) for s in spectra.values())
    assert kept >= target * (1 - 1e-6)
    assert all(1 <= pattern[name] <= len(s) for name, s in spectra.items())
    assert sum(pattern.values()) <= sum(min(uniform, len(s)) for s in spectra.values())
