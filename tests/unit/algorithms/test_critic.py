import math

import pytest
import torch

from retrain.algorithms.credit.gae import explained_variance, gae, length_lambda, token_rewards, whiten_tokens
from retrain.policy.objective import value_loss

F64 = torch.float64
NAN = math.nan


def rows(*values):
    return torch.tensor(values, dtype=F64)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def double_sum(rewards, values, gamma, lam):
    """The definition, for one episode as lists: Σ_k (γλ)^k (r_{t+k} + γV_{t+k+1} − V_{t+k}), V = 0 after the end."""
    length = len(rewards)
    after = [*values, 0.0]
    return [
        sum((gamma * lam) ** k * (rewards[t + k] + gamma * after[t + k + 1] - values[t + k]) for k in range(length - t))
        for t in range(length)
    ]


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_gae_is_its_definition(gamma, lam):
    """Over the tokens of the mask of each row alone: what is read in between is NaN here and takes no time."""
    draw = torch.Generator().manual_seed(7)
    rewards, values = torch.randn(2, 20, 6, generator=draw, dtype=F64)
    mask = torch.rand(20, 6, generator=draw) < 0.7
    mask[0], mask[1] = True, False
    rewards[~mask] = values[~mask] = NAN
    found = gae(rewards, values, mask, gamma, lam)
    for row in range(20):
        own = mask[row]
        wanted = double_sum(rewards[row][own].tolist(), values[row][own].tolist(), gamma, lam)
        assert found[row][own].tolist() == pytest.approx(wanted, abs=1e-13)
    assert not found[~mask].any()


def test_a_long_episode_loses_no_precision():
    length = 1024
    rewards, values = torch.zeros(2, 1, length, dtype=torch.float32)
    rewards[0, -1] = 1.0
    found = gae(rewards, values, ones(1, length), 1.0, 0.999)
    wanted = torch.tensor(0.999, dtype=F64) ** torch.arange(length - 1, -1, -1)
    torch.testing.assert_close(found[0], wanted.float(), rtol=2e-7, atol=0)


def test_every_row_may_have_a_lambda_of_its_own():
    """VAPO's λ by hand (arXiv 2504.05118), for three tokens with rewards 0, 0, 1 and values .2, .5, .4."""
    lengths = torch.tensor([1.0, 20.0, 100.0, 1000.0], dtype=F64)
    assert length_lambda(lengths, 0.05).tolist() == pytest.approx([0.0, 0.0, 0.8, 0.98])
    rewards, values = rows(*[[0.0, 0.0, 1.0]] * 3), rows(*[[0.2, 0.5, 0.4]] * 3)
    found = gae(rewards, values, ones(3, 3), 1.0, rows(1.0, 0.5, 0.0)).tolist()
    assert found == [pytest.approx(row) for row in ([0.8, 0.5, 0.6], [0.4, 0.2, 0.6], [0.3, -0.1, 0.6])]


def test_the_score_comes_with_the_last_token_of_the_mask():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [False, False, False, True], [True] * 4])
    kl = torch.where(mask, rows([1, 2, 3, 4]), NAN)
    rewards = token_rewards(rows(10, NAN, 30, 40), kl, mask, 0.5)
    assert rewards.tolist() == [[-0.5, 0, 8.5, 0], [0, 0, 0, 0], [0, 0, 0, 28], [-0.5, -1, -1.5, 38]]
    assert token_rewards(torch.ones(4), kl.float(), mask, 0.5).dtype == torch.float32


def test_whitening_of_few_and_of_equal_tokens():
    tiny = whiten_tokens(rows([0, 2e-4]), ones(1, 2))  # variance 2e-8, beside which the epsilon counts
    assert tiny[0].tolist() == pytest.approx([-1e-4 / 3e-8**0.5, 1e-4 / 3e-8**0.5])
    for mask in ([False, False], [False, True]):
        assert whiten_tokens(rows([4, 5]), torch.tensor([mask])).tolist() == [[0, 0]]
    assert whiten_tokens(rows([0.25, 0.25, 9.0]), torch.tensor([[True, True, False]])).tolist() == [[0, 0, 0]]


CASES = [
    (old + moved, old, target + 0.013)
    for old in (0.0, 0.4)
    for moved in (-0.5, -0.21, -0.19, 0.0, 0.05, 0.23, 0.61)
    for target in (-0.7, -0.25, -0.1, 0.0, 0.15, 0.3, 0.85)
]
"""V, V_old and R, with V inside and outside V_old ± .2, and R on every side of both; no ties."""


def slope(values, old, targets, mask, clip):
    values = values.clone().requires_grad_()
    loss, clipped = value_loss(values, old, targets, mask, clip)
    loss.sum().backward()
    return loss.detach(), values.grad, clipped


def test_the_value_loss_and_its_gradient_by_hand():
    loss, gradient, marks = slope(*rows(*CASES).T.unsqueeze(1), ones(1, len(CASES)), 0.2)
    kinds = set()
    for number, (value, old, target) in enumerate(CASES):
        nearest = min(max(value, old - 0.2), old + 0.2)
        plain, clipped = (value - target) ** 2, (nearest - target) ** 2
        assert float(loss[0, number]) == pytest.approx(0.5 * max(plain, clipped), abs=1e-15)
        stuck = clipped > plain
        assert bool(marks[0, number]) == stuck
        assert float(gradient[0, number]) == pytest.approx(0.0 if stuck else value - target, abs=1e-15)
        kinds.add((nearest != value, stuck))
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_padding_of_the_value_loss_may_hold_anything(clip):
    mask = torch.tensor([[True, False, False, True]])
    value, old, target = rows([[1, NAN, 3, 4]], [[0, NAN, math.inf, 0]], [[2, NAN, NAN, 2]])
    loss, gradient, marks = slope(value, old, target, mask, clip)
    assert loss[0, 1:3].tolist() == gradient[0, 1:3].tolist() == [0, 0]
    assert loss[0, [0, 3]].tolist() == pytest.approx([0.5, 2.0] if clip == 0.0 else [0.5 * 1.8**2, 2.0])
    assert gradient[0, [0, 3]].tolist() == pytest.approx([-1.0, 2.0] if clip == 0.0 else [0.0, 2.0])
    assert marks.tolist() == [[clip > 0.0, False, False, False]]


def test_explained_variance():
    targets, mask = rows([1, 2, 4], [5, NAN, NAN]), torch.tensor([[True, True, True], [True, False, False]])
    for values, share in ((targets + 3, 1.0), (3.0 + 0.0 * targets, 0.0), (-targets, -3.0), (0.5 * targets, 0.75)):
        assert explained_variance(values, targets, mask) == pytest.approx(share)
    for kept in ([False, True, False], [False, False, False]):  # there is nothing to explain in one target
        assert explained_variance(rows([0.3, -4.0, 2.0]), rows([0.7, 0.1, 0.9]), torch.tensor([kept])) is None
