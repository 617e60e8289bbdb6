"""``weighted``: several rewards added up, each recorded under its own name.

    total = Σ weight · (value + offset)

The GSM8K recipe ``correct + 0.1·(format − 1)`` has the components (math, weight 1) and (format, weight 0.1,
offset −1): 1 for a correct marked answer, 0 for a wrong one, −0.1 for none at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.rewards.base import Item, Reward, checked, failed
from retrain.types import RewardResult


@dataclass(frozen=True)
class Component:
    """One summand: ``weight · (reward + offset)``, recorded as ``name`` before weighting."""

    name: str
    reward: Reward
    weight: float = 1.0
    offset: float = 0.0


class WeightedReward(Reward):
    """The weighted sum of its components; null as soon as one of them is null, since the sum is then undefined."""

    name = "weighted"

    def __init__(self, components: Sequence[Component]):
        self.components = tuple(components)
        self.names = tuple(component.name for component in components)
        self.ranges = {
            component.name if name == "reward" else name: limits
            for component in self.components
            for name, limits in component.reward.ranges.items()
        }

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Every component grades the whole batch, one after the other."""
        columns = [component.reward.grade_all(items) for component in self.components]
        return [self._sum(list(parts)) for parts in zip(*columns, strict=True)]

    def close(self) -> None:
        """Close every component."""
        for component in self.components:
            component.reward.close()

    def _sum(self, parts: list[RewardResult]) -> RewardResult:
        pairs = list(zip(self.components, parts, strict=True))
        errors = [f"{component.name}: {part.error}" for component, part in pairs if part.total_reward is None]
        if errors:
            result = failed("; ".join(errors))
        else:
            total = sum(c.weight * (part.total_reward + c.offset) for c, part in pairs if part.total_reward is not None)
            result = checked(RewardResult(total))
        result.components = {component.name: part.total_reward for component, part in pairs}
        # The first component that grades correctness decides it, and the first that grades the format decides that.
        result.correct = next((part.correct for part in parts if part.correct is not None), None)
        result.format_ok = next((part.format_ok for part in parts if part.format_ok is not None), None)
        for component, part in pairs:
            for name, value in part.sample_metrics.items():
                taken = name in result.sample_metrics or name in result.components
                result.sample_metrics[f"{component.name}/{name}" if taken else name] = value
        result.tags = tuple(dict.fromkeys(tag for part in parts for tag in part.tags))
        return result
