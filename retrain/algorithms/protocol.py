"""What the loop asks of an algorithm: rollouts with rewards become rollouts with advantages, token by token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from retrain.config.modes import Need
from retrain.policy.protocol import Denominators, Scores
from retrain.types import Group, Rollout


@dataclass(frozen=True)
class Credit:
    """Of a whole step: what the loss is divided by, numbers for the record, and how many tokens and sequences of a
    rollout count in the divisor, where that is not all of them."""

    denominators: Denominators
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tokens: Mapping[Rollout, int] = field(default_factory=dict, compare=False)
    sequences: Mapping[Rollout, int] = field(default_factory=dict, compare=False)

    def denominators_of(self, rollouts: Sequence[Rollout]) -> Denominators:
        """What a loss over these rollouts alone is divided by; all have a reward."""
        known = [rollout for rollout in rollouts if len(rollout) > 0]
        return replace(
            self.denominators,
            tokens=sum(self.tokens.get(rollout, len(rollout)) for rollout in known),
            sequences=sum(self.sequences.get(rollout, rollout.sequences) for rollout in known),
            action_tokens=sum(map(len, known)),
        )


class Algorithm(Protocol):
    """From rewards to what each token is trained with. One object per run; its ``state`` is in every checkpoint."""

    needs: frozenset[Need]

    def credit(self, groups: Sequence[Group], scores: Scores | None, step: int) -> Credit:
        """Set ``advantage``, ``token_advantages_T`` and ``loss_mask_T`` of every rollout that has a reward, and
        ``discarded`` of every group that does not train. ``scores`` holds what ``needs`` asks of the policy, for the
        rollouts in order."""
        ...

    def mark_planning(self, groups: Sequence[Group]) -> None:
        """Set ``planning_T`` of every rollout; ``credit`` does so for the groups that it gets."""
        ...

    def state(self) -> dict[str, Any]:
        """What it keeps from step to step, as strict JSON; only ``credit`` changes it."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        ...
