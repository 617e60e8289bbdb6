import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lanes import STREAM, apply
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms import TOKEN_CREDIT, SpreadAdvantage
from retrain.algorithms.algorithm import pad_field
from retrain.algorithms.credit.entropy_mask import EntropyMask, entropy_mask
from retrain.algorithms.credit.gtpo import gtpo_weights
from retrain.algorithms.credit.gtpo_paper import gtpo_paper
from retrain.algorithms.credit.hicra import hicra, placebo_mask
from retrain.algorithms.credit.sepa_pooling import SepaPooling, sepa_pool
from retrain.algorithms.credit.uncertainty import TokenUncertainty, uncertainty
from retrain.config import parse_dict
from retrain.config.algorithm import Sepa
from retrain.rng import uniforms
from retrain.training.updates import denominators_of
from retrain.types import Action, CreditedBatch, CreditedGroup, CreditedRollout, Problem, Prompt, RewardResult, Turn

SEEDS = st.integers(0, 2**31)
PROMPT = Prompt(Problem("p", "?", "1"), "?", (1, 2))


class Batch:
    """A ragged batch with garbage in its padding; row 1 is empty, row 2 has only planning tokens."""

    def __init__(self, seed: int = 0, rows: int = 6):
        draw = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 10, (rows,), generator=draw)
        self.lengths[1] = 0
        shape = rows, int(self.lengths.max())
        self.mask = torch.arange(shape[1])[None] < self.lengths[:, None]
        self.logprobs = torch.where(self.mask, -4 * torch.rand(shape, generator=draw, dtype=torch.float64), math.nan)
        self.entropy = torch.where(self.mask, 3 * torch.rand(shape, generator=draw, dtype=torch.float64), math.nan)
        self.planning = torch.rand(shape, generator=draw) < 0.3
        self.planning[2] = True
        self.advantages = torch.randn(rows, generator=draw, dtype=torch.float64)
        self.uniforms = torch.rand(shape, generator=draw, dtype=torch.float64)
        self.correct = torch.tensor([True, False, False, True, True, True])[:rows]
        self.groups = torch.tensor([7, 7, 7, 7, 9, 9])[:rows]

    def rollout(self, row: int) -> CreditedRollout:
        length = int(self.lengths[row])
        logprobs_T, entropy_T, planning_T = (
            table[row, :length].numpy() for table in (self.logprobs, self.entropy, self.planning)
        )
        action = Action([7] * length, "", logprobs_T, entropy_T, "stop")
        reward = RewardResult(float(self.correct[row]), correct=bool(self.correct[row]))
        advantage = float(self.advantages[row])
        return CreditedRollout(PROMPT, (Turn((1, 2), action),), reward, advantage=advantage, planning_T=planning_T)

    def batch(self) -> CreditedBatch:
        """The batch before its advantages are spread over tokens."""
        rows = [torch.nonzero(self.groups == number)[:, 0].tolist() for number in self.groups.unique()]
        groups = [CreditedGroup(PROMPT, tuple(self.rollout(row) for row in members)) for members in rows]
        return CreditedBatch(tuple(groups))

    def credit(self, mode: str, step: int = 0, kind: str = "surprisal", **sections) -> CreditedBatch:
        """The batch after the token credit of this mode, whose sections of the configuration may be given."""
        algorithm = {"transform_mode": mode, **sections.get("algorithm", {})}
        token_credit = TOKEN_CREDIT[mode](parse_dict({**sections, "algorithm": algorithm}), STREAM)
        return apply(self.batch(), SpreadAdvantage(False), TokenUncertainty(kind), *token_credit, step=step)

    def advantages_BT(self, mode: str, step: int = 0, **sections) -> torch.Tensor:
        return pad_field(self.credit(mode, step, **sections).rollouts, "token_advantages_T")


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


@pytest.mark.parametrize("beta", [0.1, 1.0, 3.0])
@pytest.mark.parametrize(("mode", "lam"), [("gtpo", None), ("gtpo_sepa", 0.0), ("gtpo_sepa", 0.4), ("gtpo_sepa", 1.0)])
def test_gtpo_and_sepa_match_a_loop(mode, lam, beta):
    batch = Batch()
    expected = torch.tensor(looped_gtpo(batch, beta, lam), dtype=torch.float64)
    schedule = {} if lam is None else {"sepa": {"steps": 10, "correct_rate_gate": 0}}
    found = batch.advantages_BT(mode, step=int(10 * (lam or 0.0)), gtpo={"beta": beta}, **schedule)
    assert torch.allclose(found, expected, atol=1e-12)


def test_none_spreads_the_advantage():
    batch = Batch()
    credit = batch.credit("none")
    advantages_BT = pad_field(credit.rollouts, "token_advantages_T")
    assert torch.equal(advantages_BT, torch.where(batch.mask, batch.advantages[:, None], 0.0))
    assert all(rollout.loss_mask_T.all() for rollout in credit.rollouts)
    assert "exec_weight_mean" not in credit.metrics
    assert torch.equal(batch.advantages_BT("gtpo", gtpo={"beta": 0.0}), advantages_BT)  # to the last bit
    assert gtpo_weights(torch.full((1, 3), 1e-9), torch.ones(1, 3).bool(), 0.5).tolist() == [[1.0, 1.0, 1.0]]


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
    assert torch.equal(sepa_pool(h, batch.planning, batch.mask, 0.0), h)
    clamped = min(max(lam, 0.0), 1.0)
    assert torch.equal(pooled, sepa_pool(h, batch.planning, batch.mask, clamped))


def test_hicra_raises_and_dampens():
    advantages = torch.tensor([[2.0, 2.0, -1.0, -1.0]])
    planning = torch.tensor([[True, False, True, False]])
    assert hicra(advantages, planning, 0.2).tolist() == [[pytest.approx(2.4), 2.0, pytest.approx(-0.8), -1.0]]
    batch = Batch()
    plain = batch.advantages_BT("gtpo")
    rows = [uniforms(batch.mask.shape[1], *STREAM, "placebo", 3, row) for row in range(len(batch.mask))]
    placebo = placebo_mask(torch.from_numpy(np.stack(rows)), batch.planning, batch.mask)
    for mode, raised in (("gtpo_hicra", batch.planning & batch.mask), ("gtpo_hicra_placebo", placebo)):
        assert torch.equal(batch.advantages_BT(mode, step=3, hicra={"alpha": 0.2}), hicra(plain, raised, 0.2))


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


@pytest.mark.parametrize(("rho", "tokens", "kept"), [(0.07, 100, 7), (0.1, 30, 3), (0.2, 5, 1), (0.29, 100, 29)])
def test_the_share_is_the_decimal_that_was_written_and_the_first_of_equal_tokens_stay(rho, tokens, kept):
    """0.07 · 100 is 7.000000000000001 in floating point, and the number nearest to 0.1 is above it."""
    mask = torch.ones(1, tokens, dtype=torch.bool)
    expected = [True] * kept + [False] * (tokens - kept)
    assert entropy_mask(torch.ones(1, tokens), mask, rho)[0].tolist() == expected


def test_entropy_mask_denominators():
    batch = Batch()
    kept = batch.credit("entropy_mask")
    both = batch.credit("entropy_mask", algorithm={"entropy_mask_denominator": "all"})
    total = int(batch.mask.sum())
    trained = [int(rollout.loss_mask_T.sum()) for rollout in kept.rollouts]
    assert (kept.denominators.tokens, kept.denominators.all_tokens) == (sum(trained), False)
    assert (both.denominators.tokens, both.denominators.all_tokens) == (total, True)
    for row, (rollout, other) in enumerate(zip(kept.rollouts, both.rollouts, strict=True)):
        assert denominators_of(kept, [rollout]).tokens == trained[row]
        assert denominators_of(both, [other]).tokens == len(other)
        assert np.array_equal(rollout.token_advantages_T, other.token_advantages_T)
        assert np.array_equal(rollout.token_advantages_T != 0, rollout.loss_mask_T)


def looped_paper(h, rewards, correct, groups, lengths, a1, a2, centred):
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
        mean = sum(shaped.values()) / len(shaped) if centred else 0.0
        std = math.sqrt(sum((v - mean) ** 2 for v in shaped.values()) / len(shaped))
        for (i, t), value in shaped.items():
            rows[i][t] = (value - mean) / std
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("centred", [True, False])
@given(SEEDS)
@settings(max_examples=30)
def test_gtpo_paper_matches_a_loop(centred, seed):
    batch = Batch(seed)
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask).clamp(min=1e-6)
    rewards = batch.correct.double()
    got = gtpo_paper(h, rewards, batch.correct, batch.groups, batch.mask, 1.0, 0.1, centred)
    lists = (rewards.tolist(), batch.correct.tolist(), batch.groups.tolist(), batch.lengths.tolist())
    assert torch.allclose(got, looped_paper(h, *lists, 1.0, 0.1, centred), atol=1e-9)
    assert got[4:].abs().max() == 0.0  # group 9 is all correct
    if centred:
        assert torch.allclose(batch.advantages_BT("gtpo_paper"), got, atol=1e-9)
    else:  # every token keeps the sign of its answer
        assert (got[:4][batch.mask[:4] & ~batch.correct[:4, None]] <= 0).all()


def test_uncertainty_kinds():
    mask = torch.tensor([[True, True, True, False]])
    logprobs = torch.tensor([[math.log(0.25), 0.0, -math.inf, math.nan]])
    entropy = torch.tensor([[1.5, 0.0, 99.0, math.nan]])
    surprisal = uncertainty("surprisal", logprobs, None, mask).tolist()[0]
    assert surprisal == [pytest.approx(math.log(4)), 0.0, 50.0, 0.0]
    assert uncertainty("predictive_variance", logprobs, None, mask).tolist()[0] == [0.1875, 0.0, 0.0, 0.0]
    assert uncertainty("shannon_entropy", logprobs, entropy, mask).tolist()[0] == [1.5, 0.0, 50.0, 0.0]


def test_numbers_that_are_not_finite_are_named():
    batch = Batch()
    batch.logprobs[0, 0] = math.nan
    with pytest.raises(ValueError, match="logprob is NaN at completion 0, token 0"):
        batch.credit("none")
    credited = Batch().batch()
    credited = credited.with_rollouts(replace(rollout, turn_advantages=(math.nan,)) for rollout in credited.rollouts)
    with pytest.raises(ValueError, match="episode advantages must be finite"):
        apply(credited, SpreadAdvantage(False))
    batch = Batch()
    batch.logprobs[3, 1] = batch.entropy[4, 0] = math.nan
    for kind, reason in (
        ("predictive_variance", "logprob is NaN at completion 3, token 1"),
        ("shannon_entropy", "entropy is NaN at completion 4, token 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            uncertainty(kind, batch.logprobs, batch.entropy, batch.mask)


@pytest.mark.parametrize("mode", ["gtpo", "gtpo_sepa"])
def test_weights_by_kind_of_token_and_what_pooling_did_to_them(mode):
    batch = Batch()
    h = uncertainty("surprisal", batch.logprobs, None, batch.mask)
    pooled = sepa_pool(h, batch.planning, batch.mask, 0.5) if mode == "gtpo_sepa" else h
    plan, execution = batch.planning & batch.mask, ~batch.planning & batch.mask
    weights, unpooled = (gtpo_weights(values, batch.mask, 0.7) for values in (pooled, h))
    expected = {
        "exec_weight_mean": float(weights[execution].mean()),
        "exec_weight_var": float(weights[execution].var(correction=0)),
        "plan_weight_mean": float(weights[plan].mean()),
        "plan_weight_var": float(weights[plan].var(correction=0)),
    }
    if mode == "gtpo_sepa":
        expected["exec_weight_var_unpooled"] = float(unpooled[execution].var(correction=0))
        expected["plan_weight_change"] = float((weights[plan] - unpooled[plan]).abs().max())
        assert expected["exec_weight_var_unpooled"] > 1.5 * expected["exec_weight_var"]
    schedule = {"sepa": {"steps": 10, "correct_rate_gate": 0}} if mode == "gtpo_sepa" else {}
    found = batch.credit(mode, step=5, gtpo={"beta": 0.7}, **schedule).metrics
    assert {key: value for key, value in found.items() if "weight" in key} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mode", ["entropy_mask", "shannon_entropy"])
def test_entropies_that_an_engine_did_not_give_are_named(mode):
    batch = Batch().batch()
    actions = [replace(rollout.turns[0].action, entropy_T=None) for rollout in batch.rollouts]
    turns = [(replace(rollout.turns[0], action=own),) for rollout, own in zip(batch.rollouts, actions, strict=True)]
    batch = batch.with_fields(batch.rollouts, [{"turns": own} for own in turns])
    step = EntropyMask(0.2) if mode == "entropy_mask" else TokenUncertainty("shannon_entropy")
    with pytest.raises(ValueError, match=f"^{mode} needs the entropy of every token, which the engine did not give$"):
        apply(batch, SpreadAdvantage(False), step)


def test_stats_by_kind():
    batch = Batch()
    plan, execution = batch.planning & batch.mask, ~batch.planning & batch.mask
    pooling = SepaPooling(Sepa())
    found = apply(batch.batch(), SpreadAdvantage(False), TokenUncertainty("surprisal"), pooling).metrics
    expected = {"planning_fraction": int(plan.sum()) / int(batch.mask.sum())}
    for name, tokens in (("plan", plan), ("exec", execution)):
        expected[f"{name}_surprisal_mean"] = float(-batch.logprobs[tokens].mean())
        expected[f"{name}_surprisal_var"] = float(batch.logprobs[tokens].var(correction=0))
    expected["exec_entropy_mean"] = expected["exec_surprisal_mean"]
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert pooling.state()["var_ema"] == found["exec_surprisal_var"]
    entropy = batch.credit("none", kind="shannon_entropy").metrics
    assert entropy["exec_entropy_mean"] == pytest.approx(float(batch.entropy[execution].mean()))
    assert entropy["exec_surprisal_mean"] == pytest.approx(expected["exec_surprisal_mean"])
    unmarked = batch.batch()
    unmarked = unmarked.with_rollouts(replace(rollout, planning_T=None) for rollout in unmarked.rollouts)
    assert all(value is None for value in apply(unmarked, TokenUncertainty("surprisal")).metrics.values())
