"""The updates of one batch and a critic's, each number against its definition on a toy model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_cases import single_run
from lane_cases import drawn, local_policy, rollout, totals, trained
from record_cases import config, group

from retrain.algorithms.gae import fill_token_advantages
from retrain.algorithms.standard import assign_credit, fill_advantages
from retrain.campaign.running.controller import launch
from retrain.config import load, parse_dict
from retrain.files import read_jsonl
from retrain.policy.objective import objective_of
from retrain.policy.protocol import Scores, TrainBatch, Want, samples_of
from retrain.record.observer import NullObserver
from retrain.types import Group
from retrain.updates import note_old_logprobs, passes

GAE = {"advantage_mode": "gae", "transform_mode": "none"}


def credited(count: int, silent: tuple[int, ...] = ()):
    """Groups of two answers of different lengths, credited; those at ``silent`` have equal rewards."""
    groups = [
        group([1.0, 1.0] if i in silent else [1.0, 0.0], [3 + i, 4 + 2 * i], problem_id=str(i)) for i in range(count)
    ]
    fill_advantages(groups, "grpo")
    return groups, assign_credit(groups, config(), 0.0, ("placebo",))


def training(**keys):
    return config(training={"batch_size": 8, **keys}).training


def places_of(batch: TrainBatch, groups: Sequence[Group]) -> list[int]:
    """Where in the whole batch its samples are, each of which trains with another sum of advantages."""
    sums = [float(one.advantages.sum()) for one in samples_of(groups)]
    assert len(set(sums)) == len(sums)
    return [sums.index(float(one.advantages.sum())) for one in batch.samples]


# -- several updates ------------------------------------------------------------------------------------------------


def test_the_ratio_of_several_updates_is_taken_against_the_trainer_before_them(base, lanes):
    """What the sampler said, here something far off, is only compared with."""
    policy = local_policy(base, lanes)
    groups, credit = credited(3)
    several = training(num_iterations=2)
    before = policy.score(samples_of(groups, every=True), frozenset({Want.LOGPROBS})).logprobs
    note_old_logprobs(policy, groups)
    for own_T, one in zip(before, [one for each in groups for one in each.rollouts], strict=True):
        np.testing.assert_array_equal(one.old_logprobs_T, own_T)
        assert abs(own_T - one.logprobs_T).max() > 1.0
    objective = objective_of(parse_dict({}), "ppo")
    (first,), (second,) = passes(groups, credit, several, 0, (0,))
    numbers = policy.update(first, objective, 0.01)
    assert numbers["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["policy/clipfrac_avg"] == 0.0
    assert abs(numbers["kl_sample_train_v1"]) > 0.1
    again = policy.update(second, objective, 0.01)
    assert again["val/ratio"] != pytest.approx(1.0, abs=1e-4)
    assert again["policy/approxkl_avg"] > 1e-6


@pytest.mark.parametrize("by", ["group", "sequence"])
def test_each_update_divides_by_what_its_own_minibatch_counts(by):
    """The group without signal counts too; over a pass it is the whole batch."""
    groups, credit = credited(5, silent=(1,))
    assert credit.denominators.sequences == 10
    for minibatches in passes(groups, credit, training(minibatches=2, minibatch_by=by), 0, (0,)):
        found = Counter[str]()
        for batch in minibatches:
            found += Counter(tokens=batch.denominators.tokens, sequences=batch.denominators.sequences)
            own = sum(int(one.loss_mask.sum()) for one in batch.samples)
            assert batch.denominators.tokens < credit.denominators.tokens
            assert batch.denominators.action_tokens == batch.denominators.tokens >= own
        assert found == Counter(tokens=credit.denominators.tokens, sequences=10)
        silent = credit.denominators.tokens - sum(int(s.loss_mask.sum()) for b in minibatches for s in b.samples)
        assert silent == sum(map(len, groups[1].rollouts))


def test_every_pass_splits_the_batch_in_its_own_way_and_every_step_too():
    groups, credit = credited(8)
    several = training(num_iterations=4, minibatches=2)

    def split(step: int, stream=(0, 1)):
        made = list(passes(groups, credit, several, step, stream))
        assert [batch.update for each in made for batch in each] == list(range(8))
        split = [tuple(tuple(places_of(batch, groups)) for batch in each) for each in made]
        assert all(sorted(place for places in each for place in places) == list(range(16)) for each in split)
        assert all(list(places) == sorted(places) for each in split for places in each)
        return split

    assert split(0) == split(0)
    assert len(set(split(0))) > 2
    assert set(split(0)) != set(split(1))
    assert set(split(0)) != set(split(0, (0, 2)))


def run_one(folder: Path, model: Path, algorithm: str, lines: str, **sets: object) -> list[dict]:
    """The rows of a small run."""
    path = single_run(folder, model, "run", algorithm, lines)
    out = folder / str(len(list(folder.iterdir())))
    assert launch(load(path, [f"{key}={value}" for key, value in sets.items()]), out, NullObserver()).exit_status == 0
    return read_jsonl(out / "metrics.jsonl")


def test_passes_end_when_the_policy_has_moved_far_enough(model, tmp_path):
    """The first pass begins where the batch does; a bound that the second exceeds allows no third."""
    made = {}
    for bound in (1e-9, 100.0, 0.0):
        lines = f"max_steps = 1\nnum_iterations = 3\ntarget_kl = {bound}"
        (row,) = run_one(tmp_path, model, 'advantage_mode = "grpo"\ntransform_mode = "none"', lines)
        made[bound] = row["optim/updates"]
    assert made == {1e-9: 2, 100.0: 3, 0.0: 3}


def test_the_schedule_counts_updates_for_policy_and_critic(model, tmp_path):
    gae = 'advantage_mode = "gae"\ntransform_mode = "none"\n[critic]\nlr = 0.02\n[optimizer]\nschedule = "linear"'
    rows = run_one(tmp_path, model, gae, "max_steps = 2\nminibatches = 2")
    assert [row["optim/updates"] for row in rows] == [2, 2]
    assert [row["optim/lr_max"] for row in rows] == pytest.approx([0.01, 0.005])
    assert [row["optim/lr"] for row in rows] == pytest.approx([0.00875, 0.00375])
    assert [row["optim/critic_lr"] for row in rows] == pytest.approx([0.0175, 0.0075])


# -- a critic -------------------------------------------------------------------------------------------------------


def gae_of(*, lam: float, whiten: bool = False, gamma: float = 1.0):
    """Advantages of answers of 3, 5 and 1 tokens whose values are 0.1, 0.2, …, and the values."""
    groups = [group([1.0, 0.5], [3, 5]), group([2.0], [1], problem_id="p1")]
    rollouts = [one for each in groups for one in each.rollouts]
    values = [np.arange(1, len(one) + 1) / 10 for one in rollouts]
    settings = parse_dict({"algorithm": GAE, "critic": {"lam": lam, "gamma": gamma, "whiten": whiten}})
    advantages, _ = fill_token_advantages(groups, Scores(values=values), settings)
    return [advantages[one] for one in rollouts], values, rollouts


def test_the_score_comes_with_the_last_token_and_nothing_comes_after_it():
    """λ = 0: each token is compared with what is expected of the next, the last one with the score."""
    advantages, values, rollouts = gae_of(lam=0.0, gamma=0.5)
    for advantages_T, values_T, one in zip(advantages, values, rollouts, strict=True):
        wanted_T = np.append(0.5 * values_T[1:], one.reward.total_reward) - values_T
        np.testing.assert_allclose(advantages_T, wanted_T, atol=1e-12)
        np.testing.assert_allclose(one.value_targets_T, wanted_T + values_T, atol=1e-12)
        np.testing.assert_allclose(one.values_T, values_T)


def test_with_lambda_1_every_token_is_compared_with_what_was_returned():
    advantages, values, rollouts = gae_of(lam=1.0)
    for advantages_T, values_T, one in zip(advantages, values, rollouts, strict=True):
        np.testing.assert_allclose(advantages_T, one.reward.total_reward - values_T, atol=1e-12)


def test_advantages_are_whitened_over_tokens_not_over_padding():
    plain, *_ = gae_of(lam=0.9)
    whitened, *_ = gae_of(lam=0.9, whiten=True)
    together = np.concatenate(plain)
    wanted = (together - together.mean()) / np.sqrt(together.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(whitened), wanted, atol=1e-12)


def critic_policy(base, lanes, weight_decay: float = 0.0, **critic):
    """A policy whose critic is not what it was at first, and its objective."""
    training = {"num_iterations": 2, "weight_decay": weight_decay}
    sections = {"algorithm": GAE, "critic": critic, "training": training}
    policy = local_policy(base, lanes, **sections)
    policy.adapter.load(trained(lanes, 1).tensors())
    if policy.critic.adapter is not None:
        policy.critic.adapter.load(trained(lanes, 2).tensors())
    with torch.no_grad():
        policy.critic.head.flat.copy_(torch.linspace(-1.0, 1.0, len(policy.critic.head.flat)))
    return policy, objective_of(parse_dict(sections), "ppo")


def batch_of(policy, target: float = 1.0) -> TrainBatch:
    """Answers with advantages, with old values of 0 and one target."""
    samples = [
        replace(one, values=np.zeros(len(one)), value_targets=np.where(one.action_mask, target, 0.0))
        for one in rollout(policy.base, policy.lanes, policy.adapter)
    ]
    return TrainBatch(samples, replace(totals(samples), action_tokens=totals(samples).tokens), 0, (0,))


@pytest.mark.parametrize("share", [False, True])
def test_policy_and_critic_are_scored_each_with_its_own_adapter(base, lanes, share):
    """Values are the head's of the hidden states that predict the tokens; log-probabilities know of no critic."""
    policy, _ = critic_policy(base, lanes, share_adapter=share)
    plain = local_policy(base, lanes)
    plain.adapter.load(policy.adapter.tensors())
    samples = rollout(base, lanes, policy.adapter)
    scores = policy.score(samples, frozenset({Want.LOGPROBS, Want.VALUES, Want.REFERENCE, Want.ENTROPY}))
    wanted = plain.score(samples, frozenset({Want.LOGPROBS, Want.REFERENCE, Want.ENTROPY}))
    for kind in ("logprobs", "reference", "entropy"):
        for a, b in zip(getattr(scores, kind), getattr(wanted, kind), strict=True):
            np.testing.assert_array_equal(a, b)
    assert abs(np.concatenate(scores.logprobs) - np.concatenate(scores.reference)).max() > 0.01
    own = policy.adapter if share else policy.critic.adapter
    weights = policy.critic.head.flat.detach()
    for values_T, sample in zip(scores.values, samples, strict=True):
        with torch.no_grad(), lanes.single(own):
            hidden = base.model.model(input_ids=torch.from_numpy(sample.token_ids)[None]).last_hidden_state[0]
        expected = hidden @ weights[:-1] + weights[-1]
        np.testing.assert_allclose(values_T, expected[:-1][sample.action_mask[1:]].numpy(), atol=1e-4)


@pytest.mark.parametrize("share", [False, True])
def test_the_value_loss_is_its_definition_on_what_the_critic_says(base, lanes, share):
    """Clipped around the old values, which are 0 here, over all tokens that were sampled."""
    policy, objective = critic_policy(base, lanes, share_adapter=share, cliprange_value=0.3)
    batch = batch_of(policy)
    values_M = np.concatenate(policy.score(batch.samples, frozenset({Want.VALUES})).values)
    assert 0 < (abs(values_M) > 0.3).sum() < len(values_M)
    near, far = (values_M - 1.0) ** 2, (np.clip(values_M, -0.3, 0.3) - 1.0) ** 2
    numbers = policy.update(batch, objective, 1e-4)
    assert len(values_M) == sum(len(drawn(one)) for one in batch.samples)
    assert numbers["loss/value_avg"] == pytest.approx(0.5 * np.maximum(near, far).mean(), rel=1e-4)
    assert numbers["val/clipfrac_avg"] == pytest.approx((far > near).mean())


@pytest.mark.parametrize("share", [False, True])
def test_a_critic_learns_from_all_tokens_also_where_few_train_the_policy(base, lanes, share):
    """With `entropy_mask` the policy loss is divided by few tokens; the value loss stays a mean over all sampled ones,
    or its gradient would grow with every token that is masked."""
    (policy, objective), (masked_policy, _) = (critic_policy(base, lanes, share_adapter=share) for _ in range(2))
    batch = batch_of(policy)
    first = [one.loss_mask & (np.cumsum(one.loss_mask) == 1) for one in batch.samples]
    few = [replace(one, loss_mask=mask) for one, mask in zip(batch.samples, first, strict=True)]
    masked = replace(batch, samples=few, denominators=replace(batch.denominators, tokens=len(few)))
    numbers = policy.update(batch, objective, 1e-4)
    with_mask = masked_policy.update(masked, objective, 1e-4)
    assert with_mask["loss/value_avg"] == pytest.approx(numbers["loss/value_avg"])
    assert with_mask["optim/critic_grad_norm"] == pytest.approx(numbers["optim/critic_grad_norm"], rel=1e-4)
    if share:
        vf_coef = parse_dict({"algorithm": GAE}).critic.vf_coef
        value = vf_coef * with_mask["loss/value_avg"]
        assert with_mask["loss"] == pytest.approx(with_mask["loss/policy_avg"] + value, rel=1e-4)


def test_weight_decay_shrinks_the_critic_as_it_shrinks_the_policy(base, lanes):
    """AdamW's decay is w ← w − lr·λ·w besides the step of the gradient."""
    lr, decay = 0.01, 0.1
    (plain, objective), (decayed, _) = (critic_policy(base, lanes, each) for each in (0.0, decay))
    before = [flat.detach().clone() for flat in (plain.adapter.flat, *plain.critic.weights)]
    for policy in (plain, decayed):
        policy.update(batch_of(policy), objective, lr)
    without, with_decay = ([p.adapter.flat, *p.critic.weights] for p in (plain, decayed))
    assert len(before) == 3  # adapter of the policy, head and adapter of the critic
    for w, a, b in zip(before, without, with_decay, strict=True):
        torch.testing.assert_close(a - b, lr * decay * w, rtol=0, atol=1e-6)
        assert float((lr * decay * w).abs().max()) > 1e-5


def test_a_policy_with_a_critic_of_its_own_learns_what_one_without_learns(base, lanes):
    policy, objective = critic_policy(base, lanes)
    plain = local_policy(base, lanes)
    plain.adapter.load(policy.adapter.tensors())
    batch, before = batch_of(policy), policy.critic.adapter.flat.detach().clone()
    numbers = policy.update(batch, objective, 0.01)
    others = plain.update(batch, objective_of(parse_dict({}), "ppo"), 0.01)
    assert torch.equal(policy.adapter.flat, plain.adapter.flat)
    assert not torch.equal(policy.critic.adapter.flat, before)
    assert {key: numbers[key] for key in others if not key.startswith("timing")} == {
        key: value for key, value in others.items() if not key.startswith("timing")
    }


def test_a_critic_that_reads_the_policys_adapter_leaves_it_alone_while_it_warms_up(base, lanes):
    policy, objective = critic_policy(base, lanes, share_adapter=True, warmup_steps=1)
    batch = batch_of(policy)
    adapter, head = (flat.detach().clone() for flat in (policy.adapter.flat, policy.critic.head.flat))
    policy.update(batch, objective, 0.01)
    assert torch.equal(policy.adapter.flat, adapter)
    assert not torch.equal(policy.critic.head.flat, head)
    policy.update(replace(batch, step=1), objective, 0.01)
    assert not torch.equal(policy.adapter.flat, adapter)
