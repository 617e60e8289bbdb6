"""A teacher's advantages: worked numbers, and the gradient of the reverse divergence by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from retrain.maths.distillation import distillation_advantages, divergence, with_tail
from retrain.maths.losses import kl_terms, policy_loss

F64 = torch.float64
S, T = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.7, 0.2, 0.1], dtype=F64)
"""A student and a teacher over three tokens."""
REVERSE_GRADIENT = torch.tensor([-0.214253, 0.094030, 0.120223], dtype=F64)
"""Of KL(S ‖ T) with respect to the student's logits."""


def mask(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def test_worked_advantages():
    found = distillation_advantages(S.log()[None], T.log()[None], mask(1, 3), 1.0)
    assert found[0].tolist() == pytest.approx([0.336472, -0.405465, -0.693147], abs=1e-6)
    assert float((S * found[0]).sum()) == pytest.approx(-0.092033, abs=1e-6)  # minus the reverse divergence


def test_weight_clamp_and_mask():
    student, teacher = S.log()[None], T.log()[None]
    plain = distillation_advantages(student, teacher, mask(1, 3), 1.0)
    assert torch.equal(distillation_advantages(student, teacher, mask(1, 3), 2.5), 2.5 * plain)
    clamped = distillation_advantages(student, teacher, mask(1, 3), 2.0, clamp=0.4)[0].tolist()
    assert clamped == pytest.approx([2 * 0.336472, -0.8, -0.8], abs=1e-6)  # the bound is on the difference itself
    some = torch.tensor([[True, False, True]])
    assert distillation_advantages(student, torch.full_like(teacher, math.nan), ~mask(1, 3), 1.0).tolist() == [
        [0, 0, 0]
    ]
    assert distillation_advantages(student, teacher, some, 1.0)[0, 1] == 0.0
    assert distillation_advantages(student, student, mask(1, 3), 1.0).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("weight", "clamp"), [(-1.0, None), (1.0, 0.0), (1.0, -1.0)])
def test_what_is_no_setting_is_refused(weight, clamp):
    with pytest.raises(ValueError, match="weight must not be negative"):
        distillation_advantages(S.log()[None], T.log()[None], mask(1, 3), weight, clamp)


def expected_gradient(per_token):
    """Of E_{y ~ S}[loss(y)] with respect to the logits, every token enumerated; the sampling has no gradient."""
    logits = S.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (S * per_token(logprobs)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_the_policy_gradient_with_these_advantages_is_the_reverse_divergences():
    logits = S.log().requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    (logprobs.exp() * (logprobs - T.log())).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, REVERSE_GRADIENT, atol=1e-6)

    for loss in ("ppo", "reinforce"):

        def of_a_token(logprobs, loss=loss):
            row = logprobs[None]
            advantages = distillation_advantages(row, T.log()[None], mask(1, 3), 1.0)
            return policy_loss(loss, row, row.detach(), advantages, mask(1, 3))[0][0]

        assert torch.allclose(expected_gradient(of_a_token), REVERSE_GRADIENT, atol=1e-6), loss


def test_estimates_that_are_differentiated_have_other_gradients():
    """Why the difference is an advantage: as a loss k1 teaches nothing, and k3 the forward divergence; k2 would do."""

    def estimate(kind):
        return expected_gradient(lambda logprobs: kl_terms(kind, logprobs[None], T.log()[None], mask(1, 3))[0])

    assert torch.allclose(estimate("k1"), torch.zeros(3, dtype=F64), atol=1e-12)
    assert torch.allclose(estimate("k2"), REVERSE_GRADIENT, atol=1e-6)
    assert torch.allclose(estimate("k3"), S - T, atol=1e-12)


@pytest.mark.parametrize(("alpha", "worth"), [(0.5, 0.021901), (0.999, 0.000092), (1.0, 0.092033)])
def test_worked_divergences(alpha, worth):
    """The generalised Jensen-Shannon divergence vanishes towards its ends, where D jumps to a plain one."""
    assert float(divergence(S.log()[None], T.log()[None], alpha)) == pytest.approx(worth, abs=1e-6)


def test_the_ends_are_the_plain_divergences_and_the_middle_is_symmetric():
    forward = float((T * (T / S).log()).sum())
    assert float(divergence(S.log()[None], T.log()[None], 0.0)) == pytest.approx(forward)
    one, other = (divergence(a.log()[None], b.log()[None], 0.5) for a, b in ((S, T), (T, S)))
    assert torch.allclose(one, other)
    for alpha in (0.0, 0.3, 0.5, 1.0):
        assert float(divergence(S.log()[None], S.log()[None], alpha)) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="alpha must be in"):
        divergence(S.log()[None], T.log()[None], 1.5)


def test_its_gradient_at_the_ends_is_the_plain_divergences():
    for alpha, wanted in ((1.0, REVERSE_GRADIENT), (0.0, S - T)):
        logits = S.log().requires_grad_()
        divergence(torch.log_softmax(logits, -1)[None], T.log()[None], alpha).sum().backward()
        assert logits.grad is not None
        assert torch.allclose(logits.grad, wanted, atol=1e-6), alpha


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
