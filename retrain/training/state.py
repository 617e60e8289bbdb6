"""The state of a run, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypedDict

from retrain.engines.protocol import EngineState
from retrain.policy.protocol import PolicyState
from retrain.rollouts.pressure import PressureState


@dataclass
class HealthCounters:
    ungraded_steps: int = 0  # Consecutive steps without any graded rollout
    skipped_updates: int = 0  # Consecutive steps with an update skipped because its loss or gradient was not finite
    mismatched_steps: int = 0  # Consecutive steps in which sampler and trainer differed by more than `mismatch_limit`


class SharedState(TypedDict, total=False):
    pressure: PressureState | None
    engine: EngineState


@dataclass(frozen=True)
class RunState:
    """Everything that a checkpoint holds besides tensors. Random streams have no state: they are functions of the seed
    and these counters."""

    step: int  # Optimizer steps done, which is the next step to run
    cursor: int  # Training problems taken from the data so far
    algorithm: Mapping[str, object]
    policy: PolicyState
    health: HealthCounters
    recorder: Mapping[str, object]
    # (step, policy version) of earlier weights that sample rollouts of this and later steps
    earlier: list[tuple[int, int]]
    base: str  # Fingerprint of the frozen weights
    run_id: str
    shared: SharedState

    def to_dict(self) -> dict[str, object]:
        content: dict[str, object] = {}
        for name, value in vars(self).items():
            content |= asdict(value) if isinstance(value, HealthCounters) else {name: value}
        return content

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunState:
        health = HealthCounters(**{counter.name: data[counter.name] for counter in fields(HealthCounters)})
        others = {part.name: data[part.name] for part in fields(cls) if part.name != "health"}
        return cls(health=health, **others)


@dataclass(frozen=True)
class RollbackPoint:
    """The part of a run's state that a step changes before its update: enough to undo a failed step."""

    step: int
    cursor: int
    algorithm: Mapping[str, object]
    health: HealthCounters
    policy_version: int
