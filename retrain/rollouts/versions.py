"""The weights that draw the rollouts of each step, when rollouts may run ahead of the policy.

With the bound k (``[training] max_off_policy_steps``) the rollouts of step t are drawn by the weights as they are
before step max(0, t − k). With k = 0 these are the weights that train on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.engines.protocol import Engine
from retrain.policy.protocol import PolicySnapshot
from retrain.types import PolicyRef


@dataclass(frozen=True)
class Weights:
    """A run's weights as they are before ``step``."""

    step: int
    ref: PolicyRef
    snapshot: PolicySnapshot


class RecentWeights:
    """The weights of a run that rollouts still to be drawn, or still to be trained on, belong to: those before the
    present step and before the ``bound`` steps ahead of it, the oldest first.

    ``remembers``: the last that were dropped are in ``snapshots`` too, so that an engine can be told that still has
    them.
    """

    def __init__(self, bound: int, remembers: bool = False):
        self.bound, self.remembers = bound, remembers
        self._dropped: Weights | None = None
        self._weights: list[Weights] = []
        self._replaced: list[Weights] = []
        self.published: set[PolicyRef] = set()  # Policy refs currently loaded in the engine

    def publish_to(self, engine: Engine, weights: Weights) -> None:
        """Have the engine sample with these weights, the newest, and retire those that are too old."""
        for each in (*self._weights, weights):
            if each.ref not in self.published:
                engine.publish(each.ref, each.snapshot)
                self.published.add(each.ref)
        self._retire(engine, self.note(weights))

    def withdraw_from(self, engine: Engine) -> None:
        """Retire all weights that the engine has."""
        self._retire(engine, list(self.published))

    def _retire(self, engine: Engine, refs: Sequence[PolicyRef]) -> None:
        for ref in refs:
            engine.retire(ref)
            self.published.discard(ref)

    def note(self, weights: Weights) -> list[PolicyRef]:
        """Add the weights before this step, in place of those noted for it, and return the refs that are needed no
        longer. Replaced weights stay for a step: a request may name them already."""
        before = [*self._replaced, *self._weights]
        retained = [each for each in self._weights if weights.step - self.bound <= each.step < weights.step]
        replaced = [each for each in before if each.step == weights.step and each.ref != weights.ref]
        names = {each.ref for each in (*retained, *replaced, weights)}
        dropped = [each for each in before if each.ref not in names]
        self._replaced, self._weights = replaced if self.bound else [], [*retained, weights]
        dropped += [] if self.bound else replaced
        if self.remembers and dropped:
            self._dropped = dropped[-1]
        return list(dict.fromkeys(each.ref for each in dropped))

    def before(self, step: int) -> list[Weights]:
        """Return the weights before earlier steps that rollouts of this and later steps are drawn by."""
        return [each for each in self._weights if step - self.bound <= each.step < step]

    def drawing(self, step: int) -> PolicyRef:
        """Return the weights that draw the rollouts of a step: of those at least ``bound`` steps before it the newest,
        or the oldest there are."""
        old_enough = [each for each in self._weights if each.step <= step - self.bound]
        return (old_enough[-1] if old_enough else self._weights[0]).ref

    def newest(self) -> PolicyRef:
        """Return the present weights."""
        return self._weights[-1].ref

    def snapshots(self) -> dict[int, PolicySnapshot]:
        """Return the weights that are kept, by version."""
        known = [*([self._dropped] if self._dropped else []), *self._weights]
        return {each.ref.version: each.snapshot for each in known}

    def age(self, version: int, step: int) -> int:
        """Return how many steps before ``step`` weights of this version were last the newest: 0 while they are."""
        known = [*self._replaced, *self._weights]
        last = max((each.step for each in known if each.ref.version == version), default=None)
        return step - last if last is not None else self.bound + 1
