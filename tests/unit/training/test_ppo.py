"""PPO's critic in the policy and in the loop: values, their update beside the policy's, and what a run records of them.

The formulas have their oracles in ``maths/test_critic.py`` and ``maths/test_trl_ppo.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from lane_cases import drawn, in_turns, local_policy, rollout, totals, trained
from toymodels import train_quietly

from retrain.algorithms.gae import fill_token_advantages
from retrain.algorithms.standard import assign_credit, load_modes
from retrain.config import load, parse_dict
from retrain.errors import ModelError
from retrain.maths.critic import value_loss
from retrain.policy.backbone import backbone_of
from retrain.policy.local import LocalPolicy
from retrain.policy.objective import objective_of
from retrain.policy.protocol import Denominators, Scores, TrainBatch, Want
from retrain.policy.threads import Workers
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Sample, Turn

PPO = {"advantage_mode": "gae"}


def ppo_policy(base, lanes, *, moved: bool = True, algorithm=None, **critic) -> LocalPolicy:
    """A PPO policy, by default with weights, of the critic's head and adapter too, that have left their beginning."""
    made = local_policy(
        base,
        lanes,
        algorithm=PPO | (algorithm or {}),
        critic=critic,
        optimizer={"grad_clip_norm": 0.0},
        training={"num_iterations": 2},
    )
    assert made.critic is not None
    if moved:
        noise = torch.Generator().manual_seed(5)
        with torch.no_grad():
            made.adapter.flat.copy_(trained(lanes, 1, size=0.05).flat)
            made.critic.head.flat.normal_(0.0, 0.3, generator=noise)
            if made.critic.adapter is not None:
                made.critic.adapter.flat.copy_(trained(lanes, 2, size=0.05).flat)
    return made


def with_targets(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """The samples with made-up values from before and targets."""
    noise = np.random.default_rng(seed)
    for sample in samples:
        sample.values = np.where(sample.action_mask, noise.normal(size=len(sample)), 0.0)
        sample.value_targets = np.where(sample.action_mask, noise.normal(size=len(sample)), 0.0)
    return samples


def batch_of(samples: list[Sample], step: int = 0) -> TrainBatch:
    counted = totals(samples)
    return TrainBatch(samples, Denominators(counted.tokens, counted.sequences, False, counted.tokens), step, ("ppo",))


def plain_values(policy: LocalPolicy, sample: Sample) -> torch.Tensor:
    """Values [T] by one unpadded forward pass of the whole model, in the plainest way, with gradient."""
    critic = policy.critic
    assert critic is not None
    with policy.lanes.single(critic.adapter or policy.adapter):
        ids = torch.from_numpy(sample.token_ids)[None]
        hidden_LH = policy.base.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    values_L = hidden_LH @ critic.head.flat[:-1] + critic.head.flat[-1]
    return values_L[:-1][torch.from_numpy(sample.action_mask[1:])]


# -- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
def test_values_are_a_linear_function_of_the_states_that_predict_the_actions(base, lanes, share):
    policy = ppo_policy(base, lanes, share_adapter=share)
    samples = [in_turns(s) if i % 2 else s for i, s in enumerate(rollout(base, lanes, policy.adapter))]
    scores = policy.score(samples, frozenset({Want.VALUES, Want.LOGPROBS}))
    assert scores.values is not None
    assert scores.logprobs is not None
    for sample, values_T, logprobs_T in zip(samples, scores.values, scores.logprobs, strict=True):
        assert values_T == pytest.approx(plain_values(policy, sample).detach().numpy(), abs=2e-5)
        assert logprobs_T == pytest.approx(sample.logprobs[sample.action_mask], abs=2e-5)  # still the policy's
    assert np.std(np.concatenate(scores.values)) > 0.01


def test_an_untrained_critic_expects_nothing_and_its_adapter_is_not_the_policys(base, lanes):
    policy = ppo_policy(base, lanes, moved=False)
    values = policy.score(rollout(base, lanes, policy.adapter), frozenset({Want.VALUES})).values
    assert values is not None
    assert not np.concatenate(values).any()
    critic = policy.critic
    assert critic is not None
    assert critic.adapter is not None
    assert not torch.equal(critic.adapter.flat, policy.adapter.flat)
    assert ppo_policy(base, lanes, moved=False, lora_rank=2).critic.adapter.rank == 2  # type: ignore[union-attr]


def test_a_model_whose_states_cannot_be_had_has_no_critic(base, lanes, monkeypatch):
    policy = ppo_policy(base, lanes)
    monkeypatch.setattr(backbone_of(base), "decoder", None)
    samples = rollout(base, lanes, policy.adapter)
    with pytest.raises(ModelError, match='it can have no critic: advantage_mode = "grpo"'):
        policy.score(samples, frozenset({Want.VALUES}))


# -- its update ---------------------------------------------------------------------------------------------------


def gradients(policy: LocalPolicy, samples: list[Sample], step: int = 0, **sections) -> dict[str, torch.Tensor]:
    """The gradients of one update, and nothing of its step."""
    config, critic = policy.config, policy.critic
    assert critic is not None
    before = [flat.detach().clone() for flat in (policy.adapter.flat, *critic.weights)]
    policy.numbers = policy.update(batch_of(samples, step), objective_of(config, "ppo"), 1e-3)  # type: ignore[attr-defined]
    found = {"policy": policy.adapter.flat.grad.clone(), "head": critic.head.flat.grad.clone()}  # type: ignore[union-attr]
    if critic.adapter is not None:
        found["critic"] = critic.adapter.flat.grad.clone()  # type: ignore[union-attr]
    policy.moved = [not torch.equal(a, b) for a, b in zip(before, (policy.adapter.flat, *critic.weights), strict=True)]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_critics_gradient_is_autograds(base, lanes, clip):
    policy = ppo_policy(base, lanes, cliprange_value=clip, vf_coef=0.5)
    critic = policy.critic
    assert critic is not None
    assert critic.adapter is not None
    samples = with_targets(rollout(base, lanes, policy.adapter))
    weights = [critic.head.flat, *critic.adapter.views]
    total, count, loss, clipped = torch.zeros(()), sum(len(drawn(s)) for s in samples), 0.0, 0
    for sample in samples:
        own = sample.action_mask
        values_BT = plain_values(policy, sample)[None]
        old_BT, targets_BT = (torch.from_numpy(x[own]).float()[None] for x in (sample.values, sample.value_targets))  # type: ignore[index]
        per_token_BT, marks_BT = value_loss(values_BT, old_BT, targets_BT, torch.ones_like(old_BT).bool(), clip)
        total = total + 0.5 * per_token_BT.sum() / count
        loss, clipped = loss + float(per_token_BT.detach().sum()) / count, clipped + int(marks_BT.sum())
    expected = torch.autograd.grad(total, weights)
    found = gradients(policy, samples)
    norm = float(torch.cat([g.flatten() for g in expected]).norm())
    torch.testing.assert_close(found["head"], expected[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found["critic"], torch.cat([g.flatten() for g in expected[1:]]), rtol=1e-3, atol=1e-5)
    numbers = policy.numbers  # type: ignore[attr-defined]
    assert numbers["loss/value_avg"] == pytest.approx(loss, rel=1e-4)
    assert numbers["val/clipfrac_avg"] == pytest.approx(clipped / count)
    assert (clipped > 0) == (clip > 0)
    assert numbers["optim/critic_grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert policy.moved == [True, True, True]  # type: ignore[attr-defined]


def test_a_critic_of_its_own_leaves_the_policys_update_alone(base, lanes):
    """Bit for bit that of the same advantages without a critic."""
    policy = ppo_policy(base, lanes)
    samples = rollout(base, lanes, policy.adapter)
    found = gradients(policy, with_targets(samples))
    other = local_policy(base, lanes, optimizer={"grad_clip_norm": 0.0})
    with torch.no_grad():
        other.adapter.flat.copy_(trained(lanes, 1, size=0.05).flat)
    numbers = other.update(batch_of(samples), objective_of(other.config, "ppo"), 1e-3)
    assert torch.equal(found["policy"], other.adapter.flat.grad)  # type: ignore[arg-type]
    assert torch.equal(policy.adapter.flat, other.adapter.flat)
    own = policy.numbers  # type: ignore[attr-defined]
    assert {key: own[key] for key in numbers if "timing" not in key} == {
        key: value for key, value in numbers.items() if "timing" not in key
    }
    assert own["loss/policy_avg"] == pytest.approx(numbers["loss"], abs=1e-7)  # divided by tokens, nothing added


def test_a_shared_adapter_has_the_gradient_of_both_losses(base, lanes):
    """∇(policy loss + vf_coef·value loss), the value's part by autograd."""
    policy = ppo_policy(base, lanes, share_adapter=True, cliprange_value=0.0, vf_coef=0.2)
    critic = policy.critic
    assert critic is not None
    samples = with_targets(rollout(base, lanes, policy.adapter))
    count, total = sum(len(drawn(s)) for s in samples), torch.zeros(())
    for sample in samples:
        targets_T = torch.from_numpy(sample.value_targets[sample.action_mask]).float()  # type: ignore[index]
        total = total + 0.2 * 0.5 * (plain_values(policy, sample) - targets_T).square().sum() / count
    value_part = torch.autograd.grad(total, [critic.head.flat, *policy.adapter.views])
    alone = local_policy(base, lanes, optimizer={"grad_clip_norm": 0.0})
    with torch.no_grad():
        alone.adapter.flat.copy_(policy.adapter.flat)
    alone.update(batch_of(samples), objective_of(alone.config, "ppo"), 1e-3)
    expected = alone.adapter.flat.grad + torch.cat([g.flatten() for g in value_part[1:]])
    found = gradients(policy, samples)
    torch.testing.assert_close(found["policy"], expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found["head"], value_part[0], rtol=1e-3, atol=1e-5)
    numbers = policy.numbers  # type: ignore[attr-defined]
    assert numbers["loss"] == pytest.approx(numbers["loss/policy_avg"] + 0.2 * numbers["loss/value_avg"], rel=1e-4)
    assert policy.moved == [True, True]  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [False, True])
def test_the_same_gradients_for_every_split_into_micro_batches_and_for_several_workers(base, lanes, share):
    made = {}
    for tokens, workers in ((16384, 1), (40, 1), (40, 2)):
        policy = ppo_policy(base, lanes, share_adapter=share)
        policy.budget.tokens, policy.budget.plan = tokens, None
        policy.workers = Workers(workers)
        made[tokens, workers] = gradients(policy, with_targets(rollout(base, lanes, policy.adapter)))
    for name, whole in made[16384, 1].items():
        torch.testing.assert_close(made[40, 1][name], whole, rtol=1e-4, atol=1e-6)
        assert torch.equal(made[40, 2][name], made[40, 1][name])


@pytest.mark.parametrize("share", [False, True])
def test_in_its_warm_up_the_critic_learns_alone(base, lanes, share):
    policy = ppo_policy(base, lanes, share_adapter=share, warmup_steps=2)
    samples = with_targets(rollout(base, lanes, policy.adapter))
    version = policy.version
    gradients(policy, samples, step=1)
    numbers = policy.numbers  # type: ignore[attr-defined]
    assert policy.moved == [False, True, *([] if share else [True])]  # type: ignore[attr-defined]
    assert policy.version == version + 1  # its weights have changed, which is what a version counts
    assert (numbers["num_datums"], numbers.get("optim/grad_norm")) == (0, None)
    assert numbers["loss/value_avg"] > 0
    assert abs(numbers["kl_sample_train_v1"]) < 1e-5  # sampler and trainer are compared all the same
    gradients(policy, samples, step=2)
    assert all(policy.moved)  # type: ignore[attr-defined]
    assert policy.version == version + 2


def test_a_critic_that_learns_fits_its_targets(base, lanes):
    """Those of two prompts, one of which is always solved and one never."""
    policy = ppo_policy(base, lanes, moved=False, cliprange_value=0.0, lr=1e-2, vf_coef=1.0)
    samples = rollout(base, lanes, policy.adapter)[:6]
    for i, sample in enumerate(samples):
        sample.values = np.zeros(len(sample))
        sample.value_targets = np.where(sample.action_mask, i // 3, 0.0)
    objective, errors = objective_of(policy.config, "ppo"), []
    while len(errors) < 400 and (not errors or errors[-1] > 0.01):
        errors.append(policy.update(batch_of(samples), objective, 1e-3)["loss/value_avg"])
    assert errors[0] > 0.1
    assert errors[-1] <= 0.01  # a constant would be left with 0.125


# -- advantages of episodes ---------------------------------------------------------------------------------------


def episode(
    prompt: Prompt, lengths: tuple[int, ...], rewards: tuple[float | None, ...], total: float | None
) -> Rollout:
    turns = [
        Turn(prompt.token_ids, Action([3] * n, "", np.full(n, -0.5), None, "stop"), reward=reward)
        for n, reward in zip(lengths, rewards, strict=True)
    ]
    return Rollout(prompt, turns, RewardResult(total))


def credited(rollouts: list[Rollout], scores: Scores, **sections):
    config = parse_dict({"algorithm": PPO | sections.pop("algorithm", {}), **sections})
    group = Group(rollouts[0].prompt, rollouts)
    return group, fill_token_advantages([group], scores, config), config


PROMPT = Prompt(Problem("0", "", ""), "", (1, 2, 3))


def test_the_next_action_bootstraps_across_what_was_read():
    """Two turns of two tokens and one; the first turn's reward comes with its last token, the rest at the very end."""
    one = episode(PROMPT, (2, 1), (0.5, None), 2.0)
    values = np.array([0.1, 0.2, 0.4])
    _, (advantages, numbers), _ = credited(
        [one], Scores(values=[values]), critic={"gamma": 0.9, "lam_policy": 0.8, "lam_value": 1.0, "whiten": False}
    )
    deltas = [0.0 + 0.9 * 0.2 - 0.1, 0.5 + 0.9 * 0.4 - 0.2, 1.5 - 0.4]
    third = deltas[2]
    second = deltas[1] + 0.72 * third
    assert advantages[one] == pytest.approx([deltas[0] + 0.72 * second, second, third])
    assert one.value_targets_T == pytest.approx([0.9 * (0.5 + 0.9 * 1.5), 0.5 + 0.9 * 1.5, 1.5])  # λ = 1: the return
    assert one.advantage == pytest.approx(np.mean(advantages[one]))
    assert one.values_T is not None
    assert numbers["critic/value_mean"] == pytest.approx(values.mean())


def test_rollouts_without_a_reward_or_a_token_take_no_part():
    rated, ungraded = episode(PROMPT, (2,), (None,), 1.0), episode(PROMPT, (3,), (None,), None)
    empty = Rollout(PROMPT, [], RewardResult(0.0))
    scores = Scores(values=[np.zeros(2), np.ones(3), np.zeros(0)])
    group, (advantages, numbers), _ = credited([rated, ungraded, empty], scores, critic={"whiten": False})
    assert list(advantages) == [rated]
    assert (ungraded.values_T, ungraded.value_targets_T) == (None, None)
    assert np.isnan(ungraded.advantage)
    assert group.discarded is None
    scores = Scores(values=[np.ones(3)], logprobs=[np.full(3, -1.0)], reference=[np.full(3, -1.5)])
    group, (advantages, numbers), _ = credited([ungraded], scores)
    assert (group.discarded, advantages, numbers) == ("no_reward", {}, {"objective/kl": 1.5})  # of all that was sampled


def test_kl_in_the_reward_and_what_is_logged_of_it():
    one, two = episode(PROMPT, (3,), (None,), 1.0), episode(PROMPT, (2,), (None,), -1.0)
    logprobs = [np.array([-1, -0.5, -0.2]), np.array([-0.7, -0.3])]
    reference = [np.array([-1.2, -0.4, -0.2]), np.array([-0.6, -0.5])]
    values = [np.array([0.1, 0.2, 0.3]), np.array([0.0, 0.1])]
    scores = Scores(logprobs=logprobs, reference=reference, values=values)
    keys = {"kl_coef": 0.05, "kl_in_reward": "k1"}
    _, (advantages, numbers), _ = credited([one, two], scores, algorithm=keys, critic={"whiten": False})
    assert advantages[one] == pytest.approx([0.8215, 0.77, 0.7])  # algorithms2 §10
    assert numbers["objective/kl"] == pytest.approx(0.1)
    assert numbers["objective/non_score_reward"] == pytest.approx(-0.005)
    assert advantages[two] == pytest.approx([0.005 + 0.1 + 0.95 * (-1.01 - 0.1), -1.01 - 0.1])  # score on the last
    differences = np.concatenate(logprobs) - np.concatenate(reference)
    assert numbers["kl"] == pytest.approx(np.mean(np.exp(-differences) - 1 + differences))
    keys["kl_in_reward"] = "none"  # then it is the loss's, and only measured here
    _, (advantages, numbers), _ = credited([one, two], scores, algorithm=keys, critic={"whiten": False})
    assert advantages[two][-1] == pytest.approx(-1.1)
    assert numbers["objective/kl"] == pytest.approx(0.1)
    assert "objective/non_score_reward" not in numbers


def test_token_weights_act_on_each_tokens_own_advantage():
    """GTPO's weights and HICRA's gain are functions of one token's advantage, so a critic's go with them."""
    one = episode(PROMPT, (4,), (None,), 1.0)
    one.turns[0].action.logprobs_T = np.array([-0.1, -2.0, -0.4, -1.5])
    scores = Scores(values=[np.array([0.3, 0.9, -0.2, 0.1])])
    sections = {"critic": {"whiten": False}, "gtpo": {"beta": 0.5}}
    group, (own, _), config = credited([one], scores, algorithm={"transform_mode": "gtpo"}, **sections)
    assign_credit([group], config, 0.0, ("placebo",), load_modes(config.algorithm), own)
    surprisal = -one.turns[0].action.logprobs_T
    weights = 1 + 0.5 * (surprisal / surprisal.mean() - 1)
    assert one.token_advantages_T == pytest.approx(own[one] * weights)
    assert np.std(own[one]) > 0.1


# -- whole runs ---------------------------------------------------------------------------------------------------

TOML = """
[algorithm]
advantage_mode = "gae"
kl_coef = 0.02
kl_in_reward = "k1"
{algorithm}
[critic]
lr = 5e-3
{critic}
[training]
max_steps = 3
batch_size = 6
group_size = {size}
max_tokens = 24
lr = 5e-3
num_iterations = 2
[model]
lora_rank = 4
[backend]
devices = "cpu"
"""
DOCUMENTED = ("eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
              "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "loss/policy_avg", "loss/value_avg",
              "val/clipfrac_avg", "policy/entropy_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens", "lr",
              "episode")  # fmt: skip
"""What TRL's documentation names for PPO."""


def train(folder: Path, critic: str = "", algorithm: str = "", size: int = 4) -> list[dict]:
    folder.mkdir(exist_ok=True)
    return train_quietly(folder, TOML.format(critic=critic, algorithm=algorithm, size=size))


def test_two_lambdas_are_a_file_and_survive_being_written(tmp_path):
    """What is resolved names every key, ``lam`` too, which must not look as if somebody had set it."""
    file = tmp_path / "two.toml"
    file.write_text('[algorithm]\nadvantage_mode = "gae"\n[critic]\nlam_policy = 0.9\nlam_value = 1.0\n')
    config = load(file).config
    assert (config.critic.policy_lambda, config.critic.value_lambda) == (0.9, 1.0)
    assert parse_dict(config.to_dict()) == config


def test_means_of_the_critic_are_over_all_action_tokens_however_the_batch_is_split(tmp_path):
    """Also where an entropy mask leaves few of them to the policy. With a rate of nearly 0 the splits agree."""
    keys = 'transform_mode = "entropy_mask"\nentropy_mask_rho = 0.05'
    rows = {}
    for parts in (1, 3):
        text = TOML.format(critic="", algorithm=keys, size=4).replace("5e-3", "1e-9")
        text = text.replace("num_iterations = 2", f"num_iterations = 2\nminibatches = {parts}")
        (tmp_path / str(parts)).mkdir()
        rows[parts] = train_quietly(tmp_path / str(parts), text)[0]
    for key in ("loss/value_avg", "loss/policy_avg", "policy/entropy_avg", "val/ratio"):
        assert rows[3][key] == pytest.approx(rows[1][key], rel=1e-4, abs=1e-7), key


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The rows of a run, and for each step its groups as they were credited and what the policy had said of them."""
    seen = []
    plain = fill_token_advantages

    def watching(groups, scores, config):
        made = plain(groups, scores, config)
        seen.append((groups, scores))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrain.algorithms.standard.fill_token_advantages", watching)
        rows = train(tmp_path_factory.mktemp("watched"))
    return rows, seen


def test_a_run_records_every_number_that_trl_documents(watched):
    rows, _ = watched
    for row in rows:
        for name in DOCUMENTED:
            assert row[name] is not None, name
        assert row["episode"] == 24 * (row["step"] + 1)
        assert row["num_datums"] == 24
        assert (row["optim/updates"], row["lr"]) == (2, 5e-3)


def test_the_numbers_of_a_run_equal_their_definitions(watched):
    rows, seen = watched
    for row, (groups, scores) in zip(rows, seen, strict=True):
        rollouts = [one for group in groups for one in group.rollouts]
        kl = [np.sum(p - q) for p, q in zip(scores.logprobs, scores.reference, strict=True)]
        assert row["objective/kl"] == pytest.approx(np.mean(kl), abs=1e-9)
        assert row["objective/non_score_reward"] == pytest.approx(-0.02 * np.mean(kl), abs=1e-9)
        assert row["objective/entropy"] == pytest.approx(np.mean([-one.logprobs_T.sum() for one in rollouts]))
        score = np.mean([one.reward.total_reward for one in rollouts])
        assert row["objective/scores"] == pytest.approx(score)
        assert row["objective/rlhf_reward"] == pytest.approx(score + row["objective/non_score_reward"])
        values, targets = (
            np.concatenate([getattr(one, name) for one in rollouts]) for name in ("values_T", "value_targets_T")
        )
        assert row["critic/value_mean"] == pytest.approx(values.mean(), abs=1e-9)
        if targets.std() > 1e-6:
            assert row["critic/explained_variance"] == pytest.approx(1 - (targets - values).var() / targets.var())
        advantages = np.concatenate([one.token_advantages_T for one in rollouts])
        assert advantages.mean() == pytest.approx(0, abs=1e-6)
        assert advantages.std() == pytest.approx(1, abs=0.01)
        assert row["val/num_eos_tokens"] == sum(one.stop_reason == "stop" for one in rollouts)
        assert row["policy/entropy_avg"] == pytest.approx(row["entropy"], rel=0.2)  # after an update: close, not equal
        assert row["policy/entropy_avg"] != row["entropy"]
    assert rows[0]["critic/value_mean"] == 0.0  # nothing was expected yet
    assert rows[0]["objective/kl"] == 0.0  # the policy still is the base
    assert rows[1]["critic/value_mean"] != 0.0


def test_one_completion_for_a_prompt_is_enough(tmp_path):
    rows = train(tmp_path, size=1)
    assert [row["num_datums"] for row in rows] == [6, 6, 6]
    assert any(row["optim/grad_norm"] > 0 for row in rows)
    assert not (tmp_path / "out/notes.jsonl").read_text().count("groups_uniform")


def test_a_shared_adapter_trains_and_a_warm_up_waits(tmp_path):
    rows = train(tmp_path, "share_adapter = true\nwarmup_steps = 1")
    assert [row["num_datums"] for row in rows] == [0, 24, 24]
    assert [row["loss"] is None for row in rows] == [True, False, False]
    assert all(row["loss/value_avg"] > 0 for row in rows)


def test_a_run_without_a_critic_has_no_key_of_one(tmp_path):
    text = TOML.format(critic="", algorithm="", size=4).replace('"gae"', '"grpo"')
    text = text.replace('kl_in_reward = "k1"\n', "").replace("[critic]\nlr = 5e-3\n", "")
    row = train_quietly(tmp_path, text)[0]
    assert not [key for key in row if key.startswith("critic/") or key in ("loss/value_avg", "optim/critic_lr")]
    assert row["objective/kl"] != row["kl"]  # per sequence and per token
