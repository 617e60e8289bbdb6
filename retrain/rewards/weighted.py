"""``weighted``: several rewards added up, each recorded under its own name.

    total = Σ weight · (value + offset)

The GSM8K recipe ``correct + 0.1·(format − 1)`` has the components (math, weight 1) and (format, weight 0.1,
offset −1): 1 for a correct marked answer, 0 for a wrong one, −0.1 for none at all.
"""

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
    """The weighted sum of its components (``weighted_sum``)."""

    name = "weighted"

    def __init__(self, components: Sequence[Component]):
        self.components = tuple(components)
        self.columns = tuple(dict.fromkeys(c for each in self.components for c in each.reward.columns))
        self.names = tuple(component.name for component in components)
        self.ranges = {
            component.name if name == "reward" else name: limits
            for component in self.components
            for name, limits in component.reward.ranges.items()
        }

    def grade_all(self, items: Sequence[Item]) -> list[RewardResult]:
        """Grade the whole batch with one component after the other."""
        columns = [component.reward.grade_all(items) for component in self.components]
        return [self._sum(list(parts)) for parts in zip(*columns, strict=True)]

    def close(self) -> None:
        for component in self.components:
            component.reward.close()

    def _sum(self, parts: list[RewardResult]) -> RewardResult:
        pairs = zip(self.components, parts, strict=True)
        return weighted_sum([(each.name, each.weight, each.offset, part) for each, part in pairs])


def weighted_sum(parts: Sequence[tuple[str, float, float, RewardResult]]) -> RewardResult:
    """Return Σ weight · (value + offset) of parts (name, weight, offset, result), each a component.

    A part without a total and without an error does not apply to this completion and is left out. One that failed
    leaves no total, nor do parts of which none applies.
    """
    errors = [f"{name}: {part.error}" for name, _, _, part in parts if part.total_reward is None and part.error]
    values = [w * (part.total_reward + offset) for _, w, offset, part in parts if part.total_reward is not None]
    if errors:
        result = failed("; ".join(errors))
    else:
        result = checked(RewardResult(sum(values))) if values else RewardResult(None)
    result.components = {name: part.total_reward for name, _, _, part in parts}
    # The first part that grades correctness decides it, and the first that grades the format decides that.
    result.correct = next((part.correct for *_, part in parts if part.correct is not None), None)
    result.format_ok = next((part.format_ok for *_, part in parts if part.format_ok is not None), None)
    for owner, _, _, part in parts:
        inner = {name: value for name, value in part.components.items() if name != owner}
        for numbers, into in ((inner, result.components), (part.sample_metrics, result.sample_metrics)):
            for name, value in numbers.items():
                taken = name in result.sample_metrics or name in result.components
                into[f"{owner}/{name}" if taken else name] = value
    result.tags = tuple(dict.fromkeys(tag for *_, part in parts for tag in part.tags))
    return result
