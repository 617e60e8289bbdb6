"""From the ``[reward]`` section to a grader."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config import tasks
from retrain.rewards.audit import AuditedReward
from retrain.rewards.base import Grader, Reward
from retrain.rewards.custom import CustomReward
from retrain.rewards.endpoint import Endpoint
from retrain.rewards.judge import JudgeReward
from retrain.rewards.reward_model import RewardModelReward
from retrain.rewards.rubric import Criterion, RubricReward
from retrain.rewards.rules import FormatReward, MatchReward
from retrain.rewards.symbolic import MathReward
from retrain.rewards.weighted import Component, WeightedReward


@dataclass(frozen=True)
class _Shared:
    """What the parts of a reward have in common: the TOML's folder, and what [reward] says for all of them."""

    base_dir: Path | None
    limits: dict[str, Any]
    batch: int
    device: Callable[[], object]


def build_grader(
    section: tasks.Reward,
    base_dir: Path | None = None,
    device: Callable[[], object] = lambda: "cpu",
    audit: tasks.Audit | None = None,
) -> Grader:
    """Build the grader of a valid ``[reward]`` section, with the ``[audit]`` where one is wanted.

    ``base_dir`` is the folder of the TOML: relative paths and modules are looked up there, then in the current
    directory. ``device`` is asked for the torch device of a reward model, where there is one. Raises MissingExtra,
    PluginError, ModelError or UsageError for what the section names and is missing.
    """
    limits = {"workers": section.workers, "timeout_s": section.timeout_s}
    shared = _Shared(base_dir, limits, section.reward_batch, device)
    reward = _weighted(section.components, shared) if section.type == "weighted" else _reward(section, shared)
    if audit is None or not audit.wanted:
        return Grader(reward, section.correct_above)
    try:
        return Grader(AuditedReward(reward, _reward(audit, shared, "audit")), section.correct_above)
    except BaseException:
        reward.close()  # which may have started workers
        raise


def _reward(
    section: tasks.Reward | tasks.RewardComponent | tasks.Audit, shared: _Shared, table: str = "reward"
) -> Reward:
    """Build a reward that is not ``weighted``. A component has its name, and what [reward] says for all; ``table`` is
    what the file calls it."""
    limits, base_dir = {**shared.limits, "table": table}, shared.base_dir
    if section.type == "format":
        reward = FormatReward()
    elif section.type == "math":
        reward = MathReward(**limits, strict=section.strict)
    elif section.type in tasks.JUDGED and section.judge_model:
        endpoint = Endpoint(section.judge_model, section.judge_url, section.judge_api_key_env, **limits)
        reward = JudgeReward(endpoint) if section.type == "judge" else _rubric(section, endpoint)
    elif section.type == "custom" and section.custom_module:
        reward = CustomReward(section.custom_module, section.custom_function, base_dir=base_dir, **limits)
    elif section.type == "reward_model" and section.reward_model:
        reward = RewardModelReward(section.reward_model, shared.batch, str(shared.device()), base_dir)
    else:
        assert section.type == "match", f"[reward] type = {section.type!r} lacks a key"
        reward = MatchReward(section.strict)
    reward.name = section.name or reward.name
    return reward


def _rubric(section: tasks.Grader, endpoint: Endpoint) -> RubricReward:
    criteria = [Criterion(each.name, each.text, each.weight_number) for each in section.criteria]
    return RubricReward(endpoint, criteria, section.rubric_column, section.rubric == "explicit")


def _weighted(sections: list[tasks.RewardComponent], shared: _Shared) -> WeightedReward:
    components: list[Component] = []
    try:
        for section in sections:
            reward = _reward(section, shared)
            components.append(Component(reward.name, reward, section.weight, section.offset))
    except BaseException:
        WeightedReward(components).close()  # an earlier component may have started workers
        raise
    return WeightedReward(components)
