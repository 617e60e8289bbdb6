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
    """The grader of a ``[reward]`` section, whose findings have been asked for.

    ``base_dir`` is the folder of the TOML: relative paths and modules are looked up there, then in the current
    directory. Raises MissingExtra, PluginError or UsageError for what the section names and is not there.
    """
    limits = {"workers": section.workers, "timeout_s": section.timeout_s}
    if section.type == "weighted":
        return Grader(_weighted(section.components, base_dir, limits))
    return Grader(_reward(section, base_dir, limits))


def _reward(section: tasks.Reward | tasks.RewardComponent, base_dir: Path | None, limits: dict[str, Any]) -> Reward:
    """A reward that is no sum, by its section's name where that has one; a component inherits the ``limits`` of its
    section."""
    reward = _new_reward(section, base_dir, limits)
    reward.name = section.name or reward.name
    return reward


def _new_reward(section: tasks.Reward | tasks.RewardComponent, base_dir: Path | None, limits: dict[str, Any]) -> Reward:
    if section.type == "format":
        return FormatReward()
    if section.type == "math":
        return MathReward(**limits, strict=section.strict)
    if section.type == "judge" and section.judge_model:
        return JudgeReward(section.judge_model, section.judge_url, section.judge_api_key_env, **limits)
    if section.type == "custom" and section.custom_module:
        return CustomReward(section.custom_module, section.custom_function, base_dir=base_dir, **limits)
    assert section.type == "match", f"[reward] type = {section.type!r} lacks what it needs"
    return MatchReward(section.strict)


def _weighted(sections: list[tasks.RewardComponent], base_dir: Path | None, limits: dict[str, Any]) -> WeightedReward:
    components: list[Component] = []
    try:
        for section in sections:
            reward = _reward(section, base_dir, limits)
            components.append(Component(reward.name, reward, section.weight, section.offset))
    except BaseException:
        WeightedReward(components).close()  # workers that an earlier component has started
        raise
    return WeightedReward(components)
