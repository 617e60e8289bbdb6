from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.lanes import fresh_scores, in_turns, local_policy, objective, rollout, totals, trained, with_tokens

from retrain.errors import CheckpointError, NonFinite, UsageError
from retrain.policy.local import LocalPolicy
from retrain.types import StepBatch, Want

EVERYTHING = frozenset({Want.LOGPROBS, Want.REFERENCE})
SCALED = {"lora": {"alpha": 8.0}}


@pytest.fixture
def policy(base, lanes) -> LocalPolicy:
    made = local_policy(base, lanes, training={"temperature": 0.7, "lr": 1e-2}, **SCALED)
    made.adapter.load(trained(lanes, 0).tensors())
    return made


def taught(policy: LocalPolicy, samples, step: int = 0, **keys):
    batch = StepBatch(samples, totals(samples), step, (0, 1))
    return policy.update(batch, objective(temperature=0.7, **keys), 1e-2).metrics


def samples_of(policy: LocalPolicy):
    found = rollout(policy.base, policy.lanes, policy.adapter, 0.7)
    return [in_turns(s) if i % 3 == 1 else s for i, s in enumerate(found)]


@pytest.mark.parametrize("tokens", [1, 60])
def test_scores_equal_a_fresh_forward_pass(policy, tokens):
    """Sample by sample in their own order, however they are cut into micro-batches; the reference is the base."""
    policy.budget.tokens, samples = tokens, samples_of(policy)
    before, policy.adapter.flat.grad[:] = policy.adapter.flat.detach().clone(), 3.0
    scores, untrained = policy.score(samples, EVERYTHING), policy.lanes.new_adapter(4, 8.0)
    assert torch.equal(policy.adapter.flat, before)
    assert bool((policy.adapter.flat.grad == 3.0).all())
    assert scores.values is None
    assert len(scores.logprobs) == len(scores.reference) == len(samples)
    for i, s in enumerate(samples):
        with torch.no_grad():
            logprobs, _ = fresh_scores(policy.lanes, policy.adapter, s, 0.7)
            reference, _ = fresh_scores(policy.lanes, untrained, s, 0.7)
        np.testing.assert_allclose(scores.logprobs[i], logprobs, atol=1e-4)
        np.testing.assert_allclose(scores.reference[i], reference, atol=1e-4)
        assert np.abs(scores.logprobs[i] - scores.reference[i]).max() > 1e-2
    first = samples_of(policy)[0]  # of one turn: the very distribution that it was drawn from
    np.testing.assert_allclose(scores.logprobs[0], first.logprobs[first.action_mask], atol=1e-4)


def test_an_update_returns_the_log_probabilities_of_the_samples_that_it_trains_on(policy):
    samples = samples_of(policy)
    samples[1] = with_tokens(samples[1], loss_mask=False)
    scores = policy.score(samples, frozenset({Want.LOGPROBS}))
    batch = StepBatch(samples, totals(samples), 0, (0, 1), keep_logprobs=True)
    kept = policy.update(batch, objective(temperature=0.7), 1e-2).trainer_logprobs
    assert kept[1] is None
    for i in (0, *range(2, len(samples))):
        np.testing.assert_allclose(kept[i], scores.logprobs[i], atol=1e-5)
    assert not policy.update(replace(batch, keep_logprobs=False), objective(), 1e-2).trainer_logprobs


def test_the_version_counts_changes_of_the_weights(base, lanes, policy):
    """Rollouts are named by it: two sets of weights must not share a name."""
    samples = samples_of(policy)
    taught(policy, samples)
    assert policy.version == 1
    weights = policy.adapter.flat.detach().clone()
    taught(policy, [])  # no group had signal
    with pytest.raises(NonFinite):
        taught(policy, [with_tokens(s, advantages=np.inf) for s in samples])
    assert policy.version == 1
    assert torch.equal(weights, policy.adapter.flat)
    taught(policy, samples)
    assert policy.version == 2
    again = local_policy(base, lanes)
    again.restore(policy.state())
    assert again.version == 2


def test_a_lower_rank_is_another_version_with_new_moments(base, lanes):
    """Moments of removed rows would move them."""
    policy = local_policy(base, lanes, lora={"anneal": [[1, 3], [2, 2]]}, training={"max_steps": 4})
    policy.adapter.load(trained(lanes, 0).tensors())
    samples = samples_of(policy)
    taught(policy, samples)
    assert policy.optimizer.state
    assert [len(policy.begin_step(step)) for step in (0, 1, 2, 3, 2)] == [0, 1, 1, 0, 0]  # each rank is lowered once
    assert (policy.version, policy.adapter.live_rank) == (3, 2)
    assert not policy.optimizer.state
    taught(policy, samples, 1)
    for name, a in policy.adapter.A.items():
        assert a[:2].any()
        assert not a[2:].any()
        assert not policy.adapter.B[name][:, 2:].any()


def test_a_resumable_snapshot_gives_the_very_next_update(base, lanes, policy, tmp_path):
    """Weights, moments, version and the learnt budget, bit by bit; the weights alone give another update."""
    samples = samples_of(policy)
    for step in range(2):
        taught(policy, samples, step)
    policy.budget.shrink([5, 2], [40, 40], "out of memory")
    policy.notes()
    policy.snapshot(resumable=True).write(tmp_path)
    state, numbers = policy.state(), taught(policy, samples, 2)
    again, cold = (local_policy(base, lanes, seed, **SCALED) for seed in (7, 8))
    again.load(tmp_path)
    again.restore(state)
    cold.begin_with(tmp_path)
    assert (again.version, again.budget.tokens) == (2, 40)
    assert {k: v for k, v in taught(again, samples, 2).items() if not k.startswith("timing_")} == {
        k: v for k, v in numbers.items() if not k.startswith("timing_")
    }
    assert torch.equal(again.adapter.flat, policy.adapter.flat)
    assert again.version == policy.version == 3
    taught(cold, samples, 2)
    assert not torch.allclose(cold.adapter.flat, policy.adapter.flat, atol=1e-4)
    for one, other in zip(again.optimizer.state.values(), policy.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in other)


def test_weights_that_do_not_fit_are_refused(base, lanes, policy, tmp_path):
    with pytest.raises(AssertionError, match="resumable"):
        policy.snapshot().write(tmp_path)
    policy.snapshot().export(tmp_path, tmp_path / "nowhere")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    policy.snapshot(resumable=True).write(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        local_policy(base, lanes, model={"lora_rank": 3}).load(tmp_path)
    with pytest.raises(UsageError, match="LoRA scale 2, this run 8"):
        local_policy(base, lanes, lora={"alpha": 32.0}).begin_with(tmp_path)
