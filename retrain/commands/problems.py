"""What ``explain`` says of the problems: source, number, measured lengths of prompts, an example. No weights, no torch,
no network: what is not on this machine is not measured, and it says why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from retrain.commands.output import plural, visible
from retrain.errors import RetrainError

if TYPE_CHECKING:
    from retrain.config import Config

MEASURED = 500
"""Prompts that are rendered and counted, evenly over the data; more of a large data set would take minutes."""
EXAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class Problems:
    """What is known of a data set; ``why`` says, in place of the numbers, why they are not known."""

    source: str
    train: int = 0
    heldout: int = 0
    lengths: tuple[int, ...] = ()
    example: str = ""
    answer: str = ""
    notes: tuple[str, ...] = ()
    why_no_data: str = ""
    why_no_lengths: str = ""

    @property
    def typical(self) -> int | None:
        """Median length of the measured prompts, in tokens."""
        return round(median(self.lengths)) if self.lengths else None


def read_problems(config: Config, folder: Path) -> Problems:
    """The problems of a run's configuration, as far as they lie on this machine."""
    from retrain.plugins import described

    # Read once, when the hub's client is first imported; explain contacts nobody.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    from retrain.environments import load_data

    source = config.data.source
    try:
        data = load_data(
            config.data, config.evaluation.problems, config.training.max_examples, config.campaign.seed, folder
        )
    except RetrainError as error:
        reason = str(error).partition(". Without a hub")[0]
        asked = "; explain asks no hub, retrain try does" if "OfflineMode" in reason else ""
        return Problems(source, why_no_data=reason + asked)
    except Exception as error:  # a function of the user's that makes problems
        return Problems(source, why_no_data=described(error))
    known = {"train": len(data.train), "heldout": len(data.heldout), "notes": data.notes}
    first = data.train[0]
    try:
        lengths, example = _measure(config, [data.train, data.heldout])
    except RetrainError as error:
        return Problems(source, **known, answer=first.answer, why_no_lengths=str(error))
    return Problems(source, **known, answer=first.answer, lengths=lengths, example=example)


def _measure(config: Config, parts: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], str]:
    """Tokens of prompts spread over the data, the longest in characters among them; and the first as text.

    Raises ModelError when there is no tokenizer, or its template refuses a problem.
    """
    from retrain.environments.prompts import longest_prompt, render
    from retrain.errors import ModelError
    from retrain.models.tokenizer import light_tokenizer

    if config.backend.backend != "local":
        raise ModelError(f"the backend {config.backend.backend} has its own tokenizer")
    tokenizer = light_tokenizer(config.model.model, config.model.revision)
    lengths = []
    for problems in parts:
        chosen = range(0, len(problems), max(1, -(-len(problems) // MEASURED)))
        lengths += [len(render(problems[i], tokenizer, config.data).token_ids) for i in chosen]
    lengths.append(longest_prompt((problem for part in parts for problem in part), tokenizer, config.data))
    example = tokenizer.decode(list(render(parts[0][0], tokenizer, config.data).token_ids))
    return tuple(lengths), example


def problem_lines(found: Problems, model: str) -> list[tuple[str, str]]:
    """(name, text) for every line that ``explain`` prints of the problems."""
    if found.why_no_data:
        return [("data", f"{visible(found.source)}: not read: {visible(found.why_no_data)}")]
    heldout = f"{found.heldout:,} held out" if found.heldout else "none held out"
    lines = [("data", f"{visible(found.source)}: {plural_count(found.train)} to train on, {heldout}")]
    lines += [("", visible(note)) for note in found.notes]
    if found.why_no_lengths:
        return [*lines, ("prompts", f"not measured: {visible(found.why_no_lengths)}")]
    low, high, usual = min(found.lengths), max(found.lengths), found.typical
    of_all = "" if len(found.lengths) > found.train + found.heldout else f" ({len(found.lengths):,} measured)"
    lengths = f"{low} tokens" if low == high else f"{low} to {high} tokens, half of them at most {usual}"
    lines.append(("prompts", f"{lengths} as {visible(model)} counts{of_all}"))
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
