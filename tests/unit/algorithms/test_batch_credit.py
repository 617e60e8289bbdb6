import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.lanes import advantages_of, algorithm_of, apply, batch_of, compare, credit
from helpers.models import word_tokenizer

from retrain.algorithms import Modes, PlanningTokens, RegexDetector
from retrain.algorithms.algorithm import Algorithm, training_samples
from retrain.algorithms.credit.sepa_pooling import correct_rate
from retrain.errors import RunFailed
from retrain.files import dumps
from retrain.policy.base import BaseModel
from retrain.types import MAX_STALENESS, Action, CreditedBatch, Problem, Prompt, RewardResult, Scores, Turn, single_turn

TEXTS = ["so x = 4", "wait let me check so x", "notice that x = 4"]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    tokenizer = word_tokenizer(["so x = 4 notice that we can check", "that's not right wait let me check"], 280)
    return BaseModel("toy", SimpleNamespace(), tokenizer, torch.device("cpu"), torch.float32, (1,), 0, "")


def completion(base, text):
    """The text as sampled; uncertainty grows with improbability."""
    ids = base.tokenizer(text)["input_ids"] + [base.tokenizer.eos_token_id]
    logprobs_T = np.linspace(-2, -0.1, len(ids))
    return Action(ids, text, logprobs_T, np.abs(logprobs_T), "stop")


def group(base, rewards, texts=None):
    texts = texts or [f"so x = {i}" for i in range(len(rewards))]
    prompt = Prompt(Problem("p", "1+1=?", "2"), "1+1=?", (5, 6, 7))
    results = [reward if isinstance(reward, RewardResult) else RewardResult(reward) for reward in rewards]
    return single_turn(prompt, [completion(base, text) for text in texts], results)


def discarded(batch: CreditedBatch) -> list[str | None]:
    return [group.discarded for group in batch.groups]


def test_missing_rewards_take_no_part(base):
    batch = compare([group(base, [1.0, None, 0.0]), group(base, [None, None]), group(base, [0.5, 0.5])], "dr_grpo")
    assert advantages_of(batch.groups[0]).tolist() == pytest.approx([0.5, np.nan, -0.5], nan_ok=True)
    assert discarded(batch) == [None, "no_reward", "zero_advantage"]
    batch = compare([group(base, [1.0, None]), group(base, [1.0, None, 0.0])], "rloo")
    assert np.isnan(advantages_of(batch.groups[0])).all()
    assert discarded(batch) == ["no_reward", None]  # the only graded completion is compared with none
    assert advantages_of(batch.groups[1])[[0, 2]].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("reward", [-0.1, 1.5])
def test_a_reward_that_the_mode_is_not_defined_for_names_the_reward(base, reward):
    with pytest.raises(RunFailed, match=rf"advantage_mode = maxrl .*\[0, 1\], but length gave {reward:g}: "):
        compare([group(base, [0.0, reward])], "maxrl", reward_name="length")
    compare([group(base, [0.0, reward])], "grpo", reward_name="length")


@pytest.mark.parametrize(
    "mode", ["none", "gtpo", "gtpo_hicra", "gtpo_hicra_placebo", "gtpo_sepa", "gtpo_paper", "entropy_mask"]
)
def test_every_transform_mode_and_an_answer_without_tokens(base, mode):
    one = group(base, [1.0, 0.0, 1.0, 0.0], [*TEXTS, ""])
    empty = Turn(one.prompt.token_ids, Action([], "", np.zeros(0), np.zeros(0), "stop"))
    one = replace(one, rollouts=(*one.rollouts[:3], replace(one.rollouts[3], turns=(empty,))))
    batch = credit([one], {"algorithm": {"transform_mode": mode}}, base.text)
    assert batch.denominators.sequences == 3
    assert len(batch.trained) == 4
    samples = [sample for rollout in batch.trained for sample in training_samples(rollout)]
    for sample in samples:  # what was read has no advantage and does not train
        assert np.isfinite(sample.advantages).all()
        assert not sample.advantages[~sample.action_mask].any()
        assert not sample.loss_mask[~sample.action_mask].any()
    trained, total = sum(int(sample.loss_mask.sum()) for sample in samples), sum(map(len, one.rollouts))
    assert trained == (-(-total // 5) if mode == "entropy_mask" else total)
    assert batch.metrics["planning_fraction"] > 0


def test_whitening_weighs_every_graded_completion_by_its_tokens(base):
    """Completions of different lengths, and one without a reward between them: mean 0 and variance 1 over tokens."""
    texts = ["so x = 4 notice that we can check", "so", "so x = 4", "notice that x"]
    groups = [group(base, [1.0, None, 0.0, 0.0], texts), group(base, [3.0, 1.0], texts[2:])]
    rated = compare(groups, "reinforce_pp").rated
    values, counts = np.array([(rollout.advantage, len(rollout)) for rollout in rated]).T
    assert len(set(counts)) > 2
    assert np.average(values, weights=counts) == pytest.approx(0, abs=1e-12)
    assert np.average(values**2, weights=counts) == pytest.approx(1, rel=1e-3)
    assert abs(values.mean()) > 0.05  # it is not the plain mean that is 0


@pytest.mark.parametrize("keys", [{}, {"discard_group_zero_advantage": False}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_denominators_count_skipped_groups(base, keys):
    """A group without signal counts in the divisor; it trains where the loss has another term or it is kept."""
    groups = [group(base, [1.0, 0.0]), group(base, [0.0, 0.0]), group(base, [None, 1.0]), group(base, [None, None])]
    batch = credit(groups, {"algorithm": keys})
    without = None if keys else "zero_advantage"
    assert discarded(batch) == [None, without, without, "no_reward"]
    assert len(batch.trained) == (5 if keys else 2)
    assert not any(rollout.token_advantages_T.any() for rollout in batch.trained[2:])
    assert (batch.denominators.tokens, batch.denominators.sequences) == (sum(map(len, batch.rated)), 5)
    for rollout in batch.trained:
        assert rollout.loss_mask_T.all()
        assert len(set(rollout.token_advantages_T.tolist())) == 1


@pytest.mark.parametrize("change", [{}, {"kl_coef": 0.1}, {"discard_group_zero_advantage": False}])
def test_gtpo_paper_decides_by_itself_which_groups_have_signal(base, change):
    """A group has signal if right and wrong answers are in it, whatever their rewards."""
    equal = group(base, [RewardResult(0.5, correct=True), RewardResult(0.5, correct=False)])
    right = group(base, [0.6, 1.0])
    assert discarded(compare([equal, right], "grpo")) == ["zero_advantage", None]
    batch = credit([equal, right], {"algorithm": {"transform_mode": "gtpo_paper", **change}})
    assert discarded(batch) == [None, None if change else "zero_advantage"]
    first, second, *others = batch.trained
    assert (first.token_advantages_T > 0).all()
    assert (second.token_advantages_T < 0).all()
    assert len(others) == (2 if change else 0)
    assert batch.denominators.sequences == 4


def test_no_phrase_spans_two_turns(base):
    one = group(base, [1.0, 0.0], ["so x notice", "so x = notice that 4"])
    texts = [" that x = 4", "notice that x"]
    rollouts = [
        replace(rollout, turns=(*rollout.turns, Turn((9, 9), completion(base, text))))
        for rollout, text in zip(one.rollouts, texts, strict=True)
    ]
    batch = batch_of([replace(one, rollouts=tuple(rollouts))])
    first, second = apply(batch, PlanningTokens(RegexDetector(), base.text)).rollouts
    assert len(first.planning_T) == len(first)
    assert not first.planning_T.any()
    marked = [base.tokenizer.decode([i]) for i, on in zip(second.token_ids, second.planning_T, strict=True) if on]
    assert "".join(marked).replace(" ", "") == "noticethatnoticethat"


def sepa(base) -> Algorithm:
    schedule = {"schedule": "auto", "steps": 4, "warmup_steps": 1, "correct_rate_gate": 0.5}
    return algorithm_of({"algorithm": {"transform_mode": "gtpo_sepa"}, "sepa": schedule}, base.text)


def batches(base):
    texts = [TEXTS, ["so x", "so x = notice that 4", "check x"]]
    steps = [0.0, 0.2, 0.1], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]
    for step, rewards in enumerate(steps):
        yield step, batch_of([group(base, rewards, texts[step % 2])])


def test_the_gate_counts_every_rollout_that_was_sampled(base):
    groups = [group(base, [1.0, None, 0.0, None]), group(base, [None, None]), group(base, [1.0, 1.0])]
    assert correct_rate(batch_of(groups).rollouts) == 3 / 8


def test_an_algorithm_goes_on_from_its_state(base):
    """From the state before each step, through JSON. What a batch shows counts from the next step on."""
    whole, steps = sepa(base), list(batches(base))
    states, metrics = [], []
    for step, batch in steps:
        state = whole.state()
        copy = json.loads(dumps(state))
        metrics.append(dict(whole.credit(batch, Scores(), step).metrics))
        assert state == copy != whole.state()  # a failed step can be rolled back
        states.append(copy)
    for begin, state in enumerate(states):
        again = sepa(base)
        again.restore(state)
        assert again.state() == state
        assert [dict(again.credit(batch, Scores(), step).metrics) for step, batch in steps[begin:]] == metrics[begin:]
    assert [row["sepa_gate_open"] for row in metrics] == [False, False, True, True, True]
    assert metrics[0]["sepa_lambda"] == metrics[1]["sepa_lambda"] == metrics[2]["sepa_lambda"] == 0.0
    assert 0 < metrics[3]["sepa_lambda"] < metrics[4]["sepa_lambda"] <= 1


def test_a_run_that_continues_another_algorithm_starts_its_own_schedule(base):
    steps = list(batches(base))
    with_gtpo, continued = algorithm_of({"algorithm": {"transform_mode": "gtpo"}}, base.text), sepa(base)
    with_gtpo.credit(steps[0][1], Scores(), 0)
    continued.restore(with_gtpo.state())
    assert continued.state() == sepa(base).state()
    with_gtpo.restore(continued.state())
    assert with_gtpo.state() == {}


def test_the_users_formulas_give_what_ours_give(base):
    def grpo(rewards):
        return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)

    def gtpo(advantages_BT, h_BT, planning_BT, mask_BT):
        assert planning_BT.shape == mask_BT.shape
        mean = (h_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True)
        return advantages_BT * (1 + 0.5 * (h_BT / mean - 1)).clamp(min=0)

    def surprisal(logprobs_BT, entropy_BT, mask_BT):
        return -logprobs_BT

    groups = [group(base, [1.0, None, 0.0], TEXTS), group(base, [0.0, 0.0, 0.0], TEXTS)]
    config = {"algorithm": {"transform_mode": "gtpo"}, "gtpo": {"beta": 0.5}}
    plugin, ours = (
        credit(groups, config, base.text, modes)
        for modes in (Modes(grpo, gtpo, surprisal), Modes("grpo", "gtpo", "surprisal"))
    )
    assert discarded(plugin) == discarded(ours) == [None, "zero_advantage"]
    assert len(plugin.trained) == 2
    for one, other in zip(plugin.trained, ours.trained, strict=True):
        assert one.token_advantages_T == pytest.approx(other.token_advantages_T, rel=1e-5)
    assert plugin.denominators == ours.denominators
    assert plugin.metrics.items() <= ours.metrics.items()  # a plug-in has no weights


def test_an_advantage_plug_in_gets_the_graded_completions(base):
    seen = []

    def longer_is_better(rewards, context):
        seen.append((context.problem.id, [result.total_reward for result in context.rewards]))
        return torch.tensor([float(len(completion)) for completion in context.completions])

    one = group(base, [1.0, None, 0.0], ["so x", "so x = 4 so x = 4", "so"])
    lengths = [len(rollout) for rollout in one.rollouts]
    (credited,) = compare([one], longer_is_better).groups
    assert advantages_of(credited).tolist() == pytest.approx([lengths[0], np.nan, lengths[2]], nan_ok=True)
    assert seen == [("p", [1.0, 0.0])]


def test_a_transform_plug_in_decides_which_groups_have_signal(base):
    def bonus(advantages_BT, h_BT, planning_BT, mask_BT):
        return torch.ones_like(advantages_BT)

    one = group(base, [0.0, 0.0])
    assert discarded(compare([one], "grpo")) == ["zero_advantage"]
    batch = credit([one], modes=Modes("grpo", bonus, "surprisal"))
    assert discarded(batch) == [None]
    assert all((rollout.token_advantages_T == 1).all() for rollout in batch.trained)


def test_groups_that_are_too_stale_stand_where_they_were_with_their_planning_tokens(base):
    algorithm = algorithm_of({}, base.text)
    first, stale, last = batch_of([group(base, [1.0, 0.0], TEXTS[:2]) for _ in range(3)]).groups
    stale = replace(stale, discarded=MAX_STALENESS)
    credited = algorithm.credit(CreditedBatch((first, last)), Scores(), 0)
    merged = algorithm.with_stale_groups(credited, (first, stale, last))
    assert [merged.groups[0], merged.groups[2]] == list(credited.groups)
    assert merged.groups[1].discarded == MAX_STALENESS
    planning = [rollout.planning_T.any() for rollout in merged.groups[1].rollouts]
    assert planning == [False, True]
    assert merged.metrics == credited.metrics
    assert algorithm.with_stale_groups(credited, (first, last)) is credited


@pytest.mark.parametrize(("critic", "lams"), [({"lam_length": 0.5}, [0.5, 0.0]), ({"lam_policy": 0.25}, [0.25, 0.25])])
def test_the_policys_lambda_may_follow_the_length(base, critic, lams):
    """1 − 1/(αL) for answers of 4 and 2 tokens, with values of 0."""
    critic = {**critic, "lam_value": 1.0, "whiten": False}
    config = {"algorithm": {"advantage_mode": "gae", "kl_coef": 0.0}, "critic": critic}
    actions = [Action([7] * n, "", np.zeros(n), None, "stop") for n in (4, 2)]
    prompt = Prompt(Problem("p", "?", "1"), "?", (1, 2))
    groups = [single_turn(prompt, actions, [RewardResult(1.0), RewardResult(1.0)])]
    scores = Scores(values=[np.zeros(4), np.zeros(2)])
    batch = credit(groups, config, scores=scores)
    for rollout, lam in zip(batch.rollouts, lams, strict=True):
        expected = [lam**k for k in reversed(range(len(rollout)))]
        assert rollout.token_advantages_T.tolist() == pytest.approx(expected)
    assert batch.metrics["critic/value_mean"] == 0.0
    assert batch.metrics["critic/target_mean"] == 1.0
    assert batch.metrics["critic/explained_variance"] is None
