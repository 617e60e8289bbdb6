from itertools import product

import numpy as np
import pytest
import torch
from helpers.lanes import (
    adamw,
    credit,
    drawn,
    fresh_scores,
    gradient,
    in_turns,
    objective,
    relative_gap,
    rollout,
    totals,
    trained,
    update,
    with_tokens,
)
from helpers.records import group

from retrain.algorithms import objective_of
from retrain.algorithms.algorithm import training_samples
from retrain.config import parse_dict
from retrain.errors import NonFinite, RunFailed
from retrain.maths.corrections import Correction
from retrain.maths.ratios import MISMATCH_METRICS, RATIO_METRICS
from retrain.policy.backbone import backbone_of, collate, token_logprobs
from retrain.policy.lora import Lanes
from retrain.policy.packing import Budget, split_microbatches
from retrain.rng import generator
from retrain.types import Denominators, Sample

LOSSES = ("ppo", "reinforce", "gspo", "cispo")
TIS = Correction("tis", high=1.05)
ICEPOP = Correction("icepop", 0.9, 1.2)


@pytest.fixture(scope="module")
def lanes(base):
    yield Lanes(base)
    base.release()


@pytest.fixture(scope="module")
def on_policy(base, lanes):
    """Samples of the adapter that ``gradient`` trains: five prompts, three completions each."""
    return tuple(rollout(base, lanes, trained(lanes, 0)))


@pytest.fixture
def samples(on_policy) -> list[Sample]:
    return list(on_policy)


@pytest.fixture
def off_policy(on_policy) -> list[Sample]:
    """Half of the samples, with sampler log-probabilities that differ from the trainer's by up to half a nat."""
    noise = generator("mismatch")
    samples = [(s, noise.normal(size=len(drawn(s))) / 4) for s in on_policy[::2]]
    return [with_tokens(s, logprobs=s.logprobs[s.action_mask] + moved_T) for s, moved_T in samples]


def by_autograd(lanes, samples, loss_of) -> tuple[torch.Tensor, float]:
    """Return gradient and value of Σ ``loss_of(sample, logprobs [T])`` / tokens, one unpadded sequence at a time."""
    adapter = trained(lanes, 0)
    adapter.flat.grad.zero_()
    total = 0.0
    for s in samples:
        logp, _ = fresh_scores(lanes, adapter, s)
        loss = loss_of(s, logp) / totals(samples).tokens
        loss.backward()
        total += loss.item()
    return adapter.flat.grad.clone(), total


def advantages_of(s: Sample) -> torch.Tensor:
    return torch.from_numpy(s.advantages[s.action_mask])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_all_losses_have_the_same_gradient_on_policy(base, lanes, temperature):
    """The importance ratio is 1 at any temperature; then all losses are REINFORCE, and corrections weigh nothing."""
    samples = rollout(base, lanes, trained(lanes, 0), temperature)[::2]
    corrections = (None, Correction("tis", high=2.0), Correction("icepop", 0.5, 2.0))
    gradients = []
    for loss, correction in product(LOSSES, corrections):
        flat, metrics = gradient(lanes, samples, loss=loss, correction=correction, temperature=temperature)
        assert abs(metrics["val/ratio"] - 1) < 1e-5
        assert metrics["val/ratio_var"] < 1e-9
        assert metrics["kl_sample_train_v2"] < 1e-6
        assert metrics["clip_ratio/region_mean"] == 0
        gradients.append(flat)
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, atol=1e-5 * float(gradients[0].abs().max()), rtol=1e-3)


@pytest.mark.parametrize("turns", [False, True], ids=["one turn", "several turns"])
def test_gradient_is_that_of_the_plain_formula(lanes, samples, turns):
    """Tokens that were read between two actions are context and not trained on."""
    if turns:
        samples = [in_turns(s) for s in samples]
    flat, metrics = gradient(lanes, samples, loss="reinforce")
    expected, loss = by_autograd(lanes, samples, lambda s, logp: -(advantages_of(s) * logp).sum())
    assert relative_gap(flat, expected) < 1e-4
    assert metrics["loss"] == pytest.approx(loss, rel=1e-3)


ALL_TERMS = {"correction": TIS, "kl_coef": 0.7, "entropy_coef": 0.3}


@pytest.mark.parametrize(("normalizer", "options"), [
    ("tokens", {"dual_clip": 1.5, "clip_eps_high": 0.1}), ("tokens", {"correction": ICEPOP}), ("tokens", ALL_TERMS),
    ("sequences", ALL_TERMS), ("constant", ALL_TERMS),
], ids=str)  # fmt: skip
def test_every_micro_batch_split_gives_the_same_gradient(lanes, off_policy, normalizer, options):
    settings = {"normalizer": normalizer, "max_tokens": 12}
    whole, metrics = gradient(lanes, off_policy, **settings, **options)
    assert relative_gap(gradient(lanes, off_policy, **settings)[0], whole) > 1e-3  # the terms do something
    for budget in (1, 60):
        assert len(split_microbatches(off_policy, budget)) > 1
        split, other = gradient(lanes, off_policy, **settings, **options, micro_batch_tokens=budget)
        assert relative_gap(split, whole) < 1e-5
        for key in ("loss", "kl", "objective/non_score_reward", "clip_ratio/low_mean", "clip_ratio/high_mean"):
            assert other.get(key) == pytest.approx(metrics.get(key), abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_truncated_importance_sampling_and_icepop_by_their_formulas(lanes, off_policy, loss):
    """w·A·∇log π with w = min(ρ, C), or ρ inside the band and 0 outside: the ratio counts once, not twice."""
    weights = {TIS: lambda r: r.clamp(max=1.05), ICEPOP: lambda r: r * ((r >= 0.9) & (r <= 1.2))}
    for correction, weight in weights.items():

        def weighted(s, logp, weight=weight):
            ratio = (logp.detach() - torch.from_numpy(s.logprobs[s.action_mask])).exp()
            return -(weight(ratio) * advantages_of(s) * logp).sum()

        flat, metrics = gradient(lanes, off_policy, loss=loss, correction=correction)
        assert relative_gap(flat, by_autograd(lanes, off_policy, weighted)[0]) < 1e-4
        assert 0.1 < metrics["clip_ratio/high_mean"] < 0.9  # the share that the cap or the band cuts
        assert (metrics["clip_ratio/low_mean"] > 0.1) == (correction is ICEPOP)
        assert metrics["kl_sample_train_v2"] > 0.01  # still of the sampler, not of the corrected ratio


def test_the_weight_of_a_sequence_counts_tokens_that_do_not_train(lanes, on_policy):
    """W = π/π_sampler of the whole answer, also where `entropy_mask` lets only some of its tokens train."""
    samples, expected, trained_tokens = [], 0.0, 0
    noise = generator("mismatch")
    for sample in on_policy:
        shift_T, mask_T = noise.normal(0.1, 0.3, len(drawn(sample))), np.arange(len(drawn(sample))) % 3 == 0
        shifted = with_tokens(sample, logprobs=sample.logprobs[sample.action_mask] - shift_T, loss_mask=mask_T)
        samples.append(shifted)
        advantages_T = sample.advantages[sample.action_mask]
        expected -= min(np.exp(shift_T.sum()), 3.0) * advantages_T[mask_T].sum()
        trained_tokens += int(mask_T.sum())
    denominators = Denominators(trained_tokens, len(samples))
    _, metrics = gradient(lanes, samples, correction=Correction("seq_tis", high=3.0), denominators=denominators)
    assert metrics["loss"] == pytest.approx(expected / trained_tokens, rel=1e-3)


def test_the_kl_of_a_fresh_adapter_is_zero_with_zero_gradient(base, lanes):
    adapter = lanes.new_adapter(4, 8).initialise("fresh")
    samples = [with_tokens(s, advantages=0) for s in rollout(base, lanes, adapter)]
    metrics = update(lanes, adapter, samples, kl_coef=0.5)
    assert (metrics["kl"], metrics["loss"], metrics["objective/non_score_reward"]) == (0, 0, 0)
    assert float(adapter.flat.grad.norm()) == 0


def test_kl_terms_against_autograd_and_what_is_recorded(lanes, samples):
    """k2 = ½(log π − log ref)² in the loss, k3 in the records; the reference is the base with no adapter."""
    samples, k3 = [with_tokens(s, advantages=0) for s in samples], []

    def k2(s, logp):
        with torch.no_grad():
            difference = logp - fresh_scores(lanes, lanes.new_adapter(4, 8.0), s)[0]
            k3.append(float((torch.exp(-difference) - 1 + difference).sum()))
        return 0.25 * (logp - logp.detach() + difference).square().sum()

    flat, metrics = gradient(lanes, samples, kl_coef=0.5)
    expected, loss = by_autograd(lanes, samples, k2)
    assert relative_gap(flat, expected) < 1e-4
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["kl"] == pytest.approx(sum(k3) / totals(samples).tokens, rel=1e-4)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.5 * sum(k3) / len(samples), rel=1e-4)
    _, logged = gradient(lanes, samples, log_kl=True)
    assert (logged["kl"], logged["loss"]) == (metrics["kl"], 0)


CONFIGURED = [
    (
        {"algorithm": {"loss": "cispo", "cispo_cap": 3.0, "loss_normalizer": "constant"},
         "training": {"max_tokens": 33, "temperature": 0.7}},
        {"loss": "cispo", "cap": 3.0, "normalizer": "constant", "max_tokens": 33, "temperature": 0.7},
    ),
    ({"algorithm": {"kl_coef": 0.2, "tis_cap": 2.0}}, {"kl_coef": 0.2, "correction": Correction("tis", high=2.0)}),
    ({"logging": {"log_kl": True}}, {"log_kl": True}),
    ({"algorithm": {"entropy_coef": 0.1, "dual_clip": 3.0}}, {"entropy_coef": 0.1, "dual_clip": 3.0}),
    ({"algorithm": {"icepop_band": [0.5, 2.0]}}, {"correction": Correction("icepop", 0.5, 2.0)}),
    (
        {"algorithm": {"loss": "sapo", "sapo_tau_positive": 2, "sapo_tau_negative": 3}},
        {"loss": "sapo", "tau_positive": 2, "tau_negative": 3},
    ),
    ({"training": {"clip_eps": 0.1, "clip_eps_high": 0.3}}, {"clip_eps": 0.1, "clip_eps_high": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "keys"), CONFIGURED)
def test_a_configuration_asks_for_the_terms_of_its_keys(sections, keys):
    config = parse_dict(sections)
    expected = {"max_tokens": config.training.max_tokens, **keys}
    assert objective_of(config, expected.get("loss", "ppo")) == objective(**expected)


def test_clipping_and_the_first_adamw_step(lanes, samples):
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    metrics = update(lanes, adapter, samples, grad_clip_norm=0.01, lr=5e-3)
    assert metrics["optim/grad_norm"] > 0.01
    assert metrics["optim/grad_clipped"]
    assert float(adapter.flat.grad.norm()) == pytest.approx(0.01, rel=1e-3)
    moved = (adapter.flat.detach() - before).abs()
    assert float(moved.max()) == pytest.approx(5e-3, rel=1e-2)  # AdamW's first step is lr·sign(gradient)


def score(lanes, adapter, probe, **keys):
    """Return the metrics of a step that has no samples and this probe, which must not change weights or optimizer."""
    before, optimizer = adapter.flat.detach().clone(), adamw(adapter, weight_decay=0.1)
    metrics = update(lanes, adapter, [], **keys, optimizer=optimizer, denominators=Denominators(7, 2), probe=probe)
    assert torch.equal(before, adapter.flat)
    assert not optimizer.state
    return metrics


def test_where_nothing_trains_sampler_and_trainer_are_compared_on_a_probe(lanes, off_policy):
    """The same numbers as of training these samples; a user's loss is not called, and no ratio is recorded."""
    adapter = trained(lanes, 0)
    assert score(lanes, adapter, [])["val/ratio"] is None
    probe = [with_tokens(s, advantages=0) for s in off_policy[:4]]
    metrics = score(lanes, adapter, probe)
    _, expected = gradient(lanes, [with_tokens(s, advantages=1) for s in probe])
    for key in MISMATCH_METRICS:
        assert metrics[key] == pytest.approx(expected[key], rel=1e-5)
        assert metrics[key] > 1e-3 or key == "kl_sample_train_v1"
    assert {metrics[key] for key in RATIO_METRICS if key not in MISMATCH_METRICS} == {None}
    assert (metrics["num_datums"], metrics["loss"], "kl" in metrics) == (0, 0.0, False)

    def user_loss(*_):
        raise AssertionError("a user's loss is for what trains")

    terms = {"loss": user_loss, "entropy_coef": 0.1, "correction": Correction("tis", high=2.0), "kl_coef": 0.5}
    other = score(lanes, adapter, probe, **terms)
    assert [other[key] for key in MISMATCH_METRICS] == pytest.approx([metrics[key] for key in MISMATCH_METRICS])
    _, with_kl = gradient(lanes, probe, kl_coef=0.5)
    for key in ("kl", "objective/non_score_reward"):
        assert other[key] == pytest.approx(with_kl[key], rel=1e-5)
        assert abs(other[key]) > 1e-4


def test_groups_without_signal_change_no_bit_of_the_update(lanes, samples):
    """Nor do completions whose tokens are all masked."""
    silent = [with_tokens(s, advantages=0) for s in samples[:6]]
    masked = [with_tokens(s, loss_mask=False) for s in samples[:6]]
    for settings in ({}, {"normalizer": "sequences", "micro_batch_tokens": 1}):
        settings |= {"denominators": totals(samples)}
        without, other = gradient(lanes, samples[6:], **settings)
        for idle in (silent, masked):
            flat, metrics = gradient(lanes, [*idle, *samples[6:]], **settings)
            assert torch.equal(flat, without)
            assert metrics["loss"] == other["loss"]
            assert (metrics["num_datums"], other["num_datums"]) == (len(samples), len(samples) - 6)
    _, idle = gradient(lanes, masked, denominators=totals(samples))
    assert (idle["num_datums"], idle["loss"], "optim/grad_norm" in idle) == (0, 0.0, False)


@pytest.mark.parametrize("all_tokens", [False, True])
def test_sequence_means_count_the_tokens_that_the_denominator_names(base, lanes, samples, all_tokens):
    """With an entropy mask, the length of a completion is that of its trained tokens, or of all of them."""
    expected = 0.0
    for i, s in enumerate(samples):
        length = len(drawn(s))
        mask_T = np.arange(length) % 3 == 0
        samples[i] = with_tokens(s, loss_mask=mask_T)
        with torch.no_grad(), lanes.single(trained(lanes, 0)):
            logprobs_T = token_logprobs(base, collate([s], base), 1.0)[0][0].double().numpy()
        ratio_T = np.exp(logprobs_T - s.logprobs[s.action_mask])
        terms_T = -ratio_T * s.advantages[s.action_mask] * mask_T
        expected += terms_T.sum() / (length if all_tokens else mask_T.sum()) / len(samples)
    denominators = Denominators(totals(samples).tokens, len(samples), all_tokens)
    _, metrics = gradient(lanes, samples, loss="ppo", normalizer="sequences", denominators=denominators)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mode", ["none", "gtpo"])
def test_an_advantage_of_zero_is_trained_on(lanes, mode):
    algorithm = {"advantage_mode": "dr_grpo", "transform_mode": mode}
    batch = credit([group([0.0, 0.5, 1.0], [6, 6, 6])], {"algorithm": algorithm})
    assert batch.groups[0].rollouts[1].advantage == 0
    samples = [sample for rollout in batch.trained for sample in training_samples(rollout)]
    assert [int(s.loss_mask.sum()) for s in samples] == [6, 6, 6]
    assert (batch.denominators.tokens, batch.denominators.sequences) == (18, 3)
    (zero,) = [s for s in samples if not s.advantages.any()]
    _, metrics = gradient(lanes, [zero], denominators=batch.denominators)
    assert metrics["val/ratio"] is not None  # its tokens are measured though they pull nowhere


def test_numbers_that_are_not_finite_leave_the_weights_alone(lanes, samples):
    """A gradient that overflows, and a probe that the trainer cannot score."""
    adapter = trained(lanes, 0)
    before = adapter.flat.detach().clone()
    samples[0] = with_tokens(samples[0], advantages=3e38)
    with pytest.raises((RunFailed, ValueError)):
        update(lanes, adapter, samples, denominators=Denominators(1, 1))
    assert torch.equal(before, adapter.flat)
    with torch.no_grad():
        adapter.flat.fill_(torch.nan)
    probe = [with_tokens(s, advantages=0) for s in samples[:4]]
    with pytest.raises(NonFinite, match="trainer logprob is nan"):
        update(lanes, adapter, [], denominators=Denominators(0, 0), probe=probe)


def test_dropout_repeats_for_the_same_stream_and_differs_between_micro_batches(lanes, samples):
    first, again, other = (gradient(lanes, samples, dropout=0.3, stream=(s,))[0] for s in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    longest = max(samples, key=len)
    for dropout in (0.0, 0.3):  # twice the same completion: two masks, so not twice the gradient of one
        settings = {"dropout": dropout, "micro_batch_tokens": 1, "denominators": totals([longest])}
        single, _ = gradient(lanes, [longest], **settings)
        double, _ = gradient(lanes, [longest, longest], **settings)
        difference = float((double - 2 * single).norm() / single.norm())
        assert difference > 0.1 if dropout else difference < 1e-5


@pytest.mark.parametrize(("error", "kind", "message", "is_retried"), [
    (torch.OutOfMemoryError("CUDA out of memory"), RunFailed, r"one sequence .* not fit .* max_tokens", True),
    (RuntimeError("shapes cannot be multiplied"), RuntimeError, "shapes cannot be multiplied", False),
])  # fmt: skip
def test_one_sequence_at_a_time_then_layers_twice_then_a_clear_end(
    base, lanes, samples, error, kind, message, is_retried
):
    """Another error is no reason to try again."""
    backbone_of(base)  # whose probes run the model
    failures, adapter, budget = [], trained(lanes, 0), Budget(1000)

    def fail(module, inputs):
        failures.append(inputs)
        raise error

    hook = base.model.get_input_embeddings().register_forward_pre_hook(fail)
    before = adapter.flat.detach().clone()
    with pytest.raises(kind, match=message):
        update(lanes, adapter, samples, budget=budget)
    hook.remove()
    assert torch.equal(before, adapter.flat)
    assert (len(failures) > 1) == is_retried
    assert budget.checkpointing == any("computed twice" in note for note in budget.take_notes()) == is_retried


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"kl_coef": 0.2, "entropy_coef": 0.1}], ids=str)
def test_layers_computed_twice_give_the_same_gradient_and_keep_less(lanes, samples, options):
    results = []
    for twice in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t):
            budget = Budget(80, checkpointing=twice)
            flat, _ = gradient(lanes, samples, stream=("s",), budget=budget, **options)
        results.append((flat, sum(kept)))
    (once, much), (again, little) = results
    assert torch.equal(once, again)
    assert little < 0.7 * much
