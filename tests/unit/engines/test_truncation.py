import dataclasses
import math

import numpy as np
import pytest
import torch
from helpers.lanes import decoded, drawn, fresh_logits, fresh_scores, ref, requests, rollout, sample, trained, update
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.algorithms.algorithm import training_samples
from retrain.config import load
from retrain.engines.local import LocalEngine
from retrain.engines.slots import LaneRequest, cuts_of
from retrain.engines.step import CPU_DECODING, draw
from retrain.maths.ratios import sampled_token_kl
from retrain.policy.backbone import backbone_of, collate, token_logprobs
from retrain.types import CreditedRollout, Problem, Prompt, RewardResult, Sample, SampleRequest, Turn

CUTS = {
    "top_p": {"top_p": 0.8}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.1}, "top_p, top_k": {"top_p": 0.8, "top_k": 6},
    "all": {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
}  # fmt: skip


def kept_by_hand(p: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> set[int]:
    """Return the tokens that min-p, then top-k, then top-p of the rest keep, in the plainest way."""
    order = [int(i) for i in np.argsort(-p, kind="stable") if p[i] >= min_p * p.max()]
    order = order[: top_k or len(p)]
    left, found, held = sum(p[i] for i in order), set(), 0.0
    for token in order:
        if top_p < 1 and held >= top_p * left:
            break
        found.add(token)
        held += p[token]
    return found


def asked_for(lane: int = 0, **keys):
    return requests(lane, **({"temperature": 0.7, "max_tokens": 10} | keys))


def sample_of(request: SampleRequest, action, advantage: float = 1.0) -> Sample:
    ones = np.ones(len(action))
    return Sample.single_turn(
        request.prompt_ids, action.token_ids, action.logprobs_T, advantage * ones, support=action.support
    )


def support_of(completion, t: int) -> list[int]:
    support = completion.support
    return support.ids[support.offsets[t] : support.offsets[t + 1]].tolist()


@pytest.mark.parametrize("exact_sums", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_truncated_draw_by_enumeration(cut, exact_sums):
    """Over a fine grid of uniform numbers all is as in the renormalised distribution."""
    torch.manual_seed(3)
    logits_V, temperature, steps = torch.randn(12, dtype=torch.float64) * 2, 0.7, 20_000
    p_V = torch.softmax(logits_V / temperature, -1).numpy()
    kept = kept_by_hand(p_V, **cut)
    assert 1 < len(kept) < 12
    rows = torch.tensor(cuts_of([LaneRequest(ref(0), (1,), 1, 1, temperature, (), **cut)], 12)[:1]).expand(steps, -1)
    token_R, logprob_R, entropy_R, kept_RK = draw(
        logits_V.expand(steps, -1), torch.arange(steps, dtype=torch.float64) / steps,
        torch.full((steps, 1), temperature, dtype=torch.float64), None, exact_sums, rows, torch.arange(int(rows[0, 0])),
    )  # fmt: skip
    assert {int(i) for i in kept_RK.unique()} - {-1} == kept
    renormalised = {i: p_V[i] / sum(p_V[j] for j in kept) for i in kept}
    shares = torch.bincount(token_R, minlength=12) / steps
    assert shares.tolist() == pytest.approx([renormalised.get(i, 0.0) for i in range(12)], abs=1.1 / steps)
    for token, logprob in zip(token_R[::997].tolist(), logprob_R[::997].tolist(), strict=True):
        assert logprob == pytest.approx(math.log(renormalised[token]), abs=1e-9)
    assert entropy_R[0].item() == pytest.approx(-sum(q * math.log(q) for q in renormalised.values()), abs=1e-9)


@pytest.mark.parametrize("dense_path", [True, False], ids=["dense", "plain"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_engines_draw_from_and_record_the_kept_set(base, lanes, cut, dense_path):
    adapters = [trained(lanes, 0), trained(lanes, 1, rank=2)]
    asked = asked_for(0, **cut) + asked_for(1, temperature=1.0, **cut)
    sizes = []
    for request, group in zip(asked, sample(LocalEngine(base, lanes, dense=dense_path), asked, adapters), strict=True):
        for completion in group:
            with torch.no_grad():
                adapter = adapters[int(request.policy.run_id)]
                logits_TV = fresh_logits(lanes, adapter, sample_of(request, completion)).double()
            p_TV = torch.softmax(logits_TV / request.temperature, -1).numpy()
            assert len(completion.support.offsets) == len(completion) + 1
            for t, token in enumerate(completion.token_ids):
                kept = support_of(completion, t)
                assert len(set(kept)) == len(kept)
                assert token in kept
                assert set(kept) == kept_by_hand(p_TV[t], **cut)
                q = p_TV[t][kept] / p_TV[t][kept].sum()
                assert completion.logprobs_T[t] == pytest.approx(math.log(q[kept.index(token)]), abs=1e-4)
                assert completion.entropy_T[t] == pytest.approx(-(q * np.log(q)).sum(), abs=1e-4)
                sizes.append(len(kept))
    assert 1 < np.mean(sizes) < base.vocab_size / 2


@pytest.mark.parametrize("dense_path", [True, False], ids=["dense", "plain"])
def test_runs_with_other_settings_in_the_same_batch_change_nothing(base, lanes, dense_path):
    """Each gives what it gives alone, whole distributions to the last bit and without a support."""
    endless = dataclasses.replace(base, eos_ids=(10**6,))  # no row leaves: shapes change the last bits
    adapters = [trained(lanes, lane, rank=2) for lane in range(4)]
    each = [asked_for(0), asked_for(1, top_p=0.8), asked_for(2, top_k=3, min_p=0.05)]
    each.append(asked_for(3, temperature=0.0, top_p=0.5))
    engine = LocalEngine(endless, lanes, dense=dense_path)
    whole = [*asked_for(0), *asked_for(1), *asked_for(2), *asked_for(3, temperature=0.0)]  # same batch, nothing cut
    before, together = sample(engine, whole, adapters), sample(engine, [r for own in each for r in own], adapters)
    for place in (0, 3):
        for one, other in zip(before[3 * place :][:3], together[3 * place :][:3], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.token_ids == b.token_ids
                assert a.logprobs_T.tolist() == b.logprobs_T.tolist()
                assert a.support is b.support is None
    for place in (1, 2):
        alone = sample(engine, [dataclasses.replace(r, policy=ref(0)) for r in each[place]], [adapters[place]])
        for one, other in zip(alone, together[3 * place :][:3], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.token_ids == b.token_ids
                assert all(set(support_of(a, t)) == set(support_of(b, t)) for t in range(len(a)))


@pytest.mark.parametrize("dense_path", [True, False], ids=["dense", "plain"])
def test_rows_keep_their_setting_when_others_have_ended(base, lanes, dense_path):
    adapter = trained(lanes, 0)
    asked = [*asked_for(0, prompts=1, max_tokens=2), *asked_for(0, prompts=2, top_k=2)[1:]]
    short, long = sample(LocalEngine(base, lanes, dense=dense_path), asked, [adapter])
    assert all(c.support is None for c in short)
    assert all(np.diff(c.support.offsets).tolist() == [2] * len(c) for c in long)


def test_a_compiled_truncated_step_is_the_python_step(base, lanes):
    adapters = [trained(lanes, i) for i in range(2)]
    asked = [*asked_for(0, top_p=0.8), *asked_for(1, top_k=4)]
    in_python = CPU_DECODING._replace(compiled=False)
    assert decoded(base, lanes, adapters, asked, settings=in_python) == decoded(base, lanes, adapters, asked)


class LargestIntegers(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.int32, torch.int64):
            self.numel = max(self.numel, made.numel())
        return made


def test_the_record_holds_nothing_of_sequences_that_have_ended(base, lanes):
    """Six of seven lanes have one sequence left: recorded idle rows would take four times the memory."""
    adapters, steps = [trained(lanes, lane) for lane in range(7)], 60
    asked = asked_for(0, prompts=1, samples=8, max_tokens=steps, top_k=100)
    for lane in range(1, 7):
        asked += asked_for(lane, prompts=1, samples=1, max_tokens=steps, top_k=100)
        asked += asked_for(lane, prompts=2, samples=7, max_tokens=2, top_k=100)[1:]
    with LargestIntegers() as made:
        groups = sample(LocalEngine(dataclasses.replace(base, eos_ids=(10**6,)), lanes), asked, adapters)
    recorded = sum(len(c.support.ids) for group in groups for c in group)
    assert recorded == 100 * sum(len(c) for group in groups for c in group)
    assert made.numel < 2.5 * recorded


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_on_policy_ratio_is_one(base, lanes, cut):
    samples = rollout(base, lanes, trained(lanes, 0), asked=asked_for(**cut))
    for loss, budget in (("ppo", 1), ("ppo", 16384), ("reinforce", 16384), ("gspo", 16384), ("cispo", 16384)):
        settings = {"loss": loss, "temperature": 0.7, "micro_batch_tokens": budget}
        metrics = update(lanes, trained(lanes, 0), samples, **settings)
        assert abs(metrics["val/ratio"] - 1) < 1e-5
        assert metrics["val/ratio_var"] < 1e-9
        assert metrics["kl_sample_train_v2"] < 1e-6
        assert metrics["clip_ratio/region_mean"] == 0
    forgotten = [dataclasses.replace(s, support=None) for s in samples]  # without the record it would not be
    assert update(lanes, trained(lanes, 0), forgotten, **settings)["val/ratio"] < 0.99


@pytest.mark.parametrize("apart", [True, False], ids=["output layer in chunks", "all logits at once"])
def test_loss_kl_and_entropy_of_the_truncated_distribution_by_autograd(base, lanes, apart):
    """Gradient and numbers of policy loss, KL to the base and entropy bonus, each over the recorded sets."""
    if not apart:
        base.backbone = dataclasses.replace(backbone_of(base), head=None)
    adapter = trained(lanes, 0)
    samples = rollout(base, lanes, adapter, asked=asked_for(top_p=0.8, min_p=0.02))
    terms = {"loss": "reinforce", "temperature": 0.7, "kl_coef": 0.4, "entropy_coef": 0.3}
    metrics = update(lanes, adapter, samples, micro_batch_tokens=60, **terms)
    tokens = sum(map(len, map(drawn, samples)))
    grad, adapter, loss, k3 = adapter.flat.grad.clone(), trained(lanes, 0), 0.0, 0.0
    for s in samples:
        chosen_T, entropy_T = fresh_scores(lanes, adapter, s, 0.7)
        with torch.no_grad():
            reference_T, _ = fresh_scores(lanes, lanes.new_adapter(4, 8.0), s, 0.7)
        difference_T = chosen_T - reference_T
        terms_T = -torch.from_numpy(s.advantages[s.action_mask]).to(chosen_T) * chosen_T
        part = (terms_T + 0.4 * difference_T.square() / 2 - 0.3 * entropy_T).sum() / tokens
        part.backward()
        loss += part.item()
        k3 += (torch.exp(-difference_T) - 1 + difference_T).sum().item() / tokens
    assert float((adapter.flat.grad - grad).norm() / grad.norm()) < 1e-4
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["kl"] == pytest.approx(k3, rel=1e-4)


def test_ratios_after_the_weights_have_moved_are_over_the_set_that_was_sampled_from(base, lanes):
    """Σ over S of π_old(y|S)·ρ(y) = 1 for any new weights: no token loses its ratio, as it would over the new weights'
    set; and the expectation of k3 is the KL divergence of the truncated distributions."""
    adapter = trained(lanes, 0)
    (request,) = asked_for(samples=1, max_tokens=1, prompts=1, top_p=0.8)
    ((action,),) = sample(LocalEngine(base, lanes), [request], [adapter])
    kept = support_of(action, 0)
    with torch.no_grad():
        logits_V = fresh_logits(lanes, adapter, sample_of(request, action))[0].double()
    chances = torch.softmax(logits_V[kept] / 0.7, -1)
    actions = [dataclasses.replace(action, token_ids=[token]) for token in kept]  # every token that it could have drawn
    samples = [sample_of(request, each) for each in actions]
    with torch.no_grad():
        for b in adapter.B.values():
            b.mul_(-1.0)
    with torch.no_grad(), lanes.single(adapter):
        moved_S1 = token_logprobs(base, collate(samples, base), 0.7)[0].double()
        logits = base.model(input_ids=torch.from_numpy(samples[0].token_ids[None, :-1])).logits[0, -1].double()
    now = kept_by_hand(torch.softmax(logits / 0.7, -1).numpy(), top_p=0.8)
    assert not {drawn(s)[0] for s in samples} <= now  # the set of the new weights lacks some of them
    ratio_S = torch.exp(moved_S1[:, 0] - chances.log())
    assert float((chances * ratio_S).sum()) == pytest.approx(1, abs=1e-5)
    with torch.no_grad():
        reference_S1 = token_logprobs(base, collate(samples, base), 0.7)[0].double()
    k3_S1 = sampled_token_kl("k3", moved_S1, reference_S1, torch.ones(len(samples), 1, dtype=torch.bool))
    exact = float((moved_S1.exp() * (moved_S1 - reference_S1)).sum())
    assert float((moved_S1.exp() * k3_S1).sum()) == pytest.approx(exact, abs=1e-5)


def test_dropout_takes_no_token_out_of_its_set(base, lanes):
    """Logits under dropout are others than the sampler's; the ratio of every token stays finite."""
    adapter = trained(lanes, 0)
    samples = rollout(base, lanes, adapter, asked=asked_for(top_p=0.8))
    metrics = update(lanes, adapter, samples, temperature=0.7, dropout=0.5, stream=("d",))
    assert 0.3 < metrics["val/ratio"] < 3
    assert math.isfinite(metrics["loss"])


def test_every_action_of_several_turns_keeps_its_own_sets(base, lanes):
    """The update computes over three turns what the engine sampled with three truncations."""
    adapter, engine = trained(lanes, 0), LocalEngine(base, lanes)
    asked = [
        asked_for(prompts=1, samples=1, max_tokens=length, **cut)[0]
        for length, cut in ((4, {"top_p": 0.8}), (3, {"top_k": 3}), (5, {"min_p": 0.1}))
    ]
    actions = [action for (action,) in sample(engine, asked, [adapter])]
    reads = [asked[0].prompt_ids, (8, 30), (61,)]
    turns = tuple(Turn(read, action) for read, action in zip(reads, actions, strict=True))
    prompt = Prompt(Problem("p", "?", ""), "?", reads[0])
    credited = CreditedRollout(prompt, turns, RewardResult(1.0), advantage=1.0, token_advantages_T=np.ones(12))
    (whole,) = training_samples(credited)
    sets = [support_of(action, t) for action in actions for t in range(len(action))]
    assert [support_of(whole, t) for t in range(len(drawn(whole)))] == sets
    with torch.no_grad():
        expected_T, _ = fresh_scores(lanes, adapter, whole, 0.7)
    with torch.no_grad(), lanes.single(adapter):
        chosen_BT, _ = token_logprobs(base, collate([sample_of(asked[0], actions[0]), whole], base), 0.7)
    torch.testing.assert_close(chosen_BT[1, : len(sets)], expected_T, atol=1e-5, rtol=0)


def test_sequences_with_and_without_a_record_do_not_mix(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0), asked=asked_for(top_p=0.8))
    samples[0] = dataclasses.replace(samples[0], support=None)
    with pytest.raises(ValueError, match="some samples"):
        collate(samples, base)


@pytest.mark.parametrize(("text", "expected"), [
    ("[training]\ntop_k = -1", [(1.0, 0, 0.0), (1.0, 0, 0.0)]),
    ("[training]\ntop_p = 0.8\n[evaluation]\ntemperature = 0", [(0.8, 1024, 0.0), (1.0, 0, 0.0)]),
    ("[evaluation]\ntop_k = 20", [(1.0, 0, 0.0), (1.0, 20, 0.0)]),
    (
        "[training]\ntop_p = 0.9\nmin_p = 0.02\n[evaluation]\ntop_k = 50\nmin_p = 0.0\n"
        '[[evaluation.sets]]\nname = "as-above"\n'
        '[[evaluation.sets]]\nname = "own"\ntop_p = 0.6\ntop_k = 7\nmin_p = 0.1\n'
        '[[evaluation.sets]]\nname = "whole"\ntop_p = 1\ntop_k = -1\n'
        '[[evaluation.sets]]\nname = "greedy"\ntemperature = 0\n',
        [(0.9, 1024, 0.02), (0.9, 50, 0.0), (0.6, 7, 0.1), (1.0, 0, 0.0), (1.0, 0, 0.0)],
    ),
])  # fmt: skip
def test_what_engines_are_asked_for(tmp_path, text, expected):
    """While training, then on every held-out set: a set's own key, else that of [evaluation], else of [training]."""
    (tmp_path / "f.toml").write_text(text)
    config = load(tmp_path / "f.toml").config
    requested = [each.requested for each in (config.training.sampling, *(s.sampling for s in config.held_out))]
    assert [(each.top_p, each.top_k, each.min_p) for each in requested] == expected
