"""Problems with one turn: the policy answers, a reward grades the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.config.tasks import Data
from retrain.data.prompts import conversation
from retrain.environments.protocol import Episode, Observation, Range, Step
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText
from retrain.types import Action, Problem, RewardResult


class SingleTurn:
    """Problems by the name of their split, asked as ``data`` says and graded by ``grader``."""

    def __init__(self, splits: Mapping[str, Sequence[Problem]], data: Data, grader: Grader):
        self.splits, self.data, self.grader = splits, data, grader
        self.exact = True
        ends = grader.ranges.get("reward", {})
        self.reward_range: tuple[float, float] | None = (
            (ends["min"], ends["max"]) if {"min", "max"} <= set(ends) else None
        )
        self.metrics_ranges: Mapping[str, Range] = {
            name: ends for name, ends in grader.ranges.items() if name != "reward"
        }

    def problems(self, split: str) -> Sequence[Problem]:
        """The problems of ``train`` or of a held-out set."""
        return self.splits[split]

    def start(self, problem: Problem, seed: int) -> Episode:
        """See ``Environment.start``; nothing is random."""
        return SingleTurnEpisode(self, problem)

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """All answers in one call of the grader, so that a slow judge sees many at once."""
        own = [episode for episode in episodes if isinstance(episode, SingleTurnEpisode)]
        return self.grader.grade([(episode.problem, episode.answer) for episode in own])


@dataclass
class SingleTurnEpisode:
    """One question and its answer."""

    environment: SingleTurn
    problem: Problem
    answer: str = ""

    def observe(self) -> Observation:
        """The problem as ``[data]`` puts it."""
        return Observation(tuple(conversation(self.problem, self.environment.data)))

    def step(self, action: Action) -> Step:
        """The answer ends the episode."""
        self.answer = CompletionText(action.text, action.token_ids)
        return Step()

    def result(self) -> RewardResult:
        """Its grade."""
        return self.environment.results([self])[0]
