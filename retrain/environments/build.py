"""Build the problems and environments of a configuration, for training and held-out sets, without torch."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.config import Config
from retrain.config.evaluation import HELDOUT
from retrain.config.tasks import MARKED, Data
from retrain.data import Dataset, content_hash, load_data
from retrain.data.dataset import PromptLimit, without_long_prompts
from retrain.data.prompts import conversation
from retrain.environments.hosted import HostedEnvironment, HostedEpisode
from retrain.environments.protocol import Environment, Episode, EpisodeLimits, Observation, Range, Step
from retrain.errors import DataError, ModelError, RubricError
from retrain.files import read_json
from retrain.models.directory import find_file
from retrain.rewards import Grader
from retrain.rewards.base import CompletionText
from retrain.rewards.custom import columns_of
from retrain.rewards.judge import Criterion, criteria_of
from retrain.rewards.unit_tests import tests_of
from retrain.tokenizer import LightTokenizer, light_tokenizer
from retrain.types import CORRECT_ABOVE, Action, Problem, RewardResult, with_correctness

TRAIN = "train"
_hosts: dict[tuple[str, Path], HostedEnvironment] = {}
_lock = threading.Lock()


def hosted(config: Config, folder: Path) -> HostedEnvironment:
    """Return the worker processes that host the configuration's environment or tools. The first call starts them, later
    calls with the same ``[environment]`` share them. Raises PluginMissing if they cannot be started."""
    key = (config.environment.model_dump_json(), folder)
    with _lock:
        if key not in _hosts:
            _hosts[key] = HostedEnvironment(config.environment, folder)
        return _hosts[key]


def close_hosted() -> None:
    with _lock:
        while _hosts:
            _hosts.popitem()[1].close()


def provided_data(config: Config, folder: Path) -> Dataset:
    """Return a provider's problems for training, at most ``max_examples``, and for each held-out set by name. Raises
    PluginMissing, or DataError if a split has no problems or a problem is both held out and trained on."""
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
    """Return the training and held-out problems of a run's configuration. Raises DataError or PluginMissing."""
    if config.environment.provider is not None:
        return provided_data(config, folder)
    data = load_data(config.data, config.held_out, config.training.max_examples, config.campaign.seed, folder)
    check_gradable(data, config)
    check_tests(data, config)
    return data


def check_gradable(data: Dataset, config: Config) -> None:
    """Raise DataError for the first problem without the answer that ``match`` or ``math`` compares with, or whose
    criteria in ``rubric_column`` are missing or malformed."""
    for table, grader in config.graders:
        if grader.type in MARKED and config.environment.provider is None:
            asked = (problem for part, _ in parts_of(data, config) for problem in part if not problem.answer)
            if problem := next(asked, None):
                raise DataError(
                    f'[{table}] type = "{grader.type}" compares with reference answers, and problem {problem.id} has '
                    'none: set [data] answer_column, or another type such as "judge"'
                )
        if grader.rubric_column is None:
            continue
        common = [Criterion(each.name, each.text, each.weight_number) for each in grader.criteria]
        for problem in (problem for part, _ in parts_of(data, config) for problem in part):
            try:
                criteria_of(problem, common, grader.rubric_column)
            except ValueError as error:
                columns = ", ".join(map(repr, problem.metadata)) or "none"
                reason = f"problem {problem.id}: {error}; its columns are {columns}"
                raise RubricError(table, grader.rubric_column, reason) from error


def check_tests(data: Dataset, config: Config) -> None:
    """Raise DataError for the first problem whose tests are missing or malformed, if a grader runs programs."""
    for part, _ in parts_of(data, config) if config.tested else ():
        for problem in part:
            tests_of(problem)


def missing_column(columns: Sequence[str], data: Dataset, config: Config) -> str:
    """Return a message if the training problems or a held-out set lack one of the columns that a reward function takes
    as parameters, else ""."""
    parts = {"the training problems": data.train}
    parts |= {f"the held-out set {each.name}": data.sets[each.name] for each in config.held_out}
    for part, problems in parts.items() if columns else ():
        known = dict.fromkeys(name for problem in problems for name in columns_of(problem))
        if absent := next((name for name in columns if name not in known), None):
            return f"its parameter {absent!r} is no column of {part}, which have {', '.join(known)}"
    return ""


def parts_of(data: Dataset, config: Config) -> list[tuple[Sequence[Problem], Data]]:
    return [(data.train, config.data), *((data.sets[each.name], each.data) for each in config.held_out)]


def context_length(config: Config) -> int:
    """Return the model's context length in tokens from its local files; 0 if it is unknown or ``config.json`` is
    damaged, which ``model_fault`` reports."""
    local, model = config.backend.backend == "local", config.model
    path = find_file(model.model, "config.json", model.revision) if local else None
    try:
        facts = read_json(path) if path else {}
    except ValueError:
        return 0
    return int((facts.get("text_config") or facts).get("max_position_embeddings") or 0)


def tokenizer_of(config: Config) -> LightTokenizer:
    """Return the model's tokenizer, without torch. Raises ModelError if it is missing or the backend is not local."""
    if config.backend.backend != "local":
        raise ModelError(f"the backend {config.backend.backend} has its own tokenizer")
    return light_tokenizer(config.model.model, config.model.revision)


@dataclass(frozen=True)
class CompletionLengths:
    training: int  # Tokens of the longest completion of any run of a plan
    heldout: Mapping[str, int]  # The same, by held-out set


def longest_completions(configs: Iterable[Config]) -> CompletionLengths:
    """Return the largest ``max_tokens`` over all runs of a plan. Prompt limits are computed from it, so that all runs
    get the same problems."""
    training, heldout = 0, dict[str, int]()
    for config in configs:
        training = max(training, config.training.max_tokens)
        for each in config.held_out:
            heldout[each.name] = max(heldout.get(each.name, 0), each.sampling.max_tokens)
    return CompletionLengths(training, heldout)


def rooms(config: Config, longest: CompletionLengths, context: int) -> tuple[PromptLimit, dict[str, PromptLimit]]:
    """Return the largest number of prompt tokens in training and in each held-out set. It is ``[data]
    max_prompt_tokens``, or less if the prompt and the longest completion would not fit into ``context``, the model's
    context length (0: unknown). Raises ModelError if completions leave no room for a prompt."""
    model = f"{config.model.model} has a context of {context} tokens"

    def room(section: Data, completion: int, key: str) -> PromptLimit:
        limit, remaining = section.max_prompt_tokens, context - completion
        if context and remaining < 1:
            raise ModelError(
                f"{model}, and max_tokens = {completion} leaves none for a prompt: lower {key} below {context}"
            )
        if context and (limit is None or remaining < limit):
            return PromptLimit(section, remaining, f"{model}, max_tokens = {completion} takes the rest")
        return PromptLimit(section, limit, f"[data] max_prompt_tokens = {limit}")

    heldout = {}
    for each in config.held_out:
        key = "[evaluation] max_tokens" if each.name == HELDOUT else f"max_tokens of the set {each.name}"
        heldout[each.name] = room(each.data, longest.heldout[each.name], key)
    return room(config.data, longest.training, "[training] max_tokens"), heldout


def askable(data: Dataset, config: Config, longest: CompletionLengths, tokenizer: object, context: int) -> Dataset:
    """Return ``data`` without prompts that exceed the limits of ``rooms``. Prompts of a provider's environment are not
    checked, because they are known only when an episode begins. Raises the errors of ``rooms`` and
    ``without_long_prompts``."""
    if config.environment.provider is not None:
        return data
    return without_long_prompts(data, tokenizer, *rooms(config, longest, context))


def environments_of(config: Config, data: Dataset, grader: Grader | None, folder: Path) -> Mapping[str, Environment]:
    """Return the environments by name: ``train`` and the held-out sets. ``grader`` is not used if a provider is
    configured, because its environment has its own rewards. Raises PluginMissing."""
    sections = {TRAIN: config.data} | {each.name: each.data for each in config.held_out}
    splits = {TRAIN: data.train, **data.sets}
    host = hosted(config, folder) if config.environment.hosted else None
    grader = None if config.environment.provider is not None else grader
    above = config.reward.correct_above
    return {name: SplitEnvironment(splits[name], section, grader, host, above) for name, section in sections.items()}


def episode_limits(config: Config, context: int | None) -> EpisodeLimits:
    section = config.environment
    bounds = [tokens for tokens in (section.max_episode_tokens, context) if tokens]
    return EpisodeLimits(section.turns, min(bounds) if bounds and section.turns > 1 else None)


class SplitEnvironment:
    """Environment of the problems of one split.

    Without ``host``, the policy answers in one turn. Otherwise it calls the tools of ``host`` until its first answer
    without a call, or acts in the environment of ``host``. ``grader`` grades the last answer. If it is None, ``host``
    grades, and an episode is correct if its reward is above ``correct_above`` (see ``with_correctness``).
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        data: Data,
        grader: Grader | None,
        host: HostedEnvironment | None = None,
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
    problem: Problem
    data: Data
    hosted: HostedEpisode | None = None
    answer: str = ""

    def observe(self) -> Observation:
        first = Observation(()) if self.hosted is None else self.hosted.first
        problem, data = self.problem, self.data
        if first.messages:
            problem = Problem("", tuple(first.messages), "")
        if first.messages and first.messages[0]["role"] == "system":
            data = data.model_copy(update={"system_prompt": None})
        return Observation(tuple(conversation(problem, data)), first.tools)

    def step(self, action: Action) -> Step:
        """Pass an action to the host; without a host, the action ends the episode. Raises EpisodeFailed."""
        self.answer = CompletionText(action.text, action.token_ids)
        return Step() if self.hosted is None else self.hosted.step(action)

    def close(self) -> None:
        if self.hosted is not None:
            self.hosted.close()
