"""From the ``[reward]`` section to a grader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.config import tasks
from retrain.rewards.base import Grader, Reward
from retrain.rewards.custom import CustomReward
from retrain.rewards.judge import JudgeReward
from retrain.rewards.rules import FormatReward, MatchReward
from retrain.rewards.symbolic import MathReward
from retrain.rewards.weighted import Component, WeightedReward


def build_grader(section: tasks.Reward, base_dir: Path | None = None) -> Grader:
    """The grader of a valid ``[reward]`` section.

    ``base_dir`` is the folder of the TOML: relative paths and modules are looked up there, then in the current
    directory. Raises MissingExtra, PluginError or UsageError for what the section names and is missing.
    """
    limits = {"workers": section.workers, "timeout_s": section.timeout_s}
    if section.type == "weighted":
        return Grader(_weighted(section.components, base_dir, limits))
    return Grader(_reward(section, base_dir, limits))


def _reward(section: tasks.Reward | tasks.RewardComponent, base_dir: Path | None, limits: dict[str, Any]) -> Reward:
    """A reward that is not ``weighted``. A component has its name, and the ``limits`` of [reward]."""
    if section.type == "format":
        reward = FormatReward()
    elif section.type == "math":
        reward = MathReward(**limits, strict=section.strict)
    elif section.type == "judge" and section.judge_model:
        reward = JudgeReward(section.judge_model, section.judge_url, section.judge_api_key_env, **limits)
    elif section.type == "custom" and section.custom_module:
        reward = CustomReward(section.custom_module, section.custom_function, base_dir=base_dir, **limits)
    else:
        assert section.type == "match", f"[reward] type = {section.type!r} lacks a key"
        reward = MatchReward(section.strict)
    reward.name = section.name or reward.name
    return reward


def _weighted(sections: list[tasks.RewardComponent], base_dir: Path | None, limits: dict[str, Any]) -> WeightedReward:
    components: list[Component] = []
    try:
        for section in sections:
            reward = _reward(section, base_dir, limits)
            components.append(Component(reward.name, reward, section.weight, section.offset))
    except BaseException:
        WeightedReward(components).close()  # an earlier component may have started workers
        raise
    return WeightedReward(components)
