"""Rollouts for the next update of every run.

Nothing is sampled ahead: every update trains on samples of the weights that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Generic, TypeVar

from retrain.engines.protocol import Engine
from retrain.pressure import Pressure
from retrain.rollouts.collect import Collected, RolloutRequest, collect
from retrain.types import Group

Owner = TypeVar("Owner")


class RolloutQueue(Generic[Owner]):
    """Samples for all runs of a cohort in one decode batch. ``pressure`` decides how many rollouts decode at once."""

    def __init__(self, engine: Engine, pressure: Pressure | None = None):
        self.engine, self.pressure = engine, pressure

    def take(
        self, wanted: Mapping[Owner, Sequence[RolloutRequest]]
    ) -> tuple[dict[Owner, list[Group | Exception]], Collected]:
        """The groups of every owner, in the order of its requests, and all that ``collect`` returned."""
        requests = [request for own in wanted.values() for request in own]
        collected = collect(self.engine, requests, self.pressure.max_rows if self.pressure else None)
        if self.pressure is not None:
            self._observe(self.pressure, collected)
        groups = iter(collected.groups)
        return {owner: list(islice(groups, len(own))) for owner, own in wanted.items()}, collected

    def _observe(self, pressure: Pressure, collected: Collected) -> None:
        """How fast it went: tokens sampled, seconds of decoding, and how many tokens came before one on average."""
        groups = [group for group in collected.groups if isinstance(group, Group)]
        rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.turns]
        if not rollouts:
            return
        sampled, read = sum(map(len, rollouts)), sum(rollout.observation_tokens for rollout in rollouts)
        seconds = sum(end - start for name, start, end in collected.spans if name == "rollout")
        pressure.observe(sampled, seconds, read / len(rollouts) + sampled / (2 * len(rollouts)))
