"""The critic's arithmetic: GAE by its definition, worked numbers, gradients by hand, invariances, values learned."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.maths.critic import explained_variance, gae, length_lambda, token_rewards, value_loss, whiten_tokens
from retrain.maths.losses import LossBounds, kl_terms, loss_metrics, policy_loss, token_weights

F64 = torch.float64
NAN = math.nan
SHARES = [0.0, 0.3, 0.95, 1.0]


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


def mixed_horizons(rewards, values, gamma, lam):
    """The other definition: (1 − λ) Σ_n λ^{n−1} times the n-step advantage, and the whole return with what is left."""
    length = len(rewards)
    after = [*values, 0.0]
    advantages = []
    for t in range(length):
        steps = range(1, length - t + 1)
        horizon = [
            sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * after[t + n] - values[t] for n in steps
        ]
        weights = [(1 - lam) * lam ** (n - 1) for n in steps]
        weights[-1] = lam ** (length - t - 1)
        advantages.append(sum(w * a for w, a in zip(weights, horizon, strict=True)))
    return advantages


# Generalised advantage estimation


@pytest.mark.parametrize("definition", [double_sum, mixed_horizons])
@pytest.mark.parametrize("gamma", SHARES)
@pytest.mark.parametrize("lam", SHARES)
def test_gae_is_its_definition(gamma, lam, definition):
    draw = torch.Generator().manual_seed(7)
    rewards, values = torch.randn(2, 20, 3, generator=draw, dtype=F64)
    found = gae(rewards, values, ones(20, 3), gamma, lam)
    wanted = rows(
        *(definition(r, v, gamma, lam) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)),
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_every_episode_of_three_tokens_enumerated(gamma, lam):
    """With the true values, the mean advantage of a token is Q − V of that token for every λ, and 0 over the tokens."""
    chance = {prefix: 0.2 + 0.6 * ((sum(prefix) + len(prefix)) % 3) / 2 for prefix in _prefixes()}
    paths = list(itertools.product((0, 1), repeat=3))
    reward = {path: math.sin(1.0 + path[0] + 3 * path[1] + 5 * path[2]) for path in paths}

    def value(prefix):
        if len(prefix) == 3:
            return 0.0
        return sum(_share(chance, prefix, token) * action_value(prefix, token) for token in (0, 1))

    def action_value(prefix, token):
        longer = (*prefix, token)
        return (reward[longer] if len(longer) == 3 else -0.1 * token) + gamma * value(longer)

    rewards = rows(*([-0.1 * path[0], -0.1 * path[1], reward[path]] for path in paths))
    values = rows(*([value(path[:t]) for t in range(3)] for path in paths))
    advantages = gae(rewards, values, ones(8, 3), gamma, lam).tolist()
    likely = [math.prod(_share(chance, path[:t], path[t]) for t in range(3)) for path in paths]
    assert sum(likely) == pytest.approx(1)
    for prefix in _prefixes():
        for token in (0, 1):
            longer, t = (*prefix, token), len(prefix)
            those = [number for number, path in enumerate(paths) if path[: t + 1] == longer]
            mean = sum(likely[n] * advantages[n][t] for n in those) / sum(likely[n] for n in those)
            assert mean == pytest.approx(action_value(prefix, token) - value(prefix), abs=1e-13)
        those = [number for number, path in enumerate(paths) if path[: len(prefix)] == prefix]
        assert sum(likely[n] * advantages[n][len(prefix)] for n in those) == pytest.approx(0, abs=1e-13)


def _prefixes():
    return [prefix for length in range(3) for prefix in itertools.product((0, 1), repeat=length)]


def _share(chance, prefix, token):
    return chance[prefix] if token == 1 else 1 - chance[prefix]


@pytest.mark.parametrize("kept", list(itertools.product((False, True), repeat=4)))
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_what_is_read_in_between_is_no_time(kept, gamma):
    """Whatever stands there: NaN changes nothing, and gets no advantage."""
    mask = torch.tensor([kept])
    rewards, values = torch.full((2, 1, 4), NAN, dtype=F64)
    rewards[mask], values[mask] = rows(0.3, -0.2, 1.0, 0.5)[: sum(kept)], rows(0.1, 0.7, -0.4, 0.2)[: sum(kept)]
    found = gae(rewards, values, mask, gamma, 0.8)
    alone = double_sum(rewards[mask].tolist(), values[mask].tolist(), gamma, 0.8)
    assert found[mask].tolist() == pytest.approx(alone, abs=1e-14)
    assert found[~mask].tolist() == [0.0] * (4 - sum(kept))


def test_rows_do_not_know_of_each_other():
    draw = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 6, 9, generator=draw, dtype=F64)
    mask = torch.rand(6, 9, generator=draw) < 0.6
    mask[2] = False
    together = gae(rewards, values, mask, 0.9, 0.7)
    assert together[2].abs().sum() == 0 < together[3].abs().sum()
    for row in range(6):
        one = slice(row, row + 1)
        torch.testing.assert_close(gae(rewards[one], values[one], mask[one], 0.9, 0.7), together[one], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_no_rows_and_no_tokens(shape):
    nothing, mask = torch.zeros(shape, dtype=F64), torch.zeros(shape, dtype=torch.bool)
    assert gae(nothing, nothing, mask, 1.0, 0.95).shape == shape
    assert token_rewards(torch.ones(shape[0], dtype=F64), nothing, mask, 0.1).shape == shape
    assert whiten_tokens(nothing, mask).shape == shape
    assert value_loss(nothing, nothing, nothing, mask, 0.2)[0].shape == shape
    assert explained_variance(nothing, nothing, mask) is None


def test_without_a_discount_the_target_is_what_was_returned():
    draw = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 4, 7, generator=draw, dtype=F64)
    target = gae(rewards, values, ones(4, 7), 1.0, 1.0) + values
    for t in range(7):
        torch.testing.assert_close(target[:, t], rewards[:, t:].sum(1), rtol=0, atol=1e-13)


numbers = st.floats(-5, 5, width=32)
episodes = st.integers(1, 6).flatmap(lambda n: st.lists(st.tuples(numbers, numbers), min_size=n, max_size=n))


@given(episodes, numbers, st.sampled_from(SHARES), st.sampled_from(SHARES))
def test_raising_every_value_lowers_the_advantages_by_what_the_end_does_not_share(episode, c, gamma, lam):
    """δ loses (1 − γ)c, the last one c, since the value after the end stays 0: at γ = 1, A_t loses λ^(T−t)·c."""
    rewards, values = torch.tensor(episode, dtype=F64).T.unsqueeze(1)
    mask, length = ones(*values.shape), len(episode)
    lost = gae(rewards, values, mask, gamma, lam) - gae(rewards, values + c, mask, gamma, lam)
    lose = [(1 - gamma) * c] * (length - 1) + [c]
    wanted = [sum((gamma * lam) ** k * lose[t + k] for k in range(length - t)) for t in range(length)]
    assert lost[0].tolist() == pytest.approx(wanted, abs=1e-12)
    if gamma == 1.0:
        assert lost[0].tolist() == pytest.approx([c * lam ** (length - 1 - t) for t in range(length)], abs=1e-12)


@given(episodes, numbers, st.sampled_from(SHARES), st.sampled_from(SHARES))
def test_gae_is_linear(episode, c, gamma, lam):
    rewards, values = torch.tensor(episode, dtype=F64).T.unsqueeze(1)
    mask = ones(*values.shape)
    whole = gae(c * rewards, c * values, mask, gamma, lam)
    parts = gae(rewards, 0 * values, mask, gamma, lam) + gae(0 * rewards, values, mask, gamma, lam)
    torch.testing.assert_close(whole, c * parts, rtol=0, atol=1e-11)


def test_gae_keeps_the_dtype_and_no_gradient():
    for dtype in (torch.bfloat16, torch.float32, F64):
        values = torch.tensor([[0.5, 0.25]], dtype=dtype, requires_grad=True)
        found = gae(torch.tensor([[0.0, 1.0]], requires_grad=True), values, ones(1, 2), 1.0, 1.0)
        assert (found.dtype, found.requires_grad, found.tolist()) == (dtype, False, [[0.5, 0.75]])


def test_a_long_episode_loses_no_precision():
    length = 4096
    rewards, values = torch.zeros(2, 1, length, dtype=torch.float32)
    rewards[0, -1] = 1.0
    found = gae(rewards, values, ones(1, length), 1.0, 0.999)
    wanted = torch.tensor(0.999, dtype=F64) ** torch.arange(length - 1, -1, -1)
    torch.testing.assert_close(found[0], wanted.float(), rtol=2e-7, atol=0)


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (-0.1, 0.9), (0.9, 1.01), (0.9, -1.0), (NAN, 1.0), (1.0, NAN)])
def test_impossible_discounts_are_refused(gamma, lam):
    with pytest.raises(ValueError, match="must be in"):
        gae(torch.zeros(1, 2), torch.zeros(1, 2), ones(1, 2), gamma, lam)


# Worked numbers (VAPO, arXiv 2504.05118, and PPO as in TRL)


@pytest.mark.parametrize(("lam", "wanted"), [(1.0, (0.8, 0.5, 0.6)), (0.5, (0.4, 0.2, 0.6)), (0.0, (0.3, -0.1, 0.6))])
def test_three_tokens_by_hand(lam, wanted):
    rewards, values = rows([0, 0, 1]), rows([0.2, 0.5, 0.4])
    assert gae(rewards, values, ones(1, 3), 1.0, lam)[0].tolist() == pytest.approx(wanted)
    if lam == 1.0:
        assert (gae(rewards, values, ones(1, 3), 1.0, lam) + values)[0].tolist() == pytest.approx([1, 1, 1])


OLD = rows([-1, -0.5, -0.2], [-0.7, -0.3, NAN])
REFERENCE = rows([-1.2, -0.4, -0.2], [-0.6, -0.5, NAN])
NEW = rows([-0.7, -0.5, -0.5], [-0.7, -0.1, NAN])
VALUES = rows([0.1, 0.2, 0.3], [0, 0.1, 0.5])
SCORES = rows(1, -1)
POLICY = torch.tensor([[True, True, True], [True, True, False]])
ROOM = ones(2, 3)
"""With the place after the second row's last token, where TRL puts its score."""
REWARDS = [[-0.01, 0.005, 1.0], [0.005, -0.01, -1.0]]
ADVANTAGES = [[0.8215, 0.77, 0.7], [-0.87825, -1.035, -1.5]]
WHITENED = [[0.789304, 0.734803, 0.660725], [-1.009475, -1.175358, 0.0]]


def token_mean(values, mask):
    """Σ values·weights with the weights of the `tokens` denominator."""
    weights = token_weights(
        "tokens", mask, total_tokens=int(mask.sum()), total_sequences=len(mask), max_tokens=mask.shape[1]
    )
    return float((torch.where(mask, values, 0.0) * weights).sum())


def test_every_row_may_have_a_lambda_of_its_own():
    """VAPO's λ by hand (algorithms2 §9), and each row as if it were alone."""
    lengths = torch.tensor([1.0, 20.0, 100.0, 1000.0], dtype=torch.float64)
    assert length_lambda(lengths, 0.05).tolist() == pytest.approx([0.0, 0.0, 0.8, 0.98])
    with pytest.raises(ValueError, match="above 0"):
        length_lambda(lengths, 0.0)
    rewards = torch.tensor([[0.0, 0.0, 1.0]] * 3, dtype=torch.float64)
    values = torch.tensor([[0.2, 0.5, 0.4]] * 3, dtype=torch.float64)
    shares = torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64)
    found = gae(rewards, values, ones(3, 3), 1.0, shares)
    for row, lam in zip(found, shares.tolist(), strict=True):
        assert row.tolist() == gae(rewards[:1], values[:1], ones(1, 3), 1.0, lam)[0].tolist()
    assert found[1].tolist() == pytest.approx([0.4, 0.2, 0.6])
    with pytest.raises(ValueError, match="must be in"):
        gae(rewards, values, ones(3, 3), 1.0, torch.tensor([0.5, 1.5, 0.5]))


def test_the_batch_of_two_rows_rewards_and_advantages():
    kl = kl_terms("k1", OLD, REFERENCE, POLICY)
    assert float(kl.sum(1).mean()) == pytest.approx(0.1)
    rewards = token_rewards(SCORES, kl, ROOM, 0.05)
    assert rewards.tolist() == [pytest.approx(row) for row in REWARDS]
    advantages = gae(rewards, VALUES, ROOM, 1.0, 0.95)
    assert advantages.tolist() == [pytest.approx(row) for row in ADVANTAGES]
    assert whiten_tokens(advantages, POLICY).tolist() == [pytest.approx(row, abs=5e-7) for row in WHITENED]


def test_the_batch_of_two_rows_with_the_score_on_the_last_token():
    """Without the place after the end: the second row is worth −.01 − 1 − .1 at its last token."""
    rewards = token_rewards(SCORES, kl_terms("k1", OLD, REFERENCE, POLICY), POLICY, 0.05)
    assert rewards.tolist() == [pytest.approx(REWARDS[0]), pytest.approx([0.005, -1.01, 0.0])]
    advantages = gae(rewards, VALUES, POLICY, 1.0, 0.95)
    second = [0.005 + 0.1 - 0 - 0.95 * 1.11, -1.11, 0.0]
    assert advantages.tolist() == [pytest.approx(ADVANTAGES[0]), pytest.approx(second)]


def test_the_batch_of_two_rows_its_loss_and_metrics():
    loss, sums = policy_loss("ppo", NEW, OLD, rows(*WHITENED), POLICY, LossBounds(clip_low=0.2))
    assert token_mean(loss, POLICY) == pytest.approx(0.054723, abs=5e-7)
    metrics = loss_metrics(sums)
    assert metrics["policy/clipfrac_avg"] == pytest.approx(0.2)
    assert metrics["policy/approxkl_avg"] == pytest.approx(0.022)
    assert metrics["val/ratio"] == pytest.approx(1.062416, abs=5e-7)
    assert float(torch.where(POLICY, -OLD, 0.0).sum(1).mean()) == pytest.approx(1.35)


# Rewards of tokens


def test_the_score_comes_with_the_last_token_of_the_mask():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [False, False, False, True], [True] * 4])
    kl = torch.where(mask, rows([1, 2, 3, 4]), NAN)
    rewards = token_rewards(rows(10, NAN, 30, 40), kl, mask, 0.5)
    assert rewards.tolist() == [[-0.5, 0, 8.5, 0], [0, 0, 0, 0], [0, 0, 0, 28], [-0.5, -1, -1.5, 38]]
    assert token_rewards(torch.ones(4), kl.float(), mask, 0.5).dtype == torch.float32


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4), st.floats(0, 2))
def test_a_sequence_gets_its_score_less_its_divergence(kept, coefficient):
    mask = torch.tensor(kept)
    kl, scores = torch.arange(mask.numel(), dtype=F64).reshape(mask.shape), torch.arange(1, len(kept) + 1, dtype=F64)
    rewards = token_rewards(scores, kl, mask, coefficient)
    wanted = scores * mask.any(1) - coefficient * (kl * mask).sum(1)
    torch.testing.assert_close(rewards.sum(1), wanted)
    assert bool((rewards[~mask] == 0).all())


# Whitening


def test_whitened_tokens_have_mean_0_and_unbiased_variance_1():
    draw = torch.Generator().manual_seed(2)
    values, mask = 3 + 5 * torch.randn(6, 11, generator=draw, dtype=F64), torch.rand(6, 11, generator=draw) < 0.7
    white = whiten_tokens(torch.where(mask, values, NAN), mask)
    assert float(white[mask].mean()) == pytest.approx(0, abs=1e-15)
    variance = float(values[mask].var(correction=1))
    assert float(white[mask].var(correction=1)) == pytest.approx(variance / (variance + 1e-8), rel=1e-13)
    assert bool((white[~mask] == 0).all())
    for scale in (2.0, -0.5):
        moved = whiten_tokens(scale * values + 7, mask)
        torch.testing.assert_close(moved, math.copysign(1, scale) * white, rtol=1e-7, atol=1e-7)


def test_the_bias_of_the_variance_and_the_epsilon_are_there():
    assert whiten_tokens(rows([1, 3]), ones(1, 2))[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    tiny = whiten_tokens(rows([0, 2e-4]), ones(1, 2))  # variance 2e-8
    assert tiny[0].tolist() == pytest.approx([-1e-4 / 3e-8**0.5, 1e-4 / 3e-8**0.5])


@pytest.mark.parametrize("mask", [[[False, False]], [[False, True]]])
def test_fewer_than_two_tokens_are_whitened_to_0(mask):
    assert whiten_tokens(rows([4, 5]), torch.tensor(mask)).tolist() == [[0, 0]]


def test_equal_tokens_are_whitened_to_0():
    assert whiten_tokens(rows([0.25, 0.25, 9.0]), torch.tensor([[True, True, False]])).tolist() == [[0, 0, 0]]


# The critic's loss

GRID = [-0.7, -0.25, -0.1, 0.0, 0.15, 0.3, 0.85]
CASES = [
    (old + moved, old, target)
    for old in (0.0, 0.4)
    for moved in (-0.5, -0.21, -0.19, 0.0, 0.05, 0.23, 0.61)
    for target in (value + 0.013 for value in GRID)
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
        assert not stuck or nearest != value
        kinds.add((nearest != value, stuck))
    assert kinds == {(False, False), (True, False), (True, True)}


def test_a_clip_of_0_clips_nothing():
    value, old, target = rows(*CASES).T.unsqueeze(1)
    loss, gradient, marks = slope(value, old, target, ones(1, len(CASES)), 0.0)
    torch.testing.assert_close(loss, 0.5 * (value - target) ** 2)
    torch.testing.assert_close(gradient, value - target)
    assert not marks.any()
    torch.testing.assert_close(slope(value, old, target, ones(1, len(CASES)), 100.0)[1], gradient)


def test_on_the_edge_of_the_range_the_gradient_is_whole():
    value, old, target = rows([0.5, -0.5, 0.0]), rows([0, 0, 0]), rows([1, 1, 1])
    assert slope(value, old, target, ones(1, 3), 0.5)[1].tolist() == [[-0.5, -1.5, -1.0]]


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_gradcheck_of_the_value_loss(clip):
    value, old, target = rows(*CASES).T.unsqueeze(1)
    mask = (torch.arange(len(CASES)) % 3 != 1).unsqueeze(0)
    value = value.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, mask, clip)[0], value)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_padding_of_the_value_loss_may_hold_anything(clip):
    mask = torch.tensor([[True, False, False, True]])
    value, old, target = rows([[1, NAN, 3, 4]], [[0, NAN, math.inf, 0]], [[2, NAN, NAN, 2]])
    loss, gradient, marks = slope(value, old, target, mask, clip)
    assert loss[0, 1:3].tolist() == gradient[0, 1:3].tolist() == [0, 0]
    assert loss[0, [0, 3]].tolist() == pytest.approx([0.5, 2.0] if clip == 0.0 else [0.5 * 1.8**2, 2.0])
    assert gradient[0, [0, 3]].tolist() == pytest.approx([-1.0, 2.0] if clip == 0.0 else [0.0, 2.0])
    assert marks.tolist() == [[clip > 0.0, False, False, False]]


def test_only_the_new_values_learn():
    value, old, target = (torch.tensor([[x]], requires_grad=True) for x in (0.9, 1.0, 0.2))
    value_loss(value, old, target, ones(1, 1), 0.2)[0].sum().backward()
    assert value.grad.item() == pytest.approx(0.7)
    assert old.grad is None
    assert target.grad is None


# Explained variance


def test_explained_variance():
    targets, mask = rows([1, 2, 4], [5, NAN, NAN]), torch.tensor([[True, True, True], [True, False, False]])
    assert explained_variance(targets, targets, mask) == 1.0
    assert explained_variance(targets + 3, targets, mask) == pytest.approx(1.0)  # a constant error is no variance
    assert explained_variance(torch.full((2, 3), 3.0, dtype=F64), targets, mask) == pytest.approx(0.0)
    assert explained_variance(-targets, targets, mask) == pytest.approx(-3.0)
    assert explained_variance(0.5 * targets, targets, mask) == pytest.approx(0.75)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.3, -4.0, 2.0]])
def test_there_is_nothing_to_explain_in_one_target(values):
    assert explained_variance(rows(values), rows([0.7, 0.7, 0.7]), ones(1, 3)) is None
    assert explained_variance(rows(values), rows([0.7, 0.1, 0.9]), torch.tensor([[False, True, False]])) is None
    assert explained_variance(rows(values), rows([0.7, 0.1, 0.9]), torch.zeros(1, 3, dtype=torch.bool)) is None


def test_the_rounding_of_targets_that_are_all_the_same_is_not_explained():
    """Every episode is worth 1, and its targets are A + V in float32: not quite 1 each."""
    draw = torch.Generator().manual_seed(1)
    values, rewards = 3 * torch.randn(50, 40, generator=draw), torch.zeros(50, 40)
    rewards[:, -1] = 1.0
    targets = gae(rewards, values, ones(50, 40), 1.0, 1.0) + values
    assert 0 < float((targets - 1).abs().max()) < 1e-5
    assert explained_variance(values, targets, ones(50, 40)) is None
    rewards[0, -1] = 1.01
    targets = gae(rewards, values, ones(50, 40), 1.0, 1.0) + values
    assert explained_variance(values, targets, ones(50, 40)) == pytest.approx(1 - 9 / (0.01**2 * 0.02 * 0.98), rel=0.1)


# A critic that learns

CHAIN = torch.tensor([[0.1, 0.5, 0.1], [0.2, 0.1, 0.4], [0.3, 0.2, 0.1]], dtype=F64)
"""From a state to the next; with what is missing to 1 the episode ends there."""
COST = torch.tensor([-0.3, 0.1, 0.2], dtype=F64)
LUCK = torch.tensor([0.9, 0.0, 0.5], dtype=F64)
"""Chance of a score of 1 for the episode that ends in a state."""
ROOM_FOR = 48
"""An episode of more tokens has probability < 1e-6."""
TOLERANCE = 0.02


def solved(gamma):
    return torch.linalg.solve(torch.eye(3, dtype=F64) - gamma * CHAIN, COST + (1 - CHAIN.sum(1)) * LUCK)


def episodes_of_the_chain(draw, count):
    """States, rewards and mask [count, T]; between the tokens something is read now and then."""
    states = torch.zeros(count, ROOM_FOR, dtype=torch.long)
    rewards, mask = torch.zeros(count, ROOM_FOR, dtype=F64), torch.zeros(count, ROOM_FOR, dtype=torch.bool)
    state, alive = torch.randint(3, (count,), generator=draw), ones(count)
    upto = torch.cat([CHAIN, 1 - CHAIN.sum(1, keepdim=True)], 1).cumsum(1)
    for t in range(ROOM_FOR):
        states[:, t] = state
        acts = alive & (torch.rand(count, generator=draw) < 0.8)
        following = (torch.rand(count, 1, generator=draw, dtype=F64) > upto[state]).sum(1).clamp(max=3)
        score = (torch.rand(count, generator=draw, dtype=F64) < LUCK[state]) & (following == 3)
        mask[:, t], rewards[:, t] = acts, torch.where(acts, COST[state] + score, NAN)
        alive = alive & ~(acts & (following == 3))
        state = torch.where(acts & (following < 3), following, state)
    return states, rewards, mask, alive


def learned(gamma, lam, updates, clip, batches=150):
    """A table of values after gradient descent on its own targets; how often the clipped loss was the larger."""
    draw = torch.Generator().manual_seed(11)
    table = torch.full((3,), 3.0, dtype=F64, requires_grad=True)
    marked = 0
    for batch in range(batches):
        states, rewards, mask, unfinished = episodes_of_the_chain(draw, 256)
        assert int(unfinished.sum()) <= 1
        old = table.detach()[states]
        target = gae(rewards, old, mask, gamma, lam) + old
        for _ in range(updates):
            loss, marks = value_loss(table[states], old, target, mask, clip)
            (loss.sum() / mask.sum()).backward()
            marked += int(marks.sum())
            with torch.no_grad():
                table -= table.grad / (1 + 0.1 * batch) / updates**0.5
            table.grad = None
    return table.detach(), marked


@pytest.mark.parametrize(("updates", "clip"), [(1, 0.2), (4, 0.05), (3, 0.0)])
@pytest.mark.parametrize("lam", [0.95, 1.0])
@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_a_table_of_values_learns_the_values(gamma, lam, updates, clip):
    table, marked = learned(gamma, lam, updates, clip)
    torch.testing.assert_close(table, solved(gamma), rtol=0, atol=TOLERANCE)
    assert (marked > 0) == (updates > 1 and clip > 0.0)  # before the first update nothing has moved


def test_the_values_to_learn_are_told_apart():
    assert float((solved(0.9) - solved(1.0)).abs().min()) > 2 * TOLERANCE
    values = solved(1.0)
    gaps = torch.stack([values[0] - values[1], values[1] - values[2], values[0] - values[2]]).abs()
    assert float(gaps.min()) > 2 * TOLERANCE
