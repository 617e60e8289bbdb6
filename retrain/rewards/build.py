"""From the ``[reward]`` section to a grader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.config import tasks
from retrain.plugins import described
from retrain.rewards.base import AUDIT, FormatReward, Grader, Item, MatchReward, Reward, failed, weighted_sum
from retrain.rewards.custom import CustomReward
from retrain.rewards.endpoint import JudgeEndpoint
from retrain.rewards.judge import Criterion, JudgeReward, RubricReward
from retrain.rewards.reward_model import RewardModelReward
from retrain.rewards.symbolic import MathReward
from retrain.types import CORRECT_ABOVE, RewardResult


@dataclass(frozen=True)
class Component:
    """One summand: ``weight · (reward + offset)``, recorded as ``name`` before weighting."""

    name: str
    reward: Reward
    weight: float = 1.0
    offset: float = 0.0


class WeightedReward(Reward):
    """Several rewards added up, each recorded under its own name: total = Σ weight · (value + offset).

    The GSM8K recipe ``correct + 0.1·(format − 1)`` has the components (math, weight 1) and (format, weight 0.1,
    offset −1): 1 for a correct marked answer, 0 for a wrong one, −0.1 for none at all.
    """

    name = "weighted"

    def __init__(self, components: Sequence[Component]):
        self.components = tuple(components)
        self.columns = tuple(dict.fromkeys(column for part in components for column in part.reward.columns))
        self.names = tuple(component.name for component in components)
        self.ranges = {
            component.name if name == "reward" else name: limits
            for component in self.components
            for name, limits in component.reward.ranges.items()
        }

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Grade the whole batch with one component after the other."""
        columns = [component.reward.grade_all(items) for component in self.components]
        return [
            weighted_sum([(c.name, c.weight, c.offset, part) for c, part in zip(self.components, parts, strict=True)])
            for parts in zip(*columns, strict=True)
        ]

    def close(self) -> None:
        for component in self.components:
            component.reward.close()


class AuditedReward(Reward):
    """``reward``, with the score of a second grader, ``audit``, that never trains.

    The score goes into the sample metrics of a result, as ``audit``, which are recorded and reach no advantage. A fault
    of the audit costs that number alone.
    """

    def __init__(self, reward: Reward, audit: Reward):
        self.reward, self.audit = reward, audit
        self.name, self.names = reward.name, reward.names
        self.columns = (*reward.columns, *audit.columns)
        ranges = {AUDIT if name == "reward" else f"{AUDIT}/{name}": limits for name, limits in audit.ranges.items()}
        self.ranges = {**reward.ranges, **ranges}

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Return the results of ``reward``, each with the audit's numbers; None with the reason where it has none."""
        results = self.reward.grade_all(items)
        try:
            audits = self.audit.grade_all(items)
        except Exception as error:  # an audit costs its own number, never the run
            audits = [failed(described(error))] * len(items)
        for result, audit in zip(results, audits, strict=True):
            result.audit_error = audit.error
            numbers = {AUDIT: audit.total_reward}
            numbers |= {f"{AUDIT}/{name}": value for name, value in audit.sample_metrics.items()}
            result.sample_metrics = {**result.sample_metrics, **numbers}
        return results

    def close(self) -> None:
        self.reward.close()
        self.audit.close()


def grader_of(reward: Reward, correct_above: float = CORRECT_ABOVE) -> Grader:
    names, ranges = reward.names or (reward.name,), dict(reward.ranges)
    if len(names) == 1 and "reward" in ranges:  # the only component is the total
        ranges.setdefault(names[0], ranges["reward"])
    return Grader(reward, names, ranges, correct_above)


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
    builder = _Builder(section, base_dir, device)
    reward = builder.weighted() if section.type == "weighted" else builder.reward(section)
    if audit is None or not audit.wanted:
        return grader_of(reward, section.correct_above)
    try:
        return grader_of(AuditedReward(reward, builder.reward(audit, "audit")), section.correct_above)
    except BaseException:
        reward.close()  # which may have started workers
        raise


@dataclass(frozen=True)
class _Builder:
    """Builds the components of a reward from [reward]; ``base_dir`` is the folder of the TOML file."""

    section: tasks.Reward
    base_dir: Path | None
    device: Callable[[], object]

    def reward(self, part: tasks.Reward | tasks.RewardComponent | tasks.Audit, table: str = "reward") -> Reward:
        """Build a reward that is not ``weighted``; ``table`` is what the file calls it."""
        workers, timeout_s = self.section.workers, self.section.timeout_s
        reward: Reward
        if part.type == "format":
            reward = FormatReward()
        elif part.type == "math":
            reward = MathReward(workers, timeout_s, part.strict, table)
        elif part.type in tasks.JUDGED and part.judge_model:
            key = part.judge_api_key_env
            endpoint = JudgeEndpoint(part.judge_model, part.judge_url, key, workers, timeout_s, table=table)
            reward = JudgeReward(endpoint) if part.type == "judge" else _rubric(part, endpoint)
        elif part.type == "custom" and part.custom_module:
            reward = CustomReward(part.custom_module, part.custom_function, workers, timeout_s, self.base_dir, table)
        elif part.type == "reward_model" and part.reward_model:
            batch, device = self.section.reward_batch, str(self.device())
            reward = RewardModelReward(part.reward_model, batch, device, self.base_dir)
        else:
            assert part.type == "match", f"[reward] type = {part.type!r} lacks a key"
            reward = MatchReward(part.strict)
        reward.name = part.name or reward.name
        return reward

    def weighted(self) -> WeightedReward:
        components: list[Component] = []
        try:
            for part in self.section.components:
                reward = self.reward(part)
                components.append(Component(reward.name, reward, part.weight, part.offset))
        except BaseException:
            WeightedReward(components).close()  # an earlier component may have started workers
            raise
        return WeightedReward(components)


def _rubric(section: tasks.Grader, endpoint: JudgeEndpoint) -> RubricReward:
    criteria = [Criterion(criterion.name, criterion.text, criterion.weight_number) for criterion in section.criteria]
    return RubricReward(endpoint, criteria, section.rubric_column, section.rubric == "explicit")
