from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.campaigns import toy_toml, train
from helpers.lanes import local_policy, rollout, totals, trained

from retrain.algorithms import objective_of
from retrain.config import parse_dict
from retrain.files import read_jsonl
from retrain.types import StepBatch

GAE = {"advantage_mode": "gae", "transform_mode": "none"}


def test_the_schedule_counts_updates_for_policy_and_critic(model, tmp_path):
    sections = {"algorithm": GAE, "critic": {"lr": 0.02}, "optimizer": {"schedule": "linear"}}
    training = {"max_steps": 2, "minibatches": 2, "max_tokens": 8}
    (tmp_path / "run.toml").write_text(toy_toml(model, training=training, **sections))
    train(tmp_path / "run.toml", tmp_path / "out")
    rows = read_jsonl(tmp_path / "out/metrics.jsonl")
    assert [row["optim/updates"] for row in rows] == [2, 2]
    assert [row["optim/lr_max"] for row in rows] == pytest.approx([0.01, 0.005])
    assert [row["optim/lr"] for row in rows] == pytest.approx([0.00875, 0.00375])
    assert [row["optim/critic_lr"] for row in rows] == pytest.approx([0.0175, 0.0075])


def critic_policy(base, lanes, weight_decay: float = 0.0, **critic):
    training = {"num_iterations": 2, "weight_decay": weight_decay}
    sections = {"algorithm": GAE, "critic": critic, "training": training}
    policy = local_policy(base, lanes, **sections)
    policy.adapter.load(trained(lanes, 1).tensors())
    if policy.critic.adapter is not None:
        policy.critic.adapter.load(trained(lanes, 2).tensors())
    with torch.no_grad():
        policy.critic.head.flat.copy_(torch.linspace(-1.0, 1.0, len(policy.critic.head.flat)))
    return policy, objective_of(parse_dict(sections), "ppo")


def batch_of(policy, target: float = 1.0) -> StepBatch:
    samples = [
        replace(one, values=np.zeros(len(one)), value_targets=np.where(one.action_mask, target, 0.0))
        for one in rollout(policy.base, policy.lanes, policy.adapter)
    ]
    return StepBatch(samples, replace(totals(samples), action_tokens=totals(samples).tokens), 0, (0,))


@pytest.mark.parametrize("share", [False, True])
def test_a_critic_learns_from_all_tokens_also_where_few_train_the_policy(base, lanes, share):
    """The value loss is a mean over all sampled tokens, whatever `entropy_mask` leaves out of the policy loss."""
    (policy, objective), (masked_policy, _) = (critic_policy(base, lanes, share_adapter=share) for _ in range(2))
    batch = batch_of(policy)
    first = [one.loss_mask & (np.cumsum(one.loss_mask) == 1) for one in batch.samples]
    few = [replace(one, loss_mask=mask) for one, mask in zip(batch.samples, first, strict=True)]
    masked = replace(batch, samples=few, denominators=replace(batch.denominators, tokens=len(few)))
    numbers = policy.update(batch, objective, 1e-4).metrics
    with_mask = masked_policy.update(masked, objective, 1e-4).metrics
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
