"""Token credit against plain per-token loops, and the identities that hold for every batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.errors import PluginError
from retrain.maths.credit import (
    TRANSFORMS,
    ModeInputs,
    entropy_mask,
    gtpo_paper,
    gtpo_weights,
    hicra,
    placebo_mask,
    sepa_pool,
    token_advantages,
    uncertainty,
)

SEEDS = st.integers(0, 2**31)


class Batch:
    """A ragged batch with garbage in its padding; row 1 is empty, row 2 has only planning tokens."""

    def __init__(self, seed: int = 0, rows: int = 6, columns: int = 9, dtype: torch.dtype = torch.float64):
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, columns + 1, (rows,), generator=draw)
        self.lengths[1] = 0
        self.mask = torch.arange(columns)[None] < self.lengths[:, None]
        self.logprobs = torch.where(self.mask, -4 * torch.rand(rows, columns, generator=draw, dtype=dtype), math.nan)
        self.entropy = torch.where(self.mask, 3 * torch.rand(rows, columns, generator=draw, dtype=dtype), math.nan)
        self.planning = torch.rand(rows, columns, generator=draw) < 0.3
        self.planning[2] = True
        self.advantages = torch.randn(rows, generator=draw, dtype=dtype)
        self.uniforms = torch.rand(rows, columns, generator=draw, dtype=dtype)
        self.correct = torch.tensor([True, False, False, True, True, True])[:rows]
        self.groups = torch.tensor([7, 7, 7, 7, 9, 9])[:rows]

    def credit(self, mode, **options):
        return token_advantages(mode, self.advantages, self.logprobs, self.entropy, self.planning, self.mask, **options)

    def inputs(self, **changes):
        values = {
            "placebo_BT": placebo_mask(self.uniforms, self.planning, self.mask),
            "rewards_B": self.correct.double(),
            "correct_B": self.correct,
            "group_B": self.groups,
        }
        return ModeInputs(**{**values, **changes})


def looped_gtpo(batch: Batch, beta: float, lam: float | None = None) -> list[list[float]]:
    rows = []
    for i, length in enumerate(batch.lengths.tolist()):
        h = [min(-float(batch.logprobs[i, t]), 50.0) for t in range(length)]
        execution = [t for t in range(length) if not batch.planning[i, t]]
        if lam is not None and execution:
            mean = sum(h[t] for t in execution) / len(execution)
            for t in execution:
                h[t] = lam * mean + (1 - lam) * h[t]
        mean = sum(h) / length if length else 0.0
        weights = [1.0 if mean < 1e-7 else max(0.0, 1 + beta * (value / mean - 1)) for value in h]
        rows.append([float(batch.advantages[i]) * w for w in weights] + [0.0] * (batch.mask.shape[1] - length))
    return rows


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0, 3.0])
def test_gtpo_matches_a_loop(beta):
    batch = Batch()
    expected = torch.tensor(looped_gtpo(batch, beta), dtype=torch.float64)
    assert torch.allclose(batch.credit("gtpo", beta=beta).advantages_BT, expected, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.4, 1.0])
def test_sepa_matches_a_loop(lam):
    batch = Batch()
    expected = torch.tensor(looped_gtpo(batch, 0.5, lam), dtype=torch.float64)
    assert torch.allclose(batch.credit("gtpo_sepa", beta=0.5, sepa_lambda=lam).advantages_BT, expected, atol=1e-12)


def test_none_spreads_the_advantage():
    batch = Batch()
    credit = batch.credit("none")
    assert torch.equal(credit.advantages_BT, torch.where(batch.mask, batch.advantages[:, None], 0.0))
    assert torch.equal(credit.loss_mask_BT, batch.mask)
    assert credit.weights_BT is None


@given(SEEDS, st.floats(0.0, 1.0))
def test_mean_gtpo_weight_is_one(seed, beta):
    batch = Batch(seed)
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask)
    weights = gtpo_weights(h, batch.mask, beta)
    for row, length in zip(weights, batch.lengths.tolist(), strict=True):
        assert length == 0 or float(row.sum()) / length == pytest.approx(1.0, abs=1e-12)
    assert (weights >= 0).all()


def test_beta_zero_is_an_exact_no_op():
    batch = Batch(dtype=torch.float32)
    assert torch.equal(batch.credit("gtpo", beta=0.0).advantages_BT, batch.credit("none").advantages_BT)


def test_certain_completions_get_weight_one():
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gtpo_weights(torch.full((1, 3), 1e-9), mask, 0.5).tolist() == [[1.0, 1.0, 1.0]]


@given(SEEDS, st.floats(-1.0, 2.0))
def test_pooling_keeps_the_sum_and_every_planning_weight(seed, lam):
    batch = Batch(seed)
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask)
    pooled = sepa_pool(h, batch.planning, batch.mask, lam)
    assert torch.allclose(pooled.sum(1), h.sum(1), atol=1e-12)
    plan = batch.planning & batch.mask
    assert torch.equal(pooled[plan], h[plan])
    before, after = gtpo_weights(h, batch.mask, 0.7), gtpo_weights(pooled, batch.mask, 0.7)
    assert torch.allclose(after[plan], before[plan], atol=1e-12)
    execution = batch.mask & ~batch.planning
    assert float(pooled[execution].var(correction=0)) <= float(h[execution].var(correction=0)) + 1e-12


def test_pooling_no_ops_are_exact():
    batch = Batch(dtype=torch.float32)
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask)
    assert torch.equal(sepa_pool(h, batch.planning, batch.mask, 0.0), h)
    assert torch.equal(sepa_pool(h, batch.planning, batch.mask, 0.8)[2], h[2])
    assert torch.equal(sepa_pool(h, torch.ones_like(batch.mask), batch.mask, 1.0), h)
    assert torch.equal(sepa_pool(h, batch.planning, batch.mask, 7.0), sepa_pool(h, batch.planning, batch.mask, 1.0))
    with pytest.raises(ValueError, match="NaN"):
        sepa_pool(h, batch.planning, batch.mask, math.nan)


def test_hicra_raises_and_dampens():
    advantages = torch.tensor([[2.0, 2.0, -1.0, -1.0]])
    planning = torch.tensor([[True, False, True, False]])
    assert hicra(advantages, planning, 0.2).tolist() == [[pytest.approx(2.4), 2.0, pytest.approx(-0.8), -1.0]]
    assert torch.equal(hicra(advantages, planning, 0.0), advantages)
    for alpha in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="hicra alpha"):
            hicra(advantages, planning, alpha)


def test_hicra_acts_on_planning_tokens_only():
    batch = Batch()
    plain, raised = batch.credit("gtpo").advantages_BT, batch.credit("gtpo_hicra", alpha=0.3).advantages_BT
    plan = batch.planning & batch.mask
    assert torch.allclose(raised[plan], plain[plan] + 0.3 * plain[plan].abs())
    assert torch.equal(raised[~plan], plain[~plan])


@given(SEEDS)
def test_placebo_has_the_rate_of_planning(seed):
    batch = Batch(seed)
    placebo = placebo_mask(batch.uniforms, batch.planning, batch.mask)
    assert torch.equal(placebo.sum(1), (batch.planning & batch.mask).sum(1))
    assert not (placebo & ~batch.mask).any()


def test_placebo_ignores_where_planning_is():
    mask = torch.ones(2000, 4, dtype=torch.bool)
    planning = torch.zeros_like(mask)
    planning[:, 0] = True
    chosen = placebo_mask(torch.rand(2000, 4, generator=torch.Generator().manual_seed(0)), planning, mask)
    assert chosen.double().mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.04)


def test_placebo_mode_uses_the_given_mask():
    batch = Batch()
    inputs = batch.inputs()
    placebo = inputs.placebo_BT
    credit = batch.credit("gtpo_hicra_placebo", alpha=0.2, inputs=inputs)
    assert torch.equal(credit.advantages_BT, hicra(batch.credit("gtpo").advantages_BT, placebo, 0.2))


@given(SEEDS, st.sampled_from([0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0]))
def test_entropy_mask_keeps_exactly_the_top_share(seed, rho):
    batch = Batch(seed)
    coarse = torch.where(batch.mask, (batch.entropy * 2).round(), math.nan)  # many ties
    kept = entropy_mask(coarse, batch.mask, rho)
    total = int(batch.mask.sum())
    assert int(kept.sum()) == -(-round(rho * 100) * total // 100)
    assert not (kept & ~batch.mask).any()
    dropped = batch.mask & ~kept
    if dropped.any():
        assert coarse[kept].min() >= coarse[dropped].max()


def test_entropy_mask_details():
    mask = torch.ones(1, 30, dtype=torch.bool)
    flat = torch.ones(1, 30)
    assert entropy_mask(flat, mask, 0.1).flatten().tolist() == [True] * 3 + [False] * 27
    assert torch.equal(entropy_mask(flat, mask, 1.0), mask)
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert not entropy_mask(torch.full((2, 3), math.nan), empty, 0.2).any()
    for rho in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="rho"):
            entropy_mask(flat, mask, rho)


@pytest.mark.parametrize(("rho", "tokens", "kept"), [(0.07, 100, 7), (0.1, 30, 3), (0.2, 5, 1), (0.29, 100, 29)])
def test_the_share_is_the_decimal_that_was_written(rho, tokens, kept):
    """0.07 · 100 is 7.000000000000001 in floating point, and the number nearest to 0.1 is above it."""
    mask = torch.ones(1, tokens, dtype=torch.bool)
    assert int(entropy_mask(torch.ones(1, tokens), mask, rho).sum()) == kept


def test_entropy_mask_denominators():
    batch = Batch()
    kept = batch.credit("entropy_mask", inputs=ModeInputs(entropy_rho=0.2))
    both = batch.credit("entropy_mask", inputs=ModeInputs(entropy_rho=0.2, entropy_denominator="all"))
    assert torch.equal(kept.denominator_mask_BT, kept.loss_mask_BT)
    assert torch.equal(both.denominator_mask_BT, batch.mask)
    assert torch.equal(kept.advantages_BT, both.advantages_BT)
    assert torch.equal(kept.advantages_BT != 0, kept.loss_mask_BT)
    with pytest.raises(ValueError, match="kept or all"):
        batch.credit("entropy_mask", inputs=ModeInputs(entropy_denominator="some"))


def looped_paper(h, rewards, correct, groups, lengths, a1, a2):
    """Group Token Policy Optimization, token by token."""
    rows = [[0.0] * h.shape[1] for _ in lengths]
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        if len({correct[i] for i in members}) < 2:
            continue
        shaped = {}
        for i in members:
            for t in range(lengths[i]):
                active = [k for k in members if correct[k] == correct[i] and lengths[k] > t]
                if correct[i]:
                    total = sum(float(h[k, t]) for k in active)
                    shaped[i, t] = a1 * rewards[i] + a2 * float(h[i, t]) / total * len(active)
                else:
                    total = sum(1 / float(h[k, t]) for k in active)
                    shaped[i, t] = -a1 - a2 / float(h[i, t]) / total * len(active)
        mean = sum(shaped.values()) / len(shaped)
        std = math.sqrt(sum((v - mean) ** 2 for v in shaped.values()) / len(shaped))
        for (i, t), value in shaped.items():
            rows[i][t] = (value - mean) / std
    return torch.tensor(rows, dtype=torch.float64)


@given(SEEDS)
def test_gtpo_paper_matches_a_loop(seed):
    batch = Batch(seed)
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask).clamp(min=1e-6)
    rewards = batch.correct.double()
    got = gtpo_paper(h, rewards, batch.correct, batch.groups, batch.mask, 1.0, 0.1)
    lists = (rewards.tolist(), batch.correct.tolist(), batch.groups.tolist(), batch.lengths.tolist())
    assert torch.allclose(got, looped_paper(h, *lists, 1.0, 0.1), atol=1e-9)
    assert got[4:].abs().max() == 0.0  # group 9 is all correct
    credit = batch.credit("gtpo_paper", inputs=batch.inputs())
    assert torch.allclose(credit.advantages_BT, got, atol=1e-9)


def test_gtpo_paper_normalises_jointly():
    batch = Batch(3)
    advantages = batch.credit("gtpo_paper", inputs=batch.inputs()).advantages_BT
    group = batch.mask & (batch.groups == 7)[:, None]
    assert float(advantages[group].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(advantages[group].square().mean()) == pytest.approx(1.0)
    assert (advantages[group & batch.correct[:, None]] > 0).all()
    assert (advantages[group & ~batch.correct[:, None]] < 0).all()


def test_gtpo_paper_can_keep_the_sign():
    """One short correct answer beside three long wrong ones: the joint mean lies below most wrong tokens, which then
    are rewarded; divided by the root mean square alone none is."""
    lengths, width = torch.tensor([2, 30, 30, 30]), 30
    mask = torch.arange(width)[None] < lengths[:, None]
    h = torch.empty(4, width, dtype=torch.float64).exponential_(1.0, generator=torch.Generator().manual_seed(0))
    correct = torch.tensor([True, False, False, False])
    rows = (correct.double(), correct, torch.zeros(4))
    wrong = mask & ~correct[:, None]
    centred, kept = (gtpo_paper(h, *rows, mask, 1.0, 0.1, way) for way in (True, False))
    assert 0.2 < float((centred[wrong] > 0).double().mean()) < 0.9
    assert (kept[wrong] < 0).all()
    assert (kept[mask & correct[:, None]] > 0).all()
    assert float(kept[mask].square().mean()) == pytest.approx(1.0)
    assert torch.equal(kept[~mask], torch.zeros_like(kept[~mask]))


@pytest.mark.usefixtures("unchecked")
def test_gtpo_paper_wants_its_inputs():
    batch = Batch()
    with pytest.raises(ValueError, match="rewards_B, correct_B and group_B"):
        batch.credit("gtpo_paper")
    with pytest.raises(ValueError, match=r"rewards_B has shape \(2,\)"):
        batch.credit("gtpo_paper", inputs=batch.inputs(rewards_B=torch.ones(2)))
    with pytest.raises(ValueError, match="rewards must be finite"):
        batch.credit("gtpo_paper", inputs=batch.inputs(rewards_B=torch.full((6,), math.nan)))


def test_uncertainty_kinds():
    mask = torch.tensor([[True, True, True, False]])
    logprobs = torch.tensor([[math.log(0.25), 0.0, -math.inf, math.nan]])
    entropy = torch.tensor([[1.5, 0.0, 99.0, math.nan]])
    surprisal = uncertainty("surprisal", logprobs, None, mask).tolist()[0]
    assert surprisal == [pytest.approx(math.log(4)), 0.0, 50.0, 0.0]
    assert uncertainty("predictive_variance", logprobs, None, mask).tolist()[0] == [0.1875, 0.0, 0.0, 0.0]
    assert uncertainty("shannon_entropy", logprobs, entropy, mask).tolist()[0] == [1.5, 0.0, 50.0, 0.0]
    with pytest.raises(ValueError, match="unknown uncertainty kind"):
        uncertainty("varentropy", logprobs, entropy, mask)
    with pytest.raises(ValueError, match="needs entropy_BT, which was not given"):
        uncertainty("shannon_entropy", logprobs, None, mask)


def test_nan_is_located():
    batch = Batch()
    batch.logprobs[0, 0] = math.nan
    with pytest.raises(ValueError, match="logprob is NaN at completion 0, token 0"):
        batch.credit("none")
    batch = Batch()
    batch.advantages[3] = math.nan
    with pytest.raises(ValueError, match="episode advantages must be finite"):
        batch.credit("gtpo")
    huge = Batch(dtype=torch.float32)
    huge.advantages = torch.full((6,), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match="episode advantages must be finite"):
        huge.credit("gtpo")


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_named():
    batch = Batch()
    with pytest.raises(ValueError, match="unknown transform mode 'sepa'"):
        batch.credit("sepa")
    with pytest.raises(ValueError, match="gtpo_sepa needs planning_BT"):
        token_advantages("gtpo_sepa", batch.advantages, batch.logprobs, None, None, batch.mask)
    with pytest.raises(ValueError, match="gtpo_hicra_placebo needs placebo_BT"):
        batch.credit("gtpo_hicra_placebo")
    with pytest.raises(ValueError, match="one advantage per row"):
        token_advantages("none", batch.advantages[:2], batch.logprobs, None, None, batch.mask)
    with pytest.raises(ValueError, match="must be bool"):
        token_advantages("none", batch.advantages, batch.logprobs, None, None, batch.mask.long())
    for beta in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="beta"):
            batch.credit("gtpo", beta=beta)


@pytest.mark.parametrize("mode", TRANSFORMS)
@given(seed=SEEDS)
def test_every_mode_is_finite_constant_and_zero_in_the_padding(mode, seed):
    batch = Batch(seed)
    batch.logprobs.requires_grad_()
    batch.entropy.requires_grad_()
    batch.advantages.requires_grad_()
    credit = batch.credit(mode, inputs=batch.inputs(), sepa_lambda=0.5)
    assert torch.isfinite(credit.advantages_BT).all()
    assert not credit.advantages_BT.requires_grad
    assert (credit.advantages_BT[~credit.loss_mask_BT] == 0).all()
    assert not (credit.loss_mask_BT & ~batch.mask).any()
    assert credit.weights_BT is None or not credit.weights_BT.requires_grad


@pytest.mark.parametrize("mode", TRANSFORMS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (2, 3)])
def test_empty_batches(mode, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    filler = torch.full(shape, math.nan)
    rows = torch.zeros(shape[0])
    inputs = ModeInputs(mask, rows, rows.bool(), rows.long())
    credit = token_advantages(mode, rows, filler, filler, mask, mask, inputs=inputs)
    assert credit.advantages_BT.shape == shape
    assert (credit.advantages_BT == 0).all()
    assert credit.stats["planning_fraction"] is None
    assert credit.exec_variance is None


def test_stats_before_pooling():
    batch = Batch()
    credit = batch.credit("gtpo_sepa", sepa_lambda=1.0)
    surprisal = -batch.logprobs
    plan, execution = batch.planning & batch.mask, ~batch.planning & batch.mask
    stats = credit.stats
    assert stats["plan_surprisal_mean"] == pytest.approx(float(surprisal[plan].mean()))
    assert stats["plan_surprisal_var"] == pytest.approx(float(surprisal[plan].var(correction=0)))
    assert stats["exec_surprisal_mean"] == pytest.approx(float(surprisal[execution].mean()))
    assert stats["exec_surprisal_var"] == pytest.approx(float(surprisal[execution].var(correction=0)))
    assert stats["exec_entropy_mean"] == stats["exec_surprisal_mean"]
    assert credit.exec_variance == stats["exec_surprisal_var"]
    assert credit.stats["planning_fraction"] == pytest.approx(int(plan.sum()) / int(batch.mask.sum()))


def test_stats_by_kind():
    batch = Batch()
    execution = ~batch.planning & batch.mask
    surprisal = batch.credit("none").stats
    entropy = batch.credit("none", uncertainty_kind="shannon_entropy")
    assert entropy.stats["exec_entropy_mean"] == pytest.approx(float(batch.entropy[execution].mean()))
    assert entropy.stats["exec_surprisal_mean"] == pytest.approx(surprisal["exec_surprisal_mean"])
    variance = batch.credit("none", uncertainty_kind="predictive_variance")
    assert variance.stats == surprisal
    p = batch.logprobs[execution].exp()
    assert variance.exec_variance == pytest.approx(float((p * (1 - p)).var(correction=0)))
    without = token_advantages("none", batch.advantages, batch.logprobs, None, None, batch.mask)
    assert set(without.stats) == set(surprisal)
    assert all(value is None for value in without.stats.values())


def test_transform_and_uncertainty_plugins():
    batch = Batch()

    def halve(advantages_BT, h_BT, planning_BT, mask_BT):
        return advantages_BT / 2

    def flat(advantages_BT, **rest):
        return advantages_BT[0]

    def broken(advantages_BT, **rest):
        return advantages_BT / 0

    def squared(logprobs, entropy, mask):
        return logprobs**2

    def nan(logprobs, entropy, mask):
        return logprobs * math.nan

    assert torch.equal(batch.credit(halve).advantages_BT, batch.credit("none").advantages_BT / 2)
    with pytest.raises(PluginError, match=r"test_credit:.*flat returned shape"):
        batch.credit(flat)
    with pytest.raises(PluginError, match="broken returned NaN or infinity"):
        batch.credit(broken)
    h = torch.where(batch.mask, batch.logprobs, 0.0) ** 2
    weights = gtpo_weights(h, batch.mask, 0.1)
    assert torch.allclose(batch.credit("gtpo", uncertainty_kind=squared).weights_BT, weights)
    with pytest.raises(PluginError, match="nan returned NaN or infinity"):
        batch.credit("gtpo", uncertainty_kind=nan)
