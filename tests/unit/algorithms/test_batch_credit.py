import json
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.models import word_tokenizer

from retrain.algorithms.standard import (
    Modes,
    Standard,
    assign_credit,
    correct_rate,
    fill_advantages,
    load_modes,
    mark_planning,
)
from retrain.config import parse_dict
from retrain.errors import RunFailed
from retrain.files import dumps
from retrain.maths.planning import RegexDetector
from retrain.policy.base import BaseModel
from retrain.policy.protocol import samples_of
from retrain.types import Action, Problem, Prompt, RewardResult, Turn, single_turn

TEXTS = ["so x = 4", "wait let me check so x", "notice that x = 4"]


@pytest.fixture(scope="module")
def base() -> BaseModel:
    """A base that is a tokenizer alone."""
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
    return single_turn(prompt, [completion(base, text) for text in texts], [RewardResult(each) for each in rewards])


class Trained(NamedTuple):
    token_ids: list[int]
    logprobs_T: np.ndarray
    advantages_T: np.ndarray
    loss_mask_T: np.ndarray


def sampled_tokens(samples) -> list[Trained]:
    """The sampled tokens of each sample; what was read has no advantage and does not train."""
    trained = []
    for sample in samples:
        own = sample.action_mask
        assert not sample.advantages[~own].any()
        assert not sample.loss_mask[~own].any()
        ids = sample.token_ids[own].tolist()
        trained.append(Trained(ids, sample.logprobs[own], sample.advantages[own], sample.loss_mask[own]))
    return trained


def credited(groups, config=None, sepa_lambda=0.5, modes=None):
    result = assign_credit(groups, config or parse_dict({}), sepa_lambda, ("placebo",), modes)
    return result, sampled_tokens(samples_of(groups))


def test_missing_rewards_take_no_part(base):
    mixed, none, equal = group(base, [1.0, None, 0.0]), group(base, [None, None]), group(base, [0.5, 0.5])
    fill_advantages([mixed, none, equal], "dr_grpo")
    assert mixed.advantages_N[[0, 2]].tolist() == [0.5, -0.5]
    assert np.isnan(mixed.advantages_N[1])
    assert (mixed.discarded, none.discarded, equal.discarded) == (None, "no_reward", "zero_advantage")
    alone, pair = group(base, [1.0, None]), group(base, [1.0, None, 0.0])
    fill_advantages([alone, pair], "rloo")
    assert np.isnan(alone.advantages_N).all()
    assert alone.discarded == "no_reward"  # the only graded completion is compared with none
    assert pair.advantages_N[[0, 2]].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("reward", [-0.1, 1.5])
def test_a_reward_that_the_mode_is_not_defined_for_names_the_reward(base, reward):
    with pytest.raises(RunFailed, match=rf"advantage_mode = maxrl .*\[0, 1\], but length gave {reward:g}: "):
        fill_advantages([group(base, [0.0, reward])], "maxrl", "length")
    fill_advantages([group(base, [0.0, reward])], "grpo", "length")


@pytest.mark.parametrize(
    "mode", ["none", "gtpo", "gtpo_hicra", "gtpo_hicra_placebo", "gtpo_sepa", "gtpo_paper", "entropy_mask"]
)
def test_every_transform_mode_and_an_answer_without_tokens(base, mode):
    one = group(base, [1.0, 0.0, 1.0, 0.0], [*TEXTS, ""])
    one.rollouts[3].turns[0].action = Action([], "", np.zeros(0), np.zeros(0), "stop")
    fill_advantages([one], "grpo")
    mark_planning([one], RegexDetector(), base.text)
    result, sequences = credited([one], parse_dict({"algorithm": {"transform_mode": mode}}))
    assert result.denominators.sequences == 3
    assert [len(each.token_ids) for each in sequences] == [len(rollout) for rollout in one.rollouts]
    assert all(np.isfinite(each.advantages_T).all() for each in sequences)
    trained, total = sum(int(each.loss_mask_T.sum()) for each in sequences), sum(map(len, one.rollouts))
    assert trained == (-(-total // 5) if mode == "entropy_mask" else total)
    assert result.metrics["planning_fraction"] > 0


def test_whitening_weighs_every_graded_completion_by_its_tokens(base):
    """Completions of different lengths, and one without a reward between them: mean 0 and variance 1 over tokens."""
    texts = ["so x = 4 notice that we can check", "so", "so x = 4", "notice that x"]
    groups = [group(base, [1.0, None, 0.0, 0.0], texts), group(base, [3.0, 1.0], texts[2:])]
    fill_advantages(groups, "reinforce_pp")
    pairs = [(rollout.advantage, len(rollout)) for g in groups for rollout in g.rollouts]
    values, counts = np.array([pair for pair in pairs if np.isfinite(pair[0])]).T
    assert len(set(counts)) > 2
    assert np.average(values, weights=counts) == pytest.approx(0, abs=1e-12)
    assert np.average(values**2, weights=counts) == pytest.approx(1, rel=1e-3)
    assert abs(values.mean()) > 0.05  # it is not the plain mean that is 0


@pytest.mark.parametrize("keys", [{}, {"discard_group_zero_advantage": False}, {"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_denominators_count_skipped_groups(base, keys):
    """A group without signal stays in the count that the loss is divided by, whether it trains or not; it trains where
    the loss has another term or it is not to be discarded."""
    groups = [group(base, [1.0, 0.0]), group(base, [0.0, 0.0]), group(base, [None, 1.0]), group(base, [None, None])]
    fill_advantages(groups, "grpo")
    result, sequences = credited(groups, parse_dict({"algorithm": keys}))
    without = None if keys else "zero_advantage"
    assert [g.discarded for g in groups] == [None, without, without, "no_reward"]
    assert len(sequences) == (5 if keys else 2)
    assert not any(sequence.advantages_T.any() for sequence in sequences[2:])
    graded = [rollout for g in groups for rollout in g.rollouts if np.isfinite(rollout.advantage)]
    assert (result.denominators.tokens, result.denominators.sequences) == (sum(map(len, graded)), 5)
    for sequence in sequences:
        assert sequence.loss_mask_T.all()
        assert len(set(sequence.advantages_T.tolist())) == 1


@pytest.mark.parametrize("change", [{}, {"kl_coef": 0.1}, {"discard_group_zero_advantage": False}])
def test_gtpo_paper_decides_by_itself_which_groups_have_signal(base, change):
    """It goes by what is correct: equal rewards of right and wrong answers train, unequal ones of right ones do not,
    unless groups without signal are trained on too."""
    equal, right = group(base, [0.5, 0.5]), group(base, [0.6, 1.0])
    equal.rollouts[0].reward.correct, equal.rollouts[1].reward.correct = True, False
    fill_advantages([equal, right], "grpo")
    assert (equal.discarded, right.discarded) == ("zero_advantage", None)
    config = parse_dict({"algorithm": {"transform_mode": "gtpo_paper", **change}})
    result, (first, second, *others) = credited([equal, right], config)
    assert (equal.discarded, right.discarded) == (None, None if change else "zero_advantage")
    assert (first.advantages_T > 0).all()
    assert (second.advantages_T < 0).all()
    assert len(others) == (2 if change else 0)
    assert result.denominators.sequences == 4


def test_no_phrase_spans_two_turns(base):
    one = group(base, [1.0, 0.0], ["so x notice", "so x = notice that 4"])
    first, second = one.rollouts
    first.turns.append(Turn((9, 9), completion(base, " that x = 4")))
    second.turns.append(Turn((9, 9), completion(base, "notice that x")))
    mark_planning([one], RegexDetector(), base.text)
    assert len(first.planning_T) == len(first)
    assert not first.planning_T.any()
    marked = [base.tokenizer.decode([i]) for i, on in zip(second.token_ids, second.planning_T, strict=True) if on]
    assert "".join(marked).replace(" ", "") == "noticethatnoticethat"


# What the algorithm remembers


def standard(base) -> Standard:
    config = parse_dict(
        {
            "algorithm": {"transform_mode": "gtpo_sepa"},
            "sepa": {"schedule": "auto", "steps": 4, "warmup_steps": 1, "correct_rate_gate": 0.5},
        }
    )
    return Standard(config, load_modes(config.algorithm), RegexDetector(), base.text, (0, 1))


def batches(base):
    texts = [TEXTS, ["so x", "so x = notice that 4", "check x"]]
    steps = [0.0, 0.2, 0.1], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]
    for step, rewards in enumerate(steps):
        yield step, [group(base, rewards, texts[step % 2])]


def test_the_gate_counts_every_rollout_that_was_sampled(base):
    groups = [group(base, [1.0, None, 0.0, None]), group(base, [None, None]), group(base, [1.0, 1.0])]
    assert correct_rate(groups) == 3 / 8


def test_an_algorithm_goes_on_from_its_state(base):
    """The state before each step, through JSON as a checkpoint keeps it, in an algorithm that saw nothing else. What a
    batch shows counts from the next step on."""
    whole, steps = standard(base), list(batches(base))
    states, metrics = [], []
    for step, groups in steps:
        state = whole.state()
        copy = json.loads(dumps(state))
        metrics.append(dict(whole.credit(groups, None, step).metrics))
        assert state == copy != whole.state()  # a failed step can be rolled back
        states.append(copy)
    for begin, state in enumerate(states):
        again = standard(base)
        again.restore(state)
        assert again.state() == state
        assert [dict(again.credit(groups, None, step).metrics) for step, groups in steps[begin:]] == metrics[begin:]
    assert [row["sepa_gate_open"] for row in metrics] == [False, False, True, True, True]
    assert metrics[0]["sepa_lambda"] == metrics[1]["sepa_lambda"] == metrics[2]["sepa_lambda"] == 0.0
    assert 0 < metrics[3]["sepa_lambda"] < metrics[4]["sepa_lambda"] <= 1


# Plug-ins


def test_the_users_formulas_give_what_ours_give(base):
    def grpo(rewards):
        return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)

    def gtpo(advantages_BT, h_BT, planning_BT, mask_BT):
        assert planning_BT.shape == mask_BT.shape
        mean = (h_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True)
        return advantages_BT * (1 + 0.5 * (h_BT / mean - 1)).clamp(min=0)

    def surprisal(logprobs_BT, entropy_BT, mask_BT):
        return -logprobs_BT

    results, trained = [], []
    for modes in (Modes(grpo, gtpo, surprisal), Modes("grpo", "gtpo", "surprisal")):
        groups = [group(base, [1.0, None, 0.0], TEXTS), group(base, [0.0, 0.0, 0.0], TEXTS)]
        fill_advantages(groups, modes.advantage)
        mark_planning(groups, RegexDetector(), base.text)
        result, sequences = credited(
            groups, parse_dict({"algorithm": {"transform_mode": "gtpo"}, "gtpo": {"beta": 0.5}}), modes=modes
        )
        results.append(result)
        trained.append(sequences)
        assert [g.discarded for g in groups] == [None, "zero_advantage"]
    assert len(trained[0]) == 2
    for mine, ours in zip(*trained, strict=True):
        assert mine.advantages_T == pytest.approx(ours.advantages_T, rel=1e-5)
    assert results[0].denominators == results[1].denominators
    assert results[0].metrics.items() <= results[1].metrics.items()  # a plug-in has no weights


def test_an_advantage_plug_in_gets_the_graded_completions(base):
    seen = []

    def longer_is_better(rewards, context):
        seen.append((context.problem.id, [result.total_reward for result in context.rewards]))
        return torch.tensor([float(len(completion)) for completion in context.completions])

    one = group(base, [1.0, None, 0.0], ["so x", "so x = 4 so x = 4", "so"])
    fill_advantages([one], longer_is_better)
    lengths = [len(rollout) for rollout in one.rollouts]
    assert one.advantages_N[[0, 2]].tolist() == [lengths[0], lengths[2]]
    assert np.isnan(one.advantages_N[1])
    assert seen == [("p", [1.0, 0.0])]


def test_a_transform_plug_in_decides_which_groups_have_signal(base):
    def bonus(advantages_BT, h_BT, planning_BT, mask_BT):
        return torch.ones_like(advantages_BT)

    one = group(base, [0.0, 0.0])
    fill_advantages([one], "grpo")
    assert one.discarded == "zero_advantage"
    _, sequences = credited([one], modes=Modes("grpo", bonus, "surprisal"))
    assert one.discarded is None
    assert all((each.advantages_T == 1).all() for each in sequences)
