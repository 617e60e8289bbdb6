"""Problems of [data] that the policy works on with tools: its first answer without a call is what the reward grades."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.config.tasks import Data
from retrain.data.prompts import conversation
from retrain.environments.hosted import Hosted, HostedEpisode
from retrain.environments.protocol import Episode, Observation, Range, Step
from retrain.environments.single_turn import SingleTurn
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText
from retrain.types import Action, Problem, RewardResult


class WithTools(SingleTurn):
    """Problems by the name of their split; ``tools`` runs the calls."""

    def __init__(self, splits: Mapping[str, Sequence[Problem]], data: Data, grader: Grader, tools: Hosted):
        super().__init__(splits, data, grader)
        self.tools, self.exact, self.parallel = tools, tools.exact, tools.parallel
        self.metrics_ranges: Mapping[str, Range] = {**self.metrics_ranges, **tools.metrics_ranges}

    def start(self, problem: Problem, seed: int) -> WithToolsEpisode:
        """See ``Environment.start``."""
        return WithToolsEpisode(self, problem, self.tools.start(problem, seed))

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        """All answers in one call of the grader, and what the tools counted beside it."""
        own = [episode for episode in episodes if isinstance(episode, WithToolsEpisode)]
        graded = self.grader.grade([(episode.problem, episode.answer) for episode in own])
        counted = self.tools.results([episode.calls for episode in own])
        for result, counts in zip(graded, counted, strict=True):
            result.sample_metrics = {**counts.sample_metrics, **result.sample_metrics}
        return graded


@dataclass
class WithToolsEpisode:
    """One problem; ``calls`` is the tools' side of it, ``answer`` what the policy said last."""

    environment: WithTools
    problem: Problem
    calls: HostedEpisode
    answer: str = ""

    def observe(self) -> Observation:
        """The problem as ``[data]`` puts it, and the tools."""
        return Observation(tuple(conversation(self.problem, self.environment.data)), self.calls.observe().tools)

    def step(self, action: Action) -> Step:
        """Run the calls; without one the answer ends the episode. Raises EpisodeFailed."""
        self.answer = CompletionText(action.text, action.token_ids)
        return self.calls.step(action)

    def result(self) -> RewardResult:
        """Its grade."""
        return self.environment.results([self])[0]

    def close(self) -> None:
        """The episode is over, without a result."""
        self.calls.close()
