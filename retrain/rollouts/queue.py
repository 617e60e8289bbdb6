"""Rollouts for the next update of every run, at most so many versions of its policy old.

With ``max_staleness = 0`` nothing is sampled ahead: every update trains on samples of the weights that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from retrain.engines.protocol import Engine
from retrain.pressure import Pressure
from retrain.rollouts.collect import RolloutRequest, collect
from retrain.types import Group

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Taken(Generic[Owner]):
    """The groups of every owner, in the order of its requests, or what went wrong with one; when what was done, and in
    how many seconds of it the engine made the weights its own."""

    groups: dict[Owner, list[Group | Exception]]
    spans: list[tuple[str, float, float]]
    sync_seconds: float | None = None


class RolloutQueue(Generic[Owner]):
    """Draws the rollouts of all runs of a cohort in one decode batch. ``pressure`` decides how many decode at once."""

    def __init__(self, engine: Engine, pressure: Pressure | None = None, max_staleness: int = 0):
        if max_staleness:
            raise ValueError("rollouts ahead of the policy need an engine that draws while another updates")
        self.engine, self.pressure = engine, pressure

    def take(self, wanted: Mapping[Owner, Sequence[RolloutRequest]]) -> Taken[Owner]:
        """What every owner asks for."""
        requests = [request for own in wanted.values() for request in own]
        collected = collect(self.engine, requests, self.pressure.max_rows if self.pressure else None)
        if self.pressure is not None:
            self._observe(self.pressure, collected.groups, collected.spans)
        found = iter(collected.groups)
        groups = {owner: list(islice(found, len(own))) for owner, own in wanted.items()}
        return Taken(groups, collected.spans, collected.sync_seconds)

    def _observe(
        self, pressure: Pressure, groups: Sequence[Group | Exception], spans: Sequence[tuple[str, float, float]]
    ) -> None:
        """How fast it went: tokens sampled, seconds of decoding, and how many tokens came before one on average."""
        rollouts = [rollout for group in groups if isinstance(group, Group) for rollout in group.rollouts]
        if not rollouts:
            return
        sampled, read = sum(map(len, rollouts)), sum(rollout.observation_tokens for rollout in rollouts)
        seconds = sum(end - start for name, start, end in spans if name == "rollout")
        pressure.observe(sampled, seconds, read / len(rollouts) + sampled / (2 * len(rollouts)))
