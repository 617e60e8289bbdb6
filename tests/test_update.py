# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportOptionalSubscript=false
# (gradients are None only before the first backward pass)
"""One optimizer step: on-policy ratio, micro-batch independence, skipped groups, failure without damage."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from lane_cases import rollout, totals, trained
from retrain.policy.trunk import trunk_of
from toymodels import toy_base

from retrain.errors import NonFinite, RunFailed
from retrain.maths.losses import MISMATCH_METRICS, RATIO_METRICS
from retrain.policy.budget import Budget
from retrain.policy.logprobs import TrainSequence, collate, split_microbatches, token_logprobs
from retrain.policy.threads import Workers
from retrain.policy.update import Denominators, LossSettings, new_optimizer, train_step
from retrain.record.catalogue import TIMED_PARTS
from retrain.rng import generator


@pytest.fixture(scope="module", params=["float32", "float64"])
def base(request, tmp_path_factory):
    return toy_base(tmp_path_factory.mktemp("toy"), request.param)


def gradient(base, lanes, seed, sequences, settings, denominators=None):
    adapter = trained(lanes, seed)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    metrics = train_step(base, lanes, adapter, optimizer, sequences, settings, denominators or totals(sequences), 1e-3)
    return adapter.flat.grad.clone(), metrics


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_on_policy_ratio_is_one_at_any_temperature(base, lanes, temperature, loss):
    sequences = rollout(base, lanes, trained(lanes, 0), temperature)
    settings = LossSettings(loss=loss, temperature=temperature, grad_clip_norm=0)
    _, metrics = gradient(base, lanes, 0, sequences, settings)
    assert abs(metrics["val/ratio"] - 1) < 1e-5
    assert metrics["val/ratio_var"] < 1e-9
    assert metrics["kl_sample_train_v2"] < 1e-6
    assert metrics["clip_ratio/region_mean"] == 0


def test_all_losses_have_the_same_gradient_on_policy(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    grads = [
        gradient(base, lanes, 0, sequences, LossSettings(loss=loss, grad_clip_norm=0))[0]
        for loss in ("ppo", "reinforce", "gspo", "cispo")
    ]
    for other in grads[1:]:
        assert torch.allclose(grads[0], other, atol=1e-5 * float(grads[0].abs().max()), rtol=1e-3)


@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "constant"])
def test_every_micro_batch_split_gives_the_same_gradient(base, lanes, normalizer):
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings = LossSettings(normalizer=normalizer, max_tokens=12, grad_clip_norm=0)
    whole, metrics = gradient(base, lanes, 0, sequences, settings)
    assert whole.norm() > 0
    for budget in (1, 40, 100):
        split, other = gradient(base, lanes, 0, sequences, replace(settings, micro_batch_tokens=budget))
        assert len(split_microbatches(sequences, budget)) > 1
        assert float((split - whole).norm() / whole.norm()) < 1e-6 * (1 if base.dtype == torch.float64 else 10)
        assert other["loss"] == pytest.approx(metrics["loss"], abs=1e-6)


def test_groups_without_signal_cost_nothing_and_change_nothing(base, lanes):
    """A zero advantage has no gradient; leaving its sequence out must leave the update alone."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    for s in sequences[:6]:
        s.advantages_T = np.zeros(len(s.completion_ids))
    settings = LossSettings(grad_clip_norm=0)
    whole, _ = gradient(base, lanes, 0, sequences, settings)
    without, _ = gradient(base, lanes, 0, sequences[6:], settings, totals(sequences))
    assert float((without - whole).norm() / whole.norm()) < 1e-5


EVERYTHING = {
    "dual_clip": {"dual_clip": 1.5, "clip_high": 0.1},
    "tis": {"tis_cap": 1.05},
    "icepop": {"icepop_band": (0.9, 1.2)},
    "kl": {"kl_coef": 0.7},
    "entropy": {"entropy_coef": 0.3},
    "all": {"tis_cap": 1.05, "kl_coef": 0.7, "entropy_coef": 0.3},
}


def off_policy(base, lanes) -> list[TrainSequence]:
    """The same, with sampler logprobs that differ from the trainer's by up to about half a nat."""
    noise = generator("mismatch")
    return [
        replace(s, sampler_logprobs_T=s.sampler_logprobs_T + noise.normal(size=len(s.completion_ids)) / 4)
        for s in rollout(base, lanes, trained(lanes, 0))
    ]


@pytest.mark.parametrize("options", EVERYTHING.values(), ids=EVERYTHING)
@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "constant"])
def test_every_micro_batch_split_gives_the_same_gradient_with_every_term(base, lanes, options, normalizer):
    sequences = off_policy(base, lanes)
    settings = LossSettings(normalizer=normalizer, max_tokens=12, grad_clip_norm=0, **options)
    whole, metrics = gradient(base, lanes, 0, sequences, settings)
    plain, _ = gradient(base, lanes, 0, sequences, LossSettings(normalizer=normalizer, max_tokens=12, grad_clip_norm=0))
    assert float((whole - plain).norm()) > 1e-3 * float(plain.norm())  # the term does something
    for budget in (1, 60):
        split, other = gradient(base, lanes, 0, sequences, replace(settings, micro_batch_tokens=budget))
        assert float((split - whole).norm() / whole.norm()) < 1e-6 * (1 if base.dtype == torch.float64 else 10)
        assert other["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        for key in ("kl", "objective/non_score_reward", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert other.get(key) == pytest.approx(metrics.get(key), abs=1e-5)


@pytest.mark.parametrize("options", [{"tis_cap": 2.0}, {"icepop_band": (0.5, 2.0)}], ids=["tis", "icepop"])
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_a_mismatch_weight_of_one_is_an_exact_no_op(base, lanes, loss, options):
    sequences = rollout(base, lanes, trained(lanes, 0))
    for s in sequences:  # the sampler's logprobs are those of the update, to the last bit
        batch = collate([s], base)
        with torch.no_grad(), lanes.single(trained(lanes, 0)):
            s.sampler_logprobs_T = token_logprobs(base, batch, 1.0)[0][0].double().numpy()
    settings = LossSettings(loss=loss, grad_clip_norm=0, micro_batch_tokens=1)
    without, before = gradient(base, lanes, 0, sequences, settings)
    corrected, after = gradient(base, lanes, 0, sequences, replace(settings, **options))
    assert torch.equal(without, corrected)
    assert before["val/ratio"] == after["val/ratio"] == 1.0
    assert before["loss"] == after["loss"]


def corrected_gradient(base, lanes, sequences, weight):
    """Autograd, one sequence at a time, of −Σ weight(ρ)·A·log π / tokens with ρ = π/π_sampler held constant."""
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    for s in sequences:
        with lanes.single(adapter):
            logp = token_logprobs(base, collate([s], base), 1.0)[0][0]
            ratio = (logp.detach() - torch.from_numpy(s.sampler_logprobs_T).to(logp)).exp()
            terms = weight(ratio) * torch.from_numpy(s.advantages_T).to(logp) * logp
            (-terms.sum() / totals(sequences).tokens).backward()
    return adapter.flat.grad.clone()


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_truncated_importance_sampling_and_icepop_by_their_formulas(base, lanes, loss):
    """w·A·∇log π with w = min(ρ, C), or ρ inside the band and 0 outside: the ratio counts once, not twice."""
    sequences = off_policy(base, lanes)
    rules = {
        "tis": ({"tis_cap": 1.05}, lambda ratio: ratio.clamp(max=1.05)),
        "icepop": ({"icepop_band": (0.9, 1.2)}, lambda ratio: ratio * ((ratio >= 0.9) & (ratio <= 1.2))),
    }
    for options, weight in rules.values():
        settings = LossSettings(loss=loss, grad_clip_norm=0, **options)
        grad, metrics = gradient(base, lanes, 0, sequences, settings)
        expected = corrected_gradient(base, lanes, sequences, weight)
        assert float((grad - expected).norm() / expected.norm()) < 1e-4
        assert 0.1 < metrics["clip_ratio/high_mean"] < 0.9  # the share that the cap or the band cuts
        assert (metrics["clip_ratio/low_mean"] > 0.1) == ("icepop_band" in options)
        assert metrics["kl_sample_train_v2"] > 0.01  # still of the sampler, not of the corrected ratio


def test_dual_clip_bounds_the_loss_of_a_bad_token(base, lanes):
    """A < 0 and ρ far above 1: plain ppo pushes with ρ·A, dual clip stops at c·A and lets the token rest."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    for s in sequences:
        s.sampler_logprobs_T = s.sampler_logprobs_T - np.log(4.0)
        s.advantages_T = -np.ones(len(s.completion_ids))
    settings = LossSettings(grad_clip_norm=0)
    plain, metrics = gradient(base, lanes, 0, sequences, settings)
    clipped, other = gradient(base, lanes, 0, sequences, replace(settings, dual_clip=3.0))
    assert plain.norm() > 0
    assert metrics["loss"] == pytest.approx(4.0, rel=1e-3)
    assert clipped.norm() == 0
    assert other["loss"] == pytest.approx(3.0, rel=1e-6)


def without_advantages(base, lanes, adapter) -> list[TrainSequence]:
    sequences = rollout(base, lanes, adapter)
    return [replace(s, advantages_T=np.zeros(len(s.completion_ids))) for s in sequences]


def test_the_kl_of_a_fresh_adapter_is_zero_with_zero_gradient(base, lanes):
    adapter = lanes.new_adapter(4, 8).initialise("fresh")
    sequences = without_advantages(base, lanes, adapter)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    settings = LossSettings(kl_coef=0.5, grad_clip_norm=0)
    metrics = train_step(base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3)
    assert metrics["kl"] == 0
    assert metrics["loss"] == 0
    assert metrics["objective/non_score_reward"] == 0
    assert float(adapter.flat.grad.norm()) == 0


def test_kl_terms_against_autograd_and_what_is_recorded(base, lanes):
    """k2 = ½(log π − log ref)² in the loss, k3 in the records; the reference is the base with no adapter."""
    sequences = without_advantages(base, lanes, trained(lanes, 0))
    settings = LossSettings(kl_coef=0.5, grad_clip_norm=0)
    grad, metrics = gradient(base, lanes, 0, sequences, settings)
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    tokens, k2, k3 = totals(sequences).tokens, 0.0, 0.0
    for s in sequences:
        batch = collate([s], base)
        with torch.no_grad():
            reference = token_logprobs(base, batch, 1.0)[0]
        with lanes.single(adapter):
            difference = token_logprobs(base, batch, 1.0)[0] - reference
            (0.25 * difference.square().sum() / tokens).backward()
        k2 += 0.25 * float(difference.detach().square().sum()) / tokens
        k3 += float((torch.exp(-difference.detach()) - 1 + difference.detach()).sum())
    assert float((adapter.flat.grad - grad).norm() / grad.norm()) < 1e-4
    assert metrics["loss"] == pytest.approx(k2, rel=1e-4)
    assert metrics["kl"] == pytest.approx(k3 / tokens, rel=1e-4)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.5 * k3 / len(sequences), rel=1e-4)
    _, logged = gradient(base, lanes, 0, sequences, LossSettings(log_kl=True, grad_clip_norm=0))
    assert logged["kl"] == metrics["kl"]
    assert logged["loss"] == 0


def test_the_kl_term_pulls_the_adapter_back_to_the_base(base, lanes):
    adapter = trained(lanes, 0)
    sequences = without_advantages(base, lanes, adapter)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    settings = LossSettings(kl_coef=1.0, grad_clip_norm=0)
    seen = [
        train_step(base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 5e-3)["kl"]
        for _ in range(6)
    ]
    assert seen[-1] < 0.7 * seen[0]


def test_the_entropy_bonus_raises_the_entropy(base, lanes):
    adapter = trained(lanes, 0)
    sequences = without_advantages(base, lanes, adapter)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    batch = collate(sequences, base)

    def entropy() -> float:
        with torch.no_grad(), lanes.single(adapter):
            entropy_BT = token_logprobs(base, batch, 1.0, entropy=True)[1]
        return float(entropy_BT[batch.loss_mask_BT].mean())

    settings, before = LossSettings(entropy_coef=0.5, grad_clip_norm=0), entropy()
    losses = [
        train_step(base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 2e-3)["loss"]
        for _ in range(5)
    ]
    assert losses[0] == pytest.approx(-0.5 * before, rel=1e-4)
    assert entropy() > before + 0.01


def test_gradient_is_that_of_the_plain_formula(base, lanes):
    """Against autograd through one unpadded sequence at a time."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    grad, metrics = gradient(base, lanes, 0, sequences, LossSettings(loss="reinforce", grad_clip_norm=0))
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    tokens, total = totals(sequences).tokens, 0.0
    for s in sequences:
        ids = torch.tensor([list(s.prompt_ids) + list(s.completion_ids)])
        with lanes.single(adapter):
            logits = base.model(input_ids=ids).logits[0, len(s.prompt_ids) - 1 : -1]
            logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(s.completion_ids)[:, None])[:, 0]
            loss = -(torch.from_numpy(s.advantages_T).to(logp) * logp).sum() / tokens
            loss.backward()
        total += loss.item()
    assert float((adapter.flat.grad - grad).norm() / grad.norm()) < 1e-4
    assert metrics["loss"] == pytest.approx(total, rel=1e-3)


def test_clipping_and_the_first_adamw_step(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    metrics = train_step(
        base, lanes, adapter, optimizer, sequences, LossSettings(grad_clip_norm=0.01), totals(sequences), 5e-3
    )
    assert metrics["optim/grad_norm"] > 0.01
    assert metrics["optim/grad_clipped"]
    assert float(adapter.flat.grad.norm()) == pytest.approx(0.01, rel=1e-3)
    moved = (adapter.flat.detach() - before).abs()
    assert float(moved.max()) == pytest.approx(5e-3, rel=1e-2)  # AdamW's first step is lr·sign(gradient)


def test_no_sequences_is_a_step_that_changes_nothing(base, lanes):
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.1)
    metrics = train_step(base, lanes, adapter, optimizer, [], LossSettings(), Denominators(0, 0), 1e-3)
    assert torch.equal(before, adapter.flat)
    assert metrics["loss"] == 0
    assert metrics["val/ratio"] is None


def score(base, lanes, adapter, probe, settings=None):
    """What a step without sequences tells of ``probe``; sees that neither weights nor optimizer move."""
    before, optimizer = adapter.flat.detach().clone(), new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.1)
    settings = settings or LossSettings()
    version = adapter.flat._version
    metrics = train_step(base, lanes, adapter, optimizer, [], settings, Denominators(7, 2), 1e-3, probe=probe)
    assert torch.equal(before, adapter.flat)
    assert adapter.flat._version == version
    assert not optimizer.state
    return metrics


def test_where_nothing_trains_sampler_and_trainer_are_compared_on_a_probe(base, lanes):
    """The same numbers as of training these sequences, with an own loss untouched and no ratio or clipping told."""
    adapter = trained(lanes, 0)
    probe = [replace(s, advantages_T=np.zeros(len(s.completion_ids))) for s in off_policy(base, lanes)[:4]]
    metrics = score(base, lanes, adapter, probe)
    _, expected = gradient(base, lanes, 0, [replace(s, advantages_T=s.advantages_T + 1) for s in probe], LossSettings())
    for key in MISMATCH_METRICS:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5)
        assert metrics[key] > 1e-3 or key == "kl_sample_train_v1"
    assert {metrics[key] for key in RATIO_METRICS if key not in MISMATCH_METRICS} == {None}
    assert (metrics["num_datums"], metrics["loss"], "kl" in metrics) == (0, 0.0, False)
    assert metrics["timing_microbatches"] == 1
    assert metrics["timing_forward_total"] > 0

    def own_loss(*_):
        raise AssertionError("a user's loss is for what trains")

    other = score(base, lanes, adapter, probe, LossSettings(loss=own_loss, entropy_coef=0.1, tis_cap=2.0, kl_coef=0.5))
    assert [other[key] for key in MISMATCH_METRICS] == pytest.approx([metrics[key] for key in MISMATCH_METRICS])
    _, with_kl = gradient(base, lanes, 0, probe, LossSettings(kl_coef=0.5))
    for key in ("kl", "objective/non_score_reward"):
        assert other[key] == pytest.approx(with_kl[key], rel=1e-5)
        assert abs(other[key]) > 1e-4
    logged = score(base, lanes, adapter, probe, LossSettings(log_kl=True))
    assert (logged["kl"], logged["objective/non_score_reward"]) == (other["kl"], 0.0)


def test_a_probe_that_the_trainer_cannot_score_counts_as_a_step_that_is_not_finite(base, lanes):
    probe = [replace(s, advantages_T=np.zeros(len(s.completion_ids))) for s in rollout(base, lanes, trained(lanes, 0))]
    broken = trained(lanes, 0)
    with torch.no_grad():
        broken.flat.fill_(torch.nan)
    optimizer = new_optimizer(broken, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    with pytest.raises(NonFinite, match="trainer logprob is nan"):
        train_step(base, lanes, broken, optimizer, [], LossSettings(), Denominators(0, 0), 1e-3, probe=probe[:4])


def test_groups_without_signal_change_no_bit_of_the_update(base, lanes):
    """What ``discard_group_zero_advantage`` decides: they are counted and scored, or not; the gradient is the same."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    uniform = [replace(s, advantages_T=np.zeros(len(s.completion_ids))) for s in sequences[:6]]
    for settings in (LossSettings(), LossSettings(normalizer="sequences", micro_batch_tokens=40)):
        kept, told = gradient(base, lanes, 0, [*uniform, *sequences[6:]], settings, totals(sequences))
        left_out, other = gradient(base, lanes, 0, sequences[6:], settings, totals(sequences))
        assert torch.equal(kept, left_out)
        assert told["loss"] == other["loss"]
        assert (told["num_datums"], other["num_datums"]) == (len(sequences), len(sequences) - 6)


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({}, {"compute_kl", "compute_entropy"}),
        ({"log_kl": True}, {"compute_entropy"}),
        ({"entropy_coef": 0.1, "kl_coef": 0.1}, set()),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_every_part_of_the_update_is_timed(base, lanes, options, zero, workers):
    """Each is in the catalogue, and 0 exactly where there is no such work; together they are within the step."""
    adapter, sequences = trained(lanes, 0), rollout(base, lanes, trained(lanes, 0))
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    settings = LossSettings(micro_batch_tokens=100, **options)
    begin = time.perf_counter()
    metrics = train_step(
        base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3, workers=Workers(workers)
    )
    whole = time.perf_counter() - begin
    parts = {key[7:-6]: value for key, value in metrics.items() if key.startswith("timing_") and key.endswith("_total")}
    assert set(parts) == set(TIMED_PARTS) - {"weight_sync_inference"}
    assert {part for part, seconds in parts.items() if seconds == 0} == zero
    assert sum(parts.values()) < 1.05 * whole
    signal = [s for s in sequences if s.advantages_T.any()]
    assert metrics["timing_microbatches"] == len(split_microbatches(signal, 100, packed=trunk_of(base).packs)) > 1


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    sequences[0].advantages_T = np.full(
        len(sequences[0].completion_ids), 1e300 if base.dtype == torch.float64 else 3e38
    )
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    with pytest.raises((RunFailed, ValueError)):
        train_step(base, lanes, adapter, optimizer, sequences, LossSettings(), Denominators(1, 1), 1e-3)
    assert torch.equal(before, adapter.flat)


def test_dropout_repeats_for_the_same_stream(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    grads = []
    for stream in (("a",), ("a",), ("b",)):
        adapter = trained(lanes, 0)
        optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
        settings = LossSettings(dropout=0.3, grad_clip_norm=0)
        train_step(base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3, stream)
        grads.append(adapter.flat.grad.clone())
    assert torch.equal(grads[0], grads[1])
    assert not torch.allclose(grads[0], grads[2])


def test_every_micro_batch_draws_its_own_dropout(base, lanes):
    """Twice the same completion in two micro-batches: two masks, so not twice the gradient of one."""
    one = max(rollout(base, lanes, trained(lanes, 0)), key=len)
    denominators = totals([one])
    for dropout in (0.0, 0.3):
        settings = LossSettings(dropout=dropout, grad_clip_norm=0, micro_batch_tokens=1)
        single, _ = gradient(base, lanes, 0, [one], settings, denominators)
        double, _ = gradient(base, lanes, 0, [one, one], settings, denominators)
        apart = float((double - 2 * single).norm() / single.norm())
        assert apart > 0.1 if dropout else apart < 1e-5


def test_updates_side_by_side_equal_one_after_the_other(base, lanes):
    """Each lane's update in a thread of its own: adapters, gradients and modes do not mix."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings = LossSettings(grad_clip_norm=0, micro_batch_tokens=60)
    one_by_one = [gradient(base, lanes, seed, sequences, settings)[0] for seed in range(4)]
    workers = Workers(4)
    together = workers.map(lambda seed: gradient(base, lanes, seed, sequences, settings)[0], range(4))
    workers.close()
    for alone, other in zip(one_by_one, together, strict=True):
        assert torch.equal(alone, other)


def test_micro_batches_side_by_side_change_no_bit(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings = LossSettings(grad_clip_norm=0, micro_batch_tokens=60, kl_coef=0.1)
    results = []
    for workers in (Workers(), Workers(3)):
        adapter = trained(lanes, 0)
        optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
        metrics = train_step(
            base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3, workers=workers
        )
        workers.close()
        results.append((adapter.flat.grad, adapter.flat.detach(), metrics["loss"], metrics["val/ratio"]))
    for alone, together in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(alone), torch.as_tensor(together))


def test_a_completion_without_signal_is_counted_but_not_differentiated(base, lanes, monkeypatch):
    sequences = rollout(base, lanes, trained(lanes, 0))
    for s in sequences[::2]:
        s.advantages_T = np.zeros(len(s.completion_ids))
    settings = LossSettings(grad_clip_norm=0)
    _, metrics = gradient(base, lanes, 0, sequences, settings)
    expected, _ = gradient(base, lanes, 0, sequences[1::2], settings, totals(sequences))
    trained_tokens = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: (trained_tokens.append(1), backward(self)))
    grad, counted = gradient(base, lanes, 0, sequences, replace(settings, micro_batch_tokens=1))
    assert len(trained_tokens) == len(sequences[1::2])
    assert float((grad - expected).norm() / expected.norm()) < 1e-5
    for key in ("val/ratio", "kl_sample_train_v2", "loss"):
        assert counted[key] == pytest.approx(metrics[key], abs=1e-6)
    with_kl = LossSettings(grad_clip_norm=0, micro_batch_tokens=1, kl_coef=0.1)
    gradient(base, lanes, 0, sequences, with_kl)
    assert len(trained_tokens) == len(sequences[1::2]) + len(sequences)


def test_signal_at_any_trained_token_is_signal(base, lanes):
    """Token credit may leave the first tokens of a completion without an advantage, or out of the loss."""
    sequences = rollout(base, lanes, trained(lanes, 0))
    for i, s in enumerate(sequences):
        place_T = np.arange(len(s.completion_ids))
        s.advantages_T, s.loss_mask_T = np.where(place_T == place_T[-1], 1.5, 0.0), place_T >= i % 2
    sequences = [s for s in sequences if len(s.completion_ids) > 2]
    grad, _ = gradient(base, lanes, 0, sequences, LossSettings(loss="reinforce", grad_clip_norm=0))
    expected, count = trained(lanes, 0), totals(sequences).tokens
    expected.flat.grad.zero_()
    for s in sequences:
        with lanes.single(expected):
            (-1.5 * token_logprobs(base, collate([s], base), 1.0)[0][0, -1] / count).backward()
    assert expected.flat.grad.norm() > 0
    assert float((grad - expected.flat.grad).norm() / expected.flat.grad.norm()) < 1e-4


@pytest.mark.parametrize("all_tokens", [False, True])
def test_sequence_means_count_the_tokens_that_the_denominator_names(base, lanes, all_tokens):
    """With an entropy mask, the length of a completion is that of its trained tokens, or of all of them."""
    sequences, expected = rollout(base, lanes, trained(lanes, 0)), 0.0
    for s in sequences:
        length = len(s.completion_ids)
        s.loss_mask_T = np.arange(length) % 3 == 0
        with torch.no_grad(), lanes.single(trained(lanes, 0)):
            ratio_T = token_logprobs(base, collate([s], base), 1.0)[0][0].double().numpy() - s.sampler_logprobs_T
        terms_T = -np.exp(ratio_T) * s.advantages_T * s.loss_mask_T
        expected += terms_T.sum() / (length if all_tokens else s.loss_mask_T.sum()) / len(sequences)
    settings = LossSettings(loss="ppo", normalizer="sequences", grad_clip_norm=0)
    denominators = Denominators(sum(len(s.completion_ids) for s in sequences), len(sequences), all_tokens)
    _, metrics = gradient(base, lanes, 0, sequences, settings, denominators)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_completion_without_a_trained_token_costs_nothing(base, lanes):
    sequences = rollout(base, lanes, trained(lanes, 0))
    masked = [replace(s, loss_mask_T=np.zeros(len(s.completion_ids), bool)) for s in sequences[:6]] + sequences[6:]
    settings = LossSettings(grad_clip_norm=0)
    whole, metrics = gradient(base, lanes, 0, masked, settings, totals(sequences))
    without, other = gradient(base, lanes, 0, sequences[6:], settings, totals(sequences))
    assert torch.equal(whole, without)
    assert metrics["num_datums"] == len(sequences)
    _, idle = gradient(base, lanes, 0, masked[:6], settings, totals(sequences))
    assert (idle["num_datums"], idle["loss"], "optim/grad_norm" in idle) == (0, 0.0, False)
    assert other["val/ratio"] == metrics["val/ratio"]


class SmallMemory(torch.nn.Module):
    """A base whose first layer runs out of memory above so many tokens."""

    def __init__(self, embedding, most: int, error: Exception):
        super().__init__()
        self.embedding, self.most, self.error, self.asked = embedding, most, error, []

    def forward(self, ids):
        self.asked.append(ids.numel())
        if ids.numel() > self.most:
            raise self.error
        return self.embedding(ids)

    @property
    def weight(self):
        return self.embedding.weight


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
]


@pytest.fixture
def small_memory(base):
    plain = base.model.get_input_embeddings()

    def shrink(most: int, error: Exception) -> SmallMemory:
        small = SmallMemory(plain, most, error)
        base.model.set_input_embeddings(small)
        return small

    yield shrink
    base.model.set_input_embeddings(plain)


@pytest.mark.parametrize("error", ERRORS, ids=["gpu", "cpu", "python"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_out_of_memory_is_made_again_with_half_the_tokens_and_remembered(
    base, lanes, small_memory, error, workers
):
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings = LossSettings(grad_clip_norm=0, micro_batch_tokens=1000)
    whole, expected = gradient(base, lanes, 0, sequences, settings)
    small = small_memory(70, error)
    adapter, budget, pool = trained(lanes, 0), Budget(1000), Workers(workers)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    job = (base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 0.0, (), budget, pool)
    metrics = train_step(*job)
    assert float((adapter.flat.grad - whole).norm() / whole.norm()) < 1e-5
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert budget.tokens <= 70 * 2
    assert not budget.checkpointing
    notes = budget.take_notes()
    assert len(notes) >= 1
    assert "made again with" in notes[0]
    failed, small.asked[:] = max(small.asked), []
    train_step(*job)
    pool.close()
    assert failed > 70 >= max(small.asked)  # remembered: no second failure
    assert budget.take_notes() == []
    later = Budget(1000)
    later.restore(budget.state())
    assert later.tokens == budget.tokens
    smaller = Budget(8)
    smaller.restore(budget.state())
    assert smaller.tokens == 8


def test_one_sequence_at_a_time_then_layers_twice_then_a_clear_end(base, lanes, small_memory):
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings = LossSettings(grad_clip_norm=0)
    small_memory(3, ERRORS[0])
    adapter, budget = trained(lanes, 0), Budget(1000)
    before = adapter.flat.detach().clone()
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    with pytest.raises(RunFailed, match=r"one sequence of \d+ tokens does not fit .* max_tokens"):
        train_step(base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3, budget=budget)
    assert budget.checkpointing
    assert torch.equal(before, adapter.flat)
    assert any("computed twice" in note for note in budget.take_notes())


@pytest.mark.parametrize(
    ("options", "workers"),
    [({}, 1), ({"dropout": 0.3}, 1), ({"kl_coef": 0.2, "entropy_coef": 0.1}, 1), ({}, 2)],
    ids=str,
)
def test_layers_computed_twice_give_the_same_gradient_and_keep_less(base, lanes, options, workers):
    sequences = rollout(base, lanes, trained(lanes, 0))
    settings, results = LossSettings(grad_clip_norm=0, micro_batch_tokens=80, **options), []
    for twice in (False, True):
        kept, adapter, pool = [], trained(lanes, 0), Workers(workers)
        optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            train_step(
                base, lanes, adapter, optimizer, sequences, settings, totals(sequences), 1e-3, ("s",),
                Budget(80, checkpointing=twice), pool,
            )  # fmt: skip
        pool.close()
        results.append((adapter.flat.grad.clone(), sum(kept)))
    (once, much), (again, little) = results
    assert torch.equal(once, again)
    if workers == 1:
        assert little < 0.7 * much


def test_another_error_is_no_reason_to_try_again(base, lanes, small_memory):
    sequences = rollout(base, lanes, trained(lanes, 0))
    small = small_memory(3, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    adapter = trained(lanes, 0)
    optimizer = new_optimizer(adapter, 1e-3, (0.9, 0.999), 1e-8, 0.0)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        train_step(base, lanes, adapter, optimizer, sequences, LossSettings(), totals(sequences), 1e-3)
    assert len(small.asked) == 1
