from dataclasses import replace

import numpy as np
import pytest

from retrain.algorithms.standard import assign_credit, fill_advantages, turn_credit_of
from retrain.algorithms.turns import TurnCredit, returns_to_go
from retrain.config import parse_dict
from retrain.errors import ConfigError, RunFailed
from retrain.policy.protocol import samples_of
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Turn

PROMPT = Prompt(Problem("p", "?", "1"), "?", (1, 2))


def rollout(rewards: list[float | None], total: float | None, lengths: list[int] | None = None) -> Rollout:
    """One turn for each reward; action k has ``lengths[k]`` tokens."""
    turns = []
    for k, (reward, length) in enumerate(zip(rewards, lengths or [1] * len(rewards), strict=True)):
        action = Action([10 + k] * length, "x", np.full(length, -1.0), np.ones(length), "stop")
        turns.append(Turn((1, 2) if k == 0 else (5,), action, reward=reward))
    return Rollout(PROMPT, turns, RewardResult(total, error=None if total is not None else "none"))


def credited(rollouts: list[Rollout], mode: str = "dr_grpo", discount: float = 1.0) -> list[list[float] | None]:
    fill_advantages([Group(PROMPT, rollouts)], mode, "reward", TurnCredit(discount))
    return [one.turn_advantages for one in rollouts]


def test_each_turn_is_compared_with_those_of_its_number():
    """Rewards (0, 1, 1) and (.5, 0), γ = 1: G (2, 2, 1) and (.5, 0); a turn alone gets 0."""
    first, second = rollout([0, 1, 1], 2.0), rollout([0.5, 0], 0.5)
    assert (returns_to_go(first, 1.0), returns_to_go(second, 1.0)) == ([2, 2, 1], [0.5, 0])
    assert credited([first, second]) == [[0.75, 1.0, 0.0], [-0.75, -1.0]]
    assert first.advantage == pytest.approx(1.75 / 3)  # what a token gets on average
    assert returns_to_go(rollout([0, 1, 1], 2.0), 0.5) == [0.75, 1.5, 1.0]
    assert returns_to_go(rollout([None, None], 1.0), 0.5) == [0.5, 1.0]  # the rest of the total comes with the last
    assert returns_to_go(rollout([0.25, None], 1.0), 1.0) == [1.0, 0.75]
    assert credited([rollout([0.0, 2.0], 2.0), rollout([1.0], 1.0)], lambda rewards: rewards) == [[2.0, 0.0], [1.0]]
    with pytest.raises(RunFailed, match=r"maxrl is defined for rewards in \[0, 1\]"):
        credited([rollout([1.0, 1.0], 2.0), rollout([0.0, 0.0], 0.0)], "maxrl")


@pytest.mark.parametrize("mode", ["dr_grpo", "grpo", "rloo", "maxrl"])
def test_a_reward_at_the_end_and_as_many_turns_equals_the_credit_of_episodes(mode):
    totals = [1.0, 0.0, 0.0, 1.0]
    by_turn = [rollout([None, None], total) for total in totals]
    whole = [rollout([None, None], total) for total in totals]
    credited(by_turn, mode)
    fill_advantages([Group(PROMPT, whole)], mode)
    for one, other in zip(by_turn, whole, strict=True):
        assert one.turn_advantages == pytest.approx([other.advantage] * 2)
        assert one.advantage == pytest.approx(other.advantage)
        assert other.turn_advantages is None


def test_whitening_weighs_turns_by_their_tokens():
    rollouts = [rollout([0.0, 1.0], 1.0, [3, 1]), rollout([0.0, 0.0], 0.0, [1, 2])]
    credited(rollouts, "reinforce_pp")
    values = np.concatenate(
        [np.repeat(one.turn_advantages, [len(turn.action) for turn in one.turns]) for one in rollouts]
    )
    assert values.mean() == pytest.approx(0, abs=1e-9)
    assert values.std() == pytest.approx(1, abs=1e-3)


def test_turns_that_cancel_out_are_signal_all_the_same():
    rollouts = [rollout([1.0, 0.0], 1.0), rollout([-1.0, 1.0], 0.0)]
    group = Group(PROMPT, rollouts)
    fill_advantages([group], "dr_grpo", "reward", TurnCredit(1.0))
    assert [one.turn_advantages for one in rollouts] == [[0.5, -0.5], [-0.5, 0.5]]
    assert [one.advantage for one in rollouts] == [0, 0]
    assert group.discarded is None
    same = Group(PROMPT, [rollout([0.0, 0.5], 0.5) for _ in range(2)])
    fill_advantages([same], "dr_grpo", "reward", TurnCredit(1.0))
    assert same.discarded == "zero_advantage"


def test_rollouts_without_reward_or_turns_take_no_part():
    failed, empty, alone = rollout([0.0], None), Rollout(PROMPT, [], RewardResult(None)), rollout([1.0], 1.0)
    group = Group(PROMPT, [failed, empty, alone])
    fill_advantages([group], "grpo", "reward", TurnCredit(1.0))
    assert failed.turn_advantages is None
    assert alone.turn_advantages == [0.0]
    assert group.discarded == "zero_advantage"
    assert samples_of([group], every=True)[0].token_ids.tolist() == [1, 2, 10]


@pytest.mark.parametrize("transform", ["none", "gtpo", "gtpo_hicra"])
def test_every_token_trains_with_the_advantage_of_its_turn(transform):
    """Token credit weighs by the tokens of the whole rollout; with equal uncertainties the weights are 1."""
    rollouts = [rollout([0, 1, 1], 2.0, [1, 2, 1]), rollout([0.5, 0], 0.5, [2, 2])]
    group = Group(PROMPT, rollouts)
    config = parse_dict(
        {
            "environment": {"tools": ["calculator"]},
            "algorithm": {"transform_mode": transform, "turn_credit": "turn", "advantage_mode": "dr_grpo"},
        }
    )
    fill_advantages([group], "dr_grpo", "reward", TurnCredit(1.0))
    for one in rollouts:
        one.planning_T = np.zeros(len(one), dtype=bool)
    credit = assign_credit([group], config, 0.0, ("placebo",))
    assert rollouts[0].token_advantages_T.tolist() == pytest.approx([0.75, 1.0, 1.0, 0.0])
    assert rollouts[1].token_advantages_T.tolist() == pytest.approx([-0.75, -0.75, -1.0, -1.0])
    assert (credit.denominators.tokens, credit.denominators.sequences) == (8, 2)
    (first, _) = samples_of([group])
    assert first.token_ids.tolist() == [1, 2, 10, 5, 11, 11, 5, 12]
    assert first.action_mask.tolist() == [False, False, True, False, True, True, False, True]
    assert first.advantages.tolist() == pytest.approx([0, 0, 0.75, 0, 1.0, 1.0, 0, 0.0])


def test_a_rewritten_conversation_gives_a_sample_for_each_time_it_was_read():
    one = rollout([0.0, 1.0, 0.0], 1.0, [1, 2, 1])
    one.turns[1].fresh, one.turns[1].observation_ids = True, (7, 8, 9)
    group = Group(PROMPT, [one, rollout([0.0], 0.0)])
    fill_advantages([group], "dr_grpo", "reward", TurnCredit(1.0))
    for each in group.rollouts:
        each.planning_T = np.zeros(len(each), dtype=bool)
    credit = assign_credit([group], parse_dict({"environment": {"tools": ["calculator"]}}), 0.0, ("placebo",))
    first, second, third = samples_of([group])
    assert first.token_ids.tolist() == [1, 2, 10]
    assert second.token_ids.tolist() == [7, 8, 9, 11, 11, 5, 12]
    assert second.action_mask.tolist() == [False] * 3 + [True, True, False, True]
    assert third.token_ids.tolist() == [1, 2, 10]
    assert (credit.denominators.tokens, credit.denominators.sequences) == (5, 3)
    assert first.advantages.tolist() == pytest.approx([0, 0, 0.5])
    assert second.advantages[second.action_mask].tolist() == pytest.approx([0, 0, 0])


def in_states(*episodes: tuple[list[tuple[int, ...]], float]) -> list[Rollout]:
    made = []
    for states, total in episodes:
        one = rollout([None] * len(states), total)
        one.turns[:] = [replace(turn, observation_ids=state) for turn, state in zip(one.turns, states, strict=True)]
        made.append(one)
    return made


def by_state(rollouts: list[Rollout], weight: float = 1.0, discount: float = 1.0, mode: str = "dr_grpo") -> list:
    fill_advantages([Group(PROMPT, rollouts)], mode, "reward", TurnCredit(discount, weight))
    return [one.turn_advantages for one in rollouts]


START, DOOR, HALL = (1, 2), (5,), (6,)


def test_turns_in_the_same_state_are_compared_beside_whole_episodes():
    """arXiv 2505.10978: the door is reached by three rollouts, with G = .9025, .95 and 0, so A_S = .285, .3325
    and -.6175; the start by all, the hall by one alone, which adds nothing."""
    rollouts = in_states(([START, DOOR, HALL], 0.95), ([START, DOOR], 0.95), ([START, DOOR], 0.0))
    found = by_state(rollouts, discount=0.95)
    episodes = [0.95 - 1.9 / 3, 0.95 - 1.9 / 3, -1.9 / 3]
    starts = [0.95**3, 0.95**2, 0.0]
    mean = sum(starts) / 3
    assert found[0] == pytest.approx([episodes[0] + starts[0] - mean, episodes[0] + 0.285, episodes[0]])
    assert found[1] == pytest.approx([episodes[1] + starts[1] - mean, episodes[1] + 0.3325])
    assert found[2] == pytest.approx([episodes[2] + starts[2] - mean, episodes[2] - 0.6175])
    assert rollouts[0].advantage == pytest.approx(sum(found[0]) / 3)


def test_a_state_that_a_rollout_comes_back_to_counts_every_time():
    rollouts = in_states(([START, DOOR, DOOR], 1.0), ([START, HALL], 0.0))
    rollouts[0].turns[1] = replace(rollouts[0].turns[1], reward=0.5)  # G: 1, 1, .5
    found = by_state(rollouts)
    assert found[0] == pytest.approx([0.5 + 0.5, 0.5 + 0.25, 0.5 - 0.25])


def test_the_weight_of_states_as_configured():
    """With a weight of 0 it would be the credit of episodes. Without a reward a rollout takes no part."""
    config = {"algorithm": {"turn_credit": "state", "state_weight": 2.0}, "environment": {"tools": ["calculator"]}}
    assert turn_credit_of(parse_dict(config).algorithm) == TurnCredit(1.0, 2.0)
    rollouts = [*in_states(([START, DOOR], 1.0), ([START, DOOR], 0.0)), rollout([None, None], None)]
    assert by_state(rollouts, weight=2.0) == [[1.5, 1.5], [-1.5, -1.5], None]
    assert np.isnan(rollouts[2].advantage)
    config["algorithm"]["advantage_mode"] = "reinforce_pp"
    with pytest.raises(ConfigError, match="would whiten two kinds of advantages together"):
        parse_dict(config)
