"""Problems of [data]: the policy answers, perhaps after it has called tools, and a reward grades the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.config.tasks import Data
from retrain.data.prompts import conversation
from retrain.environments.hosted import Hosted, HostedEpisode
from retrain.environments.protocol import Episode, Observation, Range, Step
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText
from retrain.types import Action, Problem, RewardResult


class SingleTurn:
    """Problems by split, with the prompts of ``data``, graded by ``grader``.

    Without ``tools`` an episode has one turn; with them the first answer without a call ends it.
    """

    def __init__(
        self, splits: Mapping[str, Sequence[Problem]], data: Data, grader: Grader, tools: Hosted | None = None
    ):
        self.splits, self.data, self.grader, self.tools = splits, data, grader, tools
        self.exact = tools is None or tools.exact
        self.parallel = 1 if tools is None else tools.parallel
        ends = grader.ranges.get("reward", {})
        self.reward_range: tuple[float, float] | None = (
            (ends["min"], ends["max"]) if {"min", "max"} <= set(ends) else None
        )
        self.metrics_ranges: Mapping[str, Range] = {
            **{name: ends for name, ends in grader.ranges.items() if name != "reward"},
            **(tools.metrics_ranges if tools is not None else {}),
        }

    def problems(self, split: str) -> Sequence[Problem]:
        return self.splits[split]

    def start(self, problem: Problem, seed: int) -> Episode:
        """Begin an episode. Raises EpisodeFailed where the tools cannot be had."""
        calls = None if self.tools is None else self.tools.start(problem, seed)
        return SingleTurnEpisode(problem, self.data, calls)

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        answered = [episode for episode in episodes if isinstance(episode, SingleTurnEpisode)]
        graded = self.grader.grade([(episode.problem, episode.answer) for episode in answered])
        if self.tools is not None:
            counted = self.tools.results([episode.calls for episode in answered if episode.calls is not None])
            for result, counts in zip(graded, counted, strict=True):
                result.sample_metrics = {**counts.sample_metrics, **result.sample_metrics}
        return graded


@dataclass
class SingleTurnEpisode:
    """Episode of one problem; ``calls`` runs its tool calls, ``answer`` is the last completion."""

    problem: Problem
    data: Data
    calls: HostedEpisode | None = None
    answer: str = ""

    def observe(self) -> Observation:
        tools = () if self.calls is None else self.calls.first.tools
        return Observation(tuple(conversation(self.problem, self.data)), tools)

    def step(self, action: Action) -> Step:
        """Run the tool calls; a completion without one ends the episode. Raises EpisodeFailed."""
        self.answer = CompletionText(action.text, action.token_ids)
        return Step() if self.calls is None else self.calls.step(action)

    def close(self) -> None:
        if self.calls is not None:
            self.calls.close()
