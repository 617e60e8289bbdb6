"""Which weights draw the rollouts of which step, when rollouts may run ahead of the policy.

With the bound k (``[training] max_off_policy_steps``) the rollouts of step t are drawn by the weights as they are
before step max(0, t − k). With k = 0 these are the weights that train on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from retrain.engines.protocol import PolicyRef
from retrain.policy.protocol import PolicySnapshot


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
        self._known: list[Weights] = []
        self._replaced: list[Weights] = []

    def __iter__(self) -> Iterator[Weights]:
        return iter(self._known)

    def note(self, weights: Weights) -> list[PolicyRef]:
        """The weights before this step, in place of what was noted for it; the names that nobody needs any more. What
        is replaced stays for a step: a request may name it already."""
        before = [*self._replaced, *self._known]
        kept = [each for each in self._known if weights.step - self.bound <= each.step < weights.step]
        replaced = [each for each in before if each.step == weights.step and each.ref != weights.ref]
        names = {each.ref for each in (*kept, *replaced, weights)}
        dropped = [each for each in before if each.ref not in names]
        self._replaced, self._known = replaced if self.bound else [], [*kept, weights]
        dropped += [] if self.bound else replaced
        if self.remembers and dropped:
            self._dropped = dropped[-1]
        return list(dict.fromkeys(each.ref for each in dropped))

    def drawing(self, step: int) -> PolicyRef:
        """The weights that draw the rollouts of a step: of those at least ``bound`` steps before it the newest, or the
        oldest there are."""
        old_enough = [each for each in self._known if each.step <= step - self.bound]
        return (old_enough[-1] if old_enough else self._known[0]).ref

    def newest(self) -> PolicyRef:
        """The weights as they are now."""
        return self._known[-1].ref

    def snapshots(self) -> dict[int, PolicySnapshot]:
        """The weights that are kept, by version."""
        known = [*([self._dropped] if self._dropped else []), *self._known]
        return {each.ref.version: each.snapshot for each in known}

    def age(self, version: int, step: int) -> int:
        """How many steps before ``step`` weights of this version were last the newest: 0 while they still are."""
        known = [*self._replaced, *self._known]
        last = max((each.step for each in known if each.ref.version == version), default=None)
        return step - last if last is not None else self.bound + 1
