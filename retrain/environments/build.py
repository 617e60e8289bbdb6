"""From the configuration to what its runs act in, in training and in every held-out set."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from retrain.config import Config
from retrain.config.tasks import Data
from retrain.data import Dataset, content_hash
from retrain.data.prompts import conversation
from retrain.environments.hosted import Hosted, HostedEpisode
from retrain.environments.protocol import Environment, Episode, Limits, Observation, Range
from retrain.environments.single_turn import SingleTurn
from retrain.errors import DataError
from retrain.rewards import Grader
from retrain.types import CORRECT_ABOVE, Problem, RewardResult, with_correctness

TRAIN = "train"
_hosts: dict[tuple[str, Path], Hosted] = {}
_lock = threading.Lock()


def hosted(config: Config, folder: Path) -> Hosted:
    """Return the processes that host the configuration's environment or tools, started once in this process. Raises
    PluginMissing when they cannot be."""
    key = (config.environment.model_dump_json(), folder)
    with _lock:
        if key not in _hosts:
            _hosts[key] = Hosted(config.environment, folder)
        return _hosts[key]


def close_hosted() -> None:
    with _lock:
        while _hosts:
            _hosts.popitem()[1].close()


def provided_data(config: Config, folder: Path) -> Dataset:
    """Return the problems that a provider brings: those of ``train``, up to ``max_examples``, and of every held-out set
    those of its name. Raises DataError or PluginMissing."""
    host, most = hosted(config, folder), config.training.max_examples
    train = list(host.problems(TRAIN))[:most]
    sets = {each.name: list(host.problems(each.name))[: each.problems] for each in config.held_out}
    texts = {_text(problem) for problem in train}
    for name, problems in sets.items():
        if common := next((problem for problem in problems if _text(problem) in texts), None):
            raise DataError(
                f"[environment] provider = {host.name!r}: problem {common.id} of {name!r} is also trained on: what is "
                "held out must be held out"
            )
    return Dataset(host.name, train, sets, content_hash(train, *(sets.values() or [[]])))


def _text(problem: Problem) -> str:
    return repr((problem.prompt, problem.answer, problem.metadata))


def environments_of(config: Config, data: Dataset, grader: Grader | None, folder: Path) -> Mapping[str, Environment]:
    """Return what a run trains in, as ``train``, and what it is evaluated in, by the names of the held-out sets.

    ``grader`` may be None where the environment brings its own rewards. Raises PluginMissing.
    """
    sections = {TRAIN: config.data} | {each.name: each.data for each in config.held_out}
    splits = {TRAIN: data.train, **data.sets}
    host = hosted(config, folder) if config.environment.hosted else None
    if config.environment.provider is not None:
        assert host is not None
        above = config.reward.correct_above
        return {name: Provided(host, splits[name], section, above) for name, section in sections.items()}
    assert grader is not None
    return {name: SingleTurn({name: splits[name]}, section, grader, host) for name, section in sections.items()}


def episode_limits(config: Config, context: int | None) -> Limits:
    """Return the limits of a configuration, with a model that has this ``context`` of tokens (None: not known)."""
    section = config.environment
    bounds = [tokens for tokens in (section.max_episode_tokens, context) if tokens]
    return Limits(section.turns, min(bounds) if bounds and section.turns > 1 else None)


class Provided:
    """Environment of a provider, with the system prompt and template of [data]. ``correct_above`` is the threshold of
    ``with_correctness``."""

    def __init__(self, host: Hosted, problems: Sequence[Problem], data: Data, correct_above: float = CORRECT_ABOVE):
        self.host, self.data, self._problems, self.correct_above = host, data, problems, correct_above
        self.reward_range: tuple[float, float] | None = host.reward_range
        self.metrics_ranges: Mapping[str, Range] = host.metrics_ranges
        self.exact, self.parallel = host.exact, host.parallel

    def problems(self, split: str) -> Sequence[Problem]:
        return self._problems

    def start(self, problem: Problem, seed: int) -> HostedEpisode:
        """Begin an episode, whose first observation is asked as [data] says. Raises EpisodeFailed."""
        episode, data = self.host.start(problem, seed), self.data
        messages = tuple(episode.first.messages)
        if messages and messages[0]["role"] == "system":
            data = data.model_copy(update={"system_prompt": None})
        prompt = conversation(Problem("", messages, ""), data)
        episode.first = Observation(tuple(prompt), episode.first.tools)
        return episode

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        results = self.host.results([episode for episode in episodes if isinstance(episode, HostedEpisode)])
        metric = self.host.section.correct_metric
        return [with_correctness(result, self.correct_above, metric) for result in results]
