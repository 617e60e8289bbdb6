"""From the configuration to the problems that its runs are asked, in training and in every held-out set, and to what
they act in. Torch is not imported."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config import Config
from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import Data
from retrain.data import Dataset, content_hash, load_data
from retrain.data.dataset import HeldOutRequest, Room, fitting
from retrain.data.prompts import conversation
from retrain.environments.hosted import Hosted, HostedEpisode
from retrain.environments.protocol import Environment, Episode, Limits, Observation, Range, Step
from retrain.errors import DataError, ModelError
from retrain.files import read_json
from retrain.models.directory import LightTokenizer, find_file, light_tokenizer
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText
from retrain.rewards.custom import columns_of
from retrain.rewards.judge import Criterion, criteria_of
from retrain.types import CORRECT_ABOVE, Action, Problem, RewardResult, with_correctness

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


def data_of(config: Config, folder: Path) -> Dataset:
    """The training and held-out problems of a run's configuration. Raises DataError or PluginMissing when they cannot
    be had."""
    if config.environment.provider is not None:
        return provided_data(config, folder)
    wanted = [HeldOutRequest(each.name, each.problems, each.data) for each in config.held_out]
    data = load_data(config.data, wanted, config.training.max_examples, config.campaign.seed, folder)
    check_rubrics(data, config)
    return data


def check_rubrics(data: Dataset, config: Config) -> None:
    """Raise DataError for the first problem that has no criteria for a grader which takes some from the data, or has
    such that cannot be read."""
    for table, grader in config.graders:
        if grader.rubric_column is None:
            continue
        common = [Criterion(each.name, each.text, each.weight_number) for each in grader.criteria]
        for problem in (problem for part, _ in parts_of(data, config) for problem in part):
            try:
                criteria_of(problem, common, grader.rubric_column)
            except ValueError as error:
                raise DataError(
                    f"[{table}] rubric_column = {grader.rubric_column!r}, problem {problem.id}: {error}; its columns "
                    f"are {', '.join(map(repr, problem.metadata)) or 'none'}"
                ) from error


def missing_column(columns: Sequence[str], data: Dataset, config: Config) -> str:
    """Return the fault that the training problems or a held-out set have none of a column that a reward takes by name,
    with the columns that there are; "" when nothing is missing."""
    parts = {"the training problems": data.train}
    parts |= {f"the held-out set {each.name}": data.sets[each.name] for each in config.held_out}
    for part, problems in parts.items() if columns else ():
        known = dict.fromkeys(name for problem in problems for name in columns_of(problem))
        if absent := next((name for name in columns if name not in known), None):
            return f"its parameter {absent!r} is no column of {part}, which have {', '.join(known)}"
    return ""


def parts_of(data: Dataset, config: Config) -> list[tuple[Sequence[Problem], Data]]:
    """The problems that a run is asked, in training and in each held-out set, with the keys by which they are asked."""
    return [(data.train, config.data), *((data.sets[each.name], each.data) for each in config.held_out)]


def context_length(config: Config) -> int:
    """Return the model's context length in tokens by its files on this machine; 0 where it is not known, also from a
    damaged config.json, which ``model_fault`` reports."""
    local, model = config.backend.backend == "local", config.model
    path = find_file(model.model, "config.json", model.revision) if local else None
    try:
        facts = read_json(path) if path else {}
    except ValueError:
        return 0
    return int((facts.get("text_config") or facts).get("max_position_embeddings") or 0)


def tokenizer_of(config: Config) -> LightTokenizer:
    """Return the tokenizer that training counts with. Raises ModelError where it is not on this machine."""
    if config.backend.backend != "local":
        raise ModelError(f"the backend {config.backend.backend} has its own tokenizer")
    return light_tokenizer(config.model.model, config.model.revision)


@dataclass(frozen=True)
class Longest:
    """Most tokens of a completion in any run of a plan, in training and in each held-out set."""

    training: int
    heldout: Mapping[str, int]


def longest_completions(configs: Iterable[Config]) -> Longest:
    """Over all runs of a plan, so that all of them are asked the same problems, whatever the cohort they are in."""
    training, heldout = 0, dict[str, int]()
    for config in configs:
        training = max(training, config.training.max_tokens)
        for each in config.held_out:
            heldout[each.name] = max(heldout.get(each.name, 0), each.sampling.max_tokens)
    return Longest(training, heldout)


def rooms(config: Config, longest: Longest, context: int) -> tuple[Room, dict[str, Room]]:
    """How long prompts may be in training and in each held-out set: no longer than ``[data] max_prompt_tokens``, and
    leaving room for the longest completion in the model's ``context`` of so many tokens (0: not known).

    Raises ModelError where completions leave no room at all.
    """
    model = f"{config.model.model} has a context of {context} tokens"

    def room(section: Data, completion: int, key: str) -> Room:
        limit, left = section.max_prompt_tokens, context - completion
        if context and left < 1:
            raise ModelError(
                f"{model}, and max_tokens = {completion} leaves none for a prompt: lower {key} below {context}"
            )
        if context and (limit is None or left < limit):
            return Room(section, left, f"{model}, max_tokens = {completion} takes the rest")
        return Room(section, limit, f"[data] max_prompt_tokens = {limit}")

    heldout = {}
    for each in config.held_out:
        key = "[evaluation] max_tokens" if each.name == HELDOUT else f"max_tokens of the set {each.name}"
        heldout[each.name] = room(each.data, longest.heldout[each.name], key)
    return room(config.data, longest.training, "[training] max_tokens"), heldout


def askable(data: Dataset, config: Config, longest: Longest, tokenizer: Any, context: int) -> Dataset:
    """``data`` without prompts that are too long for the ``rooms`` that they have. What a provider's environment asks
    is known when an episode begins; its length is looked at then. Raises as ``rooms`` and ``fitting``."""
    if config.environment.provider is not None:
        return data
    return fitting(data, tokenizer, *rooms(config, longest, context))


def environments_of(config: Config, data: Dataset, grader: Grader | None, folder: Path) -> Mapping[str, Environment]:
    """Return what a run trains in, as ``train``, and what it is evaluated in, by the names of the held-out sets.

    ``grader`` is not used where the environment brings its own rewards. Raises PluginMissing.
    """
    sections = {TRAIN: config.data} | {each.name: each.data for each in config.held_out}
    splits = {TRAIN: data.train, **data.sets}
    host = hosted(config, folder) if config.environment.hosted else None
    grader = None if config.environment.provider is not None else grader
    above = config.reward.correct_above
    return {name: SplitEnvironment(splits[name], section, grader, host, above) for name, section in sections.items()}


def episode_limits(config: Config, context: int | None) -> Limits:
    """Return the limits of a configuration, with a model that has this ``context`` of tokens (None: not known)."""
    section = config.environment
    bounds = [tokens for tokens in (section.max_episode_tokens, context) if tokens]
    return Limits(section.turns, min(bounds) if bounds and section.turns > 1 else None)


class SplitEnvironment:
    """Problems of one split, which the policy answers: in one turn, with the tools of ``host`` up to the first answer
    without a call, or in the environment of ``host``.

    ``grader`` grades the last answer; without it ``host`` grades, and ``correct_above`` is the threshold of
    ``with_correctness``.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        data: Data,
        grader: Grader | None,
        host: Hosted | None = None,
        correct_above: float = CORRECT_ABOVE,
    ):
        self._problems, self.data, self.grader, self.host = problems, data, grader, host
        self.correct_above = correct_above
        self.exact = host is None or host.exact
        self.parallel = 1 if host is None else host.parallel
        owners = [owner.ranges for owner in (grader, host) if owner is not None]
        self.ranges: Mapping[str, Range] = {name: ends for ranges in owners for name, ends in ranges.items()}

    def problems(self, split: str) -> Sequence[Problem]:
        return self._problems

    def start(self, problem: Problem, seed: int) -> Episode:
        """Begin an episode. Raises EpisodeFailed where the host cannot."""
        return SplitEpisode(problem, self.data, None if self.host is None else self.host.start(problem, seed))

    def results(self, episodes: Sequence[Episode]) -> list[RewardResult]:
        ended = [episode for episode in episodes if isinstance(episode, SplitEpisode)]
        played = [episode.hosted for episode in ended if episode.hosted is not None]
        results = [] if self.host is None else self.host.results(played)
        if self.grader is None:
            metric = self.host.section.correct_metric if self.host is not None else None
            return [with_correctness(result, self.correct_above, metric) for result in results]
        graded = self.grader.grade([(episode.problem, episode.answer) for episode in ended])
        for result, counts in zip(graded, results, strict=self.host is not None):
            result.sample_metrics = {**counts.sample_metrics, **result.sample_metrics}
        return graded


@dataclass
class SplitEpisode:
    """Episode of one problem; ``hosted`` runs its tool calls, or is what it acts in."""

    problem: Problem
    data: Data
    hosted: HostedEpisode | None = None
    answer: str = ""

    def observe(self) -> Observation:
        """Return the host's first messages, or else the problem, asked as [data] says."""
        first = Observation(()) if self.hosted is None else self.hosted.first
        problem, data = self.problem, self.data
        if first.messages:
            problem = Problem("", tuple(first.messages), "")
        if first.messages and first.messages[0]["role"] == "system":
            data = data.model_copy(update={"system_prompt": None})
        return Observation(tuple(conversation(problem, data)), first.tools)

    def step(self, action: Action) -> Step:
        """Take an action in the host; without one a completion ends the episode. Raises EpisodeFailed."""
        self.answer = CompletionText(action.text, action.token_ids)
        return Step() if self.hosted is None else self.hosted.step(action)

    def close(self) -> None:
        if self.hosted is not None:
            self.hosted.close()
