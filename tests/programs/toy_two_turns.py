"""A toy environment of two turns: the policy guesses, reads how near it was, and guesses again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from retrain.environments.protocol import Episode, Observation, Step
from retrain.types import Action, Problem, RewardResult


class GuessTwice:
    """The reward is the share of even digits in the second guess, with half of that of the first."""

    reward_range = (0.0, 1.5)
    exact = True
    metrics_ranges: ClassVar = {"first": {"min": 0, "max": 1}}

    def __init__(self, problems: Sequence[Problem]):
        self._problems = problems

    def problems(self, split: str) -> Sequence[Problem]:
        return self._problems

    def start(self, problem: Problem, seed: int) -> GuessEpisode:
        return GuessEpisode(problem)

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        return [episode.result() for episode in episodes]


@dataclass
class GuessEpisode:
    problem: Problem
    scores: list[float] = field(default_factory=list)

    def observe(self) -> Observation:
        return Observation(({"role": "user", "content": str(self.problem.prompt)},))

    def step(self, action: Action) -> Step:
        self.scores.append(sum(c in "02468" for c in action.text) / max(1, len(action.text)))
        if len(self.scores) == 2:
            return Step()
        return Step(({"role": "user", "content": f"{self.scores[0]:.2f}, again"},), done=False)

    def result(self) -> RewardResult:
        first, second = self.scores
        return RewardResult(second + first / 2, sample_metrics={"first": first})
