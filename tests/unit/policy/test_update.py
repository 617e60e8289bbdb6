# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportOptionalSubscript=false
# (gradients are None only before the first backward pass)
"""One optimizer step: on-policy ratio, micro-batch independence, skipped groups, failure without damage."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from lane_cases import (
    adamw,
    drawn,
    fresh_logits,
    in_turns,
    objective,
    rollout,
    totals,
    trained,
    update,
    with_tokens,
)
from toymodels import toy_base

from retrain.algorithms.standard import assign_credit, fill_advantages
from retrain.config import parse_dict
from retrain.errors import NonFinite, RunFailed
from retrain.maths.corrections import Correction
from retrain.maths.losses import MISMATCH_METRICS, RATIO_METRICS
from retrain.policy.backbone import backbone_of
from retrain.policy.budget import Budget
from retrain.policy.logprobs import collate, split_microbatches, token_logprobs
from retrain.policy.lora import Lanes
from retrain.policy.objective import objective_of
from retrain.policy.protocol import Denominators, Want, samples_of
from retrain.policy.threads import Workers
from retrain.record.catalogue import TIMED_PARTS
from retrain.rng import generator
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Sample, single_turn


@pytest.fixture(scope="module", params=["float32", "float64"])
def base(request, tmp_path_factory):
    return toy_base(tmp_path_factory.mktemp("toy"), request.param)


def gradient(lanes, seed, samples, **keys):
    """The gradient of one step of a trained adapter, and what the step told."""
    adapter = trained(lanes, seed)
    metrics = update(lanes, adapter, samples, **keys)
    return adapter.flat.grad.clone(), metrics


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_on_policy_ratio_is_one_at_any_temperature(base, lanes, temperature, loss):
    samples = rollout(base, lanes, trained(lanes, 0), temperature)
    _, metrics = gradient(lanes, 0, samples, loss=loss, temperature=temperature)
    assert abs(metrics["val/ratio"] - 1) < 1e-5
    assert metrics["val/ratio_var"] < 1e-9
    assert metrics["kl_sample_train_v2"] < 1e-6
    assert metrics["clip_ratio/region_mean"] == 0


def test_all_losses_have_the_same_gradient_on_policy(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    grads = [gradient(lanes, 0, samples, loss=loss)[0] for loss in ("ppo", "reinforce", "gspo", "cispo")]
    for other in grads[1:]:
        assert torch.allclose(grads[0], other, atol=1e-5 * float(grads[0].abs().max()), rtol=1e-3)


@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "constant"])
def test_every_micro_batch_split_gives_the_same_gradient(base, lanes, normalizer):
    samples = rollout(base, lanes, trained(lanes, 0))
    settings = {"normalizer": normalizer, "max_tokens": 12}
    whole, metrics = gradient(lanes, 0, samples, **settings)
    assert whole.norm() > 0
    for budget in (1, 40, 100):
        split, other = gradient(lanes, 0, samples, **settings, micro_batch_tokens=budget)
        assert len(split_microbatches(samples, budget)) > 1
        assert float((split - whole).norm() / whole.norm()) < 1e-6 * (1 if base.dtype == torch.float64 else 10)
        assert other["loss"] == pytest.approx(metrics["loss"], abs=1e-6)


def test_groups_without_signal_cost_nothing_and_change_nothing(base, lanes):
    """A zero advantage has no gradient; leaving its sequence out must leave the update alone."""
    samples = rollout(base, lanes, trained(lanes, 0))
    samples[:6] = [with_tokens(s, advantages=0) for s in samples[:6]]
    whole, _ = gradient(lanes, 0, samples)
    without, _ = gradient(lanes, 0, samples[6:], denominators=totals(samples))
    assert float((without - whole).norm() / whole.norm()) < 1e-5


EVERYTHING = {
    "dual_clip": {"dual_clip": 1.5, "clip_high": 0.1},
    "tis": {"correction": Correction("tis", high=1.05)},
    "icepop": {"correction": Correction("icepop", 0.9, 1.2)},
    "kl": {"kl_coef": 0.7},
    "entropy": {"entropy_coef": 0.3},
    "all": {"correction": Correction("tis", high=1.05), "kl_coef": 0.7, "entropy_coef": 0.3},
}


def off_policy(base, lanes) -> list[Sample]:
    """The same, with sampler logprobs that differ from the trainer's by up to about half a nat."""
    noise = generator("mismatch")
    return [
        with_tokens(s, logprobs=s.logprobs[s.action_mask] + noise.normal(size=len(drawn(s))) / 4)
        for s in rollout(base, lanes, trained(lanes, 0))
    ]


@pytest.mark.parametrize("options", EVERYTHING.values(), ids=EVERYTHING)
@pytest.mark.parametrize("normalizer", ["tokens", "sequences", "constant"])
def test_every_micro_batch_split_gives_the_same_gradient_with_every_term(base, lanes, options, normalizer):
    samples = off_policy(base, lanes)
    settings = {"normalizer": normalizer, "max_tokens": 12, **options}
    whole, metrics = gradient(lanes, 0, samples, **settings)
    plain, _ = gradient(lanes, 0, samples, normalizer=normalizer, max_tokens=12)
    assert float((whole - plain).norm()) > 1e-3 * float(plain.norm())  # the term does something
    for budget in (1, 60):
        split, other = gradient(lanes, 0, samples, **settings, micro_batch_tokens=budget)
        assert float((split - whole).norm() / whole.norm()) < 1e-6 * (1 if base.dtype == torch.float64 else 10)
        assert other["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
        for key in ("kl", "objective/non_score_reward", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert other.get(key) == pytest.approx(metrics.get(key), abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"correction": Correction("tis", high=2.0)}, {"correction": Correction("icepop", 0.5, 2.0)}],
    ids=["tis", "icepop"],
)
@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_a_mismatch_weight_of_one_is_an_exact_no_op(base, lanes, loss, options):
    samples = rollout(base, lanes, trained(lanes, 0))
    with torch.no_grad(), lanes.single(trained(lanes, 0)):  # the sampler's are those of the update, to the last bit
        fresh = [token_logprobs(base, collate([s], base), 1.0)[0][0].double().numpy() for s in samples]
    samples = [with_tokens(s, logprobs=logprobs_T) for s, logprobs_T in zip(samples, fresh, strict=True)]
    settings = {"loss": loss, "micro_batch_tokens": 1}
    without, before = gradient(lanes, 0, samples, **settings)
    corrected, after = gradient(lanes, 0, samples, **settings, **options)
    assert torch.equal(without, corrected)
    assert before["val/ratio"] == after["val/ratio"] == 1.0
    assert before["loss"] == after["loss"]


def corrected_gradient(base, lanes, samples, weight):
    """Autograd, one sequence at a time, of −Σ weight(ρ)·A·log π / tokens with ρ = π/π_sampler held constant."""
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    for s in samples:
        with lanes.single(adapter):
            logp = token_logprobs(base, collate([s], base), 1.0)[0][0]
            ratio = (logp.detach() - torch.from_numpy(s.logprobs[s.action_mask]).to(logp)).exp()
            terms = weight(ratio) * torch.from_numpy(s.advantages[s.action_mask]).to(logp) * logp
            (-terms.sum() / totals(samples).tokens).backward()
    return adapter.flat.grad.clone()


@pytest.mark.parametrize("loss", ["ppo", "reinforce", "gspo", "cispo"])
def test_truncated_importance_sampling_and_icepop_by_their_formulas(base, lanes, loss):
    """w·A·∇log π with w = min(ρ, C), or ρ inside the band and 0 outside: the ratio counts once, not twice."""
    samples = off_policy(base, lanes)
    rules = {
        "tis": ({"correction": Correction("tis", high=1.05)}, lambda ratio: ratio.clamp(max=1.05)),
        "icepop": (
            {"correction": Correction("icepop", 0.9, 1.2)},
            lambda ratio: ratio * ((ratio >= 0.9) & (ratio <= 1.2)),
        ),
    }
    for options, weight in rules.values():
        grad, metrics = gradient(lanes, 0, samples, loss=loss, **options)
        expected = corrected_gradient(base, lanes, samples, weight)
        assert float((grad - expected).norm() / expected.norm()) < 1e-4
        assert 0.1 < metrics["clip_ratio/high_mean"] < 0.9  # the share that the cap or the band cuts
        assert (metrics["clip_ratio/low_mean"] > 0.1) == (options["correction"].kind == "icepop")
        assert metrics["kl_sample_train_v2"] > 0.01  # still of the sampler, not of the corrected ratio


def test_the_weight_of_a_sequence_counts_tokens_that_do_not_train(base, lanes):
    """W = π/π_sampler of the whole answer, also where `entropy_mask` lets only some of its tokens train."""
    samples, expected, trained_tokens = [], 0.0, 0
    noise = generator("mismatch")
    for sample in rollout(base, lanes, trained(lanes, 0)):
        shift_T, mask_T = noise.normal(0.1, 0.3, len(drawn(sample))), np.arange(len(drawn(sample))) % 3 == 0
        shifted = with_tokens(sample, logprobs=sample.logprobs[sample.action_mask] - shift_T, loss_mask=mask_T)
        samples.append(shifted)
        advantages_T = sample.advantages[sample.action_mask]
        expected -= min(np.exp(shift_T.sum()), 3.0) * advantages_T[mask_T].sum()
        trained_tokens += int(mask_T.sum())
    _, metrics = gradient(
        lanes, 0, samples, correction=Correction("seq_tis", high=3.0),
        denominators=Denominators(trained_tokens, len(samples)),
    )  # fmt: skip
    assert metrics["loss"] == pytest.approx(expected / trained_tokens, rel=1e-3)


def test_dual_clip_bounds_the_loss_of_a_bad_token(base, lanes):
    """A < 0 and ρ far above 1: plain ppo pushes with ρ·A, dual clip stops at c·A and lets the token rest."""
    samples = rollout(base, lanes, trained(lanes, 0))
    samples = [with_tokens(s, logprobs=s.logprobs[s.action_mask] - np.log(4.0), advantages=-1) for s in samples]
    plain, metrics = gradient(lanes, 0, samples)
    clipped, other = gradient(lanes, 0, samples, dual_clip=3.0)
    assert plain.norm() > 0
    assert metrics["loss"] == pytest.approx(4.0, rel=1e-3)
    assert clipped.norm() == 0
    assert other["loss"] == pytest.approx(3.0, rel=1e-6)


def without_advantages(base, lanes, adapter) -> list[Sample]:
    samples = rollout(base, lanes, adapter)
    return [with_tokens(s, advantages=0) for s in samples]


def test_the_kl_of_a_fresh_adapter_is_zero_with_zero_gradient(base, lanes):
    adapter = lanes.new_adapter(4, 8).initialise("fresh")
    samples = without_advantages(base, lanes, adapter)
    metrics = update(lanes, adapter, samples, kl_coef=0.5)
    assert metrics["kl"] == 0
    assert metrics["loss"] == 0
    assert metrics["objective/non_score_reward"] == 0
    assert float(adapter.flat.grad.norm()) == 0


def test_kl_terms_against_autograd_and_what_is_recorded(base, lanes):
    """k2 = ½(log π − log ref)² in the loss, k3 in the records; the reference is the base with no adapter."""
    samples = without_advantages(base, lanes, trained(lanes, 0))
    grad, metrics = gradient(lanes, 0, samples, kl_coef=0.5)
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    tokens, k2, k3 = totals(samples).tokens, 0.0, 0.0
    for s in samples:
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
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.5 * k3 / len(samples), rel=1e-4)
    _, logged = gradient(lanes, 0, samples, log_kl=True)
    assert logged["kl"] == metrics["kl"]
    assert logged["loss"] == 0


def test_the_kl_term_pulls_the_adapter_back_to_the_base(base, lanes):
    adapter = trained(lanes, 0)
    samples = without_advantages(base, lanes, adapter)
    optimizer = adamw(adapter)
    seen = [update(lanes, adapter, samples, kl_coef=1.0, optimizer=optimizer, lr=5e-3)["kl"] for _ in range(6)]
    assert seen[-1] < 0.7 * seen[0]


def test_the_entropy_bonus_raises_the_entropy(base, lanes):
    adapter = trained(lanes, 0)
    samples = without_advantages(base, lanes, adapter)
    optimizer = adamw(adapter)
    batch = collate(samples, base)

    def entropy() -> float:
        with torch.no_grad(), lanes.single(adapter):
            entropy_BT = token_logprobs(base, batch, 1.0, entropy=True)[1]
        return float(entropy_BT[batch.loss_mask_BT].mean())

    before = entropy()
    losses = [update(lanes, adapter, samples, entropy_coef=0.5, optimizer=optimizer, lr=2e-3)["loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(-0.5 * before, rel=1e-4)
    assert entropy() > before + 0.01


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "several turns"])
def test_gradient_is_that_of_the_plain_formula(base, lanes, turns):
    """Against autograd through one unpadded sequence at a time; tokens that were read between two actions count in the
    context and nowhere else."""
    samples = rollout(base, lanes, trained(lanes, 0))
    if turns:
        samples = [in_turns(s) for s in samples]
        assert any(np.diff(s.action_mask.astype(int)).tolist().count(1) > 1 for s in samples)
    grad, metrics = gradient(lanes, 0, samples, loss="reinforce")
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    tokens, total = totals(samples).tokens, 0.0
    for s in samples:
        logp = torch.log_softmax(fresh_logits(lanes, adapter, s), -1)
        logp = logp.gather(1, torch.from_numpy(drawn(s))[:, None])[:, 0]
        loss = -(torch.from_numpy(s.advantages[s.action_mask]).to(logp) * logp).sum() / tokens
        loss.backward()
        total += loss.item()
    assert float((adapter.flat.grad - grad).norm() / grad.norm()) < 1e-4
    assert metrics["loss"] == pytest.approx(total, rel=1e-3)


CONFIGURED = [
    ({}, {}),
    (
        {"algorithm": {"loss": "cispo", "cispo_cap": 3.0, "loss_normalizer": "constant"},
         "training": {"max_tokens": 33, "temperature": 0.7}},
        {"loss": "cispo", "ratio_cap": 3.0, "normalizer": "constant", "max_tokens": 33, "temperature": 0.7},
    ),
    ({"algorithm": {"kl_coef": 0.2, "tis_cap": 2.0}}, {"kl_coef": 0.2, "correction": Correction("tis", high=2.0)}),
    ({"logging": {"log_kl": True}}, {"log_kl": True}),
    ({"algorithm": {"entropy_coef": 0.1, "dual_clip": 3.0}}, {"entropy_coef": 0.1, "dual_clip": 3.0}),
    ({"algorithm": {"icepop_band": [0.5, 2.0]}}, {"correction": Correction("icepop", 0.5, 2.0)}),
    ({"algorithm": {"correction": "seq_mis"}}, {"correction": Correction("seq_mis", 0.0, 2.0)}),
    ({"algorithm": {"correction": "decoupled"}}, {"correction": Correction("decoupled")}),
    (
        {"algorithm": {"loss": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 3.0}},
        {"loss": "sapo", "gate": (2.0, 3.0)},
    ),
    (
        {"algorithm": {"loss": "vespo", "vespo_positive": [1, 2], "vespo_negative": [4, 5]}},
        {"loss": "vespo", "positive": (1.0, 2.0), "negative": (4.0, 5.0)},
    ),
    ({"training": {"clip_eps": 0.1, "clip_eps_high": 0.3}}, {"clip_low": 0.1, "clip_high": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "keys"), CONFIGURED, ids=str)
def test_a_configuration_asks_for_the_terms_of_its_keys(sections, keys):
    config = parse_dict(sections)
    asked = {"max_tokens": config.training.max_tokens, **keys}
    assert objective_of(config, asked.get("loss", "ppo")) == objective(**asked)


def test_an_objective_asks_for_what_its_terms_read():
    """What is not needed is not computed; a term that pulls where no advantage does has every sequence scored."""
    for keys, needs, every in (
        ({}, set(), False),
        ({"log_kl": True}, {Want.REFERENCE}, False),
        ({"kl_coef": 0.1}, {Want.REFERENCE}, True),
        ({"entropy_coef": 0.1}, {Want.ENTROPY}, True),
        ({"loss": lambda *_: None}, set(), True),
    ):
        asked = objective(**keys)
        assert (asked.needs, asked.every_sequence) == (frozenset(needs) | {Want.LOGPROBS}, every)
        assert asked.without_gradient().needs == asked.needs & {Want.REFERENCE, Want.LOGPROBS}
        assert not asked.without_gradient().every_sequence


def test_clipping_and_the_first_adamw_step(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    metrics = update(lanes, adapter, samples, grad_clip_norm=0.01, lr=5e-3)
    assert metrics["optim/grad_norm"] > 0.01
    assert metrics["optim/grad_clipped"]
    assert float(adapter.flat.grad.norm()) == pytest.approx(0.01, rel=1e-3)
    moved = (adapter.flat.detach() - before).abs()
    assert float(moved.max()) == pytest.approx(5e-3, rel=1e-2)  # AdamW's first step is lr·sign(gradient)


def test_no_sequences_is_a_step_that_changes_nothing(base, lanes):
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    optimizer = adamw(adapter, weight_decay=0.1)
    metrics = update(lanes, adapter, [], optimizer=optimizer, denominators=Denominators(0, 0))
    assert torch.equal(before, adapter.flat)
    assert metrics["loss"] == 0
    assert metrics["val/ratio"] is None


def score(lanes, adapter, probe, **keys):
    """What a step without samples tells of ``probe``; sees that neither weights nor optimizer move."""
    before, optimizer = adapter.flat.detach().clone(), adamw(adapter, weight_decay=0.1)
    version = adapter.flat._version
    metrics = update(lanes, adapter, [], **keys, optimizer=optimizer, denominators=Denominators(7, 2), probe=probe)
    assert torch.equal(before, adapter.flat)
    assert adapter.flat._version == version
    assert not optimizer.state
    return metrics


def test_where_nothing_trains_sampler_and_trainer_are_compared_on_a_probe(base, lanes):
    """The same numbers as of training these samples, with an own loss untouched and no ratio or clipping told."""
    adapter = trained(lanes, 0)
    probe = [with_tokens(s, advantages=0) for s in off_policy(base, lanes)[:4]]
    metrics = score(lanes, adapter, probe)
    _, expected = gradient(lanes, 0, [with_tokens(s, advantages=1) for s in probe])
    for key in MISMATCH_METRICS:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5)
        assert metrics[key] > 1e-3 or key == "kl_sample_train_v1"
    assert {metrics[key] for key in RATIO_METRICS if key not in MISMATCH_METRICS} == {None}
    assert (metrics["num_datums"], metrics["loss"], "kl" in metrics) == (0, 0.0, False)
    assert metrics["timing_microbatches"] == 1
    assert metrics["timing_forward_total"] > 0

    def own_loss(*_):
        raise AssertionError("a user's loss is for what trains")

    other = score(
        lanes, adapter, probe, loss=own_loss, entropy_coef=0.1, correction=Correction("tis", high=2.0), kl_coef=0.5
    )
    assert [other[key] for key in MISMATCH_METRICS] == pytest.approx([metrics[key] for key in MISMATCH_METRICS])
    _, with_kl = gradient(lanes, 0, probe, kl_coef=0.5)
    for key in ("kl", "objective/non_score_reward"):
        assert other[key] == pytest.approx(with_kl[key], rel=1e-5)
        assert abs(other[key]) > 1e-4
    logged = score(lanes, adapter, probe, log_kl=True)
    assert logged["kl"] == other["kl"]
    assert "objective/non_score_reward" not in logged  # the row says 0


def test_a_probe_that_the_trainer_cannot_score_counts_as_a_step_that_is_not_finite(base, lanes):
    probe = [with_tokens(s, advantages=0) for s in rollout(base, lanes, trained(lanes, 0))]
    broken = trained(lanes, 0)
    with torch.no_grad():
        broken.flat.fill_(torch.nan)
    with pytest.raises(NonFinite, match="trainer logprob is nan"):
        update(lanes, broken, [], denominators=Denominators(0, 0), probe=probe[:4])


def test_groups_without_signal_change_no_bit_of_the_update(base, lanes):
    """What ``discard_group_zero_advantage`` decides: they are counted and scored, or not; the gradient is the same."""
    samples = rollout(base, lanes, trained(lanes, 0))
    uniform = [with_tokens(s, advantages=0) for s in samples[:6]]
    for settings in ({}, {"normalizer": "sequences", "micro_batch_tokens": 40}):
        kept, told = gradient(lanes, 0, [*uniform, *samples[6:]], **settings, denominators=totals(samples))
        left_out, other = gradient(lanes, 0, samples[6:], **settings, denominators=totals(samples))
        assert torch.equal(kept, left_out)
        assert told["loss"] == other["loss"]
        assert (told["num_datums"], other["num_datums"]) == (len(samples), len(samples) - 6)


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
    adapter, samples = trained(lanes, 0), rollout(base, lanes, trained(lanes, 0))
    begin = time.perf_counter()
    metrics = update(lanes, adapter, samples, micro_batch_tokens=100, workers=Workers(workers), **options)
    whole = time.perf_counter() - begin
    parts = {key[7:-6]: value for key, value in metrics.items() if key.startswith("timing_") and key.endswith("_total")}
    assert set(parts) == set(TIMED_PARTS) - {"weight_sync_inference"}
    assert {part for part, seconds in parts.items() if seconds == 0} == zero
    assert sum(parts.values()) < 1.05 * whole
    signal = [s for s in samples if s.advantages.any()]
    assert metrics["timing_microbatches"] == len(split_microbatches(signal, 100, packed=backbone_of(base).packs)) > 1


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    samples[0] = with_tokens(samples[0], advantages=1e300 if base.dtype == torch.float64 else 3e38)
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    with pytest.raises((RunFailed, ValueError)):
        update(lanes, adapter, samples, denominators=Denominators(1, 1))
    assert torch.equal(before, adapter.flat)


def test_dropout_repeats_for_the_same_stream(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    grads = []
    for stream in (("a",), ("a",), ("b",)):
        adapter = trained(lanes, 0)
        update(lanes, adapter, samples, dropout=0.3, stream=stream)
        grads.append(adapter.flat.grad.clone())
    assert torch.equal(grads[0], grads[1])
    assert not torch.allclose(grads[0], grads[2])


def test_every_micro_batch_draws_its_own_dropout(base, lanes):
    """Twice the same completion in two micro-batches: two masks, so not twice the gradient of one."""
    one = max(rollout(base, lanes, trained(lanes, 0)), key=len)
    denominators = totals([one])
    for dropout in (0.0, 0.3):
        settings = {"dropout": dropout, "micro_batch_tokens": 1}
        single, _ = gradient(lanes, 0, [one], **settings, denominators=denominators)
        double, _ = gradient(lanes, 0, [one, one], **settings, denominators=denominators)
        apart = float((double - 2 * single).norm() / single.norm())
        assert apart > 0.1 if dropout else apart < 1e-5


def test_updates_side_by_side_equal_one_after_the_other(base, lanes):
    """Each lane's update in a thread of its own: adapters, gradients and modes do not mix."""
    samples = rollout(base, lanes, trained(lanes, 0))
    settings = {"micro_batch_tokens": 60}
    one_by_one = [gradient(lanes, seed, samples, **settings)[0] for seed in range(4)]
    workers = Workers(4)
    together = workers.map(lambda seed: gradient(lanes, seed, samples, **settings)[0], range(4))
    workers.close()
    for alone, other in zip(one_by_one, together, strict=True):
        assert torch.equal(alone, other)


def test_micro_batches_side_by_side_change_no_bit(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    results = []
    for workers in (Workers(), Workers(3)):
        adapter = trained(lanes, 0)
        metrics = update(lanes, adapter, samples, micro_batch_tokens=60, kl_coef=0.1, workers=workers)
        workers.close()
        results.append((adapter.flat.grad, adapter.flat.detach(), metrics["loss"], metrics["val/ratio"]))
    for alone, together in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(alone), torch.as_tensor(together))


def test_a_completion_without_signal_is_counted_but_not_differentiated(base, lanes, monkeypatch):
    samples = rollout(base, lanes, trained(lanes, 0))
    samples[::2] = [with_tokens(s, advantages=0) for s in samples[::2]]
    _, metrics = gradient(lanes, 0, samples)
    expected, _ = gradient(lanes, 0, samples[1::2], denominators=totals(samples))
    trained_tokens = []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: (trained_tokens.append(1), backward(self)))
    grad, counted = gradient(lanes, 0, samples, micro_batch_tokens=1)
    assert len(trained_tokens) == len(samples[1::2])
    assert float((grad - expected).norm() / expected.norm()) < 1e-5
    for key in ("val/ratio", "kl_sample_train_v2", "loss"):
        assert counted[key] == pytest.approx(metrics[key], abs=1e-6)
    with_kl = {"micro_batch_tokens": 1, "kl_coef": 0.1}
    gradient(lanes, 0, samples, **with_kl)
    assert len(trained_tokens) == len(samples[1::2]) + len(samples)


def test_signal_at_any_trained_token_is_signal(base, lanes):
    """Token credit may leave the first tokens of a completion without an advantage, or out of the loss."""
    samples = rollout(base, lanes, trained(lanes, 0))
    for i, s in enumerate(samples):
        place_T = np.arange(len(drawn(s)))
        advantages_T = np.where(place_T == place_T[-1], 1.5, 0.0)
        samples[i] = with_tokens(s, advantages=advantages_T, loss_mask=place_T >= i % 2)
    samples = [s for s in samples if len(drawn(s)) > 2]
    grad, _ = gradient(lanes, 0, samples, loss="reinforce")
    expected, count = trained(lanes, 0), totals(samples).tokens
    expected.flat.grad.zero_()
    for s in samples:
        with lanes.single(expected):
            (-1.5 * token_logprobs(base, collate([s], base), 1.0)[0][0, -1] / count).backward()
    assert expected.flat.grad.norm() > 0
    assert float((grad - expected.flat.grad).norm() / expected.flat.grad.norm()) < 1e-4


@pytest.mark.parametrize("all_tokens", [False, True])
def test_sequence_means_count_the_tokens_that_the_denominator_names(base, lanes, all_tokens):
    """With an entropy mask, the length of a completion is that of its trained tokens, or of all of them."""
    samples, expected = rollout(base, lanes, trained(lanes, 0)), 0.0
    for i, s in enumerate(samples):
        length, own = len(drawn(s)), s.action_mask
        mask_T = np.arange(length) % 3 == 0
        samples[i] = with_tokens(s, loss_mask=mask_T)
        with torch.no_grad(), lanes.single(trained(lanes, 0)):
            ratio_T = token_logprobs(base, collate([s], base), 1.0)[0][0].double().numpy() - s.logprobs[own]
        terms_T = -np.exp(ratio_T) * s.advantages[own] * mask_T
        expected += terms_T.sum() / (length if all_tokens else mask_T.sum()) / len(samples)
    denominators = Denominators(totals(samples).tokens, len(samples), all_tokens)
    _, metrics = gradient(lanes, 0, samples, loss="ppo", normalizer="sequences", denominators=denominators)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_completion_without_a_trained_token_costs_nothing(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0))
    masked = [with_tokens(s, loss_mask=False) for s in samples[:6]] + samples[6:]
    whole, metrics = gradient(lanes, 0, masked, denominators=totals(samples))
    without, other = gradient(lanes, 0, samples[6:], denominators=totals(samples))
    assert torch.equal(whole, without)
    assert metrics["num_datums"] == len(samples)
    _, idle = gradient(lanes, 0, masked[:6], denominators=totals(samples))
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
    backbone_of(base)  # which packs two sequences by way of trial
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
    samples = rollout(base, lanes, trained(lanes, 0))
    whole, expected = gradient(lanes, 0, samples, micro_batch_tokens=1000)
    small = small_memory(70, error)
    adapter, budget, pool = trained(lanes, 0), Budget(1000), Workers(workers)
    job = {"optimizer": adamw(adapter), "lr": 0.0, "budget": budget, "workers": pool}
    metrics = update(lanes, adapter, samples, **job)
    assert float((adapter.flat.grad - whole).norm() / whole.norm()) < 1e-5
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert budget.tokens <= 70 * 2
    assert not budget.checkpointing
    notes = budget.take_notes()
    assert len(notes) >= 1
    assert "made again with" in notes[0]
    failed, small.asked[:] = max(small.asked), []
    update(lanes, adapter, samples, **job)
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
    samples = rollout(base, lanes, trained(lanes, 0))
    small_memory(3, ERRORS[0])
    adapter, budget = trained(lanes, 0), Budget(1000)
    before = adapter.flat.detach().clone()
    with pytest.raises(RunFailed, match=r"one sequence of \d+ tokens does not fit .* max_tokens"):
        update(lanes, adapter, samples, budget=budget)
    assert budget.checkpointing
    assert torch.equal(before, adapter.flat)
    assert any("computed twice" in note for note in budget.take_notes())


@pytest.mark.parametrize(
    ("options", "workers"),
    [({}, 1), ({"dropout": 0.3}, 1), ({"kl_coef": 0.2, "entropy_coef": 0.1}, 1), ({}, 2)],
    ids=str,
)
def test_layers_computed_twice_give_the_same_gradient_and_keep_less(base, lanes, options, workers):
    samples = rollout(base, lanes, trained(lanes, 0))
    results = []
    for twice in (False, True):
        kept, adapter, pool = [], trained(lanes, 0), Workers(workers)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            budget = Budget(80, checkpointing=twice)
            update(lanes, adapter, samples, stream=("s",), budget=budget, workers=pool, **options)
        pool.close()
        results.append((adapter.flat.grad.clone(), sum(kept)))
    (once, much), (again, little) = results
    assert torch.equal(once, again)
    if workers == 1:
        assert little < 0.7 * much


def test_another_error_is_no_reason_to_try_again(base, lanes, small_memory):
    samples = rollout(base, lanes, trained(lanes, 0))
    small = small_memory(3, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    adapter = trained(lanes, 0)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        update(lanes, adapter, samples)
    assert len(small.asked) == 1


def graded_group(rewards: list[float], length: int = 6) -> Group:
    """A group with these rewards, its completions made up."""
    logprobs = -np.linspace(0.1, 2, length)
    made = [Action(list(range(10, 10 + length)), "so x", logprobs, -logprobs, "stop") for _ in rewards]
    prompt = Prompt(Problem("p", "1+1=?", "2"), "1+1=?", (5, 6, 7))
    group = single_turn(prompt, made, [RewardResult(reward) for reward in rewards])
    for one in group.rollouts:
        one.planning_T = np.zeros(length, dtype=bool)
    return group


@pytest.mark.parametrize("mode", ["none", "gtpo"])
def test_an_advantage_of_zero_is_trained_on(fresh_base, mode):
    """Zero advantage used as the mask for "not trained"."""
    groups = [graded_group([0.0, 0.5, 1.0])]
    fill_advantages(groups, "dr_grpo")
    assert groups[0].advantages_N[1] == 0
    credit = assign_credit(groups, parse_dict({"algorithm": {"transform_mode": mode}}), 0.0, ("placebo",))
    samples = samples_of(groups)
    assert [int(s.loss_mask.sum()) for s in samples] == [6, 6, 6]
    assert (credit.denominators.tokens, credit.denominators.sequences) == (18, 3)
    lanes = Lanes(fresh_base)
    adapter = trained(lanes, 0)
    job = {"optimizer": adamw(adapter), "denominators": credit.denominators}
    metrics = update(lanes, adapter, samples, log_kl=True, **job)
    assert metrics["num_datums"] == 3
    only_zero = [s for s in samples if not s.advantages.any()]
    assert len(only_zero) == 1
    alone = update(lanes, adapter, only_zero, **job)
    assert alone["val/ratio"] is not None  # its tokens are measured though they pull nowhere
