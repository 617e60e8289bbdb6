"""Describe the problems of a plan for ``explain``: source, number, prompt lengths, an example."""

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from retrain.config import Config
from retrain.config.tasks import Data
from retrain.data import Dataset
from retrain.data.dataset import LONGEST_BY_CHARACTERS, PromptLimit
from retrain.data.prompts import Renderer, Tools, conversation
from retrain.environments.build import (
    askable,
    context_length,
    data_of,
    hosted,
    longest_completions,
    parts_of,
    rooms,
    tokenizer_of,
)
from retrain.environments.protocol import EpisodeFailed
from retrain.errors import RetrainError, plural
from retrain.plugins import described
from retrain.training.estimate import ASSUMED_PROMPT_TOKENS
from retrain.types import Problem
from retrain.util.text import one_line

MEASURED = 500
"""Most prompts of a set whose tokens are counted, evenly spaced, in addition to the longest prompts. Counting all might
take minutes."""
EXAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Problems:
    """Problems of a plan's runs.

    ``lines`` are (name, text) pairs of the description, ``sizes`` the numbers of held-out problems by set, ``lengths``
    token counts of the measured prompts, empty if they cannot be measured here. ``is_read``: the data could be read.
    """

    lines: list[tuple[str, str]]
    sizes: Mapping[str, int]
    lengths: Sequence[int]
    is_read: bool = True

    @property
    def prompt_tokens(self) -> int | None:
        return round(median(self.lengths)) if self.lengths else None


def problems_of(configs: Sequence[Config], folder: Path) -> Problems:
    """Read and measure the problems of a plan's runs, which are the same for all of them."""
    # The hub's client reads these variables once, when it is first imported. ``explain`` contacts no server.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    config = configs[0]
    source, model = one_line(config.environment.provider or config.data.source), one_line(config.model.model)
    assumed = f"not measured, {ASSUMED_PROMPT_TOKENS} tokens are assumed"
    try:
        data = data_of(config, folder)
    except Exception as error:  # RetrainError, or any exception of a user's data function
        return Problems([("data", f"{source}: not read: {reason_of(error)}"), ("prompts", assumed)], {}, [], False)
    longest, context = longest_completions(configs), context_length(config)
    limits, refused, unmeasured, lengths, example = [], "", "", [], ""
    try:
        limits = _limits(config, *rooms(config, longest, context))
    except RetrainError as error:
        refused = str(error)
    try:
        tokenizer = tokenizer_of(config)
        try:
            data = data if refused else askable(data, config, longest, tokenizer, context)
        except RetrainError as error:
            refused = str(error)
        lengths, example = _measure(tokenizer, config, data, _tools(config, folder, data))
    except (RetrainError, EpisodeFailed) as error:
        unmeasured = str(error)
    if refused not in ("", unmeasured):
        limits.append(f"training would end at once: {refused}")
    heldout = f"{len(data.heldout):,} held out" if data.heldout else "none held out"
    lines = [("data", f"{source}: {plural(len(data.train), 'problem')} to train on, {heldout}")]
    lines += [("", one_line(note)) for note in data.notes]
    total = len(data.train) + len(data.heldout)
    lines.append(("prompts", f"{assumed}: {one_line(unmeasured)}" if unmeasured else _measured(lengths, total, model)))
    lines += [("", one_line(limit)) for limit in limits]
    if not unmeasured:
        answer = data.train[0].answer and f"  answer {_quoted(data.train[0].answer)}"
        lines.append(("example", f"{_quoted(example)}{answer}"))
    return Problems(lines, {name: len(problems) for name, problems in data.sets.items()}, lengths)


def reason_of(error: Exception) -> str:
    reason = str(error).partition(". Without a hub")[0] if isinstance(error, RetrainError) else described(error)
    return one_line(reason + ("; explain asks no hub, retrain try does" if "OfflineMode" in reason else ""))


def _measured(lengths: list[int], total: int, model: str) -> str:
    low, high = min(lengths), max(lengths)
    counted = f"{low} to {high} tokens, half of them at most {round(median(lengths))}"
    number = f"{len(lengths):,}" if len(lengths) < total else "all"
    measured = f"measured on {number} prompts with the tokenizer of {model}"
    return f"{f'{low} tokens' if low == high else counted}, {measured}"


def _limits(config: Config, training: PromptLimit, heldout: Mapping[str, PromptLimit]) -> list[str]:
    """Return a line for the limit of prompt lengths in training, and one for each different limit of a held-out set."""
    longer = "are left out" if config.data.long_prompts == "skip" else "are an error"
    places = {(training.limit, training.why): ""}
    for name, room in heldout.items():
        places.setdefault((room.limit, room.why), f" in the set {name}")
    return [
        f"at most {limit} tokens{where} ({why}): longer ones {longer}"
        for (limit, why), where in places.items()
        if limit is not None
    ]


def _tools(config: Config, folder: Path, data: Dataset) -> Tools:
    if not config.environment.tools:
        return ()
    episode = hosted(config, folder).start(data.train[0], 0)
    try:
        return episode.first.tools
    finally:
        episode.close()


def _measure(tokenizer: Any, config: Config, data: Dataset, tools: Tools) -> tuple[list[int], str]:
    """Return the token counts of prompts spread over the data, including those with the most characters, and the first
    prompt as text. Raises ModelError when the template refuses a problem."""

    def prompt(problem: Problem, section: Data) -> tuple[int, ...]:
        renderer = Renderer(tokenizer, section, config.environment.tools_prompt)
        return renderer.prompt(problem, conversation(problem, section), tools).token_ids

    lengths = []
    for problems, section in parts_of(data, config):
        chosen = [*problems[:: max(1, -(-len(problems) // MEASURED))]]
        chosen += heapq.nlargest(LONGEST_BY_CHARACTERS, problems, key=lambda problem: len(str(problem.prompt)))
        lengths += [len(prompt(problem, section)) for problem in {id(problem): problem for problem in chosen}.values()]
    return lengths, tokenizer.decode(list(prompt(data.train[0], config.data)))


def _quoted(text: str) -> str:
    if len(text) > EXAMPLE_CHARACTERS:
        half = EXAMPLE_CHARACTERS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return '"' + one_line(text) + '"'
