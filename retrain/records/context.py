"""The identity and configuration of a run for its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from retrain.config import Config
from retrain.config.evaluation import PART
from retrain.config.modes import credit_of
from retrain.records.schema.base import Values


@dataclass(frozen=True)
class RunContext:
    """Identity and configuration of one run, and the names in its metrics that are known before its first step.

    ``tags`` are the tags that the data source may give to problems. ``reward_names`` are the components and sample
    metrics that the reward declares. Rows have keys for these names from the first step on; other tags and names get
    keys at the step where they first occur.
    """

    condition: str
    run_id: str
    seed: int
    config: Config
    max_steps: int
    is_campaign: bool = False
    tags: tuple[str, ...] = ()
    set_tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # By held-out set, if it has other ``tags``
    reward_names: tuple[str, ...] = ()
    # Range of values, {"min", "max", "invert"}, by name of component or sample metric; "reward" is the total reward
    ranges: Mapping[str, Values] = field(default_factory=dict)
    skipped_prompts: int = 0  # Problems left out because their prompts are too long
    folder: Path | None = None  # The folder of the TOML file; modules that the file names are looked up there first

    def tags_of(self, name: str) -> tuple[str, ...]:
        return self.set_tags.get(name.removesuffix(PART), self.tags)

    @cached_property
    def features(self) -> frozenset[str]:
        """Features that the configuration switches on; ``Metric.requires`` is one of these names."""
        config, algorithm = self.config, self.config.algorithm
        switches = {
            "evaluation": config.held_out,
            "episodes": config.environment.hosted,
            "tools": config.environment.tools,
            "unit_tests": config.tested,
            "updates": config.training.several_updates,
            "critic": algorithm.critic,
            "ahead": config.training.max_off_policy_steps,
            "rejection": algorithm.masks_before_update or algorithm.rejection_denominator == "kept",
            "distillation": config.distillation.active,
            "dynamic": config.training.dynamic_sampling,
        }
        return credit_of(algorithm.transform_mode).features | {name for name, is_on in switches.items() if is_on}
