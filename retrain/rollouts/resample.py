"""Dynamic sampling (DAPO, arXiv 2503.14476): samples further prompts in place of groups with equal rewards.

Differences from the paper: a round samples only as many prompts as are missing, so no group with signal is dropped;
after the last round the first groups without signal complete the batch (the paper's code raises an error), so that
every step has ``batch_size`` groups and the same loss denominator; and signal is judged by rewards before overlong
penalties.

Every step has its own list of further prompts, a function of seeds and step: no state is carried between steps, and
conditions with the same seed use the same list and random numbers. The data cursor counts only first-round prompts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.records.measure import EQUAL_REWARDS
from retrain.rollouts.collect import RolloutRequest
from retrain.types import Group, Problem

Drawn = Sequence[Group | Exception]
# Maps (step, its requests so far, their results) to further requests; [] when the step is complete
Resample = Callable[[int, Sequence[RolloutRequest], Drawn], Sequence[RolloutRequest]]
# Reasons why a group has no signal: all answers right, all wrong, otherwise equal rewards, or no reward
REASONS = ("all_right", "all_wrong", "alike", "ungraded")


@dataclass(frozen=True)
class SelectedGroups:
    groups: list[Group]  # The step's batch, in sampling order
    dropped: list[Group]
    metrics: dict[str, int | float | None]


@dataclass(frozen=True)
class Resampler:
    """Adds at most ``rounds`` rounds of prompts to a step of ``batch`` prompts. ``upcoming(start, count)`` returns
    ``count`` problems from position ``start`` of an endless order; ``problems``: number of different problems."""

    batch: int
    rounds: int
    upcoming: Callable[[int, int], Sequence[Problem]]
    problems: int

    def resample(self, step: int, requests: Sequence[RolloutRequest], drawn: Drawn) -> list[RolloutRequest]:
        """Return one request for each group with signal that the batch still lacks. Empty after the last round, after
        an error (the run will fail), and when the step has used all problems."""
        groups = [group for group in drawn if isinstance(group, Group)]
        if len(groups) < len(drawn) or self._rounds(groups) >= self.rounds:
            return []
        missing = self.batch - sum(no_signal_reason(group) is None for group in groups)
        first, seen = requests[0], {request.problem.id for request in requests}
        problems = list[Problem]()
        # As if earlier steps had taken all their rounds, so that a step does not depend on how many they took.
        start = step * self.batch * self.rounds
        for offset in range(2 * self.problems):  # contains every problem, wherever an epoch ends
            if len(problems) == missing:
                break
            (problem,) = self.upcoming(start + offset, 1)
            if problem.id not in seen:
                seen.add(problem.id)
                problems.append(problem)
        return [
            replace(first, problem=problem, stream=(*first.stream[:-1], len(requests) + number))
            for number, problem in enumerate(problems)
        ]

    def select(self, groups: Sequence[Group]) -> SelectedGroups:
        """Return the groups with signal, filled up to a batch with the first groups without signal."""
        reasons = [no_signal_reason(group) for group in groups]
        with_signal = [i for i, reason in enumerate(reasons) if reason is None]
        others = [i for i, reason in enumerate(reasons) if reason is not None]
        selected = {*with_signal, *others[: max(0, self.batch - len(with_signal))]}
        dropped = [groups[i] for i in others if i not in selected]
        metrics = self._metrics(groups, dropped, unfilled=len(selected) - len(with_signal))
        return SelectedGroups([groups[i] for i in sorted(selected)], dropped, metrics)

    def _metrics(
        self, groups: Sequence[Group], dropped: Sequence[Group], unfilled: int
    ) -> dict[str, int | float | None]:
        counts = Counter(map(no_signal_reason, dropped))
        first = [rollout.reward.is_correct for group in groups[: self.batch] for rollout in group.rollouts]
        read = sum(rollout.observation_tokens + len(rollout) for group in dropped for rollout in group.rollouts)
        return {
            "dynamic/rounds": self._rounds(groups),
            "dynamic/drawn": len(groups),
            "dynamic/unfilled": unfilled,
            **{f"dynamic/dropped_{reason}": counts[reason] for reason in REASONS},
            "dynamic/dropped_tokens": read,
            "dynamic/correct_rate": float(np.mean(first)) if first else None,
        }

    def _rounds(self, groups: Sequence[Group]) -> int:
        with_signal = [no_signal_reason(group) is None for group in groups]
        drawn, rounds = self.batch, 0
        while drawn < len(groups):
            drawn += self.batch - sum(with_signal[:drawn])
            rounds += 1
        return rounds


def no_signal_reason(group: Group) -> str | None:
    """Return one of ``REASONS``, or None for a group whose rewards differ."""
    known_N = ~np.isnan(group.rewards_N)
    if not known_N.any():
        return "ungraded"
    if float(group.rewards_N[known_N].std()) >= EQUAL_REWARDS:
        return None
    right = {rollout.reward.is_correct for rollout, known in zip(group.rollouts, known_N, strict=True) if known}
    return "alike" if len(right) > 1 else "all_right" if right == {True} else "all_wrong"
