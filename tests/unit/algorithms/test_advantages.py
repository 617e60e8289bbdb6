import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms import GROUP_ADVANTAGES
from retrain.algorithms.credit.group_advantage import whiten

REWARDS = st.lists(st.floats(0.0, 1.0, width=32), min_size=2, max_size=12)


def expected_weight(mode: str, size: int, p: float) -> float:
    """E[(1/N) Σ A_i S_i] over all 2^N reward vectors, S_i = d log P(r_i)/dp: the weight on ∇p."""
    vectors = torch.tensor(list(itertools.product((0.0, 1.0), repeat=size)), dtype=torch.float64)
    right = vectors.sum(1)
    probability = p**right * (1.0 - p) ** (size - right)
    score = vectors / p - (1.0 - vectors) / (1.0 - p)
    return float((probability * (GROUP_ADVANTAGES[mode](vectors) * score).mean(1)).sum())


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_expected_gradient_by_enumeration(size, p):
    truncated_likelihood = (1.0 - (1.0 - p) ** (size - 1)) / p
    assert expected_weight("rloo", size, p) == pytest.approx(1.0, abs=1e-12)
    assert expected_weight("maxrl", size, p) == pytest.approx(truncated_likelihood, rel=1e-12)
    assert expected_weight("dr_grpo", size, p) == pytest.approx((size - 1) / size, rel=1e-12)


@pytest.mark.parametrize(("size", "of_maxrl", "of_grpo"), [(4, 2.85, 1.71), (8, 6.03, 2.47), (16, 10.7, 3.27)])
def test_published_weights_at_five_percent_success(size, of_maxrl, of_grpo):
    assert expected_weight("maxrl", size, 0.05) == pytest.approx(of_maxrl, rel=5e-3)
    assert expected_weight("grpo", size, 0.05) == pytest.approx(of_grpo, rel=5e-3)


def test_worked_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    assert GROUP_ADVANTAGES["dr_grpo"](rewards).tolist() == pytest.approx([0.6, -0.4, -0.4, 0.6, -0.4])
    assert GROUP_ADVANTAGES["rloo"](rewards).tolist() == pytest.approx([0.75, -0.5, -0.5, 0.75, -0.5])
    assert GROUP_ADVANTAGES["maxrl"](rewards).tolist() == pytest.approx([1.5, -1.0, -1.0, 1.5, -1.0])
    std = math.sqrt(0.24) + 1e-6
    assert GROUP_ADVANTAGES["grpo"](rewards).tolist() == pytest.approx([v / std for v in (0.6, -0.4, -0.4, 0.6, -0.4)])


@pytest.mark.parametrize("mode", list(GROUP_ADVANTAGES))
def test_equal_rewards_give_exact_zero(mode):
    noisy = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 * 3])
    for rewards in (torch.zeros(4), torch.ones(4), torch.full((4,), 0.1), noisy):
        assert GROUP_ADVANTAGES[mode](rewards).tolist() == [0.0] * 4


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo"])
def test_noise_is_relative_to_large_rewards_and_absolute_below_one(mode):
    for scale in (1e12, 1.0, 1e-6):
        size = max(scale, 1.0)
        noisy, different = (torch.tensor([scale, scale + gap * size], dtype=torch.float64) for gap in (5e-9, 5e-8))
        assert GROUP_ADVANTAGES[mode](noisy).tolist() == [0.0, 0.0]
        assert (GROUP_ADVANTAGES[mode](different) != 0).all()


@pytest.mark.parametrize("mode", list(GROUP_ADVANTAGES))
def test_small_groups_and_several_at_once(mode):
    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(GROUP_ADVANTAGES[mode](rewards), torch.stack([GROUP_ADVANTAGES[mode](row) for row in rewards]))
    assert GROUP_ADVANTAGES[mode](torch.zeros(0)).shape == (0,)
    if mode != "rloo":
        assert GROUP_ADVANTAGES[mode](torch.tensor([0.7])).tolist() == [0.0]


def test_rewards_that_are_not_finite_are_named():
    with pytest.raises(ValueError, match=r"finite.*index \[1\]"):
        GROUP_ADVANTAGES["grpo"](torch.tensor([0.0, math.nan]))


@given(REWARDS, st.sampled_from([1.0, 1e30]))
def test_advantages_sum_to_zero_and_keep_the_order(rewards, scale):
    rewards = torch.tensor(rewards, dtype=torch.float64, requires_grad=True) * scale
    for mode in GROUP_ADVANTAGES:
        if scale > 1.0 and mode in ("maxrl", "reinforce_pp"):
            continue
        advantages = GROUP_ADVANTAGES[mode](rewards)
        assert torch.isfinite(advantages).all()
        assert not advantages.requires_grad
        assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-6 * max(1.0, float(advantages.abs().max())))
        assert (advantages[rewards.argsort()].diff() >= 0).all()


@given(st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 9)), min_size=1, max_size=8))
def test_whitening_is_the_masked_token_moments(rows):
    advantages = torch.tensor([a for a, _ in rows], dtype=torch.float64)
    counts = torch.tensor([c for _, c in rows])
    tokens = advantages.repeat_interleave(counts)
    white = whiten(advantages, counts)
    if len(tokens) == 0 or float(tokens.std(correction=0)) < 1e-8:
        assert white.tolist() == [0.0] * len(rows)
        return
    expected = (advantages - tokens.mean()) / tokens.std(correction=0)
    assert torch.allclose(white, expected, atol=1e-9)
    assert float(white.repeat_interleave(counts).square().mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(("mode", "rewards", "message"), [
    ("rloo", [0.5], "rloo compares with the other completions of the group: it needs group_size >= 2, got 1"),
    ("maxrl", [0.0, 1.5, -2.0], "maxrl is defined for rewards in [0, 1]: got 1.5"),
    ("maxrl", [0.0, -2.0], "maxrl is defined for rewards in [0, 1]: got -2"),
])  # fmt: skip
def test_rewards_for_which_a_mode_is_not_defined(mode, rewards, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GROUP_ADVANTAGES[mode](torch.tensor(rewards))


def test_whitening_needs_a_length_for_each_advantage():
    with pytest.raises(ValueError, match=re.escape("one token count per advantage: got (3,) for (2,)")):
        whiten(torch.ones(2), torch.ones(3))
