"""Graders turn a problem and a completion into a RewardResult; an error of a reward never ends a run.

A user's reward is a function named in the TOML (``[reward] type = "custom"``, see ``custom``) or, from Python, a
subclass of ``Reward`` passed to ``Grader``.
"""

from retrain.rewards.base import Reward
from retrain.rewards.build import Grader, build_grader
from retrain.types import RewardResult

__all__ = ["Grader", "Reward", "RewardResult", "build_grader"]
