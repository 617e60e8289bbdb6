# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false, reportOptionalOperand=false, reportOperatorIssue=false
"""Top-p, top-k and min-p: what is kept, what is recorded, and that the update's distributions are over the same set."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from lane_cases import decoded, drawn, fresh_logits, lane_of, ref, sample, totals, trained, update
from lane_cases import rollout as rolled_out
from torch.utils._python_dispatch import TorchDispatchMode
from toycampaign import campaign

from retrain.campaign.running.controller import launch
from retrain.config import load
from retrain.engines import dense
from retrain.engines.draw import draw
from retrain.engines.local import LocalEngine
from retrain.engines.protocol import SampleRequest
from retrain.engines.step import decode_steps
from retrain.engines.truncation import Keeper, cuts_of, remember
from retrain.files import read_jsonl
from retrain.maths.losses import kl_terms
from retrain.policy import logprobs as policy_logprobs
from retrain.policy.backbone import backbone_of
from retrain.policy.head import Head, Supports
from retrain.policy.logprobs import collate, token_logprobs
from retrain.record.observer import NullObserver
from retrain.rng import generator
from retrain.types import Problem, Prompt, RewardResult, Rollout, Sample, Support, Turn, samples_of_rollout

CUTS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "top_p, top_k": {"top_p": 0.8, "top_k": 6},
    "all": {"top_p": 0.9, "top_k": 40, "min_p": 0.02},
}


def kept_by_hand(p: np.ndarray, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> set[int]:
    """Min-p, then top-k, then top-p of what is left, in the plainest way."""
    order = [int(i) for i in np.argsort(-p, kind="stable") if p[i] >= min_p * p.max()]
    order = order[: top_k or len(p)]
    left, found, held = sum(p[i] for i in order), set(), 0.0
    for token in order:
        if top_p < 1 and held >= top_p * left:
            break
        found.add(token)
        held += p[token]
    return found


def logits_of(base, lanes, adapter, prompt_ids, token_ids):
    """Logits [T, V] in float64 that the tokens were drawn from, by one unpadded forward pass."""
    ids = torch.tensor([list(prompt_ids) + list(token_ids)])
    with torch.no_grad(), lanes.single(adapter):
        return base.model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].double()


def support_of(completion, t: int) -> list[int]:
    support = completion.support
    return support.ids[support.offsets[t] : support.offsets[t + 1]].tolist()


def asked_for(lane: int = 0, *, prompts: int = 3, samples: int = 4, max_tokens: int = 10, temperature=0.7, **cut):
    return [
        SampleRequest(
            ref(lane),
            tuple(int(t) for t in generator("prompt", lane, p).integers(3, 200, 3 + 2 * p)),
            samples,
            max_tokens,
            temperature,
            ("cut", lane, p),
            **cut,
        )
        for p in range(prompts)
    ]


def rollout(base, lanes, adapter, **cut) -> list[Sample]:
    """Samples of a truncated sampler, with made-up, token-varying advantages."""
    return rolled_out(base, lanes, adapter, asked=asked_for(**cut))


# -- what is drawn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_any_order", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_truncated_draw_by_enumeration(cut, in_any_order):
    """All of a small vocabulary, at a fine grid of uniform numbers: the set kept, every token's share, log-probability
    and entropy are those of the renormalised distribution, worked out by hand."""
    torch.manual_seed(3)
    logits_V, temperature, steps = torch.randn(12, dtype=torch.float64) * 2, 0.7, 20_000
    p_V = torch.softmax(logits_V / temperature, -1).numpy()
    kept = kept_by_hand(p_V, **cut)
    assert 1 < len(kept) < 12
    rows = torch.tensor(cuts_of([SampleRequest(ref(0), (1,), 1, 1, temperature, (), **cut)], 12)).expand(steps, -1)
    token_R, logprob_R, entropy_R, kept_RK = draw(
        logits_V.expand(steps, -1),
        torch.arange(steps, dtype=torch.float64) / steps,
        torch.full((steps, 1), temperature, dtype=torch.float64),
        None,
        in_any_order,
        rows,
        torch.arange(int(rows[0, 0])),
    )
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
            logits_TV = logits_of(base, lanes, adapters[lane_of(request)], request.prompt_ids, completion.token_ids)
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
def test_runs_with_other_settings_in_the_same_batch_change_nothing(base, lanes, monkeypatch, dense_path):
    """Whole distributions, cut ones and a greedy one side by side: each as it is alone, the whole ones to the last
    bit, and without a support."""
    monkeypatch.setattr(base, "eos_ids", (10**6,))  # all of one length: the shape of the batch shows in the last bits
    adapters = [trained(lanes, lane, rank=2) for lane in range(4)]
    each = [asked_for(0), asked_for(1, top_p=0.8), asked_for(2, top_k=3, min_p=0.05)]
    each.append(asked_for(3, temperature=0.0, top_p=0.5))
    engine = LocalEngine(base, lanes, dense=dense_path)
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


def test_a_compiled_truncated_step_is_the_python_step(base, lanes, monkeypatch):
    adapters = [trained(lanes, i) for i in range(2)]
    asked = [*asked_for(0, top_p=0.8), *asked_for(1, top_k=4)]
    compiled = decoded(base, lanes, adapters, asked)
    monkeypatch.setattr(dense, "compiled_decode_steps", lambda: decode_steps)
    assert decoded(base, lanes, adapters, asked) == compiled


class LargestIntegers(TorchDispatchMode):
    """Notes the size of the largest tensor of integers."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype in (torch.int32, torch.int64):
            self.numel = max(self.numel, made.numel())
        return made


def test_the_record_holds_nothing_of_sequences_that_have_ended(base, lanes, monkeypatch):
    """In every lane but one a single sequence is left beside rows that have nothing to do: were their draws recorded
    too, the record would take four times the memory."""
    monkeypatch.setattr(base, "eos_ids", (10**6,))
    adapters, steps = [trained(lanes, lane) for lane in range(7)], 60
    asked = asked_for(0, prompts=1, samples=8, max_tokens=steps, top_k=100)
    for lane in range(1, 7):
        asked += asked_for(lane, prompts=1, samples=1, max_tokens=steps, top_k=100)
        asked += asked_for(lane, prompts=2, samples=7, max_tokens=2, top_k=100)[1:]
    with LargestIntegers() as made:
        groups = sample(LocalEngine(base, lanes), asked, adapters)
    recorded = sum(len(c.support.ids) for group in groups for c in group)
    assert recorded == 100 * sum(len(c) for group in groups for c in group)
    assert made.numel < 2.5 * recorded


def test_the_record_grows_and_keeps_what_it_holds():
    keeper, want = Keeper(2, 50, 4, torch.device("cpu")), []
    moved = 0
    for step in range(50):
        moved += keeper.make_room(2)
        ids = torch.tensor([[step, 7, -1, -1], [step + 1, 3, 2, 1 if step % 2 else -1]])
        want.append([[i for i in row if i >= 0] for row in ids.tolist()])
        remember(keeper.kept, ids, torch.tensor([step, 50 + step]))
    assert 3 < moved < 10
    for row, support in enumerate(keeper.supports([0, 1], [50, 40])):
        cut = np.split(support.ids, support.offsets[1:-1])
        assert [part.tolist() for part in cut] == [kept[row] for kept in want][: 50 - 10 * row]


# -- what the update makes of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_on_policy_ratio_is_one(base, lanes, cut):
    samples = rollout(base, lanes, trained(lanes, 0), **cut)
    for loss, budget in (("ppo", 1), ("ppo", 16384), ("reinforce", 16384), ("gspo", 16384), ("cispo", 16384)):
        settings = {"loss": loss, "temperature": 0.7, "micro_batch_tokens": budget}
        metrics = update(lanes, trained(lanes, 0), samples, **settings)
        assert abs(metrics["val/ratio"] - 1) < 1e-5
        assert metrics["val/ratio_var"] < 1e-9
        assert metrics["kl_sample_train_v2"] < 1e-6
        assert metrics["clip_ratio/region_mean"] == 0
    forgotten = [dataclasses.replace(s, support=None) for s in samples]  # without the record it would not be
    assert update(lanes, trained(lanes, 0), forgotten, **settings)["val/ratio"] < 0.99


def masked_logprobs(base, lanes, adapter, s: Sample, temperature=0.7):
    """log π(·|S) [T, V] by one unpadded forward pass and a mask made token by token."""
    logits_TV = fresh_logits(lanes, adapter, s)
    mask_TV = torch.full_like(logits_TV, -1e30)
    for t in range(len(drawn(s))):
        mask_TV[t, s.support.ids[s.support.offsets[t] : s.support.offsets[t + 1]].tolist()] = 0
    return torch.log_softmax(logits_TV / temperature + mask_TV, -1)


@pytest.mark.parametrize("apart", [True, False], ids=["output layer in chunks", "all logits at once"])
def test_loss_kl_and_entropy_of_the_truncated_distribution_by_autograd(base, lanes, monkeypatch, apart):
    """Gradient and numbers of policy loss, KL to the base and entropy bonus, each over the recorded sets."""
    if not apart:
        whole = dataclasses.replace(backbone_of(base), head=None)
        monkeypatch.setattr(policy_logprobs, "backbone_of", lambda base: whole)
    adapter = trained(lanes, 0)
    samples = rollout(base, lanes, adapter, top_p=0.8, min_p=0.02)
    terms = {"loss": "reinforce", "temperature": 0.7, "kl_coef": 0.4, "entropy_coef": 0.3}
    metrics, tokens = update(lanes, adapter, samples, micro_batch_tokens=60, **terms), totals(samples).tokens
    grad, adapter, loss, k3 = adapter.flat.grad.clone(), trained(lanes, 0), 0.0, 0.0
    fresh = lanes.new_adapter(4, 8.0).initialise(1)
    with torch.no_grad():
        fresh.flat.zero_()
    for s in samples:
        logprobs_TV = masked_logprobs(base, lanes, adapter, s)
        chosen_T = logprobs_TV.gather(1, torch.from_numpy(drawn(s))[:, None])[:, 0]
        with torch.no_grad():
            reference_TV = masked_logprobs(base, lanes, fresh, s)
            reference_T = reference_TV.gather(1, torch.from_numpy(drawn(s))[:, None])[:, 0]
        entropy_T = -(logprobs_TV.exp() * logprobs_TV.clamp(min=-1e9)).sum(-1)
        difference_T = chosen_T - reference_T
        terms_T = -torch.from_numpy(s.advantages[s.action_mask]).to(chosen_T) * chosen_T
        part = (terms_T + 0.4 * difference_T.square() / 2 - 0.3 * entropy_T).sum() / tokens
        part.backward()
        loss += part.item()
        k3 += (torch.exp(-difference_T) - 1 + difference_T).sum().item() / tokens
    assert float((adapter.flat.grad - grad).norm() / grad.norm()) < 1e-4
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert metrics["kl"] == pytest.approx(k3, rel=1e-4)


def test_slopes_of_the_head_by_hand():
    """∂ log π(y|S)/∂z = onehot(y) − π(·|S), and 0 outside S; with a cap, a multiplier and rows in several chunks."""
    torch.manual_seed(0)
    weight_VH, hidden_NH = torch.eye(5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    sets = [[0, 2, 4], [1], [0, 1, 2, 3, 4]]
    rows = torch.tensor([row for row, kept in enumerate(sets) for _ in kept])
    supports = Supports(rows, torch.tensor([token for kept in sets for token in kept]), [0, 3, 4, 9])
    targets_N = torch.tensor([2, 1, 3])
    for head in (Head(weight_VH), Head(weight_VH, softcap=1.5), Head(weight_VH, multiplier=0.4)):
        object.__setattr__(head, "chunk_rows", lambda: 2)
        h = hidden_NH.clone().requires_grad_()
        chosen_N, entropy_N = head.logprobs(h, targets_N, 0.7, entropy=True, supports=supports)
        (chosen_N + 0.6 * entropy_N).sum().backward()
        z = hidden_NH.clone().requires_grad_()
        made = head.softcap * torch.tanh(z / head.softcap) if head.softcap else z * head.multiplier
        total = torch.zeros((), dtype=torch.float64)
        for row, kept in enumerate(sets):
            logprobs = torch.log_softmax(made[row, kept] / 0.7, -1)
            chosen, entropy = logprobs[kept.index(int(targets_N[row]))], -(logprobs.exp() * logprobs).sum()
            torch.testing.assert_close(chosen_N[row], chosen)
            torch.testing.assert_close(entropy_N[row], entropy)
            total = total + chosen + 0.6 * entropy
        total.backward()
        torch.testing.assert_close(h.grad, z.grad)


def one_token(base, lanes, adapter, **cut):
    """Every token that one draw could have given, each as a sequence with the recorded set and its probability."""
    request = dataclasses.replace(asked_for(samples=1, max_tokens=1, prompts=1, **cut)[0])
    completion = sample(LocalEngine(base, lanes), [request], [adapter])[0][0]
    kept, one = support_of(completion, 0), np.ones(1)
    logits = logits_of(base, lanes, adapter, request.prompt_ids, completion.token_ids)[0, kept] / 0.7
    chances = torch.softmax(logits, -1)
    support = Support(completion.support.ids, completion.support.offsets)
    made = [
        Sample.single_turn(request.prompt_ids, [token], np.log(one * float(q)), one, support=support)
        for token, q in zip(kept, chances, strict=True)
    ]
    return made, chances


def test_ratios_after_the_weights_have_moved_are_over_the_set_that_was_sampled_from(base, lanes):
    """Σ over S of π_old(y|S)·ρ(y) = 1 whatever the new weights: no token loses its ratio, as it would over the set of
    the new weights; and k3 against the base is the KL divergence of the truncated distributions."""
    adapter = trained(lanes, 0)
    samples, chances = one_token(base, lanes, adapter, top_p=0.8)
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
    k3_S1 = kl_terms("k3", moved_S1, reference_S1, torch.ones(len(samples), 1, dtype=torch.bool))
    exact = float((moved_S1.exp() * (moved_S1 - reference_S1)).sum())
    assert float((moved_S1.exp() * k3_S1).sum()) == pytest.approx(exact, abs=1e-5)


def test_dropout_takes_no_token_out_of_its_set(base, lanes):
    """Logits under dropout are others than the sampler's; the ratio of every token stays finite."""
    adapter = trained(lanes, 0)
    samples = rollout(base, lanes, adapter, top_p=0.8)
    metrics = update(lanes, adapter, samples, temperature=0.7, dropout=0.5, stream=("d",))
    assert 0.3 < metrics["val/ratio"] < 3
    assert math.isfinite(metrics["loss"])


def test_every_action_of_several_turns_keeps_its_own_sets(base, lanes):
    """Three turns, the sets of the second after those of the first: what the update computes over them is what one
    sampler gave and another."""
    adapter, engine = trained(lanes, 0), LocalEngine(base, lanes)
    first, second, third = (
        sample(engine, [dataclasses.replace(asked_for(samples=1, max_tokens=n, **cut)[0], stream=(n,))], [adapter])[0][
            0
        ]
        for n, cut in ((4, {"top_p": 0.8}), (3, {"top_k": 3}), (5, {"min_p": 0.1}))
    )
    prompt = Prompt(Problem("p", "?", ""), "?", (5, 9, 17))
    turns = [Turn((5, 9, 17), first), Turn((8, 30), second), Turn((61,), third)]
    conversation = Rollout(prompt, turns, RewardResult(1.0), 1.0, token_advantages_T=np.ones(12))
    whole = samples_of_rollout(conversation)[0]
    places = [(action, t) for action in (first, second, third) for t in range(len(action))]
    assert len(whole.support.offsets) == len(places) + 1 == len(drawn(whole)) + 1
    for t, (action, own) in enumerate(places):
        assert support_of(whole, t) == support_of(action, own)
    expected_TV = masked_logprobs(base, lanes, adapter, whole).detach()
    expected_T = expected_TV.gather(1, torch.from_numpy(drawn(whole))[:, None])[:, 0]
    single = Sample.single_turn(
        (5, 9, 17), first.token_ids, first.logprobs_T, np.ones(len(first)), support=first.support
    )
    with torch.no_grad(), lanes.single(adapter):
        chosen_BT, _ = token_logprobs(base, collate([single, whole], base), 0.7)
    torch.testing.assert_close(chosen_BT[1, : len(places)], expected_T, atol=1e-5, rtol=0)


def test_sequences_with_and_without_a_record_do_not_mix(base, lanes):
    samples = rollout(base, lanes, trained(lanes, 0), top_p=0.8)
    samples[0] = dataclasses.replace(samples[0], support=None)
    with pytest.raises(ValueError, match="some samples"):
        collate(samples, base)


# -- from the file to the records -----------------------------------------------------------------------------------


def test_a_campaign_trains_and_evaluates_every_set_truncated_in_its_own_way(model, tmp_path):
    """The runs of a cohort are cut differently, each with a ratio of 1."""
    path = campaign(tmp_path, model, steps=2)
    text = path.read_text().replace("[training]\n", "[training]\ntop_p = 0.8\nmin_p = 0.01\ntemperature = 0.7\n")
    sets = '[[evaluation.sets]]\nname = "whole"\ntop_p = 1\n[[evaluation.sets]]\nname = "cut"\ntop_k = 2\n'
    text = text.replace("[evaluation]\n", "[evaluation]\nmin_p = 0.0\n").replace("[reward]", f"{sets}[reward]")
    path.write_text(text.replace('transform_mode = "none"\n', 'transform_mode = "none"\ntop_p = 0.7\n', 1))
    assert launch(load(path), tmp_path / "out", NullObserver()).exit_status == 0
    rows = [row for file in sorted((tmp_path / "out").glob("runs/*/metrics.jsonl")) for row in read_jsonl(file)]
    ratios = [row["val/ratio"] for row in rows if row["val/ratio"] is not None]
    assert len(ratios) > 2
    assert all(abs(ratio - 1) < 1e-5 for ratio in ratios)
    for condition, top_p in (("grpo+none", 0.7), ("rloo", 0.8)):
        run = next((tmp_path / "out/runs").glob(f"{condition}*_s1"))
        cuts = {(row["name"], row["top_p"], row["top_k"], row["min_p"]) for row in read_jsonl(run / "evals.jsonl")}
        assert cuts == {("whole", 1.0, 0, 0.0), ("cut", top_p, 2, 0.0)}
        answers = read_jsonl(run / "emergence/evaluations.jsonl")
        whole, cut = ([row["completion"] for row in answers if row["name"] == name] for name in ("whole", "cut"))
        assert whole
        assert whole != cut


@pytest.mark.parametrize(("text", "expected"), [
    ("", [(1.0, 0, 0.0), (1.0, 0, 0.0)]),
    ("[training]\ntop_k = -1", [(1.0, 0, 0.0), (1.0, 0, 0.0)]),
    ("[training]\ntop_p = 0.8", [(0.8, 1024, 0.0), (0.8, 1024, 0.0)]),
    ("[training]\ntop_p = 0.8\n[evaluation]\ntop_p = 1", [(0.8, 1024, 0.0), (1.0, 0, 0.0)]),
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
