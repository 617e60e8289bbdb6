from dataclasses import replace

import numpy as np
import pytest
from helpers.lanes import algorithm_of, compare, credit

from retrain.algorithms.algorithm import samples_of, training_samples
from retrain.algorithms.credit.group_advantage import TurnCredit, returns_to_go
from retrain.config import parse_dict
from retrain.errors import ConfigError, RunFailed
from retrain.types import Action, CreditedGroup, Group, Problem, Prompt, RewardResult, Rollout, Turn

PROMPT = Prompt(Problem("p", "?", "1"), "?", (1, 2))
BY_TURN = TurnCredit(1.0)
TOOLS = {"environment": {"tools": ["calculator"]}}


def rollout(rewards: list[float | None], total: float | None, lengths: list[int] | None = None) -> Rollout:
    """One turn for each reward; action k has ``lengths[k]`` tokens."""
    turns = []
    for k, (reward, length) in enumerate(zip(rewards, lengths or [1] * len(rewards), strict=True)):
        action = Action([10 + k] * length, "x", np.full(length, -1.0), np.ones(length), "stop")
        turns.append(Turn((1, 2) if k == 0 else (5,), action, reward=reward))
    return Rollout(PROMPT, tuple(turns), RewardResult(total, error=None if total is not None else "none"))


def compared(rollouts: list[Rollout], mode="dr_grpo", turn_credit=BY_TURN) -> CreditedGroup:
    return compare([Group(PROMPT, tuple(rollouts))], mode, turn_credit).groups[0]


def turn_advantages(rollouts: list[Rollout], mode="dr_grpo", turn_credit=BY_TURN) -> list[list[float] | None]:
    credited = compared(rollouts, mode, turn_credit).rollouts
    return [None if one.turn_advantages is None else list(one.turn_advantages) for one in credited]


def test_each_turn_is_compared_with_those_of_its_number():
    """Rewards (0, 1, 1) and (.5, 0), γ = 1: G (2, 2, 1) and (.5, 0); a turn alone gets 0."""
    first, second = rollout([0, 1, 1], 2.0), rollout([0.5, 0], 0.5)
    assert (returns_to_go(first, 1.0), returns_to_go(second, 1.0)) == ([2, 2, 1], [0.5, 0])
    assert turn_advantages([first, second]) == [[0.75, 1.0, 0.0], [-0.75, -1.0]]
    assert compared([first, second]).rollouts[0].advantage == pytest.approx(1.75 / 3)  # what a token gets on average
    assert returns_to_go(rollout([0, 1, 1], 2.0), 0.5) == [0.75, 1.5, 1.0]
    assert returns_to_go(rollout([None, None], 1.0), 0.5) == [0.5, 1.0]  # the rest of the total comes with the last
    assert returns_to_go(rollout([0.25, None], 1.0), 1.0) == [1.0, 0.75]
    rollouts = [rollout([0.0, 2.0], 2.0), rollout([1.0], 1.0)]
    assert turn_advantages(rollouts, lambda rewards: rewards) == [[2.0, 0.0], [1.0]]
    with pytest.raises(RunFailed, match=r"maxrl is defined for rewards in \[0, 1\]"):
        compared([rollout([1.0, 1.0], 2.0), rollout([0.0, 0.0], 0.0)], "maxrl")


@pytest.mark.parametrize("mode", ["dr_grpo", "grpo", "rloo", "maxrl"])
def test_a_reward_at_the_end_and_as_many_turns_equals_the_credit_of_episodes(mode):
    rollouts = [rollout([None, None], total) for total in [1.0, 0.0, 0.0, 1.0]]
    by_turn, whole = compared(rollouts, mode), compared(rollouts, mode, None)
    for one, other in zip(by_turn.rollouts, whole.rollouts, strict=True):
        assert one.turn_advantages == pytest.approx([other.advantage] * 2)
        assert one.advantage == pytest.approx(other.advantage)
        assert other.turn_advantages is None


def test_whitening_weighs_turns_by_their_tokens():
    rollouts = [rollout([0.0, 1.0], 1.0, [3, 1]), rollout([0.0, 0.0], 0.0, [1, 2])]
    values = np.repeat(np.concatenate(turn_advantages(rollouts, "reinforce_pp")), [3, 1, 1, 2])
    assert values.mean() == pytest.approx(0, abs=1e-9)
    assert values.std() == pytest.approx(1, abs=1e-3)


def test_turns_that_cancel_out_are_signal_all_the_same():
    rollouts = [rollout([1.0, 0.0], 1.0), rollout([-1.0, 1.0], 0.0)]
    assert turn_advantages(rollouts) == [[0.5, -0.5], [-0.5, 0.5]]
    assert [rollout.advantage for rollout in compared(rollouts).rollouts] == [0, 0]
    assert compared(rollouts).discarded is None
    assert compared([rollout([0.0, 0.5], 0.5) for _ in range(2)]).discarded == "zero_advantage"


def test_rollouts_without_reward_or_turns_take_no_part():
    failed, empty, alone = rollout([0.0], None), Rollout(PROMPT, (), RewardResult(None)), rollout([1.0], 1.0)
    group = compared([failed, empty, alone], "grpo")
    assert [one.turn_advantages for one in group.rollouts] == [None, None, (0.0,)]
    assert group.discarded == "zero_advantage"
    assert samples_of([group])[0].token_ids.tolist() == [1, 2, 10]


@pytest.mark.parametrize("transform", ["none", "gtpo", "gtpo_hicra"])
def test_every_token_trains_with_the_advantage_of_its_turn(transform):
    """Token credit weighs by the tokens of the whole rollout; with equal uncertainties the weights are 1."""
    rollouts = (rollout([0, 1, 1], 2.0, [1, 2, 1]), rollout([0.5, 0], 0.5, [2, 2]))
    keys = {"transform_mode": transform, "turn_credit": "turn", "advantage_mode": "dr_grpo"}
    batch = credit([Group(PROMPT, rollouts)], {**TOOLS, "algorithm": keys})
    first, second = batch.rollouts
    assert first.token_advantages_T.tolist() == pytest.approx([0.75, 1.0, 1.0, 0.0])
    assert second.token_advantages_T.tolist() == pytest.approx([-0.75, -0.75, -1.0, -1.0])
    assert (batch.denominators.tokens, batch.denominators.sequences) == (8, 2)
    (sample,) = training_samples(first)
    assert sample.token_ids.tolist() == [1, 2, 10, 5, 11, 11, 5, 12]
    assert sample.action_mask.tolist() == [False, False, True, False, True, True, False, True]
    assert sample.advantages.tolist() == pytest.approx([0, 0, 0.75, 0, 1.0, 1.0, 0, 0.0])


def test_a_rewritten_conversation_gives_a_sample_for_each_time_it_was_read():
    one = rollout([0.0, 1.0, 0.0], 1.0, [1, 2, 1])
    first, second, third = one.turns
    one = replace(one, turns=(first, replace(second, fresh=True, observation_ids=(7, 8, 9)), third))
    keys = {"turn_credit": "turn", "advantage_mode": "dr_grpo", "transform_mode": "none"}
    batch = credit([Group(PROMPT, (one, rollout([0.0], 0.0)))], {**TOOLS, "algorithm": keys})
    first, second, third = (sample for credited in batch.trained for sample in training_samples(credited))
    assert first.token_ids.tolist() == [1, 2, 10]
    assert second.token_ids.tolist() == [7, 8, 9, 11, 11, 5, 12]
    assert second.action_mask.tolist() == [False] * 3 + [True, True, False, True]
    assert third.token_ids.tolist() == [1, 2, 10]
    assert (batch.denominators.tokens, batch.denominators.sequences) == (5, 3)
    assert first.advantages.tolist() == pytest.approx([0, 0, 0.5])
    assert second.advantages[second.action_mask].tolist() == pytest.approx([0, 0, 0])


def in_states(*episodes: tuple[list[tuple[int, ...]], float]) -> list[Rollout]:
    made = []
    for states, total in episodes:
        one = rollout([None] * len(states), total)
        turns = [replace(turn, observation_ids=state) for turn, state in zip(one.turns, states, strict=True)]
        made.append(replace(one, turns=tuple(turns)))
    return made


START, DOOR, HALL = (1, 2), (5,), (6,)


def test_turns_in_the_same_state_are_compared_beside_whole_episodes():
    """arXiv 2505.10978: the door is reached by three rollouts, with G = .9025, .95 and 0, so A_S = .285, .3325
    and -.6175; the start by all, the hall by one alone, which adds nothing."""
    rollouts = in_states(([START, DOOR, HALL], 0.95), ([START, DOOR], 0.95), ([START, DOOR], 0.0))
    group = compared(rollouts, turn_credit=TurnCredit(0.95, 1.0))
    found = [one.turn_advantages for one in group.rollouts]
    episodes = [0.95 - 1.9 / 3, 0.95 - 1.9 / 3, -1.9 / 3]
    starts = [0.95**3, 0.95**2, 0.0]
    mean = sum(starts) / 3
    assert found[0] == pytest.approx([episodes[0] + starts[0] - mean, episodes[0] + 0.285, episodes[0]])
    assert found[1] == pytest.approx([episodes[1] + starts[1] - mean, episodes[1] + 0.3325])
    assert found[2] == pytest.approx([episodes[2] + starts[2] - mean, episodes[2] - 0.6175])
    assert group.rollouts[0].advantage == pytest.approx(sum(found[0]) / 3)


def test_a_state_that_a_rollout_comes_back_to_counts_every_time():
    one, other = in_states(([START, DOOR, DOOR], 1.0), ([START, HALL], 0.0))
    first, second, third = one.turns
    one = replace(one, turns=(first, replace(second, reward=0.5), third))  # G: 1, 1, .5
    found = turn_advantages([one, other], turn_credit=TurnCredit(1.0, 1.0))
    assert found[0] == pytest.approx([0.5 + 0.5, 0.5 + 0.25, 0.5 - 0.25])


def test_the_weight_of_states_as_configured():
    """With a weight of 0 it would be the credit of episodes. Without a reward a rollout takes no part."""
    config = {**TOOLS, "algorithm": {"turn_credit": "state", "state_weight": 2.0}}
    by_state = algorithm_of(config).steps[0].turn_credit
    assert by_state == TurnCredit(1.0, 2.0)
    rollouts = [*in_states(([START, DOOR], 1.0), ([START, DOOR], 0.0)), rollout([None, None], None)]
    assert turn_advantages(rollouts, turn_credit=by_state) == [[1.5, 1.5], [-1.5, -1.5], None]
    assert np.isnan(compared(rollouts, turn_credit=by_state).rollouts[2].advantage)
    config["algorithm"]["advantage_mode"] = "reinforce_pp"
    with pytest.raises(ConfigError, match="would whiten two kinds of advantages together"):
        parse_dict(config)
