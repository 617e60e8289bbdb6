"""What the record layer knows of the run it describes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from retrain.config import Config
from retrain.config.evaluation import PART
from retrain.config.modes import credit_of
from retrain.records.schema.base import Row, Values


@dataclass(frozen=True)
class RunContext:
    """One run as its records name it.

    ``config`` is the resolved configuration. ``tags`` are those that the data source may give a problem,
    ``reward_names`` the reward's parts and known sample metrics: their keys stand in the very first row, while any
    others join the row from the step where they first appear.
    """

    condition: str
    run_id: str
    seed: int
    config: Config
    max_steps: int
    is_campaign: bool = False
    tags: tuple[str, ...] = ()
    set_tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each held-out set, where they differ from ``tags``."""
    reward_names: tuple[str, ...] = ()
    ranges: Mapping[str, Values] = field(default_factory=dict)
    """For charts: ``{"min", "max", "invert"}`` of the total reward (as ``reward``) and of other numbers by name."""
    skipped_prompts: int = 0  # Problems left out because their prompts are too long
    folder: Path | None = None  # The folder of the TOML file, where modules that it names are looked up first

    def lowest(self, name: str) -> float | None:
        """The smallest value that ``ranges`` declares for this number; None where it declares none."""
        return self.ranges.get(name, {}).get("min")

    def tags_of(self, name: str) -> tuple[str, ...]:
        """Tags that problems of a held-out set may have."""
        return self.set_tags.get(name.removesuffix(PART), self.tags)

    @property
    def features(self) -> frozenset[str]:
        """What the configuration switches on, as named by ``Metric.requires``."""
        evaluated = {"evaluation"} if self.config.held_out else set()
        episodes = {"episodes"} if self.config.environment.hosted else set()
        tools = {"tools"} if self.config.environment.tools else set()
        updates = {"updates"} if self.config.training.several_updates else set()
        critic = {"critic"} if self.config.algorithm.critic else set()
        ahead = {"ahead"} if self.config.training.max_off_policy_steps else set()
        before = self.config.algorithm.chooses_before or self.config.algorithm.rejection_denominator == "kept"
        rejection = {"rejection"} if before else set()
        distillation = {"distillation"} if self.config.distillation.active else set()
        dynamic = {"dynamic"} if self.config.training.dynamic_sampling else set()
        named = evaluated | episodes | tools | updates | critic | ahead | rejection | dynamic | distillation
        return credit_of(self.config.algorithm.transform_mode).features | named


def chart_ranges(*declared: Mapping[str, Values]) -> dict[str, Row]:
    """The ranges that several owners declare for their numbers, later ones in place of earlier ones.

    Keys are ``reward`` for the total and the names of other numbers; values hold ``min``, ``max`` and ``invert`` where
    known. Charts are scaled by them; training never sees them.
    """
    ranges: dict[str, Row] = {}
    for name, limits in (item for owner in declared for item in owner.items()):
        ranges.setdefault(name, {}).update(limits)
    return ranges
