"""What ``explain`` says of the problems: source, number, measured lengths of prompts, an example. No weights, no torch,
no network: what is not on this machine is not measured, and it says why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from retrain.commands.output import plural, visible
from retrain.errors import RetrainError

if TYPE_CHECKING:
    from retrain.config import Config
    from retrain.data import Dataset
    from retrain.data.prompts import Room

MEASURED = 500
"""Prompts that are rendered and counted, evenly over the data; more of a large data set would take minutes."""
EXAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Problems:
    """What is known of a data set; ``why`` says, in place of the numbers, why they are not known.

    ``limits`` are how long prompts may be, in words; ``unfit`` is what training would refuse the problems for.
    """

    source: str
    train: int = 0
    heldout: int = 0
    lengths: tuple[int, ...] = ()
    example: str = ""
    answer: str = ""
    notes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    unfit: str = ""
    why_no_data: str = ""
    why_no_lengths: str = ""

    @property
    def typical(self) -> int | None:
        """Median length of the measured prompts, in tokens."""
        return round(median(self.lengths)) if self.lengths else None


def read_problems(configs: Sequence[Config], folder: Path) -> Problems:
    """The problems of a plan's runs, as far as they lie on this machine; all of them have the same."""
    from retrain.plugins import described

    # Read once, when the hub's client is first imported; explain contacts nobody.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from retrain.campaign.planning.asked import askable, data_of, longest_completions, rooms

    config = configs[0]
    source = config.data.source
    try:
        data = data_of(config, folder)
    except RetrainError as error:
        reason = str(error).partition(". Without a hub")[0]
        asked = "; explain asks no hub, retrain try does" if "OfflineMode" in reason else ""
        return Problems(source, why_no_data=reason + asked)
    except Exception as error:  # a function of the user's that makes problems
        return Problems(source, why_no_data=described(error))
    limits, unfit, why_no_lengths, lengths, example = (), "", "", (), ""
    longest, context = longest_completions(configs), _context(config)
    try:
        limits = _limits(config, *rooms(config, longest, context))
    except RetrainError as error:
        unfit = str(error)
    try:
        tokenizer = _tokenizer(config)
        try:
            data = data if unfit else askable(data, config, longest, tokenizer, context)
        except RetrainError as error:
            unfit = str(error)
        lengths, example = _measure(tokenizer, config, data)
    except RetrainError as error:
        why_no_lengths = str(error)
        unfit = "" if unfit == why_no_lengths else unfit
    return Problems(
        source, len(data.train), len(data.heldout), lengths, example, data.train[0].answer, data.notes, limits, unfit,
        why_no_lengths=why_no_lengths,
    )  # fmt: skip


def _context(config: Config) -> int:
    """The model's context length in tokens; 0 where it is not known."""
    from retrain.files import read_json
    from retrain.models import find_file

    local, model = config.backend.backend == "local", config.model
    path = find_file(model.model, "config.json", model.revision) if local else None
    facts = read_json(path) if path else {}
    return int((facts.get("text_config") or facts).get("max_position_embeddings") or 0)


def _tokenizer(config: Config) -> Any:
    """What training counts with. Raises ModelError where it is not on this machine."""
    from retrain.errors import ModelError
    from retrain.models.tokenizer import light_tokenizer

    if config.backend.backend != "local":
        raise ModelError(f"the backend {config.backend.backend} has its own tokenizer")
    return light_tokenizer(config.model.model, config.model.revision)


def _limits(config: Config, training: Room, heldout: Mapping[str, Room]) -> tuple[str, ...]:
    """How long prompts may be: in training, and in held-out sets where that differs."""
    longer = "are left out" if config.data.long_prompts == "skip" else "are an error"
    told = {(training.limit, training.why): ""}
    for name, room in heldout.items():
        told.setdefault((room.limit, room.why), f" in the set {name}")
    return tuple(
        f"at most {limit} tokens{where} ({why}): longer ones {longer}"
        for (limit, why), where in told.items()
        if limit is not None
    )


def _measure(tokenizer: Any, config: Config, data: Dataset) -> tuple[tuple[int, ...], str]:
    """Tokens of prompts spread over the data, the longest in characters among them; and the first as text.

    Raises ModelError when the template refuses a problem.
    """
    from retrain.data.prompts import longest_prompt, render

    parts = [(data.train, config.data), *((data.sets[each.name], each.data) for each in config.held_out)]
    lengths = []
    for problems, section in parts:
        chosen = range(0, len(problems), max(1, -(-len(problems) // MEASURED)))
        lengths += [len(render(problems[i], tokenizer, section).token_ids) for i in chosen]
    lengths.append(max(longest_prompt(problems, tokenizer, section) for problems, section in parts))
    return tuple(lengths), tokenizer.decode(list(render(data.train[0], tokenizer, config.data).token_ids))


def problem_lines(found: Problems, model: str) -> list[tuple[str, str]]:
    """(name, text) for every line that ``explain`` prints of the problems."""
    if found.why_no_data:
        return [("data", f"{visible(found.source)}: not read: {visible(found.why_no_data)}")]
    heldout = f"{found.heldout:,} held out" if found.heldout else "none held out"
    lines = [("data", f"{visible(found.source)}: {plural_count(found.train)} to train on, {heldout}")]
    lines += [("", visible(note)) for note in found.notes]
    limits = [("", visible(limit)) for limit in found.limits]
    if found.unfit:
        limits.append(("", f"training would end at once: {visible(found.unfit)}"))
    if found.why_no_lengths:
        return [*lines, ("prompts", f"not measured: {visible(found.why_no_lengths)}"), *limits]
    low, high, usual = min(found.lengths), max(found.lengths), found.typical
    of_all = "" if len(found.lengths) > found.train + found.heldout else f" ({len(found.lengths):,} measured)"
    lengths = f"{low} tokens" if low == high else f"{low} to {high} tokens, half of them at most {usual}"
    lines.append(("prompts", f"{lengths} as {visible(model)} counts{of_all}"))
    lines += limits
    lines.append(("example", one_line(found.example) + (f"  answer {one_line(found.answer)}" if found.answer else "")))
    return lines


def plural_count(number: int) -> str:
    """20,000 problems, 1 problem."""
    return plural(number, "problem") if number < 1000 else f"{number:,} problems"


def one_line(text: str) -> str:
    """A text in quotes on one line, without its middle when it is long."""
    if len(text) > EXAMPLE_CHARACTERS:
        half = EXAMPLE_CHARACTERS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return '"' + visible(text) + '"'
