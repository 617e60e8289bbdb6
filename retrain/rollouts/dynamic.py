"""Dynamic sampling (DAPO, arXiv 2503.14476): further prompts in place of those whose answers all have the same reward.

Differences from the paper: a round draws as many prompts as are missing, so no group that can teach is cut off; after
the last round the groups without signal that were drawn first fill the batch up (the paper's code stops with an error),
so every step has ``batch_size`` groups and its loss the divisor that it would have had; and a group is judged by the
rewards as they were graded, before long answers are punished.

Every step has a list of further prompts of its own, a function of seeds and step alone: nothing is carried from step to
step, and two conditions with the same seed draw from the same list in the same order, with the same random numbers,
however far each of them goes. The data cursor counts the prompts of first rounds, as without.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from retrain.engines.protocol import Engine
from retrain.record.samples import EQUAL_REWARDS
from retrain.rollouts.collect import Collected, RolloutRequest, collect
from retrain.types import Group, Problem

Drawn = Sequence[Group | Exception]
Further = Callable[[int, Sequence[RolloutRequest], Drawn], Sequence[RolloutRequest]]
"""(step, what was sampled for it so far, what came of it) → what else to sample for it; nothing when that is all."""
REASONS = ("all_right", "all_wrong", "alike", "ungraded")
"""Why a group teaches nothing: all its answers are right, or wrong, or of one reward otherwise, or have none."""


@dataclass
class Wanted:
    """The rollouts of one step: its requests, and what came of them, both with those of further rounds."""

    step: int
    requests: list[RolloutRequest]
    further: Further | None = None
    groups: list[Group | Exception] = field(default_factory=list)


def collect_rounds(engine: Engine, wanted: Sequence[Wanted], max_rows: int | None = None) -> list[Collected]:
    """Sample and grade all that is wanted, then in further rounds what ``further`` still asks for, that of all in one
    decode batch; what each round came to."""
    asked, rounds = [(each, each.requests) for each in wanted], list[Collected]()
    while asked or not rounds:
        rounds.append(collect(engine, [request for _, own in asked for request in own], max_rows))
        groups = iter(rounds[-1].groups)
        for each, own in asked:
            each.groups += islice(groups, len(own))
        more = [
            (each, list(each.further(each.step, each.requests, each.groups)))
            for each in wanted
            if each.further is not None
        ]
        asked = [(each, own) for each, own in more if own]
        for each, own in asked:
            each.requests += own
    return rounds


@dataclass(frozen=True)
class Chosen:
    """Which of a step's groups it trains on, in the order drawn, and which it ``dropped``; ``numbers`` for its row."""

    groups: list[Group]
    dropped: list[Group]
    numbers: dict[str, int | float | None]


@dataclass(frozen=True)
class DynamicSampling:
    """``rounds`` further rounds at most in a step of ``batch`` prompts. ``upcoming(start, count)`` are problems in an
    order of their own, without end; there are ``problems`` different ones."""

    batch: int
    rounds: int
    upcoming: Callable[[int, int], Sequence[Problem]]
    problems: int

    def further(self, step: int, requests: Sequence[RolloutRequest], drawn: Drawn) -> list[RolloutRequest]:
        """As many further prompts as groups with signal are missing: none after the last round, of a run that will
        fail, or when all problems have been drawn in this step."""
        groups = [group for group in drawn if isinstance(group, Group)]
        if len(groups) < len(drawn) or self._rounds(groups) >= self.rounds:
            return []
        missing = self.batch - sum(why_alike(group) is None for group in groups)
        first, seen = requests[0], {request.problem.id for request in requests}
        found = list[Problem]()
        start = step * self.batch * self.rounds
        for place in range(2 * self.problems):  # in so many each stands, wherever an epoch ends
            if len(found) == missing:
                break
            (problem,) = self.upcoming(start + place, 1)
            if problem.id not in seen:
                seen.add(problem.id)
                found.append(problem)
        return [
            replace(first, problem=problem, stream=(*first.stream[:-1], len(requests) + number))
            for number, problem in enumerate(found)
        ]

    def choose(self, groups: Sequence[Group]) -> Chosen:
        """The groups with signal, filled up to a batch by the first of the others."""
        why = [why_alike(group) for group in groups]
        teaching = [i for i, reason in enumerate(why) if reason is None]
        others = [i for i, reason in enumerate(why) if reason is not None]
        kept = {*teaching, *others[: max(0, self.batch - len(teaching))]}
        dropped = [groups[i] for i in others if i not in kept]
        reasons = Counter(why[i] for i in others if i not in kept)
        first = [rollout.reward.is_correct for group in groups[: self.batch] for rollout in group.rollouts]
        read = sum(rollout.observation_tokens + len(rollout) for group in dropped for rollout in group.rollouts)
        numbers: dict[str, int | float | None] = {
            "dynamic/rounds": self._rounds(groups),
            "dynamic/drawn": len(groups),
            "dynamic/unfilled": len(kept) - len(teaching),
            **{f"dynamic/dropped_{reason}": reasons[reason] for reason in REASONS},
            "dynamic/dropped_tokens": read,
            "dynamic/correct_rate": float(np.mean(first)) if first else None,
        }
        return Chosen([groups[i] for i in sorted(kept)], dropped, numbers)

    def _rounds(self, groups: Sequence[Group]) -> int:
        """How many further rounds these groups, in the order drawn, came in."""
        teaching = [why_alike(group) is None for group in groups]
        taken, rounds = self.batch, 0
        while taken < len(groups):
            taken += self.batch - sum(teaching[:taken])
            rounds += 1
        return rounds


def why_alike(group: Group) -> str | None:
    """One of ``REASONS``; None for a group whose rewards differ."""
    known_N = ~np.isnan(group.rewards_N)
    if not known_N.any():
        return "ungraded"
    if float(group.rewards_N[known_N].std()) >= EQUAL_REWARDS:
        return None
    right = {rollout.reward.is_correct for rollout, known in zip(group.rollouts, known_N, strict=True) if known}
    return "alike" if len(right) > 1 else "all_right" if right == {True} else "all_wrong"
