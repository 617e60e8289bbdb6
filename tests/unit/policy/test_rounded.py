from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lanes import gradient, local_policy, objective, relative_gap, rollout, totals, trained
from torch import nn

from retrain.policy.arithmetic import NARROW, rounded_linear
from retrain.policy.packing import Budget
from retrain.threads import Workers
from retrain.types import StepBatch, Want


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_rounded_factors(bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48, bias=bias).requires_grad_(False), torch.randn(2, 30, 64, requires_grad=True)
    a, b = (torch.randn(4, 64) / 8).requires_grad_(), torch.randn(48, 4).requires_grad_()

    def plain(narrow) -> torch.Tensor:  # each factor rounded, sums in double precision
        low = narrow(x) @ narrow(a).T
        out = narrow(x) @ narrow(layer.weight).T + low @ narrow(b * 0.5).T
        return out + layer.bias.double() if bias else out

    found, told = rounded_linear(layer, x, a, b, 0.5), plain(lambda t: t.to(NARROW).double())
    assert found.dtype == torch.float32
    assert 0 < relative_gap(found.double(), told) < 5e-3
    toward = torch.randn(2, 30, 48)
    own = torch.autograd.grad(found, (x, a, b), toward)
    others = torch.autograd.grad(plain(torch.Tensor.double), (x, a, b), toward.double())
    for one, other in zip(own, others, strict=True):
        assert one.dtype == torch.float32
        assert 0 < relative_gap(one, other) < 2e-2


def test_the_ratio_on_policy_stays_near_one_for_every_split(base, lanes):
    """The gradient is that of fp32 for every split, up to rounding; and other threads do not round."""
    samples, terms = rollout(base, lanes, trained(lanes, 0)), {"kl_coef": 0.1, "entropy_coef": 0.1}
    plain, exact = gradient(lanes, samples, **terms)
    whole, metrics = gradient(lanes, samples, bfloat16=True, **terms)
    assert whole.dtype == torch.float32
    assert 1e-4 < relative_gap(whole, plain) < 0.1
    assert torch.equal(gradient(lanes, samples, **terms)[0], plain)  # nothing is left behind
    assert exact["kl_sample_train_v2"] < 1e-8
    assert 1e-8 < metrics["kl_sample_train_v2"] < 1e-3
    assert exact["val/ratio"] != metrics["val/ratio"] == pytest.approx(1, abs=5e-3)
    for tokens in (1, 100):
        split, others = gradient(lanes, samples, bfloat16=True, micro_batch_tokens=tokens, **terms)
        assert relative_gap(split, whole) < 0.02
        assert others["loss"] == pytest.approx(metrics["loss"], abs=2e-3)
    workers = Workers(4)
    mixed = workers.map(lambda seed: gradient(lanes, samples, seed, bfloat16=seed % 2 == 1)[0], range(4))
    workers.close()
    for seed, flat in enumerate(mixed):
        assert torch.equal(flat, gradient(lanes, samples, seed, bfloat16=seed % 2 == 1)[0])


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("options", [{}, {"kl_coef": 0.1}, {"dropout": 0.3}], ids=str)
def test_side_by_side_or_computed_twice_no_bit_changes(base, lanes, options, bfloat16):
    samples, results = rollout(base, lanes, trained(lanes, 0)), []
    for count, twice in ((1, False), *([] if options.get("dropout") else [(3, False), (3, True)]), (1, True)):
        workers = Workers(count)  # with dropout a run has one worker
        budget = Budget(80, checkpointing=twice)
        keys = {"bfloat16": bfloat16, "budget": budget, "workers": workers, **options}
        flat, metrics = gradient(lanes, samples, **keys)
        results.append((flat, metrics["loss"], metrics["val/ratio"]))
        workers.close()
    (flat, *numbers), *others = results
    assert all(torch.equal(flat, other) and rest == numbers for other, *rest in others)


def test_scores_are_computed_as_the_update_computes_them(base, lanes):
    """Later updates of a batch take their ratio against them."""
    samples, logprobs = rollout(base, lanes, trained(lanes, 0)), []
    for dtype in ("model", "bfloat16"):
        policy = local_policy(base, lanes, training={"update_dtype": dtype})
        scores = policy.score(samples, frozenset({Want.LOGPROBS})).logprobs
        logprobs.append(np.concatenate(scores))
        scored = []
        for sample, of_actions in zip(samples, scores, strict=True):
            old = np.zeros(len(sample))
            old[sample.action_mask] = of_actions
            scored.append(replace(sample, old_logprobs=old))
        numbers = policy.update(StepBatch(scored, totals(scored), 0, ("s",)), objective(), 1e-3).metrics
        assert numbers["val/ratio"] == pytest.approx(1, abs=1e-6)
    assert 1e-5 < np.abs(logprobs[0] - logprobs[1]).max() < 0.2
