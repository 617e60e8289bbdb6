import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.algorithms.losses import DPPO, LOSSES, PPO
from retrain.algorithms.losses.vespo import sequence_weight
from retrain.maths.ratios import add_sums, loss_metrics, sampled_token_kl
from retrain.policy.objective import NORMALIZERS, policy_loss, token_weights


def loss_and_slope(name, advantages, ratios=(1.5, 1.0, 0.5), **parameters):
    logprobs = torch.tensor([ratios], dtype=torch.float64).log().sub(1.0).requires_grad_()
    sampler = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    given = torch.tensor([advantages], dtype=torch.float64)
    loss, sums = policy_loss(LOSSES[name](**parameters), logprobs, sampler, given, torch.ones_like(sampler).bool())
    loss.sum().backward()
    return loss[0].tolist(), logprobs.grad[0].tolist(), {key: float(value) for key, value in sums.items()}


def log_ratio_weighted(weights, advantages):
    """−sg(weight)·A·log π of the three ratios 1.5, 1 and 0.5 to a sampler's −1."""
    return [-w * a * (math.log(r) - 1) for w, a, r in zip(weights, advantages, (1.5, 1.0, 0.5), strict=True)]


UP, DOWN, MIXED = [1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [1.0, -2.0, 3.0]
S = (1.5 * 1.0 * 0.5) ** (1 / 3)
"""The sequence's ratio, 0.9086."""


@pytest.mark.parametrize(("name", "advantages", "parameters", "loss", "slope", "clipped"), [
    ("ppo", UP, {}, [-1.2, -1.0, -0.5], [0.0, -1.0, -0.5], (0, 1)),
    ("ppo", DOWN, {}, [1.5, 1.0, 0.8], [1.5, 1.0, 0.0], (1, 0)),
    ("ppo", UP, {"clip_eps": 0.2, "clip_eps_high": 0.6}, [-1.5, -1.0, -0.5], [-1.5, -1.0, -0.5], (0, 0)),
    ("ppo", [-2.0, -2.0, 2.0], {"dual_clip": 1.25}, [2.5, 2.0, -1.0], [0.0, 2.0, -1.0], (0, 0)),  # at most c·|A|
    ("reinforce", MIXED, {}, log_ratio_weighted([1.5, 1.0, 0.5], MIXED), [-1.5, 2.0, -1.5], (0, 0)),
    ("cispo", MIXED, {"cap": 1.25}, log_ratio_weighted([1.25, 1, 0.5], MIXED), [-1.25, 2.0, -1.5], (0, 1)),
    ("cispo", UP, {"cap": 1.0}, log_ratio_weighted([1.0, 1.0, 0.5], UP), [-1.0, -1.0, -0.5], (0, 1)),
    ("gspo", UP, {}, [-S] * 3, [-S] * 3, (0, 0)),
    ("gspo", DOWN, {"clip_eps": 0.05}, [0.95] * 3, [0.0] * 3, (3, 0)),
    ("m2po", MIXED, {}, [-1.5, 2.0, -1.5], [-1.5, 2.0, -1.5], (0, 0)),
])  # fmt: skip
def test_losses_by_hand(name, advantages, parameters, loss, slope, clipped):
    found, slopes, sums = loss_and_slope(name, advantages, **parameters)
    assert found == pytest.approx(loss)
    assert slopes == pytest.approx(slope)
    assert (sums["clip_low"], sums["clip_high"]) == clipped


def test_all_losses_agree_on_policy():
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6, 11, generator=draw, dtype=torch.float64)
    tokens = torch.randint(0, 11, (4, 6, 1), generator=draw)
    mask = torch.arange(6)[None] < torch.tensor([[6], [3], [1], [0]])
    advantages = torch.randn(4, 6, generator=draw, dtype=torch.float64)
    gradients = []
    for name in LOSSES:
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(-1).gather(-1, tokens)[..., 0]
        loss, sums = policy_loss(LOSSES[name](), logprobs, logprobs.detach(), advantages, mask)
        loss.sum().backward()
        gradients.append(leaf.grad)
        metrics = loss_metrics(sums)
        assert metrics["val/ratio"] == 1.0
        assert metrics["val/ratio_var"] == metrics["policy/clipfrac_avg"] == metrics["kl_sample_train_v2"] == 0.0
    for other in gradients[1:]:
        assert torch.allclose(other, gradients[0], atol=1e-12)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("name", list(LOSSES))
def test_update_does_not_depend_on_micro_batches(normalizer, name):
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(7)[None] < torch.tensor([5, 1, 0, 7, 3, 4])[:, None]
    features = torch.randn(6, 7, 3, generator=draw, dtype=torch.float64)
    old = -2 * torch.rand(6, 7, generator=draw, dtype=torch.float64)
    advantages = torch.randn(6, 1, generator=draw, dtype=torch.float64).expand(6, 7)
    totals = {"total_tokens": int(mask.sum()), "total_sequences": len(mask), "max_tokens": 7}

    def gradient(pieces):
        weights = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
        sums = None
        for rows in pieces:
            logprobs = old[rows] + 0.1 * features[rows] @ weights
            loss, part = policy_loss(LOSSES[name](), logprobs, old[rows], advantages[rows], mask[rows])
            (loss * token_weights(normalizer, mask[rows], **totals)).sum().backward()
            sums = add_sums(sums, part)
        return weights.grad, loss_metrics(sums)

    whole, whole_metrics = gradient([torch.arange(6)])
    for split in ([1] * 6, [2, 4], [3, 1, 2]):
        pieces, metrics = gradient(torch.arange(6).split(split))
        assert torch.allclose(pieces, whole, atol=1e-9)
        assert metrics == pytest.approx(whole_metrics)


def test_normalizers_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    totals = {"total_tokens": 3, "total_sequences": 2, "max_tokens": 5}
    assert token_weights("tokens", mask, **totals)[0].tolist() == pytest.approx([1 / 3, 1 / 3, 0.0])
    assert token_weights("sequences", mask, **totals).flatten().tolist() == pytest.approx([0.25, 0.25, 0, 0.5, 0, 0])
    assert token_weights("constant", mask, **totals)[1].tolist() == pytest.approx([0.1, 0.0, 0.0])
    kept = torch.tensor([[True, False, False], [False, False, False]])
    of_all = token_weights("sequences", kept, **totals, denominator_mask_BT=mask)
    assert of_all.flatten().tolist() == pytest.approx([0.25, 0, 0, 0, 0, 0])
    nothing = token_weights("tokens", mask, total_tokens=0, total_sequences=0, max_tokens=0)
    assert (nothing == 0).all()


@pytest.mark.parametrize("name", list(LOSSES))
def test_padding_and_weights_carry_no_gradient(name):
    mask = torch.tensor([[True, True, False]])
    logprobs = torch.tensor([[-1.0, -2.0, math.nan]], requires_grad=True)
    sampler = torch.tensor([[-1.1, -1.9, -math.inf]], requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0, math.nan]], requires_grad=True)
    weights = torch.tensor([[0.5, 2.0, math.nan]], requires_grad=True)
    loss, _ = policy_loss(LOSSES[name](), logprobs, sampler, advantages, mask, weights_BT=weights)
    loss.sum().backward()
    assert loss[0, 2] == 0.0
    assert logprobs.grad[0, 2] == 0.0
    assert torch.isfinite(logprobs.grad).all()
    assert sampler.grad is advantages.grad is weights.grad is None


@pytest.mark.parametrize("name", list(LOSSES))
@settings(max_examples=10)
@given(shift=st.floats(-1e6, 1e6), advantage=st.floats(-1e3, 1e3))
def test_far_off_policy_stays_finite(name, shift, advantage):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    sampler = torch.tensor([[-1.0 - shift, -1.0]])
    loss, sums = policy_loss(LOSSES[name](), logprobs, sampler, torch.full((1, 2), advantage), torch.ones(1, 2).bool())
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()
    assert math.isfinite(loss_metrics(sums)["val/ratio_var"])
    for logs, power, decay in ((20.0, 2.0, 3.0), (20.0, 1.0, 0.0), (1.0, 2.0, 0.0)):
        assert not sequence_weight(torch.full((1, 400), logs), torch.ones(1, 400).bool(), power, decay).any()


@pytest.mark.usefixtures("unchecked")
def test_log_probabilities_that_are_not_finite_are_named():
    good, mask = torch.zeros(1, 3), torch.ones(1, 3).bool()
    undefined = torch.tensor([[0.0, math.nan, 0.0]])
    with pytest.raises(ValueError, match="trainer logprob is nan at completion 0, token 1"):
        policy_loss(PPO(), undefined, good, good, mask)
    with pytest.raises(ValueError, match="sampler logprob is -inf"):
        policy_loss(PPO(), good, good - math.inf, good, mask)


def test_metrics_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    new = torch.log(torch.tensor([[0.75, 0.25], [0.5, 1.0]], dtype=torch.float64))
    old = torch.log(torch.tensor([[0.5, 0.5], [0.5, 1.0]], dtype=torch.float64))
    advantages = torch.tensor([[1.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    metrics = loss_metrics(policy_loss(PPO(), new, old, advantages, mask)[1])
    ratios = [1.5, 0.5, 1.0]
    logs = [math.log(r) for r in ratios]
    assert metrics == pytest.approx(
        {
            "val/ratio": 1.0, "val/ratio_var": 0.5 / 3, "policy/approxkl_avg": sum(v * v for v in logs) / 6,
            "policy/clipfrac_avg": 2 / 3, "clip_ratio/low_mean": 1 / 3, "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 3, "clip_ratio/high_max": 0.5, "clip_ratio/region_mean": 2 / 3,
            "kl_sample_train_v1": -sum(logs) / 3, "kl_sample_train_v2": sum(v * v for v in logs) / 6,
            "kl_divergence_inference": sum(r - 1 - v for r, v in zip(ratios, logs, strict=True)) / 3,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("divergence", "limit", "kept"), [("tv", 0.15, [1, 0, 1, 0, 1, 1]), ("kl", 0.05, [0, 0, 1, 0, 1, 1])]
)
def test_dppo_by_the_papers_cases(divergence, limit, kept):
    """−sg(keep·min(ρ, c))·A·log π (arXiv 2602.04879), and its gradient; the last token is far away and led back."""
    sampler = [0.90, 0.50, 0.01, 0.90, 0.30, 0.90]
    now = [0.99, 0.70, 0.05, 0.70, 0.20, 0.10]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, 0.5]
    ratios = [p / m for p, m in zip(now, sampler, strict=True)]
    new, old = (torch.tensor([values], dtype=torch.float64).log() for values in (now, sampler))
    given, mask = torch.tensor([advantages], dtype=torch.float64), torch.ones(1, 6, dtype=torch.bool)
    loss, sums = policy_loss(DPPO(divergence, limit, 4.0), new.requires_grad_(), old, given, mask)
    loss.sum().backward()
    slopes = [-keep * min(ratio, 4.0) * a for keep, ratio, a in zip(kept, ratios, advantages, strict=True)]
    assert new.grad[0].tolist() == pytest.approx(slopes)
    metrics = loss_metrics(sums)
    assert metrics["clip_ratio/high_mean"] == pytest.approx(kept[:3].count(0) / 6)  # good tokens that have gone far
    assert metrics["clip_ratio/low_mean"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(("sampler", "now", "advantage"), [(0.5, 1.0, 1.0), (1.0, 0.5, -1.0)])
def test_dppo_with_a_certain_token(sampler, now, advantage):
    """The divergence is finite and large where one of the two is sure of the token."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    new, old = (torch.tensor([[p]], dtype=torch.float64).log() for p in (now, sampler))
    loss, sums = policy_loss(DPPO("kl"), new, old, torch.full_like(new, advantage), mask)
    assert float(loss) == 0.0
    assert float(sums["clip_high"] if advantage > 0 else sums["clip_low"]) == 1.0


def test_sapo_by_hand():
    """arXiv 2511.20347: a gate that is 1 on policy, for every temperature, and falls off on both sides."""
    for ratio, advantage, loss, slope in ((1.5, 1.0, -2.489837, -1.410022), (0.5, -1.0, 1.415938, 0.467070)):
        losses, slopes, _ = loss_and_slope("sapo", [advantage], [ratio])
        assert (losses[0], slopes[0]) == (pytest.approx(loss, abs=1e-6), pytest.approx(slope, abs=1e-6))
    for tau in ((0.3, 7.0), (5.0, 0.1)):
        assert loss_and_slope("sapo", [0.7, -0.4], [1.0, 1.0], tau_positive=tau[0], tau_negative=tau[1])[
            1
        ] == pytest.approx([-0.7, 0.4])


def test_vespo_by_hand():
    """arXiv 2602.10693: φ at four products, its maximum at W = k/λ, and (1, 0) is sequence importance sampling."""
    for product, better, worse in (
        (0.5, 1.120422, 0.339785), (1.0, 1.0, 1.0), (2.0, 0.199148, 1.082682), (4.0, 0.001975, 0.158640),
    ):  # fmt: skip
        ratios = [product**0.25, product**0.75]  # two tokens: it is their product that counts
        assert loss_and_slope("vespo", [1.0, 0.0], ratios)[1][0] == pytest.approx(-better, abs=1e-6)
        assert loss_and_slope("vespo", [0.0, -1.0], ratios)[1][1] == pytest.approx(worse, abs=1e-6)
    plain = {"positive": (1.0, 0.0), "negative": (1.0, 0.0)}
    assert loss_and_slope("vespo", [1.0, -2.0], [1.5, 0.8], **plain)[1] == pytest.approx([-1.2, 2.4])
    assert loss_and_slope("vespo", [0.5], [2.0])[1] == pytest.approx([-0.5 * 0.199148], abs=1e-6)


def test_gspo_is_its_token_form():
    """arXiv 2507.18071: with advantages of single tokens each has the slope of its own, times the sequence's ratio."""
    ratios = [math.exp(x) for x in (0.3, -0.1, 0.1)]
    _, slopes, _ = loss_and_slope("gspo", [1.0, 0.0, -1.0], ratios, clip_eps=0.2)
    assert [slope / 3 for slope in slopes] == pytest.approx([-0.368390, 0.0, 0.368390], abs=1e-6)
    assert loss_and_slope("gspo", [1.0], [1.1])[1] == pytest.approx([-1.1])


def test_kl_estimators_by_enumeration():
    """Expected value and expected gradient over every token of a small vocabulary, sampled from the policy."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(1, 7, generator=draw, dtype=torch.float64).requires_grad_()
    reference = torch.randn(1, 7, generator=draw, dtype=torch.float64).log_softmax(-1)
    everything = torch.ones(1, 7, dtype=torch.bool)
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp().detach()
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (slope,) = torch.autograd.grad(exact, logits, retain_graph=True)
    gradients = {}
    for kind in ("k1", "k2", "k3"):
        expected = (p * sampled_token_kl(kind, logprobs, reference, everything)).sum()
        (gradients[kind],) = torch.autograd.grad(expected, logits, retain_graph=True)
        if kind in ("k1", "k3"):
            assert expected.item() == pytest.approx(exact.item())
    assert torch.allclose(gradients["k2"], slope, atol=1e-12)  # right in the loss
    assert gradients["k1"].abs().max() < 1e-12  # in the loss it would do nothing
    assert torch.allclose(gradients["k3"], p - reference.exp(), atol=1e-12)  # the forward divergence's
