"""The state of a run, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        return {
            "step": self.step,
            "cursor": self.cursor,
            "algorithm": self.algorithm,
            "policy": self.policy,
            **asdict(self.health),
            "recorder": self.recorder,
            "earlier": [list(pair) for pair in self.earlier],
            "base": self.base,
            "run_id": self.run_id,
            "shared": self.shared,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunState:
        """Return the state that a checkpoint holds; early checkpoints have neither ``mismatched_steps`` nor
        ``earlier``."""
        return cls(
            step=data["step"],
            cursor=data["cursor"],
            algorithm=data["algorithm"],
            policy=data["policy"],
            health=HealthCounters(data["ungraded_steps"], data["skipped_updates"], data.get("mismatched_steps", 0)),
            recorder=data["recorder"],
            earlier=[(step, version) for step, version in data.get("earlier", [])],
            base=data["base"],
            run_id=data["run_id"],
            shared=data["shared"],
        )


@dataclass(frozen=True)
class RollbackPoint:
    """The part of a run's state that a step changes before its update: enough to undo a failed step."""

    step: int
    cursor: int
    algorithm: Mapping[str, object]
    health: HealthCounters
    policy_version: int
