"""Build the grader that the trainer calls from the ``[reward]`` section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from retrain.config import tasks
from retrain.config.tasks import AUDIT
from retrain.plugins import described
from retrain.rewards.base import FormatReward, Item, MatchReward, Reward, failed, weighted_sum
from retrain.rewards.custom import CustomReward
from retrain.rewards.judge import Criterion, JudgeEndpoint, JudgeReward, RubricReward
from retrain.rewards.reward_model import RewardModelReward
from retrain.rewards.symbolic import MathReward
from retrain.rewards.unit_tests import UnitTestReward
from retrain.types import CORRECT_ABOVE, RewardResult, with_correctness


class Grader(AbstractContextManager["Grader"]):
    """Grades the completions of a step with one reward.

    ``names``: components of every result, in configured order. ``columns``: columns that the data must have.
    ``correct_above``: where neither the reward nor a metric grades correctness, a total above it counts as correct.
    ``audit``: a second reward, whose score goes into the sample metrics and does not affect advantages.
    """

    def __init__(self, reward: Reward, correct_above: float = CORRECT_ABOVE, audit: Reward | None = None):
        self.reward, self.correct_above, self.audit = reward, correct_above, audit
        self.names = reward.names or (reward.name,)
        self.columns = (*reward.columns, *(audit.columns if audit else ()))
        self.ranges = dict(reward.ranges)
        if len(self.names) == 1 and "reward" in reward.ranges:  # the only component is the total
            self.ranges.setdefault(self.names[0], reward.ranges["reward"])
        for name, limits in (audit.ranges if audit else {}).items():
            self.ranges[AUDIT if name == "reward" else f"{AUDIT}/{name}"] = limits

    def grade(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return results in order; a completion that cannot be graded has ``total_reward=None``."""
        results = self.reward.grade_all(list(items))
        for result in results:
            if not result.components:
                result.components = {self.reward.name: result.total_reward}
            if result.total_reward is None and not result.error:
                result.error = "no reward applies to this completion"
        if self.audit is not None:
            self._add_audit(self.audit, items, results)
        return [with_correctness(result, self.correct_above) for result in results]

    def _add_audit(self, audit: Reward, items: Sequence[Item], results: Sequence[RewardResult]) -> None:
        try:
            audits = audit.grade_all(items)
        except Exception as error:  # a failing audit leaves its score null and never ends the run
            audits = [failed(described(error))] * len(items)
        for result, audited in zip(results, audits, strict=True):
            result.audit_error = audited.error
            numbers = {f"{AUDIT}/{name}": value for name, value in audited.sample_metrics.items()}
            result.sample_metrics = {**result.sample_metrics, AUDIT: audited.total_reward, **numbers}

    def close(self) -> None:
        for reward in (self.reward, self.audit):
            if reward is not None:
                reward.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True)
class Component:
    reward: Reward
    weight: float = 1.0
    offset: float = 0.0


class WeightedReward(Reward):
    """Adds several rewards, each recorded under its name: total = Σ weight · (value + offset).

    The GSM8K recipe ``correct + 0.1·(format − 1)`` has the components (math, weight 1) and (format, weight 0.1, offset
    −1): it gives 1 for a correct marked answer, 0 for a wrong answer, −0.1 for no answer.
    """

    name = "weighted"

    def __init__(self, components: Sequence[Component]):
        self.components = tuple(components)
        self.columns = tuple(dict.fromkeys(column for part in components for column in part.reward.columns))
        self.names = tuple(component.reward.name for component in components)
        self.ranges = {
            component.reward.name if name == "reward" else name: limits
            for component in self.components
            for name, limits in component.reward.ranges.items()
        }

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        columns = [
            [(part.reward.name, part.weight, part.offset, result) for result in part.reward.grade_all(items)]
            for part in self.components
        ]
        return [weighted_sum(parts) for parts in zip(*columns, strict=True)]

    def close(self) -> None:
        for component in self.components:
            component.reward.close()


def build_grader(
    section: tasks.RewardSection,
    base_dir: Path | None = None,
    device: Callable[[], object] = lambda: "cpu",
    audit: tasks.Audit | None = None,
) -> Grader:
    """Build the grader of a valid ``[reward]`` section, with its ``[audit]`` if enabled.

    ``base_dir`` is the folder of the TOML: relative paths and modules are looked up there, then in the current
    directory. ``device`` returns the torch device of a reward model. Raises MissingExtra, PluginError, ModelError or
    UsageError when something that the section names is missing.
    """

    with ExitStack() as started:  # closes rewards that have started workers if a later one cannot be built

        def build(part: tasks.RewardSection | tasks.RewardComponent | tasks.Audit, table: str = "reward") -> Reward:
            reward = _reward(part, section, base_dir, device, table)
            started.callback(reward.close)
            reward.name = part.name or reward.name
            return reward

        if section.type == "weighted":
            reward = WeightedReward([Component(build(part), part.weight, part.offset) for part in section.components])
        else:
            reward = build(section)
        second = build(audit, "audit") if audit is not None and audit.is_enabled else None
        started.pop_all()
    return Grader(reward, section.correct_above, second)


def _reward(
    part: tasks.RewardSection | tasks.RewardComponent | tasks.Audit,
    section: tasks.RewardSection,
    base_dir: Path | None,
    device: Callable[[], object],
    table: str,
) -> Reward:
    workers, timeout_s = section.workers, section.timeout_s
    if part.type == "format":
        return FormatReward()
    if part.type == "unit_tests":
        return UnitTestReward(timeout_s, section.tests_memory_mb, section.tests_credit)
    if part.type == "math":
        return MathReward(workers, timeout_s, part.strict, table)
    if part.type in tasks.JUDGED and part.judge_model:
        key = part.judge_api_key_env
        endpoint = JudgeEndpoint(part.judge_model, part.judge_url, key, workers, timeout_s, table=table)
        if part.type == "judge":
            return JudgeReward(endpoint)
        criteria = [Criterion(criterion.name, criterion.text, criterion.weight_number) for criterion in part.criteria]
        return RubricReward(endpoint, criteria, part.rubric_column, part.rubric == "explicit")
    if part.type == "custom" and part.custom_module:
        return CustomReward(part.custom_module, part.custom_function, workers, timeout_s, base_dir, table)
    if part.type == "reward_model" and part.reward_model:
        return RewardModelReward(part.reward_model, section.reward_batch, str(device()), base_dir)
    assert part.type == "match", f"[reward] type = {part.type!r} lacks a key"
    return MatchReward(part.strict)
