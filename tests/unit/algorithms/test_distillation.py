import math

import numpy as np
import pytest
import torch
from helpers.lanes import apply, batch_of, credit
from helpers.records import completion

from retrain.algorithms import ZeroAdvantage
from retrain.algorithms.credit.teacher import distillation_advantages
from retrain.algorithms.losses import PPO, Reinforce
from retrain.maths.distillation import divergence, with_tail
from retrain.policy.objective import policy_loss
from retrain.types import Problem, Prompt, RewardResult, Scores, single_turn

F64 = torch.float64
S, T = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.7, 0.2, 0.1], dtype=F64)
"""A student and a teacher over three tokens."""
REVERSE_GRADIENT = torch.tensor([-0.214253, 0.094030, 0.120223], dtype=F64)
"""Of KL(S ‖ T) with respect to the student's logits."""


@pytest.mark.parametrize("loss", [PPO(), Reinforce()])
def test_the_policy_gradient_with_these_advantages_is_the_reverse_divergences(loss):
    """Of E_{y ~ S}[loss(y)] with respect to the logits, every token enumerated; the sampling has no gradient."""
    logits = S.log().requires_grad_()
    row = torch.log_softmax(logits, -1)[None]
    advantages = distillation_advantages(row, T.log()[None], 1.0)
    per_token = policy_loss(loss, row, row.detach(), advantages, torch.ones(1, 3, dtype=torch.bool))[0][0]
    (S * per_token).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, REVERSE_GRADIENT, atol=1e-6)


@pytest.mark.parametrize(("alpha", "worth"), [(0.5, 0.021901), (0.999, 0.000092), (1.0, 0.092033)])
def test_worked_divergences(alpha, worth):
    """The generalised Jensen-Shannon divergence vanishes towards its ends, where D jumps to a plain one."""
    assert float(divergence(S.log()[None], T.log()[None], alpha)) == pytest.approx(worth, abs=1e-6)


@pytest.mark.parametrize(("alpha", "gradient"), [(1.0, REVERSE_GRADIENT), (0.0, S - T)])
def test_the_ends_are_the_plain_divergences(alpha, gradient):
    """KL(S ‖ T) and KL(T ‖ S), with their gradients."""
    logits = S.log().requires_grad_()
    found = divergence(torch.log_softmax(logits, -1)[None], T.log()[None], alpha).sum()
    found.backward()
    first, second = (S, T) if alpha == 1.0 else (T, S)
    assert float(found.detach()) == pytest.approx(float((first * (first / second).log()).sum()))
    assert logits.grad is not None
    assert torch.allclose(logits.grad, gradient, atol=1e-6)


def test_the_likeliest_tokens_and_the_rest_as_one():
    student, teacher = S.log()[None], T.log()[None]
    for count, worth in ((1, 0.087177), (2, 0.092033)):
        ids = student.topk(count, -1).indices
        found = divergence(with_tail(student, ids), with_tail(teacher, ids), 1.0)
        assert float(found) == pytest.approx(worth, abs=1e-6), count
    cut = with_tail(student, torch.tensor([[2, 0]]))
    assert cut.exp()[0].tolist() == pytest.approx([0.2, 0.5, 0.3])
    sure = with_tail(torch.tensor([[0.0, -60.0, -60.0]], dtype=F64), torch.tensor([[0]]))
    assert bool(torch.isfinite(sure).all())  # nothing is left over


def test_worked_advantages():
    found = distillation_advantages(S.log()[None], T.log()[None], 1.0)
    assert found[0].tolist() == pytest.approx([0.336472, -0.405465, -0.693147], abs=1e-6)
    assert float((S * found[0]).sum()) == pytest.approx(-0.092033, abs=1e-6)  # minus the reverse divergence


def test_weight_and_clamp():
    student, teacher = S.log()[None], T.log()[None]
    plain = distillation_advantages(student, teacher, 1.0)
    assert torch.equal(distillation_advantages(student, teacher, 2.5), 2.5 * plain)
    clamped = distillation_advantages(student, teacher, 2.0, clamp=0.4)[0].tolist()
    assert clamped == pytest.approx([2 * 0.336472, -0.8, -0.8], abs=1e-6)  # the bound is on the difference itself


def groups_of(*rewards_and_lengths):
    prompt = Prompt(Problem("0", "1 + 1", "2"), "1 + 1", (1, 2))
    return [single_turn(prompt, [completion(n)], [RewardResult(reward)]) for reward, n in rewards_and_lengths]


def test_alone_a_teacher_compares_no_rewards():
    batch = apply(batch_of(groups_of((1.0, 2), (0.0, 0), (None, 2))), ZeroAdvantage())
    assert [rollout.advantage for rollout in batch.rollouts] == pytest.approx([0.0, math.nan, math.nan], nan_ok=True)
    assert [group.discarded for group in batch.groups] == [None, "no_reward", "no_reward"]


@pytest.mark.parametrize(("clamp", "advantages", "share"), [({}, [-0.5, 2.0], 0.0), ({"clamp": 0.5}, [-0.5, 0.5], 0.5)])
def test_the_share_of_clamped_tokens_is_of_those_beyond_the_bound(clamp, advantages, share):
    scores = Scores(teacher=[np.array([-1.5, 1.0])])
    batch = credit(groups_of((1.0, 2)), {"distillation": {"teacher": "base", **clamp}}, scores=scores)
    assert batch.rollouts[0].token_advantages_T.tolist() == advantages
    assert batch.metrics["distillation/clamped_frac"] == share
