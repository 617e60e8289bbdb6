from helpers.records import completion

from retrain.rewards.base import OVERLONG_PENALTY, overlong_penalty, punish_overlong
from retrain.types import Problem, Prompt, RewardResult, single_turn


def test_the_penalty_by_hand():
    """algorithms2 §7: L = 100, C = 20; beyond the limit it stays at -1."""
    assert [overlong_penalty(n, 100, 20) for n in (1, 80, 90, 100, 101, 500)] == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    assert overlong_penalty(50, 100, 100) == -0.5


def test_what_is_correct_stays_correct():
    answers = {
        9: RewardResult(1.0, sample_metrics={"steps": 3.0}), 10: RewardResult(0.0), 2: RewardResult(0.9),
        11: RewardResult(None, error="no answer"),
    }  # fmt: skip
    prompt = Prompt(Problem("p", "?", "1"), "?", (1, 2))
    group = single_turn(prompt, [completion(tokens) for tokens in answers], list(answers.values()))
    (group,) = punish_overlong([group], longest=10, soft=4)
    rewards = [rollout.reward for rollout in group.rollouts]
    assert [reward.total_reward for reward in rewards] == [0.25, -1.0, 0.9, None]
    assert [reward.is_correct for reward in rewards] == [True, False, True, False]
    assert rewards[0].sample_metrics == {"steps": 3.0, OVERLONG_PENALTY: -0.75}
    assert rewards[3].error == "no answer"
