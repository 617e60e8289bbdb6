import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.campaigns import Heard, continue_training, train
from helpers.lanes import (
    OWN,
    SHARED,
    credit,
    critic_campaign,
    critic_files,
    in_turns,
    last_checkpoint,
    local_policy,
    made,
    rollout,
    rows_of,
    runs_of,
    totals,
    trained,
    with_values,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from retrain.adapters.squeeze import squeeze
from retrain.algorithms import objective_of
from retrain.errors import CheckpointError, ModelError, NonFinite
from retrain.files import read_json, read_jsonl
from retrain.policy.backbone import backbone_of
from retrain.policy.critic import MOMENTS, WEIGHTS
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import value_loss
from retrain.records.tokens import TokenFile
from retrain.threads import Workers
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Scores, StepBatch, Turn, Want

PPO = {"advantage_mode": "gae"}
SEVERAL = {"training": {"num_iterations": 2, "minibatches": 2, "keep_last": 0}, "logging": {"rollouts_every": 1}}
IN_LOSS = ("grpo", "kl_coef = 0.05\nnum_iterations = 1\nminibatches = 1\n")


def ppo_policy(base, lanes, **critic) -> LocalPolicy:
    """A PPO policy whose adapter, critic's head and critic's adapter have left their beginning."""
    keys = {"optimizer": {"grad_clip_norm": 0.0}, "training": {"num_iterations": 2}}
    policy = local_policy(base, lanes, algorithm=PPO, critic=critic, **keys)
    with torch.no_grad():
        policy.adapter.flat.copy_(trained(lanes, 1, size=0.05).flat)
        policy.critic.head.flat.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
        if policy.critic.adapter is not None:
            policy.critic.adapter.flat.copy_(trained(lanes, 2, size=0.05).flat)
    return policy


def batch_of(samples: list[Sample], step: int = 0) -> StepBatch:
    counted = totals(samples)
    return StepBatch(samples, replace(counted, action_tokens=counted.tokens), step, ("ppo",))


def ppo_batch(policy: LocalPolicy) -> list[Sample]:
    return with_values(rollout(policy.base, policy.lanes, policy.adapter))


def plain_values(policy: LocalPolicy, sample: Sample) -> torch.Tensor:
    """Values [T] by one unpadded forward pass of the whole model, in the plainest way, with gradient."""
    critic = policy.critic
    with policy.lanes.single(critic.adapter or policy.adapter):
        ids = torch.from_numpy(sample.token_ids)[None]
        hidden_LH = policy.base.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    values_L = hidden_LH @ critic.head.flat[:-1] + critic.head.flat[-1]
    return values_L[:-1][torch.from_numpy(sample.action_mask[1:])]


@pytest.mark.parametrize("share", [False, True])
def test_values_are_a_linear_function_of_the_states_that_predict_the_actions(base, lanes, share):
    policy = ppo_policy(base, lanes, share_adapter=share)
    samples = [in_turns(s) if i % 2 else s for i, s in enumerate(rollout(base, lanes, policy.adapter))]
    scores = policy.score(samples, frozenset({Want.VALUES, Want.LOGPROBS}))
    for sample, values_T, logprobs_T in zip(samples, scores.values, scores.logprobs, strict=True):
        assert values_T == pytest.approx(plain_values(policy, sample).detach().numpy(), abs=2e-5)
        assert logprobs_T == pytest.approx(sample.logprobs[sample.action_mask], abs=2e-5)  # still the policy's
    assert np.std(np.concatenate(scores.values)) > 0.01
    assert lanes.mode.adapter is None  # no lane stays active
    base.backbone = replace(backbone_of(base), decoder=None)
    with pytest.raises(ModelError, match='which a critic needs: set advantage_mode = "grpo"'):
        policy.score(samples, frozenset({Want.VALUES}))


class Updated:
    """The gradients of one update, its numbers, and which weights it moved."""

    def __init__(self, policy: LocalPolicy, samples: list[Sample], step: int = 0):
        critic = policy.critic
        weights = [policy.adapter.flat, *(critic.weights if critic else ())]
        before = [flat.detach().clone() for flat in weights]
        self.numbers = policy.update(batch_of(samples, step), objective_of(policy.config, "ppo"), 1e-3).metrics
        self.moved = [not torch.equal(*pair) for pair in zip(before, weights, strict=True)]
        self.gradients = {"policy": policy.adapter.flat.grad.clone()}
        if critic:
            self.gradients["head"] = critic.head.flat.grad.clone()
        if critic and critic.adapter is not None:
            self.gradients["critic"] = critic.adapter.flat.grad.clone()


def updated_without_critic(policy: LocalPolicy, samples: list[Sample]) -> tuple[LocalPolicy, Updated]:
    other = local_policy(policy.base, policy.lanes, optimizer={"grad_clip_norm": 0.0})
    with torch.no_grad():
        other.adapter.flat.copy_(policy.adapter.flat)
    return other, Updated(other, samples)


def flat(gradients) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_critics_gradient_is_autograds(base, lanes, clip):
    policy = ppo_policy(base, lanes, cliprange_value=clip, vf_coef=0.5)
    samples = ppo_batch(policy)
    count, loss, clipped = totals(samples).tokens, torch.zeros(()), 0
    for sample in samples:
        values_BT = plain_values(policy, sample)[None]
        old_BT, targets_BT = (
            torch.from_numpy(values[sample.action_mask]).float()[None]
            for values in (sample.values, sample.value_targets)
        )
        per_token_BT, marks_BT = value_loss(values_BT, old_BT, targets_BT, torch.ones_like(old_BT).bool(), clip)
        loss = loss + per_token_BT.sum() / count
        clipped += int(marks_BT.sum())
    expected = torch.autograd.grad(0.5 * loss, [policy.critic.head.flat, *policy.critic.adapter.views])
    updated = Updated(policy, samples)
    torch.testing.assert_close(updated.gradients["head"], expected[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(updated.gradients["critic"], flat(expected[1:]), rtol=1e-3, atol=1e-5)
    assert updated.numbers["loss/value_avg"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert updated.numbers["val/clipfrac_avg"] == pytest.approx(clipped / count)
    assert (clipped > 0) == (clip > 0)
    assert updated.numbers["optim/critic_grad_norm"] == pytest.approx(float(flat(expected).norm()), rel=1e-3)
    assert updated.moved == [True, True, True]


def test_a_critic_of_its_own_leaves_the_policys_update_alone(base, lanes):
    """Bit for bit that of the same advantages without a critic."""
    policy = ppo_policy(base, lanes)
    samples = ppo_batch(policy)
    other, without = updated_without_critic(policy, samples)
    updated = Updated(policy, samples)
    assert torch.equal(updated.gradients["policy"], without.gradients["policy"])
    assert torch.equal(policy.adapter.flat, other.adapter.flat)
    for key, value in without.numbers.items():
        assert "timing" in key or updated.numbers[key] == value, key
    assert updated.numbers["loss/policy_avg"] == pytest.approx(without.numbers["loss"], abs=1e-7)


def test_a_shared_adapter_has_the_gradient_of_both_losses(base, lanes):
    """∇(policy loss + vf_coef·value loss), the value's part by autograd."""
    policy = ppo_policy(base, lanes, share_adapter=True, cliprange_value=0.0, vf_coef=0.2)
    samples = ppo_batch(policy)
    loss = torch.zeros(())
    for sample in samples:
        targets_T = torch.from_numpy(sample.value_targets[sample.action_mask]).float()
        loss = loss + 0.2 * 0.5 * (plain_values(policy, sample) - targets_T).square().sum() / totals(samples).tokens
    of_value = torch.autograd.grad(loss, [policy.critic.head.flat, *policy.adapter.views])
    _, without = updated_without_critic(policy, samples)
    updated = Updated(policy, samples)
    expected = without.gradients["policy"] + flat(of_value[1:])
    torch.testing.assert_close(updated.gradients["policy"], expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(updated.gradients["head"], of_value[0], rtol=1e-3, atol=1e-5)
    losses = [updated.numbers[key] for key in ("loss", "loss/policy_avg", "loss/value_avg")]
    assert losses[0] == pytest.approx(losses[1] + 0.2 * losses[2], rel=1e-4)
    assert updated.moved == [True, True]


@pytest.mark.parametrize("share", [False, True])
def test_the_same_gradients_for_every_split_into_micro_batches_and_for_several_workers(base, lanes, share):
    made = {}
    for tokens, workers in ((16384, 1), (40, 1), (40, 2)):
        policy = ppo_policy(base, lanes, share_adapter=share)
        policy.budget.tokens, policy.budget.plan = tokens, None
        policy.workers = Workers(workers)
        made[tokens, workers] = Updated(policy, ppo_batch(policy)).gradients
    for name, whole in made[16384, 1].items():
        torch.testing.assert_close(made[40, 1][name], whole, rtol=1e-4, atol=1e-6)
        assert torch.equal(made[40, 2][name], made[40, 1][name])


@pytest.mark.parametrize("share", [False, True])
def test_in_its_warm_up_the_critic_learns_alone(base, lanes, share):
    policy = ppo_policy(base, lanes, share_adapter=share, warmup_steps=2)
    samples, version = ppo_batch(policy), policy.version
    updated = Updated(policy, samples, step=1)
    assert updated.moved == [False, True, *([] if share else [True])]
    assert policy.version == version + 1  # its weights have changed, which is what a version counts
    assert (updated.numbers["num_datums"], updated.numbers.get("optim/grad_norm")) == (0, None)
    assert updated.numbers["loss/value_avg"] > 0
    assert abs(updated.numbers["kl_sample_train_v1"]) < 1e-5  # sampler and trainer are compared all the same
    assert all(Updated(policy, samples, step=2).moved)
    assert policy.version == version + 2


PROMPT = Prompt(Problem("0", "", ""), "", (1, 2, 3))


def episode(lengths: tuple[int, ...], total: float | None, rewards: tuple[float | None, ...] = (None,)) -> Rollout:
    turns = tuple(
        Turn(PROMPT.token_ids, Action([3] * length, "", np.full(length, -0.5), None, "stop"), reward=reward)
        for length, reward in zip(lengths, rewards, strict=True)
    )
    return Rollout(PROMPT, turns, RewardResult(total))


def credited(rollouts: list[Rollout], scores: Scores, algorithm=None, **sections):
    base = {"algorithm": PPO | {"transform_mode": "none"} | (algorithm or {}), "critic": {"whiten": False}}
    return credit([Group(PROMPT, tuple(rollouts))], base | sections, scores=scores)


def test_the_next_action_bootstraps_across_what_was_read():
    """Two turns of two tokens and one; the first turn's reward comes with its last token, the rest at the very end."""
    scores = Scores(values=[np.array([0.1, 0.2, 0.4])])
    critic = {"whiten": False, "gamma": 0.9, "lam_policy": 0.8, "lam_value": 1.0}
    batch = credited([episode((2, 1), 2.0, rewards=(0.5, None))], scores, critic=critic)
    (one,) = batch.rollouts
    first, second, third = 0.0 + 0.9 * 0.2 - 0.1, 0.5 + 0.9 * 0.4 - 0.2, 1.5 - 0.4
    second += 0.72 * third
    assert one.token_advantages_T == pytest.approx([first + 0.72 * second, second, third])
    assert one.value_targets_T == pytest.approx([0.9 * (0.5 + 0.9 * 1.5), 0.5 + 0.9 * 1.5, 1.5])  # λ = 1: the return
    assert one.advantage == pytest.approx(np.mean(one.token_advantages_T))
    assert one.values_T is not None
    assert batch.metrics["critic/value_mean"] == pytest.approx(0.7 / 3)


def test_rollouts_without_a_reward_or_a_token_take_no_part():
    sampled = [episode((2,), 1.0), episode((3,), None), Rollout(PROMPT, (), RewardResult(0.0))]
    batch = credited(sampled, Scores(values=[np.zeros(2), np.ones(3), np.zeros(0)]))
    rated, ungraded, empty = batch.rollouts
    assert [one for one in batch.rollouts if one.is_credited] == batch.rated == [rated]
    assert (ungraded.values_T, ungraded.value_targets_T, empty.values_T) == (None, None, None)
    assert batch.groups[0].discarded is None
    scores = Scores(values=[np.ones(3)], logprobs=[np.full(3, -1.0)], reference=[np.full(3, -1.5)])
    batch = credited([episode((3,), None)], scores)
    assert (batch.groups[0].discarded, batch.rated) == ("no_reward", [])
    assert batch.metrics == {"objective/kl": 1.5}  # of all that was sampled


def test_kl_in_the_reward_and_what_is_logged_of_it():
    sampled = [episode((3,), 1.0), episode((2,), -1.0)]
    scores = Scores(
        logprobs=[np.array([-1, -0.5, -0.2]), np.array([-0.7, -0.3])],
        reference=[np.array([-1.2, -0.4, -0.2]), np.array([-0.6, -0.5])],
        values=[np.array([0.1, 0.2, 0.3]), np.array([0.0, 0.1])],
    )
    batch = credited(sampled, scores, {"kl_coef": 0.05, "kl_in_reward": "k1"})
    (one, two), numbers = batch.rollouts, batch.metrics
    assert one.token_advantages_T == pytest.approx([0.8215, 0.77, 0.7])  # worked by hand
    assert numbers["objective/kl"] == pytest.approx(0.1)
    assert numbers["objective/non_score_reward"] == pytest.approx(-0.005)
    expected = [0.005 + 0.1 + 0.95 * (-1.01 - 0.1), -1.01 - 0.1]  # score on the last
    assert two.token_advantages_T == pytest.approx(expected)
    differences = np.concatenate(scores.logprobs) - np.concatenate(scores.reference)
    assert numbers["kl"] == pytest.approx(np.mean(np.exp(-differences) - 1 + differences))
    batch = credited(sampled, scores, {"kl_coef": 0.05, "kl_in_reward": "none"})
    (_, two), numbers = batch.rollouts, batch.metrics
    assert two.token_advantages_T[-1] == pytest.approx(-1.1)  # then KL is in the loss, and only measured here
    assert numbers["objective/kl"] == pytest.approx(0.1)
    assert "objective/non_score_reward" not in numbers


def test_token_weights_act_on_each_tokens_own_advantage():
    """GTPO's weights and HICRA's gain are functions of one token's advantage; one completion is enough."""
    surprisal_T = np.array([0.1, 2.0, 0.4, 1.5])
    action = Action([3] * 4, "", -surprisal_T, None, "stop")
    one = Rollout(PROMPT, (Turn(PROMPT.token_ids, action),), RewardResult(1.0))
    scores = Scores(values=[np.array([0.3, 0.9, -0.2, 0.1])])
    plain = credited([one], scores).rollouts[0].token_advantages_T
    batch = credited([one], scores, {"transform_mode": "gtpo"}, gtpo={"beta": 0.5})
    weights_T = 1 + 0.5 * (surprisal_T - 1)  # of mean 1
    assert batch.rollouts[0].token_advantages_T == pytest.approx(plain * weights_T)
    assert np.std(plain) > 0.1
    assert batch.groups[0].discarded is None


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> Path:
    """Two critics that take four updates of a batch, and a run without critic that takes one, in one cohort."""
    folder = tmp_path_factory.mktemp("finished")
    path = critic_campaign(folder, model, OWN, SHARED, IN_LOSS, **SEVERAL)
    train(path, folder / "out")
    return folder / "out"


def test_every_checkpoint_holds_the_critic_and_final_does_not(finished):
    with_critic = runs_of(finished)[:2]
    for run in with_critic:
        assert critic_files(run) == [
            f"checkpoints/step_00000{step}/{name}" for step in (2, 4) for name in sorted((WEIGHTS, MOMENTS))
        ]
        hashed = read_json(last_checkpoint(run) / "manifest.json")["sha256"]
        assert {WEIGHTS, MOMENTS} <= hashed.keys()
        assert [row["optim/updates"] for row in read_jsonl(run / "metrics.jsonl")] == [4] * 4
        assert [path.name for path in (run / "final").glob("*.safetensors")] == ["adapter_model.safetensors"]
        assert squeeze(run)["source_rank"] == 4  # the critic's adapter has rank 3
    own, shared = (load_file(last_checkpoint(run) / WEIGHTS) for run in with_critic)
    assert own.keys() == {"head", "adapter"}
    assert shared.keys() == {"head"}
    assert all(bool(tensor.any()) for tensor in (*own.values(), *shared.values()))


def test_entropy_and_divergence_are_means_over_sequences(finished, model):
    """As in TRL's PPO, in every mode: Σ −ln p and Σ (ln π − ln base), the base by a plain forward pass."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for run in runs_of(finished):
        rows = read_jsonl(run / "metrics.jsonl")
        for row in rows:
            surprisals, divergences = [], []
            with TokenFile(run / f"tokens_{row['step']:06d}.safetensors") as file:
                for index in range(len(file)):
                    arrays = file.rollout(index).arrays
                    ids = torch.from_numpy(arrays["ids"].astype(np.int64))
                    with torch.no_grad():
                        logprobs = base(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
                    reference = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()[arrays["action"].astype(bool)[1:]]
                    surprisals.append(-float(arrays["logprobs"].sum()))
                    divergences.append(float((arrays["trainer_logprobs"] - reference).sum()))
            assert row["objective/entropy"] == pytest.approx(np.mean(surprisals), rel=1e-4)
            if row["objective/kl"] is not None:
                assert row["objective/kl"] == pytest.approx(np.nanmean(divergences), rel=1e-3, abs=1e-4)
                assert 0 < row["timing_compute_kl_total"] < row["step_time_s"]
        assert rows[0]["objective/entropy"] > 2 * rows[0]["entropy_sampled"]  # which is per token
    for run in (runs_of(finished)[0], runs_of(finished)[2]):
        assert abs(read_jsonl(run / "metrics.jsonl")[3]["objective/kl"]) > 1e-3


def test_stopped_in_the_middle_of_updates_and_with_a_damaged_critic_equals_uninterrupted(
    finished, model, tmp_path, monkeypatch
):
    """Ctrl-C finishes all updates of the step; the damaged checkpoint is skipped for an older one."""
    updates: list[tuple[int, int]] = []

    update = LocalPolicy.update

    def interrupting(policy, batch, *rest):
        updates.append((batch.step, batch.update))
        if updates.count((2, 1)) == 1 and updates[-1] == (2, 1):
            os.kill(os.getpid(), signal.SIGINT)
        return update(policy, batch, *rest)

    monkeypatch.setattr(LocalPolicy, "update", interrupting)
    path, out = critic_campaign(tmp_path, model, OWN, SHARED, IN_LOSS, **SEVERAL), tmp_path / "out"
    train(path, out, status=130)
    assert sorted(updates) == [(step, update) for step in range(3) for update in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
    for mine, whole in zip(runs_of(out), runs_of(finished), strict=True):
        assert rows_of(mine) == rows_of(whole)[:3]
        assert last_checkpoint(mine).name == "step_000003"
    file = last_checkpoint(runs_of(out)[0]) / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    messages = Heard()
    continue_training(out, observer=messages)
    (line,) = [line for line in messages.messages if "skipped a damaged checkpoint" in line]
    assert str(file) in line
    assert len([line for line in messages.messages if line.endswith("continues at step 2")]) == 3
    for mine, whole in zip(runs_of(out), runs_of(finished), strict=True):
        assert mine.name == whole.name
        ours, theirs = made(mine), made(whole)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.parametrize(("saved", "reason"), [
    ({"algorithm": {"advantage_mode": "grpo"}}, "holds no critic: it is of a run without advantage_mode"),
    ({"algorithm": PPO, "critic": {"lora_rank": 3}}, r"\[critic\] is another one"),
    ({"algorithm": PPO, "critic": {"share_adapter": True}}, r"\[critic\] is another one"),
])  # fmt: skip
def test_a_checkpoint_without_such_a_critic_is_refused(base, lanes, tmp_path, saved, reason):
    local_policy(base, lanes, **saved).snapshot(resumable=True).write(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        local_policy(base, lanes, algorithm=PPO).load(tmp_path)


def everything(policy) -> dict[str, bytes]:
    snapshot = policy.snapshot(resumable=True)
    parts = {"weights": {"flat": snapshot.weights.flat}, "moments": snapshot.optimizer, **snapshot.critic}
    return {
        f"{part}/{name}": tensor.detach().numpy().tobytes()
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("share", [False, True])
def test_a_saved_critic_continues_and_one_that_is_not_finite_stays_as_it_was(base, lanes, tmp_path, share):
    """Weights, moments and step counts; training does not change a snapshot before it is written."""
    policy = local_policy(base, lanes, algorithm=PPO, critic={"share_adapter": share})
    objective = objective_of(policy.config, "ppo")
    policy.update(batch_of(ppo_batch(policy)), objective, 0.01)
    snapshot, saved = policy.snapshot(resumable=True), everything(policy)
    policy.update(batch_of(ppo_batch(policy), 1), objective, 0.01)
    snapshot.write(tmp_path)
    after = everything(policy)
    assert [name for name in saved if saved[name] == after[name]] == []
    assert len(saved) == (8 if share else 12)
    other = local_policy(base, lanes, algorithm=PPO, critic={"share_adapter": share})
    other.load(tmp_path)
    assert everything(other) == saved
    other.update(batch_of(ppo_batch(other), 1), objective, 0.01)
    assert everything(other) == after
    version, samples = policy.version, ppo_batch(policy)
    samples[0].value_targets[samples[0].action_mask] = np.inf
    with pytest.raises(NonFinite, match="the update was not applied"):
        policy.update(batch_of(samples, 2), objective, 0.01)
    assert everything(policy) == after
    assert policy.version == version
