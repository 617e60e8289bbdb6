import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.campaigns import train_quietly
from helpers.lanes import drawn, local_policy, objective, rollout, trained, update
from helpers.models import TINY_RUN
from helpers.records import group

from retrain.algorithms.losses import DPPO, PPO
from retrain.config import parse_dict
from retrain.maths.corrections import Correction
from retrain.maths.ratios import loss_metrics
from retrain.policy.objective import PolicyTerm, TokenScores, policy_loss
from retrain.policy.packing import MicroBatch
from retrain.training.updates import (
    MinibatchUpdate,
    aggregate_metrics,
    exceeds_target_kl,
    iter_minibatches,
    with_old_logprobs,
)
from retrain.types import CreditedBatch, Denominators, Sample, StepBatch, Want

STREAM = (0, 0)


def batch_of(*sizes: tuple[int, ...]) -> CreditedBatch:
    """Return groups whose rollouts have these numbers of tokens, all of which train."""
    batch = CreditedBatch(tuple(group([1.0] * len(lengths), list(lengths)) for lengths in sizes))
    rollouts = batch.rollouts
    total = sum(map(len, rollouts))
    batch = replace(batch, denominators=Denominators(total, len(rollouts), False, total))
    return batch.with_fields(rollouts, ({"token_advantages_T": np.ones(len(rollout))} for rollout in rollouts))


def sample_of(length: int) -> Sample:
    ((batch,),) = split(batch_of((length,)))
    return batch.samples[0]


def split(batch: CreditedBatch, step: int = 0, **training) -> list[list[StepBatch]]:
    return list(iter_minibatches(batch, parse_dict({"training": training}).training, step, STREAM))


def lengths_of(batch: StepBatch) -> list[int]:
    return [len(drawn(sample)) for sample in batch.samples]


SIZES = ((1, 2), (3, 4), (5, 6), (7, 8))


def test_every_pass_has_every_rollout_once_and_groups_stay_together():
    seen = set()
    for number, minibatches in enumerate(split(batch_of(*SIZES), num_iterations=6, minibatches=2, batch_size=4)):
        assert [batch.update for batch in minibatches] == [2 * number, 2 * number + 1]
        assert sorted(n for batch in minibatches for n in lengths_of(batch)) == [1, 2, 3, 4, 5, 6, 7, 8]
        for batch in minibatches:
            lengths = lengths_of(batch)
            assert len(lengths) == 4
            assert all(n + 1 in lengths for n in lengths if n % 2)
            assert lengths == sorted(lengths)  # the batch's own order, so that neighbours share their prompt
        seen.add(tuple(lengths_of(minibatches[0])))
    assert len(seen) > 2  # split in each pass another way


def test_sequences_are_split_one_by_one_and_the_split_is_a_function_of_seed_and_step():
    keys = {"num_iterations": 2, "minibatches": 3, "minibatch_by": "sequence"}
    first = [list(map(lengths_of, each)) for each in split(batch_of(*SIZES), **keys)]
    assert [sorted(map(len, each)) for each in first] == [[2, 3, 3]] * 2
    assert any(n + 1 not in part for each in first for part in each for n in part if n % 2)
    assert first == [list(map(lengths_of, each)) for each in split(batch_of(*SIZES), **keys)]
    assert first != [list(map(lengths_of, each)) for each in split(batch_of(*SIZES), step=1, **keys)]
    ((batch,),) = split(batch_of(*SIZES))  # one update is the whole batch as it stands
    assert lengths_of(batch) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (batch.update, batch.denominators.tokens) == (0, 36)
    assert all(sample.old_logprobs is None for sample in batch.samples)


def test_denominators_are_those_of_a_minibatch_groups_without_signal_included():
    credited = batch_of(*SIZES).with_discarded([None, None, None, "zero_advantage"])
    (minibatches,) = split(credited, minibatches=2, batch_size=4)
    for batch in minibatches:
        quiet = 15 if batch.denominators.sequences * 2 > len(batch.samples) * 2 else 0
        assert batch.denominators.sequences == 4
        assert batch.denominators.tokens == batch.denominators.action_tokens == sum(lengths_of(batch)) + quiet
    assert sum(batch.denominators.tokens for batch in minibatches) == 36
    assert sorted(len(batch.samples) for batch in minibatches) == [2, 4]


def test_what_has_nothing_to_train_on_is_left_out_and_where_all_is_quiet_a_probe_is_scored():
    credited = batch_of(*SIZES)
    three = split(credited.with_discarded([None, *["zero_advantage"] * 3]), num_iterations=3, minibatches=4)
    assert [[lengths_of(batch) for batch in each] for each in three] == [[[1, 2]]] * 3
    ((batch,),) = split(credited.with_discarded(["zero_advantage"] * 4), num_iterations=3, minibatches=4)
    assert (list(batch.samples), len(batch.probe), batch.denominators.tokens) == ([], 4, 36)


def micro_batch(advantages, sampler, old) -> MicroBatch:
    def table(values):
        return torch.tensor(np.array([values]), dtype=torch.float64)

    mask = torch.ones(1, len(advantages), dtype=torch.bool)
    targets = torch.zeros(len(advantages), dtype=torch.int64)
    # There is no forward pass, and so no layout.
    return MicroBatch(None, targets, mask, mask, table(advantages), table(sampler), None, table(old))


def test_ratio_and_clipping_are_against_the_trainer_before_and_the_mismatch_against_the_sampler():
    p, mu = np.array([0.2, 0.4, 0.3, 0.25]), np.array([0.25, 0.4, 0.2, 0.25])
    ratio, advantages = np.array([1.5, 0.5, 1.1, 0.7]), [1.0, -1.0, 1.0, 1.0]
    batch = micro_batch(advantages, np.log(mu), np.log(p))
    logprobs = torch.tensor(np.log(p * ratio)[None], requires_grad=True)
    loss_BT, sums = PolicyTerm(PPO()).per_token(batch, TokenScores(logprobs))
    numbers = loss_metrics(sums)
    assert loss_BT.tolist()[0] == pytest.approx([-1.2, 0.8, -1.1, -0.7])
    assert (numbers["clip_ratio/high_mean"], numbers["clip_ratio/low_mean"]) == (0.25, 0.25)
    assert (numbers["clip_ratio/region_mean"], numbers["policy/clipfrac_avg"]) == (0.5, 0.5)
    assert numbers["val/ratio"] == pytest.approx(ratio.mean())
    assert numbers["val/ratio_var"] == pytest.approx(ratio.var())
    assert numbers["policy/approxkl_avg"] == pytest.approx(0.5 * np.mean(np.log(ratio) ** 2))
    before, now = np.log(mu / p), np.log(mu / (p * ratio))
    assert numbers["kl_sample_train_v1"] == pytest.approx(before.mean())
    assert numbers["kl_sample_train_v2"] == pytest.approx(0.5 * np.mean(before**2))
    assert numbers["kl_divergence_inference"] == pytest.approx(np.mean(np.exp(-now) - 1 + now))
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), logprobs)
    assert gradient_BT.tolist()[0] == pytest.approx([0, 0, -1.1, -0.7])  # clipped tokens do not train


@pytest.mark.parametrize(("now", "expected"), [(0.33, -1.65), (0.4, -1.8)])
def test_decoupled_ppo(now, expected):
    """−w·min(rA, clip(r)A) with w = p/μ (arXiv 2505.24298): μ .2, p .3, A 1, ε .2."""
    batch = micro_batch([1.0], [math.log(0.2)], [math.log(0.3)])
    scores = TokenScores(torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True))
    loss_BT, sums = PolicyTerm(PPO(), correction=Correction("tis", high=10.0)).per_token(batch, scores)
    assert loss_BT.item() == pytest.approx(expected)
    assert loss_metrics(sums)["clip_ratio/high_mean"] == (now > 0.36)


@pytest.mark.parametrize("now", [0.3, 0.33])
def test_dppo_measures_how_far_it_has_moved_from_the_trainer_before(now):
    """Its ratio is from the sampler, which may be far; ``target_kl`` is about the updates of this batch."""
    batch = micro_batch([1.0], [math.log(0.2)], [math.log(0.3)])
    scores = TokenScores(torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True))
    _, sums = PolicyTerm(DPPO()).per_token(batch, scores)
    metrics = loss_metrics(sums)
    assert metrics["policy/approxkl_avg"] == pytest.approx(0.5 * math.log(now / 0.3) ** 2)
    assert metrics["val/ratio"] == pytest.approx(now / 0.2)
    assert metrics["kl_sample_train_v2"] == pytest.approx(0.5 * math.log(0.3 / 0.2) ** 2)


def test_old_log_probabilities_are_the_trainers_own_of_every_action(base, lanes):
    policy = local_policy(base, lanes)
    policy.adapter.load(trained(lanes, 2).tensors())
    credited = batch_of((6, 4))
    credited = credited.with_fields(credited.rollouts[1:], [{"token_advantages_T": None}])  # as without a reward
    credited = with_old_logprobs(credited, policy, None)
    graded, ungraded = credited.rollouts
    assert ungraded.old_logprobs_T is None
    ((batch,),) = split(credited)
    (sample,) = batch.samples
    assert not sample.old_logprobs[~sample.action_mask].any()
    scored = policy.score([sample], frozenset({Want.LOGPROBS})).logprobs
    assert graded.old_logprobs_T == pytest.approx(scored[0], abs=1e-6)
    first, second = (update(lanes, policy.adapter, [sample], lr=1e-2) for _ in range(2))
    assert first["val/ratio"] == pytest.approx(1, abs=1e-5)  # π_old is π then
    assert second["policy/approxkl_avg"] > 1e-4
    assert second["kl_sample_train_v2"] == pytest.approx(first["kl_sample_train_v2"], abs=1e-8)


def test_the_row_of_several_updates_is_that_of_all_their_tokens():
    """Against the same statistics over the tokens of all updates."""
    noise, updates, everything = np.random.default_rng(3), [], []
    for number, count in enumerate((3, 8, 5)):
        log_ratio_BT = torch.from_numpy(noise.normal(scale=0.3, size=(2, count)))
        advantages_BT = torch.from_numpy(noise.normal(size=(2, count)))
        everything.append((log_ratio_BT, advantages_BT))
        zeros_BT, mask_BT = torch.zeros_like(log_ratio_BT), torch.ones_like(log_ratio_BT, dtype=torch.bool)
        _, sums = policy_loss(PPO(), log_ratio_BT, zeros_BT, advantages_BT, mask_BT)
        numbers = {**loss_metrics(sums), "loss": float(number), "optim/lr": 0.1 * number,
                   "optim/grad_norm": 2.0 - number, "optim/grad_clipped": number == 1, "optim/skipped": False,
                   "timing_forward_total": 1.0, "num_datums": 2}  # fmt: skip
        updates.append(MinibatchUpdate(StepBatch(2 * [sample_of(count)], Denominators(0, 0), 0, STREAM), numbers))
    row = aggregate_metrics(updates, 1)
    log_ratio_T = np.concatenate([each.numpy().ravel() for each, _ in everything])
    advantages_T = np.concatenate([each.numpy().ravel() for _, each in everything])
    ratio_T = np.exp(log_ratio_T)
    assert row["val/ratio"] == pytest.approx(ratio_T.mean())
    assert row["val/ratio_var"] == pytest.approx(ratio_T.var())
    assert row["policy/approxkl_avg"] == pytest.approx(0.5 * np.mean(log_ratio_T**2))
    low, high = (ratio_T < 0.8) & (advantages_T < 0), (ratio_T > 1.2) & (advantages_T > 0)
    assert low.any()
    assert high.any()
    assert row["clip_ratio/low_mean"] == pytest.approx(low.mean())
    assert row["clip_ratio/high_mean"] == pytest.approx(high.mean())
    assert row["policy/clipfrac_avg"] == pytest.approx((low | high).mean())
    assert (row["loss"], row["optim/lr"], row["optim/lr_max"]) == (1.0, pytest.approx(0.1), 0.2)
    assert (row["optim/grad_norm"], row["optim/grad_norm_max"]) == (1.0, 2.0)
    assert (row["optim/grad_clipped"], row["optim/grad_clipped_frac"]) == (True, pytest.approx(1 / 3))
    assert (row["optim/updates"], row["timing_forward_total"], row["num_datums"]) == (3, 3.0, 6)


def made(numbers: dict, *lengths: int) -> MinibatchUpdate:
    """An update on completions of these lengths, with these numbers."""
    samples = [sample_of(length) for length in lengths]
    return MinibatchUpdate(StepBatch(samples, Denominators(4, 1), 0, STREAM), {"optim/skipped": False} | numbers)


def test_the_extremes_are_those_of_all_updates_and_an_update_left_out_counts_in_nothing():
    keys = ("clip_ratio/low_min", "clip_ratio/high_max", "loss", "optim/skipped", "val/ratio")
    rows = [(0.5, 0.1, 1.0, False, None), (0.2, 0.9, 3.0, False, None), (None, None, None, True, None)]
    row = aggregate_metrics([made(dict(zip(keys, values, strict=True)), 4) for values in rows], 3)
    assert [row[key] for key in keys] == [0.2, 0.9, 2.0, True, None]
    assert row["optim/updates"] == 2
    means = ("objective/non_score_reward", "val/ratio", "val/ratio_var")
    first, second = (dict(zip(means, values, strict=True)) for values in ((1.0, 1.0, 0.0), (4.0, 4.0, 0.0)))
    row = aggregate_metrics([made(first, 2), made(second, 8, 8)], 1)
    assert row["objective/non_score_reward"] == pytest.approx(3.0)  # a mean over completions
    assert row["val/ratio"] == pytest.approx((2 * 1 + 16 * 4) / 18)  # over tokens


@pytest.mark.parametrize(("moved", "target", "expected"), [
    ((0.0, 0.3), 0.1, True), ((0.0, 0.3), 0.15, False), ((0.0, 0.3), None, False), ((None,), 1e-9, False),
])  # fmt: skip
def test_passes_end_early_once_the_policy_has_moved_far_enough(moved, target, expected):
    assert exceeds_target_kl([made({"policy/approxkl_avg": kl}, 4) for kl in moved], target) == expected


def train(folder, training: str) -> list[dict]:
    base = TINY_RUN.format(model="tiny-reasoner").replace("batch_size = 2", "batch_size = 4")
    return train_quietly(folder, base + training)


def test_a_target_ends_the_passes(tmp_path):
    rows = train(tmp_path, "max_tokens = 24\nnum_iterations = 3\ntarget_kl = 1e-9")
    assert [row["optim/updates"] for row in rows] == [2, 2]  # the second is the first that has moved
    for row in rows:
        assert row["kl_sample_train_v2"] < 1e-6  # before the first update sampler and trainer agree
        assert row["kl_divergence_inference"] > 1e-6


def test_an_objective_of_one_loss_reads_old_log_probabilities_where_there_are_some(base, lanes):
    """Plug-in losses get them as their second argument."""
    seen = []

    def plugin(logprobs_BT, old_BT, advantages_BT, mask_BT):
        seen.append(old_BT)
        return -(logprobs_BT - old_BT).exp() * advantages_BT

    samples = [
        replace(sample, old_logprobs=np.where(sample.action_mask, -7.0, 0.0))
        for sample in rollout(base, lanes, trained(lanes, 0))
    ]
    update(lanes, trained(lanes, 0), samples, loss=plugin)
    assert {float(value) for table in seen for value in table.unique()} <= {0.0, -7.0}
    assert objective(loss=plugin).every_sequence
