import numpy as np
import pytest

from retrain.config import parse_dict
from retrain.errors import ConfigError
from retrain.rewards.overlong import METRIC, overlong_penalty, punish_overlong
from retrain.types import Action, Group, Problem, Prompt, RewardResult, Rollout, Turn

PROMPT = Prompt(Problem("p", "?", "1"), "?", (1, 2))


def test_the_penalty_by_hand():
    """algorithms2 §7: L = 100, C = 20; beyond the limit it stays at -1."""
    assert [overlong_penalty(n, 100, 20) for n in (1, 80, 90, 100, 101, 500)] == [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    assert overlong_penalty(50, 100, 100) == -0.5


def test_what_is_correct_stays_correct():
    answers = {
        9: RewardResult(1.0, sample_metrics={"steps": 3.0}),
        10: RewardResult(0.0),
        2: RewardResult(0.9),
        11: RewardResult(None, error="no answer"),
    }
    rollouts = [
        Rollout(PROMPT, (Turn((1, 2), Action([7] * tokens, "", np.zeros(tokens), None, "stop")),), reward)
        for tokens, reward in answers.items()
    ]
    (group,) = punish_overlong([Group(PROMPT, tuple(rollouts))], longest=10, soft=4)
    rewards = [rollout.reward for rollout in group.rollouts]
    assert [reward.total_reward for reward in rewards] == [0.25, -1.0, 0.9, None]
    assert [reward.is_correct for reward in rewards] == [True, False, True, False]
    assert rewards[0].sample_metrics == {"steps": 3.0, METRIC: -0.75}
    assert rewards[3].error == "no answer"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"reward": {"overlong_tokens": 300}}, "is 300, more than max_tokens = 256: overlong_tokens = 51"),
        ({"reward": {"overlong_tokens": 9}, "algorithm": {"advantage_mode": "maxrl"}}, "makes rewards below 0"),
        (
            {"algorithm": {"advantage_mode": "gae"}, "critic": {"lam_length": 0.05, "lam_policy": 0.9}},
            "is 0.05 beside lam_policy = 0.9: keep one",
        ),
        ({"reward": {"overlong_tokens": 9}, "environment": {"tools": ["calculator"]}}, "for single answers"),
    ],
)
def test_what_does_not_go_together_is_said(data, message):
    with pytest.raises(ConfigError, match=message):
        parse_dict(data)
