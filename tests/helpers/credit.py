"""Credit of groups without a run."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.algorithms import GROUP_ADVANTAGES, GroupAdvantage, Modes, RegexDetector, build_algorithm, load_modes
from retrain.algorithms.algorithm import Algorithm, CreditStep, StepContext
from retrain.config import parse_dict
from retrain.config.modes import advantage_of
from retrain.types import CreditedBatch, CreditedGroup, Group, Scores

STREAM = ("run",)


class SilentTokenizer:
    """Tokens without text, so that none of them plans."""

    def offsets(self, token_ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
        return "", [(0, 0)] * len(token_ids)


def batch_of(groups: Sequence[Group]) -> CreditedBatch:
    return CreditedBatch(tuple(CreditedGroup.of(group) for group in groups))


def advantages_of(group: CreditedGroup) -> np.ndarray:
    """Return the advantages, float64 [N], NaN where there is none."""
    return np.array([rollout.advantage for rollout in group.rollouts])


def algorithm_of(config: dict[str, Any], tokenizer: Any = None, modes: Modes | None = None) -> Algorithm:
    parsed = parse_dict(config)
    modes = modes or load_modes(parsed.algorithm)
    return build_algorithm(parsed, modes, RegexDetector(), tokenizer or SilentTokenizer(), STREAM)


def credit(
    groups: Sequence[Group], config: dict[str, Any] | None = None, tokenizer: Any = None, modes: Modes | None = None,
    scores: Scores | None = None,
) -> CreditedBatch:  # fmt: skip
    """Return the groups with the credit of step 0 of a configuration."""
    return algorithm_of(config or {}, tokenizer, modes).credit(batch_of(groups), scores or Scores(), 0)


def apply(batch: CreditedBatch, *steps: CreditStep, scores: Scores | None = None, step: int = 0) -> CreditedBatch:
    for credit_step in steps:
        batch = credit_step.apply(batch, StepContext(step, scores or Scores()))
    return batch


def compare(groups: Sequence[Group], mode: Any, turn_credit: Any = None, reward_name: str = "reward") -> CreditedBatch:
    """Return the groups with advantages, of whole rollouts or of turns, but without token credit."""
    advantage = GroupAdvantage(mode, advantage_of(mode), GROUP_ADVANTAGES.get(mode), turn_credit, reward_name)
    return apply(batch_of(groups), advantage)
