"""Collects the rollouts of a run on several ranks: each rank samples and grades a share of the prompts, and all ranks
get all groups. If servers sample, only rank 0 calls them, and it sends the groups to the other ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from retrain.engines.protocol import Engine, Finished
from retrain.policy.protocol import PolicySnapshot
from retrain.ranks import RankGroup
from retrain.rollouts.collect import CollectResult, RolloutRequest, collect
from retrain.rollouts.queue import RolloutQueue, SampledStep
from retrain.rollouts.resample import Resample
from retrain.types import Action, Group, PolicyRef, SampleRequest

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class RankCollector:
    """Replaces ``rollouts.collect.collect`` on several ranks. ``served``: servers sample, and rank 0 calls them."""

    ranks: RankGroup
    served: bool

    def __call__(
        self, engine: Engine, requests: Sequence[RolloutRequest], max_rows: int | None = None
    ) -> CollectResult:
        ranks = self.ranks
        if self.served:
            return ranks.from_first("rollouts", lambda: collect(engine, requests, max_rows))
        rows, share = max_rows and max(1, max_rows // ranks.count), requests[ranks.rank :: ranks.count]

        def collect_share() -> tuple[CollectResult, int | None]:
            # Without a prompt there is nothing to sample.
            collected = collect(engine, share, rows) if share else CollectResult([], [])
            return collected, engine.state().get("fitting")

        parts, fitting = zip(*ranks.gather("rollouts", collect_share), strict=True)
        groups = [parts[i % ranks.count].groups[i // ranks.count] for i in range(len(requests))]
        if limits := [rows for rows in fitting if rows is not None]:
            # Rank 0 writes the checkpoints for all ranks, so all use the same number of rows.
            engine.restore({**engine.state(), "fitting": min(limits)})
        slowest = max(parts, key=lambda part: part.spans[-1][2] if part.spans else 0.0)
        return CollectResult(groups, slowest.spans, slowest.sync_seconds)


class ServedQueue(RolloutQueue[Owner]):
    """The queue of a run that samples from servers: rank 0 samples and sends the rollouts to the other ranks."""

    def __init__(self, engine: Engine, ahead: bool, ranks: RankGroup):
        super().__init__(engine, None, ahead)
        self.ranks = ranks

    def offer(
        self, owner: Owner, requests: Mapping[int, Sequence[RolloutRequest]], resample: Resample | None = None
    ) -> None:
        if self.ranks.is_first:
            super().offer(owner, requests, resample)

    def take(self, due: Mapping[Owner, int]) -> SampledStep[Owner]:
        take = super().take

        def take_in_order() -> tuple[SampledStep[Owner], list[list[Group | Exception]]]:
            sampled = take(due)
            return replace(sampled, groups={}), list(sampled.groups.values())

        sampled, in_order = self.ranks.from_first("rollouts", take_in_order)
        return replace(sampled, groups=dict(zip(due, in_order, strict=True)))


class AbsentEngine(Engine):
    """Engine of the ranks that do not sample, because rank 0 samples from servers."""

    def publish(self, ref: PolicyRef, weights: PolicySnapshot) -> None: ...

    def sample(
        self, requests: Sequence[SampleRequest], *, max_rows: int | None = None, finished: Finished | None = None
    ) -> list[list[Action]]:
        raise RuntimeError("only rank 0 samples from servers")
